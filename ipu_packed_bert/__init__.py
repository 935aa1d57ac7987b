"""Pre-training of packed BERT on one static engine: Graphcore IPUs through PopTorch, or plain torch on a host."""
