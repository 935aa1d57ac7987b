"""Engines: what makes weight updates, and where. `choose_engine` looks for a device, `build_engine` takes it.

The modules that need a device's software are imported only in the branch that uses them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Optional

from ipu_packed_bert.processes.ranks import ONE, Processes, Ranks
from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.tasks.task import Task

if TYPE_CHECKING:
    from ipu_packed_bert.engine.ipu.devices import Device


class EngineChoice(NamedTuple):
    kind: str  # "ipu" (hardware), "ipu_model" (the simulated one) or "host"
    reason: str  # one line for people
    device: Optional[Device] = None  # that was found, None for the host
    cuda: bool = False  # the host's device is a GPU

    @property
    def hardware(self) -> bool:
        return self.kind == "ipu"


def _ipu_modules():
    """(devices, engine) of `engine/ipu/`. Raises ValueError, in one line, where the SDK is missing or does not load."""
    try:
        from ipu_packed_bert.engine.ipu import devices, engine
    except ImportError as error:
        raise ValueError(
            f"engine.kind ipu: the Poplar SDK is missing ({error}); enable SDK 3.4 and install its wheels into a"
            " Python 3.8 environment, or use --engine host"
        ) from error
    return devices, engine


def choose_engine(config: Config, *, simulated: bool = True) -> EngineChoice:
    """What `engine.kind` means on this machine: IPU hardware, else the Poplar IPU Model, else CUDA, else the CPU.

    config: of any task. simulated: whether `auto` may take an IPU Model that nobody asked for.
    Raises ValueError, in one line, where the configuration insists on IPUs and there are none, and where IPUs are
    attached but too few: a run that was meant for hardware is not simulated, which would take months.
    """
    if config.engine.kind == "host":
        return _host(config, "as configured")
    try:
        devices, _ = _ipu_modules()
    except ValueError as error:
        if config.engine.kind == "ipu":
            raise
        # A package that is there but does not load (built for another torch, say) is not the same as none.
        missing = isinstance(error.__cause__, ModuleNotFoundError) and error.__cause__.name == "poptorch"
        return _host(config, "no Poplar SDK here" if missing else str(error.__cause__))
    found = devices.find_device(config, simulated=simulated)
    if found is not None:
        return EngineChoice(found.kind, found.reason, found)
    if config.engine.kind == "ipu":
        raise ValueError(
            "engine.kind ipu: no IPU is attached; attach the partition (see gc-info -l), set POPTORCH_IPU_MODEL=1"
            " (or POPTORCH_SMALL_IPU_MODEL=1, 4 tiles) for the simulated device, or use --engine host"
        )
    return _host(config, "the Poplar SDK is here but no IPU is attached")


def _host(config: Config, why: str) -> EngineChoice:
    from ipu_packed_bert.engine.host.devices import device_name, find_device

    device = find_device(config.engine)
    where = f"CUDA, {device_name(device)}" if device.type == "cuda" else "the CPU"
    return EngineChoice("host", f"host engine on {where}: {why}", cuda=device.type == "cuda")


def build_engine(
    config: Config, task: Task, choice: EngineChoice, *, packing_factor: float, processes: Processes = ONE
):
    """The engine that `choose_engine` picked, for batches of `task`.

    Raises ValueError where several processes were started by the launcher of the other engine.
    """
    if choice.kind == "host":
        from ipu_packed_bert.engine.host import HostEngine

        if processes.launcher == "poprun":
            raise ValueError(
                f"poprun started {processes.size} instances and the engine is the host's ({choice.reason}), whose "
                "launcher is torchrun; start it without poprun, or on IPUs"
            )
        return HostEngine(config, task, packing_factor=packing_factor, processes=processes)
    if processes.launcher == "torchrun":
        raise ValueError(
            f"torchrun started {processes.size} processes and the engine is that of IPUs, whose launcher is poprun; "
            "start one process, or use --engine host"
        )
    _, engine = _ipu_modules()
    return engine.IpuEngine(config, task, choice.device, packing_factor=packing_factor, processes=processes)


def instances() -> Optional[Ranks]:
    """What `processes.joined` asks for where poprun started this process."""
    from ipu_packed_bert.engine.ipu import poprun

    return poprun.instances()
