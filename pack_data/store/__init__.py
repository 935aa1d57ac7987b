"""A packed data set on disk."""
