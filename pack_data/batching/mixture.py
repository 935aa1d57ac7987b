"""Several data sets of packs as one, in shares of your choice; the order follows from the seed and the place alone.

    mixture = PackMixture([PackDataset("data/web"), PackDataset("data/code")], weights=[3, 1], seed=1)
    batches = mixture.batches(64, rank=rank, ranks=8)                      # 64 rows an update, 8 of them on each rank
    loader = DataLoader(mixture, batch_sampler=batches, collate_fn=mixture.collate, num_workers=4)
    state = mixture.state_at(updates * 64)                                 # save it; batches(..., state=state) goes on

Nothing is kept of the order, and nothing is shuffled in memory: any place is computed at once, for any number of rows.
"""

from __future__ import annotations

import hashlib
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from pack_data.batching.pack_dataset import PackDataset
from pack_data.reading.fields import named, whole_number


class PackMixture:
    """A map-style data set over the rows of several, one data set after another, and their mixed order.

    data_sets: of one kind, each with the same columns; those of BERT with rows of one shape. weights: the share of each
    in the rows, as numbers above 0; None: its rows, so that an epoch of `len(mixture)` rows shows each row once.
    Of the first n rows each data set has its share to within as many rows as there are data sets. It shows all its rows
    once, in an order of their own, before it begins again in another one.
    """

    def __init__(
        self, data_sets: Sequence[PackDataset], weights: Optional[Sequence[float]] = None, *, seed: int = 0
    ) -> None:
        self._data_sets, self.seed = list(data_sets), whole_number("seed", seed, least=0, most=2**64 - 1)
        self._sizes = np.array([len(each) for each in self._data_sets], np.int64)
        if not len(self._sizes) or not self._sizes.all():
            raise ValueError("a mixture needs data sets, each with a row; leave empty ones out")
        shares = np.array(self._sizes if weights is None else weights, np.float64)
        if shares.shape != self._sizes.shape or not (np.isfinite(shares) & (shares > 0)).all():
            raise ValueError(
                f"weights are {weights}: one number above 0 is needed for each of {len(self._sizes)} data sets"
            )
        self._shares = shares / shares.sum()
        self._starts = np.cumsum(self._sizes) - self._sizes
        shapes = [{name: each.is_bert and values.shape for name, values in each[0].items()} for each in self._data_sets]
        for number, shape in enumerate(shapes):
            if shape != shapes[0]:
                raise ValueError(f"data set {number} has the columns {shape}, data set 0 {shapes[0]}; build both alike")

    def __len__(self) -> int:
        return int(self._sizes.sum())

    @property
    def lengths(self) -> np.ndarray:
        """int64 [rows]: real tokens of each row."""
        return np.concatenate([each.lengths for each in self._data_sets])

    def __getitem__(self, number: int) -> Dict[str, np.ndarray]:
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: Sequence[int]) -> List[Dict[str, np.ndarray]]:
        """Rows of any of the data sets, each of which is asked once."""
        asked = np.asarray(numbers, np.int64)
        if len(asked) and not 0 <= asked.min() <= asked.max() < len(self):
            raise IndexError(f"rows {asked.min()} to {asked.max()} were asked for; there are rows 0 to {len(self) - 1}")
        source = np.searchsorted(self._starts, asked, side="right") - 1
        rows: List[Dict[str, np.ndarray]] = [{}] * len(asked)
        for each in np.unique(source).tolist():
            places = np.flatnonzero(source == each)
            own = (asked[places] - self._starts[each]).tolist()
            for place, row in zip(places.tolist(), self._data_sets[each].__getitems__(own)):
                rows[place] = row
        return rows

    def collate(self, rows: Sequence[Dict[str, np.ndarray]]) -> Dict[str, Any]:
        """As `PackDataset.collate`, of the first data set."""
        return self._data_sets[0].collate(rows)

    def order(self, first: int, count: int) -> np.ndarray:
        """The numbers of the rows at the places from `first` on, int64 [count]."""
        source, draw = self._draws(first, count)
        times, place = np.divmod(draw, self._sizes[source])
        key = _mixed(
            _mixed(_mixed(np.uint64(self.seed) + np.zeros(count, np.uint64)) ^ source.astype(np.uint64))
            ^ times.astype(np.uint64)
        )
        return self._starts[source] + _shuffled(place, self._sizes[source], key)

    def _draws(self, first: int, count: int) -> Tuple[np.ndarray, np.ndarray]:
        """For each place the data set, and how many rows of it came before: int64 [count] both.

        The j-th row of a data set of share w stands at (j + 1/2) / w; the places are these numbers in order. Where n
        rows have come, each data set has its share of n to within half the number of data sets and a half, so that few
        numbers beside those of the places have to be sorted.
        """
        slack = len(self._sizes) + 1
        low = np.maximum(0, np.floor(first * self._shares).astype(np.int64) - slack)
        high = np.ceil((first + count) * self._shares).astype(np.int64) + slack
        source = np.repeat(np.arange(len(low)), high - low)
        draw = np.arange(len(source)) - np.repeat(np.cumsum(high - low) - high, high - low)
        order = np.lexsort((source, (draw + 0.5) / self._shares[source]))
        own = order[first - int(low.sum()) :][:count]
        return source[own], draw[own]

    def batches(
        self, rows: int, *, rank: int = 0, ranks: int = 1, state: Optional[Mapping[str, Any]] = None
    ) -> Iterator[List[int]]:
        """The rows of one rank, update after update, without end: `batch_sampler` of a DataLoader.

        rows: of an update, on all ranks together; which they are does not depend on the ranks. state: of `state_at`.
        ValueError where the rows cannot be shared equally, or where the state is of another mixture.
        """
        rows, ranks = whole_number("rows", rows, least=1), whole_number("ranks", ranks, least=1)
        if rows % ranks or not 0 <= rank < ranks:
            raise ValueError(
                f"{rows} rows on rank {rank} of {ranks}: give a multiple of the ranks, and a rank below them"
            )
        place = 0
        if state is not None:
            own = self.state_at(0)["mixture"]
            if state.get("mixture") != own:
                raise ValueError(
                    f"the state is of mixture {named(state.get('mixture'))}, this one is {own}: other data sets, "
                    "weights or seed"
                )
            place = whole_number("place of the state", state.get("place"), least=0)
        return self._batches(place + rank * (rows // ranks), rows, rows // ranks)

    def _batches(self, place: int, step: int, own: int) -> Iterator[List[int]]:
        while True:
            yield self.order(place, own).tolist()
            place += step

    def state_at(self, place: int) -> Dict[str, Any]:
        """Plain values to go on with after `place` rows, of all ranks together."""
        said = repr((self.seed, self._sizes.tolist(), [each.hex() for each in self._shares.tolist()]))
        return {
            "place": whole_number("place", place, least=0),
            "mixture": hashlib.sha256(said.encode()).hexdigest()[:16],
        }


def _mixed(values: np.ndarray) -> np.ndarray:
    """Other 64 bits for each value, one to one (the last steps of splitmix64: Steele, Lea and Flood 2014)."""
    with np.errstate(over="ignore"):
        values = values + np.uint64(0x9E3779B97F4A7C15)
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    found: np.ndarray = values ^ (values >> np.uint64(31))
    return found


def _shuffled(places: np.ndarray, sizes: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """For each place below its size another one, one to one for one key: int64, as the places.

    Six rounds of a Feistel network on the smallest square of a power of two that holds the size; what falls beyond the
    size goes through it again (Black and Rogaway, Ciphers with arbitrary finite domains, 2002).
    """
    half = (np.ceil(np.log2(np.maximum(sizes, 2))).astype(np.uint64) + np.uint64(1)) >> np.uint64(1)
    mask = (np.uint64(1) << half) - np.uint64(1)
    found, waiting = places.astype(np.uint64), np.arange(len(places))
    while len(waiting):
        values, own, key, low = found[waiting], half[waiting], keys[waiting], mask[waiting]
        left, right = values >> own, values & low
        for round_ in range(6):
            left, right = right, left ^ (_mixed(right ^ _mixed(key ^ np.uint64(round_))) & low)
        found[waiting] = (left << own) | right
        waiting = waiting[found[waiting] >= sizes[waiting].astype(np.uint64)]
    return found.astype(np.int64)
