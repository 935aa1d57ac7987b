"""Causal Hugging Face models on padding-free batches: collators, a probe for leaks, and updates normalised by their tokens."""
