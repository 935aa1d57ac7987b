"""What every benchmark of a network is made of: sequences drawn from a packing, a model by its size, the machine."""

from __future__ import annotations

import platform
from typing import List, NamedTuple, Tuple

import numpy as np

from ipu_packed_bert.data.global_batches import Batch
from ipu_packed_bert.settings.pretraining import BatchConfig, Config, DataConfig
from ipu_packed_bert.settings.schema import EngineConfig, ModelConfig
from pack_data.cli.command import available_cores, counted
from pack_data.packing.packing import Packing
from pack_data.store.packs import PackSchema, assemble, decode
from pack_data.store.sequences import Example, Sequences
from pack_data.text.examples import masked_count

# hidden size, layers, heads, intermediate size. `base3` is BERT-base with 3 layers, which takes a quarter of its time.
SIZES = {
    "tiny": (128, 2, 2, 512),
    "small": (256, 4, 4, 1024),
    "base3": (768, 3, 12, 3072),
    "base": (768, 12, 12, 3072),
    "large": (1024, 24, 16, 4096),
}
DROPOUT = 0.1


class BenchmarkWork(NamedTuple):
    """The same sequences in both layouts; rows are multiples of the micro-batch."""

    packed: Batch
    unpacked: Batch
    sequences: int
    tokens: int
    vocabulary: int

    @property
    def slots(self) -> int:
        """Of a row."""
        return self.packed["input_ids"].shape[1]

    @property
    def packing_factor(self) -> float:
        return len(self.unpacked["input_ids"]) / len(self.packed["input_ids"])


def config_of(
    size: str, work: BenchmarkWork, engine: EngineConfig, *, micro_batch: int, dropout: float = DROPOUT
) -> Config:
    """A model of this size for packs of this work."""
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
    """`packs` packs drawn from the packing's strategies by how often it uses them, filled with random tokens.

    Of many draws the one whose packing factor is nearest to the whole packing's, among those whose sequences divide
    into micro-batches, so that neither layout has an empty row. `share`: (index, parts), the rows of one of several
    processes; all of them have as many.
    """
    index, parts = share
    rng = np.random.default_rng(seed)
    often = np.array(packing.repeats, dtype=np.float64) / packing.packs
    draws = [[packing.strategies[number] for number in rng.choice(len(often), packs, p=often)] for _ in range(1000)]
    even = [draw for draw in draws if sum(map(len, draw)) % (parts * micro_batch) == 0]
    if not even:
        raise ValueError(
            f"none of {len(draws):,} draws of {packs} packs has a multiple of {parts * micro_batch} sequences, so that "
            "micro-batches are full; choose a smaller --micro-batch, or another --seed"
        )
    drawn = min(even, key=lambda draw: abs(sum(map(len, draw)) / packs - packing.packing_factor))
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
    packed_at = [(pack, slot) for pack, strategy in enumerate(drawn) for slot in range(len(strategy))]
    alone_at = [(row, 0) for row in range(len(lengths))]

    def lay_out(places: List[Tuple[int, int]], depth: int) -> Batch:
        schema = PackSchema.bert(
            packing.max_sequence_length, depth, max_predictions + depth, vocabulary_size=vocabulary
        )
        where = np.array(places, dtype=np.int64)
        rows = int(where[:, 0].max()) + 1
        batch = decode(schema, assemble(schema, sequences, where[:, 0], where[:, 1], rows))
        micro_batches = rows // micro_batch
        scales = {"mlm_scale": micro_batches / int(masked.sum()), "nsp_scale": micro_batches / len(lengths)}
        batch.update({name: np.full(rows, scale, dtype=np.float32) for name, scale in scales.items()})
        own = slice(index * rows // parts, (index + 1) * rows // parts)
        return {name: values[own] for name, values in batch.items()}

    depth = max(len(strategy) for strategy in drawn)
    return BenchmarkWork(
        packed=lay_out(packed_at, packing.max_sequences_per_pack or depth),
        unpacked=lay_out(alone_at, 1),
        sequences=len(lengths),
        tokens=int(sum(lengths)),
        vocabulary=vocabulary,
    )


def machine() -> str:
    """This machine in one line: processor or CUDA device, cores, versions."""
    import torch  # late: commands that print the machine have a --help without it

    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    else:
        cores, threads = counted(available_cores(), "core"), counted(torch.get_num_threads(), "torch thread")
        device = f"{_processor()}, {cores}, {threads}"
    return f"{device}; Python {platform.python_version()}, torch {torch.__version__}"


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.machine()
