"""What a run needs, computed before it starts."""
