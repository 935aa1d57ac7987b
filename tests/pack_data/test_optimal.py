"""The optimal packer: known optima of the linear programme, degenerate data sets, balance, the command."""
import json
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pack_data import optimal
from pack_data.solver import column_generation
from pack_data.balance import AttentionWork, balance_attention
from pack_data.certificate import best_pack_value
from pack_data.solver.column_generation import PackTables, relax
from pack_data.command import run_main
from pack_data.histogram import LengthHistogram
from pack_data.lengths.synthetic import synthetic_histogram
from pack_data.packing import Packing
from pack_data.proof import prove
from pack_data.solver.rounding import _round, fill, follow


@st.composite
def histograms(draw, largest_count=40):
    S = draw(st.integers(1, 40))
    lengths = draw(st.lists(st.integers(1, S), max_size=12, unique=True))
    counts = np.zeros(S + 1, np.int64)
    counts[lengths] = draw(st.lists(st.integers(1, largest_count), min_size=len(lengths), max_size=len(lengths)))
    return LengthHistogram(counts)


depths = st.sampled_from([1, 2, 3, 4, 8, None])


# ---- what is known of the linear programme -------------------------------------------------------------------------------

@pytest.mark.parametrize("name, depth, optimum", [
    # Optima of the full programme, computed with HiGHS over all maximal packs or to convergence.
    ("wikipedia_512", 2, 10_099_080.5),
    ("wikipedia_512", 3, 8_143_828.857),
    ("wikipedia_512", None, 8_135_726.922),
    ("squad_1_1_384", 2, 45_334.5),
    ("squad_1_1_384", 3, 40_194.246),
    ("squad_1_1_384", 8, 40_194.246),
])
def test_published_histograms_are_packed_at_the_optimum(name, depth, optimum):
    histogram = LengthHistogram.published(name)
    packing = optimal.pack(histogram, max_sequences_per_pack=depth)
    packing.check(histogram)
    assert packing.lp_bound == pytest.approx(optimum, abs=1e-3)
    assert prove(packing).lower_bound == int(np.ceil(optimum))
    assert packing.gap <= 2


def test_depth_one_makes_a_pack_of_every_sequence():
    packing = optimal.pack(LengthHistogram.from_lengths([3, 3, 4, 9], 9), max_sequences_per_pack=1)
    assert (packing.packs, packing.lower_bound, packing.gap) == (4, 4, 0)


@given(histograms(), depths)
def test_packs_stay_within_two_of_the_bound(histogram, depth):
    packing = optimal.pack(histogram, max_sequences_per_pack=depth)
    packing.check(histogram)
    assert 0 <= packing.gap <= 2
    assert packing.lp_bound <= packing.lower_bound + 1e-6 < packing.lp_bound + 1.001


def test_the_answer_is_always_the_same():
    histogram = synthetic_histogram("lognormal:mean=30,max=128,n=2000,seed=4")
    first, second = (optimal.pack(histogram, max_sequences_per_pack=5) for _ in range(2))
    assert (first.strategies, first.repeats, first.certificate) == (second.strategies, second.repeats, second.certificate)


@pytest.mark.parametrize("lengths, S", [([], 5), ([3] * 7, 10), ([10] * 5, 10), ([1, 2, 3, 4, 5, 6, 7], 9), ([1] * 100, 10), ([1] * 3, 1)])
@pytest.mark.parametrize("depth", [1, 2, 3, None])
def test_degenerate_sets(lengths, S, depth):
    histogram = LengthHistogram.from_lengths(np.array(lengths, int), S)
    packing = optimal.pack(histogram, max_sequences_per_pack=depth)
    packing.check(histogram)
    prove(packing)
    assert packing.gap == 0


def test_more_lengths_than_the_full_programme_takes(monkeypatch):
    # Coarse prices bound, packs follow the model of coarse strategies: everything placed, the bound proved, a small gap.
    for module in (column_generation, optimal):
        monkeypatch.setattr(module, "FULL_ROWS", 100)
    histogram = synthetic_histogram("lognormal:mean=60,max=512,n=20000,seed=1")
    packing = optimal.pack(histogram, max_sequences_per_pack=6)
    packing.check(histogram)
    prove(packing)
    assert len(histogram.lengths) > 300
    assert packing.gap <= 0.005 * packing.lower_bound


