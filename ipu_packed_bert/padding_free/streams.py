"""A stream of examples as packs, for a torch DataLoader: `PackedStream`.

stream = PackedStream(examples, max_sequence_length=4096, collate=PaddingFreeCollator(model))
for inputs in DataLoader(stream, batch_size=None, num_workers=2):
    loss = model(**inputs, use_cache=False).loss
"""

from __future__ import annotations

from typing import Any, Callable, Dict, Iterable, Iterator, List, Mapping, Optional, Tuple

import numpy as np
import torch.distributed
from torch.utils.data import IterableDataset, get_worker_info

from pack_data.batching.share import Share, splits_over_workers
from pack_data.lengths.overlong import Longer
from pack_data.reading.fields import Fields, whole_number
from pack_data.stream.pack_stream import PackStream, items_and_stalls
from pack_data.stream.rows import TOKENS, pieces_of

_Examples = List[Mapping[str, Any]]


class PackedStream(IterableDataset):
    """Packs of the examples that pass by, each a list of examples or what `collate` makes of it.

    source: mappings with input_ids, as `Share` takes them: each process reads its own shards or
    files, or every so many-th example.  So none is packed twice, and no process needs to know of another.  Each packs
    its share with a buffer of its own; the numbers of packs may differ (see `least_of_ranks`).
    rank, ranks: those of torch.distributed where it is initialised, unless given; 0 and 1 for a source that is this
    rank's share already.
    longer: what becomes of an example of more than max_sequence_length tokens, a rule of `pack_data.lengths.overlong`;
    `longer` counts it.  options: of `PackStream`, such as max_sequences_per_pack and buffer_sequences.

    Give a DataLoader batch_size=None: a pack is a batch already.  `state_dict` and `load_state_dict` continue after any
    pack, with the same number of ranks and workers; torchdata's StatefulDataLoader calls them in each worker.
    """

    def __init__(
        self,
        source: Iterable[Mapping[str, Any]],
        max_sequence_length: int,
        *,
        collate: Optional[Callable[[_Examples], Any]] = None,
        longer: str = "raise",
        rank: Optional[int] = None,
        ranks: Optional[int] = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self._share = Share(source)
        self._share_state: Optional[Dict[str, Any]] = None  # loaded, for the share of the next iteration
        if (rank is None) != (ranks is None):
            raise ValueError(f"rank = {rank}, ranks = {ranks}; give both, or none to take those of torch.distributed")
        for name in ("share", "rank", "ranks"):
            if name in options:
                raise ValueError(f"{name}: each process packs its own share of the examples here; leave it out")
        if ranks is not None:
            whole_number("rank", rank, least=0, most=whole_number("ranks", ranks, least=1) - 1)
        self._source, self._collate, self._ranks = source, collate, (rank, ranks)
        self._S, self._rule, self._options = max_sequence_length, longer, options
        self._place: Optional[Tuple[int, int]] = None  # of the process whose state this is; None: not begun
        self._loaded = False
        self._begin()

    def _begin(self) -> None:
        self.longer = Longer(self._rule, self._S)
        self._stream = PackStream(self._S, **self._options)
        if self._stream.flush_after is not None and self._share.has_state:
            raise ValueError("flush_after: reads ahead of the source's state; leave it out, or give a plain iterable")

    def _place_of_process(self) -> Tuple[int, int, int]:
        """This process's number and the number of all; and the number of workers."""
        rank, ranks = self._ranks
        if ranks is None or rank is None:
            together = torch.distributed.is_available() and torch.distributed.is_initialized()
            rank = torch.distributed.get_rank() if together else 0
            ranks = torch.distributed.get_world_size() if together else 1
        worker = get_worker_info()
        if worker is None:
            return rank, ranks, 1
        return rank * worker.num_workers + worker.id, ranks * worker.num_workers, worker.num_workers

    def __iter__(self) -> Iterator[Any]:
        own, all_, workers = self._place_of_process()
        if self._loaded and self._place not in (None, (own, all_)):
            raise ValueError(
                f"state of the stream: it is that of process {self._place}, counted from 0, and of so many; this one "
                f"is {(own, all_)}; continue with as many ranks and workers"
            )
        if not self._loaded:
            self._begin()
        together = workers if splits_over_workers(self._source) else 1
        self._share = Share(self._source, own // together, all_ // together)
        if self._share_state is not None:
            self._share.load_state_dict(self._share_state)
        self._loaded, self._place, self._share_state = False, (own, all_), None
        yield from self._ready()
        for numbered in items_and_stalls(self._share.numbered(), self._stream.flush_after):
            if numbered is None:
                self._stream.finish()
                yield from self._ready()
                continue
            number, example = numbered
            self._share.seen = number + 1
            for piece in pieces_of(example, self.longer, f"example {number} of the stream"):
                self._stream.put(piece, len(piece[TOKENS]))
            yield from self._ready()
        self._stream.finish()
        yield from self._ready()

    def _ready(self) -> Iterator[Any]:
        for pack in self._stream.ready():
            yield pack.examples if self._collate is None else self._collate(pack.examples)

    def state_dict(self) -> Dict[str, Any]:
        """Where the next pack of this process stands, as values for JSON; the examples that wait are part of it."""
        stream = self._stream.state_dict()
        stream["waiting"] = [[*rest, _plain(example)] for *rest, example in stream["waiting"]]
        stream["ready"] = [
            [[_plain(example) for example in examples], lengths] for examples, lengths in stream["ready"]
        ]
        return {
            "process": None if self._place is None else list(self._place),
            "source": self._share.state_dict() if self._share_state is None else self._share_state,
            "longer": {name: getattr(self.longer, name) for name in _COUNTS},
            "stream": stream,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next iteration goes on from what `state_dict` gave.  ValueError for another stream."""
        fields = Fields.of(dict(state), "state of the stream", "take one that state_dict gave")
        place = fields.optional("process", Fields.integers, length=2)
        source, counts = fields.object("source").tree, fields.object("longer")
        self._begin()
        self._stream.load_state_dict(fields.object("stream").tree)
        for name in _COUNTS:
            setattr(self.longer, name, counts.integer(name, least=0))
        self._share_state, self._loaded = (source if place else None), True
        self._place = None if place is None else (place[0], place[1])


_COUNTS = ("examples", "longer", "pieces", "tokens", "lost_tokens")


def _plain(example: Mapping[str, Any]) -> Dict[str, List[int]]:
    return {name: np.asarray(values).tolist() for name, values in example.items()}


def least_of_ranks(number: int) -> int:
    """Return the smallest of the numbers of all ranks of torch.distributed; the number itself if they are not running.

    Ranks may have different numbers of packs. To stop all of them when one has no pack left:

        batches = iter(loader)
        batch = next(batches, None)
        while least_of_ranks(batch is not None):
            ...
            batch = next(batches, None)
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return number
    least = torch.tensor(int(number), device="cuda" if torch.distributed.get_backend() == "nccl" else "cpu")
    torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN)
    return int(least)
