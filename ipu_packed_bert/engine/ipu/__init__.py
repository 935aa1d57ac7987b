"""The packed BERT on Graphcore IPUs through PopTorch 3.4.  No module outside this folder imports the SDK.

The network stays the plain one of `model/`; `program` puts into an instance of it what the device needs differently,
blocks and stages come from `placement.py`, and PopTorch makes one program of forward pass, backward pass and update.
A call of that program takes a whole global batch: rows per call = micro-batch x gradient accumulation x replicas.
Gradients are reduced by their mean over those micro-batches, for which the loss is scaled (`model/loss.py`).

`feed`, `poprun` and `state` load without the SDK.
"""
