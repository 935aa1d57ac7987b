"""The needs of a run, computed before it starts: memory, time and the sizes of its batches."""
