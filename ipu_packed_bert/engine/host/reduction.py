"""Gradients of several processes, added up once an update."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, ContextManager, List

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Reduction:
    """The training program of a network, whose gradients are the means over the processes after the last micro-batch.

    torch's DistributedDataParallel does it. One all-reduce of a flat gradient after the last backward pass has the same
    sums and the same bytes; this one sends a bucket while the backward pass still makes the next, and its buckets are
    the gradients, so that they take no second memory (`forget`). What speaks against it elsewhere does not hold here:
    all shapes are constant, each process has as many micro-batches, and every parameter has a gradient in each of them,
    also where all packs are empty, so nothing unused is looked for. Float64 sums differ from one process's by their
    order alone.
    """

    def __init__(
        self, network: nn.Module, program: Callable[[List[torch.Tensor]], Any], device: torch.device, *, compiled: bool
    ):
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if compiled:
            # A compiled program is one graph, which DistributedDataParallel's buckets must not cut.
            from torch._dynamo import config as dynamo

            dynamo.optimize_ddp = False
        # Numbers and objects travel by the default group, gloo: it needs no device, and notices at once who has ended.
        group = dist.new_group(backend="nccl") if device.type == "cuda" else None
        self._reduced = DistributedDataParallel(
            _Called(network, program), gradient_as_bucket_view=True, process_group=group
        )

    def __call__(self, fields: List[torch.Tensor]) -> Any:
        return self._reduced(*fields)

    def after(self, *, last: bool) -> ContextManager:
        """While entered, gradients stay in this process, unless these are the last of the update."""
        return contextlib.nullcontext() if last else self._reduced.no_sync()


class _Called(nn.Module):
    """A network that is run by its program, which may be compiled."""

    def __init__(self, network: nn.Module, program: Callable[[List[torch.Tensor]], Any]):
        super().__init__()
        self.network = network
        self._program = program

    def forward(self, *fields: torch.Tensor) -> Any:
        return self._program(list(fields))
