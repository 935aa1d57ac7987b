"""Comparisons, and pages of histograms, packings and data sets."""
