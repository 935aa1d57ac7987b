"""Engines make the weight updates. `choose_engine` looks for a device, `build_engine` opens it.

Modules that need a device's software are imported only in the branch that uses them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Optional

from ipu_packed_bert.processes.ranks import ONE, Processes, Ranks
from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.tasks.task import Task

if TYPE_CHECKING:
    from ipu_packed_bert.engine.ipu.devices import Device


class EngineChoice(NamedTuple):
    """The kind of engine that a configuration gets on this machine."""

    kind: str  # "ipu" (hardware), "ipu_model" (simulated) or "host"
    reason: str  # one line for users
    device: Optional[Device] = None  # None for the host
    cuda: bool = False  # the host's device is a GPU

    @property
    def hardware(self) -> bool:
        """True for IPU hardware."""
        return self.kind == "ipu"


_TO_HOST = ", or use --engine host"  # way out of errors, for commands that have this option


def ipu_modules(way_out: str = _TO_HOST):
    """Import and return `engine.ipu.devices` and `engine.ipu.engine`; raise ValueError if the SDK does not load."""
    try:
        from ipu_packed_bert.engine.ipu import devices, engine
    except ImportError as error:
        raise ValueError(
            f"engine.kind ipu: the Poplar SDK is missing ({error}); enable SDK 3.4 and install its wheels into a"
            f" Python 3.8 environment{way_out}"
        ) from error
    return devices, engine


def choose_engine(
    config: Config, *, simulated: bool = True, way_out: str = _TO_HOST
) -> EngineChoice:
    """Choose IPU hardware, else the Poplar IPU Model, else CUDA, else the CPU, as `engine.kind` permits.

    Args:
        config: settings of any task.
        simulated: whether `auto` may choose the IPU Model.
        way_out: end of the errors about a missing SDK or IPU.

    Returns:
        The kind of the engine, and the reason for the choice.

    Raises:
        ValueError: the configuration requires IPUs and there are none, or IPUs are attached but too few. A run meant
            for hardware is not simulated, which would take months.
    """
    if config.engine.kind == "host":
        return _host(config, "as configured")
    try:
        devices, _ = ipu_modules(way_out)
    except ValueError as error:
        if config.engine.kind == "ipu":
            raise
        # A package that does not load, for example because it was built for another torch, is not a missing one.
        cause = error.__cause__
        if isinstance(cause, ModuleNotFoundError) and cause.name == "poptorch":
            return _host(config, "no Poplar SDK here")
        return _host(config, str(cause))
    device = devices.find_device(config, simulated=simulated)
    if device is not None:
        return EngineChoice(device.kind, device.reason, device)
    if config.engine.kind == "ipu":
        raise ValueError(
            "engine.kind ipu: no IPU is attached; attach the partition (see gc-info -l), set POPTORCH_IPU_MODEL=1"
            f" (or POPTORCH_SMALL_IPU_MODEL=1 for 4 tiles) to simulate one{way_out}"
        )
    return _host(config, "the Poplar SDK is installed but no IPU is attached")


def _host(config: Config, reason: str) -> EngineChoice:
    from ipu_packed_bert.engine.host.devices import device_name, find_device

    device = find_device(config.engine)
    cuda = device.type == "cuda"
    name = f"CUDA, {device_name(device)}" if cuda else "the CPU"
    return EngineChoice("host", f"host engine on {name}: {reason}", cuda=cuda)


def build_engine(
    config: Config,
    task: Task,
    choice: EngineChoice,
    *,
    packing_factor: float,
    processes: Processes = ONE,
):
    """Build the engine that `choose_engine` chose.

    Args:
        config: settings of the run.
        task: the task to train.
        choice: result of `choose_engine`.
        packing_factor: sequences per pack.
        processes: the processes that make the updates together.

    Returns:
        A `HostEngine` or an `IpuEngine`.

    Raises:
        ValueError: the processes were started by the launcher of the other engine, or the device cannot run the
            configuration.
    """
    if choice.kind == "host":
        from ipu_packed_bert.engine.host import HostEngine

        if processes.launcher == "poprun":
            raise ValueError(
                f"poprun started {processes.size} instances, but this run uses the host engine ({choice.reason}), "
                "which needs torchrun; start the run without poprun, or on IPUs"
            )
        return HostEngine(config, task, packing_factor=packing_factor, processes=processes)
    if processes.launcher == "torchrun":
        raise ValueError(
            f"torchrun started {processes.size} processes, but this run uses IPUs, which need poprun; start one"
            " process, or use --engine host"
        )
    _, engine = ipu_modules()
    return engine.IpuEngine(
        config, task, choice.device, packing_factor=packing_factor, processes=processes
    )


def instances() -> Optional[Ranks]:
    """Return the processes that poprun started, for `processes.ranks.joined`."""
    from ipu_packed_bert.engine.ipu import poprun

    return poprun.instances()
