"""The batches of one rank, epoch after epoch; they can be continued after any batch."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Dict, Iterator

import numpy as np

from pack_data.batching.plans import Batch, BatchOptions, EpochPlan, get_way


class BatchSampler:
    """The batches of one rank by one of the nine ways.

        sampler = BatchSampler("OptimalPacking+PosID", lengths, BatchOptions(4, 4096, ranks=8, seed=1), rank=3)
        for batch in sampler:             # the rest of this epoch; iterate again for the next one
            arrays = collate(sampler.way, batch, dataset)
        state = sampler.state()           # after any batch; load_state(state) continues with the next one

    lengths: tokens of every example, integers [examples], the same on every rank.
    """

    def __init__(self, way: str, lengths: Any, options: BatchOptions, rank: int = 0) -> None:
        if not 0 <= rank < options.ranks:
            raise ValueError(f"rank is {rank}, must be 0 to {options.ranks - 1}")
        self.way, self.options, self.rank = get_way(way), options, rank
        self._lengths = np.array(lengths, np.int64)
        self._epoch = self._step = 0
        self._plan = self.way.plan(self._lengths, options, 0)

    @property
    def plan(self) -> EpochPlan:
        """Of the epoch that the next batch belongs to."""
        return self._plan

    @property
    def epoch(self) -> int:
        """Number of the epoch that the next batch belongs to, from 0."""
        return self._epoch

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

    def _go_to(self, epoch: int, step: int) -> None:
        self._epoch, self._step = epoch, step
        self._plan = self.way.plan(self._lengths, self.options, epoch)

    def state(self) -> Dict[str, Any]:
        """Where the next batch stands, and what the batches follow from: plain values, the same on every rank."""
        return {
            "epoch": self._epoch,
            "step": self._step,
            "way": self.way.name,
            "examples": len(self._lengths),
            "tokens": int(self._lengths.sum()),
            **asdict(self.options),
        }

    def load_state(self, state: Dict[str, Any]) -> None:
        """Continue where `state` was taken.  Raises ValueError for another way, other options or other data."""
        own = self.state()
        for name in own:
            if name not in ("epoch", "step") and state.get(name) != own[name]:
                raise ValueError(
                    f"the state was taken with {name} {state.get(name)}, this sampler has {own[name]}; "
                    "a step would not be the same batch"
                )
        self._go_to(state["epoch"], state["step"])
