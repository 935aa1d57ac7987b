"""Published throughputs and overheads, to which the model is fitted or compared.

D1 and D2 are computed from the logs of the MLPerf v1.0 closed division (mlcommons/training_results_v1.0, Graphcore), E1
to E3 from those of v1.1, E5 and E6 from those of v2.0: sequences of a block, two a pack as the runs count them, by the
mean seconds between its start and its end, the first block left out. D3 to D6, D8, D12 and E4 are from Graphcore's
performance results page; D13 is known to three digits; D9 and D10 are Tables 1 and 2 of the packedBERT paper.
The settings of each run are those of the published configurations of its code. In all of them a call is one update.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Dict, NamedTuple, Tuple


class Point(NamedTuple):
    """A published training throughput of a whole machine."""

    name: str
    what: str  # description
    config: str  # file in configs/
    overrides: Tuple[str, ...]
    arrangement: str  # a variant of the graph, of `tracing`
    target: str
    accumulation: int
    sequences_per_pack: float
    sequences_per_second: float
    source: str
    # Feed-forward halves of layers on each IPU, if they are not on the IPU of their attention half.
    feed_forward_per_ipu: Tuple[int, ...] = ()
    pytorch: bool = False  # compiled from PyTorch, like this engine's graphs, not written in PopART


def _points() -> Tuple[Point, ...]:
    """Read the published throughputs, `points.json`."""
    points = []
    for row in json.loads(_STORED.read_text(encoding="utf-8")):
        lists = {name: tuple(value) for name, value in row.items() if isinstance(value, list)}
        points.append(Point(**{**row, **lists}))
    return tuple(points)


_STORED = Path(__file__).resolve().parent / "points.json"
POINTS = _points()

# D9: Table 1 of the paper, overhead in percent by packing depth. The model is fitted to depth 2; at other depths it
# adds the cost of deeper heads.
PAPER_OVERHEAD: Dict[int, float] = {2: 4.283, 3: 4.287, 4: 4.294, 8: 4.481, 16: 4.477}
FITTED_DEPTH = 2
PAPER_CONFIG = "packed_phase2_pod16.yml"  # BERT-large, 512, as in the paper's sections 4.1 and 4.2


class _Table2Row(NamedTuple):
    """D10: Table 2 of the paper, two decimals each."""

    model: str
    length: int
    packed: str  # files in configs/
    packing_factor: float
    realised: float


TABLE2: Tuple[_Table2Row, ...] = (
    _Table2Row("base", 128, "packed_phase1_base_pod16.yml", 1.17, 1.15),
    _Table2Row("base", 384, "packed_phase2_384_base_pod16.yml", 1.70, 1.68),
    _Table2Row("large", 128, "packed_phase1_pod16.yml", 1.17, 1.15),
    _Table2Row("large", 384, "packed_phase2_384_pod16.yml", 1.70, 1.69),
)
