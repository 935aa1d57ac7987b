"""A process's share of a source of examples, which goes on from the source's own state: `Share`.

    share = Share(source, number=rank, of=ranks)
    packs = stream.packs((example, len(example["input_ids"])) for example in share)
    share.state_dict(), stream.state_dict()  # after any pack; the examples that wait are in the second

No library of data sets is imported: what a source can do tells what it is.
"""

from __future__ import annotations

import os
from collections import abc
from itertools import islice
from typing import Any, Dict, Iterator, Mapping, Tuple

from pack_data.batching.shard_files import ShardFiles
from pack_data.formats.detect import files_of
from pack_data.reading import hugging_face
from pack_data.reading.fields import Fields, whole_number


class Share:
    """The examples of `source` that process `number` of `of` reads; each is read by one of them.

    source: a Hugging Face `IterableDataset`, or what else has `shard`, `num_shards` and a state: each process reads its
    own shards. A list of files of JSONL or Parquet, or a folder of them: its own files. What has a state but no shards,
    such as a node of torchdata, or fewer shards than processes: each process reads all and takes every `of`-th. Any
    other iterable that gives the same examples at every iteration: the same, and sequences are read by their numbers.

    A state goes on without reading again what was read, as far as the source's own state does. What has none is read
    again up to there; so is a Hugging Face data set with a shuffle buffer, whose state would lose what it holds
    (`buffer_size=1` shuffles the shards only, from datasets 5 on). `seen`: examples passed in what this process reads.
    A stream's `flush_after` reads ahead of what it packs: take the examples by `numbered` then, and set `seen`.
    """

    def __init__(self, source: Any, number: int = 0, of: int = 1) -> None:
        self._of = whole_number("of", of, least=1)
        self._number = whole_number("number", number, least=0, most=of - 1)
        self._source = _as_source(source)
        if getattr(source, "restart_on_stop_iteration", False):
            raise ValueError("source: begins again at its end; give Loader(node, restart_on_stop_iteration=False)")
        self._by_shards = getattr(self._source, "num_shards", 0) >= self._of
        self.seen = 0
        self._reading: Any = None  # the source, or its part, that is being read
        self._state: Any = None  # of the source, that was loaded
        self._loaded = self._ended = False

    @property
    def has_state(self) -> bool:
        """Whether the source itself goes on from a state that holds all that it has read."""
        return hasattr(self._source, "state_dict") and not _has_shuffle_buffer(self._source)

    def __iter__(self) -> Iterator[Any]:
        for number, example in self.numbered():
            self.seen = number + 1
            yield example

    def numbered(self) -> Iterator[Tuple[int, Any]]:
        """The examples with their numbers in what this process reads; who takes them sets `seen`."""
        if not self._loaded:
            self.seen, self._state, self._ended = 0, None, False
        self._loaded, own, source = False, self._number, self._source
        if self._ended:
            return
        if isinstance(source, abc.Sequence) or hugging_face.is_data_set(source):
            for number in range(self.seen + (own - self.seen) % self._of, len(source), self._of):
                yield number, source[number]
        elif self._by_shards:
            yield from enumerate(self._read(), self.seen)
        else:
            every = enumerate(self._read(), self.seen)
            yield from (numbered for numbered in every if numbered[0] % self._of == own)
        self._ended = self.has_state  # else the number says it; a thread may have read ahead of `seen`

    def _read(self) -> Iterator[Any]:
        """All that this process reads, from example `seen` on."""
        source = self._source
        if hasattr(source, "num_shards"):  # a fresh one: the user's own keeps its state
            part = source.shard(*((self._of, self._number) if self._by_shards else (1, 0)))
            if hasattr(source, "epoch") and hasattr(part, "set_epoch"):
                part.set_epoch(source.epoch)
            source = part
        if not self.has_state:
            return islice(source, self.seen, None)
        if not hasattr(source, "load_state_dict"):  # a node of torchdata
            source.reset(self._state)
        elif self._state is not None:
            source.load_state_dict(self._state)
        self._reading = source
        return iter(source)

    def state_dict(self) -> Dict[str, Any]:
        """Where the next example of this process stands, in plain values where the source's state is such."""
        state = self._state if self._loaded else None
        if not self._loaded and not self._ended and self._reading is not None:
            state = self._reading.state_dict()
        return {"process": [self._number, self._of], "seen": self.seen, "ended": self._ended, "source": state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next iteration goes on from what `state_dict` gave. ValueError for that of another process."""
        fields = Fields.of(dict(state), "state of the source", "take one that state_dict gave")
        process = fields.integers("process", 2)
        if process != [self._number, self._of]:
            where = f"process {process[0]} of {process[1]}, not {self._number} of {self._of}"
            raise ValueError(f"state of the source: it is that of {where}; continue with as many ranks and workers")
        self.seen, self._ended = fields.integer("seen", least=0), fields.boolean("ended")
        self._state, self._loaded, self._reading = fields.any("source"), True, None


def _has_shuffle_buffer(source: Any) -> bool:
    """Whether a Hugging Face data set, or a step of one, holds back examples to mix them: its state leaves them out.

    In some versions (datasets 4.4) a buffer of one does so too, hence it is tried out.
    """
    if type(source).__name__ == "BufferShuffledExamplesIterable":
        given = iter(range(3))
        next(iter(type(source)(given, source.buffer_size, source.generator)))
        return next(given, None) != 1
    inner = [getattr(source, "_ex_iterable", None), getattr(source, "ex_iterable", None)]
    return any(map(_has_shuffle_buffer, filter(None, [*inner, *(getattr(source, "ex_iterables", None) or ())])))


def splits_over_workers(source: Any) -> bool:
    """Whether the source itself gives each worker of a torch DataLoader its own shards, as Hugging Face's does."""
    return type(source).__module__.split(".")[0] == "datasets" and hasattr(source, "num_shards")


def _as_source(source: Any) -> Any:
    """Paths as files; anything else as it is. ValueError for what is used up after one pass."""
    if isinstance(source, (str, os.PathLike)):
        return ShardFiles(files_of(str(source)))
    if isinstance(source, (list, tuple)) and source and all(isinstance(each, (str, os.PathLike)) for each in source):
        return ShardFiles(source)
    if not hasattr(source, "state_dict") and iter(source) is source:
        raise ValueError("source: an iterator is used up after one pass; give what begins anew at every iteration")
    return source
