"""Equal numbers of packs on all ranks, without a pack that is lost or given twice: `EqualPacks`.

for pack in EqualPacks(loader, least_of_ranks): ...  # ipu_packed_bert.padding_free.least_of_ranks: torch
"""

from __future__ import annotations

from itertools import islice
from typing import Any, Callable, Dict, Iterable, Iterator, List, Mapping, Optional

from pack_data.reading.fields import Fields


class EqualPacks:
    """The packs of one rank, as many as every other rank hands out.

    packs: this rank's, begun anew at every iteration. least: the smallest of the numbers that all ranks give it; all
    call it once for each pack.

    The rule: an iteration ends on all ranks when one of them has no pack left. What the others have left comes first in
    their next iteration, which then goes on into the next pass of `packs`; so ranks with more packs are behind, and in
    the long run each pack of each pass is handed out once. `rest` hands out what is left without the other ranks. An
    iteration that was broken off goes on.
    """

    def __init__(self, packs: Iterable[Any], least: Callable[[int], int]) -> None:
        self._packs, self._least = packs, least
        self._waiting: List[Any] = []  # read, but not handed out
        self._passes = 0  # of `packs` that are to be begun
        self._stream: Optional[Iterator[Any]] = None  # behind what waits; None: no pass is begun
        self._within = False  # an iteration is going on

    @property
    def kept(self) -> int:
        """Packs that were read and not handed out yet, at most one."""
        return len(self._waiting)

    def __iter__(self) -> Iterator[Any]:
        self._passes += not self._within
        self._within = True
        while self._least(self._read()):
            yield self._waiting.pop()
        self._within = False

    def rest(self) -> Iterator[Any]:
        """What is left of the passes that were begun; for the end of training, on each rank by itself."""
        while self._read():
            yield self._waiting.pop()

    def _read(self) -> int:
        """Reads a pack if none waits; how many wait."""
        if not self._waiting:
            if self._stream is None:
                self._stream = self._passing(False)
            self._waiting += islice(self._stream, 1)
            self._stream = self._stream if self._waiting else None
        return len(self._waiting)

    def _passing(self, loaded: bool) -> Iterator[Any]:
        if loaded:
            yield from self._packs
        while self._passes:
            self._passes -= 1
            yield from self._packs

    def state_dict(self) -> Dict[str, Any]:
        """Where the next pack stands; `packs` must have a state_dict. The packs that wait are part of it."""
        state = None if self._stream is None else self._packs.state_dict()  # type: ignore[attr-defined]
        return {"passes": self._passes, "within": self._within, "waiting": list(self._waiting), "packs": state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` gave, on every rank from a state of the same moment."""
        fields = Fields.of(dict(state), "state of the packs", "take one that state_dict gave")
        self._waiting = list(fields.list_of("waiting", Fields.any))
        self._passes, self._within = fields.integer("passes", least=0), fields.boolean("within")
        packs, self._stream = fields.any("packs"), None
        if packs is not None:
            self._packs.load_state_dict(packs)  # type: ignore[attr-defined]
            self._stream = self._passing(True)
