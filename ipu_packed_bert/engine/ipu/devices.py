"""PopTorch's import and version check, and the devices of this machine. Only this module imports poptorch directly."""

from __future__ import annotations

import os
import re
from typing import NamedTuple, Optional

from ipu_packed_bert.engine.ipu.poprun import Instance, find_instance
from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.settings.launch_lines import IPUS_OF_A_PROGRAM, instances_for
from pack_data.reading.words import counted

try:
    import poptorch
except AssertionError as error:
    # On import, PopTorch asserts that torch is the version it was built with.
    raise ImportError(str(error)) from None

_OLDEST = (3, 3)  # SDK 3.3 is the first for torch 2; SDK 3.1 and 3.2 are for torch 1.13.1

_version = tuple(int(part) for part in re.findall(r"\d+", poptorch.__version__)[:2])
if _version < _OLDEST:
    raise ImportError(
        f"PopTorch {poptorch.__version__} is for torch 1.13.1 or older, not 2.0.1; install that of SDK 3.4"
    )


class Device(NamedTuple):
    """The device of an IPU engine."""

    kind: str  # "ipu": hardware, or a program compiled for it; "ipu_model": the simulated one
    reason: str  # one line for users
    offline: bool = False  # True: programs are compiled, and nothing runs


def find_device(config: Config, *, simulated: bool = True) -> Optional[Device]:
    """Find the device of this machine that a configuration can use; return None if there is none.

    A simulated device requested by `engine.ipu_model` or PopTorch's environment variables takes precedence over
    hardware. Otherwise the run is simulated only if ``simulated`` is true, `engine.kind` is auto and no IPU is
    attached. Each of several instances gets its IPUs or an error.

    Raises ValueError if IPUs are attached, but fewer than the configuration needs.
    """
    instance = find_instance(config)
    count = instance.instances
    wanted = instance.replicas * config.placement.ipus_per_replica
    export = config.engine.offline_export
    if export is not None:
        among = f" in {count} instances," if count > 1 else ""
        reason = (
            f"no device: compiles for {_ipus_of(config)}{among} into {instance.own_path(export)}"
        )
        return Device("ipu", reason, offline=True)
    requested_by = _model_requested_by(config)
    if requested_by is not None:
        if count > 1:
            raise ValueError(
                f"{config.path}: poprun started {count} instances, but {requested_by} requests the Poplar IPU Model, "
                "which runs in one process; start the run without poprun, or on IPUs"
            )
        reason = f"Poplar IPU Model, requested by {requested_by}: simulated, slow, no cycle counts"
        return Device("ipu_model", reason)

    if poptorch.ipuHardwareIsAvailable(wanted):
        share = _ipus_of(config, instance.replicas)
        among = f" in {count} instances of {share}" if count > 1 else ""
        return Device("ipu", f"IPU hardware: {_ipus_of(config)}{among}")
    attached = _fewer_attached(wanted)
    if attached or count > 1:
        raise ValueError(_too_few(config, instance, attached))
    if config.engine.kind == "auto" and simulated:
        return Device("ipu_model", f"Poplar IPU Model, in place of {_ipus_of(config)}")
    return None


def _model_requested_by(config: Config) -> Optional[str]:
    """Return the setting or variable that requests a simulated device, or None."""
    if _switched_on("POPTORCH_IPU_MODEL"):  # PopTorch prefers it to the small one
        return "POPTORCH_IPU_MODEL"
    if _switched_on("POPTORCH_SMALL_IPU_MODEL"):
        return "POPTORCH_SMALL_IPU_MODEL, with 4 tiles per IPU"
    return "engine.ipu_model" if config.engine.ipu_model else None


def _switched_on(variable: str) -> bool:
    return os.environ.get(variable, "").strip() not in ("", "0")


def _fewer_attached(wanted: int) -> int:
    """Return the size of the largest device with fewer than ``wanted`` IPUs that this process can attach, or 0.

    PopTorch can only be asked for a device of one size; sizes are powers of two.
    """
    number = wanted // 2
    while number and not poptorch.ipuHardwareIsAvailable(number):
        number //= 2
    return number


def _too_few(config: Config, instance: Instance, attached: int) -> str:
    """Describe too few attached IPUs for a configuration, and the remedy."""
    per_replica = config.placement.ipus_per_replica
    if instance.instances > 1:
        share = _ipus_of(config, instance.replicas)
        return (
            f"{config.path}: instance {instance.rank} of {instance.instances} needs a device of {share} of "
            f"{_ipus_of(config)}, but the largest it can attach has {counted(attached, 'IPU')}; give poprun a larger "
            f"partition (see gc-info -l) and --ipus-per-replica {per_replica}"
        )
    problem = f"{config.path}: needs {_ipus_of(config)}, but the largest device attached has {counted(attached, 'IPU')}"
    replicas = attached // per_replica
    if replicas:
        return f"{problem}; for updates of the same size there, use {config.on_replicas(replicas)}"
    return (
        f"{problem}, too few for one replica; attach more (see gc-info -l), lower placement.ipus_per_replica, or use"
        " --engine host"
    )


def _ipus_of(config: Config, replicas: int = 0) -> str:
    """Describe the IPUs of some replicas, by default all, such as "16 IPUs (4 x 4)"."""
    replicas = replicas or config.placement.replicas
    per_replica = config.placement.ipus_per_replica
    return f"{counted(replicas * per_replica, 'IPU')} ({replicas} x {per_replica})"


def refuse_too_many(config: Config, replicas: int) -> None:
    """Raise ValueError if the replicas of this process have more IPUs than one program supports."""
    ipus = replicas * config.placement.ipus_per_replica
    if ipus > IPUS_OF_A_PROGRAM:
        raise ValueError(
            f"{config.path}: this process has {ipus} IPUs, but a program supports at most {IPUS_OF_A_PROGRAM}; divide "
            f"{_ipus_of(config)} among processes: poprun --num-instances {instances_for(config)}"
            f" --num-replicas {config.placement.replicas}"
        )


class _Inventory(NamedTuple):
    poptorch: str  # version
    attached: int  # IPUs of the largest device that is no larger than the configuration needs
    architecture: Optional[int]  # 2 for Mk2 and Bow; None without hardware


def inventory(config: Config) -> _Inventory:
    """Return the devices of this machine; raise ValueError if poprun started several instances."""
    if find_instance(config).instances > 1:
        raise ValueError(
            f"{config.path}: poprun started several instances, but the check runs in one process; start it without"
            " poprun"
        )
    attached = config.ipus
    if not poptorch.ipuHardwareIsAvailable(attached):
        attached = _fewer_attached(attached)
    architecture = int(poptorch.ipuHardwareVersion()) if attached else None
    return _Inventory(poptorch.__version__, attached, architecture)
