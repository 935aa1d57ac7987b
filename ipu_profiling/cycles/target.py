"""The figures of one IPU and their sources."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Dict

# Bytes of an element.
HALF = 2
FLOAT = 4


@dataclass(frozen=True)
class Target:
    """One IPU and its links; cycles are tile cycles and sizes are bytes unless a unit says otherwise."""

    name: str
    clock_hz: float  # MLPerf v1.0 and v2.0 system files, accelerator_frequency
    tiles: int = 1472  # poplibs tests; Mk2 specification
    workers: int = 6  # hardware threads a tile, barrel scheduled: one worker instruction = 6 cycles
    memory_per_tile: int = 638_976  # 624 KiB; PopART available-memory tests
    # Half input, half partials (poplibs, "dual AMP"): 64 multiply-adds a cycle.
    amp_units_half: int = 16
    amp_units_float_partials: int = 8
    coefficient_bytes_per_cycle: int = 8  # poplibs: 128-bit coefficient loads are off by default
    exchange_bytes_per_cycle: int = 4  # received by one tile; 7.83 TB/s a chip at 1.33 GHz
    sync_cycles: int = 126  # the longest on-chip sync; third-party compiler reading Poplar's Target
    global_sync_cycles: int = 600  # between IPUs; same source
    dispatch_cycles: int = 64  # call and return of a compute set: 50 to 100 in practice, inferred
    fragment_cycles: int = 3  # issue slots of a separately addressed exchange fragment
    # One direction between neighbours (two of ten links): inferred.
    link_bytes_per_second: float = 64.0e9
    # One direction of the gateway links, an IPU's share: a machine of four IPUs has two of 100 Gb/s (IPU-M2000 and
    # Bow-2000 data sheets, "east" and "west"). They join pods of 64 IPUs, which IPU-Links join (IPU-POD64 data sheet).
    gateway_bytes_per_second: float = 6.25e9
    ipus_per_pod: int = 64
    # DDR, an IPU's share of the 20 GB/s of an M2000: from memory, uncertain by a factor of 2.
    streaming_bytes_per_second: float = 5.0e9

    def per_tile(self, elements: int) -> int:
        """Return the elements on the fullest tile when `elements` are spread evenly."""
        return ceil(elements / self.tiles)

    def vector(self, element_bytes: int) -> int:
        """Return the elements of one 64-bit access."""
        return 8 // element_bytes

    def receive(self, num_bytes: float) -> float:
        """Return the cycles in which a tile receives `num_bytes` from other tiles."""
        return num_bytes / self.exchange_bytes_per_cycle

    def scattered(self, num_bytes: float, fragment_bytes: float) -> float:
        """Return the cycles of receiving separately addressed fragments: of their payload or of their issue slots."""
        fragments = ceil(num_bytes / fragment_bytes) if num_bytes else 0
        return max(self.receive(num_bytes), fragments * self.fragment_cycles)

    def seconds(self, cycles: float) -> float:
        """Convert tile cycles to seconds."""
        return cycles / self.clock_hz

    def link_cycles(self, num_bytes: float) -> float:
        """Return the cycles of sending `num_bytes` between two neighbouring IPUs, sync included."""
        if num_bytes == 0:
            return 0.0
        return num_bytes / self.link_bytes_per_second * self.clock_hz + self.global_sync_cycles


MK2 = Target("mk2", clock_hz=1.33e9)
BOW = Target("bow", clock_hz=1.85e9)  # the same chip on a faster clock: equal cycles, fewer seconds

TARGETS: Dict[str, Target] = {target.name: target for target in (MK2, BOW)}
