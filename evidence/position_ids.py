"""The nine ways to make batches, measured on a causal model: updates, seconds, memory and losses.

These are Tables 2 to 6 of "Enhancing Training Efficiency Using Packing with Flash Attention".  Each way trains the same
model for one epoch from the same weights.  A way that fills its rows trains twice: with the batch size of the other
ways, in fewer and larger updates, and with the mean number of tokens of a padded update, in the same number of updates.
The loss of an update is the mean over its predicted tokens.

Padding-free rows use our attention, within each sequence only; padded rows use the library's. A
fully filled batch is bs rows of msl tokens, joined to one row for the model; a packing of whole rows can also use one
row of bs x msl tokens.
"""

from __future__ import annotations

import argparse
import itertools
import time
from functools import partial
from itertools import product
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from evidence.batching_report import collate
from evidence.runner import Cell, Row, Runner
from evidence.statistics import Interval, extremes, students
from evidence.texts import TextSet, TokenSet, encode, text_sets
from evidence.writer import CellText, Part, Pictures, Shown, Table, TableColumn, bars, spread
from pack_data.batching.plans import WAYS, BatchOptions
from pack_data.cli.command import positive_int
from pack_data.cli.memory import PeakMemory, keep_buffers
from pack_data.reading.words import counted

PADDED = "RandomSampling+Padding"  # the baseline
# Ways that fill their batches, so that they make fewer updates of bs x msl tokens.
FILLED = (
    "FixedLengthPacking",
    "FixedLengthPacking+PosID",
    "Multipack+PosID",
    "SortedPacking+PosID",
    "RandomPacking+PosID",
    "OptimalPacking+PosID",
)
SAME_UPDATES = ", as many updates"
ONE_ROW = ", one row"
# Ways that fill rows of msl tokens each; the other filled ones fill bs x msl tokens in any case.
BY_ROWS = ("FixedLengthPacking+PosID", "OptimalPacking+PosID")
# Pairs of ways that make the same updates of the same tokens: without the padding, and without keeping examples apart.
CLAIM = ("MiniBatchPacking+PosID", PADDED)
CONTROL = (f"FixedLengthPacking{SAME_UPDATES}", f"FixedLengthPacking+PosID{SAME_UPDATES}")
# Properties of the ways by sections 3 and 4.3 of the paper: a kernel for variable lengths, positions that count from
# the first token of each example, attention within examples only, no example cut, no order of lengths.
_COLUMNS = ("kernel", "positions", "isolated", "unbroken", "unsorted")
_PROPERTIES = {
    PADDED: "no yes yes yes yes",
    "GroupByLength+Padding": "no yes yes yes no",
    "MiniBatchPacking+PosID": "yes yes yes yes yes",
    "FixedLengthPacking": "no no no no yes",
    "FixedLengthPacking+PosID": "yes yes yes no yes",
    "Multipack+PosID": "yes yes yes yes yes",
    "SortedPacking+PosID": "yes yes yes yes no",
    "RandomPacking+PosID": "yes yes yes yes yes",
    "OptimalPacking+PosID": "yes yes yes yes yes",
}
VARIANTS = (*WAYS, *(way + ONE_ROW for way in BY_ROWS), *(way + SAME_UPDATES for way in FILLED))


class CausalSize(NamedTuple):
    """Data and model of one size of the experiment."""

    training_examples: int  # of each data set, at most
    held_out_examples: int
    max_sequence_length: int  # tokens, msl; longer examples are cut
    batch_size: int  # bs
    hidden_size: int
    num_layers: int
    vocabulary_size: int  # trained on the training texts
    learning_rate: float


SIZES = {
    "quick": CausalSize(
        training_examples=48,
        held_out_examples=8,
        max_sequence_length=128,
        batch_size=4,
        hidden_size=32,
        num_layers=1,
        vocabulary_size=1024,
        learning_rate=3.0e-3,
    ),
    "default": CausalSize(
        training_examples=600,
        held_out_examples=100,
        max_sequence_length=512,
        batch_size=4,
        hidden_size=64,
        num_layers=2,
        vocabulary_size=4096,
        learning_rate=3.0e-3,
    ),
}


