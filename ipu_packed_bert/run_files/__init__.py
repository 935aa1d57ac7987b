"""What a run leaves in its folder: checkpoints, logs and names."""
