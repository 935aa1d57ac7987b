"""Packs from a stream: every example once, within the limits, the same after a restart, near the bound."""

import copy
import itertools
import json
import pickle
import threading
import time
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pack_data import LengthHistogram, optimal
from pack_data.stream import PackStream
from pack_data.stream.baselines import OpenRows, open_rows, windows
from pack_data.stream.command import _in_random_order, main
from pack_data.stream.prices import on_grid, prices, scarce_seats, solve
from tests.refusals import refusal_of, refused


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


def test_lengths_below_the_shortest_seen_cost_less_than_it():
    counts = on_grid(np.bincount([100] * 30 + [300] * 10, minlength=513))
    made = prices(counts, solve(counts, 512, None), 512, None, 64)
    for by_length in (made.worth, made.price):
        assert by_length[0] == 0 and (np.diff(by_length[:101]) > 0).all()


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
    """Packs of online best fit that holds as many sequences."""
    rows = OpenRows(S, depth)
    for length in lengths:
        rows.pass_by(length, buffer, 2**62)
    return rows.closed + len(rows.rows())


ORDERS = ["random", "rising", "falling", "short, long", "bursts", "drift"]
LENGTHS = ["long tail", "uniform", "Wikipedia", "triplets", "four lengths"]


def test_packs_behind_are_counted_by_tokens_and_by_seats():
    """Here 12 sequences of 25 tokens, one of 80 and one of 60 wait, 440 tokens; best fit closed a row and holds two."""
    needed = {}
    for depth in (None, 2, 100):
        stream = PackStream(100, max_sequences_per_pack=depth, buffer_sequences=99)
        for number, length in enumerate([25] * 12 + [80, 60]):
            stream.put(number, length)
        stream._note_arrived()
        stream._best_fit = OpenRows(100, depth, [[25, 25], [25, 25]])
        stream._best_fit.closed = 1
        needed[depth] = stream._packs_behind()
    # By tokens 440 here and 100 there: 3.4. By two seats 14 and 4: 5. Two are longer than half a row: max(4.4, 2) - 1.
    assert needed[None] == pytest.approx(3.4 - 1) and needed[2] == pytest.approx(3.4 - 1)
    assert needed[100] == pytest.approx(max(0.14 - 0.04, 2 - 0.04) - 1)  # seats are no limit, long sequences are


@pytest.mark.parametrize("depth", [3, 6])
@pytest.mark.parametrize("order", ORDERS)
def test_no_order_needs_many_more_packs_than_best_fit_at_a_limited_depth(order, depth):
    S, buffer = 256, 64
    lengths = in_order(order, some_lengths("long tail", 3000, S)).tolist()
    stream = PackStream(S, max_sequences_per_pack=depth, buffer_sequences=buffer, longest_wait=2**30)
    packs = list(stream.packs(enumerate(lengths)))
    check_packs(packs, lengths, S, depth)
    assert len(packs) <= 1.01 * best_fit(lengths, S, depth, buffer) + 3


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", LENGTHS)
def test_no_order_needs_more_packs_than_online_best_fit(order, kind):
    S, buffer = 256, 64
    lengths = in_order(order, some_lengths(kind, 3000, S)).tolist()
    # Online best fit lets a sequence wait for ever; so does this stream.
    packs = list(PackStream(S, buffer_sequences=buffer, longest_wait=2**30).packs(enumerate(lengths)))
    check_packs(packs, lengths, S, None)
    assert len(packs) <= best_fit(lengths, S, None, buffer) + 3 + 0.001 * sum(lengths) / S


def test_best_fit_by_hand():
    rows = OpenRows(10, 3)
    for length in (6, 5, 4, 3):  # 6 + 4 | 5 + 3
        rows.add(length)
    assert rows.rows() == [[6, 4], [5, 3]] and rows.full == [[6, 4]] and rows.long == 1
    rows.pass_by(2, 5, 15)  # the full row is closed first: too many tokens
    assert rows.closed == 1 and rows.rows() == [[5, 3, 2]]
    assert (rows.sequences, rows.tokens, rows.long) == (3, 10, 0)
    rows = OpenRows(10, None, [[3], [2], [5]])
    assert rows.close(2) == [2] and rows.close() == [5] and rows.close() == [3] and rows.closed == 3


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


