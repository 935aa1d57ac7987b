"""The instances that poprun starts: which part of the run each one has, and where they meet on the host.

The only module that knows popdist, and no more of it than published applications call.  Loads without the SDK.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any, List, Mapping, NamedTuple, Optional

from ipu_packed_bert.processes.ranks import Ranks, of_poprun
from ipu_packed_bert.settings.config import Config

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
    """One of the processes that poprun started, with `replicas` of the run's replicas."""

    rank: int
    instances: int
    replicas: int
    distributed: bool  # poprun started it

    def own(self, path: str) -> str:
        """Return the path that only this instance writes, in place of a file or directory that all instances name."""
        return path if self.instances == 1 else f"{path}-{self.rank}-of-{self.instances}"


def find_instance(config: Config) -> Instance:
    """Find this instance; raise ValueError if poprun was given another number of replicas than the configuration."""
    replicas = config.placement.replicas
    popdist = begun()
    if popdist is None:
        return Instance(0, 1, replicas, False)
    total, own, instances = (
        popdist.getNumTotalReplicas(),
        popdist.getNumLocalReplicas(),
        popdist.getNumInstances(),
    )
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


class Instances(Ranks):
    launcher, restart = "poprun", "the same line with --resume-if-there does"


def instances() -> Optional[Ranks]:
    """Return the processes of the run, which have not met yet, or None if poprun started one."""
    popdist = begun()
    if popdist is None or popdist.getNumInstances() == 1:
        return None
    rank, size = popdist.getInstanceIndex(), popdist.getNumInstances()
    return Instances(_meeting_point(rank, size), rank, size, rank)


_PORT = 29500


def _meeting_point(rank: int, size: int, environment: Mapping[str, str] = os.environ) -> Any:
    """Connect to a store of torch.distributed that all instances reach, at MASTER_ADDR, which one host need not set."""
    import torch.distributed as dist

    # Open MPI, by which poprun starts processes, says how many it started in all and on this host.
    everywhere, here = (environment.get(f"OMPI_COMM_WORLD_{each}SIZE") for each in ("", "LOCAL_"))
    address, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT", str(_PORT))
    if address is None and everywhere != here:
        raise ValueError(
            f'{size} instances on several hosts; name the first host: poprun --mpi-local-args="-x MASTER_ADDR=HOST" ...'
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
