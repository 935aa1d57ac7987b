"""Measured cycles: runs, profiles and bundles of `ipu-check`."""
