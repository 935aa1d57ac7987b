"""Text to examples: where documents come from, WordPiece, and the examples of BERT's pre-training."""
