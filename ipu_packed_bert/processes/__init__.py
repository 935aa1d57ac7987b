"""The ranks of one run, and how they notice a rank that stopped."""
