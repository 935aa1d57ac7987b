"""Batches of examples of different lengths: which examples share a batch (plans), its arrays (collators), its cost."""
