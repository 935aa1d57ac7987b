"""Packs from a stream: every example once, within the limits, the same after a restart, near the bound."""

import functools
import itertools
import json
import pickle
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pack_data import LengthHistogram, optimal
from pack_data.solver import programmes
from pack_data.solver.free_slots import longest_first
from pack_data.solver.search import Limits, pack_quickly
from pack_data.stream import PackStream, pack_stream
from pack_data.stream.baselines import open_rows, windows
from pack_data.stream.command import _in_random_order, main
from pack_data.stream.prices import Lengths, solve
from tests.refusals import refusal_of, refused
from tests.tiers import sample, slow


def drawn(n, seed=0, name="wikipedia_512"):
    histogram = LengthHistogram.published(name)
    weights = histogram.counts / histogram.sequences
    return np.random.default_rng(seed).choice(len(weights), n, p=weights).tolist()


def long_tailed(n, S, seed=0):
    return np.clip(np.rint(np.random.default_rng(seed).lognormal(np.log(S / 14), 1.1, n)), 1, S).astype(int).tolist()


def check_packs(packs, lengths, S, depth, examples=None):
    """Each example once, with its length; no pack over its slots or its depth."""
    examples = list(range(len(lengths))) if examples is None else examples
    assert sorted(example for pack in packs for example in pack.examples) == examples
    for pack in packs:
        assert pack.lengths == [lengths[example] for example in pack.examples]
        assert 1 <= sum(pack.lengths) <= S
        assert depth is None or len(pack.lengths) <= depth


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), max_size=120),
    S=st.integers(40, 64),
    depth=st.one_of(st.none(), st.integers(1, 6)),
    buffer=st.integers(1, 40),
    data=st.data(),
)
def test_every_example_once_in_good_time(lengths, S, depth, buffer, data):
    wait = data.draw(st.one_of(st.none(), st.integers(buffer, 3 * buffer)))
    tokens = data.draw(st.one_of(st.none(), st.integers(S, 4 * S)))
    stream = PackStream(
        S, max_sequences_per_pack=depth, buffer_sequences=buffer, buffer_tokens=tokens, longest_wait=wait
    )
    packs = []
    arrived = {}  # example -> packs closed when it came
    left = {}  # example -> packs closed before its own

    def note(more):
        for pack in more:
            left.update((example, len(packs)) for example in pack.examples)
            packs.append(pack)

    for number, length in enumerate(lengths):
        before = len(packs)
        more = list(stream.ready()) if stream.put(number, length) else []
        note(more)
        # What a full buffer of tokens closes is closed before the sequence comes in.
        arrived[number] = before if number in left or not more else len(packs)
        waiting = [other for other in range(number + 1) if other not in left]
        assert len(waiting) < buffer or buffer == 1
        assert tokens is None or sum(lengths[other] for other in waiting) <= tokens
    stream.finish()
    note(stream.ready())
    check_packs(packs, lengths, S, depth)
    assert stream.waits.packs == len(packs) and stream.waits.sequences == len(lengths) == stream.taken
    assert stream.waits.tokens == sum(lengths)
    assert stream.waits.longest <= stream.longest_wait
    assert max((left[number] - arrived[number] for number in left), default=0) <= stream.longest_wait


CASES = [
    pytest.param(drawn(4000), 512, 3, 128, 0.03, id="Wikipedia at depth 3"),
    pytest.param(drawn(4000), 512, None, 128, 0.005, id="Wikipedia without a limit"),
    pytest.param(long_tailed(4000, 1024), 1024, 8, 256, 0.06, id="long tail at depth 8"),
    pytest.param(long_tailed(4000, 4096), 4096, None, 256, 0.01, id="long tail without a limit"),
    pytest.param(drawn(2000) + drawn(2000, 1, "squad_1_1_384"), 512, 4, 128, 0.03, id="a stream that changes"),
]


