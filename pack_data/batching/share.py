"""A process's share of a source of examples, which continues from the source's own state: `Share`.

    share = Share(source, number=rank, of=ranks)
    packs = stream.packs((example, len(example["input_ids"])) for example in share)
    share.state_dict(), stream.state_dict()  # after any pack; the examples that wait are in the second

No library of data sets is imported: a source is recognised by its methods.
"""

from __future__ import annotations

import os
from collections import abc
from functools import cached_property
from itertools import islice
from typing import Any, Dict, Iterator, Mapping, Tuple

from pack_data.batching.identity import digest_of_example, digest_of_examples, digest_of_values
from pack_data.reading import hugging_face
from pack_data.reading.fields import Fields, shown, whole_number

_IDENTIFYING_EXAMPLES = 64  # of a sequence, read when a state is taken or loaded


class Share:
    """The examples of `source` that process `number` of `of` reads; each is read by one of them.

    How the examples are shared out depends on the source. Of an object with `shard`, `num_shards` and a state, such as
    a Hugging Face `IterableDataset` or `ShardFiles(paths)`, each process reads its own shards or files. Of any other
    source, and if there are fewer shards than processes, each process takes every `of`-th example: it reads a sequence
    by numbers, and all of an iterable, which has to give the same examples at every iteration.

    Nothing is read again after a state was loaded, as far as the source's own state allows it. A source without a state
    is read again up to there; so is a Hugging Face data set with a shuffle buffer, whose state would lose its contents
    (`buffer_size=1` shuffles the shards only, from datasets 5 on).

    A state identifies the source: a sequence by its length and some of its examples, another source that is read again
    by the last example seen. Files are identified by their names and content. Another source with a state is identified
    by the first example of the pass, which is read again; a Hugging Face `IterableDataset` also by its builder,
    configuration, version, columns, split and number of shards.

    A state at the end of the examples has none left: they may still wait in a stream. The pass after it is a whole one.

    A stream's `flush_after` reads ahead of what it packs: take the examples by `numbered` then, and set `seen`.

    Args:
        source: examples, as described above.
        number: number of this process, from 0.
        of: number of processes.

    Attributes:
        seen: examples passed in what this process reads.

    Raises:
        ValueError: the number is out of range, or the source can be read only once.
    """

    def __init__(self, source: Any, number: int = 0, of: int = 1) -> None:
        self._of = whole_number("of", of, least=1)
        self._number = whole_number("number", number, least=0, most=of - 1)
        self._source = _checked(source)
        if getattr(source, "restart_on_stop_iteration", False):
            raise ValueError(
                "source: starts again at its end; pass Loader(node, restart_on_stop_iteration=False)"
            )
        self._by_shards = getattr(self._source, "num_shards", 0) >= self._of
        self.seen = 0
        self._reading: Any = None  # the source, or its part, that is being read
        self._state: Any = None  # of the source, that was loaded
        self._loaded = False
        self._ended = False
        # Number of the last example that was read, and the example.
        self._last: Tuple[int, Any] = (-1, None)
        self._identity = ""  # of the source of the state that was loaded
        self._first = ""  # digest of the first example of the pass

    @property
    def _is_sequence(self) -> bool:
        return isinstance(self._source, abc.Sequence) or hugging_face.is_data_set(self._source)

    @property
    def has_state(self) -> bool:
        """True if the source itself continues from a state that holds all that it has read."""
        return hasattr(self._source, "state_dict") and not _has_shuffle_buffer(self._source)

    def __iter__(self) -> Iterator[Any]:
        for number, example in self.numbered():
            self.seen = number + 1
            yield example

    def numbered(self) -> Iterator[Tuple[int, Any]]:
        """Yield the examples with their numbers in what this process reads; the caller sets `seen`.

        Yields:
            Number, from 0, and example.
        """
        if not self._loaded:
            self.seen = 0
            self._state = None
            self._ended = False
            self._first = ""
        self._loaded = False
        if self._ended:
            self._check_end()
            return
        source = self._source
        if self._is_sequence:
            first = self.seen + (self._number - self.seen) % self._of
            for number in range(first, len(source), self._of):
                yield number, source[number]
        else:
            for number, example in enumerate(self._read(), self.seen):
                if number == 0:
                    self._first = digest_of_example(example)
                if self._by_shards or number % self._of == self._number:
                    self._last = (number, example)
                    yield number, example
        # Without a state of the source, `seen` shows the end; a thread may have read ahead of it.
        self._ended = self.has_state

    def _part(self) -> Any:
        """Return what this process reads of the source: a new object if it has shards, else the source."""
        source = self._source
        if not hasattr(source, "num_shards"):
            return source
        part = source.shard(self._of, self._number) if self._by_shards else source.shard(1, 0)
        if hasattr(source, "epoch") and hasattr(part, "set_epoch"):
            part.set_epoch(source.epoch)
        return part

    def _read(self) -> Iterator[Any]:
        """Return an iterator over all that this process reads, from example `seen` on."""
        if not self.has_state:
            return self._read_again(iter(self._part()))
        identifies_itself = getattr(self._source, "identifies_content", False)
        if self._state is not None and self._first and not identifies_itself:
            self._check_first()
        source = self._part()
        if not hasattr(source, "load_state_dict"):  # a node of torchdata
            source.reset(self._state)
        elif self._state is not None:
            source.load_state_dict(self._state)
        self._reading = source
        return iter(source)

    def _read_again(self, examples: Iterator[Any]) -> Iterator[Any]:
        """Return the examples behind those seen, of which the last has to be that of the state."""
        if not (self.seen and self._identity):
            return islice(examples, self.seen, None)
        last = next(islice(examples, self.seen - 1, None), None)
        self._check_identity(digest_of_example(last), self._identity)
        return examples

    def _check_first(self) -> None:
        """Raise ValueError unless the pass of the state began with the first example of the source."""
        part = self._part()
        if not hasattr(part, "load_state_dict"):
            part.reset(None)
        first = next(iter(part), None)
        self._check_identity(digest_of_example(first), self._first)

    def _check_end(self) -> None:
        """Raise ValueError if a state at the end of shards is of other ones."""
        if self._state is not None and hasattr(self._source, "num_shards"):
            self._read()

    def _check_identity(self, identity: str, expected: str) -> None:
        if identity != expected:
            raise ValueError(
                f"state of the source: taken with source {expected}, this one is {identity or 'shorter'}: other "
                "examples, or another order; pass the same source, or begin without the state"
            )

    @cached_property
    def _identity_of_sequence(self) -> str:
        return digest_of_examples(self._source, _IDENTIFYING_EXAMPLES)

    @cached_property
    def _identity_of_library(self) -> str:
        """Return a digest of what a Hugging Face `IterableDataset` states about itself, "" for another source."""
        info = getattr(self._source, "info", None)
        if info is None:
            return ""
        names = ("builder_name", "config_name", "version", "features")
        stated = [str(getattr(info, name, None)) for name in names]
        shards = getattr(self._source, "num_shards", 0)
        return digest_of_values(*stated, str(getattr(self._source, "split", None)), shards)

    def _identity_of_source(self) -> str:
        """Return the identity of the source up to the last example; "" if it is in the source's own state."""
        if self.has_state:
            return self._identity_of_library
        if self._loaded:
            return self._identity
        if self._is_sequence:
            return self._identity_of_sequence
        number, example = self._last
        if number + 1 != self.seen:
            return ""
        return digest_of_example(example)

    def state_dict(self) -> Dict[str, Any]:
        """Return the place of the next example of this process and the identity of the source.

        Returns:
            Plain values, if the source's own state has only such.
        """
        state = None
        if self._loaded or (self._ended and self._state is not None):
            state = self._state
        elif self._reading is not None:
            state = self._reading.state_dict()
        return {
            "process": [self._number, self._of],
            "seen": self.seen,
            "ended": self._ended,
            "source": state,
            "identity": self._identity_of_source(),
            "first": self._first,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the next iteration at the place of a state.

        Args:
            state: from `state_dict`.

        Raises:
            ValueError: the state is of another process or of another source.
        """
        fields = Fields.of(dict(state), "state of the source", "pass one that state_dict returned")
        number, of = fields.integers("process", 2)
        if [number, of] != [self._number, self._of]:
            raise ValueError(
                f"state of the source: taken in process {number} of {of}, not {self._number} of {self._of}; "
                "continue with as many ranks and workers"
            )
        seen = fields.integer("seen", least=0)
        self._identity = fields.text("identity") if "identity" in fields else ""
        if self._identity and self._is_sequence:
            self._check_identity(self._identity_of_sequence, self._identity)
        elif self._identity and self.has_state:
            self._check_identity(self._identity_of_library, self._identity)
        self._first = fields.text("first") if "first" in fields else ""
        self._ended = fields.boolean("ended")
        self.seen = seen
        self._state = fields.any("source")
        self._loaded = True
        self._reading = None


def _has_shuffle_buffer(source: Any) -> bool:
    """Return True if a Hugging Face data set, or a step of one, holds back examples to mix them.

    Its state leaves them out. In some versions (datasets 4.4) a buffer of one does so too, hence it is tried out.
    """
    if type(source).__name__ == "BufferShuffledExamplesIterable":
        examples = iter(range(3))
        next(iter(type(source)(examples, source.buffer_size, source.generator)))
        return next(examples, None) != 1
    inner = [getattr(source, "_ex_iterable", None), getattr(source, "ex_iterable", None)]
    inner += getattr(source, "ex_iterables", None) or ()
    return any(_has_shuffle_buffer(step) for step in inner if step)


def splits_over_workers(source: Any) -> bool:
    """Return True if the source gives each worker of a torch DataLoader its own shards, as Hugging Face's does."""
    return type(source).__module__.split(".")[0] == "datasets" and hasattr(source, "num_shards")


def _checked(source: Any) -> Any:
    """Return the source; raise ValueError for paths, and for one that is used up after one pass."""
    paths = source if isinstance(source, (list, tuple)) and source else [source]
    if all(isinstance(path, (str, os.PathLike)) for path in paths):
        raise ValueError(
            f"{shown(source)}: a path, not examples; pass pack_data.batching.shard_files.ShardFiles(paths)"
        )
    if not hasattr(source, "state_dict") and iter(source) is source:
        raise ValueError(
            "source: an iterator is used up after one pass; pass an object that starts anew at every iteration"
        )
    return source
