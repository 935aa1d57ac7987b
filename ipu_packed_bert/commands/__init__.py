"""What people type: one module a command, each with a `main(argv)` that returns its exit status."""
