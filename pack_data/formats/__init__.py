"""Readers and writers of other file formats, one module for each; none needs TensorFlow."""
