"""Several data sets of packs as one, in chosen shares; the order follows from the seed and the place alone.

    mixture = PackMixture([PackDataset("data/web"), PackDataset("data/code")], weights=[3, 1], seed=1)
    batches = mixture.batches(64, rank=rank, ranks=8)                      # 64 rows an update, 8 of them on each rank
    loader = DataLoader(mixture, batch_sampler=batches, collate_fn=mixture.collate, num_workers=4)
    for batch in batches.counted(loader):
        state = batches.state_dict()                                       # save it; batches(..., state=state) goes on

The order is not kept in memory: the row at any place is computed directly, for any number of rows.
"""

from __future__ import annotations

import itertools
from functools import cached_property
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from pack_data.batching.delivered import DeliveredBatches
from pack_data.batching.identity import digest_of_values
from pack_data.batching.pack_dataset import PackDataset
from pack_data.reading.fields import named, whole_number
from pack_data.store.sequences import mix_bits

_ROUNDS = 6  # of the Feistel network that shuffles the rows of a data set


class PackMixture:
    """A map-style data set over the rows of several data sets, one after another, and a mixed order of the rows.

    Among the first n rows of the order, each data set has its share of n, to within as many rows as there are data
    sets. All rows of a data set come once, in a random order, before they come again in another order.

    Args:
        data_sets: data sets of one kind with the same columns; those of BERT with rows of one shape.
        weights: share of each data set in the rows, numbers above 0. None takes the number of its rows, so that an
            epoch of `len(mixture)` rows shows each row once.
        seed: seed of the order.

    Raises:
        ValueError: a data set is empty or has other columns, or a weight is not above 0.
    """

    def __init__(
        self,
        data_sets: Sequence[PackDataset],
        weights: Optional[Sequence[float]] = None,
        *,
        seed: int = 0,
    ) -> None:
        self.seed = whole_number("seed", seed, least=0, most=2**64 - 1)
        self._data_sets = list(data_sets)
        self._sizes = np.array(list(map(len, self._data_sets)), np.int64)
        if not (len(self._sizes) and self._sizes.all()):
            raise ValueError(
                "data_sets: none, or one without a row; pass data sets that each have a row"
            )
        shares = np.array(self._sizes if weights is None else weights, np.float64)
        are_valid = np.isfinite(shares) & (shares > 0)
        if shares.shape != self._sizes.shape or not are_valid.all():
            raise ValueError(
                f"weights are {weights}; pass one number above 0 for each of {len(self._sizes)} data sets"
            )
        self._shares = shares / shares.sum()
        ends = np.cumsum(self._sizes)
        self._starts = ends - self._sizes
        columns = [_columns_of(data_set) for data_set in self._data_sets]
        for number, others in enumerate(columns):
            if others != columns[0]:
                raise ValueError(
                    f"data set {number} has the columns {others}, data set 0 {columns[0]}; build both alike"
                )

    def __len__(self) -> int:
        return int(self._sizes.sum())

    @property
    def lengths(self) -> np.ndarray:
        """Real tokens of each row, int64 [rows]."""
        return np.concatenate([data_set.lengths for data_set in self._data_sets])

    def __getitem__(self, number: int) -> Dict[str, np.ndarray]:
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: Sequence[int]) -> List[Dict[str, np.ndarray]]:
        """Return the rows with these numbers; each data set is read once."""
        wanted = np.asarray(numbers, np.int64)
        if len(wanted):
            first, last = wanted.min(), wanted.max()
            if first < 0 or last >= len(self):
                raise IndexError(
                    f"rows {first} to {last}: out of range; rows are 0 to {len(self) - 1}"
                )
        sources = np.searchsorted(self._starts, wanted, side="right") - 1
        rows: List[Dict[str, np.ndarray]] = [{}] * len(wanted)
        for source in np.unique(sources).tolist():
            places = np.flatnonzero(sources == source)
            numbers_of_source = wanted[places] - self._starts[source]
            data_set = self._data_sets[source]
            rows_of_source = data_set.__getitems__(numbers_of_source.tolist())
            for place, row in zip(places.tolist(), rows_of_source):
                rows[place] = row
        return rows

    def collate(self, rows: Sequence[Dict[str, np.ndarray]]) -> Dict[str, Any]:
        """Return a batch of rows.

        Args:
            rows: from `mixture[number]`.

        Returns:
            The arrays of the batch, as from `PackDataset.collate`.
        """
        return self._data_sets[0].collate(rows)

    def order(self, first: int, count: int) -> np.ndarray:
        """Return the order of the rows from a place on.

        Args:
            first: place of the first row, from 0.
            count: number of rows.

        Returns:
            Numbers of rows of this data set, int64 [count].
        """
        sources, draws = self._draws(first, count)
        sizes = self._sizes[sources]
        passes, places = np.divmod(draws, sizes)
        keys = _mixed(np.full(count, self.seed, np.uint64))
        keys = _mixed(keys ^ sources.astype(np.uint64))
        keys = _mixed(keys ^ passes.astype(np.uint64))
        shuffled = _shuffled(places, sizes, keys)
        return self._starts[sources] + shuffled

    def _draws(self, first: int, count: int) -> Tuple[np.ndarray, np.ndarray]:
        """Return the data set at each place, and how many of its rows came before: int64 [count] both.

        The j-th row of a data set of share w stands at (j + 1/2) / w; the places are these numbers in order. After n
        rows, each data set has its share of n to within half the number of data sets and a half, so that few other
        numbers than those of the places have to be sorted.
        """
        slack = len(self._sizes) + 1
        last = first + count
        low = np.floor(first * self._shares).astype(np.int64) - slack
        low = np.maximum(0, low)
        high = np.ceil(last * self._shares).astype(np.int64)
        high += slack
        numbers = high - low
        sources = np.repeat(np.arange(len(low)), numbers)
        offsets = np.cumsum(numbers) - high
        draws = np.arange(len(sources)) - np.repeat(offsets, numbers)
        places = (draws + 0.5) / self._shares[sources]
        order = np.lexsort((sources, places))
        skipped = first - int(low.sum())
        chosen = order[skipped : skipped + count]
        return sources[chosen], draws[chosen]

    def batches(
        self,
        rows: int,
        *,
        rank: int = 0,
        ranks: int = 1,
        state: Optional[Mapping[str, Any]] = None,
    ) -> MixedBatches:
        """Return the rows of one rank, update after update, without end: the `batch_sampler` of a DataLoader.

        Args:
            rows: rows of an update, on all ranks together; which they are does not depend on the ranks.
            rank: number of this process, from 0.
            ranks: processes that share each update.
            state: where to begin, from `MixedBatches.state_dict` or `state_at`.

        Returns:
            An iterable of lists of rows // ranks row numbers.

        Raises:
            ValueError: the rows cannot be shared equally, or the state is of another mixture.
        """
        rows = whole_number("rows", rows, least=1)
        ranks = whole_number("ranks", ranks, least=1)
        if rows % ranks or not 0 <= rank < ranks:
            raise ValueError(
                f"{rows} rows on rank {rank} of {ranks}: pass a multiple of the ranks, and a rank below them"
            )
        batches = MixedBatches(self, rows, rank, ranks)
        if state is not None:
            batches.load_state_dict(state)
        return batches

    def state_at(self, place: int) -> Dict[str, Any]:
        """Return the state at a place.

        Args:
            place: rows of all ranks together that were shown before.

        Returns:
            Plain values: place, and the identity of the mixture.
        """
        return {"place": whole_number("place", place, least=0), "mixture": self.identity}

    @cached_property
    def identity(self) -> str:
        """Digest of everything that the rows follow from: seed, shares, content and packing of the data sets."""
        data_sets = [data_set.identity for data_set in self._data_sets]
        return digest_of_values(self.seed, self._shares, data_sets)


