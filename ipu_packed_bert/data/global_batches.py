"""Global batches: the packs of each weight update, shuffled, resumable, and decoded ahead of time."""

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

_SHUFFLE = 1  # index of the random stream that shuffles epochs among those that run.seed starts
_PLACES = 1 << 20  # places of a mixture's order that are computed at a time


class Packs(abc.ABC):
    """Packs to train or evaluate on, in a new order in each epoch."""

    seed: int
    digest: int  # of the sequences
    # Identifies which sequences share a pack, and the order of packs; empty if the settings determine both.
    arrangement = ""
    # True: the updates of an epoch differ by one pack at most; False: all but the last have the same number of packs.
    even_updates = False

    @abc.abstractmethod
    def order(self, epoch: int) -> np.ndarray:
        """Return the indices of all packs in the order of an epoch."""

    @abc.abstractmethod
    def batch(self, numbers: np.ndarray, epoch: int) -> Batch:
        """Return the fields of some packs of an epoch, without scales."""

    def count(self, numbers: np.ndarray, epoch: int, fields: Iterable[str]) -> Dict[str, int]:
        """Count the nonzero entries of some packs, by field."""
        batch = self.batch(numbers, epoch)
        return {name: int(np.count_nonzero(batch[name])) for name in fields}

    @abc.abstractmethod
    def alone(self, numbers: np.ndarray, epoch: int) -> Batch:
        """Return the fields of the sequences of some packs with one sequence per row, to compare packing with."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """Return the number of packs of an epoch."""

    @abc.abstractmethod
    def again(self) -> Callable[[], Packs]:
        """Return a function that makes the same packs in another process."""


class MixedStore(PackStore):
    """Several data sets of one schema as one, with their packs one data set after another.

    Args:
        folders: directories of the data sets.
        shares: relative share of each in an epoch; by default their sizes.
        seed: seed of the order of epochs.
        manifest: describes an epoch of the mixture.
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
        return self._read(indices, PackStore.records, self.schema.record_dtype)

    def lengths(self, indices: Optional[np.ndarray] = None) -> np.ndarray:
        indices = np.arange(len(self)) if indices is None else indices
        return self._read(indices, PackStore.lengths, self.schema.lengths_dtype)

    def _read(
        self, indices: np.ndarray, read: Callable[[PackStore, Any], np.ndarray], dtype: Any
    ) -> np.ndarray:
        """Read rows of all data sets."""
        ends = np.cumsum([len(store) for store in self._stores])
        source = np.searchsorted(ends, indices, side="right")
        rows = np.empty(len(indices), dtype)
        for number in np.unique(source).tolist():
            store = self._stores[number]
            start = ends[number] - len(store)
            is_here = source == number
            rows[is_here] = read(store, indices[is_here] - start)
        return rows

    def close(self) -> None:
        for store in self._stores:
            store.close()


