"""A stream of sequences in, packs out, near the fewest possible, with a bounded buffer: `PackStream`."""

from __future__ import annotations

import queue
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Deque, Dict, Iterable, Iterator, List, NamedTuple, Optional, Tuple, TypeVar

import numpy as np

from pack_data import optimal
from pack_data.packing.histogram import LengthHistogram, whole_slots
from pack_data.reading.fields import Fields, packing_depth, shown, whole_number
from pack_data.store.sequences import check_multiple
from pack_data.stream.baselines import OpenRows
from pack_data.stream.buffer import Buffer, Round, Waiting
from pack_data.stream.prices import Prices, on_grid, prices, scarce_seats, solve, steps_of

_T = TypeVar("_T")

_FORMAT = "pack_data stream 2"  # of a state
_SHARE = "sequences"  # how ranks share a stream
_MAX_TOKENS = 2**62  # stands for a buffer without a limit on tokens

# The buffer is full again after a 32nd of it has arrived: closing more at once makes worse packs, fewer costs time.
_CLOSED_AT_ONCE = 32

# When the programme is solved again. Prices change slowly once many sequences are known, and a programme takes up to
# some seconds, so the period is the larger of two numbers of sequences; the first programmes come earlier.
_PERIOD_SEQUENCES = 1 << 17
_PERIOD_BUFFERS = 128
# The first programmes: each after this many times the sequences of the one before.
_PERIOD_GROWTH = 4
# Sequences that arrive between the start of a programme and the use of its prices. The number is fixed, so that the
# packs do not depend on the machine's speed.
_SEQUENCES_WHILE_SOLVING = 1 << 14

# How far the stream may fall behind online best fit before it turns to it: packs, plus a share of all packs. With a
# limit on depth the estimate is less certain, and a turn in vain costs more.
_BEHIND_PACKS = 1.0
_BEHIND_PACKS_LIMITED_DEPTH = 4.0
_BEHIND_SHARE = 1 / 2048
# Buffers of sequences for which it then packs by best fit, doubled with every turn.
_TURN_BUFFERS = 4

_READ_AHEAD = 64  # items that the thread of a source with `flush_after` reads in advance


class Pack(NamedTuple):
    """The sequences of one row."""

    examples: List[Any]
    lengths: List[int]  # tokens of each, rounded up if the stream has a multiple_of


class Waits(NamedTuple):
    """Statistics of the packs closed so far; a wait is counted in packs that are closed meanwhile."""

    packs: int
    sequences: int
    tokens: int
    longest: int
    total: int  # waits of all sequences
    forced: int  # packs begun with the oldest sequence because it had waited long enough

    @property
    def mean(self) -> float:
        """Mean wait of a sequence, in packs."""
        if not self.sequences:
            return 0.0
        return self.total / self.sequences


class _Solving(NamedTuple):
    """A programme that is being solved."""

    counts: np.ndarray
    due: int  # sequences that have arrived when its prices are taken up
    worth: Optional[Future]  # None: solve it when it is due


