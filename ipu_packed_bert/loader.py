"""Global batches: the packs of one weight update after another, shuffled, resumable, decoded ahead of time."""
from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Deque, Dict, Iterator, NamedTuple, Optional, Tuple

import numpy as np

from ipu_packed_bert.config import Config
from pack_data.packs import FIELDS
from pack_data.store import PackStore

Batch = Dict[str, np.ndarray]  # the ten fields of a pack, int32 [packs, S | P | D], and two scales, float32 [packs]

# The stream of random numbers drawn from run.seed that shuffles the epochs.
_SHUFFLE = 1


class Position(NamedTuple):
    """How far training is in the data."""

    epoch: int  # passes over the training packs that are complete
    packs: int  # training packs already used in the current pass


class GlobalBatches:
    """An endless iterator over the batches of ``Engine.step``.

    Every epoch shows every training pack once, in an order drawn from ``run.seed`` and the epoch's number.  The last batch
    of an epoch is filled with empty packs (all fields 0), which weigh nothing: nothing is dropped.

    Besides the fields of a pack a batch has ``mlm_scale`` and ``nsp_scale``, constant within the update: with them the
    mean over all micro-batches of the summed losses is the loss normalised over the whole update.  With N micro-batches
    in the update, M masked tokens and Q sequences: nsp_scale = N / Q, and mlm_scale = N / M for the normalisation "token",
    N / Q for "sequence".

    Parameters
    ----------
    share : (index, parts), for several processes that feed one update: this one gets the rows of its part, with the
        scales of the whole update.
    prefetch : batches decoded ahead, by one thread.
    evaluation : the data set of ``held_out``; its packs have at most the depth and masked tokens of ``store``'s.
    """

    def __init__(self, store: PackStore, config: Config, *, packing_factor: float,
                 share: Tuple[int, int] = (0, 1), prefetch: int = 2, evaluation: Optional[PackStore] = None):
        self._store, self._evaluation = store, evaluation
        self._seed = config.run.seed
        self._normalisation = config.loss.normalisation
        self.micro_batches_per_update = config.micro_batches_per_update(packing_factor)
        self.packs_per_update = config.packs_per_update(packing_factor)
        part, parts = share
        if self.packs_per_update % parts:
            raise ValueError("an update has {} packs; they do not divide among {} processes".format(
                self.packs_per_update, parts))
        rows = self.packs_per_update // parts
        self._rows = slice(part * rows, (part + 1) * rows)

        self.training_packs = len(store)
        if not self.training_packs:
            raise ValueError(f"{config.data.directory}: no packs to train on")
        self._prefetch = max(1, prefetch)
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="loader")
        self._ahead: Deque[Tuple[Position, Future]] = deque()
        self._order: Tuple[int, np.ndarray] = (-1, np.arange(0))
        self._position = Position(0, 0)
        self._start(Position(0, 0))

    @property
    def updates_per_epoch(self) -> int:
        return -(-self.training_packs // self.packs_per_update)

    @property
    def position(self) -> Position:
        """Where the next batch begins."""
        return self._position

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        while len(self._ahead) < self._prefetch:
            start = self._ahead[-1][0] if self._ahead else self._position
            packs, after = self._packs_from(start)
            self._ahead.append((after, self._executor.submit(self._load, packs)))
        after, loading = self._ahead.popleft()
        batch = loading.result()
        self._position = after
        return batch

    def first(self) -> Batch:
        """The batch at the current position, for an engine to compile with; the next one is the same."""
        return self._load(self._packs_from(self._position)[0])

    def held_out(self) -> Iterator[Batch]:
        """The packs of the evaluation data set in order, in batches of the same shape."""
        if self._evaluation is None:
            raise ValueError("no data set to evaluate on was given")
        packs = np.arange(len(self._evaluation))
        for first in range(0, len(packs), self.packs_per_update):
            yield self._load(packs[first:first + self.packs_per_update], self._evaluation)

    def state(self) -> Dict[str, Any]:
        """Plain values; ``load_state`` continues with the batch that would have come next."""
        return {"epoch": self._position.epoch, "packs": self._position.packs, "seed": self._seed,
                "training_packs": self.training_packs, "packs_per_update": self.packs_per_update,
                "data": "{:016x}".format(self._store.manifest.digest)}

    def load_state(self, state: Dict[str, Any]) -> None:
        """Raises ValueError where the state is of another data set, seed or batch."""
        own = self.state()
        for key, words in (("seed", "run.seed"), ("data", "a data set of digest"), ("training_packs", "the number of training packs"),
                           ("packs_per_update", "the number of packs per update")):
            if state[key] != own[key]:
                raise ValueError("the run was saved with {} {}, it is {} now; continue with what it was begun with".format(
                    words, state[key], own[key]))
        self._start(Position(state["epoch"], state["packs"]))

    def close(self) -> None:
        """Wait for the thread; the store stays open."""
        for _, loading in self._ahead:
            loading.cancel()
        self._ahead.clear()
        self._executor.shutdown()

    def _start(self, position: Position) -> None:
        for _, loading in self._ahead:
            loading.cancel()
        self._ahead.clear()
        self._position = position

    def _packs_from(self, position: Position) -> Tuple[np.ndarray, Position]:
        """The packs of the update that begins at ``position`` (int64 [up to packs_per_update]), and where it ends."""
        if self._order[0] != position.epoch:
            random = np.random.default_rng([self._seed, _SHUFFLE, position.epoch])
            self._order = (position.epoch, random.permutation(self.training_packs))
        packs = self._order[1][position.packs:position.packs + self.packs_per_update]
        used = position.packs + len(packs)
        return packs, Position(position.epoch + 1, 0) if used == self.training_packs else Position(position.epoch, used)

    def _load(self, packs: np.ndarray, store: Optional[PackStore] = None) -> Batch:
        decoded = (self._store if store is None else store).batch(packs)
        like = decoded if store is None else self._store.batch(np.arange(1))
        batch = {name: self._filled(decoded[name], like[name].shape[1]) for name in FIELDS}
        sequences = int(np.count_nonzero(batch["next_sentence_weights"]))
        masked = int(np.count_nonzero(batch["masked_lm_weights"]))
        per_sequence = self.micro_batches_per_update / max(1, sequences)
        per_token = self.micro_batches_per_update / max(1, masked)
        scales = {"mlm_scale": per_token if self._normalisation == "token" else per_sequence, "nsp_scale": per_sequence}
        for name, scale in scales.items():
            batch[name] = np.full(self.packs_per_update, scale, dtype=np.float32)
        return {name: values[self._rows] for name, values in batch.items()}

    def _filled(self, values: np.ndarray, width: int) -> np.ndarray:
        """``values`` with zeros up to the size of an update: empty packs, and unused places in packs of a smaller depth."""
        shape = (self.packs_per_update, width)
        if values.shape == shape:
            return values
        filled = np.zeros(shape, dtype=values.dtype)
        filled[:values.shape[0], :values.shape[1]] = values
        return filled
