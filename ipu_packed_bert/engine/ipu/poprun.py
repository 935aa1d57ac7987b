"""The instances that poprun starts: which part of the run each one has, and by what they exchange numbers on the host.

The only module that knows popdist and Horovod, and no more of them than published applications call.  Loads without
the SDK.
"""

from __future__ import annotations

import contextlib
import os
import time
from datetime import timedelta
from typing import Any, Iterator, List, Mapping, NamedTuple, Optional

from ipu_packed_bert.processes.ranks import Ranks, is_lost_connection, of_poprun
from ipu_packed_bert.settings.schema import Configuration
from pack_data.cli.command import NotFinite

_begun: List[Any] = []  # popdist, once it is ready


def begun() -> Any:
    """popdist, ready to be asked, and with it PopTorch's collectives; None in a process that poprun did not start.

    To be called before anything of PopTorch is set up.  Raises ValueError where poprun's process has no popdist.
    """
    if _begun:
        return _begun[0]
    try:
        import popdist
    except ImportError as error:
        if not of_poprun():
            return None
        raise ValueError(
            f"poprun started this process, and popdist does not load ({error}); install the Poplar SDK's wheels into "
            "this environment"
        ) from error
    if not popdist.isPopdistEnvSet():
        return None
    popdist.init()
    _begun.append(popdist)
    return popdist


def options(ipus_per_replica: int) -> Any:
    """PopTorch's options of an instance: how many replicas it has, and which devices they are."""
    import popdist.poptorch

    return popdist.poptorch.Options(ipus_per_replica=ipus_per_replica)


class Instance(NamedTuple):
    """This process among those that poprun started; it has `replicas` of the run's replicas."""

    rank: int
    instances: int
    replicas: int
    distributed: bool  # poprun started it

    def own(self, path: str) -> str:
        """What this instance alone writes in the place of a file or folder that all are told of."""
        return path if self.instances == 1 else f"{path}-{self.rank}-of-{self.instances}"


def find_instance(config: Configuration) -> Instance:
    """Raises ValueError where poprun was asked for another number of replicas than the configuration."""
    replicas = config.placement.replicas
    popdist = begun()
    if popdist is None:
        return Instance(0, 1, replicas, False)
    total, own, instances = popdist.getNumTotalReplicas(), popdist.getNumLocalReplicas(), popdist.getNumInstances()
    if total != replicas:
        raise ValueError(
            f"poprun has {total} replicas, placement.replicas is {replicas}; the loss of an update is normalised over"
            " all of them, so give poprun --num-replicas the configured number"
        )
    if own * instances != total:
        raise ValueError(
            f"poprun gives this one of {instances} instances {own} of {total} replicas; each needs as many: give "
            f"--num-instances a number that divides {total}"
        )
    return Instance(popdist.getInstanceIndex(), instances, own, True)


# ---- what instances exchange on the host ----------------------------------------------------------------------------


def instances() -> Optional[Ranks]:
    """The processes of the run, yet to meet; None where poprun started one."""
    popdist = begun()
    if popdist is None or popdist.getNumInstances() == 1:
        return None
    rank, size = popdist.getInstanceIndex(), popdist.getNumInstances()
    try:
        import horovod.torch as horovod
    except ImportError:
        return GlooInstances(meeting_point(rank, size), rank, size, rank)
    horovod.init()
    return _HorovodInstances(horovod, rank, size)


_AGAIN = "the same line with --resume-if-there does"


class GlooInstances(Ranks):
    """By torch.distributed: where Horovod, which the SDK brings as a wheel of its own, is not installed."""

    launcher, means, restart = "poprun", "gloo, as Horovod is not installed", _AGAIN


class _HorovodInstances(Ranks):
    """By Horovod.

    It has no store in which an error could be left for the others: an instance that fails says so and ends, and its
    launcher, which is MPI's, ends the others.
    """

    launcher, means, restart = "poprun", "Horovod", _AGAIN

    def __init__(self, horovod: Any, rank: int, size: int):
        super().__init__(None, rank, size, rank)
        self._horovod = horovod

    def meet(self) -> None:
        import torch

        order = self._horovod.allgather(torch.tensor([self.rank])).tolist()
        if order != list(range(self.size)):
            raise ValueError(
                f"Horovod's processes are poprun's instances {order}, in this order; they must be the same ones in "
                "order: start the run with poprun alone"
            )

    def _sum(self, values: Any) -> Any:
        return self._horovod.allreduce(values, average=False)

    def _all(self, values: Any) -> List[Any]:
        return list(self._horovod.allgather(values).reshape(self.size, -1))

    def _from_first(self, values: Any) -> Any:
        return self._horovod.broadcast(values, root_rank=0)

    @contextlib.contextmanager
    def first_alone(self) -> Iterator[None]:
        if self.rank:
            self.summed(())
        yield
        if not self.rank:
            self.summed(())

    def leave(self) -> None:
        self.summed(())

    def ended(self, error: BaseException) -> Optional[int]:
        if not self.rank:
            return None
        if isinstance(error, NotFinite):
            return 3  # all found it in the same sum; only rank 0 knows what was saved
        if is_lost_connection(error):
            return 1
        time.sleep(1.0)  # the same mistake is found by all: rank 0 says it, and the launcher ends this process
        return None


_PORT = 29500


def meeting_point(rank: int, size: int, environment: Mapping[str, str] = os.environ) -> Any:
    """A store of torch.distributed that all instances reach, at MASTER_ADDR; on one host that need not be said."""
    import torch.distributed as dist

    # Open MPI, by which poprun starts processes, says how many it started in all and on this host.
    everywhere, here = (environment.get(f"OMPI_COMM_WORLD_{each}SIZE") for each in ("", "LOCAL_"))
    address, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT", str(_PORT))
    if address is None and everywhere != here:
        raise ValueError(
            f"{size} instances on several hosts, and Horovod is not installed: install the SDK's wheel of it, or name "
            'the first host: poprun --mpi-local-args="-x MASTER_ADDR=HOST" ...'
        )
    address = address or "127.0.0.1"
    try:
        return dist.TCPStore(address, int(port), size, rank == 0, timedelta(minutes=10))
    except (RuntimeError, ValueError, TypeError) as error:
        problem = " ".join(str(error).split())[:200]
        raise ValueError(
            f"the instances do not meet at {address}:{port} ({problem}); set MASTER_ADDR to the first host and "
            "MASTER_PORT to a port that is free there"
        ) from error
