"""Which device a configuration finds here, and which part of the run this process has."""

from __future__ import annotations

import os
from typing import NamedTuple, Optional

from ipu_packed_bert.config import Config
from ipu_packed_bert.engine.ipu.sdk import poptorch


class Device(NamedTuple):
    kind: str  # "ipu": hardware, or a program compiled for it; "ipu_model": the simulated one
    reason: str  # one line for people
    offline: bool = False


def find_device(config: Config) -> Optional[Device]:
    """The device that `config` can have on this machine, None without one.

    A simulated device that was asked for, by `engine.ipu_model` or POPTORCH_IPU_MODEL=1, wins over hardware; one that
    nobody asked for is taken only where `engine.kind` is auto.
    """
    if config.engine.offline_export is not None:
        return Device(
            "ipu", f"no device: compiles for {ipus_of(config)} into {config.engine.offline_export}", offline=True
        )
    if config.engine.ipu_model or os.environ.get("POPTORCH_IPU_MODEL") == "1":
        return Device("ipu_model", "Poplar IPU Model, as asked for: simulated, slow, without cycle counts")
    if poptorch.ipuHardwareIsAvailable(config.ipus):
        return Device("ipu", f"IPU hardware: {ipus_of(config)}")
    if config.engine.kind == "auto":
        return Device("ipu_model", f"Poplar IPU Model, for want of {ipus_of(config)}")
    return None


def ipus_of(config: Config) -> str:
    """ "16 IPUs (4 x 4)": all replicas' IPUs, in words."""
    placement = config.placement
    plural = "" if config.ipus == 1 else "s"
    return f"{config.ipus} IPU{plural} ({placement.replicas} x {placement.ipus_per_replica})"


class Instance(NamedTuple):
    """This process among those that poprun started; a process has `replicas` of the run's replicas."""

    rank: int
    instances: int
    replicas: int
    distributed: bool


def find_instance(config: Config) -> Instance:
    """Raises ValueError where poprun was asked for another number of replicas than the configuration."""
    replicas = config.placement.replicas
    try:
        import popdist
    except ImportError:
        return Instance(0, 1, replicas, False)
    if not popdist.isPopdistEnvSet():
        return Instance(0, 1, replicas, False)
    if popdist.getNumTotalReplicas() != replicas:
        raise ValueError(
            f"poprun has {popdist.getNumTotalReplicas()} replicas, placement.replicas is {replicas}; the loss of an "
            f"update"
            " is normalised over all of them, so give poprun --num-replicas the configured number"
        )
    return Instance(popdist.getInstanceIndex(), popdist.getNumInstances(), popdist.getNumLocalReplicas(), True)
