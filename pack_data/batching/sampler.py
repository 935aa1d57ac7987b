"""Batches of one rank, epoch after epoch, to be continued anywhere."""
from __future__ import annotations

from dataclasses import asdict
from typing import Any, Dict, Iterator

import numpy as np

from pack_data.batching.plans import Batch, BatchOptions, Plan, get_way


class BatchSampler:
    """The batches of one rank by one of the nine ways.

        sampler = BatchSampler("OptimalPacking+PosID", lengths, BatchOptions(4, 4096, ranks=8, seed=1), rank=3)
        for batch in sampler:             # the rest of this epoch; iterate again for the next one
            arrays = collate(sampler.way, batch, dataset)
        state = sampler.state()           # after any batch; load_state(state) goes on with the next one

    lengths: tokens of every example, integers [n], the same on every rank.
    """

    def __init__(self, way: str, lengths: Any, options: BatchOptions, rank: int = 0) -> None:
        if not 0 <= rank < options.ranks:
            raise ValueError(f"rank is {rank}, must be 0 to {options.ranks - 1}")
        self.way, self.options, self.rank = get_way(way), options, rank
        self._lengths = np.array(lengths, np.int64)
        self._epoch = self._step = 0
        self._plan = self.way.plan(self._lengths, options, 0)

    @property
    def plan(self) -> Plan:
        """Of the epoch that the next batch belongs to."""
        return self._plan

    @property
    def epoch(self) -> int:
        return self._epoch

    def __len__(self) -> int:
        """Steps of this epoch, the same on every rank."""
        return self._plan.steps

    def __iter__(self) -> Iterator[Batch]:
        epoch = self._epoch
        while self._epoch == epoch:
            batch = self._plan.batch(self._step, self.rank)
            # Counted before it is handed out, so that a state taken while it is in use does not repeat it.
            self._step += 1
            if self._step == self._plan.steps:
                self._go_to(epoch + 1, 0)
            yield batch

    def _go_to(self, epoch: int, step: int) -> None:
        self._epoch, self._step = epoch, step
        self._plan = self.way.plan(self._lengths, self.options, epoch)

    def state(self) -> Dict[str, Any]:
        """Plain values: where the next batch stands, and what the batches follow from.  It is the same for every rank."""
        return {"epoch": self._epoch, "step": self._step, "way": self.way.name, "examples": len(self._lengths),
                "tokens": int(self._lengths.sum()), **asdict(self.options)}

    def load_state(self, state: Dict[str, Any]) -> None:
        """Go on where `state` was taken.  ValueError where way, options or data differ: its step would be another batch."""
        own = self.state()
        for name in own:
            if name not in ("epoch", "step") and state.get(name) != own[name]:
                raise ValueError(f"the state was taken with {name} {state.get(name)}, this sampler has {own[name]}; a step would not be the same batch")
        self._go_to(state["epoch"], state["step"])
