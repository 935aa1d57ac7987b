"""The ends of the ranks of a run: which of them reports an error, with which status, and in which order they part."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from ipu_packed_bert.processes import ranks
from ipu_packed_bert.processes.beats import leave_error
from ipu_packed_bert.processes.ranks import Ranks, _TensorsApart
from pack_data.cli.command import NotFinite

LOST = RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer")
WRONG = ValueError("a.yml: wrong")


class Clock:
    """A clock that only moves while somebody sleeps; `happens` has what others do, {second: call}."""

    def __init__(self, happens=()):
        self.now = 0.0
        self.happens = dict(happens)

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        for second in [second for second in self.happens if second <= self.now]:
            self.happens.pop(second)()


def left_by(rank, status, text, after=None):
    """Return an error that a rank leaves, from the beginning or after some seconds."""
    return after, lambda store: leave_error(store, rank, status, text)


def lost_before(store):
    store.add("lost", 1)


# Rank, its error, what others leave and when -> the status if another rank reports the error, seconds waited for it.
ENDS = [
    (0, WRONG, [left_by(1, 2, "a.yml: wrong")], None, 0),
    (1, WRONG, [left_by(0, 2, "a.yml: wrong")], 2, 0),
    (1, WRONG, [left_by(0, 2, "a.yml: wrong", after=0.9)], 2, 0.9),
    (1, WRONG, [left_by(0, 2, "a.yml: wrong", after=1.5)], None, 1),
    (1, WRONG, [left_by(0, 2, "b.yml: wrong")], None, 0),
    (1, WRONG, [left_by(0, 1, "a.yml: wrong")], None, 0),
    (1, WRONG, [left_by(2, 2, "a.yml: wrong")], None, 1),
    (1, OSError("disk full"), [left_by(0, 2, "disk full")], 2, 0),
    (1, KeyError("fault"), [left_by(0, 1, "'fault'")], 1, 0),
    # Rank 0 saves before it reports, and only it knows what.
    (1, NotFinite("nan"), [left_by(0, 3, "nan; step_3 is saved", after=50)], 3, 50),
    (1, NotFinite("nan"), [left_by(0, 3, "nan; step_3 is saved", after=70)], None, 60),
    (1, NotFinite("nan"), [left_by(0, 2, "disk full")], None, 0),
    # A connection that another rank has closed, which leaves its error first or soon after.
    (1, LOST, [left_by(2, 3, "nan"), left_by(0, 2, "disk full")], 2, 0),
    (1, LOST, [left_by(2, 3, "nan", after=0.9)], 3, 0.9),
    (1, LOST, [left_by(2, 3, "nan", after=1.5)], None, 1),
    (1, LOST, [(None, lost_before)], 1, 0),
    (1, LOST, [(None, lost_before), left_by(2, 3, "nan", after=0.5)], 1, 0),
    (1, LOST, [(None, lost_before), left_by(2, 3, "nan")], 3, 0),
    (1, ranks._ConnectionLost(), [left_by(2, 3, "nan")], 3, 0),
]


@pytest.mark.parametrize("rank, error, left, status, waited", ENDS)
def test_one_rank_reports_an_error_and_all_end_with_its_status(rank, error, left, status, waited, monkeypatch):
    store = dist.HashStore()
    clock = Clock((after, lambda leave=leave: leave(store)) for after, leave in left if after is not None)
    monkeypatch.setattr(ranks, "time", clock)
    for after, leave in left:
        if after is None:
            leave(store)
    one = Ranks(store, rank, 3, rank, connect=lambda: store)
    assert one.ended(error) == status
    assert clock.now == pytest.approx(waited, abs=0.05)
    assert one._beats.shielded  # this process reports an error, or ends at once
    is_lost = isinstance(error, RuntimeError)
    assert store.add(f"errors/{rank}", 0) == (not is_lost)


def test_a_rank_whose_store_has_ended_reports_its_error():
    class Closed:
        def add(self, key, number):
            raise RuntimeError("connection closed")

        set = add

    for error in (WRONG, LOST):
        assert Ranks(Closed(), 1, 2, 1).ended(error) is None


@pytest.mark.parametrize("fails", [(), ("barrier",), ("group",), ("barrier", "group")])
def test_ranks_part_when_all_have_worked_and_stopped_their_beats(fails, monkeypatch):
    """A launcher kills the others once one has failed; rank 0 may keep the store, so it ends when nobody beats."""
    order = []

    def step(name):
        def call(*_, **__):
            order.append(name)
            if name in fails:
                raise RuntimeError(name)

        return call

    one = Ranks(dist.HashStore(), 1, 2, 1, connect=dist.HashStore)
    one.status = 4
    monkeypatch.setattr(one, "summed", step("sum"))
    monkeypatch.setattr(one._beats, "end", step("beats"))
    monkeypatch.setattr(dist, "monitored_barrier", step("barrier"))
    monkeypatch.setattr(ranks, "_end_group", step("group"))
    one.leave()
    assert order == ["sum", "beats", "barrier", "group"]
    assert one._beats.status == 4


def test_rank_0_works_alone_and_is_shielded_each_time(monkeypatch):
    store = dist.HashStore()
    first, second = (Ranks(store, rank, 2, rank, connect=lambda: store) for rank in (0, 1))
    entered = []

    def work():
        with first.first_alone():
            entered.append(("first", first._beats.shielded))

    for turn in range(3):
        entered.clear()
        clock = Clock({5.0: work})
        monkeypatch.setattr(ranks, "time", clock)
        with second.first_alone():
            entered.append(("second", second._beats.shielded))
        assert entered == [("first", True), ("second", False)], turn
        assert clock.now >= 5.0 and not first._beats.shielded


def test_a_value_and_its_tensors_are_joined_again():
    shared = torch.arange(6.0, requires_grad=True)
    value = {
        "a": [shared, 1, SimpleNamespace(of=torch.ones(2, 3).t())],
        "b": (torch.zeros(0), "text", shared),
    }
    data, tensors = _TensorsApart.split(value)
    assert not any(tensor.requires_grad or not tensor.is_contiguous() for tensor in tensors)
    again = _TensorsApart.joined(data, tensors)
    assert torch.equal(again["a"][0], shared) and torch.equal(again["b"][2], shared)
    assert torch.equal(again["a"][2].of, torch.ones(3, 2))
    assert again["a"][1] == 1 and again["b"][0].numel() == 0 and again["b"][1] == "text"