@pytest.mark.parametrize("order", ["falling", "bursts"])
def test_a_state_taken_while_the_stream_packs_by_best_fit_gives_the_same_packs(order):
    lengths = in_order(order, some_lengths("uniform", 900, 100)).tolist()
    states = stopped_anywhere(lambda: PackStream(100, buffer_sequences=16, longest_wait=20), lengths, 23)[1]
    assert sum(state["rows"] is not None for state in states) > 3


@pytest.mark.parametrize("S, depth, ranks", [(512, 3, 1), (512, None, 2), (300, 4, 3)])
def test_a_state_taken_anywhere_gives_the_same_packs(S, depth, ranks):
    options = dict(max_sequences_per_pack=depth, buffer_sequences=16, rank=ranks - 1, ranks=ranks)
    whole, _ = stopped_anywhere(lambda: PackStream(S, **options), np.minimum(drawn(300 * ranks), S).tolist(), 9)
    assert len(whole) > 30


def test_a_state_that_is_kept_does_not_change_with_the_stream():
    lengths = in_order("falling", some_lengths("uniform", 400, 100)).tolist()
    stream = PackStream(100, buffer_sequences=16, longest_wait=20)
    kept = []
    for number, length in enumerate(lengths):
        stream.put(number, length)
        state = stream.state_dict()
        kept.append((state, json.dumps(state)))
    assert any(state["rows"] for state, _ in kept)
    for state, text in kept:
        assert json.dumps(state) == text


def piling_up(n, S=300):
    """Tokens are scarce, and so are the 16 seats of a pack as soon as many short sequences wait."""
    return np.clip(np.rint(np.random.default_rng(0).lognormal(np.log(S / 21), 1.2, n)), 1, S).astype(int).tolist()


def test_a_state_gives_the_same_packs_while_seats_grow_dear_and_cheap(monkeypatch):
    from pack_data.stream import pack_stream

    seen, plain = [], pack_stream.scarce_seats
    monkeypatch.setattr(pack_stream, "scarce_seats", lambda *given: seen.append(plain(*given)) or seen[-1])
    lengths = piling_up(900)
    new = partial(PackStream, 300, max_sequences_per_pack=16, buffer_sequences=64)
    check_packs(list(new().packs(enumerate(lengths))), lengths, 300, 16)
    assert len(set(seen)) > 2 and seen != sorted(seen)
    stopped_anywhere(new, lengths, 25)


def test_prices_by_the_seat_only_where_seats_are_scarce():
    S, depth = 300, 16
    counts = on_grid(np.bincount(piling_up(3000), minlength=S + 1))
    worth = solve(counts, S, depth)
    levels = [prices(counts, worth, S, depth, 64, scarce) for scarce in range(5)]
    for before, after in zip(levels, levels[1:]):
        assert after.price[1] > before.price[1]  # a short sequence takes a seat as a long one does
        assert after.price[-1] < before.price[-1] + 1e-9
    for level in levels:
        assert level.table(depth)[S] <= 1 + 1e-3  # no pack of 16 seats and 300 slots is worth more than a pack
    assert scarce_seats(8, S, S, depth) == 0  # half of the seats of one pack
    steps = [scarce_seats(sequences, 100 * S, S, depth) for sequences in range(1200, 1800, 20)]
    assert steps == sorted(steps) and set(steps) == set(range(5))
    assert scarce_seats(1000, S, S, None) == 0 == scarce_seats(1000, S, S, 1000)


