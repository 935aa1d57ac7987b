"""Choice of the host engine's attention: the fastest exact one for a device, a precision and a configuration."""

from __future__ import annotations

from typing import Dict, NamedTuple, Optional, Sequence, Tuple

import torch

from ipu_packed_bert.engine.host.devices import AMPERE, arithmetic, capability
from ipu_packed_bert.model.varlen import SDPA_BLOCKS, BlockRule
from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.settings.schema import ModelConfig
from ipu_packed_bert.tasks.task import Task
from pack_data.store.attention_blocks import AttentionBlocks

# CPU nanoseconds per call, copied value, score and multiplication, forward and backward: (with a mask over whole rows,
# within each sequence), keyed by data type and by eager attention. Fitted once (non-negative least squares of relative
# errors; three head counts and widths, seven row shapes, one to four sequences per row) on an AMD EPYC with AVX-512 and
# AMX, torch 2.13, one thread, by benchmarks/attention_costs.py of commit 9de1442. They are constants so that a run does
# not depend on a clock, and the choice is the same on every machine.
COSTS: Dict[Tuple[torch.dtype, bool], Tuple[Tuple[float, ...], Tuple[float, ...]]] = {
    (torch.float32, False): ((273e3, 8.26, 2.47, 0.161), (156e3, 18.9, 2.50, 0.129)),
    (torch.float32, True): ((0.0, 3.25, 17.2, 0.182), (255e3, 17.4, 15.7, 0.0901)),
    (torch.bfloat16, True): ((1634e3, 6.33, 2.44, 0.0917), (870e3, 9.00, 3.29, 0.0512)),
}
# Nanoseconds per multiplication in the other products of a layer, elementwise work included: the cost of padding if
# rows are computed whole.
LAYER_COSTS = {torch.float32: 0.0701, torch.bfloat16: 0.0365}
# Blocks must take less than this fraction of the mask's time: a reserve for errors of the fit.
MARGIN = 0.95
# Blocks of at least this many tokens use torch's operator in every data type: eager attention stores all scores,
# quadratic in the tokens.
OPERATOR_FROM = 1024
# Slots from which torch's variable-length kernel is faster than a mask. On an H100 with torch 2.11, BERT-base in
# bfloat16, the mask takes 0.97 of the kernel's time at 512 slots, 0.98 at 1,024, and 1.11 at 4,096 (docs/gpu.md).
KERNEL_FROM = 2048


def block_rule(dtype: torch.dtype, model: ModelConfig, device: torch.device) -> BlockRule:
    """Return the rule that decides when and how a device computes attention in blocks of one sequence.

    Args:
        dtype: data type of the products.
        model: sizes of the network.
        device: device of the engine.

    Returns:
        A rule that depends on lengths, widths and the data type only.
    """
    if device.type != "cpu":
        return SDPA_BLOCKS
    hidden = model.hidden_size
    multiplications_per_slot = 4 * hidden**2 + 2 * hidden * model.intermediate_size

    def eager(tokens: int, dropout: float) -> bool:
        if dropout > 0.0:
            return True
        return dtype == torch.bfloat16 and tokens < OPERATOR_FROM

    def pays(blocks: AttentionBlocks, rows: int, slots: int) -> bool:
        mask_costs, block_costs = COSTS[dtype, eager(0, model.attention_dropout)]
        whole_rows = blocks._replace(groups=((rows, slots),))
        padding = rows * slots - sum(count * length for count, length in blocks.groups)
        mask_time = MARGIN * _nanoseconds(mask_costs, whole_rows, model)
        padding_time = LAYER_COSTS[dtype] * multiplications_per_slot * padding
        return _nanoseconds(block_costs, blocks, model) < mask_time + padding_time

    return BlockRule(eager, pays)