class StoredPacks(Packs):
    """The packs of a data set: each once per epoch in a random order, or the mixture of a `MixedStore`.

    Args:
        store: the data set.
        seed: seed of the order.
        vocabulary: rows of the model's token embeddings; reading a pack with a larger token raises ValueError.
    """

    def __init__(self, store: PackStore, *, seed: int = 0, vocabulary: Optional[int] = None):
        self._store = store
        self.seed = seed
        self._vocabulary = vocabulary
        self.digest = store.manifest.digest
        shards = "".join(shard.sha256 for shard in store.manifest.shards)
        self.arrangement = hashlib.sha256(shards.encode()).hexdigest()[:16]

    def __len__(self) -> int:
        return len(self._store)

    def order(self, epoch: int) -> np.ndarray:
        size = len(self)
        if isinstance(self._store, MixedStore):
            mixture = self._store.mixture
            end = (epoch + 1) * size
            parts = []
            for first in range(epoch * size, end, _PLACES):
                parts.append(mixture.order(first, min(_PLACES, end - first)))
            return np.concatenate(parts)
        return np.random.default_rng([self.seed, _SHUFFLE, epoch]).permutation(size)

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
        """Count from the table of lengths, without reading packs, as far as it has the fields."""
        table = self._store.lengths(numbers)
        counts = {"next_sentence_weights": int(np.count_nonzero(table["lengths"]))}
        if "prediction_counts" in (table.dtype.names or ()):
            counts["masked_lm_weights"] = int(table["prediction_counts"].sum(dtype=np.int64))
        others = [name for name in fields if name not in counts]
        if others:
            counts.update(super().count(numbers, epoch, others))
        return counts

    def alone(self, numbers: np.ndarray, epoch: int) -> Batch:
        return self._rows_of(disassemble(self._store.schema, self._store.records(numbers)))

    def _rows_of(self, sequences: Sequences) -> Batch:
        """Return a batch with each sequence alone in its row."""
        schema = self._store.schema
        rows = len(sequences)
        most = self._store.manifest.max_predictions_per_sequence
        needed = int(sequences.prediction_counts.max(initial=0))
        predictions = predictions_per_pack(most, 1, needed)
        unpacked = replace(
            schema,
            max_sequences_per_pack=1,
            max_predictions_per_pack=min(schema.max_predictions_per_pack, predictions),
        )
        places = np.zeros(rows, np.int64)
        return decode(unpacked, assemble(unpacked, sequences, np.arange(rows), places, rows))

    def again(self) -> Callable[[], Packs]:
        store = self._store
        reopen: Callable[[], PackStore] = partial(PackStore.open, store.folder)
        if isinstance(store, MixedStore):
            reopen = store.again
        return partial(_reopened, reopen, self.seed, self._vocabulary)


def _reopened(reopen: Callable[[], PackStore], seed: int, vocabulary: Optional[int]) -> StoredPacks:
    return StoredPacks(reopen(), seed=seed, vocabulary=vocabulary)


