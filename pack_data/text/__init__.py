"""Text to examples: where documents come from, WordPiece, and the examples of BERT's pre-training."""

EMBEDDED = "embedded"  # the corpus inside this Python, its documentation
# Ways to draw the other document of a random second segment: by its tokens, or every document alike.
DRAW_BY_TOKENS = "tokens"
DRAW_UNIFORMLY = "uniform"
DRAWS = (DRAW_BY_TOKENS, DRAW_UNIFORMLY)