def _nanoseconds(costs: Sequence[float], blocks: AttentionBlocks, model: ModelConfig) -> float:
    """Return the estimated nanoseconds of attention over blocks, for one entry of `COSTS`."""
    tokens = sum(count * length for count, length in blocks.groups)
    scores = model.num_heads * sum(count * length * length for count, length in blocks.groups)
    width = model.hidden_size // model.num_heads
    work = (len(blocks.groups), tokens * model.num_heads * width, scores, scores * width)
    return sum(cost * number for cost, number in zip(costs, work))


class Attention(NamedTuple):
    """The attention of an engine."""

    kind: str  # "eager", "sdpa" or "varlen"
    kernel: bool = False  # varlen: one call of torch's kernel instead of a block per sequence
    mask: bool = False  # varlen: micro-batches may use a mask over whole rows if that is faster
    note: str = ""  # for users: why the kernel is not used, or the alternative


def _without_kernel(
    device: torch.device,
    dtype: torch.dtype,
    *,
    dropout: float,
    head_size: int,
    depth: Optional[int],
) -> str:
    """Return why torch's variable-length kernel (`torch.nn.attention.varlen`) cannot be used; empty if it can.

    ``dtype`` is the type of query, key and value. ``depth`` D, the maximum sequences per pack, sizes the boundaries.
    """
    version = capability(device)
    if version is None:
        return "not available on CPUs"
    if version < AMPERE:
        needed = f"{AMPERE[0]}.{AMPERE[1]}"
        return f"needs compute capability {needed}, this GPU has {version[0]}.{version[1]}"
    if dtype not in (torch.float16, torch.bfloat16):
        return "supports half types only"
    if dropout > 0.0:
        return f"does not support attention dropout, which is {dropout:g}"
    if head_size % 8 or head_size > 256:
        return f"needs head sizes that are multiples of 8 and at most 256, this is {head_size}"
    if depth is None:
        return "needs the maximum number of sequences per pack"
    try:
        from torch.nn.attention.varlen import varlen_attn  # noqa: F401
    except ImportError:  # before torch 2.10
        return f"not available in torch {torch.__version__}"
    return ""


def pick_attention(config: Config, task: Task, device: torch.device) -> Attention:
    """Choose the fastest exact attention for a device, unless `engine.attention` names one.

    On CUDA this is the variable-length kernel for long rows, which skips what a mask would discard and has static
    shapes, or else scaled_dot_product_attention, whose kernels accept the additive mask. On a CPU with AVX-512 and AMX
    (torch 2.13) scaled_dot_product_attention is 2.5 times as fast as eager attention in float32; in bfloat16 its
    backward pass is slower, and with dropout it falls back to eager code.

    Args:
        config: settings of the run.
        task: the task to train.
        device: device of the engine.

    Returns:
        The attention, with a note for users.

    Raises:
        ValueError: engine.attention is varlen and engine.compile is true, but the kernel is not available: the shapes
            of blocks change in every batch.
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
                "engine.attention varlen cannot be used with engine.compile true: without torch's variable-length "
                f"kernel ({lacking}), shapes change in every batch; disable one of them"
            )
        return Attention("varlen", not lacking)
    if engine.attention != "auto":
        return Attention(engine.attention)
    if device.type == "cuda":
        if lacking:
            return Attention("sdpa", note=f"variable-length kernel: {lacking}")
        if config.data.max_sequence_length < KERNEL_FROM:
            return Attention("sdpa")
        return Attention("varlen", True)
    dense = dense_attention(engine.precision, device, dropout=model.attention_dropout)
    if engine.compile:
        return Attention(dense)
    return Attention("varlen", mask=True, note=f"or {dense}, depending on lengths")


def dense_attention(precision: str, device: torch.device, *, dropout: float = 0.0) -> str:
    """Return the faster attention for rows with a mask, "eager" or "sdpa".

    Args:
        precision: `engine.precision`.
        device: device of the engine.
        dropout: attention dropout, a probability.
    """
    slow_operator = precision == "bfloat16" or dropout > 0.0
    return "eager" if device.type == "cpu" and slow_operator else "sdpa"
