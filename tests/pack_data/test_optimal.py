"""The optimal packer: known optima of the linear programme, degenerate data sets, the command."""

import re
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pack_data import optimal
from pack_data.cli.command import run_main
from pack_data.lengths import packer_command
from pack_data.lengths.synthetic import synthetic_histogram
from pack_data.packing.histogram import LengthHistogram
from pack_data.packing.packing import Packing, prove
from pack_data.solver import programmes
from pack_data.solver.free_slots import longest_first
from pack_data.solver.search import Limits, pack_quickly
from tests.pack_data_strategies import histograms
from tests.refusals import refused

depths = st.sampled_from([1, 2, 3, 4, 8, None])


@pytest.mark.parametrize(
    "name, depth, optimum",
    [
        # Optima of the full programme, computed with HiGHS over all maximal packs or to convergence.
        ("wikipedia_512", 2, 10_099_080.5),
        ("wikipedia_512", 3, 8_143_828.857),
        ("wikipedia_512", None, 8_135_726.922),
        ("squad_1_1_384", 2, 45_334.5),
        ("squad_1_1_384", 3, 40_194.246),
        ("squad_1_1_384", 8, 40_194.246),
    ],
)
def test_published_histograms_are_packed_at_the_optimum(name, depth, optimum):
    histogram = LengthHistogram.published(name)
    packing = optimal.pack(histogram, max_sequences_per_pack=depth)
    packing.check(histogram)
    assert packing.lp_bound == pytest.approx(optimum, abs=1e-3)
    assert prove(packing).lower_bound == int(np.ceil(optimum))
    assert packing.gap <= 2


@given(histograms(max_count=40), depths)
def test_packs_stay_within_two_of_the_bound(histogram, depth):
    packing = optimal.pack(histogram, max_sequences_per_pack=depth)
    packing.check(histogram)
    assert 0 <= packing.gap <= 2
    assert packing.lp_bound <= packing.lower_bound + 1e-6 < packing.lp_bound + 1.001


@given(histograms())
def test_pairs_are_packed_at_a_bound_that_needs_no_programme(histogram):
    packing = optimal.pack(histogram, max_sequences_per_pack=2)
    assert prove(packing).lower_bound == packing.packs


@given(histograms(max_count=40))
def test_a_larger_limit_never_gives_more_packs(histogram):
    packs = [optimal.pack(histogram, max_sequences_per_pack=depth).packs for depth in (2, 3, 4, 6, 8, 16, None)]
    assert packs == sorted(packs, reverse=True)


@given(st.integers(0, 10_000), st.integers(1, 600), st.sampled_from([64, 1024, 8192]))
@settings(max_examples=12)
def test_a_larger_limit_never_gives_more_packs_of_many_lengths(seed, number, slots):
    lengths = np.random.default_rng(seed).lognormal(np.log(0.28 * slots), 0.72, number)
    histogram = LengthHistogram.from_lengths(np.clip(np.rint(lengths), 1, slots).astype(int), slots)
    packs = [optimal.pack(histogram, max_sequences_per_pack=depth).packs for depth in (2, 3, 4, 8, 16, None)]
    assert packs == sorted(packs, reverse=True)


def test_only_powers_of_two_are_tried_as_smaller_limits_where_a_search_takes_long():
    for number in (50, 50_000):
        lengths = np.arange(1, number + 1)
        histogram = LengthHistogram.from_lengths(lengths, 5 * number)
        alone = [((length,), 1) for length in lengths.tolist()]
        found = pack_quickly(histogram, Limits.of(histogram, 26, None))._replace(packs=alone)
        depths = found.smaller_depths()
        assert {2, 4, 8, 16} <= set(depths)
        assert (9 in depths) == (depths == list(range(18, 1, -1))) == (number == 50)


def test_every_smaller_limit_counts_at_a_larger_one():
    # Packed for eight sequences alone, one pack more is needed than for six; for five, one more than for four.
    random = np.random.default_rng(10)
    pairs = random.lognormal(np.log(200), 0.6, 2000) + random.lognormal(np.log(350), 0.6, 2000)
    solutions = np.random.default_rng(4).lognormal(np.log(4200), 0.8, 4000).round()
    for lengths, slots, depths in ((pairs, 2048, (4, 5, 6)), (solutions, 16384, (6, 8, None))):
        histogram = LengthHistogram.from_lengths(lengths.astype(int).clip(1, slots), slots)
        packings = [optimal.pack(histogram, max_sequences_per_pack=depth) for depth in depths]
        packs = [packing.packs for packing in packings]
        assert packs == sorted(packs, reverse=True)
    unlimited = packings[-1]
    assert unlimited.packs == unlimited.lower_bound


