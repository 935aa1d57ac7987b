"""Benchmarks of packing: what is timed, on lengths of the paper's Wikipedia or on long rows."""
