"""Memory of a training step on a CPU or a GPU, computed from the network's sizes.

The count includes weights, gradients, the optimiser's moments, the activations that the forward pass of a micro-batch
keeps, and the logits; it excludes buffers of kernels and fragmentation. It needs no torch.
"""

from __future__ import annotations

from typing import NamedTuple

from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.settings.schema import ModelConfig

_FULL = 4  # bytes of float32

# Bytes of a process on a CPU in addition to a step's: torch's libraries, buffers of kernels, fragmentation. Measured
# with BERT-base at 512 slots, torch 2.13 on Linux: 350 to 500 MiB.
TORCH = 420 << 20


class HostMemory(NamedTuple):
    """Bytes of a training step."""

    held: float  # weights, gradients and both moments in float32; in bfloat16 a copy of the weights
    activations: float  # of one micro-batch at the start of its backward pass
    update: float  # temporary values of the optimiser, after the activations are freed

    @property
    def most(self) -> float:
        """Peak of a step."""
        return self.held + max(self.activations, self.update)


def host_memory(
    config: Config, model: ModelConfig, *, parameters: int, slots: int, predictions: int
) -> HostMemory:
    """Count the bytes of a training step on the host.

    Args:
        config: a configuration of any task.
        model: the sizes of the network.
        parameters: elements of all weights.
        slots: slots of a pack, S.
        predictions: masked tokens of a pack, P.
    """
    half = config.engine.precision == "bfloat16"
    layers = model.num_layers
    layer = _layer_bytes(model, slots=slots, half=half, eager=config.engine.attention == "eager")
    per_slot = layers * layer
    if config.engine.recomputes(ipus=False):
        layer_input = _FULL * model.hidden_size
        per_slot = layers * layer_input + layer
    # The logits, the same in float32, their soft-max, its gradient and that of the logits.
    per_logit = 3 * _FULL + 2 * (2 if half else _FULL)
    per_pack = slots * per_slot + predictions * model.vocabulary_size * per_logit
    return HostMemory(
        held=parameters * (4 * _FULL + (2 if half else 0)),
        activations=config.batch.micro_batch * per_pack,
        update=2.0 * _FULL * parameters,
    )


def _layer_bytes(model: ModelConfig, *, slots: int, half: bool, eager: bool = False) -> float:
    """Return the bytes per slot that one encoder layer keeps for its backward pass.

    half: products in bfloat16 under autocast; sums, and so the inputs of LayerNorm, stay float32.
    eager: attention that keeps its weights, a row of `slots` for each head.
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
    dropout = 2 * hidden if model.hidden_dropout else 0  # one byte a value
    weights = 0
    if eager:
        per_weight = _FULL
        if half:
            per_weight += 2
        if model.attention_dropout:
            per_weight += 1 + narrow
        weights = model.num_heads * slots * per_weight
    return inputs + heads + context + norms + feed_forward + dropout + weights
