"""Published throughputs and overheads, to which the model is fitted or compared.

D1 and D2 are computed from the logs of the MLPerf v1.0 closed division (mlcommons/training_results_v1.0, Graphcore), E1
to E3 from those of v1.1, E5 and E6 from those of v2.0: sequences of a block, two a pack as the runs count them, by the
mean seconds between its start and its end, the first block left out. D3 to D6, D8, D12 and E4 are from Graphcore's
performance results page; D13 is known to three digits; D9 and D10 are Tables 1 and 2 of the packedBERT paper.
The settings of each run are those of the published configurations of its code. In all of them a call is one update.
"""

from __future__ import annotations

from typing import Dict, NamedTuple, Tuple

from ipu_packed_bert.cycles.tracing import ADDITIVE, POPART, UNPACKED


class Point(NamedTuple):
    """A published training throughput of a whole machine."""

    name: str
    what: str  # description
    config: str  # file in configs/
    overrides: Tuple[str, ...]
    arrangement: str
    target: str
    accumulation: int
    sequences_per_pack: float
    sequences_per_second: float
    source: str
    # Feed-forward halves of layers on each IPU, if they are not on the IPU of their attention half.
    feed_forward_per_ipu: Tuple[int, ...] = ()
    pytorch: bool = False  # compiled from PyTorch, like this engine's graphs, not written in PopART


_POPART = (
    "model.vocabulary_size=30400",
    "data.vocabulary_size=30400",
    "placement.embedding_serialization_factor=5",
)
# MLPerf v1.1 and v2.0.
_LATER = (
    "model.vocabulary_size=30912",
    "data.vocabulary_size=30912",
    "placement.embedding_serialization_factor=4",
)
_ON_CHIP = ("placement.optimizer_state_off_chip=false",)


def _eight(replicas: int, attention: str, proportion: str) -> Tuple[str, ...]:
    """Return the settings of replicas of eight IPUs, with these attention halves of layers on each."""
    return _ON_CHIP + (
        f"placement.replicas={replicas}",
        "placement.ipus_per_replica=8",
        f"placement.layers_per_ipu={attention}",
        f"placement.available_memory_proportion={proportion}",
    )


_V11 = ("[1, 2, 3, 4, 3, 4, 3, 4]", "[0.20, 0.25, 0.25, 0.25, 0.25, 0.25, 0.25, 0.25]")
_V20 = ("[1, 3, 3, 3, 4, 3, 4, 3]", "[1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]")
_THREE = ("batch.micro_batch=3", "model.attention_dropout=0.1")
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
        _POPART + _eight(8, "[0, 3, 3, 3, 3, 4, 4, 4]", _V20[1]),
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
        ADDITIVE,
        "bow",
        1024,
        2.0,
        1969.0,
        "Graphcore performance results, SDK 3.1",
        pytorch=True,
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
    Point(
        "D8",
        "large 128 unpacked, PopART, POD64",
        "unpacked_phase1_pod16.yml",
        _POPART + ("placement.replicas=16",),
        UNPACKED,
        "bow",
        512,
        1.0,
        19353.0,
        "Graphcore performance results, before SDK 2.5",
    ),
    Point(
        "D12",
        "large 128 packed, PyTorch",
        "packed_phase1_pod16.yml",
        (),
        ADDITIVE,
        "bow",
        1752,
        1.17,
        5592.0,
        "Graphcore performance results, SDK 3.1 (5,600 with SDK 3.3)",
        pytorch=True,
    ),
    Point(
        "D13",
        "large 512 packed, PyTorch, one process of 16 replicas",
        "packed_phase2_pod16.yml",
        (
            "placement.replicas=16",
            "placement.available_memory_proportion=[0.13, 0.19, 0.19, 0.19]",
        ),
        ADDITIVE,
        "bow",
        256,
        2.0,
        6525.0,
        "published by Graphcore; computed from its distance to an earlier fit, whose 7,308 was 12.0 % more",
        pytorch=True,
    ),
    Point(
        "E1",
        "large 512 packed, POD16",
        "packed_phase2_pod16.yml",
        _LATER
        + (
            "placement.layers_per_ipu=[4, 7, 6, 7]",
            "placement.available_memory_proportion=[0.23, 0.23, 0.23, 0.23]",
        ),
        POPART,
        "mk2",
        192,
        2.0,
        1527.3,
        "MLPerf v1.1 closed, 14 blocks of run 0",
        feed_forward_per_ipu=(5, 6, 7, 6),
    ),
    Point(
        "E2",
        "large 512 packed, POD64, 8 IPUs a replica",
        "packed_phase2_pod16.yml",
        _LATER + _eight(8, *_V11),
        POPART,
        "mk2",
        96,
        2.0,
        4802.9,
        "MLPerf v1.1 closed, median of its runs",
        feed_forward_per_ipu=(2, 2, 3, 3, 4, 3, 4, 3),
    ),
    Point(
        "E3",
        "large 512 packed, POD128, 8 IPUs a replica",
        "packed_phase2_pod16.yml",
        _LATER + _eight(16, *_V11),
        POPART,
        "mk2",
        96,
        2.0,
        9059.0,
        "MLPerf v1.1 closed, 18 blocks of run 0",
        feed_forward_per_ipu=(2, 2, 3, 3, 4, 3, 4, 3),
    ),
    Point(
        "E4",
        "large 512 packed, Bow Pod64, micro-batch 3",
        "packed_phase2_pod16.yml",
        _LATER + _THREE + _eight(8, *_V20),
        POPART,
        "bow",
        96,
        2.0,
        7460.0,
        "Graphcore performance results; settings of MLPerf v2.0 closed",
        feed_forward_per_ipu=(1, 3, 3, 3, 3, 4, 3, 4),
    ),
    Point(
        "E5",
        "large 512 packed, Bow Pod128, micro-batch 3",
        "packed_phase2_pod16.yml",
        _LATER + _THREE + _eight(16, *_V20),
        POPART,
        "bow",
        64,
        2.0,
        12535.0,
        "MLPerf v2.0 closed, 17 blocks of runs 1 and 7",
        feed_forward_per_ipu=(1, 3, 3, 3, 3, 4, 3, 4),
    ),
    Point(
        "E6",
        "large 512 packed, Bow Pod256, micro-batch 3",
        "packed_phase2_pod16.yml",
        _LATER + _THREE + _eight(32, *_V20),
        POPART,
        "bow",
        36,
        2.0,
        19180.0,
        "MLPerf v2.0 closed, 14 blocks of runs 2 and 6",
        feed_forward_per_ipu=(1, 3, 3, 3, 3, 4, 3, 4),
    ),
)

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
