"""Lengths of files, published histograms and distributions, and the command-line options that name them."""
