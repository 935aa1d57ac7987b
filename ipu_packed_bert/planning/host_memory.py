"""Memory of a training step on a CPU or a GPU, computed from the network's sizes.

Counted are weights, gradients, the optimiser's moments, what the forward pass of a micro-batch keeps for the backward
pass, and the logits. Not counted are buffers of kernels and what the allocator cannot use again; loads no torch.
"""

from __future__ import annotations

from typing import NamedTuple

from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.settings.schema import ModelConfig

_FULL = 4  # bytes of float32

# Bytes of a process on a CPU beside a step's: torch's libraries, buffers of kernels, what is freed and not used again.
# Measured with BERT-base at 512 slots, torch 2.13 on Linux: 350 to 500 MiB.
TORCH = 420 << 20


class HostMemory(NamedTuple):
    """Bytes of a training step."""

    held: float  # weights, gradients and both moments in float32; in bfloat16 a copy of the weights
    activations: float  # of one micro-batch, when its backward pass begins
    update: float  # temporary values of the optimiser, when there are no activations

    @property
    def most(self) -> float:
        return self.held + max(self.activations, self.update)


def host_memory(
    config: Config, model: ModelConfig, *, parameters: int, slots: int, predictions: int
) -> HostMemory:
    """`config`: of any task, with its sections `engine` and `batch`; `predictions`: masked slots of a pack, P."""
    half = config.engine.precision == "bfloat16"
    rows, layers = config.batch.micro_batch, model.num_layers
    layer = _layer_bytes(model, slots=slots, half=half, eager=config.engine.attention == "eager")
    kept = _FULL * model.hidden_size  # the input of a layer
    each_slot = layers * kept + layer if config.engine.recomputes(ipus=False) else layers * layer
    # The logits, the same in float32, their soft-max, its gradient and that of the logits.
    each_logit = 3 * _FULL + 2 * (2 if half else _FULL)
    return HostMemory(
        held=parameters * (4 * _FULL + (2 if half else 0)),
        activations=rows * (slots * each_slot + predictions * model.vocabulary_size * each_logit),
        update=2.0 * _FULL * parameters,
    )


def _layer_bytes(model: ModelConfig, *, slots: int, half: bool, eager: bool = False) -> float:
    """Bytes that one encoder layer keeps for its backward pass, for each slot.

    half: products in bfloat16 under autocast; sums, and so the inputs of LayerNorm, stay float32.
    eager: attention that keeps its weights, a row of `slots` for each head.
    """
    hidden, inner, narrow = model.hidden_size, model.intermediate_size, 2 if half else _FULL
    # Autocast makes a copy of the input for each of query, key and value; in float32 there is one.
    inputs = (3 if half else 1) * narrow * hidden
    heads = 3 * narrow * hidden
    context = 2 * narrow * hidden  # as attention made it, and in rows for the dense layer
    norms = 2 * _FULL * hidden
    inner_values = (
        narrow * hidden + 2 * narrow * inner
    )  # input of the first dense layer, and both sides of GELU
    dropout = 2 * hidden if model.hidden_dropout else 0  # one byte a value
    weights = 0.0
    if eager:
        weights = (
            model.num_heads
            * slots
            * (_FULL + (2 if half else 0) + (1 + narrow if model.attention_dropout else 0))
        )
    return inputs + heads + context + norms + inner_values + dropout + weights
