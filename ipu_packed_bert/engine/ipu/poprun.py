"""The instances that poprun starts: the replicas of each, and their connection on the host.

Only this module imports popdist, and it calls nothing but what published applications call. Loads without the SDK.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any, List, Mapping, NamedTuple, Optional

from ipu_packed_bert.processes.ranks import Ranks, of_poprun
from ipu_packed_bert.settings.config import Config
from pack_data.reading.fields import one_line

_initialised: List[Any] = []  # popdist, once it is initialised


def _popdist() -> Any:
    """Initialise popdist, and with it PopTorch's collectives; return None if poprun did not start this process.

    Must be called before anything of PopTorch is set up. Raises ValueError if poprun started this process, but popdist
    does not load.
    """
    if _initialised:
        return _initialised[0]
    try:
        import popdist
    except ImportError as error:
        if not of_poprun():
            return None
        raise ValueError(
            f"poprun started this process, but popdist does not load ({error}); install the wheels of the Poplar SDK"
            " into this environment"
        ) from error
    if not popdist.isPopdistEnvSet():
        return None
    popdist.init()
    _initialised.append(popdist)
    return popdist


def options(ipus_per_replica: int) -> Any:
    """Return PopTorch options with the replicas and devices of this instance."""
    import popdist.poptorch

    return popdist.poptorch.Options(ipus_per_replica=ipus_per_replica)


class Instance(NamedTuple):
    """One of the processes that poprun started."""

    rank: int
    instances: int
    replicas: int  # in this process
    distributed: bool  # True if poprun started the process

    def own_path(self, path: str) -> str:
        """Return a path that only this instance writes, derived from one that all instances are configured with."""
        return path if self.instances == 1 else f"{path}-{self.rank}-of-{self.instances}"


def find_instance(config: Config) -> Instance:
    """Find this instance; raise ValueError if poprun has another number of replicas than the configuration."""
    replicas = config.placement.replicas
    popdist = _popdist()
    if popdist is None:
        return Instance(0, 1, replicas, False)
    total = popdist.getNumTotalReplicas()
    local = popdist.getNumLocalReplicas()
    instances = popdist.getNumInstances()
    if total != replicas:
        raise ValueError(
            f"poprun has {total} replicas, but placement.replicas is {replicas}; the loss of an update is normalised"
            f" over all of them, so use poprun --num-replicas {replicas}"
        )
    if local * instances != total:
        raise ValueError(
            f"poprun gives this instance {local} of {total} replicas, but each of {instances} instances needs the same"
            f" number; set --num-instances to a divisor of {total}"
        )
    return Instance(popdist.getInstanceIndex(), instances, local, True)


# ---- communication on the host --------------------------------------------------------------------------------------


class Instances(Ranks):
    """The processes of a run that poprun started."""

    launcher = "poprun"
    restart = "the same line with --resume-if-there does"


def instances() -> Optional[Ranks]:
    """Return the processes of the run, which are not connected yet; None if poprun started fewer than two."""
    popdist = _popdist()
    if popdist is None or popdist.getNumInstances() == 1:
        return None
    rank = popdist.getInstanceIndex()
    size = popdist.getNumInstances()
    return Instances(_meeting_point(rank, size), rank, size, rank)


_PORT = 29500  # torchrun's default


def _meeting_point(rank: int, size: int, environment: Mapping[str, str] = os.environ) -> Any:
    """Connect to the instances' store of torch.distributed at MASTER_ADDR, which is optional on one host."""
    import torch.distributed as dist

    # poprun starts processes by Open MPI, which sets their number in total and on this host.
    total = environment.get("OMPI_COMM_WORLD_SIZE")
    on_this_host = environment.get("OMPI_COMM_WORLD_LOCAL_SIZE")
    address = environment.get("MASTER_ADDR")
    port = environment.get("MASTER_PORT", str(_PORT))
    if address is None and total != on_this_host:
        raise ValueError(
            f"the {size} instances run on several hosts, but MASTER_ADDR is not set; name the first host: poprun"
            ' --mpi-local-args="-x MASTER_ADDR=HOST" ...'
        )
    address = address or "127.0.0.1"
    try:
        return dist.TCPStore(address, int(port), size, rank == 0, timedelta(minutes=10))
    except (RuntimeError, ValueError, TypeError) as error:
        problem = one_line(error, 200)
        raise ValueError(
            f"the instances cannot connect at {address}:{port} ({problem}); set MASTER_ADDR to the first host and "
            "MASTER_PORT to a free port there"
        ) from error
