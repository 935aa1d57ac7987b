"""Common parts of the benchmarks of a network: random sequences of a packing, model sizes, the machine."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, List, NamedTuple, Tuple

import numpy as np

from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.settings.schema import BatchConfig, DataConfig, EngineConfig, ModelConfig
from pack_data.cli.command import available_cores
from pack_data.packing.packing import Packing
from pack_data.reading.words import counted
from pack_data.store.packs import PackSchema, assemble, decode
from pack_data.store.quantities import packing_factor
from pack_data.store.sequences import Example, Sequences
from pack_data.text.examples import masked_count

if TYPE_CHECKING:
    from ipu_packed_bert.data.global_batches import Batch

# Hidden size, layers, heads, intermediate size. `base3` is BERT-base with 3 layers, in a quarter of its time.
SIZES = {
    "tiny": (128, 2, 2, 512),
    "small": (256, 4, 4, 1024),
    "base3": (768, 3, 12, 3072),
    "base": (768, 12, 12, 3072),
    "large": (1024, 24, 16, 4096),
}
_DROPOUT = 0.1
_DRAWS = 1000  # random draws of packs; the one with the nearest packing factor is used


class BenchmarkWork(NamedTuple):
    """The same sequences in both layouts, with a multiple of the micro-batch's rows."""

    packed: Batch
    unpacked: Batch
    sequences: int
    tokens: int
    vocabulary: int

    @property
    def slots(self) -> int:
        """Slots of a row."""
        return self.packed["input_ids"].shape[1]

    @property
    def packing_factor(self) -> float:
        """Sequences per pack."""
        return packing_factor(len(self.unpacked["input_ids"]), len(self.packed["input_ids"]))


def config_of(
    size: str,
    work: BenchmarkWork,
    engine: EngineConfig,
    *,
    micro_batch: int,
    dropout: float = _DROPOUT,
) -> Config:
    """Return the configuration of a model size for the packs of some work."""
    hidden, layers, heads, intermediate = SIZES[size]
    depth = work.packed["next_sentence_positions"].shape[1]
    return Config(
        data=DataConfig(max_sequence_length=work.slots, max_sequences_per_pack=depth),
        model=ModelConfig(
            vocabulary_size=work.vocabulary,
            hidden_size=hidden,
            num_layers=layers,
            num_heads=heads,
            intermediate_size=intermediate,
            max_position_embeddings=work.slots,
            hidden_dropout=dropout,
        ),
        engine=engine,
        batch=BatchConfig(micro_batch=micro_batch),
    )


def draw_work(
    packing: Packing,
    *,
    packs: int,
    micro_batch: int,
    vocabulary: int,
    max_predictions: int,
    seed: int,
    share: Tuple[int, int] = (0, 1),
) -> BenchmarkWork:
    """Draw packs from the strategies of a packing, weighted by their repeat counts, and fill them with random tokens.

    Many draws are made. Among those with sequences that divide into micro-batches, so that no layout has an empty row,
    the one with the packing factor nearest to the packing's is used.

    Args:
        packing: The strategies and their repeat counts.
        packs: Packs in all processes.
        micro_batch: Rows of a micro-batch.
        vocabulary: Size of the vocabulary.
        max_predictions: Maximum masked tokens per sequence.
        seed: Seed of draws and tokens.
        share: (index, number) of processes, which get equal numbers of rows.

    Returns:
        The same sequences, packed and with one sequence per row.

    Raises:
        ValueError: No draw divides into micro-batches.
    """
    index, parts = share
    rng = np.random.default_rng(seed)
    drawn = _drawn_strategies(packing, packs, parts * micro_batch, rng)
    lengths = [length for strategy in drawn for length in strategy]
    masked = masked_count(np.array(lengths), max_predictions, 0.15)
    sequences = Sequences.from_examples(
        Example(
            input_ids=rng.integers(1, vocabulary, length).tolist(),
            first_segment_length=int(rng.integers(1, length + 1)),
            masked_lm_positions=np.sort(rng.choice(length, count, replace=False)).tolist(),
            masked_lm_ids=rng.integers(1, vocabulary, count).tolist(),
            next_sentence_label=int(rng.integers(2)),
        )
        for length, count in zip(lengths, masked)
    )

    def lay_out(places: List[Tuple[int, int]], depth: int) -> Batch:
        schema = PackSchema.bert(
            packing.max_sequence_length, depth, max_predictions + depth, vocabulary_size=vocabulary
        )
        pack, slot = np.array(places, dtype=np.int64).T
        rows = int(pack.max()) + 1
        batch = decode(schema, assemble(schema, sequences, pack, slot, rows))
        micro_batches = rows // micro_batch
        scales = {
            "mlm_scale": micro_batches / int(masked.sum()),
            "nsp_scale": micro_batches / len(lengths),
        }
        for name, scale in scales.items():
            batch[name] = np.full(rows, scale, dtype=np.float32)
        of_process = slice(index * rows // parts, (index + 1) * rows // parts)
        return {name: values[of_process] for name, values in batch.items()}

    packed_places = []
    for pack, strategy in enumerate(drawn):
        packed_places += [(pack, slot) for slot in range(len(strategy))]
    unpacked_places = [(row, 0) for row in range(len(lengths))]
    depth = packing.max_sequences_per_pack or max(map(len, drawn))
    return BenchmarkWork(
        packed=lay_out(packed_places, depth),
        unpacked=lay_out(unpacked_places, 1),
        sequences=len(lengths),
        tokens=int(sum(lengths)),
        vocabulary=vocabulary,
    )


def _drawn_strategies(
    packing: Packing, packs: int, multiple: int, rng: np.random.Generator
) -> List[Tuple[int, ...]]:
    """Draw the strategies of packs whose total number of sequences is a multiple of ``multiple``."""
    shares = np.array(packing.repeats, dtype=np.float64) / packing.packs
    fitting = []
    for _ in range(_DRAWS):
        draw = [packing.strategies[number] for number in rng.choice(len(shares), packs, p=shares)]
        sequences = sum(map(len, draw))
        if sequences % multiple == 0:
            distance = abs(packing_factor(sequences, packs) - packing.packing_factor)
            fitting.append((distance, draw))
    if not fitting:
        raise ValueError(
            f"none of {_DRAWS:,} draws of {packs} packs has a multiple of {multiple} sequences, needed for full"
            " micro-batches; lower --micro-batch, or change --seed"
        )
    _, nearest = min(fitting, key=lambda pair: pair[0])
    return nearest


def machine() -> str:
    """Describe this machine in one line: processor or CUDA device, cores, versions."""
    import torch  # imported late, so that --help does not need it

    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    else:
        cores = counted(available_cores(), "core")
        threads = counted(torch.get_num_threads(), "torch thread")
        device = f"{_processor()}, {cores}, {threads}"
    return f"{device}; Python {platform.python_version()}, torch {torch.__version__}"


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = [
                line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")
            ]
    except OSError:
        names = []
    return names[0] if names else platform.machine()
