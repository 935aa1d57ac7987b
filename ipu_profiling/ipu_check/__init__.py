"""The command `ipu-check`: compile, make ten updates, compare with the plan."""