@pytest.mark.parametrize("lengths, S, depth, buffer, most", CASES)
def test_the_gap_to_the_certified_bound_is_small_and_far_below_that_of_others(lengths, S, depth, buffer, most):
    packs = list(PackStream(S, max_sequences_per_pack=depth, buffer_sequences=buffer).packs(enumerate(lengths)))
    check_packs(packs, lengths, S, depth)
    histogram = LengthHistogram.from_lengths(lengths, S)
    bound = optimal.pack(histogram, max_sequences_per_pack=depth).lower_bound
    assert bound <= len(packs) <= (1 + most) * bound + 1
    assert len(packs) <= windows(lengths, S, depth, buffer) and len(packs) < open_rows(lengths, S, depth, buffer)


def some_lengths(kind, n, S):
    random = np.random.default_rng(1)
    if kind == "long tail":
        return np.array(long_tailed(n, S))
    if kind == "uniform":
        return random.integers(1, S + 1, n)
    if kind == "Wikipedia":
        return np.array(drawn(n)) * S // 512
    if kind == "four lengths":
        return np.repeat(np.array([400, 112, 300, 212]) * S // 1024, n // 4)
    first = random.integers(int(0.38 * S), int(0.49 * S), n // 3)  # triplets that fill a row
    second = (0.26 * S + random.random(n // 3) * (S - first - 0.52 * S) / 2).astype(int)
    return np.concatenate([first, second, S - first - second])


def in_order(order, lengths):
    random, rising = np.random.default_rng(2), np.sort(lengths)
    if order == "random":
        return random.permutation(lengths)
    if order == "rising":
        return rising
    if order == "falling":
        return rising[::-1]
    if order == "short, long":
        short, long = np.array_split(rising, 2)
        return np.stack([random.permutation(short), random.permutation(long)], 1).ravel()
    if order == "bursts":
        pieces = np.array_split(np.concatenate([random.permutation(part) for part in np.array_split(rising, 6)]), 48)
        return np.concatenate([pieces[number] for number in random.permutation(len(pieces))])
    return rising[np.argsort(np.arange(len(rising)) / len(rising) + random.normal(0, 0.3, len(rising)))]  # drift


def best_fit(lengths, S, depth, buffer):
    """Packs of online best fit that holds as many sequences and closes the fullest row if it must."""
    rows, closed, waiting = [], 0, 0
    for length in lengths:
        open_rows = [row for row in rows if sum(row) + length <= S and len(row) < (depth or S)]
        row = max(open_rows, key=sum, default=None)
        if row is None:
            row = []
            rows.append(row)
        row.append(length)
        waiting += 1
        while waiting >= buffer:
            full = max(rows, key=lambda row: (sum(row) == S or len(row) == depth, sum(row)))
            rows.remove(full)
            waiting -= len(full)
            closed += 1
    return closed + len(rows)


ORDERS = ["random", "rising", "falling", "short, long", "bursts", "drift"]
LENGTHS = ["long tail", "uniform", "Wikipedia", "triplets", "four lengths"]


@pytest.mark.parametrize("depth", [3, 6])
@pytest.mark.parametrize("order", ORDERS)
def test_no_order_needs_many_more_packs_than_best_fit_at_a_limited_depth(order, depth):
    S, buffer = 256, 64
    lengths = in_order(order, some_lengths("long tail", 3000, S)).tolist()
    stream = PackStream(S, max_sequences_per_pack=depth, buffer_sequences=buffer, longest_wait=2**30)
    packs = list(stream.packs(enumerate(lengths)))
    check_packs(packs, lengths, S, depth)
    assert len(packs) <= 1.01 * best_fit(lengths, S, depth, buffer) + 3


@pytest.mark.parametrize("kind, order", sample(itertools.product(LENGTHS, ORDERS), 10))
def test_no_order_needs_more_packs_than_online_best_fit(kind, order):
    S, buffer = 256, 64
    lengths = in_order(order, some_lengths(kind, 3000, S)).tolist()
    # Online best fit lets a sequence wait for ever; so does this stream.
    packs = list(PackStream(S, buffer_sequences=buffer, longest_wait=2**30).packs(enumerate(lengths)))
    check_packs(packs, lengths, S, None)
    assert len(packs) <= best_fit(lengths, S, None, buffer) + 3 + 0.001 * sum(lengths) / S


def stopped_anywhere(new, lengths, every):
    """The packs of a stream, and its states wherever it was stopped; from each it goes on to the same packs."""
    whole, states = list(new().packs(enumerate(lengths))), []
    for stop in range(0, len(whole) + 1, every):  # also between packs that were closed together
        first, second = new(), new()
        begun = list(itertools.islice(first.packs(enumerate(lengths)), stop))
        states.append(json.loads(json.dumps(first.state_dict())))
        second.load_state_dict(states[-1])
        assert second.state_dict() == states[-1]
        second = pickle.loads(pickle.dumps(second))  # as a worker process of a DataLoader gets it
        assert begun + list(second.packs(itertools.islice(enumerate(lengths), second.taken, None))) == whole
        assert second.waits.longest <= second.longest_wait
    return whole, states


def narrow(n, S, seed=0):
    return np.clip(np.rint(np.random.default_rng(seed).normal(S / 3.4, S / 12, n)), 1, S).astype(int).tolist()


@pytest.mark.parametrize(
    "lengths, S, depth, ranks, priced",
    [
        (np.minimum(drawn(300), 512).tolist(), 512, 3, 1, True),
        (drawn(600), 512, None, 2, False),
        (np.minimum(drawn(900), 300).tolist(), 300, 4, 3, False),
        slow((narrow(900, 300), 300, None, 1, True)),
        slow((narrow(500, 300) + long_tailed(500, 300), 300, 6, 1, True)),
        (in_order("falling", some_lengths("uniform", 900, 100)).tolist(), 100, None, 1, True),
        (in_order("bursts", some_lengths("uniform", 900, 100)).tolist(), 100, None, 1, False),
    ],
)
def test_a_state_taken_anywhere_gives_the_same_packs(lengths, S, depth, ranks, priced):
    options = dict(max_sequences_per_pack=depth, buffer_sequences=16, rank=ranks - 1, ranks=ranks, longest_wait=20)
    whole, states = stopped_anywhere(lambda: PackStream(S, **options), lengths, 9)
    assert len(whole) > 30 and priced == any(state["lengths"]["prices"] for state in states)


def test_a_state_that_is_kept_does_not_change_with_the_stream():
    stream = PackStream(100, buffer_sequences=16)
    kept = []
    for number, length in enumerate(narrow(400, 100)):
        stream.put(number, length)
        state = stream.state_dict()
        kept.append((state, json.dumps(state)))
    assert all(json.dumps(state) == text for state, text in kept) and kept[-1][0]["lengths"]["prices"]


@pytest.mark.parametrize("S", [1000, 100_000])
@pytest.mark.parametrize("order", ORDERS)
def test_an_order_is_noticed_if_a_window_of_it_is_not_like_the_rest(order, S):
    lengths = Lengths(S, None, 256)
    for length in in_order(order, np.array(long_tailed(5000, S))).tolist():
        lengths.add(length)
        if not lengths.in_random_order:
            break
    assert lengths.in_random_order == (order in ("random", "short, long"))


def test_prices_of_two_lengths_are_exact_and_rise_from_nothing():
    counts = np.bincount([1367, 683] * 50, minlength=4097)  # rows of 2 + 1, 1 + 3 and 0 + 5
    assert np.allclose(solve(counts, 4096, None), [[683, 1367], [0.2, 0.4]])
    lengths = Lengths(4096, None, 64)
    lengths.add_counts(counts)
    lengths.solve()
    assert lengths.worth[0] == 0 and lengths.worth[1367] == pytest.approx(0.4)
    assert (np.diff(lengths.worth[:684]) > 0).all()


def test_lengths_are_alike_whatever_their_order_if_they_vary_little():
    spread = np.random.default_rng(1).integers(1, 1001, 2000)
    for values, alike in ((spread, False), (500 + spread // 2, True)):
        lengths = Lengths(1000, None, 250)
        for length in np.sort(values).tolist():
            lengths.add(length)
        assert lengths.seen.are_alike  # the last window
        assert lengths.all.are_alike == alike == bool(np.std(values) < 0.47 * np.mean(values))


def alternating(lengths):
    rising = np.sort(lengths)
    result = np.empty_like(rising)
    result[0::2] = rising[: len(rising[0::2])]
    result[1::2] = rising[::-1][: len(rising[1::2])]
    return result


def drifting(rising):
    places = np.linspace(0, 1, len(rising)) + np.random.default_rng(3).normal(0, 0.25, len(rising))
    return rising[np.argsort(places, kind="stable")]


def normal(mean, spread, S, n=6000):
    return np.clip(np.rint(np.random.default_rng(3).normal(mean, spread, n)), 1, S).astype(int)


def log_normal(median, sigma, S, n=6000):
    return np.clip(np.rint(np.random.default_rng(3).lognormal(np.log(median), sigma, n)), 1, S).astype(int)


def image_patches(n=6000):
    """Patches of 14 pixels of images with log-uniform area, as NaViT packs them."""
    rng = np.random.default_rng(3)
    sides = np.sqrt(np.exp(rng.uniform(np.log(96**2), np.log(448**2), n)))
    aspect = rng.lognormal(0, 0.35, n) ** 0.5
    return np.clip(np.ceil(sides * aspect / 14) * np.ceil(sides / aspect / 14), 1, 1024).astype(int)


FAMILIES = {  # lengths, slots, depth, packs above max(tokens / S, sequences / depth) in %
    "uniform": (np.random.default_rng(3).integers(1, 4097, 6000), 4096, None, 1.5),
    "uniform, rising": (np.sort(np.random.default_rng(3).integers(1, 4097, 6000)), 4096, None, 20),
    "chats, rising, 8": (np.sort(log_normal(425, 1.2, 8192)), 8192, 8, 25.5),
    "chats, alternating": (alternating(log_normal(425, 1.2, 8192)), 8192, None, 0.5),
    "chats, alternating, 8": (alternating(log_normal(425, 1.2, 8192)), 8192, 8, 15.5),
    "two lengths, drifting": (drifting(np.repeat([683, 1367], 3000)), 4096, 4, 32),
    "code, 8": (log_normal(800, 1.5, 8192), 8192, 8, 0.5),
    "image patches": (image_patches(), 1024, 4, 0.5),
    "third": (log_normal(4096 / 3.5, 0.25, 4096), 4096, None, 0.2),
    "third, short and long": (in_order("short, long", log_normal(4096 / 3.5, 0.25, 4096)), 4096, None, 0.2),
    "summaries": (log_normal(840, 0.4, 2048), 2048, 4, 0.75),
    "near a half": (normal(1050, 120, 2048), 2048, None, 15.2),
    "audio": (normal(350, 30, 1500), 1500, None, 4.7),
}


def test_a_buffer_of_4096_needs_no_more_packs_than_one_of_1024():
    lengths = drawn(16_000)
    packs = []
    for buffer in (1024, 4096):
        stream = PackStream(512, max_sequences_per_pack=4, buffer_sequences=buffer)
        packs.append(len(list(stream.packs(enumerate(lengths)))))
    assert packs[1] <= packs[0] + 2


def test_long_sequences_do_not_pile_up_near_the_depth():
    lengths = np.random.default_rng(2).lognormal(np.log(424.6), 1.2, 6000)  # rows hold 9.7 on average
    lengths = np.clip(np.rint(lengths), 1, 8192).astype(int).tolist()
    packs = list(PackStream(8192, max_sequences_per_pack=10, buffer_sequences=256).packs(enumerate(lengths)))
    assert len(packs) <= 1.06 * sum(lengths) / 8192


@pytest.mark.parametrize("name", sample(FAMILIES, 5))
def test_families_stay_near_their_bound(name):
    lengths, S, depth, most = FAMILIES[name]
    lengths = lengths.tolist()
    packs = list(PackStream(S, max_sequences_per_pack=depth, buffer_sequences=512).packs(enumerate(lengths)))
    check_packs(packs, lengths, S, depth)
    bound = max(sum(lengths) / S, len(lengths) / (depth or S))
    assert 100 * (len(packs) / bound - 1) <= most


@pytest.mark.parametrize("name", ["third", "code, 8", "near a half"])
def test_the_end_of_a_stream_solves_few_programmes_and_is_no_worse_than_decreasing_fit(name, monkeypatch):
    lengths, S, depth, _ = FAMILIES[name]
    histogram = LengthHistogram.from_lengths(lengths[:700], S)
    allowed = pack_stream._FINISH_SECONDS / pack_quickly(histogram, Limits.of(histogram, depth, None)).programme_seconds
    solved = []
    real = programmes._Progress._check
    monkeypatch.setattr(programmes._Progress, "_check", lambda bar: (solved.append(1), real(bar)))
    packs = []
    for most in (pack_stream._FINISH_SECONDS, 3 * pack_stream._FINISH_SECONDS / allowed):  # all that are allowed, 3
        monkeypatch.setattr(pack_stream, "_FINISH_SECONDS", most)
        stream = PackStream(S, max_sequences_per_pack=depth, buffer_sequences=701)
        packs.append(list(stream.packs(enumerate(lengths[:700].tolist()))))
        check_packs(packs[-1], lengths, S, depth, list(range(700)))
        assert len(packs[-1]) <= sum(count for _, count in longest_first(histogram, depth))
        assert len(solved) <= (allowed + 1 if len(packs) == 1 else 4)
        solved.clear()


def test_a_known_histogram_is_used_from_the_first_pack_on():
    histogram = LengthHistogram.published("wikipedia_512")
    lengths = drawn(1000)

    def packs(**options):
        stream = PackStream(512, max_sequences_per_pack=3, buffer_sequences=64, **options)
        return list(stream.packs(enumerate(lengths)))

    given, learnt = packs(histogram=histogram), packs()
    check_packs(given, lengths, 512, 3)
    assert given != learnt
    bound = optimal.pack(LengthHistogram.from_lengths(lengths, 512), max_sequences_per_pack=3).lower_bound
    assert len(given) <= 1.06 * bound


@pytest.mark.parametrize("ranks", [2, 3])
def test_each_rank_packs_its_share_of_the_sequences(ranks):
    lengths = drawn(600)
    for rank in range(ranks):
        stream = PackStream(512, max_sequences_per_pack=4, buffer_sequences=64, rank=rank, ranks=ranks)
        check_packs(list(stream.packs(enumerate(lengths))), lengths, 512, 4, list(range(rank, len(lengths), ranks)))


def test_a_sequence_that_fits_badly_does_not_wait_longer_than_stated():
    # 300 fits with nothing here, and one pack after another is full without it.
    lengths = [300] + [256] * 2000
    stream = PackStream(512, buffer_sequences=16, longest_wait=20)
    packs = list(stream.packs(enumerate(lengths)))
    check_packs(packs, lengths, 512, None)
    position = next(number for number, pack in enumerate(packs) if 0 in pack.examples)
    assert position <= 20 and stream.waits.longest <= 20


def test_a_source_that_stalls_gets_its_packs():
    going_on, packs = threading.Event(), []

    def source():
        yield from [("a", 4), ("b", 6), ("c", 7)]
        assert going_on.wait(60)  # until the packs of what has come are there
        yield "d", 3
        yield "e", 6

    stream = PackStream(10, flush_after=0.05)
    for pack in stream.packs(source()):
        packs.append(pack.examples)
        if len(packs) == 2:
            assert sorted(map(sorted, packs)) == [["a", "b"], ["c"]] and stream.taken == 3
            assert stream.state_dict()["waiting"] == []
            going_on.set()
    assert [sorted(examples) for examples in packs[2:]] == [["d", "e"]]


def test_a_source_that_does_not_stall_gives_the_same_packs_and_its_error():
    lengths = drawn(400)

    def packs(**options):
        return list(PackStream(512, buffer_sequences=32, **options).packs(enumerate(lengths)))

    assert packs(flush_after=60) == packs()

    def broken():
        yield "a", 3
        raise KeyError("the source broke")

    with pytest.raises(KeyError, match="the source broke"):
        list(PackStream(10, flush_after=60).packs(broken()))


def test_an_abandoned_stream_stops_its_thread():
    before, given = threading.active_count(), itertools.count()
    packs = PackStream(10, buffer_sequences=4, flush_after=60).packs((number, 5) for number in given)
    next(packs)
    packs.close()
    for _ in range(500):
        if threading.active_count() <= before:
            break
        time.sleep(0.01)
    assert threading.active_count() <= before


@pytest.mark.parametrize(
    "options, words",
    [
        ({"flush_after": 0}, "flush_after"),
        ({"flush_after": float("nan")}, "flush_after"),
        ({"flush_after": "1"}, "flush_after"),
        ({"buffer_sequences": 0}, "buffer_sequences"),
        ({"buffer_sequences": 8, "longest_wait": 7}, "longest_wait"),
        ({"buffer_tokens": 9}, "buffer_tokens"),
        ({"rank": 1}, "rank"),
        ({"max_sequences_per_pack": 0}, "max_sequences_per_pack"),
        ({"histogram": LengthHistogram(np.zeros(11, np.int64))}, "histogram"),
    ],
)
def test_invalid_options_are_refused(options, words):
    with refused(*([words] if isinstance(words, str) else words)):
        PackStream(10, **options)


@pytest.mark.parametrize("length", [0, 11, -1])
def test_invalid_lengths_are_refused(length):
    with refused("sequence 1", length):
        list(PackStream(10).packs([("a", 3), ("b", length)]))


def test_lengths_of_numpy_are_whole_numbers_and_floats_are_none():
    stream = PackStream(10)
    stream.put("a", np.int64(3))
    json.dumps(stream.state_dict())
    with refused("sequence 1", 3.0):
        stream.put("b", 3.0)


def test_a_state_of_another_stream_is_refused():
    state = PackStream(10, buffer_sequences=4).state_dict()
    with refused("buffer_sequences", 4, 5):
        PackStream(10, buffer_sequences=5).load_state_dict(state)
    with refused("source", "3f0a", "None"):
        PackStream(10, buffer_sequences=4, source="3f0a").load_state_dict(state)
    with refused("state of the stream", "format", "pack_data stream 4"):
        PackStream(10, buffer_sequences=4).load_state_dict({**state, "format": "pack_data stream 4"})
    for broken in ({}, {**state, "taken": -1}, {**state, "waiting": [[0, 0, 11, "a"]]}, {**state, "lengths": [1.0]}):
        with refused("state of the stream"):
            PackStream(10, buffer_sequences=4).load_state_dict(broken)


@pytest.mark.parametrize(
    "name, value",
    [
        ("waiting", [3]),
        ("waiting", [["a", 0, 3, "x"]]),
        ("waiting", [[0, 0, "a", "x"]]),
        ("ready", [3]),
        ("ready", [[[], [], []]]),
        ("ready", [[["b", "c"], [6, 6]]]),
        ("ready", [[["b"], [6, 2]]]),
        ("ready", [[["b"], ["6"]]]),
        ("ready", [[["b"], [6]]]),
        ("waiting", [[0, 0, 3, "x"], [0, 0, 3, "y"]]),
        ("taken", 2),
        ("waits", {"packs": 1}),
        ("rounding", -1),
        ("lengths", {"arrived": [11]}),
        ("lengths", {"arrived": [3] * 64}),
        ("lengths", {"seen": [[11], [1]]}),
        ("lengths", {"seen": [[3], [1, 2]]}),
        ("lengths", {"calm": 9}),
        ("lengths", {"prices": [[3, 2], [0.5, 0.5]]}),
    ],
)
def test_a_damaged_state_is_refused_and_changes_nothing(name, value):
    stream = PackStream(10, buffer_sequences=4)
    stream.put("a", 7)
    before = stream.state_dict()
    with refused("state of the stream", f"{name}|digest"):
        stream.load_state_dict({**before, name: {**before[name], **value} if isinstance(value, dict) else value})
    assert stream.state_dict() == before


def places_of(value, path=()):
    """Yield the path of every value of a state but those of the examples."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        place = (path[:1], len(path), key)
        if place not in ((("waiting",), 2, 3), (("ready",), 2, 0)):
            yield from places_of(inner, (*path, key))


@given(data=st.data())
def test_a_state_with_one_other_value_is_refused_or_gives_the_same_packs(data):
    """Rows of 120 tokens were handed out for 64 slots; a number twice ended in a KeyError."""
    lengths = drawn(60)
    options = dict(max_sequences_per_pack=3, buffer_sequences=8)

    def new():
        return PackStream(512, **options)

    first, rest = new(), list(enumerate(lengths))[40:]
    for number, length in enumerate(lengths[:40]):
        first.put(number, length)
    state = json.loads(json.dumps(first.state_dict()))
    expected = list(first.packs(rest))
    path = data.draw(st.sampled_from(sorted(set(places_of(state)) - {()}, key=str)), "path")
    parent = functools.reduce(lambda value, key: value[key], path[:-1], state)
    others = [None, True, -1, 0, 10**30, 1.5, "a", [], {}, [1, 1], path and parent[path[-1]]]
    value = data.draw(st.sampled_from(others), "value")
    if data.draw(st.booleans(), "left out"):
        del parent[path[-1]]
    else:
        parent[path[-1]] = value
    second = new()
    try:
        second.load_state_dict(state)
    except ValueError as error:
        assert "\n" not in str(error)
    else:
        assert list(second.packs(rest)) == expected


def test_the_command_prints_gap_waiting_and_speed(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "gap.png"
    options = ["--synthetic", "sample:wikipedia_512,n=500", "--max-sequences-per-pack", "3", "--buffer", "32,64"]
    assert main([*options, "--plot", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert printed.count(" stream ") == 3 and "longest wait" in printed and picture.stat().st_size > 1000
    rows = [line.split(",n=500")[1].split() for line in printed.splitlines() if ",n=500" in line]
    assert main([*options, "--json"]) == 0
    made = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [each["way"] for each in made] == ["stream", "stream", "windows", "open rows", "open rows"]
    assert all(each["packs"] >= each["bound"] and each["sequences"] == 500 for each in made)
    above = [[str(each["packs"]), str(each["packs"] - each["bound"])] for each in made]
    assert [row[-7:-5] for row in rows] == above


@pytest.mark.parametrize("options", [["--histogram", "squad_1_1_384"], ["--synthetic", "uniform:max=9,n=9,seed=0"]])
def test_the_grid_refuses_other_lengths(options, capsys):
    refusal_of(main, ["--grid", *options], capsys, "--grid", "--histogram", "--synthetic")


def test_the_grid_streams_lengths_of_its_own(capsys):
    assert main(["--grid", "--sequences", "60", "--max-sequences-per-pack", "3", "--buffer", "8", "--json"]) == 0
    results = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    streams = ["Wikipedia 512", "instructions 4,096", "instructions 8,192", "Wikipedia, then SQuAD"]
    assert [result["stream"] for result in results] == [name for name in streams for _ in range(3)]
    assert all(result["sequences"] == 60 and result["depth"] == 3 for result in results)


def test_windows_and_first_fit_by_hand():
    # Windows of three: (6, 5, 4) -> 6 + 4 | 5; (5, 5) -> 5 + 5.
    assert windows([6, 5, 4, 5, 5], 10, None, 3) == 3
    # Two open rows: 6 | 5; the 6 is closed for the 7; 5 + 4 | 7.  It was a limit on sequences.
    assert open_rows([6, 5, 7, 4], 10, None, 2) == 3
    # One open row: 6 is closed for the 5, 5 + 5 for the 5.
    assert open_rows([6, 5, 5, 5], 10, None, 1) == 3
    assert open_rows([1, 1, 1, 1, 1], 10, 2, 1) == 3
    histogram = LengthHistogram.from_lengths([3, 3, 5], 8)
    assert sorted(_in_random_order(histogram, 0)) == [3, 3, 5]
