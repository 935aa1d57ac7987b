"""What is timed beside what, and on which machine."""
