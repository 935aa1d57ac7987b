"""Batches of an epoch, epoch after epoch, as lists of numbers for a DataLoader, which continue after any batch."""

from __future__ import annotations

import zlib
from abc import abstractmethod
from bisect import bisect
from dataclasses import asdict
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence

import numpy as np

from pack_data.batching.collators import token_columns
from pack_data.batching.delivered import DeliveredBatches
from pack_data.batching.micro_batches import checked_lengths, micro_batches
from pack_data.batching.plans import BatchOptions, EpochPlan, get_way
from pack_data.lengths.overlong import Longer, fit
from pack_data.reading.fields import named, whole_number
from pack_data.store.meanings import OF_SEQUENCES


class _EpochSampler(DeliveredBatches):
    """The batches of an epoch's plan, epoch after epoch, for one rank or all in turn; it continues at any place.

    ranks: processes that share each step. rank: number of this process; None gives the batches of all ranks in turn,
    step by step.
    """

    def __init__(self, ranks: int, rank: Optional[int]) -> None:
        self._ranks = ranks
        if rank is not None and not 0 <= rank < ranks:
            raise ValueError(f"rank is {rank}; pass 0 to {ranks - 1}")
        self.rank = rank
        # True if a place inside an epoch was loaded, and no batch was requested since.
        self._pending = False
        self._epoch = -1
        self._go_to(0, 0)

    @abstractmethod
    def _planned(self, epoch: int) -> Any:
        """Return the plan of an epoch, which has `steps` and `has(step)`."""

    @abstractmethod
    def _numbers(self, plan: Any, step: int, rank: int) -> List[int]:
        """Return a batch of the plan."""

    @abstractmethod
    def _identity(self) -> Dict[str, Any]:
        """Return everything that determines the batches, in plain values, the same on every rank."""

    def _go_to(self, epoch: int, step: int) -> None:
        if epoch != self._epoch:
            self._plan = self._planned(epoch)
        self._epoch = epoch
        self._first_step = step
        self._forget()

    @property
    def _batches_per_step(self) -> int:
        return self._ranks if self.rank is None else 1

    @property
    def _step(self) -> int:
        """Steps of this epoch that were delivered; ValueError if it is not known."""
        return self._first_step + self._delivered // self._batches_per_step

    @property
    def epoch(self) -> int:
        """Number of the epoch of the next batch, from 0."""
        self._settle()
        return self._epoch

    @property
    def sampler(self) -> _EpochSampler:
        """Itself: Accelerate sets the epoch on the `sampler` of a batch sampler that it has wrapped."""
        return self

    def __len__(self) -> int:
        """Return the number of batches of this epoch, the same on each rank; after the last one, of the next epoch."""
        self._settle()
        return self._plan.steps * self._batches_per_step

    def __iter__(self) -> Iterator[List[int]]:
        """Yield the batches of this epoch from the place on; after its last one, those of the next epoch.

        A last batch is empty if fewer examples than ranks are left.
        """
        return super().__iter__()

    def _go_on(self) -> None:
        step = self._step
        if self._plan.has(step):
            self._go_to(self._epoch, step)
        else:
            self._end()

    def _batches(self) -> Iterator[List[int]]:
        self._pending = False
        return self._batches_from(self._plan, self._first_step)

    def _batches_from(self, plan: Any, step: int) -> Iterator[List[int]]:
        ranks = range(self._ranks) if self.rank is None else (self.rank,)
        while plan.has(step):
            for rank in ranks:
                yield self._numbers(plan, step, rank)
            step += 1

    def _batches_of_one(self, loader: Any) -> int:
        """Return 1, or the number of ranks if the loader deals the batches of all ranks to them, as Accelerate does."""
        if self.rank is not None or self._ranks == 1:
            return 1
        batches = len(self)
        for batches_of_one in (1, self._ranks):
            if len(loader) * batches_of_one == batches:
                return batches_of_one
        raise ValueError(
            f"counted: the loader has {len(loader)} batches, the sampler {batches} of {self._ranks} ranks; pass a "
            "loader of all of them or of each rank's, or use state_at"
        )

    def _state_after(self, state: Mapping[str, Any], batches: int) -> Dict[str, Any]:
        return {**state, "step": state["step"] + batches // self._batches_per_step}

    def _end(self) -> None:
        self._go_to(self._epoch + 1, 0)

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch. A place inside this epoch that was loaded before is kept.

        Args:
            epoch: number of the epoch, from 0.

        Raises:
            ValueError: a place in another epoch was loaded and no batch was taken since. A caller that counts its
                epochs from 0 again would train on the same batches again.
        """
        epoch = whole_number("epoch", epoch, least=0)
        if self._pending and epoch != self._epoch:
            raise ValueError(
                f"set_epoch({epoch}) after a state in epoch {self._epoch} was loaded; go on with epoch {self._epoch}, "
                "as in: for epoch in range(sampler.epoch, epochs)"
            )
        if not self._pending:
            self._go_to(epoch, 0)

    def state_dict(self) -> Dict[str, Any]:
        """Return the place of the next batch, and everything that the batches follow from, in plain values.

        The state is the same on every rank; a step counts once all its batches are delivered. Loops over
        `counted(loader)` count them.

        Returns:
            Values for `load_state_dict`.

        Raises:
            ValueError: a loop took batches without counting them, so that the place is not known.
        """
        return self.state_at(self._epoch, self._step)

    def state_at(self, epoch: int, step: int) -> Dict[str, Any]:
        """Return the state after some steps of an epoch.

        Args:
            epoch: number of the epoch, from 0.
            step: steps of the epoch that were made.

        Returns:
            Values for `load_state_dict`.
        """
        return {"epoch": epoch, "step": step, **self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the next iteration at the place of a state; after the last step, with the next epoch.

        Args:
            state: from `state_dict` or `state_at`.

        Raises:
            ValueError: the state was taken with another way, other options or other data, or a loop is under way.
        """
        self._check_idle()
        for name, value in self._identity().items():
            if state.get(name) != value:
                raise ValueError(
                    f"the state was taken with {name} {named(state.get(name))}, this sampler has {value}; "
                    "pass the same data and options, or begin without the state"
                )
        epoch = whole_number("epoch of the state", state.get("epoch"), least=0)
        step = whole_number("step of the state", state.get("step"), least=0)
        self._go_to(epoch, 0)
        if step and not self._plan.has(step - 1):
            raise ValueError(
                f"the state is at step {step} of epoch {epoch}, which has {self._plan.steps} steps; pass another state"
            )
        self._first_step = step
        if step:
            self._go_on()
        self._pending = True


class IndexBatchSampler(_EpochSampler):
    """The batches of one rank by one of the nine ways, as lists of numbers: the `batch_sampler` of a DataLoader.

    Example::

        sampler = IndexBatchSampler("OptimalPacking+PosID", lengths, BatchOptions(4, 4096, ranks=8), rank=3)
        loader = DataLoader(sampler.view(dataset), batch_sampler=sampler, collate_fn=collator, num_workers=4)
        for epoch in range(3):
            sampler.set_epoch(epoch)      # begins the epoch anew
            for inputs in loader: ...

    Loop over `sampler.counted(loader)` to save states. Then a loop that was left early is continued by the next one,
    and a loop that ran to its end is followed by the next epoch.

    A number below the number of examples is a whole example of the data set. If examples are cut, by `longer` or by a
    way that breaks them, only `sampler.view(dataset)` can read the numbers.

    Args:
        way: name of one of the nine ways, see `WAYS`.
        lengths: tokens of every example of a map-style data set, integers [examples], the same on every rank. Or the
            data set itself, if it has `lengths` and an `identity` as `PackDataset` does: a state is then refused if the
            data set has other content, even of the same lengths.
        options: batch size, longest sequence, ranks and seed.
        rank: number of this process, from 0. None gives the batches of all ranks in turn, step by step, for Accelerate,
            which deals them out itself.
        longer: rule of `pack_data.lengths.overlong` for examples of more than max_sequence_length tokens: raise,
            truncate, split or drop; `sampler.longer` counts them.

    Raises:
        ValueError: the way is unknown, the rank or a length is out of range.
    """

    def __init__(
        self,
        way: str,
        lengths: Any,
        options: BatchOptions,
        rank: Optional[int] = 0,
        *,
        longer: str = "raise",
    ) -> None:
        self.way = get_way(way)
        self.options = options
        self._data_set: Any = None
        if hasattr(type(lengths), "identity"):  # a PackDataset or PackMixture
            self._data_set = lengths
            lengths = lengths.lengths
        self._fitted = fit(lengths, options.max_sequence_length, longer)
        self._lengths = np.asarray(lengths, np.int64)  # of the data set
        self._longest = int(self._lengths.max(initial=0))
        super().__init__(options.ranks, rank)

    def _planned(self, epoch: int) -> EpochPlan:
        return self.way.plan(self._fitted.lengths, self.options, epoch)

    def _numbers(self, plan: EpochPlan, step: int, rank: int) -> List[int]:
        return [self._number(*piece) for row in plan.batch(step, rank) for piece in row]

    @property
    def longer(self) -> Longer:
        """Number of examples that are longer than a row, and the rule for them."""
        return self._fitted.longer

    def view(self, dataset: Any) -> _PieceView:
        """Return a view of the data set that reads the numbers of the batches.

        Args:
            dataset: map-style data set of the examples whose lengths the sampler has.

        Returns:
            A map-style data set for a DataLoader with this batch sampler.

        Raises:
            ValueError: the data set has another number of examples than there are lengths.
        """
        return _PieceView(dataset, len(self._lengths), self._longest)

    def _number(self, piece: int, start: int, stop: int) -> int:
        example, begin = self._fitted.beginning(piece)
        if stop - start == self._lengths[example]:
            return example
        span = (begin + start) * (self._longest + 1) + begin + stop
        return example + len(self._lengths) * (1 + span)

    def _identity(self) -> Dict[str, Any]:
        return {
            "way": self.way.name,
            "examples": len(self._fitted.lengths),
            "tokens": int(self._fitted.lengths.sum()),
            **asdict(self.options),
            "lengths_crc32": zlib.crc32(self._lengths.tobytes()),
            "longer": self._fitted.longer.rule,
            "data_set": self._data_set and self._data_set.identity,
        }


class MicroBatchSampler(_EpochSampler):
    """The micro-batches of one rank, update after update: the `batch_sampler` of a DataLoader.

    Each epoch is shuffled and cut into updates of `global_batch_size` sequences; the last may have fewer. The
    sequences of an update are shared out by `micro_batches`, so all ranks make equally many steps. An update is planned
    when it is reached, and `len` plans the whole epoch.

    Example::

        sampler = MicroBatchSampler(lengths, 512, rank, ranks=8, max_tokens=16384)
        loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=collator, num_workers=4)
        for epoch in range(3):
            sampler.set_epoch(epoch)
            batches = iter(sampler.counted(loader))
            for steps in sampler.updates():
                take_step(model, optimizer, itertools.islice(batches, steps), 1e-5)

    Args:
        lengths: tokens of each example of a map-style data set, integers [examples], the same on every rank.
        global_batch_size: sequences of an update, on all ranks together.
        rank: number of this process, from 0; None for the batches of all ranks in turn, as in `IndexBatchSampler`.
        ranks: processes that share each update.
        max_tokens: tokens of a micro-batch.
        seed: seed of the order of the sequences.
        options: further options of `micro_batches`.

    Raises:
        ValueError: an example has more than max_tokens tokens, or an argument is out of range.
    """

    def __init__(
        self,
        lengths: Any,
        global_batch_size: int,
        rank: Optional[int] = 0,
        *,
        ranks: int,
        max_tokens: int,
        seed: int = 0,
        **options: Any,
    ) -> None:
        self._global_batch_size = whole_number("global_batch_size", global_batch_size, least=1)
        self._seed = whole_number("seed", seed, least=0)
        self._options = {"ranks": ranks, "max_tokens": max_tokens, **options}
        micro_batches([], **self._options)  # refuses options that are out of range
        self._lengths = checked_lengths(lengths, max_tokens)
        super().__init__(ranks, rank)

    def updates(self) -> Iterator[int]:
        """Yield the number of micro-batches of each update of this epoch, from the place of the next batch on.

        Call it when the loop over the batches begins. After a stop inside an update, the first number is that of its
        micro-batches that are left.
        """
        self._settle()
        plan = self._plan
        step = self._first_step + self._counted // self._batches_per_step
        while plan.has(step):
            end = plan.end_of_update(step)
            yield end - step
            step = end

    def _planned(self, epoch: int) -> _Updates:
        order = np.random.default_rng((self._seed, epoch)).permutation(len(self._lengths))
        size = self._global_batch_size
        starts = range(0, len(order), size)
        return _Updates(
            self._lengths, [order[start : start + size] for start in starts], self._options
        )

    def _numbers(self, plan: _Updates, step: int, rank: int) -> List[int]:
        return plan.numbers(step, rank)

    def _identity(self) -> Dict[str, Any]:
        return {
            "examples": len(self._lengths),
            "lengths_crc32": zlib.crc32(self._lengths.tobytes()),
            "global_batch_size": self._global_batch_size,
            "seed": self._seed,
            **self._options,
        }


class _Updates:
    """The micro-batches of an epoch, planned update by update."""

    def __init__(
        self, lengths: np.ndarray, updates: List[np.ndarray], options: Mapping[str, Any]
    ) -> None:
        self._lengths = lengths
        self._updates = updates  # the sequences of each
        self._options = options
        self._ends: List[int] = []  # steps up to the end of each update that is planned
        self._of: List[List[List[np.ndarray]]] = []

    def has(self, step: int) -> bool:
        """Return True if the epoch has this step; plan the updates up to there."""
        while len(self._of) < len(self._updates) and step >= self._planned_steps:
            sequences = self._updates[len(self._of)]
            plan = micro_batches(self._lengths[sequences], **self._options)
            self._ends.append(self._planned_steps + plan.steps)
            self._of.append([[sequences[indices] for indices in side] for side in plan.of])
        return step < self._planned_steps

    @property
    def _planned_steps(self) -> int:
        return self._ends[-1] if self._ends else 0

    @property
    def steps(self) -> int:
        """Steps of the epoch."""
        while self.has(self._planned_steps):
            pass
        return self._planned_steps

    def end_of_update(self, step: int) -> int:
        """Return the step behind the update of a step."""
        return self._ends[bisect(self._ends, step)]

    def numbers(self, step: int, rank: int) -> List[int]:
        """Return the sequences of a micro-batch."""
        update = bisect(self._ends, step)
        of_rank = self._of[update][rank]
        steps_before_end = self._ends[update] - step
        return of_rank[-steps_before_end].tolist()


class _PieceView:
    """A map-style data set whose items are pieces of the examples of another one: `view[number]`.

    A number encodes example, begin and end, so that the workers of a DataLoader need neither the epoch nor its plan.
    The number of a whole example is its own. An example is a mapping with input_ids. All its values with one value for
    each token are cut; the others stay.
    """

    def __init__(self, dataset: Any, examples: int, longest: int) -> None:
        if len(dataset) != examples:
            raise ValueError(
                f"the data set has {len(dataset)} examples, the batch sampler has lengths of {examples}; pass it the "
                "lengths of this data set"
            )
        self._dataset = dataset
        self._longest = longest  # tokens of an example at most

    def __len__(self) -> int:
        """Return the number of examples, broken or not."""
        return len(self._dataset)

    def __getitem__(self, number: int) -> Mapping[str, Any]:
        return self._piece(number, self._dataset[number % len(self)])

    def __getitems__(self, numbers: Sequence[int]) -> List[Mapping[str, Any]]:
        """Return all items of a batch, read together if the data set can do so."""
        read_together = getattr(self._dataset, "__getitems__", None)
        if read_together is None or not numbers:
            return [self[number] for number in numbers]
        examples = read_together([number % len(self) for number in numbers])
        return list(map(self._piece, numbers, examples))

    def _piece(self, number: int, example: Mapping[str, Any]) -> Mapping[str, Any]:
        code = number // len(self)
        if not code:
            return example
        start, stop = divmod(code - 1, self._longest + 1)
        if not 0 <= start < stop:
            raise IndexError(
                f"number {number} is not that of a piece of {len(self)} examples; pass numbers of the sampler"
            )
        piece = {column: example[column] for column in example if column not in OF_SEQUENCES}
        for column, values in token_columns(example, f"example {number % len(self)}").items():
            piece[column] = values[start:stop]
        return piece
