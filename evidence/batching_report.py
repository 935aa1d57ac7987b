"""The effects of a way of making batches on the examples, measured on the batches that it makes.

In the examples used here, each token is its own number in the whole data set. So every token of a batch shows which
example it comes from.
"""

from __future__ import annotations

from typing import Any, Dict, Iterator, List, NamedTuple, Sequence, Tuple

import numpy as np

from pack_data.batching.collators import Example, padded_batch, padding_free_batch, token_columns
from pack_data.batching.plans import Batch, BatchOptions, Way

# Standard deviations by which the share of falling steps must miss one half to count as sorted.
_SORTED_DEVIATIONS = 4.0
_PAD = -1
_Arrays = Dict[str, np.ndarray]


class Properties(NamedTuple):
    """The five columns of the paper's table."""

    variable_length_kernel: bool  # a batch has cumulative lengths instead of a mask
    correct_position_ids: bool  # positions count from the first token of each example in the row
    no_cross_attention: bool  # no token may attend to a token of another example
    no_broken_example: bool  # no example is cut
    no_sorting: bool  # the mean length of the steps rises and falls as in a random order


COLUMNS = ("kernel", "positions", "isolated", "unbroken", "unsorted")  # their headings


class _Epoch:
    """The batches of an epoch, measured one after another."""

    def __init__(self, lengths: np.ndarray) -> None:
        self._begins = np.cumsum(lengths) - lengths  # first token number of each example
        self.seen = np.zeros(int(lengths.sum()), np.int64)  # times that each token was in a batch
        self.pieces = np.zeros(len(lengths), np.int64)  # of each example
        self.kernel = True
        self.positions_right = True
        self.isolated = True

    def dataset(self) -> List[_Arrays]:
        """Return the examples, in which each token is its own number."""
        tokens = np.arange(len(self.seen))
        return [{"input_ids": ids} for ids in np.split(tokens, self._begins[1:])]

    def measure(self, batch: _Arrays) -> Tuple[int, int]:
        """Measure a batch; return its tokens and pieces."""
        self.kernel &= "cumulative_lengths" in batch
        tokens = pieces = 0
        for ids, positions in _attended(batch):
            is_token = ids != _PAD
            if is_token.any():
                tokens += int(is_token.sum())
                pieces += self._measure_group(ids[is_token], positions[is_token])
        return tokens, pieces

    def _measure_group(self, ids: np.ndarray, positions: np.ndarray) -> int:
        """Measure tokens that may attend to each other; return their pieces of examples."""
        self.seen[ids] += 1
        examples = np.searchsorted(self._begins, ids, side="right") - 1

        # A piece ends where the example changes, or where tokens are missing.
        is_first = np.ones(len(ids), bool)
        other_example = np.diff(examples) != 0
        is_first[1:] = other_example | (np.diff(ids) != 1)
        firsts = np.flatnonzero(is_first)
        owners = examples[firsts]
        np.add.at(self.pieces, owners, 1)
        self.isolated &= len(np.unique(owners)) == 1

        piece = np.cumsum(is_first) - 1  # of each token
        positions_in_piece = np.arange(len(ids)) - firsts[piece]
        self.positions_right &= np.array_equal(positions, positions_in_piece)
        return len(owners)


def properties_of(way: Way, lengths: np.ndarray, options: BatchOptions) -> Properties:
    """Make every batch of an epoch and measure it.

    Args:
        way: one of the nine ways.
        lengths: tokens of each example, integers [examples].
        options: batch size, longest sequence, ranks and seed.

    Returns:
        The properties of the way.

    Raises:
        ValueError: a token is missing or comes twice.
    """
    plan = way.plan(lengths, options)
    measured = _Epoch(np.asarray(lengths, np.int64))
    dataset = measured.dataset()
    means: List[float] = []
    for step in range(plan.steps):
        tokens_of_step = pieces_of_step = 0
        for rank in range(options.ranks):
            batch = collate(way, plan.batch(step, rank), dataset, pad_id=_PAD)
            tokens, pieces = measured.measure(batch)
            tokens_of_step += tokens
            pieces_of_step += pieces
        means.append(tokens_of_step / pieces_of_step)

    seen = measured.seen
    wrong = np.flatnonzero(seen != 1)
    if len(wrong):
        token = int(wrong[0])
        raise ValueError(f"{way.name}: token {token} comes {int(seen[token])} times in an epoch")
    return Properties(
        variable_length_kernel=measured.kernel,
        correct_position_ids=measured.positions_right,
        no_cross_attention=measured.isolated,
        no_broken_example=bool((measured.pieces == 1).all()),
        no_sorting=not _sorted(np.array(means)),
    )


def _attended(batch: _Arrays) -> Iterator[Tuple[np.ndarray, np.ndarray]]:
    """Yield input_ids and position_ids of each group of tokens that may attend to each other."""
    rows = zip(batch["input_ids"], batch["position_ids"])
    if "cumulative_lengths" in batch:
        ends = batch["cumulative_lengths"]
        ids, positions = next(rows)
        for begin, end in zip(ends[:-1], ends[1:]):
            yield ids[begin:end], positions[begin:end]
    else:
        for (ids, positions), mask in zip(rows, batch["attention_mask"]):
            is_seen = mask == 1
            yield ids[is_seen], positions[is_seen]


def _sorted(means: np.ndarray) -> bool:
    """Return True if the mean lengths of the steps follow an order.

    In a random order, each mean is as often below as above the one before. The number of falls among n numbers in
    random order has variance (n + 1) / 12 (Eulerian numbers). Below about 30 steps no order can show.
    """
    changes = np.diff(means)
    changes = changes[changes != 0]
    if not len(changes):
        return False
    falls = (changes < 0).sum()
    expected = len(changes) / 2
    deviation = np.sqrt((len(changes) + 2) / 12)
    return bool(abs(falls - expected) > _SORTED_DEVIATIONS * deviation)


def collate(
    way: Way,
    batch: Batch,
    dataset: Sequence[Example],
    pad_id: int = 0,
) -> _Arrays:
    """Return the arrays of one batch of a plan.

    A padded row of several pieces is one text to the model: nothing tells the pieces apart.
    """
    texts: List[Dict[str, Any]] = []
    for row in batch:
        pieces = []
        for number, start, stop in row:
            columns = token_columns(dataset[number], f"example {number}")
            pieces.append({name: values[start:stop] for name, values in columns.items()})
        if way.padding_free:
            texts += pieces
            continue
        text: Dict[str, Any] = {}
        for name in ("input_ids", "labels"):
            if name in pieces[0]:
                text[name] = np.concatenate([piece[name] for piece in pieces])
        texts.append(text)
    batch_of = padding_free_batch if way.padding_free else padded_batch
    return batch_of(texts, pad_id=pad_id)
