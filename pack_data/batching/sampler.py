"""The batches of an epoch, epoch after epoch; they can be continued after any batch.

`BatchSampler` gives rows of pieces, for one's own loop.  `IndexBatchSampler` gives lists of numbers, for a DataLoader.
"""

from __future__ import annotations

import zlib
from dataclasses import asdict
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence

import numpy as np

from pack_data.batching.plans import Batch, BatchOptions, EpochPlan, get_way
from pack_data.lengths.overlong import Fitted, Longer, Span, fit
from pack_data.reading.fields import named, whole_number


class _Epochs:
    """A place in the batches of one way, and what the batches follow from."""

    def __init__(self, way: str, lengths: Any, options: BatchOptions) -> None:
        """lengths: tokens of every example or piece, integers [n], each at most max_sequence_length."""
        self.way, self.options = get_way(way), options
        self._lengths = np.array(lengths, np.int64)
        self._go_to(0, 0)

    @property
    def plan(self) -> EpochPlan:
        """Of the epoch that the next batch belongs to."""
        return self._plan

    @property
    def epoch(self) -> int:
        """Number of the epoch that the next batch belongs to, from 0."""
        return self._epoch

    def _go_to(self, epoch: int, step: int) -> None:
        if epoch != getattr(self, "_epoch", None):
            self._plan = self.way.plan(self._lengths, self.options, epoch)
        self._epoch, self._step = epoch, step

    def _identity(self) -> Dict[str, Any]:
        """What the batches follow from: plain values, the same on every rank."""
        return {
            "way": self.way.name,
            "examples": len(self._lengths),
            "tokens": int(self._lengths.sum()),
            **asdict(self.options),
        }

    def _load(self, state: Mapping[str, Any]) -> None:
        for name, own in self._identity().items():
            if state.get(name) != own:
                raise ValueError(
                    f"the state was taken with {name} {named(state.get(name))}, this sampler has {own}; "
                    "a step would not be the same batch"
                )
        epoch = whole_number("epoch of the state", state.get("epoch"), least=0)
        step = whole_number("step of the state", state.get("step"), least=0)
        self._go_to(epoch, 0)
        if step > self._plan.steps:
            raise ValueError(f"the state stands at step {step}, epoch {epoch} has {self._plan.steps} steps")
        self._step = step