@pytest.mark.parametrize(
    "lengths, S", [([], 5), ([3] * 7, 10), ([10] * 5, 10), ([1, 2, 3, 4, 5, 6, 7], 9), ([1] * 100, 10), ([1] * 3, 1)]
)
@pytest.mark.parametrize("depth", [1, 2, 3, None])
def test_degenerate_sets(lengths, S, depth):
    histogram = LengthHistogram.from_lengths(np.array(lengths, int), S)
    packing = optimal.pack(histogram, max_sequences_per_pack=depth)
    packing.check(histogram)
    prove(packing)
    assert packing.gap == 0


def test_rounded_prices_do_not_weaken_the_bound_of_plain_ones():
    # 10^15 sequences: rounded to 2^-40 the programme's prices lose hundreds of packs, tokens / S loses none.
    counts = {1: 115907747279068, 2: 450560529567970, 4: 541512058616028, 10: 415459599923772}
    histogram = LengthHistogram([counts.get(length, 0) for length in range(11)])
    packing = optimal.pack(histogram, max_sequences_per_pack=4)
    packing.check(histogram)
    assert prove(packing).lower_bound == -(-histogram.tokens // 10) == packing.packs


def test_packs_of_thousands_of_sequences():
    histogram = LengthHistogram.from_lengths([1] * 5000 + [2] * 700 + [2000] * 10, 4096)  # 26400 tokens: 6.4 packs
    packing = optimal.pack(histogram, max_sequences_per_pack=None)
    packing.check(histogram)
    prove(packing)
    assert (packing.packs, packing.gap) == (7, 0) and packing.largest_depth > 1000


def test_long_packs_of_few_sequences():
    # S = 8192, and a depth that limits the short ones: the bound comes from coarse prices and is proved for all
    # lengths.
    histogram = synthetic_histogram("lognormal:mean=1500,max=8192,n=800,seed=2")
    packing = optimal.pack(histogram, max_sequences_per_pack=8)
    packing.check(histogram)
    assert len(histogram.lengths) > 600 and 4 < packing.largest_depth <= 8
    assert prove(packing).lower_bound == packing.lower_bound and packing.gap <= 2


@pytest.mark.parametrize("center, sigma", [(700, 1.2), (131_072 / 3.5, 0.5)])
def test_rows_of_131_072_slots_need_no_programme(center, sigma, monkeypatch):
    # The tables of the programme would take 131,072 x 131,072 numbers.
    monkeypatch.setattr(programmes, "relax", None)
    lengths = np.random.default_rng(0).lognormal(np.log(center) - sigma**2 / 2, sigma, 20_000)
    lengths = np.clip(np.rint(lengths), 1, 131_072).astype(np.int64)
    histogram = LengthHistogram.from_lengths(lengths, 131_072)
    packing = optimal.pack(histogram, max_sequences_per_pack=None)
    packing.check(histogram)
    assert prove(packing).lower_bound == -(-histogram.tokens // 131_072)
    assert packing.gap <= max(1, 5e-4 * packing.lower_bound)


def test_deep_packs_of_long_rows_need_no_programme(monkeypatch):
    # At most 100 sequences of 1 to 40 tokens in packs of 131,072 slots: 30 packs, were it not for the four longest.
    monkeypatch.setattr(programmes, "relax", None)
    lengths = np.concatenate([np.random.default_rng(0).integers(1, 41, 3000), [131_072] * 4])
    histogram = LengthHistogram.from_lengths(lengths, 131_072)
    packing = optimal.pack(histogram, max_sequences_per_pack=100)
    packing.check(histogram)
    assert (packing.packs, prove(packing).lower_bound) == (34, 34)


def test_a_spent_budget_gives_the_best_found_with_its_proof(monkeypatch):
    """Whenever time is up: all is packed, and the bound is proved. A clock that ticks at each look stands in."""
    histogram = synthetic_histogram("uniform:max=256,n=3000,seed=1")
    full = optimal.pack(histogram, max_sequences_per_pack=4)
    found = []
    for looks in (1, 4, 8, 16, 64, 10_000):
        clock = iter(range(1_000_000))
        monkeypatch.setattr(optimal.time, "perf_counter", lambda clock=clock: float(next(clock)))
        packing = optimal.pack(histogram, max_sequences_per_pack=4, budget=looks)
        packing.check(histogram)
        assert prove(packing).lower_bound == packing.lower_bound <= full.packs <= packing.packs
        found.append((packing.packs, -packing.lower_bound))
    assert found[0] > found[-1] and sorted(found, reverse=True)[-1] == found[-1]  # it was cut short, and was not
    assert found[-1] == (full.packs, -full.lower_bound)


def test_a_programme_cut_short_leaves_its_bound(monkeypatch):
    # Plain prices prove 1,115 packs here; a programme that is stopped while it improves its bound proves more.
    lengths = np.random.default_rng(0).normal(110, 15, 3000)
    histogram = LengthHistogram.from_lengths(np.rint(lengths).astype(int), 300)
    plain = optimal.pack(histogram, max_sequences_per_pack=4, budget=1e-9).lower_bound
    asked = []

    def out_of_time(self):
        asked.append(self)
        if len(asked) > 6:
            raise programmes._TimeIsUp

    monkeypatch.setattr(programmes._Progress, "_check", out_of_time)
    cut = optimal.pack(histogram, max_sequences_per_pack=4)
    assert prove(cut).lower_bound == cut.lower_bound > plain


def test_prices_that_prove_less_do_not_replace_those_that_prove_more():
    with programmes._Progress(1, Limits(1, None, np.inf)) as bar:
        bar.programme(9.0, 5.0, np.array([1.0]))
        bar.keep(7.0, np.array([2.0]))  # of the first programme, as it ends
        bar.programme(9.0, 6.0, np.array([3.0]))  # of the second one, which time may cut short
        assert bar.prices.tolist() == [2.0]
    with programmes._Progress(1, Limits(1, None, 0.0)) as bar, pytest.raises(programmes._TimeIsUp):
        bar.left(1)


def test_prices_of_the_programme_account_for_scarce_short_sequences():
    # A sequence of nearly a whole row takes two of the shortest, of which there are few. Plain prices take them for
    # granted; those of the programme do not.
    lengths = np.clip(np.rint(np.random.default_rng(0).lognormal(6.2, 1.0, 20_000)), 1, 2048).astype(np.int64)
    histogram = LengthHistogram.from_lengths(lengths, 2048)
    plain = pack_quickly(histogram, Limits.of(histogram, 3, None))
    found = programmes.improved(plain)
    assert len(histogram.lengths) > 1000 and found.lower_bound > plain.lower_bound and found.gap <= 2
    assert prove(
        Packing.of(
            "found",
            histogram,
            3,
            found.packs,
            certificate=found.certificate,
            lower_bound=found.lower_bound,
            lp_bound=float(found.worth),
        )
    )


@pytest.mark.parametrize("depth", [2, 3, 5, 9])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_grid_packs_everything_and_its_prices_prove_a_bound(depth, seed, monkeypatch):
    # The way of rows beyond 2,048 slots, at a size that the exhaustive tests and the full programme reach.
    histogram = synthetic_histogram(f"lognormal:mean=90,max=300,n=3000,seed={seed}")
    full = optimal.pack(histogram, max_sequences_per_pack=depth)
    monkeypatch.setattr(programmes, "LONG_ROWS", 64)
    monkeypatch.setattr(programmes, "relax", None)
    packing = optimal.pack(histogram, max_sequences_per_pack=depth)
    packing.check(histogram)
    assert prove(packing).lower_bound == packing.lower_bound <= full.packs
    assert packing.packs <= 1.005 * full.packs and packing.lower_bound >= 0.995 * full.lower_bound


def test_one_short_sequence_costs_the_bound_next_to_nothing():
    lengths = np.rint(np.random.default_rng(0).lognormal(np.log(4096), 0.1, 5_000)).astype(np.int64).clip(1, 8192)
    without, with_one = (
        optimal.pack(LengthHistogram.from_lengths(given, 8192), max_sequences_per_pack=None)
        for given in (lengths, np.append(lengths, 1))
    )
    assert prove(with_one).lower_bound >= 0.999 * without.lower_bound
    assert with_one.packs <= without.packs + 1


def test_the_command_writes_a_recipe_and_says_what_it_proved(tmp_path, capsys):
    table, recipe = tmp_path / "lengths.csv", tmp_path / "recipe.json"
    table.write_text("length,count\n3,10\n5,7\n9,2\n")
    argv = ["--histogram", str(table), "--max-sequence-length", "10", "--out", str(recipe)]
    assert run_main(partial(packer_command.main, "optimal"), argv) == 0
    printed = capsys.readouterr().out
    assert "no packing has fewer" in printed
    assert prove(Packing.load(recipe)).lower_bound == 9  # 9 | 9 | 5 5 three times | 5 3 | 3 3 3 three times


def test_a_budget_of_0_is_refused():
    assert run_main(partial(packer_command.main, "optimal"), ["--budget", "0"]) == 2
    for budget in (0, -1.0, float("nan"), "1"):
        with refused("budget = ", "seconds above 0"):
            optimal.pack(LengthHistogram.from_lengths([1], 1), max_sequences_per_pack=None, budget=budget)


def test_quick_packing_shows_no_progress(capsys):
    assert (
        run_main(partial(packer_command.main, "optimal"), ["--synthetic", "uniform:max=256,n=3000,seed=1", "--json"])
        == 0
    )
    assert capsys.readouterr().err == ""


def declared_maximum(path):
    """The number in the file's name that no length exceeds (`squad_1_1_384.csv`: 384), else the longest length."""
    longest = LengthHistogram.from_csv(path, 1 << 20).longest
    return min((int(number) for number in re.findall(r"\d+", path.stem) if int(number) >= longest), default=longest)


def test_the_result_does_not_depend_on_the_clock(monkeypatch):
    # Without a budget no step asks the clock: one that leaps changes nothing.
    histogram = synthetic_histogram("uniform:max=256,n=3000,seed=1")
    plain = optimal.pack(histogram, max_sequences_per_pack=3)
    clock = iter(range(0, 10**9, 1000))
    monkeypatch.setattr(optimal.time, "perf_counter", lambda: float(next(clock)))
    again = optimal.pack(histogram, max_sequences_per_pack=3)
    assert (again.strategies, again.repeats, again.certificate) == (plain.strategies, plain.repeats, plain.certificate)


def test_no_programme_is_solved_if_its_gain_cannot_pay(monkeypatch):
    # 1,000 uniform lengths: decreasing fit is as good as any packing known, and no linear programme is solved.
    monkeypatch.setattr(programmes, "improved", None)
    lengths = np.random.default_rng(7).integers(1, 4097, 1000)
    packing = optimal.pack(LengthHistogram.from_lengths(lengths, 4096), max_sequences_per_pack=None)
    assert packing.gap <= 1 + 0.004 * packing.lower_bound


def test_every_histogram_of_the_data_folder(data_dir):
    for path in sorted((data_dir / "histograms").rglob("*.csv")):
        histogram = LengthHistogram.from_csv(path, declared_maximum(path))
        for depth in (2, 3, 4, 8, 16, None):
            packing = optimal.pack(histogram, max_sequences_per_pack=depth)
            packing.check(histogram)
            assert prove(packing).lower_bound == packing.lower_bound
            assert packing.gap <= 2, (path.name, depth)


@pytest.mark.parametrize("depth", [3, 8])
def test_in_long_rows_a_depth_that_matters_leaves_one_pack_at_most(depth: int) -> None:
    """Rows of 32,768 slots, where a decreasing fit alone is several packs above the bound."""
    random, counts = np.random.default_rng(0), LengthHistogram.published("wikipedia_512").counts
    lengths = 64 * random.choice(len(counts), 10_000, p=counts / counts.sum())
    histogram = LengthHistogram.from_lengths(lengths, 32_768)
    fitted = sum(count for _, count in longest_first(histogram, depth))
    packing = optimal.pack(histogram, max_sequences_per_pack=depth)
    packing.check(histogram)
    assert packing.gap is not None and packing.gap <= 1 < fitted - packing.packs