def test_packs_of_thousands_of_sequences():
    histogram = LengthHistogram.from_lengths([1] * 5000 + [2] * 700 + [2000] * 10, 4096)  # 26400 tokens: 6.4 packs
    packing = optimal.pack(histogram, max_sequences_per_pack=None)
    packing.check(histogram)
    prove(packing)
    assert (packing.packs, packing.gap) == (7, 0) and packing.largest_depth > 1000


def test_long_packs_of_few_sequences():
    # S = 8192 and a depth that binds for the short ones: the bound comes out of coarse prices and is proved at full length.
    histogram = synthetic_histogram("lognormal:mean=1500,max=8192,n=800,seed=2")
    packing = optimal.pack(histogram, max_sequences_per_pack=8)
    packing.check(histogram)
    assert len(histogram.lengths) > 600 and packing.largest_depth == 8
    assert prove(packing).lower_bound == packing.lower_bound and packing.gap <= 2


def test_a_programme_stopped_early_bounds_the_full_one():
    histogram = synthetic_histogram("lognormal:mean=45,max=256,n=4000,seed=3")
    lengths, counts = histogram.lengths, histogram.counts[histogram.lengths]
    coarse = relax(lengths, counts, 256, 12)
    full = relax(lengths, counts, 256, 12, exact=True)
    assert not coarse.exact and full.exact
    assert coarse.bound <= full.value * (1 + 1e-9) and full.bound <= full.value * (1 + 1e-9)
    assert coarse.bound == pytest.approx(full.value, rel=1e-3)
    for relaxation in (coarse, full):  # the prices, held against the independent dynamic programme
        prices = np.floor(relaxation.prices * 2**40).astype(int).tolist()
        assert best_pack_value(lengths.tolist(), prices, 256, 12) <= 2**40 * (1 + 1e-9)
        assert counts @ relaxation.prices == pytest.approx(relaxation.bound)


# ---- its parts -----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("one_at_a_time", [True, False])
@given(priced=st.lists(st.tuples(st.integers(1, 15), st.integers(0, 50)), min_size=1, max_size=5, unique_by=lambda p: p[0]),
       sequences=st.integers(1, 5))
def test_pack_tables_find_the_best_packs(one_at_a_time, priced, sequences):
    priced = sorted(priced)
    lengths = np.array([length for length, _ in priced])
    prices = np.maximum.accumulate(np.array([price for _, price in priced], float))
    S = 20
    capacities = np.arange(S + 1)
    tables = PackTables(lengths, prices, S, sequences)
    tables._single = one_at_a_time  # otherwise a matter of cost, and at this size always the same
    values = tables.value(sequences, capacities)
    packs = tables.packs(sequences, capacities)
    price_of = dict(zip([0, *lengths.tolist()], [0.0, *prices.tolist()]))
    for capacity in (0, 7, 13, 20):
        held = packs[capacity].tolist()
        assert sum(held) <= capacity
        assert sum(price_of[length] for length in held) == values[capacity]
        assert values[capacity] == max(
            sum(price_of[length] for length in chosen)
            for chosen in product(price_of, repeat=sequences) if sum(chosen) <= capacity)


@given(histograms(), st.data())
def test_lengths_without_a_slot_share_a_row(histogram, data):
    # Merging their rows changes neither the optimum nor what the prices may be: solved beside the programme with all rows.
    lengths, weights = histogram.lengths, histogram.counts[histogram.lengths].astype(float)
    if not len(lengths):
        return
    pool = column_generation.Pool(lengths, histogram.max_sequence_length)
    drawn = data.draw(st.lists(st.lists(st.sampled_from([0, *lengths.tolist()]), min_size=3, max_size=3), max_size=5))
    pool.add(np.array(drawn + [[int(lengths[-1]), 0, 0]]))
    merged, whole = pool.solve(weights), column_generation._solve_master(pool.matrix(pool.strategies), weights)
    assert merged.value == pytest.approx(whole.value)
    assert weights @ merged.prices == pytest.approx(merged.value)  # strong duality, with a price for every length
    assert (np.diff(merged.prices) >= 0).all() and (pool.worth(merged.prices, pool.strategies) <= 1 + 1e-7).all()


