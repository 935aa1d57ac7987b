"""Pre-training BERT on packed sequences: the same loss and gradients as unpacked, in about half the time."""

__version__ = "0.1.0"
