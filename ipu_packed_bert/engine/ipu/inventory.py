"""What this process finds of the SDK and of IPUs, for `packed-bert ipu-check`."""

from __future__ import annotations

from typing import NamedTuple, Optional

from ipu_packed_bert.engine.ipu.devices import fewer_attached, model_asked_by
from ipu_packed_bert.engine.ipu.poprun import find_instance
from ipu_packed_bert.engine.ipu.sdk import poptorch
from ipu_packed_bert.settings.schema import Configuration


class _Inventory(NamedTuple):
    poptorch: str  # its version
    attached: int  # IPUs of the largest device, of those no larger than the configuration's
    architecture: Optional[int]  # of the hardware, 2 for Mk2 and Bow; None without any
    model_asked_by: Optional[str]  # what asks for a simulated device


def inventory(config: Configuration) -> _Inventory:
    """Raises ValueError in one of several instances that poprun started."""
    if find_instance(config).instances > 1:
        raise ValueError(f"{config.path}: poprun started several instances; the check is one process, without poprun")
    wanted = config.ipus
    attached = wanted if poptorch.ipuHardwareIsAvailable(wanted) else fewer_attached(wanted)
    architecture = int(poptorch.ipuHardwareVersion()) if attached else None
    return _Inventory(poptorch.__version__, attached, architecture, model_asked_by(config))
