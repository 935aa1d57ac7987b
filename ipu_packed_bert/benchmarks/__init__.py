"""Benchmark of packed, unpacked and other layouts of the same sequences."""
