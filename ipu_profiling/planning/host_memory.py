"""Memory of a training step on a CPU or a GPU, computed from the network's sizes.

A step has weights, gradients, the optimiser's moments, the activations that the forward pass of a micro-batch keeps,
and the logits. The memory of a process on a CPU is its peak resident memory, the ru_maxrss of getrusage(2): the step,
the interpreter with torch, and freed buffers that the C library keeps. It needs no torch.
"""

from __future__ import annotations

from typing import NamedTuple

from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.settings.schema import ModelConfig

_FULL = 4  # bytes of float32

# Measured on Linux (AMD EPYC, torch 2.13, one thread) in the runs of tests/ipu_profiling/planning/test_host_memory.py.
_INTERPRETER = 332 << 20  # bytes of Python, torch, the data set and the picture of the run
# Memory of the buffers that a process keeps, in multiples of a micro-batch's activations: each micro-batch has other
# sequences, so its buffers do not fit exactly into those of the one before. Measured: 1.54 to 1.94.
_KEPT_BUFFERS = 1.75


class HostMemory(NamedTuple):
    """Bytes of a training step."""

    held: float  # weights, gradients and both moments in float32; in bfloat16 a copy of the weights
    activations: float  # of one micro-batch at the start of its backward pass
    update: float  # temporary values of the optimiser, after the activations are freed
    process: float  # peak resident memory of a process that trains on a CPU

    @property
    def most(self) -> float:
        """Peak of a step."""
        return self.held + max(self.activations, self.update)


def host_memory(
    config: Config,
    model: ModelConfig,
    *,
    parameters: int,
    slots: int,
    predictions: int,
    packing_factor: float = 1.0,
) -> HostMemory:
    """Count the bytes of a training step on the host.

    Args:
        config: a configuration of any task.
        model: the sizes of the network.
        parameters: elements of all weights.
        slots: slots of a pack, S.
        predictions: masked tokens of a pack, P.
        packing_factor: sequences of a pack.
    """
    half = config.engine.precision == "bfloat16"
    attention = config.engine.attention
    micro_batch = config.batch.micro_batch
    # The logits, the same in float32, their soft-max, its gradient and that of the logits.
    per_logit = 3 * _FULL + 2 * (2 if half else _FULL)
    logits = micro_batch * predictions * model.vocabulary_size * per_logit
    held = parameters * (4 * _FULL + (2 if half else 0))

    keys = float(slots) if attention == "eager" else 0.0
    layers = micro_batch * slots * _per_slot(config, model, keys=keys)
    # On a CPU `auto` stores the attention weights of each sequence in these cases, and dropout factors in float32.
    if attention == "auto" and (half or model.attention_dropout > 0.0):
        keys = slots / packing_factor
    per_slot = _per_slot(config, model, keys=keys, dropout_bytes=_FULL)
    on_cpu = micro_batch * slots * per_slot + logits
    return HostMemory(
        held=held,
        activations=layers + logits,
        update=2.0 * _FULL * parameters,
        process=_INTERPRETER + held + _KEPT_BUFFERS * on_cpu,
    )


def _per_slot(config: Config, model: ModelConfig, *, keys: float, dropout_bytes: int = 1) -> float:
    """Return the bytes per slot that all encoder layers keep; arguments as in `_layer_bytes`."""
    half = config.engine.precision == "bfloat16"
    layer = _layer_bytes(model, half=half, keys=keys, dropout_bytes=dropout_bytes)
    if not config.engine.recomputes(ipus=False):
        return model.num_layers * layer
    layer_input = _FULL * model.hidden_size
    return model.num_layers * layer_input + layer


def _layer_bytes(
    model: ModelConfig, *, half: bool, keys: float = 0.0, dropout_bytes: int = 1
) -> float:
    """Return the bytes per slot that one encoder layer keeps for its backward pass.

    Args:
        model: the sizes of the network.
        half: products in bfloat16 under autocast; sums, and so the inputs of LayerNorm, stay float32.
        keys: attention weights that a head keeps for each slot; 0 if they are computed again.
        dropout_bytes: bytes of a dropout mask's value.
    """
    hidden = model.hidden_size
    narrow = 2 if half else _FULL  # bytes of an operand of a product
    # Autocast copies the input for each of query, key and value; in float32 there is one.
    inputs = (3 if half else 1) * narrow * hidden
    heads = 3 * narrow * hidden
    context = 2 * narrow * hidden  # the output of attention, and its rows for the dense layer
    norms = 2 * _FULL * hidden
    # The input of the first dense layer, and both sides of GELU.
    feed_forward = narrow * hidden + 2 * narrow * model.intermediate_size
    dropout = 2 * dropout_bytes * hidden if model.hidden_dropout else 0
    per_weight = _FULL
    if half:
        per_weight += 2
    if model.attention_dropout:
        per_weight += dropout_bytes + narrow
    weights = model.num_heads * keys * per_weight
    return inputs + heads + context + norms + feed_forward + dropout + weights
