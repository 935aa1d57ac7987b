"""A stream of sequences in, packs out, near the fewest possible, with a bounded buffer: `PackStream`."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Deque, Dict, Iterable, Iterator, List, NamedTuple, Optional, Tuple

import numpy as np

from pack_data import optimal
from pack_data.packing.histogram import LengthHistogram, whole_slots
from pack_data.reading.fields import Fields, packing_depth, shown, whole_number
from pack_data.store.sequences import check_multiple
from pack_data.stream.buffer import Buffer, Round, Waiting
from pack_data.stream.open_rows import OpenRows
from pack_data.stream.prices import Prices, on_grid, prices, scarce_seats, solve, steps_of
from pack_data.stream.stalls import items_and_stalls

_FORMAT = "pack_data stream 2"
_SHARES = ("sequences", "packs")
_LEARNT = 1 << 17, 128  # sequences between two solutions, and as many buffers: the larger of the two
_MORE = 4  # until then a solution comes after so many times the sequences of the one before
_LATER = 1 << 14  # sequences from the one at which a solution is begun to the one at which it is taken up
# Packs more than online best fit, and the share of all packs, that make the stream turn to it. With a limit of depth
# the numbers are less certain, and a turn in vain costs more.
_BEHIND, _BEHIND_LIMITED, _BEHIND_SHARE = 1.0, 4.0, 1 / 2048
_STAYS = 4  # buffers of sequences that it stays there, twice as many each time


class Pack(NamedTuple):
    """The sequences of one row."""

    examples: List[Any]
    lengths: List[int]  # tokens of each, rounded up where the stream has a multiple_of


class Waits(NamedTuple):
    """How long the sequences of the packs closed so far have waited, in packs."""

    packs: int
    sequences: int
    tokens: int
    longest: int
    total: int
    forced: int  # packs begun with the oldest sequence because it had waited long enough

    @property
    def mean(self) -> float:
        """Packs closed while a sequence waited, on average."""
        return self.total / self.sequences if self.sequences else 0.0


class _Solving(NamedTuple):
    """A programme that is being solved."""

    counts: np.ndarray
    due: int  # sequences that have arrived when its prices are taken up
    worth: Optional[Future]  # None: it is solved when it is due


class PackStream:
    """Packs sequences as they come.

    At most `buffer_sequences` sequences (and `buffer_tokens` tokens) wait.  When they are so many, the packs of highest
    value are closed, a thirty-second of the buffer at a time.  Values are prices of the packing programme over the
    lengths seen so far; `histogram` gives lengths seen before.  The programme is solved again at fixed numbers of
    sequences, beside the packing, and its prices are taken up at a fixed later number.

    Online best fit packs the lengths beside it.  Where prices make more packs than that, as in a stream that is sorted,
    the stream packs by best fit for a while.

    No sequence waits while more than `longest_wait` packs are closed (default 4 * buffer_sequences; at least
    buffer_sequences, so that it can be kept).

    ranks: processes that read the same stream; this one is number `rank`.  share "sequences": each packs its share of
    the sequences (number i goes to rank i modulo ranks).  "packs": all make the same packs and take turns; at the end
    some packs are split so that each rank gets equally many, as far as enough sequences wait there.

    multiple_of: each sequence takes a multiple of it in slots; `rounding` counts the slots that this adds.

    flush_after: seconds; `packs` packs all that waits when the source has given nothing for so long.  Then a thread
    reads the source, up to 64 sequences ahead.

    Nothing is random, and nothing but flush_after depends on time: the same sequences give the same packs, also after
    `load_state_dict`.
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
        share: str = "sequences",
        flush_after: Optional[float] = None,
        multiple_of: int = 1,
    ) -> None:
        S = self.max_sequence_length = whole_slots(max_sequence_length)
        self.max_sequences_per_pack = packing_depth(max_sequences_per_pack)
        self.multiple_of = whole_number("multiple_of", multiple_of, least=1)
        check_multiple(S, multiple_of)
        self.rounding = 0  # slots added to the sequences of this rank's share
        self.buffer_sequences = whole_number("buffer_sequences", buffer_sequences, least=1)
        self.buffer_tokens = (
            None if buffer_tokens is None else whole_number("buffer_tokens", buffer_tokens, least=max_sequence_length)
        )
        self.longest_wait = (
            4 * self.buffer_sequences
            if longest_wait is None
            else whole_number("longest_wait", longest_wait, least=self.buffer_sequences)
        )
        self.ranks = whole_number("ranks", ranks, least=1)
        self.rank = whole_number("rank", rank, least=0, most=self.ranks - 1)
        if share not in _SHARES:
            raise ValueError(f"share {shown(share)}: there are {' and '.join(_SHARES)}")
        self.share = share
        own = Fields.of({"flush_after": flush_after}, "PackStream", "give seconds")
        self.flush_after = own.optional("flush_after", Fields.number, least=1e-3, most=1e6)
        if flush_after is not None and share == "packs" and ranks > 1:
            raise ValueError(
                'flush_after: ranks that take turns make the same packs, and time differs; take share "sequences"'
            )
        self._most_tokens = 2**62 if self.buffer_tokens is None else self.buffer_tokens
        self._room = max(1, self.buffer_sequences // 32), min(S, self._most_tokens // 32)
        self._buffer = Buffer(S, self.max_sequences_per_pack)
        self._steps = steps_of(S)
        self._learnt = np.zeros(int(self._steps[-1]) + 1)
        self._prices: Dict[int, Prices] = {}  # by how scarce seats are; those that were needed
        self._from: Optional[Tuple[np.ndarray, np.ndarray]] = None  # counts and worth that the prices come from
        self._solving: Optional[_Solving] = None
        self._next = 0  # sequences that have arrived when the programme is solved next
        self._ready: Deque[Pack] = deque()  # packs of this rank that are closed but not handed out
        self._beside = OpenRows(S, self.max_sequences_per_pack)  # online best fit of the lengths that arrive
        self._rows: Optional[OpenRows] = None  # what waits, while the stream packs by best fit
        self._turned = self._until = 0  # how often it turned to best fit; arrived sequences when it may turn back
        self._taken = self._arrived = 0
        self._waits = Waits(0, 0, 0, 0, 0, 0)
        if histogram is not None:
            if histogram.max_sequence_length != S:
                histogram = histogram.with_max_sequence_length(S)
            if not histogram.sequences:
                raise ValueError("histogram: it holds no sequence; leave it out, the lengths are learnt")
            self._learnt = on_grid(histogram.rounded_up(multiple_of).counts)
            self._learnt *= min(1.0, self._period / histogram.sequences)
            self._take_up(self._learnt.copy(), solve(self._learnt, S, self.max_sequences_per_pack))
            self._next = self._period

    # ---- sequences in, packs out -------------------------------------------------------------------------------------

    @property
    def taken(self) -> int:
        """Sequences of the stream that this object has seen, those of other ranks included."""
        return self._taken

    @property
    def waits(self) -> Waits:
        """How long sequences have waited so far."""
        return self._waits

    def packs(self, source: Iterable[Tuple[Any, int]]) -> Iterator[Pack]:
        """All packs of a source of (example, length), the last ones included.

        After `load_state_dict` the source begins at sequence `taken`.
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
        """Hands out the packs that are closed; `state_dict` holds those that are not handed out yet."""
        while self._ready:
            yield self._ready.popleft()

    def put(self, example: Any, length: int) -> bool:
        """Adds a sequence of `length` tokens; whether packs are `ready`."""
        number = self._taken
        if type(length) is not int:
            length = whole_number(f"the length of sequence {number} of the stream", length)
        if not 1 <= length <= self.max_sequence_length:
            raise ValueError(
                f"sequence {number} of the stream has length {shown(length)}; a row has {self.max_sequence_length} "
                "slots: cut, split or drop longer sequences first, and drop empty ones"
            )
        self._taken += 1
        if self.share == "sequences" and number % self.ranks != self.rank:
            return False
        if self.multiple_of > 1:
            added = -length % self.multiple_of
            length, self.rounding = length + added, self.rounding + added
        buffer = self._buffer
        if buffer.tokens + length > self._most_tokens:
            self._close(length)
        buffer.add(length, Waiting(self._arrived, self._waits.packs, example))
        self._arrived += 1
        self._beside.pass_by(length, self.buffer_sequences, self._most_tokens)
        if self._rows is not None:
            self._rows.add(length)
        if buffer.sequences >= self.buffer_sequences:
            self._close(0)
        return bool(self._ready)

    def _close(self, coming: int) -> None:
        """Closes packs until there is room; coming: tokens of the next sequence."""
        self._learn()
        if self._rows is None:
            self._close_by_price(coming)
        else:
            self._close_rows(self._rows, coming)
        most = _BEHIND if self.max_sequences_per_pack is None else _BEHIND_LIMITED
        behind = self._packs_behind() - most - _BEHIND_SHARE * self._waits.packs
        if self._rows is None and behind > 0:
            self._rows = OpenRows(*self._limits)
            for length in sorted((length for length, _ in self._buffer.in_order()), reverse=True):
                self._rows.add(length)
            self._turned += 1
            self._until = self._arrived + _STAYS * self.buffer_sequences * 2**self._turned
        elif self._rows is not None and behind <= 0 and self._arrived >= self._until:
            self._rows = None

    def _close_by_price(self, coming: int) -> None:
        buffer = self._buffer
        round_ = Round(buffer, self._prices_now(), self.buffer_sequences, self._arrived)
        most = self.buffer_sequences - self._room[0]
        most_tokens = max(0, self._most_tokens - max(coming, self._room[1]))
        while buffer.sequences > most or buffer.tokens > most_tokens:
            due = self._due()
            self._close_pack(round_.pack(due), due is not None)
        round_.end()

    def _close_rows(self, rows: OpenRows, coming: int) -> None:
        buffer = self._buffer
        while rows.full or buffer.sequences >= self.buffer_sequences or buffer.tokens + coming > self._most_tokens:
            due = self._due()
            lengths = rows.close(due)
            np.subtract.at(buffer.counts, lengths, 1)
            self._close_pack(lengths, due is not None)

    def _due(self) -> Optional[int]:
        """Length of the oldest sequence if the next pack has to hold it.

        The oldest are due one by one, and there are at most buffer_sequences: none waits over longest_wait packs.
        """
        length, oldest = self._buffer.oldest()
        return length if self._waits.packs - oldest.since >= self.longest_wait - self.buffer_sequences else None

    def _packs_behind(self) -> float:
        """Packs more than online best fit has closed, less what the sequences that wait there but not here may need.

        By tokens, and by sequences where depth is limited, the smaller: none of the two alone is what decides.  And in
        the same way, but a sequence of more than half a row needs a pack of its own.
        """
        own, other, (S, depth) = self._buffer, self._beside, self._limits
        long = int(own.counts[S // 2 + 1 :].sum())
        needed = [(own.tokens / S, other.tokens / S)]
        if depth is not None:
            needed.append((own.sequences / depth, other.sequences / depth))
        plain = min(here - there for here, there in needed)
        alone = min(max(here, long) - max(there, other.long) for here, there in needed)
        return self._waits.packs - other.closed + max(plain, alone)

    def _close_pack(self, lengths: List[int], forced: bool = False) -> None:
        self._hand_over(lengths, self._buffer.remove(lengths), forced)

    def _hand_over(self, lengths: List[int], sequences: List[Waiting], forced: bool = False) -> None:
        waits = self._waits
        ages = [waits.packs - each.since for each in sequences]
        if self.share == "sequences" or waits.packs % self.ranks == self.rank:
            self._ready.append(Pack([each.example for each in sequences], lengths))
        self._waits = Waits(
            waits.packs + 1,
            waits.sequences + len(lengths),
            waits.tokens + sum(lengths),
            max(waits.longest, max(ages)),
            waits.total + sum(ages),
            waits.forced + forced,
        )

    def finish(self) -> None:
        """Closes packs of all that waits, those with the oldest sequences first; the stream may go on."""
        buffer = self._buffer
        if not buffer.sequences:
            return
        self._note_arrived()
        histogram, depth = LengthHistogram(buffer.counts), self.max_sequences_per_pack
        plan = optimal.pack(histogram, max_sequences_per_pack=depth)
        rows = []
        for strategy, repeats in zip(plan.strategies, plan.repeats):
            for _ in range(repeats):
                rows.append(sorted(zip(buffer.remove(list(strategy)), strategy)))
        buffer.counts[:] = 0
        while self._beside.sequences:
            self._beside.close()
        if self._rows is not None:
            self._rows = OpenRows(*self._limits)
        if self.share == "packs":
            _split(rows, -(self._waits.packs + len(rows)) % self.ranks)
        for row in sorted(rows, key=lambda row: row[0][0].number):
            self._hand_over([length for _, length in row], [sequence for sequence, _ in row])

    # ---- prices ------------------------------------------------------------------------------------------------------

    @property
    def _period(self) -> int:
        """Sequences between two solutions, after the first few."""
        return max(_LEARNT[0], _LEARNT[1] * self.buffer_sequences)

    def _note_arrived(self) -> None:
        arrived = self._buffer.settle()
        if len(arrived):
            np.add.at(self._learnt, self._steps[arrived], 1.0)

    def _learn(self) -> None:
        """Counts what has arrived; takes up new prices, and begins to solve for others, when it is time."""
        self._note_arrived()
        if self._solving is not None and self._arrived >= self._solving.due:
            counts, _, worth = self._solving
            self._take_up(counts, solve(counts, *self._limits) if worth is None else worth.result())
            self._solving = None
        if self._from is None:
            self._take_up(self._learnt.copy(), solve(self._learnt, *self._limits))
            self._next = _MORE * self._arrived
        elif self._arrived >= self._next and self._solving is None:
            self._solve(self._learnt.copy(), self._arrived + min(_LATER, self._arrived))
            if self._arrived < self._period:
                self._next = min(_MORE * self._arrived, self._arrived + self._period)
            else:
                self._learnt *= 0.5  # what was seen long ago counts less and less
                self._next = self._arrived + self._period

    def __getstate__(self) -> Dict[str, Any]:
        # A thread cannot be copied: there, what is being solved is solved when it is due.
        return {**self.__dict__, "_solving": self._solving and self._solving._replace(worth=None)}

    @property
    def _limits(self) -> Tuple[int, Optional[int]]:
        return self.max_sequence_length, self.max_sequences_per_pack

    def _solve(self, counts: np.ndarray, due: int) -> None:
        worker = ThreadPoolExecutor(1)
        self._solving = _Solving(counts, due, worker.submit(solve, counts, *self._limits))
        worker.shutdown(wait=False)

    def _take_up(self, counts: np.ndarray, worth: np.ndarray) -> None:
        self._from = counts, worth
        self._prices = {}

    def _prices_now(self) -> Prices:
        """The prices for what waits, from the programme's."""
        assert self._from is not None
        scarce = scarce_seats(self._buffer.sequences, self._buffer.tokens, *self._limits)
        if scarce not in self._prices:
            self._prices[scarce] = prices(*self._from, *self._limits, self.buffer_sequences, scarce)
        return self._prices[scarce]

    # ---- state -------------------------------------------------------------------------------------------------------

    def _options(self) -> Dict[str, Any]:
        names = "max_sequence_length max_sequences_per_pack buffer_sequences buffer_tokens longest_wait"
        return {name: getattr(self, name) for name in f"{names} rank ranks share multiple_of".split()}

    def state_dict(self) -> Dict[str, Any]:
        """All that later packs follow from, as values for JSON if the examples are such.

        It may be taken at any time, also between two packs of `packs`.
        """
        self._note_arrived()
        buffer = self._buffer
        resting = np.flatnonzero(buffer.rests_until > self._arrived)
        return {
            "format": _FORMAT,
            "options": self._options(),
            "taken": self._taken,
            "rounding": self.rounding,
            "arrived": self._arrived,
            "waits": self._waits._asdict(),
            "waiting": [[each.number, each.since, length, each.example] for length, each in buffer.in_order()],
            "resting": [[length, int(buffer.rests_until[length])] for length in resting.tolist()],
            "ready": [[pack.examples, pack.lengths] for pack in self._ready],
            "learnt": self._learnt.tolist(),
            "prices": None if self._from is None else [values.tolist() for values in self._from],
            "solving": None if self._solving is None else [self._solving.counts.tolist(), self._solving.due],
            "next": self._next,
            "beside": [self._beside.closed, self._beside.rows()],
            "rows": None if self._rows is None else self._rows.rows(),
            "turned": [self._turned, self._until],
        }

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        """Goes on from what `state_dict` gave; the options have to be the same.  ValueError for anything else."""
        fields = Fields.of(state, "state of the stream", "take one that state_dict gave")
        fields.one_of("format", (_FORMAT,))
        options = fields.object("options").tree
        for name, value in self._options().items():
            if options.get(name) != value:
                raise ValueError(
                    f"state of the stream: {name} was {shown(options.get(name))}, it is {shown(value)} here; make the "
                    "stream with the same options, or begin anew"
                )
        size, S = len(self._learnt), self.max_sequence_length

        def values(value: Any, key: Any = "learnt") -> np.ndarray:
            whole = Fields.of({key: value}, "state of the stream", fields.way_out)
            return np.array(whole.list_of(key, Fields.number, length=size, least=0), np.float64)

        taken, arrived = fields.integer("taken", least=0), fields.integer("arrived", least=0)
        rounding = fields.integer("rounding", least=0)
        waits = Waits(*(fields.object("waits").integer(name, least=0) for name in Waits._fields))
        buffer = Buffer(S, self.max_sequences_per_pack)
        for number, since, length, example in fields.list_of("waiting", _row, 4):
            for value in (number, since):
                whole_number("state of the stream: a number in waiting", value, least=0)
            buffer.add(
                whole_number("state of the stream: a length in waiting", length, least=1, most=S),
                Waiting(number, since, example),
            )
        for length, until in fields.list_of("resting", Fields.integers, 2, least=0):
            if length > S:
                raise fields.error("resting", f"lengths go up to {S}")
            buffer.rests_until[length] = until
        ready = deque(Pack(*row) for row in fields.list_of("ready", _row, 2))
        learnt, following = values(fields.any("learnt")), fields.integer("next", least=0)
        known = None if fields.any("prices") is None else [values(row, "prices") for row in _row(fields, "prices", 2)]
        solving = None
        if fields.any("solving") is not None:
            counts, due = _row(fields, "solving", 2)
            solving = values(counts, "solving"), whole_number("state of the stream: solving", due, least=0)
        for name, found in (("prices", known), ("solving", solving)):
            if found is not None and not found[0].any():
                raise fields.error(name, "must be of lengths that were seen")
        turned, until = fields.integers("turned", 2, least=0)
        closed, held = _row(fields, "beside", 2)
        beside, rows = self._open_rows(fields, "beside", held), fields.any("rows")
        beside.closed = whole_number("state of the stream: beside", closed, least=0)
        if rows is not None:
            rows = self._open_rows(fields, "rows", rows)
            if sorted(length for row in rows.rows() for length in row) != sorted(row[2] for row in state["waiting"]):
                raise fields.error("rows", "must hold the lengths that wait")
        buffer.settle()
        self._beside, self._rows, self._turned, self._until = beside, rows, turned, until
        self._buffer, self._learnt, self._ready, self._waits = buffer, learnt, ready, waits
        self._taken, self._arrived, self._next, self.rounding = taken, arrived, following, rounding
        self._prices, self._from, self._solving = {}, None, None
        if known is not None:
            self._take_up(*known)
        if solving is not None:  # no thread is begun: a worker process that gets this object would not have it
            self._solving = _Solving(*solving, None)

    def _open_rows(self, fields: Fields, name: str, rows: Any) -> OpenRows:
        S, depth = self._limits
        whole = Fields.of({name: rows}, "state of the stream", fields.way_out)
        lengths = whole.list_of(name, Fields.integers, least=1, most=S)
        if any(not row or sum(row) > S or len(row) > (depth or S) for row in lengths):
            raise fields.error(name, f"must be of rows within {S} slots and the depth")
        return OpenRows(S, depth, lengths)


def _row(fields: Fields, key: Any, length: int) -> List[Any]:
    """A list of so many values of any kind."""
    return fields.list_of(key, Fields.any, length=length)


def _split(rows: List[List[Tuple[Waiting, int]]], more: int) -> None:
    """Splits the rows of most sequences so that there are `more` rows, or as many as there can be."""
    for _ in range(more):
        longest = max(range(len(rows)), key=lambda number: len(rows[number]))
        row = rows[longest]
        if len(row) == 1:
            return
        rows[longest] = row[0::2]
        rows.append(row[1::2])