class BatchSampler(_Epochs):
    """The batches of one rank by one of the nine ways, as rows of pieces.

        sampler = BatchSampler("OptimalPacking+PosID", lengths, BatchOptions(4, 4096, ranks=8, seed=1), rank=3)
        for batch in sampler:             # the rest of this epoch; iterate again for the next one
            arrays = collate(sampler.way, batch, dataset)
        state = sampler.state()           # after any batch; load_state(state) continues with the next one

    lengths: tokens of every example, integers [examples], the same on every rank.
    """

    def __init__(self, way: str, lengths: Any, options: BatchOptions, rank: int = 0) -> None:
        self.rank = _checked_rank(rank, options.ranks)
        super().__init__(way, lengths, options)

    def __len__(self) -> int:
        """Steps of this epoch, the same number on every rank."""
        return self._plan.steps

    def __iter__(self) -> Iterator[Batch]:
        epoch = self._epoch
        while self._epoch == epoch:
            batch = self._plan.batch(self._step, self.rank)
            # Counted before the batch is used: a state taken while it is in use continues with the next one.
            self._step += 1
            if self._step == self._plan.steps:
                self._go_to(epoch + 1, 0)
            yield batch

    def state(self) -> Dict[str, Any]:
        """Where the next batch stands, and what the batches follow from: plain values, the same on every rank."""
        return {"epoch": self._epoch, "step": self._step, **self._identity()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken.  Raises ValueError for another way, other options or other data."""
        self._load(state)


class IndexBatchSampler(_Epochs):
    """The batches of one rank by one of the nine ways, as lists of numbers: the `batch_sampler` of a DataLoader.

        sampler = IndexBatchSampler("OptimalPacking+PosID", lengths, BatchOptions(4, 4096, ranks=8), rank=3)
        loader = DataLoader(sampler.view(dataset), batch_sampler=sampler, collate_fn=collator, num_workers=4)
        for epoch in range(3):
            sampler.set_epoch(epoch)      # without it each iteration is the next epoch
            for inputs in loader: ...

    lengths: tokens of every example of a map-style data set, integers [examples], the same on every rank.
    rank: None gives the batches of all ranks in turn, step by step, for Accelerate, which deals them out itself.
    longer: what becomes of an example of more than max_sequence_length tokens, a rule of `pack_data.lengths.overlong`:
    raise, truncate, split or drop; `sampler.longer` counts and says it.

    A number below the number of examples is a whole example of the data set.  Where examples are cut, by `longer` or by
    a way that breaks them, only `sampler.view(dataset)` knows the numbers.
    """

    def __init__(
        self, way: str, lengths: Any, options: BatchOptions, rank: Optional[int] = 0, *, longer: str = "raise"
    ) -> None:
        self.rank = None if rank is None else _checked_rank(rank, options.ranks)
        self._fitted = fit(lengths, options.max_sequence_length, longer)
        self._whole = np.asarray(lengths, np.int64)
        self._numbers = _PieceNumbers(len(self._whole), int(self._whole.max(initial=0)))
        self._pending = False
        super().__init__(way, self._fitted.lengths, options)

    @property
    def longer(self) -> Longer:
        """How many examples are longer than a row, and what became of them."""
        return self._fitted.longer

    @property
    def fitted(self) -> Fitted:
        """The pieces that the plan counts as its examples."""
        return self._fitted

    @property
    def sampler(self) -> IndexBatchSampler:
        """Itself: Accelerate hands the number of an epoch to the `sampler` of a batch sampler that it has wrapped."""
        return self

    def view(self, dataset: Any) -> PieceView:
        """The data set that the numbers are of.  Raises ValueError where it has another number of examples."""
        return PieceView(dataset, self._numbers)

    def __len__(self) -> int:
        """Batches of this epoch, on each rank the same number; of the next epoch once the last batch was taken."""
        return self._plan.steps * (self.options.ranks if self.rank is None else 1)

    def __iter__(self) -> Iterator[List[int]]:
        """The batches of this epoch from its beginning, or from the place that was loaded; then the epoch is the next.

        A last batch is empty where fewer examples than ranks are left.
        """
        if not self._pending:  # from the beginning, of the next epoch if all batches of this one were taken
            self._go_to(self._epoch + (self._step == self._plan.steps), 0)
        self._pending = False
        epoch, first, plan = self._epoch, self._step, self._plan
        ranks = range(self.options.ranks) if self.rank is None else (self.rank,)
        for step in range(first, plan.steps):
            for rank in ranks:
                # Counted before the batch is used: a state taken while it is in use continues with the next one.
                self._step = step + (rank == ranks[-1])
                yield [self._number(*piece) for row in plan.batch(step, rank) for piece in row]
        self._go_to(epoch + 1, 0)

    def _number(self, piece: int, start: int, stop: int) -> int:
        example, begin = self._fitted.beginning(piece)
        whole = stop - start == self._whole[example]
        return self._numbers.number(example, None if whole else Span(begin + start, begin + stop))

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch.  A place inside this epoch that was loaded before is kept.

        Raises ValueError where a place in another epoch was loaded and no batch was taken since: a caller that counts
        its epochs from 0 again would train on the same batches again.
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
        """Where the next batch stands, and what the batches follow from: plain values, the same on every rank.

        A DataLoader with workers, and Accelerate, take batches before they are used.  torchdata's StatefulDataLoader
        asks at the right moment; elsewhere use `state_at` with the steps that were really made.
        """
        return self.state_at(self._epoch, self._step)

    def state_at(self, epoch: int, step: int) -> Dict[str, Any]:
        """The state after `step` steps of an epoch."""
        return {"epoch": epoch, "step": step, **self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next iteration continues where `state` was taken.

        Raises ValueError for another way, other options or other data.
        """
        self._load(state)
        self._pending = True

    def _identity(self) -> Dict[str, Any]:
        own = {"lengths_crc32": zlib.crc32(self._whole.tobytes()), "longer": self._fitted.longer.rule}
        return {**super()._identity(), **own}


def _checked_rank(rank: int, ranks: int) -> int:
    if not 0 <= rank < ranks:
        raise ValueError(f"rank is {rank}, must be 0 to {ranks - 1}")
    return rank


# ---- pieces of examples as single numbers, and the data set that reads them ------------------------------------------


class _PieceNumbers:
    """One number for each piece of each of `examples` examples of at most `longest` tokens.

    The number says all, so that the workers of a DataLoader need to know neither the epoch nor its plan.
    """

    def __init__(self, examples: int, longest: int) -> None:
        self.examples, self._width = examples, longest + 1

    def number(self, example: int, span: Optional[Span]) -> int:
        """span: None for the whole example, whose number is `example`."""
        return example if span is None else example + self.examples * (1 + span.start * self._width + span.stop)

    def example(self, number: int) -> int:
        return number % self.examples

    def span(self, number: int) -> Optional[Span]:
        """None for a whole example."""
        code = number // self.examples
        return None if code == 0 else Span(*divmod(code - 1, self._width))


class PieceView:
    """A map-style data set whose items are pieces of the examples of another one: `view[number]`.

    An example is a mapping with input_ids.  Everything in it that has one value a token is cut; the rest stays.
    """

    def __init__(self, dataset: Any, numbers: _PieceNumbers) -> None:
        if len(dataset) != numbers.examples:
            raise ValueError(
                f"the data set has {len(dataset)} examples, the batch sampler was made for {numbers.examples}; "
                "give it the lengths of this data set"
            )
        self._dataset, self._numbers = dataset, numbers

    def __len__(self) -> int:
        """Examples, broken or not."""
        return self._numbers.examples

    def __getitem__(self, number: int) -> Mapping[str, Any]:
        return _cut(self._dataset[self._numbers.example(number)], self._numbers.span(number))

    def __getitems__(self, numbers: Sequence[int]) -> List[Mapping[str, Any]]:
        """All items of a batch.  A DataLoader asks for them at once, which is faster where the data set can do it."""
        together = getattr(self._dataset, "__getitems__", None)
        if together is None or not numbers:
            return [self[number] for number in numbers]
        found = together([self._numbers.example(number) for number in numbers])
        return [_cut(example, self._numbers.span(number)) for example, number in zip(found, numbers)]


def _cut(example: Mapping[str, Any], span: Optional[Span]) -> Mapping[str, Any]:
    if span is None:
        return example
    tokens = len(example["input_ids"])
    cut: Dict[str, Any] = dict(example)
    for name, values in example.items():
        if hasattr(values, "__len__") and not isinstance(values, (str, bytes, Mapping)) and len(values) == tokens:
            cut[name] = values[span.start : span.stop]
    return cut
