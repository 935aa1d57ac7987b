"""The commands of packed-bert: one module each, with a `main(argv)` that returns its exit status."""
