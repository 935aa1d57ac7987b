"""What a weight update costs beyond its pipeline: on the IPUs, on the links between them, and on the host.

Every replica has gradients of its own. They are summed over a ring of replicas (reduce-scatter, then all-gather): each
IPU sends 2 (n - 1) / n of its gradients' bytes in 2 (n - 1) steps for n replicas. Up to 64 IPUs are one pod, whose
IPU-Links make the ring; where it spans several pods it passes gateway links, and goes as fast as these. The optimiser
state comes from streaming memory and goes back there where it is kept off chip. Then the host takes over: it ends the
call, fetches what each replica returns and starts the next one. In all published runs a call is one weight update, so
that the cost of a call and that of an update cannot be told apart.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import ceil
from typing import NamedTuple

from ipu_packed_bert.cycles.layout import Cost
from ipu_packed_bert.cycles.parameters import Parameters
from ipu_packed_bert.cycles.target import HALF, Target


class IpuUpdate(NamedTuple):
    """One IPU's share of a weight update."""

    cost: Cost  # of the optimiser, before the calibrated parameters are applied
    parameters: float  # elements that lie on the IPU
    tensors: int  # that these are in
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
        """All of it but the host's part: what a counter of the IPU sees."""
        return self.total - self.host

    @property
    def total(self) -> float:
        return sum(getattr(self, field.name) for field in fields(self))


def _pods(replicas: int, ipus: int, target: Target) -> int:
    """How many pods `replicas` of `ipus` IPUs each take."""
    return ceil(replicas * ipus / target.ipus_per_pod)


def _ring(gradients: IpuUpdate, replicas: int, ipus: int, target: Target) -> UpdateCost:
    """Cost the sum of an IPU's gradients over the replicas, of `ipus` IPUs each."""
    if replicas == 1:
        return UpdateCost()
    sent = 2 * (replicas - 1) / replicas * gradients.parameters * HALF
    steps = target.seconds(gradients.tensors * 2 * (replicas - 1) * target.global_sync_cycles)
    if _pods(replicas, ipus, target) == 1:
        return UpdateCost(links=sent / target.link_bytes_per_second, steps=steps)
    return UpdateCost(gateways=sent / target.gateway_bytes_per_second, steps=steps)


def ipu_cost(
    update: IpuUpdate, replicas: int, ipus: int, target: Target, parameters: Parameters
) -> UpdateCost:
    """Of one IPU, without the host."""
    summed = _ring(update, replicas, ipus, target)
    return UpdateCost(
        optimizer=target.seconds(parameters.cycles(update.cost)),
        links=summed.links,
        gateways=summed.gateways,
        steps=summed.steps,
        streaming=update.streamed_bytes / target.streaming_bytes_per_second,
    )


def host_seconds(replicas: int, ipus: int, target: Target, *, replica_seconds: float) -> float:
    """Of the host, between two calls; there is one process for each pod, as in the published runs.

    replica_seconds: for each replica that a process serves, one after the other (calibrated).
    """
    return replica_seconds * ceil(replicas / _pods(replicas, ipus, target))
