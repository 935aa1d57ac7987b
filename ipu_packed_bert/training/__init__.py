"""A run from its first update to its summary: loop, log, page, predictions."""
