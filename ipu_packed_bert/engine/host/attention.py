"""Which attention the host engine takes: the fastest exact one for a device, a precision and a configuration."""

from __future__ import annotations

from typing import Dict, NamedTuple, Optional, Sequence, Tuple

import torch

from ipu_packed_bert.engine.host.devices import AMPERE, arithmetic, capability
from ipu_packed_bert.model.blocks import AttentionBlocks
from ipu_packed_bert.model.varlen import SDPA_BLOCKS, BlockRule
from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.settings.schema import ModelConfig
from ipu_packed_bert.tasks.task import Task


class AttentionWork(NamedTuple):
    """What attention over some blocks does, on which its time depends."""

    calls: int
    values: int  # of all tokens, which are copied
    scores: int  # between tokens of one block, of all heads
    products: int  # multiplications of a score


def _work_of(blocks: AttentionBlocks, heads: int, width: int) -> AttentionWork:
    """heads: of the attention; width: of a head."""
    tokens = sum(count * length for count, length in blocks.groups)
    scores = heads * sum(count * length * length for count, length in blocks.groups)
    return AttentionWork(len(blocks.groups), tokens * heads * width, scores, scores * width)


# Nanoseconds on a CPU of a call, a value, a score and a multiplication, forward and backward: with a mask over whole
# rows, and within each sequence. By type, and by whether plain products compute it. Measured and fitted once (least
# squares of relative errors, none negative; three numbers and widths of heads, seven shapes of rows, one to four
# sequences a row) on an AMD EPYC with AVX-512 and AMX, torch 2.13, one thread; the script is
# benchmarks/attention_costs.py of commit 9de1442. A run must not depend on a clock, so they are constants, and what
# follows from them is the same on every machine.
COSTS: Dict[Tuple[torch.dtype, bool], Tuple[Tuple[float, ...], Tuple[float, ...]]] = {
    (torch.float32, False): ((273e3, 8.26, 2.47, 0.161), (156e3, 18.9, 2.50, 0.129)),
    (torch.float32, True): ((0.0, 3.25, 17.2, 0.182), (255e3, 17.4, 15.7, 0.0901)),
    (torch.bfloat16, True): ((1634e3, 6.33, 2.44, 0.0917), (870e3, 9.00, 3.29, 0.0512)),
}
# The same of a multiplication in a layer's other products, with all that is computed besides: what padding costs where
# it goes through them, as it does under a mask.
LAYER_COSTS = {torch.float32: 0.0701, torch.bfloat16: 0.0365}
# Of a mask's time: less must be left, so that an error of the fit costs nothing.
MARGIN = 0.95
# Tokens of a block from which torch's operator computes it in any type: plain products keep a square of scores.
OPERATOR_FROM = 1024


def block_rule(dtype: torch.dtype, model: ModelConfig, device: torch.device) -> BlockRule:
    """How a device computes attention of this type in blocks: a function of lengths, width and type alone."""
    if device.type != "cpu":
        return SDPA_BLOCKS
    heads, width = model.num_heads, model.hidden_size // model.num_heads
    products = 4 * model.hidden_size**2 + 2 * model.hidden_size * model.intermediate_size  # of a slot, in a layer

    def eager(tokens: int, dropout: float) -> bool:
        return (dtype == torch.bfloat16 or dropout > 0.0) and (dropout > 0.0 or tokens < OPERATOR_FROM)

    def pays(blocks: AttentionBlocks, rows: int, slots: int) -> bool:
        mask, within = COSTS[dtype, eager(0, model.attention_dropout)]
        whole = blocks._replace(groups=((rows, slots),))
        padding = rows * slots - sum(count * length for count, length in blocks.groups)
        return _nanoseconds(within, blocks) < (
            MARGIN * _nanoseconds(mask, whole) + LAYER_COSTS[dtype] * products * padding
        )

    def _nanoseconds(costs: Sequence[float], blocks: AttentionBlocks) -> float:
        return sum(cost * part for cost, part in zip(costs, _work_of(blocks, heads, width)))

    return BlockRule(eager, pays)


class Attention(NamedTuple):
    """What was chosen."""

    kind: str  # "eager", "sdpa" or "varlen"
    kernel: bool = False  # varlen: in one call of torch's kernel, else a block for each sequence
    mask: bool = False  # varlen: or a mask over whole rows, for micro-batches where that takes less time
    note: str = ""  # why it is not the kernel, or what else it may be


def _without_kernel(
    device: torch.device, dtype: torch.dtype, *, dropout: float, head_size: int, depth: Optional[int]
) -> str:
    """Why torch's variable-length kernel (`torch.nn.attention.varlen`) cannot be used; empty where it can.

    dtype: of query, key and value. depth: D, the most sequences of a row, on which the length of the boundaries
    depends.
    """
    found: Optional[Tuple[int, int]] = capability(device)
    if found is None:
        return "CPUs have none"
    if found < AMPERE:
        return f"needs compute capability {AMPERE[0]}.{AMPERE[1]}, this is {found[0]}.{found[1]}"
    if dtype not in (torch.float16, torch.bfloat16):
        return "half types only"
    if dropout > 0.0:
        return f"no attention dropout, which is {dropout:g}"
    if head_size % 8 or head_size > 256:
        return f"heads of a multiple of 8 and at most 256, these are of {head_size}"
    if depth is None:
        return "needs the number of sequences in a pack"
    try:
        from torch.nn.attention import varlen
    except ImportError:  # before torch 2.10
        return f"torch {torch.__version__} has none"
    return "" if hasattr(varlen, "varlen_attn") else f"torch {torch.__version__} has none"


def pick_attention(config: Config, task: Task, device: torch.device) -> Attention:
    """The attention that is fastest and exact on this device; `engine.attention` decides where it isn't "auto".

    On CUDA: the variable-length kernel, which skips what a mask would throw away and has static shapes, else
    scaled_dot_product_attention with the mask, whose kernels take an additive one.
    Measured on a CPU with AVX-512 and AMX, torch 2.13: in float32 scaled_dot_product_attention is 2.5 times as fast as
    eager attention; in bfloat16 its backward pass is slower, and with dropout it falls back to eager code anyway.
    Raises ValueError for varlen without the kernel and with engine.compile: the blocks have other shapes in every
    batch.
    """
    engine, model = config.engine, task.model
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
                "engine.attention: varlen does not go with engine.compile: true, as its blocks have other shapes in "
                f"every batch (torch's variable-length kernel, which has not: {lacking}); switch one off"
            )
        return Attention("varlen", not lacking)
    if engine.attention != "auto":
        return Attention(engine.attention)
    if device.type == "cuda":
        return Attention("sdpa", note=f"variable-length kernel: {lacking}") if lacking else Attention("varlen", True)
    dense = dense_attention(engine.precision, device, dropout=model.attention_dropout)
    return Attention(dense) if engine.compile else Attention("varlen", mask=True, note=f"or {dense}, by lengths")


def dense_attention(precision: str, device: torch.device, *, dropout: float = 0.0) -> str:
    """The faster one of those with a mask over the whole row; dropout: of attention."""
    return "eager" if device.type == "cpu" and (precision == "bfloat16" or dropout > 0.0) else "sdpa"