class PackStream:
    """A packer for sequences that arrive one by one.

    At most `buffer_sequences` sequences (and `buffer_tokens` tokens) wait. When it is full, the packs of highest
    value are closed, a 32nd of the buffer at a time. Values are prices of the packing programme over the lengths seen
    so far. The programme is solved again at fixed numbers of sequences, in a thread, and its prices are taken up at a
    fixed later number.

    Online best fit packs the same lengths for comparison. If prices make more packs, as they do for sorted streams, the
    stream packs by best fit for a while.

    Nothing is random, and only `flush_after` depends on time: the same sequences give the same packs, also after
    `load_state_dict`.

    Args:
        max_sequence_length: slots of a row.
        max_sequences_per_pack: largest depth; None is unlimited.
        buffer_sequences: sequences that may wait.
        buffer_tokens: tokens that may wait, at least max_sequence_length; None is unlimited.
        longest_wait: packs that may be closed while a sequence waits, at least buffer_sequences; the default is four
            times buffer_sequences.
        histogram: lengths known in advance, from which the first prices are computed.
        rank: number of this process, from 0.
        ranks: processes that read the same stream; rank r packs the sequences r, r + ranks, r + 2 * ranks, ...
        share: "sequences", the only way in which ranks share a stream.
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
        share: str = _SHARE,
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
        if share != _SHARE:
            raise ValueError(
                f"share is {shown(share)}; pass share={_SHARE!r}: each rank packs its share of them"
            )
        seconds = Fields.of({"flush_after": flush_after}, "PackStream", "pass seconds or None")
        self.flush_after = seconds.optional("flush_after", Fields.number, least=1e-3, most=1e6)

        self.source = source

        self._most_tokens = _MAX_TOKENS if self.buffer_tokens is None else self.buffer_tokens
        self._buffer = Buffer(S, self.max_sequences_per_pack)
        self._steps = steps_of(S)
        # Sequences seen, by step of the grid of lengths.
        self._learnt = np.zeros(int(self._steps[-1]) + 1)
        self._prices: Dict[int, Prices] = {}  # by scarcity of seats, computed when needed
        # Counts and worth that the prices come from.
        self._from: Optional[Tuple[np.ndarray, np.ndarray]] = None
        self._solving: Optional[_Solving] = None
        self._next = 0  # sequences that have arrived when the programme is solved next
        self._ready: Deque[Pack] = deque()  # closed packs that have not been handed out
        # Online best fit of the lengths that arrive, for comparison.
        self._best_fit = OpenRows(*self._limits)
        self._rows: Optional[OpenRows] = None  # what waits, while the stream packs by best fit
        self._turned = 0  # how often it turned to best fit
        self._until = 0  # sequences that have arrived when it may turn back
        self._taken = 0  # sequences of the stream, those of other ranks included
        self._arrived = 0  # sequences of this rank
        self._waits = Waits(0, 0, 0, 0, 0, 0)
        if histogram is not None:
            self._learn_from(histogram)

    def _learn_from(self, histogram: LengthHistogram) -> None:
        """Compute the first prices from lengths known in advance."""
        S = self.max_sequence_length
        if histogram.max_sequence_length != S:
            histogram = histogram.with_max_sequence_length(S)
        if not histogram.sequences:
            raise ValueError(
                "histogram has no sequences; leave it out to learn the lengths from the stream"
            )
        counts = on_grid(histogram.rounded_up(self.multiple_of).counts)
        self._learnt = counts * min(1.0, self._period / histogram.sequences)
        self._take_up(self._learnt.copy(), solve(self._learnt, *self._limits))
        self._next = self._period

    @property
    def _limits(self) -> Tuple[int, Optional[int]]:
        return self.max_sequence_length, self.max_sequences_per_pack

    # ---- sequences in, packs out -------------------------------------------------------------------------------------

    @property
    def taken(self) -> int:
        """Sequences of the stream that this object has seen, those of other ranks included."""
        return self._taken

    @property
    def waits(self) -> Waits:
        """Statistics of the packs closed so far."""
        return self._waits

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
        buffer.add(length, Waiting(self._arrived, self._waits.packs, example))
        self._arrived += 1
        self._best_fit.pass_by(length, self.buffer_sequences, self._most_tokens)
        if self._rows is not None:
            self._rows.add(length)
        if buffer.sequences >= self.buffer_sequences:
            self._close(0)
        return bool(self._ready)

    def _close(self, coming: int) -> None:
        """Close packs until there is room for a sequence of `coming` tokens, and choose how to go on."""
        self._learn()
        if self._rows is None:
            self._close_by_price(coming)
        else:
            self._close_rows(self._rows, coming)

        allowed = _BEHIND_PACKS
        if self.max_sequences_per_pack is not None:
            allowed = _BEHIND_PACKS_LIMITED_DEPTH
        too_many = self._packs_behind() - allowed - _BEHIND_SHARE * self._waits.packs
        if self._rows is None and too_many > 0:
            self._turn_to_best_fit()
        elif self._rows is not None and too_many <= 0 and self._arrived >= self._until:
            self._rows = None

    def _turn_to_best_fit(self) -> None:
        self._rows = OpenRows(*self._limits)
        for length in sorted((length for length, _ in self._buffer.in_order()), reverse=True):
            self._rows.add(length)
        self._turned += 1
        self._until = self._arrived + _TURN_BUFFERS * self.buffer_sequences * 2**self._turned

    def _close_by_price(self, coming: int) -> None:
        buffer = self._buffer
        room_sequences = max(1, self.buffer_sequences // _CLOSED_AT_ONCE)
        room_tokens = min(self.max_sequence_length, self._most_tokens // _CLOSED_AT_ONCE)
        most_sequences = self.buffer_sequences - room_sequences
        most_tokens = max(0, self._most_tokens - max(coming, room_tokens))

        round_ = Round(buffer, self._prices_now(), self.buffer_sequences, self._arrived)
        while buffer.sequences > most_sequences or buffer.tokens > most_tokens:
            due = self._due()
            self._close_pack(round_.pack(due), forced=due is not None)
        round_.end()

    def _close_rows(self, rows: OpenRows, coming: int) -> None:
        buffer = self._buffer
        while (
            rows.full
            or buffer.sequences >= self.buffer_sequences
            or buffer.tokens + coming > self._most_tokens
        ):
            due = self._due()
            lengths = rows.close(due)
            np.subtract.at(buffer.counts, lengths, 1)
            self._close_pack(lengths, forced=due is not None)

    def _due(self) -> Optional[int]:
        """Return the length of the oldest sequence if the next pack has to hold it.

        The oldest become due one by one, and at most buffer_sequences wait: none waits over longest_wait packs.
        """
        length, oldest = self._buffer.oldest()
        waited = self._waits.packs - oldest.since
        is_due = waited >= self.longest_wait - self.buffer_sequences
        return length if is_due else None

    def _packs_behind(self) -> float:
        """Return how many packs more than online best fit the stream needs, packs for what waits included.

        What waits needs packs by its tokens and, if the depth is limited, by its sequences. The smaller difference
        counts, because neither alone decides. A second estimate gives each sequence of more than half a row a pack of
        its own; the larger of the two estimates counts.
        """
        S, depth = self._limits
        buffer = self._buffer
        best_fit = self._best_fit
        long_waiting = int(buffer.counts[S // 2 + 1 :].sum())
        needed = [(buffer.tokens / S, best_fit.tokens / S)]
        if depth is not None:
            needed.append((buffer.sequences / depth, best_fit.sequences / depth))
        plain = min(ours - theirs for ours, theirs in needed)
        with_long = min(
            max(ours, long_waiting) - max(theirs, best_fit.long) for ours, theirs in needed
        )
        return self._waits.packs - best_fit.closed + max(plain, with_long)

    def _close_pack(self, lengths: List[int], forced: bool) -> None:
        self._hand_over(lengths, self._buffer.remove(lengths), forced)

    def _hand_over(self, lengths: List[int], sequences: List[Waiting], forced: bool) -> None:
        waits = self._waits
        ages = [waits.packs - sequence.since for sequence in sequences]
        self._ready.append(Pack([sequence.example for sequence in sequences], lengths))
        self._waits = Waits(
            packs=waits.packs + 1,
            sequences=waits.sequences + len(lengths),
            tokens=waits.tokens + sum(lengths),
            longest=max(waits.longest, *ages),
            total=waits.total + sum(ages),
            forced=waits.forced + forced,
        )

    def finish(self) -> None:
        """Close packs of everything that waits, those with the oldest sequences first; the stream may go on."""
        buffer = self._buffer
        if not buffer.sequences:
            return
        self._note_arrived()
        plan = optimal.pack(
            LengthHistogram(buffer.counts), max_sequences_per_pack=self.max_sequences_per_pack
        )
        rows = []
        for strategy, repeats in zip(plan.strategies, plan.repeats):
            for _ in range(repeats):
                sequences = buffer.remove(list(strategy))
                rows.append(sorted(zip(sequences, strategy)))

        buffer.counts[:] = 0
        while self._best_fit.sequences:
            self._best_fit.close()
        if self._rows is not None:
            self._rows = OpenRows(*self._limits)
        for row in sorted(rows, key=lambda row: row[0][0].number):
            self._hand_over(
                [length for _, length in row], [sequence for sequence, _ in row], forced=False
            )

    # ---- prices ------------------------------------------------------------------------------------------------------

    @property
    def _period(self) -> int:
        """Sequences between two programmes, after the first few."""
        return max(_PERIOD_SEQUENCES, _PERIOD_BUFFERS * self.buffer_sequences)

    def _note_arrived(self) -> None:
        arrived = self._buffer.settle()
        if arrived:
            np.add.at(self._learnt, self._steps[arrived], 1.0)

    def _learn(self) -> None:
        """Count what has arrived; when it is time, take up new prices and start the next programme."""
        self._note_arrived()
        if self._solving is not None and self._arrived >= self._solving.due:
            counts, _, solution = self._solving
            worth = solve(counts, *self._limits) if solution is None else solution.result()
            self._take_up(counts, worth)
            self._solving = None

        if self._from is None:
            self._take_up(self._learnt.copy(), solve(self._learnt, *self._limits))
            self._next = _PERIOD_GROWTH * self._arrived
        elif self._arrived >= self._next and self._solving is None:
            self._solve(
                self._learnt.copy(), self._arrived + min(_SEQUENCES_WHILE_SOLVING, self._arrived)
            )
            if self._arrived < self._period:
                self._next = min(_PERIOD_GROWTH * self._arrived, self._arrived + self._period)
            else:
                self._learnt *= 0.5  # lengths seen long ago count less and less
                self._next = self._arrived + self._period

    def __getstate__(self) -> Dict[str, Any]:
        # A thread cannot be copied: the copy solves the programme itself when it is due.
        return {**self.__dict__, "_solving": self._solving and self._solving._replace(worth=None)}

    def _solve(self, counts: np.ndarray, due: int) -> None:
        worker = ThreadPoolExecutor(1)
        self._solving = _Solving(counts, due, worker.submit(solve, counts, *self._limits))
        worker.shutdown(wait=False)

    def _take_up(self, counts: np.ndarray, worth: np.ndarray) -> None:
        self._from = counts, worth
        self._prices = {}

    def _prices_now(self) -> Prices:
        """Return the prices for what waits now."""
        assert self._from is not None
        scarce = scarce_seats(self._buffer.sequences, self._buffer.tokens, *self._limits)
        if scarce not in self._prices:
            self._prices[scarce] = prices(*self._from, *self._limits, self.buffer_sequences, scarce)
        return self._prices[scarce]

    # ---- state -------------------------------------------------------------------------------------------------------

    def _options(self) -> Dict[str, Any]:
        return {
            "max_sequence_length": self.max_sequence_length,
            "max_sequences_per_pack": self.max_sequences_per_pack,
            "buffer_sequences": self.buffer_sequences,
            "buffer_tokens": self.buffer_tokens,
            "longest_wait": self.longest_wait,
            "rank": self.rank,
            "ranks": self.ranks,
            "share": _SHARE,
            "multiple_of": self.multiple_of,
            "source": self.source,
        }

    def state_dict(self) -> Dict[str, Any]:
        """Return everything that later packs follow from, as values for JSON if the examples are such.

        It may be taken at any time, also between two packs of `packs`.

        Returns:
            Values for `load_state_dict`.
        """
        self._note_arrived()
        buffer = self._buffer
        resting = np.flatnonzero(buffer.rests_until > self._arrived)
        waiting = [
            [item.number, item.since, length, item.example] for length, item in buffer.in_order()
        ]
        return {
            "format": _FORMAT,
            "options": self._options(),
            "taken": self._taken,
            "rounding": self.rounding,
            "arrived": self._arrived,
            "waits": self._waits._asdict(),
            "waiting": waiting,
            "resting": [[length, int(buffer.rests_until[length])] for length in resting.tolist()],
            "ready": [[pack.examples, pack.lengths] for pack in self._ready],
            "learnt": self._learnt.tolist(),
            "prices": None if self._from is None else [values.tolist() for values in self._from],
            "solving": None
            if self._solving is None
            else [self._solving.counts.tolist(), self._solving.due],
            "next": self._next,
            "beside": [self._best_fit.closed, self._best_fit.rows()],
            "rows": None if self._rows is None else self._rows.rows(),
            "turned": [self._turned, self._until],
        }

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        """Continue from a state. If it is refused, nothing changes.

        Args:
            state: from `state_dict`.

        Raises:
            ValueError: the state is damaged, or was taken with other options or another source.
        """
        fields = Fields.of(state, "state of the stream", "pass a state that state_dict returned")
        fields.one_of("format", (_FORMAT,))
        self._check_options(fields)
        known, solving = self._read_programmes(fields)
        buffer = self._read_buffer(fields)
        best_fit, rows = self._read_best_fit(fields, buffer)
        turned, until = fields.integers("turned", 2, least=0)
        ready = fields.list_of(
            "ready", lambda packs, index: Pack(*packs.list_of(index, Fields.any, length=2))
        )
        loaded = {
            "_taken": fields.integer("taken", least=0),
            "rounding": fields.integer("rounding", least=0),
            "_arrived": fields.integer("arrived", least=0),
            "_waits": Waits(
                *(fields.object("waits").integer(name, least=0) for name in Waits._fields)
            ),
            "_buffer": buffer,
            "_ready": deque(ready),
            "_learnt": self._read_steps(fields, "learnt"),
            "_prices": {},
            "_from": known,
            "_solving": solving,
            "_next": fields.integer("next", least=0),
            "_best_fit": best_fit,
            "_rows": rows,
            "_turned": turned,
            "_until": until,
        }
        self.__dict__.update(loaded)  # after everything was read without an error

    def _check_options(self, fields: Fields) -> None:
        options = fields.object("options").tree
        for name, value in self._options().items():
            if options.get(name) != value:
                raise ValueError(
                    f"state of the stream: {name} was {shown(options.get(name))}, it is {shown(value)} here; pass the "
                    "same options, or begin without the state"
                )

    def _read_steps(self, fields: Fields, key: Any) -> np.ndarray:
        """Read one value for each step of the grid of lengths, float64 [steps + 1]."""
        return np.array(
            fields.list_of(key, Fields.number, length=len(self._learnt), least=0), np.float64
        )

    def _read_programmes(
        self, fields: Fields
    ) -> Tuple[Optional[Tuple[np.ndarray, np.ndarray]], Optional[_Solving]]:
        """Read the counts and worth that prices come from, and the programme that was being solved."""
        known = None
        solving = None
        if fields.any("prices") is not None:
            counts, worth = fields.list_of("prices", self._read_steps, length=2)
            if not counts.any():
                raise fields.error("prices", "its counts must not all be 0")
            known = counts, worth
        if fields.any("solving") is not None:
            counts, due = fields.list_of(
                "solving",
                lambda pair, index: (
                    pair.integer(1, least=0) if index else self._read_steps(pair, 0)
                ),
                length=2,
            )
            if not counts.any():
                raise fields.error("solving", "its counts must not all be 0")
            # No thread is started: a worker process that gets this object would not have it.
            solving = _Solving(counts, int(due), None)
        return known, solving

    def _read_buffer(self, fields: Fields) -> Buffer:
        S = self.max_sequence_length

        def column(row: Fields, index: int) -> Any:
            if index == 2:
                return row.integer(index, least=1, most=S)
            return row.any(index) if index == 3 else row.integer(index, least=0)

        buffer = Buffer(S, self.max_sequences_per_pack)
        waiting = fields.list_of(
            "waiting", lambda rows, index: rows.list_of(index, column, length=4)
        )
        for number, since, length, example in waiting:
            buffer.add(length, Waiting(number, since, example))
        for length, until in fields.list_of("resting", Fields.integers, 2, least=0):
            if length > S:
                raise fields.error("resting", f"lengths must be at most {S}")
            buffer.rests_until[length] = until
        buffer.settle()
        return buffer

    def _read_best_fit(self, fields: Fields, buffer: Buffer) -> Tuple[OpenRows, Optional[OpenRows]]:
        """Read the rows of online best fit for comparison, and those that the stream packs by."""
        closed, best_fit = fields.list_of(
            "beside",
            lambda pair, index: self._read_rows(pair, 1) if index else pair.integer(0, least=0),
            length=2,
        )
        best_fit.closed = closed
        if fields.any("rows") is None:
            return best_fit, None
        rows = self._read_rows(fields, "rows")
        if sorted(length for row in rows.rows() for length in row) != sorted(
            length for length, _ in buffer.in_order()
        ):
            raise fields.error("rows", "must hold the lengths that wait")
        return best_fit, rows

    def _read_rows(self, fields: Fields, key: Any) -> OpenRows:
        S, depth = self._limits
        rows = fields.list_of(key, Fields.integers, least=1, most=S)
        for row in rows:
            if not row or sum(row) > S or len(row) > (depth or S):
                raise fields.error(key, f"a row must hold 1 to {depth or S} sequences in {S} slots")
        return OpenRows(S, depth, rows)


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
