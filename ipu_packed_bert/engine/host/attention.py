"""Choice of the host engine's attention: the fastest exact one for a device, a precision and a configuration."""

from __future__ import annotations

from typing import Dict, NamedTuple, Optional, Sequence, Tuple

import torch

from ipu_packed_bert.engine.host.devices import AMPERE, arithmetic, capability
from ipu_packed_bert.model.blocks import AttentionBlocks
from ipu_packed_bert.model.varlen import SDPA_BLOCKS, BlockRule
from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.settings.schema import ModelConfig
from ipu_packed_bert.tasks.task import Task

# Nanoseconds on a CPU of a call, a copied value, a score and a multiplication, forward and backward: (with a mask over
# whole rows, within each sequence), by type and by whether plain products compute it. Measured and fitted once (least
# squares of relative errors, none negative; three numbers and widths of heads, seven shapes of rows, one to four
# sequences a row) on an AMD EPYC with AVX-512 and AMX, torch 2.13, one thread; the script is
# benchmarks/attention_costs.py of commit 9de1442. A run must not depend on a clock, so they are constants, and the
# choice is the same on every machine.
COSTS: Dict[Tuple[torch.dtype, bool], Tuple[Tuple[float, ...], Tuple[float, ...]]] = {
    (torch.float32, False): ((273e3, 8.26, 2.47, 0.161), (156e3, 18.9, 2.50, 0.129)),
    (torch.float32, True): ((0.0, 3.25, 17.2, 0.182), (255e3, 17.4, 15.7, 0.0901)),
    (torch.bfloat16, True): ((1634e3, 6.33, 2.44, 0.0917), (870e3, 9.00, 3.29, 0.0512)),
}
# Nanoseconds of a multiplication in the other products of a layer, with everything computed beside them: the cost of
# padding under a mask.
LAYER_COSTS = {torch.float32: 0.0701, torch.bfloat16: 0.0365}
# Blocks must take less than this share of the mask's time, so that an error of the fit costs nothing.
MARGIN = 0.95
# Tokens of a block from which torch's operator computes it in any type: plain products keep a square of scores.
OPERATOR_FROM = 1024


def block_rule(dtype: torch.dtype, model: ModelConfig, device: torch.device) -> BlockRule:
    """Return how a device computes attention in blocks, which depends on lengths, width and type alone.

    Args:
        dtype: type of the products.
        model: sizes of the network.
        device: device of the engine.
    """
    if device.type != "cpu":
        return SDPA_BLOCKS
    layer_products = (
        4 * model.hidden_size**2 + 2 * model.hidden_size * model.intermediate_size
    )  # of a slot

    def eager(tokens: int, dropout: float) -> bool:
        if dropout > 0.0:
            return True
        return dtype == torch.bfloat16 and tokens < OPERATOR_FROM

    def pays(blocks: AttentionBlocks, rows: int, slots: int) -> bool:
        mask_costs, block_costs = COSTS[dtype, eager(0, model.attention_dropout)]
        whole_rows = blocks._replace(groups=((rows, slots),))
        padding = rows * slots - sum(count * length for count, length in blocks.groups)
        mask_time = MARGIN * _nanoseconds(mask_costs, whole_rows, model)
        padding_time = LAYER_COSTS[dtype] * layer_products * padding
        return _nanoseconds(block_costs, blocks, model) < mask_time + padding_time

    return BlockRule(eager, pays)


def _nanoseconds(costs: Sequence[float], blocks: AttentionBlocks, model: ModelConfig) -> float:
    """Return the time of attention over blocks, with one of `COSTS`."""
    tokens = sum(count * length for count, length in blocks.groups)
    scores = model.num_heads * sum(count * length * length for count, length in blocks.groups)
    width = model.hidden_size // model.num_heads
    work = (len(blocks.groups), tokens * model.num_heads * width, scores, scores * width)
    return sum(cost * number for cost, number in zip(costs, work))


