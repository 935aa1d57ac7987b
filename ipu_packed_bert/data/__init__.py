"""Packed data sets, and the global batches that are read from them."""
