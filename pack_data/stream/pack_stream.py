"""A stream of sequences in, packs out, near the fewest possible, with a bounded buffer: `PackStream`."""

from __future__ import annotations

import copy
import hashlib
import json
import queue
import threading
from collections import deque
from dataclasses import asdict, dataclass, replace
from typing import Any, Deque, Dict, Iterable, Iterator, List, NamedTuple, Optional, Tuple, TypeVar

import numpy as np

from pack_data.packing.histogram import LengthHistogram, whole_slots
from pack_data.reading.fields import Fields, packing_depth, shown, whole_number
from pack_data.solver.free_slots import Packs
from pack_data.solver.search import Limits, pack_quickly
from pack_data.store.sequences import check_multiple
from pack_data.stream.buffer import Buffer, Rows, Waiting
from pack_data.stream.prices import Lengths

_T = TypeVar("_T")

_FORMAT = "pack_data stream 6"  # of a state
_OPTIONS = (  # of a state
    "max_sequence_length max_sequences_per_pack buffer_sequences buffer_tokens longest_wait rank ranks multiple_of "
    "source"
).split()
_MAX_TOKENS = 2**62  # stands for a buffer without a limit on tokens

# A round closes this fraction of the rows that the buffer fills. 8 in place of 4 takes up to 1.3 times as long and on
# average saves no packs; 2 needs 0.5 % more for Wikipedia. In an order that is not random most rows have waste: there,
# 64 in place of 32 saves up to 0.1 % of the packs.
_ROUND = 4
_ROUND_OF_SORTED = 64
# Sequences that rows are built from if lengths are alike, the oldest that wait: the rest then stays as it came. Lengths
# near a third of a row need 0.4 % more packs if all 4,096 of a buffer are used. Others need more with this limit:
# Wikipedia at depth 3 needs 4 %.
_MOST_ALIKE = 1024
# Value that a row may lack and still count as good. If lengths are alike, SQuAD with a buffer of 256 needs 0.3 % more
# packs with 2e-3. Otherwise, lengths of agents with that buffer need 0.1 % more with 1e-2.
_SHORTFALL = 2e-3
_SHORTFALL_ALIKE = 1e-2
_ROUNDING = 1e-9  # of sums of values
# Prices judge the rows from the start if slots alone would fill a row to this share of the depth. Below it, prices gain
# nothing. Above it, chance decides if the programme prices seats or slots, and at prices of seats long sequences pile
# up: chats at 8,192 slots and depth 10 need 25 % more packs with a buffer of 256.
_NEAR_DEPTH = (0.6, 0.8)
# In an order that is not random, a row's fullness is a mean of slots and seats if the buffer needs this multiple of its
# slots in seats. Without it alternating or descending chats need up to 3.3 % more packs. It is not used if all lengths
# are alike, because few rows are then full of both: two lengths that drift would need 7 % more packs.
_BOTH_SCARCE = (0.7, 1.4)
_WEIGHTS = 8  # steps from slots to seats
_WINDOWS = 4  # windows of arrivals in a buffer, and the least sequences of one
_MIN_WINDOW = 64
# Most estimated seconds of one linear programme for what waits at the end, and of all of them. The estimates follow
# from the lengths alone, so that the packs do not depend on the machine. With these limits lengths near a third of a
# row and preference pairs reach their bound, with up to 3 % fewer packs.
_PROGRAMME_SECONDS = 0.2
_FINISH_SECONDS = 5.0

_READ_AHEAD = 64  # items that the thread of a source with `flush_after` reads in advance


class Pack(NamedTuple):
    """The sequences of one row."""

    examples: List[Any]
    lengths: List[int]  # tokens of each, rounded up if the stream has a multiple_of


@dataclass
class Waits:
    """Statistics of the packs closed so far; a wait is counted in packs that are closed meanwhile."""

    packs: int = 0
    sequences: int = 0
    tokens: int = 0
    longest: int = 0
    total: int = 0  # waits of all sequences
    forced: int = 0  # packs begun with the oldest sequence because it had waited long enough

    @property
    def mean(self) -> float:
        """Mean wait of a sequence, in packs."""
        if not self.sequences:
            return 0.0
        return self.total / self.sequences


