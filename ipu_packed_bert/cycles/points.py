"""Measurements that others published: throughputs and overheads, to fit the model or to compare it with.

D1 and D2 are computed from the logs of the MLPerf v1.0 closed division (mlcommons/training_results_v1.0, Graphcore);
D3 to D6 are from Graphcore's performance results page; D9 and D10 are Tables 1 and 2 of the packedBERT paper.
The settings of each run are those of the published configurations of its code.
"""

from __future__ import annotations

from typing import Dict, NamedTuple, Tuple

from ipu_packed_bert.cycles.arrangement import ADDITIVE, UNPACKED, Arrangement

# The graph of the PopART and MLPerf code of the paper's time: every layer builds the mask from the sequence numbers,
# and one-hot products select slots. The PyTorch code builds the mask once and passes it from layer to layer.
POPART = Arrangement(mask="layer", mask_form="arithmetic", cls="one_hot", mlm="one_hot")
PYTORCH = ADDITIVE


class Point(NamedTuple):
    """A published training throughput of a whole machine."""

    name: str
    what: str
    config: str  # file in configs/
    overrides: Tuple[str, ...]
    arrangement: Arrangement
    target: str
    accumulation: int
    sequences_per_pack: float
    sequences_per_second: float
    source: str


_POPART = ("model.vocabulary_size=30400", "data.vocabulary_size=30400", "placement.embedding_serialization_factor=5")
POINTS: Tuple[Point, ...] = (
    Point(
        "D1",
        "large 512 packed, POD16",
        "packed_phase2_pod16.yml",
        _POPART + ("placement.available_memory_proportion=[0.20, 0.20, 0.25, 0.25]",),
        POPART,
        "mk2",
        192,
        2.0,
        1419.8,
        "MLPerf v1.0 closed, median of 10 runs",
    ),
    Point(
        "D2",
        "large 512 packed, POD64, 8 IPUs a replica",
        "packed_phase2_pod16.yml",
        _POPART
        + (
            "placement.replicas=8",
            "placement.ipus_per_replica=8",
            "placement.layers_per_ipu=[0, 3, 3, 3, 3, 4, 4, 4]",
            "placement.available_memory_proportion=[1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]",
        ),
        POPART,
        "mk2",
        96,
        2.0,
        4240.4,
        "MLPerf v1.0 closed, median of 10 runs",
    ),
    Point(
        "D3",
        "large 128 unpacked, PopART",
        "unpacked_phase1_pod16.yml",
        _POPART,
        UNPACKED,
        "bow",
        2048,
        1.0,
        5179.0,
        "Graphcore performance results, before SDK 2.5",
    ),
    Point(
        "D4",
        "large 512 packed, PyTorch",
        "packed_phase2_pod16.yml",
        (),
        PYTORCH,
        "bow",
        1024,
        2.0,
        1969.0,
        "Graphcore performance results, SDK 3.1",
    ),
    Point(
        "D5",
        "base 128 unpacked, PopART",
        "unpacked_phase1_base_pod16.yml",
        _POPART + ("placement.available_memory_proportion=[0.28, 0.28, 0.28, 0.28]",),
        UNPACKED,
        "bow",
        512,
        1.0,
        16391.0,
        "Graphcore performance results, SDK 3.1",
    ),
    Point(
        "D6",
        "base 512 unpacked, PopART",
        "unpacked_phase2_base_pod16.yml",
        _POPART + ("placement.available_memory_proportion=[0.28, 0.28, 0.28, 0.28]",),
        UNPACKED,
        "bow",
        512,
        1.0,
        3656.0,
        "Graphcore performance results, SDK 3.1",
    ),
)

# D9: Table 1 of the paper, overhead in percent by packing depth. The model is fitted to depth 2; its values at the
# other depths are that one plus the cost of deeper heads.
PAPER_OVERHEAD: Dict[int, float] = {2: 4.283, 3: 4.287, 4: 4.294, 8: 4.481, 16: 4.477}
FITTED_DEPTH = 2
PAPER_CONFIG = "packed_phase2_pod16.yml"  # BERT-large, 512, as in the paper's sections 4.1 and 4.2


class Table2Row(NamedTuple):
    """D10: Table 2 of the paper, two decimals each."""

    model: str
    length: int
    packed: str  # files in configs/
    packing_factor: float
    realised: float


TABLE2: Tuple[Table2Row, ...] = (
    Table2Row("base", 128, "packed_phase1_base_pod16.yml", 1.17, 1.15),
    Table2Row("base", 384, "packed_phase2_384_base_pod16.yml", 1.70, 1.68),
    Table2Row("large", 128, "packed_phase1_pod16.yml", 1.17, 1.15),
    Table2Row("large", 384, "packed_phase2_384_pod16.yml", 1.70, 1.69),
)
FRAMEWORK_SPREAD = 0.13  # D7: the same task in TF1 and TF2 against PopART
POD64_SCALING = 3.74  # D8: POD64 / POD16, large 128, Bow: 19353 / 5179 sequences/s
