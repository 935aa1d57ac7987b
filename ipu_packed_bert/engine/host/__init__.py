"""The host engine: tasks on packs in plain PyTorch, on CPUs and CUDA devices."""

from ipu_packed_bert.engine.host.attention import pick_attention
from ipu_packed_bert.engine.host.engine import HostEngine

__all__ = ["HostEngine", "pick_attention"]
