"""Models: policies, feature networks and how their hidden states are read."""
