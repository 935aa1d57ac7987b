"""The packed BERT on Graphcore IPUs through PopTorch 3.4. No other package imports the SDK.

The network is the plain one of `model/`. `program` replaces the modules of an instance that the device needs in another
form, `settings/placement.py` assigns blocks and stages, and PopTorch compiles forward pass, backward pass and update to
one program. A call of that program takes a global batch: rows = micro-batch x gradient accumulation x replicas.
Gradients are averaged over those micro-batches, for which the loss is scaled (`model/loss.py`).

`executable`, `feed`, `poprun` and `state` load without the SDK.
"""
