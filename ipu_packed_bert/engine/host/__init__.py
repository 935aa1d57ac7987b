"""The host engine: tasks on packs in plain PyTorch, on CPUs and CUDA devices."""

from ipu_packed_bert.engine.host.engine import VARLEN_FROM, HostEngine, pick_attention

__all__ = ["VARLEN_FROM", "HostEngine", "pick_attention"]
