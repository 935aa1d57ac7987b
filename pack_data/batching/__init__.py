"""Batches of examples of different lengths: who shares a batch (plans), in what form (collators), what that does to them."""