def test_a_state_taken_while_a_programme_is_solved_gives_the_same_packs(monkeypatch):
    from pack_data.stream import pack_stream

    monkeypatch.setattr(pack_stream, "_PERIOD_SEQUENCES", 128)
    monkeypatch.setattr(pack_stream, "_PERIOD_BUFFERS", 1)
    monkeypatch.setattr(pack_stream, "_SEQUENCES_WHILE_SOLVING", 96)
    new = partial(PackStream, 512, max_sequences_per_pack=3, buffer_sequences=32)
    states = stopped_anywhere(new, drawn(500), 60)[1]
    assert any(state["solving"] is not None for state in states)
    stream = new()
    while stream._solving is None:
        stream.put(0, 300)
    assert copy.deepcopy(stream).state_dict() == stream.state_dict()


def test_the_programme_is_solved_again_at_fixed_numbers_and_taken_up_later(monkeypatch):
    from pack_data.stream import pack_stream

    monkeypatch.setattr(pack_stream, "_PERIOD_SEQUENCES", 256)
    monkeypatch.setattr(pack_stream, "_PERIOD_BUFFERS", 1)
    monkeypatch.setattr(pack_stream, "_SEQUENCES_WHILE_SOLVING", 64)
    stream = PackStream(512, max_sequences_per_pack=3, buffer_sequences=64)
    seen = []
    for number, length in enumerate(drawn(1400)):
        if stream.put(number, length):
            list(stream.ready())
        state = stream.state_dict()
        due = state["solving"] and state["solving"][1]
        if not seen or seen[-1] != due:
            seen.append(due)
    dues = [due for due in seen if due]
    assert len(dues) >= 4 and dues == sorted(set(dues)) and None in seen[1:]


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
        ({"share": "packs", "ranks": 2}, ("share", "'packs'", "share='sequences'")),
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
    for broken in ({}, {**state, "taken": -1}, {**state, "waiting": [[0, 0, 11, "a"]]}, {**state, "learnt": [1.0]}):
        with refused("state of the stream"):
            PackStream(10, buffer_sequences=4).load_state_dict(broken)


@pytest.mark.parametrize(
    "name, value",
    [
        ("waiting", [3]),
        ("waiting", [["a", 0, 3, "x"]]),
        ("waiting", [[0, 0, "a", "x"]]),
        ("resting", [[11, 3]]),
        ("resting", [["a", 3]]),
        ("ready", [3]),
        ("ready", [[[], [], []]]),
        ("prices", 5),
        ("prices", [[0.0] * 11, [0.0] * 11]),
        ("solving", [[0.0] * 11, 9]),
        ("solving", [[1.0] * 11, "a"]),
        ("turned", [1]),
        ("beside", [0, [[6, 5]]]),
        ("beside", ["a", []]),
        ("rows", [[8]]),
        ("rows", [[11]]),
    ],
)
def test_a_damaged_state_is_refused_and_changes_nothing(name, value):
    stream = PackStream(10, buffer_sequences=4)
    stream.put("a", 7)
    before = stream.state_dict()
    with refused("state of the stream", name):
        stream.load_state_dict({**before, name: value})
    assert stream.state_dict() == before


def test_the_command_prints_gap_waiting_and_speed(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "gap.png"
    options = ["--synthetic", "sample:wikipedia_512,n=500", "--max-sequences-per-pack", "3", "--buffer", "32,64"]
    assert main([*options, "--plot", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("by price") == 2 and "longest wait" in printed and picture.stat().st_size > 1000
    assert main([*options, "--json"]) == 0
    made = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [each["way"] for each in made] == ["by price", "by price", "windows", "open rows", "open rows"]
    assert all(each["packs"] >= each["bound"] and each["sequences"] == 500 for each in made)


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
    # Open rows for three sequences: 6 | 5 | 4 beside the 6, which is closed for the next 5; 5 + 5 | 5.
    assert open_rows([6, 5, 4, 5, 5], 10, None, 3) == 3
    assert open_rows([1, 1, 1, 1], 10, 2, 4) == 2
    histogram = LengthHistogram.from_lengths([3, 3, 5], 8)
    assert sorted(_in_random_order(histogram, 0)) == [3, 3, 5]
