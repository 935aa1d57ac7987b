"""The machine that numbers come from, by name and in one line."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Any, Dict

from pack_data.cli.command import counted
from pack_data.cli.cores import available_cores
from pack_data.cli.timing import versions

if TYPE_CHECKING:
    import torch

# torch loads inside the functions: commands that print the machine have a --help without it.


def machine() -> str:
    """This machine in one line: processor or CUDA device, cores, versions."""
    import torch

    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    else:
        cores, threads = counted(available_cores(), "core"), counted(torch.get_num_threads(), "torch thread")
        device = f"{_processor()}, {cores}, {threads}"
    return f"{device}; Python {platform.python_version()}, torch {torch.__version__}"


def details(device: torch.device) -> Dict[str, Any]:
    """What the numbers of a device depend on, by name."""
    import torch

    from ipu_packed_bert.engine.host.devices import capability, device_name
    from ipu_packed_bert.engine.host.estimate import memory_here

    found = capability(device)
    return {
        "device": device_name(device),
        "capability": f"{found[0]}.{found[1]}" if found else None,
        "memory_bytes": memory_here(device),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        **versions("transformers", "flash_attn"),
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.machine()
