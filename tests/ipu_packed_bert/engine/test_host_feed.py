"""Micro-batches on the device: the right ones, the order of streams, and no wait for the device within an update."""

import pytest
import torch

from ipu_packed_bert.engine.host.feed import _CudaFeed, cut, feed_for
from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.settings.schema import BatchConfig
from tests.fakes.cuda import Streams
from tests.pretraining import host_engine
from tests.tiny_runs import TINY
from tests.update_batches import make_batches

CPU = torch.device("cpu")


def same(found, expected):
    """Return whether micro-batches have the same fields."""
    return len(found) == len(expected) and all(all(map(torch.equal, *pair)) for pair in zip(found, expected))


FIELDS = [
    torch.arange(14, dtype=torch.int32).reshape(7, 2),
    torch.linspace(0.0, 1.0, 7),
]


def test_an_update_is_cut_into_all_its_rows():
    pieces = list(cut(FIELDS, 3))
    assert [len(fields[0]) for fields in pieces] == [3, 3, 1]
    assert torch.equal(torch.cat([fields[1] for fields in pieces]), FIELDS[1])
    fed = feed_for(CPU)(cut(FIELDS, 2))
    assert same(list(fed), list(cut(FIELDS, 2)))


@pytest.fixture
def streams(monkeypatch):
    return Streams(monkeypatch)


def test_copies_run_ahead_on_their_own_stream_and_are_waited_for_there(streams):
    feed = _CudaFeed(CPU)  # the copies themselves are the CPU's
    actual = []
    for number, fields in enumerate(feed(cut(FIELDS, 1))):
        actual.append(fields)
        # The working stream waits for this micro-batch's copies, and each of its tensors is known to be used there.
        copied = streams.calls.index(("event", "copying", number))
        waited = ("wait", "working", number)
        assert streams.calls.count(waited) == 1
        assert copied < streams.calls.index(waited)
        assert streams.calls.count(("used", "working")) == 2 * (number + 1)
        pins = [call for call in streams.calls if call[0] == "pin"]
        assert len(pins) <= 2 * (number + 1 + _CudaFeed.AHEAD)
    feed.close()
    assert same(actual, list(cut(FIELDS, 1)))
    pins = [call for call in streams.calls if call[0] == "pin"]
    assert pins == [("pin", "copying", False)] * 14  # by the thread, on the copying stream
    # Each event comes after the copies of its own micro-batch.
    order = [call[0] for call in streams.calls if call[0] in ("pin", "event")]
    assert order == ["pin", "pin", "event"] * 7


def test_an_update_that_ends_early_leaves_nothing_moving(streams):
    feed = _CudaFeed(CPU)
    moving = feed(cut(FIELDS, 1))
    next(moving)
    moving.close()
    assert same(list(feed(cut(FIELDS, 4))), list(cut(FIELDS, 4)))
    feed.close()


def test_what_fails_in_the_thread_fails_the_update(streams, monkeypatch):
    def fails(tensor):
        raise RuntimeError("out of pinned memory")

    monkeypatch.setattr(torch.Tensor, "pin_memory", fails)
    with pytest.raises(RuntimeError, match="pinned"):
        list(_CudaFeed(CPU)(cut(FIELDS, 2)))


def test_the_engine_steps_the_same_with_a_thread_that_feeds_it(streams):
    config = Config(model=TINY, batch=BatchConfig(micro_batch=2, gradient_accumulation=4))
    (batch,) = make_batches(1, depth=3, micro_batch=2)
    results = []
    for fed in (False, True):
        engine = host_engine(config, device="cpu")
        if fed:
            engine._feed = _CudaFeed(CPU)
        results.append((engine.step(batch, 1e-2).loss, engine.evaluate(batch).loss))
        engine.close()
    assert results[0] == results[1]
    assert streams.calls
