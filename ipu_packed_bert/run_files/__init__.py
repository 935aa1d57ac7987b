"""Files in the directory of a run: checkpoints, logs, and their names."""