def describe(size: CausalSize) -> str:
    """Describe the data and the model of a size."""
    return (
        f"{size.training_examples:,} examples of each data set, one epoch, bs {size.batch_size}, "
        f"msl {size.max_sequence_length}; Llama of hidden {size.hidden_size}, {counted(size.num_layers, 'layer')}, "
        f"vocabulary {size.vocabulary_size}"
    )


SUMMARY = (
    "Nine ways to make batches for a causal model on GSM8K and GPTeacher: updates, seconds, tokens/s, peak memory,\n"
    "training and held-out loss. The same batches padded and padding-free train the same; with attention across\n"
    "examples not. Needs --data-dir with gsm8k/ and gpteacher/.\n\n"
    + "\n".join(f"{name}: {describe(size)}" for name, size in SIZES.items())
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    number = partial(parser.add_argument, type=positive_int)
    number("--max-sequence-length", metavar="MSL", help="tokens of a row, in place of the size's")
    number(
        "--examples", metavar="N", help="training examples of each data set, in place of the size's"
    )


def size_of(options: Any) -> CausalSize:
    size = SIZES[options.size]
    return size._replace(
        max_sequence_length=options.max_sequence_length or size.max_sequence_length,
        training_examples=options.examples or size.training_examples,
    )


def settings(options: Any) -> Dict[str, Any]:
    if options.data_dir is None:
        raise ValueError(
            "position_ids requires data: pass --data-dir DIR with gsm8k/ and gpteacher/"
        )
    return {"size": list(size_of(options))}


# ---- one run


def way_of(variant: str) -> str:
    """Return the name of the way of a variant."""
    return variant.replace(SAME_UPDATES, "").replace(ONE_ROW, "")


def options_of(variant: str, tokens: TokenSet, size: CausalSize, seed: int) -> BatchOptions:
    """Return bs rows of msl tokens, or one of bs x msl; for as many updates, one row with the tokens of bs examples."""
    if variant.endswith(ONE_ROW):
        return BatchOptions(1, size.batch_size * size.max_sequence_length, seed=seed)
    if not variant.endswith(SAME_UPDATES):
        return BatchOptions(size.batch_size, size.max_sequence_length, seed=seed)
    mean = int(round(size.batch_size * tokens.lengths.mean()))
    return BatchOptions(1, max(mean, int(tokens.lengths.max())), seed=seed)


def new_model(tokens: TokenSet, size: CausalSize, seed: int) -> Any:
    """Return a small new Llama with sdpa attention."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=tokens.vocabulary_size,
        hidden_size=size.hidden_size,
        num_hidden_layers=size.num_layers,
        num_attention_heads=1,
        intermediate_size=4 * size.hidden_size,
        max_position_embeddings=size.max_sequence_length * size.batch_size,
        use_cache=False,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


def train(variant: str, tokens: TokenSet, size: CausalSize, seed: int) -> Row:
    """Train for one epoch."""
    import torch

    from ipu_packed_bert.model.optimizer import warmup_linear
    from padding_free.choice import use_padding_free
    from padding_free.collators import PaddingCollator, inputs_for
    from padding_free.update import mean_loss, take_step

    way = WAYS[way_of(variant)]
    model = new_model(tokens, size, seed)
    if way.padding_free:
        use_padding_free(model, longest=int(tokens.lengths.max()), attention="padding_free")
    plan = way.plan(tokens.lengths, options_of(variant, tokens, size, seed))
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=size.learning_rate, betas=(0.9, 0.98), weight_decay=0.01
    )
    model.train()
    memory = PeakMemory()

    steps = plan.steps
    warmup_steps = max(1, steps // 10)
    results = []
    seconds = 0.0
    for step in range(steps):
        batch = collate(way, plan.batch(step, 0), tokens.training)
        inputs = inputs_for(model, batch)
        start = time.perf_counter()
        share = warmup_linear(step, steps=steps, warmup_steps=warmup_steps)
        results.append(take_step(model, optimizer, [inputs], size.learning_rate * share))
        seconds += time.perf_counter() - start
    peak = memory.added()

    held_out = sorted(tokens.held_out, key=lambda example: len(example["input_ids"]))
    padded = (PaddingCollator()(held_out[at : at + 8]) for at in range(0, len(held_out), 8))
    predicted = sum(result.supervised_tokens for result in results)
    losses = sum(result.loss * result.supervised_tokens for result in results)
    real = int(tokens.lengths.sum())
    return {
        "updates": steps,
        "seconds": round(seconds, 4),
        "tokens": real,
        "tokens_per_second": real / seconds,
        "peak_memory_mib": None if peak is None else peak / 2**20,
        "training_loss": losses / predicted,
        "held_out_loss": mean_loss(model, padded, torch.device("cpu")),
    }


def unigram_loss(tokens: TokenSet) -> float:
    """Return the held-out loss of predictions by the frequencies of training plus one, in nats."""
    training = np.concatenate([example["input_ids"][1:] for example in tokens.training])
    held_out = np.concatenate([example["input_ids"][1:] for example in tokens.held_out])
    counts = 1 + np.bincount(training, minlength=tokens.vocabulary_size)
    losses = -np.log(counts / counts.sum())
    return float(losses[held_out].mean())


# ---- the experiment


def cells_of(data: Sequence[TextSet], seeds: int) -> List[Cell]:
    """List the cells, seed by seed."""
    grid = product(range(1, seeds + 1), data, VARIANTS)
    return [Cell(_variant(texts.name, way), seed) for seed, texts, way in grid]


class NineWays:
    """Cell -> its row."""

    def __init__(self, options: Any) -> None:
        size = size_of(options)
        self.size = size
        self.data = text_sets(options.data_dir, size.training_examples, size.held_out_examples)
        keep_buffers()
        self._tokens: Dict[str, TokenSet] = {}

    def tokens(self, name: str) -> TokenSet:
        """Return the tokens of a data set, encoded once."""
        if name not in self._tokens:
            self._tokens[name] = encode(
                next(texts for texts in self.data if texts.name == name),
                max_sequence_length=self.size.max_sequence_length,
                vocabulary_size=self.size.vocabulary_size,
            )
        return self._tokens[name]

    def __call__(self, cell: Cell) -> List[Row]:
        name, variant = cell.variant.split(": ", 1)
        row = train(variant, self.tokens(name), self.size, cell.seed)
        return [{"data": name, "way": variant, **row}]


def facts_of(measure: NineWays) -> Dict[str, Any]:
    """Return the lengths of each data set, which the cells do not have."""
    data = {}
    for texts in measure.data:
        tokens = measure.tokens(texts.name)
        lengths = tokens.lengths
        data[texts.name] = {
            "examples": len(lengths),
            "mean_tokens": float(lengths.mean()),
            "longest": int(lengths.max()),
            "unigram_loss": unigram_loss(tokens),
        }
    return {"data": data}


def run(options: Any, runner: Runner) -> int:
    measure = NineWays(options)
    runner.keep_facts(facts_of(measure))
    runner.run(cells_of(measure.data, options.seeds), measure)
    return runner.show(shown(runner.path), plot=options.plot)


# ---- results


class PositionIdsShown(Shown):
    """The results in a run's file."""

    @property
    def _data(self) -> List[str]:
        return list(self.facts["data"])

    def values(self, name: str, way: str, column: str) -> List[float]:
        """Return the measured values of all finished seeds."""
        values = self.columns(_variant(name, way), column).flat
        return [float(value) for value in values if value is not None]

    def differences(self, name: str, pair: Tuple[str, str]) -> List[float]:
        """Return the held-out losses of the first way minus those of the second, seed by seed."""
        first, second = (_variant(name, way) for way in pair)
        seeds = self.common(first, second)
        losses = self.columns(first, "held_out_loss", seeds)
        return (losses - self.columns(second, "held_out_loss", seeds)).ravel().tolist()

    def _distances(self, pair: Tuple[str, str]) -> List[float]:
        """Return the distances of a pair of ways, over data sets and seeds."""
        differences = itertools.chain(*(self.differences(name, pair) for name in self._data))
        return list(map(abs, differences))

    def apart(self) -> str:
        """Describe the largest distance of padded and padding-free runs, and the smallest one of the control."""
        same = self._distances(CLAIM)
        other = self._distances(CONTROL)
        return f"at most {max(same):.4f} nats apart; attention and positions across examples: at least {min(other):.4f}"

    def parts(self) -> List[Part]:
        seeds = max((len(self.seeds(cell.variant)) for cell in self.cells), default=0)
        tables: List[Part] = []
        for name in self._data:
            facts = self.facts["data"][name]
            tables += [
                f"**{name}**: {facts['examples']:,} examples of {facts['mean_tokens']:.0f} tokens on the mean, "
                f"{facts['longest']} at most",
                "",
                self._table(name),
            ]
        return [
            *tables,
            f"Padded and padding-free batches of the same examples, in the same updates: {self.apart()}.",
            "What attention across examples costs, the same two ways, held-out loss (90 %, over seeds alone): "
            f"{'; '.join(map(self._cost, self._data))}.",
            f"±: one standard deviation of the seeds. {describe(CausalSize(*self.settings['size']))}; "
            f"{counted(seeds, 'seed')}; {self.facts['machine']}.",
        ]

    def _cost(self, name: str) -> str:
        """Describe the difference of the control in one data set."""
        differences = self.differences(name, CONTROL)
        if len(differences) < 2:
            return f"{name}: shows nothing yet, it needs two seeds"
        interval = students(differences)
        words = "more" if interval.mean > 0 else "less"
        if interval.low <= 0 <= interval.high:
            words = "shows nothing"
        return f"{name} {interval.words('+.3f')}, {words}"

    def _table(self, name: str) -> Table:
        """Return the table of one data set: means and spread over the seeds."""
        facts = self.facts["data"][name]

        def of(column: str, words: Callable[[List[float]], str]) -> CellText:
            def cell(way: str) -> Optional[str]:
                values = self.values(name, way, column)
                return words(values) if values else None

            return cell

        def mean(values: List[float]) -> str:
            return f"{np.mean(values):,.0f}"

        def has(place: int) -> CellText:
            return lambda way: _PROPERTIES[way_of(way)].split()[place]

        columns: List[TableColumn] = [
            ("way", str),
            *((title, has(place)) for place, title in enumerate(_COLUMNS)),
            ("updates", of("updates", lambda values: f"{values[0]:,.0f}")),
            ("seconds", of("seconds", partial(spread, digits=1))),
            ("tokens/s", of("tokens_per_second", mean)),
            ("memory, MiB", of("peak_memory_mib", mean)),
            ("training loss", of("training_loss", spread)),
            ("held-out loss", of("held_out_loss", spread)),
        ]
        no_model = ["most frequent tokens (no model)", *[""] * (len(columns) - 2)]
        no_model.append(f"{facts['unigram_loss']:.3f}")
        return Table(columns, VARIANTS, [no_model])

    def pictures(self) -> Pictures:
        """Draw speed and held-out loss of every way."""

        def of(column: str) -> Dict[str, Dict[str, Interval]]:
            series = {}
            for name in self._data:
                values = {way: self.values(name, way, column) for way in VARIANTS}
                intervals = {way: extremes(values[way]) for way in values}
                series[f"{name}: mean, lowest and highest seed"] = intervals
            return series

        unigram = [
            (f"{name}, most frequent tokens", self.facts["data"][name]["unigram_loss"])
            for name in self._data
        ]
        drawn = [
            bars("Speed", "tokens a second (more is better)", of("tokens_per_second")),
            bars("Held-out loss", "nats a token (less is better)", of("held_out_loss"), unigram),
        ]
        return {"ways": drawn}


def _variant(data: str, way: str) -> str:
    return f"{data}: {way}"


shown = PositionIdsShown
