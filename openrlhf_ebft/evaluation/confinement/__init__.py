"""What a process gives up before it runs code that nobody has read. Standard library only; Linux."""
