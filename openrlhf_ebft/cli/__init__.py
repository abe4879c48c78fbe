"""One file per command: parse, then import the heavy part, then run."""
