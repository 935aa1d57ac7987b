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

from ipu_profiling.cycles.target import FLOAT, HALF, Target
from pack_data.reading.durable import write_atomically

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
    # Share of a tile's memory for temporaries (poplibs availableMemoryProportion).
    memory_proportion: float = 0.6


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
    """The cheapest split of a product, and its cycles by kind."""

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


def _inner_half(rows_per_worker: np.ndarray) -> np.ndarray:
    """Return the tile cycles of one 16x16 block in half precision, in the pass that writes its results."""
    few_rows = np.array([14, 25, 34])  # cycles of no row, of one and of two
    short_loop = few_rows[np.minimum(rows_per_worker, 2)]
    long_loop = 30 + 4 * (rows_per_worker - 3)
    return 6 * np.where(rows_per_worker >= 3, long_loop, short_loop)


def _coefficient_load(target: Target, *, element_bytes: int, partial_bytes: int) -> int:
    """Return the cycles to load the weights of one AMP pass."""
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
    """Return the tile cycles of the 1x1 AMP vertex; sizes are those of the tile, numbers or arrays that broadcast.

    inner_groups: groups of 16 inputs (8 in float); column_groups: groups of 16 outputs.
    """
    worker_rows = -(-np.asarray(rows) // target.workers)
    load = _coefficient_load(target, element_bytes=element_bytes, partial_bytes=partial_bytes)
    passes = 1
    if element_bytes == FLOAT:
        later = 6 * (46 + np.maximum(worker_rows - 3, 0) * 8)
        first = later + 6 * (2 + 8 * worker_rows)
    else:
        first = _inner_half(worker_rows)
        later = first + 6  # later passes accumulate, a cycle more on each worker
        if partial_bytes != HALF:
            passes = 2  # 8 units take two passes for 16 outputs

    blocks = column_groups * passes
    first_group = 11 + blocks * (25 + load + first)
    later_group = 15 + blocks * (25 + load + later)
    per_matrix = 13 + (inner_groups - 1) * later_group + first_group
    return 50 + 6 * (7 + 3 * (inner_groups * matrices - 1)) + matrices * per_matrix


def _partial_reduction(
    outputs: np.ndarray, inner_split: np.ndarray, *, partial_bytes: int = HALF
) -> np.ndarray:
    """Return the tile cycles of summing `inner_split` partials, a share of the outputs on each tile; 0 if not split."""
    width, frame = (8, 9) if partial_bytes == HALF else (4, 8)
    share = np.ceil(outputs / inner_split)
    vectors = np.ceil(np.ceil(share / width) / 6)
    cycles = 33 + 6 * (20 + vectors * (2 * (inner_split - 1) + frame))
    return np.where(inner_split > 1, cycles, 0.0)


def _transform(
    elements: float, *, element_bytes: int, aligned: bool, target: Target
) -> Tuple[float, float]:
    """Return the compute and the exchange cycles of rearranging an operand of `elements` spread over all tiles.

    The planner moves one element a cycle at best (poplibs), and adds 25 %, or 67 % if a dimension is not a multiple
    of 4.
    """
    tile_bytes = elements * element_bytes / target.tiles
    rate = min(target.exchange_bytes_per_cycle * 2, element_bytes)
    factor = 1.25 if aligned else 1.67
    return tile_bytes * factor / rate, tile_bytes / target.exchange_bytes_per_cycle


def _splits(parts: int, limit: int, *, even: bool = False, largest: bool = False) -> List[int]:
    """Return the smallest split for every distinct share ceil(parts / split), in ascending order.

    even: also the smallest even split. largest: also the largest split, since more tiles sum partials faster. Both may
    leave tiles idle, as with a padded operand; without that a larger product could cost less than a smaller one.
    """
    last = parts
    if even:
        last = parts + 1
    elif largest:
        last = parts + parts // 4

    chosen = set()
    shares = set()
    shares_of_even_splits = set()
    for split in range(1, min(last, limit) + 1):
        share = -(-parts // split)
        if share not in shares:
            shares.add(share)
            chosen.add(split)
            if largest and split > 1:
                chosen.add(split - 1)
        if even and split % 2 == 0 and share not in shares_of_even_splits:
            shares_of_even_splits.add(share)
            chosen.add(split)
    if largest:
        chosen.add(split)
    return sorted(chosen)


def _plan(product: Product, target: Target) -> _MatmulPlan:
    """Find the plan with the fewest cycles whose temporaries fit, or the smallest plan if none fits.

    Rearrangements are left out: `_rearrange` adds them, and the choice of the split does not depend on them.
    """
    size = product.element_bytes
    partial = product.partial_bytes
    inner_group = _GROUP if size == HALF else _GROUP // 2
    inner_groups = ceil(product.inner / inner_group)
    column_groups = ceil(product.columns / _GROUP)

    # All splits (g, m, k, n) that use no more tiles than there are.
    limit = target.tiles
    axes = np.meshgrid(
        _splits(product.matrices, limit),
        _splits(product.rows, limit),
        _splits(inner_groups, limit, largest=True),
        _splits(column_groups, limit, even=True),
        indexing="ij",
        sparse=True,
    )
    used = axes[0] * axes[1] * axes[2] * axes[3]
    splits = np.stack([axis[used <= limit] for axis in np.broadcast_arrays(*axes)])
    rate = target.exchange_bytes_per_cycle

    best: Optional[Tuple[float, float, _MatmulPlan]] = None
    serial = 1
    while serial <= max(1, column_groups) and splits.size:
        # What a tile gets of each dimension.
        g, m, k, n = splits
        matrices = -(-product.matrices // g)
        rows = -(-product.rows // m)
        inner = -(-inner_groups // k)
        columns = -(-column_groups // (n * serial))
        split = k > 1
        pair = np.where(n % 2 == 0, 2, 1)  # both tiles of a pair take the same rows
        inputs = matrices * rows * inner * inner_group
        weights = matrices * inner * inner_group * columns * _GROUP
        outputs = matrices * rows * columns * _GROUP
        vertex = _amp_vertex(
            rows, inner, columns, matrices, target=target, element_bytes=size, partial_bytes=partial
        )
        in_exchange = inputs * (1 - 1 / n) * size / rate / pair
        weight_exchange = weights * (1 - 1 / m) * size / rate
        partial_exchange = np.where(split, outputs * partial / rate, 0.0)
        reduction = _partial_reduction(outputs, k, partial_bytes=partial)
        if partial != size:
            cast = 6 * (26 + np.ceil(np.ceil(outputs / 6) / target.vector(partial)))
            reduction = np.where(split, reduction, cast)
        sync = target.sync_cycles * (1 + split)

        # A serial split slices weights before they are sent to all their tiles, and outputs after the sum of their
        # partials. All weights are laid out for it before the loop, an element a cycle; the rows are sent then, too.
        slices = np.zeros(len(g))
        laid_out = np.zeros(len(g))
        if serial > 1:
            laid_out = np.ceil(serial * weights / m)
            of_weights = _slice_cycles(weights / m, target.vector(size))
            of_outputs = _slice_cycles(outputs / k, target.vector(size))
            slices = laid_out + serial * (of_weights + of_outputs)
        weight_exchange = serial * weight_exchange + laid_out * size / rate
        per_part = vertex + partial_exchange + reduction + sync
        total = in_exchange + weight_exchange + slices + serial * per_part
        memory = inputs * size + weights * size + outputs * partial + laid_out * size

        # Prefer a plan that fits; of plans that do not, prefer the smallest.
        fits = memory <= product.memory_proportion * target.memory_per_tile
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
        # More parts cost more cycles: drop splits that fit already, and those that cost more than the best that fits.
        if best[2].fits:
            splits = splits[:, ~fits & (total < best[1])]
        serial *= 2
    assert best is not None
    return best[2]


def _slice_cycles(elements: np.ndarray, width: int) -> np.ndarray:
    """Return the tile cycles of a dynamic slice (`vertices.dynamic_slice`), for `width` elements per 64-bit access."""
    accesses = np.floor(np.ceil(elements / 6) / width)
    return 25 + 6 * (39 + 24 + 2 * accesses)


def _rearrange(
    base: _MatmulPlan, product: Product, rearranged: Rearranged, target: Target
) -> _MatmulPlan:
    """Add to `base` the cycles of rearranging the operands that this pass must rearrange."""
    if not any(rearranged):
        return base
    aligned = product.columns % 4 == 0  # rows and inputs are padded to the plan's groups
    sizes = (
        product.matrices * product.rows * product.inner,
        product.matrices * product.inner * product.columns,
        product.matrices * product.rows * product.columns,
    )
    compute = 0.0
    exchange = 0.0
    for elements, wanted in zip(sizes, rearranged):
        if wanted:
            cycles = _transform(
                elements, element_bytes=product.element_bytes, aligned=aligned, target=target
            )
            compute += cycles[0]
            exchange += cycles[1]
    return replace(
        base,
        transform_cycles=compute,
        transform_exchange_cycles=exchange,
        sync_cycles=base.sync_cycles + target.sync_cycles * sum(rearranged),
    )


def cache_folder() -> Path:
    """Return the directory of plans and traces: $XDG_CACHE_HOME/ipu_packed_bert, or ~/.cache/ipu_packed_bert."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ipu_packed_bert"


def write_cache(path: Path, text: str) -> None:
    """Write a file of the cache atomically, and create its directory if necessary."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text.encode())


class Planner:
    """Plans for one target by shape, type and memory proportion, kept in a file of `folder` unless that is None."""

    def __init__(self, target: Target, folder: Optional[Path] = None):
        self.target = target
        self.searched = 0  # plans that were not in the cache, for the report and the tests
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
            source = repr(astuple(machine)).encode() + Path(__file__).read_bytes()
            digest = hashlib.sha256(source).hexdigest()
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
        """Return the best plan of `product`; identical products are searched once."""
        key = " ".join(map(str, vars(product).values()))
        if key not in self._plans:
            self._plans[key] = _plan(product, self.target)
            self.searched += 1
        return _rearrange(self._plans[key], product, rearranged, self.target)

    def save(self) -> None:
        """Store the plans, together with those that other processes stored meanwhile."""
        if self._path is not None and self.searched:
            merged = {**self._load(self._path), **self._plans}
            tree = {key: asdict(plan) for key, plan in merged.items()}
            write_cache(self._path, json.dumps(tree))