class PackStream:
    """A packer for sequences that arrive one by one.

    At most `buffer_sequences` sequences (and `buffer_tokens` tokens) wait. When the buffer is full, rows are built from
    it, and those without waste are closed, or the ones of highest value. A row's value is its fullness: of slots, or of
    seats if those are scarcer. In an order that is not random, it is a mean of both where both are scarce. If lengths
    are alike, or slots alone would fill rows to 60 to 80 % of the depth, full rows alone do not lead to the fewest
    packs; there the value is the sum of the prices of the sequences in the packing programme over the lengths seen so
    far.

    Rows begin with the longest sequence. If lengths are alike and their order is random, they begin with the oldest:
    then what waits stays like what comes. In an order that is not random, prices are not used.

    Nothing is random, and only `flush_after` depends on time: the same sequences give the same packs, also after
    `load_state_dict`.

    Args:
        max_sequence_length: slots of a row.
        max_sequences_per_pack: largest depth; None is unlimited.
        buffer_sequences: sequences that may wait.
        buffer_tokens: tokens that may wait, at least max_sequence_length; None is unlimited.
        longest_wait: packs that may be closed while a sequence waits, at least buffer_sequences; the default is four
            times buffer_sequences.
        histogram: lengths known in advance, with which those that come are compared.
        rank: number of this process, from 0.
        ranks: processes that read the same stream; rank r packs the sequences r, r + ranks, r + 2 * ranks, ...
        flush_after: seconds without a new sequence after which `packs` packs everything that waits. A thread then reads
            the source, up to 64 sequences ahead.
        multiple_of: each sequence takes a multiple of this many slots; `rounding` counts the slots that this adds.
        source: identity of the sequences, a text such as `PackDataset.identity`; a state of another source is refused.

    Raises:
        ValueError: an option is out of range, or the histogram is empty.
    """

    def __init__(
        self,
        max_sequence_length: int,
        *,
        max_sequences_per_pack: Optional[int] = None,
        buffer_sequences: int = 1024,
        buffer_tokens: Optional[int] = None,
        longest_wait: Optional[int] = None,
        histogram: Optional[LengthHistogram] = None,
        rank: int = 0,
        ranks: int = 1,
        flush_after: Optional[float] = None,
        multiple_of: int = 1,
        source: Optional[str] = None,
    ) -> None:
        S = self.max_sequence_length = whole_slots(max_sequence_length)
        self.max_sequences_per_pack = packing_depth(max_sequences_per_pack)
        self.multiple_of = whole_number("multiple_of", multiple_of, least=1)
        check_multiple(S, multiple_of)
        self.rounding = 0  # slots added to the sequences of this rank
        self.buffer_sequences = whole_number("buffer_sequences", buffer_sequences, least=1)
        self.buffer_tokens = buffer_tokens
        if buffer_tokens is not None:
            self.buffer_tokens = whole_number("buffer_tokens", buffer_tokens, least=S)
        self.longest_wait = 4 * self.buffer_sequences
        if longest_wait is not None:
            self.longest_wait = whole_number(
                "longest_wait", longest_wait, least=self.buffer_sequences
            )
        self.ranks = whole_number("ranks", ranks, least=1)
        self.rank = whole_number("rank", rank, least=0, most=self.ranks - 1)
        seconds = Fields.of({"flush_after": flush_after}, "PackStream", "pass seconds or None")
        self.flush_after = seconds.optional("flush_after", Fields.number, least=1e-3, most=1e6)

        self.source = source

        self._depth = self.max_sequences_per_pack or S
        self._most_tokens = _MAX_TOKENS if self.buffer_tokens is None else self.buffer_tokens
        self._worths: Dict[int, List[float]] = {}  # by the weight of seats, in `_WEIGHTS`
        self._begin()
        if histogram is not None:
            self._learn_from(histogram)

    def _begin(self) -> None:
        window = max(_MIN_WINDOW, self.buffer_sequences // _WINDOWS)
        self._buffer = Buffer()
        self._lengths = Lengths(self.max_sequence_length, self.max_sequences_per_pack, window)
        self._ready: Deque[Pack] = deque()  # closed packs that have not been handed out
        self._taken = 0  # sequences of the stream, those of other ranks included
        self._arrived = 0  # sequences of this rank
        self._waits = Waits()

    def _learn_from(self, histogram: LengthHistogram) -> None:
        S = self.max_sequence_length
        if histogram.max_sequence_length != S:
            histogram = histogram.with_max_sequence_length(S)
        if not histogram.sequences:
            raise ValueError(
                "histogram has no sequences; leave it out to learn the lengths from the stream"
            )
        self._lengths.add_counts(histogram.rounded_up(self.multiple_of).counts)

    # ---- sequences in, packs out -------------------------------------------------------------------------------------

    @property
    def taken(self) -> int:
        """Sequences of the stream that this object has seen, those of other ranks included."""
        return self._taken

    @property
    def waits(self) -> Waits:
        """Statistics of the packs closed so far."""
        return replace(self._waits)

    def packs(self, source: Iterable[Tuple[Any, int]]) -> Iterator[Pack]:
        """Yield all packs of a source, including those of the sequences that wait at its end.

        Args:
            source: pairs of an example and its length in tokens; after `load_state_dict`, from sequence `taken` on.

        Yields:
            Packs, in the order in which they are closed.
        """
        yield from self.ready()
        for sequence in items_and_stalls(source, self.flush_after):
            if sequence is None:
                self.finish()
            else:
                self.put(*sequence)
            if self._ready:
                yield from self.ready()
        self.finish()
        yield from self.ready()

    def ready(self) -> Iterator[Pack]:
        """Yield the closed packs.

        Yields:
            Packs; `state_dict` holds those that have not been yielded.
        """
        while self._ready:
            yield self._ready.popleft()

    def put(self, example: Any, length: int) -> bool:
        """Add a sequence.

        Args:
            example: the sequence, in any form.
            length: its tokens.

        Returns:
            True if packs are `ready`.

        Raises:
            ValueError: the length is not a whole number from 1 to max_sequence_length.
        """
        number = self._taken
        if type(length) is not int:
            length = whole_number(f"the length of sequence {number} of the stream", length)
        if not 1 <= length <= self.max_sequence_length:
            raise ValueError(
                f"sequence {number} of the stream has length {shown(length)}, a row has {self.max_sequence_length} "
                "slots; cut, split or drop longer sequences, and drop empty ones"
            )
        self._taken += 1
        if number % self.ranks != self.rank:
            return False

        if self.multiple_of > 1:
            added = -length % self.multiple_of
            length += added
            self.rounding += added
        buffer = self._buffer
        if buffer.tokens + length > self._most_tokens:
            self._close(length)
        buffer.add(Waiting(self._arrived, self._waits.packs, length, example))
        self._arrived += 1
        self._lengths.add(length)
        if len(buffer) >= self.buffer_sequences:
            self._close(0)
        return bool(self._ready)

    def _close(self, coming: int) -> None:
        """Close packs until there is room for a sequence of `coming` tokens."""
        buffer = self._buffer
        while len(buffer) >= self.buffer_sequences or buffer.tokens + coming > self._most_tokens:
            self._close_round()

    def _close_round(self) -> None:
        """Build rows from what waits, and close a share of them: those without waste, or the most valuable."""
        S = self.max_sequence_length
        buffer = self._buffer
        lengths = self._lengths
        worth, shortfall = self._worth()
        alike = lengths.in_random_order and lengths.seen.are_alike
        most = min(len(buffer), _MOST_ALIKE) if alike else len(buffer)
        parts = _ROUND if lengths.in_random_order else _ROUND_OF_SORTED
        value = sum([worth[length] * len(numbers) for length, numbers in buffer.numbers.items()])
        fewest = max(value, buffer.tokens / S, len(buffer) / self._depth)  # rows for all that wait
        # Sequences of a row, on average; rounded, because sums of values are inexact.
        wanted = max(round(len(buffer) / fewest, 9), 1.0)
        to_close = max(1, int(most / wanted / parts))

        rows = Rows(buffer, S, self._depth, most, worth, 1.0 - shortfall, by_age=not alike)
        oldest_first = iter(buffer if alike else ())
        owed = 0.0  # sequences by which the rows fell short of the mean so far, between -1 and 1
        kept: List[Tuple[float, int, int, List[int]]] = []  # waste, empty slots, place, row
        while to_close:
            due = None if kept else self._due(to_close)
            if due is None:
                first = next((item.length for item in oldest_first if rows.left[item.length]), 0)
                first = first or rows.longest(S)
            else:
                first = due
            if first <= 0:
                break
            row = rows.build(first, max(1, int(wanted + owed)))
            if due is None:
                owed = min(max(owed + wanted - len(row), -1.0), 1.0)
            waste = 1.0 - sum([worth[length] for length in row])
            if due is None and waste > shortfall:
                kept.append((waste, S - sum(row), len(kept), row))
            else:
                self._hand_over(buffer.remove(row), forced=due is not None)
                to_close -= 1

        kept.sort()
        for _, _, _, row in kept[:to_close]:
            self._hand_over(buffer.remove(row))

    def _worth(self) -> Tuple[List[float], float]:
        """Return the worth of each length, as a share of a row, and the worth that a good row may lack."""
        lengths = self._lengths
        buffer = self._buffer
        S = self.max_sequence_length
        # Above 1 seats are scarcer than slots.
        scarcity = len(buffer) * S / (self._depth * buffer.tokens)
        seats = float(scarcity >= 1)
        if not lengths.in_random_order:
            if not lengths.all.are_alike:
                low, high = _BOTH_SCARCE
                seats = min(max((scarcity - low) / (high - low), 0.0), 1.0)
            return self._fullness(seats), _ROUNDING
        if lengths.worth is None and lengths.seen.mean:
            low, high = _NEAR_DEPTH
            near_depth = low <= S / lengths.seen.mean / self._depth < high
            if lengths.seen.are_alike or near_depth:
                lengths.solve()
        shortfall = _SHORTFALL_ALIKE if lengths.seen.are_alike else _SHORTFALL
        return lengths.worth or self._fullness(seats), shortfall

    def _fullness(self, seats: float) -> List[float]:
        """Return the share of a row that a sequence of each length fills; `seats` is their weight, from 0 to 1."""
        weight = round(seats * _WEIGHTS)
        if weight not in self._worths:
            of_seats = weight / _WEIGHTS / self._depth
            of_slots = (1 - weight / _WEIGHTS) / self.max_sequence_length
            lengths = range(self.max_sequence_length + 1)
            self._worths[weight] = [of_seats + of_slots * length for length in lengths]
        return self._worths[weight]

    def _due(self, to_close: int) -> Optional[int]:
        """Return the length of the oldest sequence if the next pack has to hold it.

        At most buffer_sequences wait, and the oldest become due one by one. A round asks before it keeps a row, and
        then closes at most `to_close` packs. So none waits for more than longest_wait packs.
        """
        oldest = self._buffer.oldest()
        waited = self._waits.packs - oldest.since
        if waited < self.longest_wait - self.buffer_sequences - to_close:
            return None
        return oldest.length

    def _hand_over(self, sequences: List[Waiting], forced: bool = False) -> None:
        waits = self._waits
        ages = [waits.packs - sequence.since for sequence in sequences]
        lengths = [sequence.length for sequence in sequences]
        self._ready.append(Pack([sequence.example for sequence in sequences], lengths))
        waits.packs += 1
        waits.sequences += len(lengths)
        waits.tokens += sum(lengths)
        waits.longest = max(waits.longest, max(ages))
        waits.total += sum(ages)
        waits.forced += forced

    def finish(self) -> None:
        """Close packs of everything that waits, those with the oldest sequences first; the stream may go on."""
        buffer = self._buffer
        if not len(buffer):
            return
        counts = np.zeros(self.max_sequence_length + 1, np.int64)
        for length, numbers in buffer.numbers.items():
            counts[length] = len(numbers)
        rows = []
        for strategy, repeats in _few_packs(counts, self.max_sequences_per_pack):
            for _ in range(repeats):
                rows.append(sorted(buffer.remove(list(strategy))))
        for row in sorted(rows):
            self._hand_over(row)

    # ---- state -------------------------------------------------------------------------------------------------------

    def _options(self) -> Dict[str, Any]:
        return {name: getattr(self, name) for name in _OPTIONS}

    def state_dict(self) -> Dict[str, Any]:
        """Return everything that later packs follow from, as values for JSON if the examples are such.

        It may be taken at any time, also between two packs of `packs`.

        Returns:
            Values for `load_state_dict`.
        """
        state = {
            "format": _FORMAT,
            "options": self._options(),
            "taken": self._taken,
            "rounding": self.rounding,
            "arrived": self._arrived,
            "waits": asdict(self._waits),
            "waiting": [list(sequence) for sequence in self._buffer],
            "ready": [[pack.examples, pack.lengths] for pack in self._ready],
            "lengths": self._lengths.state(),
        }
        return {**state, "digest": _digest(state)}

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        """Continue from a state. If it is refused, nothing changes.

        Args:
            state: from `state_dict`.

        Raises:
            ValueError: the state is damaged, or was taken with other options or another source.
        """
        way_out = "pass what state_dict of this version returned, or begin without a state"
        fields = Fields.of(state, "state of the stream", way_out)
        fields.one_of("format", (_FORMAT,))
        self._check_options(fields)
        ready = fields.list_of("ready", self._read_pack)
        new = copy.copy(self)
        new._begin()
        new._lengths.read(fields.object("lengths"))
        new._read_waiting(fields)
        new._ready = deque(ready)
        new._taken = fields.integer("taken", least=0)
        new.rounding = fields.integer("rounding", least=0)
        new._arrived = fields.integer("arrived", least=0)
        waits = fields.object("waits")
        new._waits = Waits(**{name: waits.integer(name, least=0) for name in asdict(Waits())})
        if fields.text("digest") != _digest(fields.tree):
            raise fields.error("digest", "must be that of the numbers: they were changed")
        self.__dict__.update(new.__dict__)  # after everything was read without an error

    def _read_waiting(self, fields: Fields) -> None:
        def column(row: Fields, index: int) -> Any:
            if index == 2:
                return row.integer(index, least=1, most=self.max_sequence_length)
            return row.any(index) if index == 3 else row.integer(index, least=0)

        waiting = fields.list_of(
            "waiting", lambda rows, index: rows.list_of(index, column, length=4)
        )
        numbers = [number for number, _, _, _ in waiting]
        if numbers != sorted(set(numbers)):
            raise fields.error("waiting", "must have ascending numbers")
        for sequence in waiting:
            self._buffer.add(Waiting(*sequence))

    def _read_pack(self, packs: Fields, index: int) -> Pack:
        def column(pack: Fields, number: int) -> List[Any]:
            return pack.integers(1, least=1) if number else pack.list_of(0, Fields.any)

        examples, lengths = packs.list_of(index, column, length=2)
        slots = self.max_sequence_length
        fits = sum(lengths) <= slots and 0 < len(lengths) <= self._depth
        if not fits or len(examples) != len(lengths):
            raise packs.error(index, f"must be at most {self._depth} examples of {slots} tokens")
        return Pack(examples, lengths)

    def _check_options(self, fields: Fields) -> None:
        options = fields.object("options").tree
        for name, value in self._options().items():
            if options.get(name) != value:
                raise ValueError(
                    f"state of the stream: {name} was {shown(options.get(name))}, it is {shown(value)} here; pass the "
                    "same options, or begin without the state"
                )


def _digest(state: Dict[str, Any]) -> str:
    """Return a digest of the numbers of a state; a file may change the types of the examples."""
    numbers = {name: state[name] for name in ("taken", "rounding", "arrived", "waits", "lengths")}
    numbers["waiting"] = [sequence[:3] for sequence in state["waiting"]]
    numbers["ready"] = [lengths for _, lengths in state["ready"]]
    text = json.dumps(numbers, sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _few_packs(counts: np.ndarray, max_sequences_per_pack: Optional[int]) -> Packs:
    """Return packs of all sequences, int [S + 1], as few as are reached without a long search."""
    histogram = LengthHistogram(counts)
    best = pack_quickly(histogram, Limits.of(histogram, max_sequences_per_pack, None))
    seconds = best.programme_seconds
    if seconds <= _PROGRAMME_SECONDS and best.pays(seconds):
        from pack_data.solver.programmes import improved

        limits = best.limits._replace(programmes=int(_FINISH_SECONDS / seconds))
        best = improved(best._replace(limits=limits))
    return best.packs


def items_and_stalls(source: Iterable[_T], seconds: Optional[float]) -> Iterator[Optional[_T]]:
    """Yield the items of a source, and None once whenever it gives no item for `seconds`; None seconds: never.

    A thread reads the source, up to 64 items ahead. An error of the source is raised here.
    """
    if seconds is None:
        yield from source
        return
    items: queue.Queue = queue.Queue(_READ_AHEAD)
    abandoned = threading.Event()
    threading.Thread(
        target=_read_into, args=(items, source, abandoned), name="stream source", daemon=True
    ).start()
    try:
        while True:
            try:
                entry = items.get(timeout=seconds)
            except queue.Empty:
                yield None
                entry = items.get()
            if entry is None:
                return
            if isinstance(entry, BaseException):
                raise entry
            yield entry[0]
    finally:
        abandoned.set()
        while not items.empty():  # the thread may wait for room
            items.get_nowait()


def _read_into(items: queue.Queue, source: Iterable[Any], abandoned: threading.Event) -> None:
    """Put the items of a source into a queue, each as a tuple (item,); then an error of the source, or None."""
    end = None
    try:
        for item in source:
            items.put((item,))
            if abandoned.is_set():
                break
    except BaseException as error:
        end = error
    items.put(end)
