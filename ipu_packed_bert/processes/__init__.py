"""The ranks of a run, and detection of ranks that have stopped."""
