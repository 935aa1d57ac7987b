"""What a whole run takes on this CPU or GPU: memory, computed, and hours, from a matrix product measured here."""

from __future__ import annotations

import os
from typing import List

import torch

from ipu_packed_bert.engine.host.devices import arithmetic, clock_of, device_name, numerics_of
from ipu_packed_bert.planning.plan import RunPlan, host_needs
from ipu_packed_bert.settings.schema import EngineConfig
from pack_data.cli.timing import seconds_in_turn

# Of a plain matrix product's rate: what training steps of large transformers reach, with layer norms, dropout, copies.
_SHARE = 0.5
_GIB = float(1 << 30)


def product_rate(device: torch.device, engine: EngineConfig, *, size: int = 0) -> float:
    """Multiply-adds a second of a square matrix product in `engine.precision`, the best of a few."""
    size = size or (4096 if device.type == "cuda" else 1024)
    factor = torch.ones(size, size, dtype=arithmetic(engine.precision, device), device=device)
    with numerics_of(engine, device):
        times = seconds_in_turn({"product": lambda: torch.mm(factor, factor)}, 3, clock_of(device))
    return size**3 / float(times["product"].min())


def memory_here(device: torch.device) -> int:
    """Bytes of the device, or of this computer; 0 where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 0


def whole_lines(made: RunPlan, device: torch.device, *, rate: float) -> List[str]:
    """Memory and hours of the run, as people read them. rate: `product_rate`."""
    needs, config = host_needs(made), made.config
    there = memory_here(device)
    here = f" of the {there / _GIB:,.1f} GiB here" if there else ""
    lines = [
        f"  memory  about {needs.memory.most / _GIB:,.1f} GiB in a step{here}, computed"
        + ("" if not there or needs.memory.most < there else ": more than there is, so lower batch.micro_batch")
    ]
    if needs.multiply_adds is None:
        return lines + ["  time    unknown: no packing factor; give --packing-factor"]
    hours = needs.multiply_adds / (_SHARE * rate) / 3600.0
    lines.append(
        f"  time    about {duration(hours)} for {config.run.steps:,} updates on this {device_name(device)}, computed"
        f" from {_SHARE:.0%} of a matrix product's {2e-12 * rate:,.2g} TFLOP/s in {config.engine.precision}, measured"
        " now"
    )
    return lines


def duration(hours: float) -> str:
    """ "7.1 hours", "51 days", "3.2 years"."""
    for unit, length in (("years", 24 * 365.25), ("days", 24.0)):
        if hours >= 2 * length:
            return f"{hours / length:,.1f} {unit}"
    return f"{hours:,.1f} hours"