def test_rounding_takes_half_however_many_slots_are_empty():
    # 4 packs, so 2 are wanted: the 7 is whole, and 6 3 has the largest fraction and its sequences.
    relaxation = column_generation.Relaxation(
        4.0, 4.0, np.zeros(5), np.array([[7, 0], [6, 3], [5, 4], [5, 3], [6, 4]]), np.array([1.0, 0.9, 0.8, 0.7, 0.6]), exact=True)
    assert _round(relaxation, np.bincount([7, 6, 6, 5, 5, 4, 3], minlength=10)).tolist() == [1, 1, 0, 0, 0]


@given(histograms(), st.data())
def test_filling_slots_loses_nothing_and_respects_them(histogram, data):
    S = histogram.max_sequence_length
    strategies = np.array(data.draw(st.lists(st.lists(st.integers(0, S), min_size=3, max_size=3), min_size=1, max_size=6)))
    repeats = np.array(data.draw(st.lists(st.integers(0, 9), min_size=len(strategies), max_size=len(strategies))))
    packs, left = fill(strategies, repeats, histogram.counts)
    assert (placed(packs, S) + left == histogram.counts).all() and (left >= 0).all()
    # Slots of at least a length hold all sequences of at least that length but those left, or all of them are full.
    assert sum(count for _, count in packs) <= repeats.sum()


@given(histograms(), st.data())
def test_following_strategies_loses_nothing_and_overfills_nothing(histogram, data):
    S = histogram.max_sequence_length
    strategies = np.array(data.draw(st.lists(st.lists(st.integers(1, S), min_size=1, max_size=1), min_size=1, max_size=4)))
    strategies = np.hstack([strategies, np.minimum(strategies, S - strategies)])
    repeats = np.array(data.draw(st.lists(st.integers(0, 9), min_size=len(strategies), max_size=len(strategies))))
    prices = np.arange(S + 1) / S
    packs, left = follow(strategies, repeats, histogram.counts, prices, 0.5)
    assert (placed(packs, S) + left == histogram.counts).all() and (left >= 0).all()
    assert all(sum(lengths) <= S and sum(lengths) / S >= 0.5 and count > 0 for lengths, count in packs)


def placed(packs, S):
    counts = np.zeros(S + 1, np.int64)
    for lengths, count in packs:
        np.add.at(counts, list(lengths), count)
    return counts


# ---- balance -------------------------------------------------------------------------------------------------------------

def test_balance_by_hand():
    # 8 + 2 costs 68, 5 + 5 costs 50: nothing to exchange.  6 + 3 + 1 costs 46 and 4 + 4 + 2 costs 36; giving 6 + 1 for
    # 4 + 2 makes 4 + 3 + 2 (29) and 6 + 4 + 1 (53), worse; 3 + 1 for 4 makes 6 + 4 (52): worse; 6 for 4 + 2 does too.
    even = Packing("x", 10, 3, ((6, 3, 1), (4, 4, 2)), (1, 1))
    assert balance_attention(even) == even
    # 10 + 10 costs 200 and 4 + 4 + 4 costs 48; a 10 for a 4 makes 116 and 132 (for 4 + 4 the same the other way round).
    uneven = Packing("x", 24, 3, ((10, 10), (4, 4, 4)), (1, 1))
    balanced = balance_attention(uneven)
    assert balanced.strategies == ((10, 4, 4), (10, 4)) and AttentionWork.of(balanced).largest == 132


@given(histograms(), st.sampled_from([2, 3, 5, None]))
def test_balance_keeps_every_law_and_never_raises_the_largest(histogram, depth):
    packing = optimal.pack(histogram, max_sequences_per_pack=depth)
    balanced = optimal.pack(histogram, max_sequences_per_pack=depth, balance="attention")
    balanced.check(histogram)
    assert balanced.packs == packing.packs and balanced.certificate == packing.certificate
    before, after = AttentionWork.of(packing), AttentionWork.of(balanced)
    assert max(after.least_imbalance * (1 - 1e-12), 1.0) <= after.imbalance and after.largest <= before.largest
    assert after.deviation <= before.deviation * (1 + 1e-12)
    assert after.mean == pytest.approx(before.mean)


