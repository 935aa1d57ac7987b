"""The cost of a weight update beyond its pipeline: on the IPUs, on the links between them, and on the host.

The gradients of n replicas are summed over a ring (reduce-scatter, then all-gather): each IPU sends 2 (n - 1) / n of
its gradients' bytes in 2 (n - 1) steps. Up to 64 IPUs are one pod, whose IPU-Links form the ring; a ring over several
pods is as fast as the gateway links between them. Optimiser state that is kept off chip is read from streaming memory
and written back. Then the host ends the call, fetches the results of each replica and starts the next call. In all
published runs a call is one weight update, so the cost of a call cannot be distinguished from that of an update.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import ceil
from typing import NamedTuple

from ipu_profiling.cycles.layout import Cost
from ipu_profiling.cycles.parameters import Parameters
from ipu_profiling.cycles.target import HALF, Target


class IpuUpdate(NamedTuple):
    """One IPU's share of a weight update."""

    cost: Cost  # of the optimiser, before the calibrated parameters are applied
    parameters: float  # elements on the IPU
    tensors: int  # of parameters
    streamed_bytes: float  # optimiser state from and to streaming memory


@dataclass(frozen=True)
class UpdateCost:
    """Seconds of one weight update beyond its pipeline, by cause."""

    optimizer: float = 0.0  # arithmetic on chip
    links: float = 0.0  # gradients over the IPU-Links of a pod
    gateways: float = 0.0  # gradients over the gateway links between pods
    steps: float = 0.0  # syncs of the steps of the ring
    streaming: float = 0.0  # optimiser state from and to streaming memory
    host: float = 0.0  # between two calls

    @property
    def device(self) -> float:
        """Seconds without the host's part, as a cycle counter of the IPU measures them."""
        return self.total - self.host

    @property
    def total(self) -> float:
        """Seconds of all causes."""
        return sum(getattr(self, field.name) for field in fields(self))


def _pods(replicas: int, ipus: int, target: Target) -> int:
    """Return the number of pods for `replicas` of `ipus` IPUs each."""
    return ceil(replicas * ipus / target.ipus_per_pod)


def _ring(gradients: IpuUpdate, replicas: int, ipus: int, target: Target) -> UpdateCost:
    """Cost the sum of an IPU's gradients over the replicas, of `ipus` IPUs each."""
    if replicas == 1:
        return UpdateCost()
    sent = 2 * (replicas - 1) / replicas * gradients.parameters * HALF  # bytes
    steps = target.seconds(gradients.tensors * 2 * (replicas - 1) * target.global_sync_cycles)
    if _pods(replicas, ipus, target) == 1:
        return UpdateCost(links=sent / target.link_bytes_per_second, steps=steps)
    return UpdateCost(gateways=sent / target.gateway_bytes_per_second, steps=steps)


def ipu_cost(
    update: IpuUpdate, replicas: int, ipus: int, target: Target, parameters: Parameters
) -> UpdateCost:
    """Return the cost of a weight update on one IPU, without the host."""
    summed = _ring(update, replicas, ipus, target)
    return UpdateCost(
        optimizer=target.seconds(parameters.cycles(update.cost)),
        links=summed.links,
        gateways=summed.gateways,
        steps=summed.steps,
        streaming=update.streamed_bytes / target.streaming_bytes_per_second,
    )


def host_seconds(replicas: int, ipus: int, target: Target, *, replica_seconds: float) -> float:
    """Return the seconds of the host between two calls, with one process per pod as in the published runs.

    Args:
        replicas: replicas of the whole machine.
        ipus: IPUs of a replica.
        target: the IPU.
        replica_seconds: calibrated seconds for each replica of a process, which serves them one after the other.
    """
    return replica_seconds * ceil(replicas / _pods(replicas, ipus, target))
