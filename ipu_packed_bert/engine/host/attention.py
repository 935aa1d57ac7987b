"""Which attention the host engine takes: the fastest exact one for a device, a precision and a configuration."""

from __future__ import annotations

from typing import NamedTuple, Optional, Tuple

import torch

from ipu_packed_bert.engine.host.devices import AMPERE, arithmetic, capability
from ipu_packed_bert.settings.schema import Configuration
from ipu_packed_bert.tasks.task import Task

# On a CPU, slots of a row from which attention within each sequence pays, by type: docs/evidence.md,
# "Speed". In bfloat16 it is slower up to 1,024 slots; at 2,048 it takes as long, in less memory.
VARLEN_FROM = {torch.float32: 1024, torch.bfloat16: 2048}


class Attention(NamedTuple):
    """What was chosen."""

    kind: str  # "eager", "sdpa" or "varlen"
    kernel: bool = False  # varlen: in one call of torch's kernel, else a block for each sequence
    note: str = ""  # why it is not the kernel, where one could have expected it


def without_kernel(
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


def pick_attention(config: Configuration, task: Task, device: torch.device) -> Attention:
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
    lacking = without_kernel(
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
    if task.max_sequence_length >= VARLEN_FROM[dtype] and not engine.compile:
        return Attention("varlen")
    return Attention(dense_attention(engine.precision, device, dropout=model.attention_dropout))


def dense_attention(precision: str, device: torch.device, *, dropout: float = 0.0) -> str:
    """The faster one of those with a mask over the whole row; dropout: of attention."""
    return "eager" if device.type == "cpu" and (precision == "bfloat16" or dropout > 0.0) else "sdpa"