def test_balance_does_something():
    packing = optimal.pack(LengthHistogram.published("squad_1_1_384"), max_sequences_per_pack=3)
    assert AttentionWork.of(balance_attention(packing, exchanges=50)).deviation < AttentionWork.of(packing).deviation


def test_an_unknown_balance_is_refused():
    with pytest.raises(ValueError, match="attention"):
        optimal.pack(LengthHistogram.from_lengths([1], 2), max_sequences_per_pack=2, balance="tokens")


# ---- the command ---------------------------------------------------------------------------------------------------------

def test_the_command_writes_a_recipe_and_says_what_it_proved(tmp_path, capsys):
    table, recipe = tmp_path / "lengths.csv", tmp_path / "recipe.json"
    table.write_text("length,count\n3,10\n5,7\n9,2\n")
    argv = ["--histogram", str(table), "--max-sequence-length", "10", "--out", str(recipe), "--balance", "attention"]
    assert run_main(optimal.main, argv) == 0
    printed = capsys.readouterr().out
    assert "no packing has fewer" in printed and "max / mean" in printed
    assert prove(Packing.load(recipe)).lower_bound == 9  # 9 | 9 | 5 5 three times | 5 3 | 3 3 3 three times


def test_json_is_one_object(tmp_path, capsys):
    table = tmp_path / "lengths.csv"
    table.write_text("length,count\n3,10\n5,7\n")
    assert run_main(optimal.main, ["--histogram", str(table), "--max-sequence-length", "10", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["algorithm"] == "optimal" and result["gap"] == 0 and result["lp_bound"] <= result["lower_bound"]


def test_the_comparison_with_the_reference_prints_three_solvers(monkeypatch, capsys):
    small = LengthHistogram.from_lengths([3] * 10 + [5] * 7 + [9] * 2, 16)
    monkeypatch.setattr(LengthHistogram, "published", staticmethod(lambda name: small))
    assert run_main(optimal.main, ["--against-reference"]) == 0
    packs = [int(line.split()[-5]) for line in capsys.readouterr().out.splitlines()[2:]]
    assert len(packs) == 3 and packs[0] == 7 <= min(packs)  # 83 tokens take 6 packs of 16; 19 sequences, three a pack, take 7
    assert run_main(optimal.main, ["--against-reference", "--json"]) == 2


def test_progress_is_shown_on_request_and_not_otherwise(capsys):
    argv = ["--synthetic", "lognormal:mean=20,max=64,n=200", "--json", "--balance", "attention"]
    assert run_main(optimal.main, argv) == 0
    assert capsys.readouterr().err == ""
    assert run_main(optimal.main, [*argv, "--progress"]) == 0
    shown = capsys.readouterr().err
    assert "packing" in shown and "balancing" in shown


def test_the_benchmark_reads_the_pack_size_from_the_name(tmp_path, capsys):
    (tmp_path / "made_up_16.csv").write_text("length,count\n3,10\n5,7\n")
    (tmp_path / "made_up.csv").write_text("length,count\n3,10\n5,7\n")
    assert run_main(optimal.main, ["--benchmark-set", str(tmp_path)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:-1]]
    assert [(row[0], row[1]) for row in rows] == [("made_up", "5")] * 6 + [("made_up_16", "16")] * 6


def test_every_histogram_of_the_data_folder(data_dir):
    for path in sorted((data_dir / "histograms").rglob("*.csv")):
        histogram = LengthHistogram.from_csv(path, optimal._declared_maximum(path))
        for depth in (2, 3, 4, 8, 16, None):
            packing = optimal.pack(histogram, max_sequences_per_pack=depth)
            packing.check(histogram)
            assert prove(packing).lower_bound == packing.lower_bound
            assert packing.gap <= 2, (path.name, depth)
