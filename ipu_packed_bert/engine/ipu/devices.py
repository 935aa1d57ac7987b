"""PopTorch, loaded and checked here only; the device that a configuration gets, and this process's part of the run."""

from __future__ import annotations

import os
import re
from typing import NamedTuple, Optional

from ipu_packed_bert.engine.ipu.poprun import Instance, find_instance
from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.settings.launch_lines import IPUS_OF_A_PROGRAM, instances_for

try:
    import poptorch
except (
    AssertionError
) as error:  # on import, PopTorch asserts that torch is the version it was built with
    raise ImportError(str(error)) from None

_OLDEST = (3, 1)  # the names used here exist since PopTorch 3.1; they are checked against 3.4

if tuple(int(part) for part in re.findall(r"\d+", poptorch.__version__)[:2]) < _OLDEST:
    raise ImportError(f"PopTorch {poptorch.__version__} is too old, 3.4 is wanted")


class Device(NamedTuple):
    kind: str  # "ipu": hardware, or a program compiled for it; "ipu_model": the simulated one
    reason: str  # one line for people
    offline: bool = False


def find_device(config: Config, *, simulated: bool = True) -> Optional[Device]:
    """Find the device that `config`, of any task, can use on this machine; return None without one.

    A simulated device that was asked for, by `engine.ipu_model` or PopTorch's environment variables, wins over
    hardware; one that nobody asked for is taken only where `engine.kind` is auto, no IPU at all is attached and
    `simulated`. Raises ValueError, in one line, where IPUs are attached but fewer than the configuration wants.

    One of several instances looks for its own IPUs alone, and takes nothing else.
    """
    instance = find_instance(config)
    if instance.instances > 1:
        return _device_of_instance(config, instance)
    if config.engine.offline_export is not None:
        return Device(
            "ipu",
            f"no device: compiles for {_ipus_of(config)} into {config.engine.offline_export}",
            offline=True,
        )
    asked_by = _model_asked_by(config)
    if asked_by is not None:
        return Device(
            "ipu_model",
            f"Poplar IPU Model, as asked for by {asked_by}: simulated, slow, without cycle counts",
        )
    if poptorch.ipuHardwareIsAvailable(config.ipus):
        return Device("ipu", f"IPU hardware: {_ipus_of(config)}")
    attached = _fewer_attached(config.ipus)
    if attached:
        raise ValueError(_too_few(config, attached))
    if config.engine.kind == "auto" and simulated:
        return Device("ipu_model", f"Poplar IPU Model, for want of {_ipus_of(config)}")
    return None


def _device_of_instance(config: Config, instance: Instance) -> Device:
    placement, number = config.placement, instance.instances
    if config.engine.offline_export is not None:
        file = instance.own(config.engine.offline_export)
        return Device(
            "ipu",
            f"no device: compiles for {_ipus_of(config)} in {number} instances, into {file}",
            True,
        )
    asked_by = _model_asked_by(config)
    if asked_by is not None:
        raise ValueError(
            f"{config.path}: poprun started {number} instances, and {asked_by} asks for the Poplar IPU Model, which is "
            "one process: start it without poprun, or on IPUs"
        )
    own = instance.replicas * placement.ipus_per_replica
    words = (
        f"{own} IPU{'' if own == 1 else 's'} ({instance.replicas} x {placement.ipus_per_replica})"
    )
    if poptorch.ipuHardwareIsAvailable(own):
        return Device("ipu", f"IPU hardware: {_ipus_of(config)} in {number} instances of {words}")
    attached = _fewer_attached(own)
    raise ValueError(
        f"{config.path}: instance {instance.rank} of {number} finds no device of {words}, its part of "
        f"{_ipus_of(config)}; "
        + (f"the largest it can attach has {attached}: " if attached else "it can attach none: ")
        + "give poprun a partition with as many IPUs (see gc-info -l) and --ipus-per-replica "
        f"{placement.ipus_per_replica}"
    )


def _model_asked_by(config: Config) -> Optional[str]:
    """Return the setting or variable that requests a simulated device, or None."""
    if _switched_on("POPTORCH_IPU_MODEL"):  # wins over the small one in PopTorch
        return "POPTORCH_IPU_MODEL"
    if _switched_on("POPTORCH_SMALL_IPU_MODEL"):
        return "POPTORCH_SMALL_IPU_MODEL, with 4 tiles an IPU"
    return "engine.ipu_model" if config.engine.ipu_model else None


def _switched_on(variable: str) -> bool:
    return os.environ.get(variable, "").strip() not in ("", "0")


def _fewer_attached(wanted: int) -> int:
    """Return the IPUs of the largest device below `wanted` IPUs that this process can attach, or 0.

    PopTorch only says whether there is a device of a number of IPUs; these numbers are powers of two.
    """
    number = wanted // 2
    while number and not poptorch.ipuHardwareIsAvailable(number):
        number //= 2
    return number


def _too_few(config: Config, attached: int) -> str:
    """Describe too few attached IPUs for a configuration, and the way out."""
    are = "1 IPU is" if attached == 1 else f"{attached} IPUs are"
    found = f"{config.path}: {are} attached, wanted are {_ipus_of(config)}"
    replicas = attached // config.placement.ipus_per_replica
    if replicas:
        return f"{found}; {config.on_replicas(replicas)} fits them, with updates as large as before"
    return (
        f"{found}; one replica alone is too large for them: attach more (see gc-info -l), take fewer"
        " placement.ipus_per_replica, or --engine host"
    )


def _ipus_of(config: Config) -> str:
    """Describe the IPUs of all replicas, such as "16 IPUs (4 x 4)"."""
    placement = config.placement
    plural = "" if config.ipus == 1 else "s"
    return f"{config.ipus} IPU{plural} ({placement.replicas} x {placement.ipus_per_replica})"


def refuse_too_many(config: Config, replicas: int) -> None:
    """Raise ValueError where the program of this process, with `replicas` of the run's, has more IPUs than it can."""
    ipus = replicas * config.placement.ipus_per_replica
    if ipus > IPUS_OF_A_PROGRAM:
        raise ValueError(
            f"{config.path}: this process has {ipus} IPUs, a program at most {IPUS_OF_A_PROGRAM}; share "
            f"{_ipus_of(config)} out among processes: poprun --num-instances {instances_for(config)}"
            f" --num-replicas {config.placement.replicas}"
        )


class _Inventory(NamedTuple):
    poptorch: str  # its version
    attached: int  # IPUs of the largest device, of those no larger than the configuration's
    architecture: Optional[int]  # of the hardware, 2 for Mk2 and Bow; None without any
    model_asked_by: Optional[str]  # what asks for a simulated device


def inventory(config: Config) -> _Inventory:
    """Return the devices of this machine; raise ValueError in one of several instances that poprun started."""
    if find_instance(config).instances > 1:
        raise ValueError(
            f"{config.path}: poprun started several instances; the check is one process, without poprun"
        )
    wanted = config.ipus
    attached = wanted if poptorch.ipuHardwareIsAvailable(wanted) else _fewer_attached(wanted)
    architecture = int(poptorch.ipuHardwareVersion()) if attached else None
    return _Inventory(poptorch.__version__, attached, architecture, _model_asked_by(config))
