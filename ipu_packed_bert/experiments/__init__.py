"""Experiments that show what packing changes and what it does not: `python -m ipu_packed_bert.experiments NAME`."""
