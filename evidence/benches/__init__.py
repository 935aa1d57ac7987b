"""Benchmarks of packers, of building and of padding-free attention; each module is a command."""
