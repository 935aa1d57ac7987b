"""Matrix products on the AMP units: the plan search and its cost, with a cache of plans on disk.

A product of G matrices, [M, K] times [K, N], is split over g matrices, m rows, k groups of 16 inputs and n groups of 16
outputs in parallel, and over s parts of the outputs in series, with g*m*k*n <= tiles. Formulas: poplibs, poplin
PerformanceEstimation and ConvModel (SDK 3.4 line), restated. Cycles are tile cycles of the fullest tile.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, astuple, dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import numpy as np

from ipu_packed_bert.cycles.target import FLOAT, HALF, Target
from pack_data.reading.files import write_atomically

_GROUP = 16  # inputs and outputs of one AMP block, half precision


@dataclass(frozen=True)
class Product:
    """A product to plan: G matrices [M, K] x [K, N]."""

    matrices: int  # G, batch times heads
    rows: int  # M
    inner: int  # K
    columns: int  # N
    element_bytes: int = HALF
    partial_bytes: int = HALF
    memory_proportion: float = (
        0.6  # of a tile's memory, for temporaries (poplibs availableMemoryProportion)
    )


class Rearranged(NamedTuple):
    """Which operands a pass must rearrange (poplibs, addTransformCycleEstimate)."""

    input: bool = False
    weights: bool = False
    output: bool = False


FORWARD = Rearranged()  # operands are created in the plan's layout
BACKWARD_DATA = Rearranged(input=True)
WEIGHT_UPDATE = Rearranged(input=True, weights=True, output=True)


@dataclass(frozen=True)
class _MatmulPlan:
    """The cheapest split found, and its cycles by kind."""

    matrix_split: int
    row_split: int
    inner_split: int
    column_split: int
    serial_split: int
    vertex_cycles: float  # AMP work
    reduction_cycles: float  # summing partials of the inner split
    slice_cycles: float  # laying out, taking and putting the parts of a serial split
    transform_cycles: float  # layout changes inside tiles
    input_exchange_cycles: float
    weight_exchange_cycles: float
    partial_exchange_cycles: float
    transform_exchange_cycles: float
    sync_cycles: float
    temporary_bytes: int  # on the fullest tile
    fits: bool  # within the memory proportion

    @property
    def compute_cycles(self) -> float:
        return (
            self.vertex_cycles + self.reduction_cycles + self.slice_cycles + self.transform_cycles
        )

    @property
    def exchange_cycles(self) -> float:
        return (
            self.input_exchange_cycles
            + self.weight_exchange_cycles
            + self.partial_exchange_cycles
            + self.transform_exchange_cycles
        )


def _inner_half(rows_per_worker: np.ndarray, *, accumulates: bool) -> np.ndarray:
    """Tile cycles of one 16x16 block, half precision; the first pass over the inputs writes, later ones accumulate."""
    extra = 1 if accumulates else 0
    p = rows_per_worker
    table = np.where(
        p >= 3,
        30 + extra + 4 * (p - 3),
        np.where(p == 2, 34 + extra, np.where(p == 1, 25 + extra, 14 + extra)),
    )
    return 6 * table


def _coefficient_load(target: Target, *, element_bytes: int, partial_bytes: int) -> int:
    """Cycles to load the weights of one AMP pass."""
    if element_bytes == FLOAT:
        return 16 * 32 // target.coefficient_bytes_per_cycle
    units = target.amp_units_half if partial_bytes == HALF else target.amp_units_float_partials
    return units * 32 // target.coefficient_bytes_per_cycle


def _amp_vertex(
    rows: np.ndarray,
    inner_groups: np.ndarray,
    column_groups: np.ndarray,
    matrices: np.ndarray,
    *,
    target: Target,
    element_bytes: int = HALF,
    partial_bytes: int = HALF,
) -> np.ndarray:
    """Tile cycles of the 1x1 AMP vertex.

    rows: of the tile; inner_groups: groups of 16 inputs (8 in float); column_groups: groups of 16 outputs;
    matrices: of the tile. Any may be an array; they broadcast.
    """
    p = -(-np.asarray(rows) // target.workers)
    load = _coefficient_load(target, element_bytes=element_bytes, partial_bytes=partial_bytes)
    if element_bytes == FLOAT:
        later = 6 * (46 + np.maximum(p - 3, 0) * 8)
        first = later + 6 * (2 + 8 * p)
        passes = 1
    else:
        first, later = _inner_half(p, accumulates=False), _inner_half(p, accumulates=True)
        passes = 1 if partial_bytes == HALF else 2  # 8 units take two passes for 16 outputs
    blocks = column_groups * passes
    per_matrix = (
        13
        + (inner_groups - 1) * (15 + blocks * (25 + load + later))
        + 11
        + blocks * (25 + load + first)
    )
    return 50 + 6 * (7 + 3 * (inner_groups * matrices - 1)) + matrices * per_matrix


def _partial_reduction(
    outputs: np.ndarray, inner_split: np.ndarray, *, partial_bytes: int = HALF
) -> np.ndarray:
    """Tile cycles of summing `inner_split` partials, each tile an equal share of `outputs`; 0 without a split."""
    width, frame = (8, 9) if partial_bytes == HALF else (4, 8)
    share = np.ceil(outputs / inner_split)
    vectors = np.ceil(np.ceil(share / width) / 6)
    return np.where(inner_split > 1, 33 + 6 * (20 + vectors * (2 * (inner_split - 1) + frame)), 0.0)


def _transform(
    elements: float, *, element_bytes: int, aligned: bool, target: Target
) -> Tuple[float, float]:
    """(compute, exchange) cycles of rearranging an operand of `elements` spread over all tiles.

    The planner moves one element a cycle at best (poplibs); 1.67 instead of 1.25 where a dimension is no multiple of 4.
    """
    on_tile = elements * element_bytes / target.tiles
    rate = min(target.exchange_bytes_per_cycle * 2, element_bytes)
    return on_tile * (1.25 if aligned else 1.67) / rate, on_tile / target.exchange_bytes_per_cycle


def _splits(parts: int, limit: int, *, even: bool = False, largest: bool = False) -> List[int]:
    """Yield the smallest split for every distinct share ceil(parts / split).

    even: also the smallest even one. largest: also the largest one, since more tiles sum partials faster. Both may
    leave tiles idle, as with a padded operand; without that a larger product could cost less than a smaller one.
    """
    chosen = set()
    seen = set()
    for split in range(
        1, min(parts + 1 if even else parts + parts // 4 if largest else parts, limit) + 1
    ):
        share = -(-parts // split)
        keys = [share] + ([("even", share)] if even and split % 2 == 0 else [])
        if largest and share not in seen and split > 1:
            chosen.add(split - 1)
        for key in keys:
            if key not in seen:
                seen.add(key)
                chosen.add(split)
    if largest:
        chosen.add(split)
    return sorted(chosen)


def _plan(product: Product, target: Target) -> _MatmulPlan:
    """Find the plan with the fewest cycles whose temporaries fit, or the smallest plan if none fits.

    Without rearrangements: `_rearrange` adds them, and the choice of the split does not depend on them.
    """
    size, partial = product.element_bytes, product.partial_bytes
    inner_group = _GROUP if size == HALF else _GROUP // 2
    inner_groups, column_groups = ceil(product.inner / inner_group), ceil(product.columns / _GROUP)
    limit = target.tiles
    axes = np.meshgrid(
        np.array(_splits(product.matrices, limit), dtype=np.int64),
        np.array(_splits(product.rows, limit), dtype=np.int64),
        np.array(_splits(inner_groups, limit, largest=True), dtype=np.int64),
        np.array(_splits(column_groups, limit, even=True), dtype=np.int64),
        indexing="ij",
        sparse=True,
    )
    used = axes[0] * axes[1] * axes[2] * axes[3]
    keep = np.nonzero(used <= limit)
    g, m, k, n = (np.broadcast_to(axis, used.shape)[keep] for axis in axes)

    matrices, rows = -(-product.matrices // g), -(-product.rows // m)
    inner = -(-inner_groups // k)
    best: Optional[Tuple[float, float, _MatmulPlan]] = None
    serial = 1
    while serial <= max(1, column_groups):
        columns = -(-column_groups // (n * serial))
        inputs = matrices * rows * inner * inner_group
        weights = matrices * inner * inner_group * columns * _GROUP
        outputs = matrices * rows * columns * _GROUP
        vertex = _amp_vertex(
            rows, inner, columns, matrices, target=target, element_bytes=size, partial_bytes=partial
        )
        pair = np.where(n % 2 == 0, 2, 1)  # both tiles of a pair take the same rows
        rate = target.exchange_bytes_per_cycle
        in_exchange = inputs * (1 - 1 / n) * size / rate / pair
        weight_exchange = weights * (1 - 1 / m) * size / rate
        split = k > 1
        partial_exchange = np.where(split, outputs * partial / rate, 0.0)
        reduction = _partial_reduction(outputs, k, partial_bytes=partial)
        if partial != size:
            cast = 6 * (26 + np.ceil(np.ceil(outputs / 6) / target.vector(partial)))
            reduction = np.where(split, reduction, cast)
        sync = target.sync_cycles * (1 + split)
        slices, laid = np.zeros(len(g)), np.zeros(len(g))
        if serial > 1:
            # Sliced are weights before they are sent to all their tiles, and outputs after the sum of their partials.
            # All weights are laid out for it before the loop, an element a cycle; the rows come then, too.
            laid = np.ceil(serial * weights / m)
            words = (
                np.floor(np.ceil(part / 6) / target.vector(size))
                for part in (weights / m, outputs / k)
            )
            slices = laid + serial * sum(25 + 6 * (39 + 24 + 2 * each) for each in words)
        weight_exchange = serial * weight_exchange + laid * size / rate
        total = (
            in_exchange
            + weight_exchange
            + slices
            + serial * (vertex + partial_exchange + reduction + sync)
        )
        memory = inputs * size + weights * size + outputs * partial + laid * size
        fits = memory <= product.memory_proportion * target.memory_per_tile
        # A plan that fits is taken before one that does not; of those that do not, the smallest.
        order = np.where(fits, total, memory * 1.0e12)
        at = int(np.argmin(order))
        key = (float(order[at]), float(total[at]))
        if best is None or key < best[:2]:
            best = key + (
                _MatmulPlan(
                    matrix_split=int(g[at]),
                    row_split=int(m[at]),
                    inner_split=int(k[at]),
                    column_split=int(n[at]),
                    serial_split=serial,
                    vertex_cycles=float(serial * vertex[at]),
                    reduction_cycles=float(serial * reduction[at]),
                    slice_cycles=float(slices[at]),
                    transform_cycles=0.0,
                    input_exchange_cycles=float(in_exchange[at]),
                    weight_exchange_cycles=float(weight_exchange[at]),
                    partial_exchange_cycles=float(serial * partial_exchange[at]),
                    transform_exchange_cycles=0.0,
                    sync_cycles=float(serial * sync[at]),
                    temporary_bytes=int(memory[at]),
                    fits=bool(fits[at]),
                ),
            )
        serial *= 2
    assert best is not None
    return best[2]


def _rearrange(
    base: _MatmulPlan, product: Product, rearranged: Rearranged, target: Target
) -> _MatmulPlan:
    """Add to `base` the cycles of rearranging the operands that this pass must rearrange."""
    aligned = (
        product.columns % 4 == 0
    )  # rows and inputs are padded to the plan's groups in any case
    sizes = (
        product.matrices * product.rows * product.inner,
        product.matrices * product.inner * product.columns,
        product.matrices * product.rows * product.columns,
    )
    moved = [
        _transform(elements, element_bytes=product.element_bytes, aligned=aligned, target=target)
        for elements, wanted in zip(sizes, rearranged)
        if wanted
    ]
    return replace(
        base,
        transform_cycles=float(sum(compute for compute, _ in moved)),
        transform_exchange_cycles=float(sum(exchange for _, exchange in moved)),
        sync_cycles=base.sync_cycles + target.sync_cycles * len(moved),
    )


def cache_folder() -> Path:
    """Return the directory of plans and traces: $XDG_CACHE_HOME/ipu_packed_bert, or ~/.cache/ipu_packed_bert."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ipu_packed_bert"


