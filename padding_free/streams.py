"""A stream of examples as packs, for a torch DataLoader: `PackedStream`.

stream = PackedStream(examples, max_sequence_length=4096, collate=PaddingFreeCollator(model))
for inputs in DataLoader(stream, batch_size=None, num_workers=2):
    loss = model(**inputs, use_cache=False).loss
"""

from __future__ import annotations

from itertools import islice
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
    """Packs of the examples of a stream, each a list of examples or the result of `collate`.

    Each process packs a separate share of the source (`Share`): shards or files, or every n-th example.  So no example
    is packed twice, and processes do not communicate.  Each has a separate buffer, and their numbers of packs may
    differ (see `least_of_ranks`).

    Pass batch_size=None to a DataLoader, because a pack is already a batch.  `state_dict` and `load_state_dict`
    continue after any pack, with the same number of ranks and workers; torchdata's StatefulDataLoader calls them in
    each worker.

    Args:
        source: Mappings with input_ids.
        max_sequence_length: Most tokens of a pack.
        collate: Applied to the list of examples of a pack.
        longer: A rule of `pack_data.lengths.overlong` for examples of more than max_sequence_length tokens; the
            attribute `longer` counts them.
        rank: The number of this process, from 0.  Default: that of torch.distributed if it is initialised, else 0.
        ranks: The number of processes; pass both or neither.  Pass rank=0 and ranks=1 for a source that is already the
            share of this rank.
        **options: Options of `PackStream`, such as max_sequences_per_pack and buffer_sequences.

    Raises:
        ValueError: An option is unknown or contradicts another.
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
        # State that was loaded for the share of the next iteration.
        self._share_state: Optional[Dict[str, Any]] = None
        if (rank is None) != (ranks is None):
            raise ValueError(
                f"rank is {rank} and ranks is {ranks}; pass both, or neither to use the numbers of torch.distributed"
            )
        for name in ("share", "rank", "ranks"):
            if name in options:
                raise ValueError(
                    f"{name}: not an option, because each process packs a separate share of the examples; omit it"
                )
        if ranks is not None:
            whole_number("rank", rank, least=0, most=whole_number("ranks", ranks, least=1) - 1)
        self._source = source
        self._collate = collate
        self._ranks = (rank, ranks)
        self._S = max_sequence_length
        self._rule = longer
        self._options = options
        # Place of the process among all of them; None before the start.
        self._place: Optional[Tuple[int, int]] = None
        self._loaded = False
        self._begin()

    def _begin(self) -> None:
        """Start a new stream."""
        self.longer = Longer(self._rule, self._S)
        self._stream = PackStream(self._S, **self._options)
        if self._stream.flush_after is not None and self._share.has_state:
            raise ValueError(
                "flush_after: reads ahead of the source's state; omit it, or pass a plain iterable"
            )

    def _place_of_process(self) -> Tuple[int, int, int]:
        """Return this process's number, the number of all processes, and the number of workers."""
        rank, ranks = self._ranks
        if ranks is None or rank is None:
            rank, ranks = 0, 1
            if _is_distributed():
                rank = torch.distributed.get_rank()
                ranks = torch.distributed.get_world_size()
        worker = get_worker_info()
        if worker is None:
            return rank, ranks, 1
        workers = worker.num_workers
        return rank * workers + worker.id, ranks * workers, workers

    def __iter__(self) -> Iterator[Any]:
        number, processes, workers = self._place_of_process()
        place = (number, processes)
        if self._loaded and self._place not in (None, place):
            raise ValueError(
                f"state of the stream: saved by process {self._place} (number from 0, processes), but this is process "
                f"{place}; continue with the same number of ranks and workers"
            )
        is_resumed = self._loaded
        if not is_resumed:
            self._begin()
        together = workers if splits_over_workers(self._source) else 1
        self._share = Share(self._source, number // together, processes // together)
        if self._share_state is not None:
            self._share.load_state_dict(self._share_state)
        self._loaded = False
        self._place = place
        self._share_state = None

        packs = self._packs()
        first = list(islice(packs, 1))
        # If nothing was left of the pass, the next one begins. One of several workers may have nothing left while the
        # pass of their loader goes on.
        if is_resumed and workers == 1 and not first:
            self._begin()
            packs = self._packs()
        yield from first
        yield from packs

    def _packs(self) -> Iterator[Any]:
        """Yield what is left of the pass."""
        yield from self._ready()
        for numbered in items_and_stalls(self._share.numbered(), self._stream.flush_after):
            if numbered is None:
                self._stream.finish()
                yield from self._ready()
                continue
            index, example = numbered
            self._share.seen = index + 1
            for piece in pieces_of(example, self.longer, f"example {index} of the stream"):
                self._stream.put(piece, len(piece[TOKENS]))
            yield from self._ready()
        self._stream.finish()
        yield from self._ready()

    def _ready(self) -> Iterator[Any]:
        for pack in self._stream.ready():
            yield pack.examples if self._collate is None else self._collate(pack.examples)

    def state_dict(self) -> Dict[str, Any]:
        """Return the place of this process's next pack, and the waiting examples, as values for JSON."""
        stream = self._stream.state_dict()
        stream["waiting"] = [[*rest, _plain(example)] for *rest, example in stream["waiting"]]
        stream["ready"] = [
            [list(map(_plain, examples)), lengths] for examples, lengths in stream["ready"]
        ]
        source = self._share_state
        if source is None:
            source = self._share.state_dict()
        return {
            "process": None if self._place is None else list(self._place),
            "source": source,
            "longer": {name: getattr(self.longer, name) for name in _COUNTS},
            "stream": stream,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a result of `state_dict` in the next iteration; after the last pack, begin the next pass.

        Args:
            state: The state of a stream with the same options.

        Raises:
            ValueError: The state is that of another stream.
        """
        fields = Fields.of(dict(state), "state of the stream", "pass one that state_dict returned")
        place = fields.optional("process", Fields.integers, length=2)
        source = fields.object("source").tree
        counts = fields.object("longer")
        self._begin()
        self._stream.load_state_dict(fields.object("stream").tree)
        for name in _COUNTS:
            setattr(self.longer, name, counts.integer(name, least=0))
        self._share_state = source if place else None
        self._loaded = True
        self._place = None if place is None else (place[0], place[1])


# Attributes of `Longer` that a state keeps.
_COUNTS = ("examples", "longer", "pieces", "tokens", "lost_tokens")


def _plain(example: Mapping[str, Any]) -> Dict[str, List[int]]:
    return {name: np.asarray(values).tolist() for name, values in example.items()}


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def least_of_ranks(number: int) -> int:
    """Return the smallest number of all ranks of torch.distributed, or `number` in a single process.

    Ranks may have different numbers of packs.  To stop all of them when one has no pack left::

        batches = iter(loader)
        batch = next(batches, None)
        while least_of_ranks(batch is not None):
            ...
            batch = next(batches, None)

    Args:
        number: The number of this rank.

    Returns:
        The smallest number, the same on every rank.
    """
    if not _is_distributed():
        return number
    device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
    least = torch.tensor(int(number), device=device)
    torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN)
    return int(least)
