"""Which rank ends, in which round and with which status: in rounds that the test counts, so that no clock matters."""

import json
import os

import pytest
import torch.distributed as dist

from ipu_packed_bert.processes import beats
from ipu_packed_bert.processes.beats import Beats, first_error, leave_error

PATIENCE = 10  # rounds without a beat of a rank that has begun, or with an error that this rank has not noticed
LOADING = 200  # rounds until the first beat
LAST = 250  # round after which nobody waits any more


class Ended(BaseException):
    """The end of a process by `os._exit`, with its status."""


@pytest.fixture(autouse=True)
def exits(monkeypatch):
    def end(status):
        raise Ended(status)

    monkeypatch.setattr(os, "_exit", end)


class Rounds:
    """The event that ends the beats; `happens(round)` stands for what the other ranks do while this one waits."""

    def __init__(self, happens):
        self.happens = happens
        self.number = 0
        self.is_set = False

    def wait(self, _):
        self.number += 1
        self.happens(self.number)
        return self.number > LAST

    def set(self):
        self.is_set = True


def beating(store, until):
    """Return what ranks do that beat until their last rounds, {rank: round}."""

    def happens(number):
        for rank, last in until.items():
            if number <= last:
                store.set(f"host/{rank}", f"host-{rank}")
                store.add(f"beats/{rank}", 1)

    return happens


def end_of(rank, store, happens, shielded=False):
    """Return the round in which one of three ranks ends itself, and its status; None if it goes on."""
    one = Beats(lambda: store, rank, 3, "--resume")
    one.shielded = shielded
    one._over = Rounds(happens)
    try:
        one._beat(store)
    except Ended as end:
        return one._over.number, end.args[0]
    return None


# Rank, last rounds in which the others beat -> the round of its end, the rank that it names.
SILENCES = [
    (0, {1: LAST, 2: LAST}, None, None),
    (1, {0: LAST}, None, None),
    (2, {0: LAST, 1: 7}, None, None),
    (0, {1: LAST, 2: 7}, 7 + PATIENCE, 2),
    (0, {1: 1, 2: 7}, 1 + PATIENCE, 1),
    (1, {0: 7, 2: LAST}, 7 + PATIENCE, 0),
    (0, {1: LAST}, LOADING, 2),
]


@pytest.mark.parametrize("rank, until, end, lost", SILENCES)
def test_a_silent_rank_ends_those_that_watch_it(rank, until, end, lost, capsys):
    """Rank 0 watches all others, and they watch rank 0."""
    store = dist.HashStore()
    assert end_of(rank, store, beating(store, until)) == (end and (end, 1))
    assert store.add(f"beats/{rank}", 0) == (end or LAST)
    printed = capsys.readouterr().err
    error = first_error(store, 3)
    if end is None:
        assert not printed and error is None
        return
    assert printed.count("\n") == 1 and f"rank {lost}" in printed and "--resume" in printed
    assert (f"host-{lost}" in printed) == (lost in until)
    assert (error["rank"], error["status"]) == (rank, 1) and f"rank {lost}" in error["text"]
    assert store.add("given up", 0) == 1


def test_a_rank_that_beats_again_in_time_is_not_lost():
    store = dist.HashStore()

    def happens(number):
        if number % PATIENCE == 0:
            store.add("beats/0", 1)

    assert end_of(1, store, happens) is None


def test_only_the_first_rank_that_notices_a_silence_reports_it(capsys):
    store = dist.HashStore()
    store.add("noticed", 1)
    beat = beating(store, {0: 3})

    def happens(number):
        beat(number)
        if number == 20:
            store.add("given up", 1)

    assert end_of(1, store, happens) == (20, 1)
    assert capsys.readouterr().err == "" and first_error(store, 3) is None


@pytest.mark.parametrize(
    "status, shielded, end", [(1, False, (14, 1)), (2, False, (14, 2)), (3, False, None), (2, True, None)]
)
def test_an_error_that_a_rank_does_not_notice_ends_it_with_that_status(status, shielded, end, capsys):
    """The rank with the error stops to beat; it counts as ended, not as silent. An end with status 3 is each rank's."""
    store = dist.HashStore()
    beat = beating(store, {1: LAST, 2: 5})

    def happens(number):
        beat(number)
        if number == 5:
            leave_error(store, 2, status, "a.yml: wrong")

    assert end_of(0, store, happens, shielded) == end
    printed = capsys.readouterr().err
    assert printed.count("\n") == (end is not None)
    assert end is None or ("rank 2" in printed and "a.yml: wrong" in printed)


def test_the_rounds_of_an_error_are_counted_after_the_shield():
    store = dist.HashStore()
    leave_error(store, 2, 2, "wrong")
    one = Beats(lambda: store, 1, 3, "--resume")
    one.shielded = True

    def happens(number):
        store.add("beats/0", 1)
        one.shielded = number <= 40

    one._over = Rounds(happens)
    with pytest.raises(Ended, match="2"):
        one._beat(store)
    assert one._over.number == 40 + PATIENCE


def test_a_store_that_has_ended_ends_the_beats_and_nothing_else():
    class Closed:
        def add(self, key, number):
            raise RuntimeError("connection closed")

    one = Beats(Closed, 1, 3, "--resume")
    one._over = Rounds(lambda number: None)
    one._beat(Closed())
    assert one._over.is_set and one._over.number == 1


def test_the_first_error_is_that_of_the_lowest_rank():
    store = dist.HashStore()
    assert first_error(store, 4) is None
    for rank in (3, 1, 2):
        leave_error(store, rank, rank, f"text {rank}")
        assert store.add("errors", 0) == {3: 1, 1: 2, 2: 3}[rank]
    first = first_error(store, 4)
    assert (first["rank"], first["status"], first["text"]) == (1, 1, "text 1")
    assert json.loads(store.get("error/3"))["status"] == 3


class Thread:
    """The thread of the beats, whose rounds stop after the round `last`; it ends itself after the round `end`."""

    def __init__(self, owner, last, end):
        self.owner = owner
        self.last = last
        self.end = end
        self.joined = 0

    def is_alive(self):
        return self.joined < self.end

    def join(self, _):
        self.joined += 1
        if self.joined <= self.last:
            self.owner._rounds += 1


@pytest.mark.parametrize("status", [1, 0, 2])
@pytest.mark.parametrize("last, end", [(5, LAST), (LAST, LAST), (5, 5 + PATIENCE)])
def test_a_store_that_does_not_answer_ends_the_process(status, last, end, capsys):
    """With the status of the command once its work is done, and then without a line."""
    one = Beats(dist.HashStore, 2, 3, "--resume")
    one.status = status
    one._beating = Thread(one, last, end)
    is_lost = last + PATIENCE < end
    try:
        one._watch_store()
    except Ended as ended:
        assert is_lost and ended.args == (status,)
    else:
        assert not is_lost
    assert one._beating.joined == (last + PATIENCE if is_lost else end)
    printed = capsys.readouterr().err
    assert printed.count("\n") == (is_lost and status == 1)
    assert not printed or ("rank 2" in printed and "--resume" in printed)


def test_all_ranks_have_ended_half_a_minute_after_a_loss():
    """Two beats after the silence: that of the rank that notices it, and that of the others."""
    assert beats.SILENCE * (1 + 2 / PATIENCE) <= 30