class Layout(NamedTuple):
    """The shape of a task's global batch."""

    fields: Tuple[str, ...]
    scales: Mapping[str, str]  # field -> field with the entries that are counted over the update
    micro_batch: int  # rows of a forward pass
    micro_batches_per_update: int
    packs_per_update: int  # packs of data; empty packs fill the last micro-batches

    @property
    def rows(self) -> int:
        """Rows of the global batch: the packs of data and the empty ones."""
        return self.micro_batches_per_update * self.micro_batch

    def of_packs(self, packs: int) -> Layout:
        """Return the layout of an update of another number of packs, in micro-batches of the same size."""
        number = -(-packs // self.micro_batch)
        return self._replace(micro_batches_per_update=number, packs_per_update=packs)

    def shared(self, parts: int) -> Layout:
        """Return the layout of one of several processes, which have equal numbers of micro-batches.

        The last micro-batches may be empty.
        """
        number = -(-self.micro_batches_per_update // parts)
        return self.of_packs(number * self.micro_batch)

    def read(
        self,
        packs: Packs,
        numbers: np.ndarray,
        epoch: int,
        *,
        share: Tuple[int, int] = (0, 1),
        like: Optional[Batch] = None,
    ) -> Batch:
        """Read the rows of one process of an update, with the scales of the whole update.

        Args:
            packs: source of the packs.
            numbers: packs of the whole update.
            epoch: epoch of the packs.
            share: (index, number) of processes.
            like: as in :meth:`filled`.
        """
        part, parts = share
        if parts == 1:
            return self.filled(packs.batch(numbers, epoch), like)
        rows = self.shared(parts).rows
        batch = packs.batch(numbers[part * rows : (part + 1) * rows], epoch)
        counts = packs.count(numbers, epoch, self.scales.values())
        return self.filled(batch, like, counts=counts, rows=rows)

    def filled(
        self,
        batch: Batch,
        like: Optional[Batch] = None,
        *,
        counts: Optional[Mapping[str, int]] = None,
        rows: Optional[int] = None,
    ) -> Batch:
        """Fill a batch with empty packs (all fields 0) up to whole micro-batches, and compute its scales.

        A scale is the micro-batches of the update divided by a count over the update, one value per row. The mean over
        all micro-batches of summed losses is then the loss normalised over the whole update.

        Args:
            batch: the batch.
            like: a batch with the shapes to fill up to; its packs have at least the places of ``batch``.
            counts: counts of the whole update by field, if the batch is a part of it.
            rows: rows to fill up to, if the batch is a part of an update.
        """
        rows = self.rows if rows is None else rows
        shapes = batch if like is None else like
        filled: Batch = {}
        for name in self.fields:
            if name not in self.scales:
                filled[name] = _with_zeros(batch[name], rows, shapes[name].shape[1:])
                continue
            counted = self.scales[name]
            count = int(np.count_nonzero(batch[counted])) if counts is None else counts[counted]
            scale = self.micro_batches_per_update / max(1, count)
            filled[name] = np.full(rows, scale, dtype=np.float32)
        return filled


def _with_zeros(values: np.ndarray, rows: int, widths: Tuple[int, ...]) -> np.ndarray:
    if values.shape == (rows, *widths):
        return values
    filled = np.zeros((rows, *widths), dtype=values.dtype)
    filled[tuple(slice(width) for width in values.shape)] = values
    return filled


def in_order(
    packs: Packs, layout: Layout, like: Optional[Batch] = None, share: Tuple[int, int] = (0, 1)
) -> Iterator[Batch]:
    """Yield all packs in their stored order; ``like`` and ``share`` are those of :meth:`Layout.read`."""
    for first in range(0, len(packs), layout.packs_per_update):
        numbers = np.arange(first, min(first + layout.packs_per_update, len(packs)))
        yield layout.read(packs, numbers, 0, share=share, like=like)


class SameSequences(NamedTuple):
    """The same sequences in packs and in rows of one sequence, both filled up to whole micro-batches."""

    packed: Batch
    unpacked: Batch


class Position(NamedTuple):
    """The position of training in the data."""

    epoch: int  # complete passes over the training packs
    packs: int  # training packs used in the current pass


class GlobalBatches:
    """An endless iterator over the batches of ``Engine.step``.

    Every epoch has each training pack once. Empty packs without weight fill incomplete batches, so that no pack is
    dropped.

    Args:
        packs: packs to train on.
        layout: shape of a batch.
        held_out: packs for :meth:`held_out`, if any, with at most the depth and masked tokens of ``packs``.
        share: (index, number) of processes. This one decodes its share of the rows of each update; the packs of an
            update do not depend on it.
        prefetch: batches that one thread decodes ahead.
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
            raise ValueError("there are no packs to train on; build a larger data set")
        self.packs = packs
        self.layout = layout
        self._held_out = held_out
        self.share = share
        self._prefetch = max(1, prefetch)
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="loader")
        self._ahead: Deque[Tuple[Position, Future]] = deque()
        self._order: Tuple[int, np.ndarray] = (-1, np.arange(0))
        self._position = Position(0, 0)
        self._start(Position(0, 0))

    @property
    def packs_per_update(self) -> int:
        """The most packs of data in a global batch, which may have further, empty rows."""
        return self.layout.packs_per_update

    @property
    def micro_batches_per_update(self) -> int:
        """Micro-batches of all replicas or ranks in a global batch."""
        return self.layout.micro_batches_per_update

    @property
    def updates_per_epoch(self) -> int:
        """Global batches of an epoch."""
        return -(-len(self.packs) // self.packs_per_update)

    @property
    def sharing(self) -> str:
        """Description of the processes' shares of an update; empty for one process."""
        parts = self.share[1]
        total = self.micro_batches_per_update
        if parts == 1:
            return ""
        number = self.layout.shared(parts).micro_batches_per_update
        idle = parts - -(-total // number)
        text = f"{parts} share the {total} micro-batches of an update, {number} each"
        if number * parts > total:
            text += f", {number * parts - total} of them empty"
        if idle:
            text += f"; {idle} of the ranks have nothing to do: lower batch.micro_batch"
        return text

    @property
    def position(self) -> Position:
        """Position of the next batch."""
        return self._position

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        while len(self._ahead) < self._prefetch:
            start = self._ahead[-1][0] if self._ahead else self._position
            numbers, after = self._from(start)
            loading = self._executor.submit(self._load, self.packs, numbers, start.epoch)
            self._ahead.append((after, loading))
        after, loading = self._ahead.popleft()
        batch = loading.result()
        self._position = after
        return batch

    def first(self) -> Batch:
        """Return the next batch without advancing, for an engine to compile with."""
        numbers, _ = self._from(self._position)
        return self._executor.submit(self._load, self.packs, numbers, self._position.epoch).result()

    def held_out(self) -> Iterator[Batch]:
        """Yield the held-out packs in order, in batches of the same shape."""
        if self._held_out is None:
            raise ValueError("there is no held-out data set to evaluate on; pass held_out")
        like = self._executor.submit(self.packs.batch, np.arange(1), self._position.epoch).result()
        yield from in_order(self._held_out, self.layout, like, self.share)

    def same_sequences(self, updates: int) -> Iterator[SameSequences]:
        """Yield the first batches of the current epoch and their sequences unpacked, without advancing.

        At most ``updates`` complete batches, but at least one batch. Micro-batches have the same rows on both
        sides.
        """
        epoch = self._position.epoch
        size = self.packs_per_update
        order = self._executor.submit(self.packs.order, epoch).result()
        for update in range(max(1, min(updates, len(order) // size))):
            numbers = order[update * size : (update + 1) * size]
            packed = self._executor.submit(self.packs.batch, numbers, epoch).result()
            unpacked = self._executor.submit(self.packs.alone, numbers, epoch).result()
            shape = self.layout.of_packs(len(unpacked["input_ids"]))
            yield SameSequences(self.layout.filled(packed), shape.filled(unpacked))

    def state(self) -> Dict[str, Any]:
        """Return the position as plain values, for ``load_state``."""
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
        """Load a state; raise ValueError if the data set, the seed or, with ``same_batch``, the batch differs."""
        fields = Fields.of(state, "the position in the data", "resume another checkpoint")
        current = self.state()
        names = {
            "seed": "run.seed",
            "data": "a data set of digest",
            "training_packs": "the number of training packs",
        }
        if same_batch:
            names["packs_per_update"] = "the number of packs per update"
        for key, name in names.items():
            if state.get(key) != current[key]:
                raise ValueError(
                    f"the run was saved with {name} {state.get(key)}, but it is {current[key]} now; restore the data"
                    " and settings of the run"
                )
        epoch = fields.integer("epoch", least=0)
        # The end of a pass is stored as position 0 of the next.
        self._start(Position(epoch, fields.integer("packs", least=0, most=len(self.packs) - 1)))

    def close(self) -> None:
        """Stop the thread; the packs stay open."""
        self._start(self._position)
        self._executor.shutdown()

    def _start(self, position: Position) -> None:
        for _, loading in self._ahead:
            loading.cancel()
        self._ahead.clear()
        self._position = position

    def _from(self, position: Position) -> Tuple[np.ndarray, Position]:
        """Return the packs of the update at a position, int64 [up to packs_per_update], and the position after it."""
        epoch = position.epoch
        if self._order[0] != epoch:
            self._order = (epoch, self.packs.order(epoch))
        numbers = self._order[1][position.packs : self._end(position.packs)]
        return numbers, self.after(position)

    def after(self, position: Position) -> Position:
        """Return the position after the update at a position."""
        end = self._end(position.packs)
        if end == len(self.packs):
            return Position(position.epoch + 1, 0)
        return position._replace(packs=end)

    def _end(self, used: int) -> int:
        """Return the packs of an epoch that are used after the update that begins at pack ``used``."""
        packs = len(self.packs)
        if not self.packs.even_updates:
            return min(used + self.packs_per_update, packs)
        # Update n (1-based) of the epoch ends at pack n x packs / updates, rounded down.
        updates = self.updates_per_epoch
        number = -(-(used + 1) * updates // packs)
        return number * packs // updates

    def _load(self, packs: Packs, numbers: np.ndarray, epoch: int) -> Batch:
        return self.layout.read(packs, numbers, epoch, share=self.share)
