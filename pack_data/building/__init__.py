"""A build from inside: its stages, where their work runs, and how a data set replaces another."""