class Attention(NamedTuple):
    """The attention of an engine."""

    kind: str  # "eager", "sdpa" or "varlen"
    kernel: bool = False  # varlen: one call of torch's kernel, else a block for each sequence
    # True if varlen may use a mask over whole rows for micro-batches in which that takes less time.
    mask: bool = False
    note: str = ""  # why it is not the kernel, or the alternative


def _without_kernel(
    device: torch.device,
    dtype: torch.dtype,
    *,
    dropout: float,
    head_size: int,
    depth: Optional[int],
) -> str:
    """Return why torch's variable-length kernel (`torch.nn.attention.varlen`) cannot be used; empty if it can.

    ``dtype`` is that of query, key and value; ``depth`` D, the most sequences in a row, decides the length of the
    boundaries.
    """
    version = capability(device)
    if version is None:
        return "CPUs have none"
    if version < AMPERE:
        return (
            f"needs compute capability {AMPERE[0]}.{AMPERE[1]}, this is {version[0]}.{version[1]}"
        )
    if dtype not in (torch.float16, torch.bfloat16):
        return "half types only"
    if dropout > 0.0:
        return f"no attention dropout, which is {dropout:g}"
    if head_size % 8 or head_size > 256:
        return f"head sizes that are multiples of 8 and at most 256, this is {head_size}"
    if depth is None:
        return "needs the number of sequences in a pack"
    try:
        from torch.nn.attention import varlen
    except ImportError:  # before torch 2.10
        return f"torch {torch.__version__} has none"
    return "" if hasattr(varlen, "varlen_attn") else f"torch {torch.__version__} has none"


def pick_attention(config: Config, task: Task, device: torch.device) -> Attention:
    """Choose the fastest exact attention for a device, unless `engine.attention` names one.

    On CUDA this is the variable-length kernel, which skips what a mask would discard and has static shapes; else
    scaled_dot_product_attention, whose kernels take the additive mask. On a CPU with AVX-512 and AMX (torch 2.13)
    scaled_dot_product_attention is 2.5 times as fast as eager attention in float32; in bfloat16 its backward pass is
    slower, and with dropout it falls back to eager code.

    Args:
        config: settings of the run.
        task: what is trained.
        device: device of the engine.

    Raises:
        ValueError: engine.attention is varlen and engine.compile is true, but there is no kernel: blocks have other
            shapes in every batch.
    """
    engine = config.engine
    model = task.model
    dtype = arithmetic(engine.precision, device)
    lacking = _without_kernel(
        device,
        dtype,
        dropout=model.attention_dropout,
        head_size=model.hidden_size // model.num_heads,
        depth=task.max_sequences_per_pack,
    )
    if engine.attention == "varlen":
        if engine.compile and lacking:
            raise ValueError(
                "engine.attention varlen cannot be used with engine.compile true, because its blocks have other shapes "
                f"in every batch (torch's variable-length kernel, which has static shapes: {lacking}); disable one"
            )
        return Attention("varlen", not lacking)
    if engine.attention != "auto":
        return Attention(engine.attention)
    if device.type == "cuda" and lacking:
        return Attention("sdpa", note=f"variable-length kernel: {lacking}")
    if device.type == "cuda":
        return Attention("varlen", True)
    dense = dense_attention(engine.precision, device, dropout=model.attention_dropout)
    if engine.compile:
        return Attention(dense)
    return Attention("varlen", mask=True, note=f"or {dense}, by lengths")


def dense_attention(precision: str, device: torch.device, *, dropout: float = 0.0) -> str:
    """Return the faster attention with a mask over whole rows, "eager" or "sdpa".

    Args:
        precision: `engine.precision`.
        device: device of the engine.
        dropout: dropout of the attention.
    """
    slow_operator = precision == "bfloat16" or dropout > 0.0
    return "eager" if device.type == "cpu" and slow_operator else "sdpa"
