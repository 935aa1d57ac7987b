"""From configurations and cycle counts to predictions and tables, for Graphcore IPUs."""