def write_cache(path: Path, text: str) -> None:
    """Write a file of the cache, whole or not at all, and its folder where it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text.encode())


class Planner:
    """Plans for one target by shape, type and memory proportion, kept in a file where a folder is given."""

    def __init__(self, target: Target, folder: Optional[Path] = None):
        self.target = target
        self.searched = 0  # plans that had to be searched, for the report and the tests
        # Graphs lowered with these plans, by identity, with their results by settings; see `lowering.Lowering.run`.
        self.lowered: Dict[int, Tuple[Any, Dict[Tuple, Any]]] = {}
        self._plans: Dict[str, _MatmulPlan] = {}
        self._path = None
        if folder is not None:
            # A plan does not depend on the clock and the links: Mk2 and Bow share their plans.
            machine = replace(
                target,
                name="",
                clock_hz=0.0,
                link_bytes_per_second=0.0,
                gateway_bytes_per_second=0.0,
                streaming_bytes_per_second=0.0,
            )
            digest = hashlib.sha256(
                repr(astuple(machine)).encode() + Path(__file__).read_bytes()
            ).hexdigest()
            self._path = folder / f"plans_{digest[:24]}.json"
            self._plans = self._load(self._path)

    @staticmethod
    def _load(path: Path) -> Dict[str, _MatmulPlan]:
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
            return {key: _MatmulPlan(**fields) for key, fields in stored.items()}
        except (OSError, ValueError, TypeError):  # absent, or from a damaged disk: search again
            return {}

    def plan(self, product: Product, rearranged: Rearranged = FORWARD) -> _MatmulPlan:
        """Return the best plan of `product`, searched once for identical products."""
        key = " ".join(str(value) for value in astuple(product))
        if key not in self._plans:
            self._plans[key] = _plan(product, self.target)
            self.searched += 1
        return _rearrange(self._plans[key], product, rearranged, self.target)

    def save(self) -> None:
        """Store the plans searched, together with those that other processes stored meanwhile."""
        if self._path is not None and self.searched:
            merged = {**self._load(self._path), **self._plans}
            write_cache(
                self._path, json.dumps({key: asdict(value) for key, value in merged.items()})
            )
