"""Offline sequence packing: text to examples to a length histogram to a packing to a packed data set.

Each packer runs on its own: `python -m pack_data.optimal --help`.  Nothing is imported here, so that those commands start
without loading what they do not use.
"""