class MixedBatches(DeliveredBatches):
    """The batches of one rank of a mixture, without end, from `PackMixture.batches`.

    A loop over `counted(loader)` continues after the last batch that the former loop got, whatever workers had read in
    advance. `len` is the number of updates in an epoch of `len(mixture)` rows.

    Args:
        mixture: data set of the rows.
        rows: rows of an update, on all ranks together, a multiple of ranks.
        rank: number of this process, from 0.
        ranks: processes that share each update.
    """

    def __init__(self, mixture: PackMixture, rows: int, rank: int, ranks: int) -> None:
        self._mixture = mixture
        self._rows = rows
        self._rank = rank
        self._share = rows // ranks
        self._first_place = 0

    @property
    def _place(self) -> int:
        """Rows of all ranks before the next update."""
        return self._first_place + self._delivered * self._rows

    def __len__(self) -> int:
        return -(-len(self._mixture) // self._rows)

    def __next__(self) -> List[int]:
        self._check_idle()
        batch = self._batch(self._place)
        self._go_to(self._place + self._rows)
        return batch

    def state_dict(self) -> Dict[str, Any]:
        """Return the state after the updates that were delivered.

        Returns:
            Plain values, the same on every rank.

        Raises:
            ValueError: a loop took batches without counting them, so that the place is not known.
        """
        return self._mixture.state_at(self._place)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the place of `state`.

        Args:
            state: from `state_dict` or `PackMixture.state_at`, taken with any number of rows and ranks.

        Raises:
            ValueError: the state is of other data sets, or of other weights or another seed, or a loop is under way.
        """
        self._check_idle()
        mixture = self._mixture.identity
        mixture_of_state = state.get("mixture")
        if mixture_of_state != mixture:
            raise ValueError(
                f"the state is of mixture {named(mixture_of_state)}, this one is {mixture}: the content or packing of "
                "a data set, the weights or the seed differ; pass those that the state was taken with"
            )
        self._go_to(whole_number("place of the state", state.get("place"), least=0))

    def _go_to(self, place: int) -> None:
        self._first_place = place
        self._forget()

    def _go_on(self) -> None:
        self._go_to(self._place)

    def _batches(self) -> Iterator[List[int]]:
        return map(self._batch, itertools.count(self._first_place, self._rows))

    def _state_after(self, state: Mapping[str, Any], batches: int) -> Dict[str, Any]:
        return self._mixture.state_at(state["place"] + batches * self._rows)

    def _batch(self, place: int) -> List[int]:
        first = place + self._rank * self._share
        return self._mixture.order(first, self._share).tolist()


def _columns_of(data_set: PackDataset) -> Dict[str, Any]:
    """Return the columns of a data set; of BERT, with their shapes."""
    columns = {}
    for name, values in data_set[0].items():
        columns[name] = data_set.is_bert and values.shape
    return columns


def _mixed(values: np.ndarray) -> np.ndarray:
    """Return other 64 bits for each value, one to one (splitmix64: Steele, Lea and Flood, 2014)."""
    with np.errstate(over="ignore"):
        return mix_bits(values + np.uint64(0x9E3779B97F4A7C15))


def _shuffled(places: np.ndarray, sizes: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Return another place for each place below its size, one to one for one key: int64, as the places.

    A Feistel network on the smallest square of a power of two that holds the size; what falls beyond the size goes
    through it again (Black and Rogaway, Ciphers with arbitrary finite domains, 2002).
    """
    bits = np.log2(np.maximum(sizes, 2))
    bits = np.ceil(bits).astype(np.uint64)
    half_bits = (bits + np.uint64(1)) >> np.uint64(1)
    masks = (np.uint64(1) << half_bits) - np.uint64(1)
    shuffled = places.astype(np.uint64)
    waiting = np.arange(len(places))
    while len(waiting):
        half = half_bits[waiting]
        mask = masks[waiting]
        key = keys[waiting]
        left = shuffled[waiting] >> half
        right = shuffled[waiting] & mask
        for round_ in range(_ROUNDS):
            round_key = _mixed(key ^ np.uint64(round_))
            mixed = _mixed(right ^ round_key) & mask
            left, right = right, left ^ mixed
        shuffled[waiting] = (left << half) | right
        is_beyond = shuffled[waiting] >= sizes[waiting].astype(np.uint64)
        waiting = waiting[is_beyond]
    return shuffled.astype(np.int64)
