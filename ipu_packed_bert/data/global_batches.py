"""Global batches: the packs of one weight update after another, shuffled, resumable, decoded ahead of time."""

from __future__ import annotations

import abc
import hashlib
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import (
    Any,
    Callable,
    Deque,
    Dict,
    Iterable,
    Iterator,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
)

import numpy as np

from pack_data.batching.mixture import PackMixture
from pack_data.batching.pack_dataset import PackDataset
from pack_data.reading.fields import Fields
from pack_data.store.data_set import Manifest, PackStore
from pack_data.store.packs import assemble, decode, disassemble, predictions_per_pack
from pack_data.store.sequences import Sequences

Batch = Dict[str, np.ndarray]  # int32 fields [packs, S | P | D], and scales, float32 [packs]

# The stream of random numbers drawn from run.seed that shuffles the epochs.
_SHUFFLE = 1
_PLACES = 1 << 20  # of a mixture's order, computed at a time


class Packs(abc.ABC):
    """Packs to train or to evaluate on, in an order of their own in each epoch."""

    seed: int
    digest: int  # of the sequences
    arrangement = ""  # names which of them share a pack, and the packs' order; "" where these follow from the settings

    @abc.abstractmethod
    def order(self, epoch: int) -> np.ndarray:
        """Return the packs, by their numbers from 0, in the order of the epoch."""

    @abc.abstractmethod
    def batch(self, numbers: np.ndarray, epoch: int) -> Batch:
        """Return the fields of these packs of the epoch, without scales."""

    def count(self, numbers: np.ndarray, epoch: int, fields: Iterable[str]) -> Dict[str, int]:
        """How many entries of these packs are above 0, by field."""
        batch = self.batch(numbers, epoch)
        return {name: int(np.count_nonzero(batch[name])) for name in fields}

    @abc.abstractmethod
    def alone(self, numbers: np.ndarray, epoch: int) -> Batch:
        """As `batch`, the sequences of these packs each alone in its row: what packing is compared with."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """Packs of an epoch."""

    @abc.abstractmethod
    def again(self) -> Callable[[], Packs]:
        """Return a function that makes the same packs in another process."""


class MixedStore(PackStore):
    """Several data sets of one schema as one: the packs of the first, then those of the next.

    manifest: what an epoch has of them. mixture: its order.
    """

    def __init__(
        self,
        folders: Sequence[str],
        shares: Optional[Sequence[float]],
        seed: int,
        manifest: Manifest,
    ) -> None:
        self.again = partial(MixedStore, folders, shares, seed, manifest)
        self._stores = [PackStore.open(Path(folder)) for folder in folders]
        super().__init__(Path(" + ".join(folders)), manifest)
        self.mixture = PackMixture(
            [PackDataset(store) for store in self._stores], shares, seed=seed
        )

    def records(self, indices: np.ndarray) -> np.ndarray:
        return self._of_each(indices, PackStore.records, self.schema.record_dtype)

    def lengths(self, indices: Optional[np.ndarray] = None) -> np.ndarray:
        indices = np.arange(len(self)) if indices is None else indices
        return self._of_each(indices, PackStore.lengths, self.schema.lengths_dtype)

    def _of_each(
        self, indices: np.ndarray, read: Callable[[PackStore, Any], np.ndarray], dtype: Any
    ) -> np.ndarray:
        ends = np.cumsum([len(store) for store in self._stores])
        found, source = np.empty(len(indices), dtype), np.searchsorted(ends, indices, side="right")
        for number in np.unique(source).tolist():
            own, store = source == number, self._stores[number]
            found[own] = read(store, indices[own] - (ends[number] - len(store)))
        return found

    def close(self) -> None:
        for store in self._stores:
            store.close()


class StoredPacks(Packs):
    """The packs of a data set; every epoch shows each once, in an order drawn from the seed, or mixed as MixedStore.

    vocabulary: rows of the model's table of tokens; a pack with a token beyond them is refused when it is read.
    """

    def __init__(self, store: PackStore, *, seed: int = 0, vocabulary: Optional[int] = None):
        self._store, self.seed, self._vocabulary = store, seed, vocabulary
        self.digest = store.manifest.digest
        shards = "".join(shard.sha256 for shard in store.manifest.shards)
        self.arrangement = hashlib.sha256(shards.encode()).hexdigest()[:16]

    def __len__(self) -> int:
        return len(self._store)

    def order(self, epoch: int) -> np.ndarray:
        if isinstance(self._store, MixedStore):
            mixture, first, end = self._store.mixture, epoch * len(self), (epoch + 1) * len(self)
            some = range(first, end, _PLACES)
            return np.concatenate([mixture.order(at, min(_PLACES, end - at)) for at in some])
        return np.random.default_rng([self.seed, _SHUFFLE, epoch]).permutation(len(self._store))

    def batch(self, numbers: np.ndarray, epoch: int) -> Batch:
        batch = self._store.batch(numbers)
        for name in ("input_ids", "masked_lm_ids") if self._vocabulary else ():
            largest = batch[name].max(axis=1, initial=0)
            if (largest >= self._vocabulary).any():
                row = int(largest.argmax())
                raise ValueError(
                    f"{self._store.folder}: pack {numbers[row]}: {name} has the token {largest[row]}, "
                    f"model.vocabulary_size is {self._vocabulary}; build the data set with the model's vocabulary"
                )
        return batch

    def count(self, numbers: np.ndarray, epoch: int, fields: Iterable[str]) -> Dict[str, int]:
        """From the table of lengths, without reading a pack, where it says."""
        table = self._store.lengths(numbers)
        said = {"next_sentence_weights": int(np.count_nonzero(table["lengths"]))}
        if "prediction_counts" in (table.dtype.names or ()):
            said["masked_lm_weights"] = int(table["prediction_counts"].sum(dtype=np.int64))
        fields = tuple(fields)
        unsaid = [name for name in fields if name not in said]
        return {**said, **(super().count(numbers, epoch, unsaid) if unsaid else {})}

    def alone(self, numbers: np.ndarray, epoch: int) -> Batch:
        return self._rows_of(disassemble(self._store.schema, self._store.records(numbers)))

    def _rows_of(self, sequences: Sequences) -> Batch:
        """Each of these sequences alone in its row."""
        schema, most = self._store.schema, self._store.manifest.max_predictions_per_sequence
        rows = len(sequences)
        needed = int(sequences.prediction_counts.max(initial=0))
        unpacked = replace(
            schema,
            max_sequences_per_pack=1,
            max_predictions_per_pack=min(
                schema.max_predictions_per_pack, predictions_per_pack(most, 1, needed)
            ),
        )
        return decode(
            unpacked, assemble(unpacked, sequences, np.arange(rows), np.zeros(rows, np.int64), rows)
        )

    def again(self) -> Callable[[], Packs]:
        store = self._store
        again = (
            store.again if isinstance(store, MixedStore) else partial(PackStore.open, store.folder)
        )
        return partial(_reopened, again, self.seed, self._vocabulary)


def _reopened(again: Callable[[], PackStore], seed: int, vocabulary: Optional[int]) -> StoredPacks:
    return StoredPacks(again(), seed=seed, vocabulary=vocabulary)


class Layout(NamedTuple):
    """The shape of a task's global batch."""

    fields: Tuple[str, ...]
    scales: Mapping[str, str]  # field -> field whose entries above 0 are counted over the update
    micro_batches_per_update: int
    packs_per_update: int

    def shared(self, parts: int) -> Layout:
        """Return the share of each of several processes: equally many micro-batches, of which the last may be empty."""
        rows = self.packs_per_update // self.micro_batches_per_update
        own = -(-self.micro_batches_per_update // parts)
        return self._replace(micro_batches_per_update=own, packs_per_update=own * rows)

    def read(
        self,
        packs: Packs,
        numbers: np.ndarray,
        epoch: int,
        *,
        share: Tuple[int, int] = (0, 1),
        like: Optional[Batch] = None,
    ) -> Batch:
        """Read the rows of one process, filled as in :meth:`filled`, with the scales of all the packs ``numbers``.

        Only these rows are decoded.
        """
        part, parts = share
        if parts == 1:
            return self.filled(packs.batch(numbers, epoch), like)
        rows = self.shared(parts).packs_per_update
        own = packs.batch(numbers[part * rows : (part + 1) * rows], epoch)
        return self.filled(
            own, like, counts=packs.count(numbers, epoch, self.scales.values()), rows=rows
        )

    def filled(
        self,
        batch: Batch,
        like: Optional[Batch] = None,
        *,
        counts: Optional[Mapping[str, int]] = None,
        rows: Optional[int] = None,
    ) -> Batch:
        """Fill the batch with empty packs (all fields 0) up to the size of an update, and compute its scales.

        ``like``: a batch whose packs have as many places or more; the places that these do not have are unused.
        ``counts``: what the update's packs hold, by counted field, where the batch is a part of it, filled to ``rows``.

        A scale is the micro-batches of the update divided by a count over the update, one value a row: with it the mean
        over all micro-batches of summed losses is the loss normalised over the whole update.
        """
        rows = self.packs_per_update if rows is None else rows
        found = {
            name: _with_zeros(batch[name], rows, (batch if like is None else like)[name].shape[1:])
            for name in self.fields
            if name not in self.scales
        }
        for name, counted in self.scales.items():
            count = int(np.count_nonzero(batch[counted])) if counts is None else counts[counted]
            found[name] = np.full(
                rows, self.micro_batches_per_update / max(1, count), dtype=np.float32
            )
        return {name: found[name] for name in self.fields}


def _with_zeros(values: np.ndarray, rows: int, widths: Tuple[int, ...]) -> np.ndarray:
    if values.shape == (rows, *widths):
        return values
    filled = np.zeros((rows, *widths), dtype=values.dtype)
    filled[tuple(slice(width) for width in values.shape)] = values
    return filled


def in_order(
    packs: Packs, layout: Layout, like: Optional[Batch] = None, share: Tuple[int, int] = (0, 1)
) -> Iterator[Batch]:
    """Each pack once, in the order of their numbers; ``like`` and ``share`` as in :meth:`Layout.read`."""
    for first in range(0, len(packs), layout.packs_per_update):
        numbers = np.arange(first, min(first + layout.packs_per_update, len(packs)))
        yield layout.read(packs, numbers, 0, share=share, like=like)


class SameSequences(NamedTuple):
    """The same sequences in packs and each alone in its row, both filled up to whole micro-batches."""

    packed: Batch
    unpacked: Batch


class Position(NamedTuple):
    """How far training is in the data."""

    epoch: int  # passes over the training packs that are complete
    packs: int  # training packs already used in the current pass


class GlobalBatches:
    """An endless iterator over the batches of ``Engine.step``.

    Every epoch shows every training pack once.  The last batch of an epoch is filled with empty packs, which weigh
    nothing: nothing is dropped.

    Parameters
    ----------
    packs : those to train on.
    held_out : those that :meth:`held_out` gives, of at most the depth and masked tokens of ``packs``; None: none.
    share : (index, parts), for several processes that feed one update: this one decodes and gets the rows of its part,
        with the scales of the whole update.  Which packs an update has does not depend on it.
    prefetch : batches decoded ahead, by one thread.
    """

    def __init__(
        self,
        packs: Packs,
        layout: Layout,
        *,
        held_out: Optional[Packs] = None,
        share: Tuple[int, int] = (0, 1),
        prefetch: int = 2,
    ):
        if not len(packs):
            raise ValueError("there are no packs to train on")
        self.packs, self.layout, self._held_out = packs, layout, held_out
        self.share = share
        self._prefetch = max(1, prefetch)
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="loader")
        self._ahead: Deque[Tuple[Position, Future]] = deque()
        self._order: Tuple[int, np.ndarray] = (-1, np.arange(0))
        self._position = Position(0, 0)
        self._start(Position(0, 0))

    @property
    def packs_per_update(self) -> int:
        """Rows of a global batch."""
        return self.layout.packs_per_update

    @property
    def micro_batches_per_update(self) -> int:
        """Micro-batches of all replicas or ranks in a global batch."""
        return self.layout.micro_batches_per_update

    @property
    def updates_per_epoch(self) -> int:
        """Global batches in which every pack comes once, the last one perhaps incomplete."""
        return -(-len(self.packs) // self.packs_per_update)

    @property
    def sharing(self) -> str:
        """In words: how the processes share an update; empty where there is one."""
        parts, wanted = self.share[1], self.micro_batches_per_update
        if parts == 1:
            return ""
        own = self.layout.shared(parts).micro_batches_per_update
        idle = parts - -(-wanted // own)
        text = f"{parts} share the {wanted} micro-batches of an update, {own} each"
        if own * parts > wanted:
            text += f", {own * parts - wanted} of them empty"
        return text + (
            f"; {idle} of the ranks have nothing to do: lower batch.micro_batch" if idle else ""
        )

    @property
    def position(self) -> Position:
        """Where the next batch begins."""
        return self._position

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        while len(self._ahead) < self._prefetch:
            start = self._ahead[-1][0] if self._ahead else self._position
            numbers, after = self._from(start)
            self._ahead.append(
                (after, self._executor.submit(self._load, self.packs, numbers, start.epoch))
            )
        after, loading = self._ahead.popleft()
        batch = loading.result()
        self._position = after
        return batch

    def first(self) -> Batch:
        """Return the batch at the current position, for an engine to compile with; the next batch is the same one."""
        return self._executor.submit(
            self._load, self.packs, self._from(self._position)[0], self._position.epoch
        ).result()

    def held_out(self) -> Iterator[Batch]:
        """Yield the held-out packs in order, in batches of the same shape."""
        if self._held_out is None:
            raise ValueError("no data set to evaluate on was given")
        like = self._executor.submit(self.packs.batch, np.arange(1), self._position.epoch).result()
        yield from in_order(self._held_out, self.layout, like, self.share)

    def same_sequences(self, updates: int) -> Iterator[SameSequences]:
        """Yield the first batches of the current epoch and their sequences unpacked; the position stays.

        As many as there are without empty packs, `updates` at most, but one in any case. The rows of a micro-batch are
        as many in both.
        """
        epoch, size = self._position.epoch, self.packs_per_update
        micro_batch = size // self.micro_batches_per_update
        order = self._executor.submit(self.packs.order, epoch).result()
        for update in range(max(1, min(updates, len(order) // size))):
            numbers = order[update * size : (update + 1) * size]
            packed, unpacked = (
                self._executor.submit(of, numbers, epoch).result()
                for of in (self.packs.batch, self.packs.alone)
            )
            number = -(-len(unpacked["input_ids"]) // micro_batch)
            shape = self.layout._replace(
                micro_batches_per_update=number, packs_per_update=number * micro_batch
            )
            yield SameSequences(self.layout.filled(packed), shape.filled(unpacked))

    def state(self) -> Dict[str, Any]:
        """Plain values; ``load_state`` continues with the batch that would have come next."""
        return {
            "epoch": self._position.epoch,
            "packs": self._position.packs,
            "seed": self.packs.seed,
            "training_packs": len(self.packs),
            "packs_per_update": self.packs_per_update,
            "data": f"{self.packs.digest:016x}",
            "arrangement": self.packs.arrangement,
        }

    def load_state(self, state: Mapping[str, Any], *, same_batch: bool = True) -> None:
        """Load a state; raise ValueError for another data set or seed, or another batch unless that is allowed."""
        own, said = (
            self.state(),
            Fields.of(state, "the position in the data", "resume another checkpoint"),
        )
        for key, words in (
            ("seed", "run.seed"),
            ("data", "a data set of digest"),
            ("training_packs", "the number of training packs"),
            ("packs_per_update", "the number of packs per update"),
        ):
            if key == "packs_per_update" and not same_batch:
                continue
            if state.get(key) != own[key]:
                raise ValueError(
                    f"the run was saved with {words} {state.get(key)}, it is {own[key]} now; continue with what it "
                    "was begun with"
                )
        # A pass that is over is position 0 of the next one.
        self._start(
            Position(
                said.integer("epoch", least=0),
                said.integer("packs", least=0, most=len(self.packs) - 1),
            )
        )

    def close(self) -> None:
        """Wait for the thread; the packs stay open."""
        for _, loading in self._ahead:
            loading.cancel()
        self._ahead.clear()
        self._executor.shutdown()

    def _start(self, position: Position) -> None:
        for _, loading in self._ahead:
            loading.cancel()
        self._ahead.clear()
        self._position = position

    def _from(self, position: Position) -> Tuple[np.ndarray, Position]:
        """Return the packs of the update that begins at ``position`` (int64 [up to packs_per_update]), and its end."""
        if self._order[0] != position.epoch:
            self._order = (position.epoch, self.packs.order(position.epoch))
        numbers = self._order[1][position.packs : position.packs + self.packs_per_update]
        used = position.packs + len(numbers)
        return numbers, Position(position.epoch + 1, 0) if used == len(self.packs) else Position(
            position.epoch, used
        )

    def _load(self, packs: Packs, numbers: np.ndarray, epoch: int) -> Batch:
        return self.layout.read(packs, numbers, epoch, share=self.share)
