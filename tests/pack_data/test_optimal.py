"""The optimal packer: known optima of the linear programme, proofs, time that runs out, long rows."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pack_data import optimal
from pack_data.lengths.synthetic import synthetic_histogram
from pack_data.packing.histogram import LengthHistogram
from pack_data.packing.packing import Packing, prove
from pack_data.solver import programmes
from pack_data.solver.free_slots import longest_first
from pack_data.solver.search import Limits, pack_quickly
from tests.pack_data_strategies import histograms
from tests.tiers import sample, slow

depths = st.sampled_from([1, 2, 3, 4, 8, None])


def proved(histogram, depth, **options):
    """Pack, and check that every sequence is packed once and that the bound is proved."""
    packing = optimal.pack(histogram, max_sequences_per_pack=depth, **options)
    packing.check(histogram)
    assert prove(packing).lower_bound == packing.lower_bound <= packing.packs
    return packing


def clipped(lengths, S):
    return LengthHistogram.from_lengths(np.clip(np.rint(lengths), 1, S).astype(np.int64), S)


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
    packing = proved(LengthHistogram.published(name), depth)
    assert packing.lp_bound == pytest.approx(optimum, abs=1e-3)
    assert packing.lower_bound == int(np.ceil(optimum))
    assert packing.gap <= 2


@given(histograms(max_count=40), depths)
def test_packs_stay_within_two_of_the_bound(histogram, depth):
    packing = proved(histogram, depth)
    assert packing.gap <= (0 if depth == 2 else 2)
    assert packing.lp_bound <= packing.lower_bound + 1e-6 < packing.lp_bound + 1.001


def check_larger_limits(histogram):
    packs = []
    for depth in (2, 3, 4, 6, 8, 16, None):
        packs.append(optimal.pack(histogram, max_sequences_per_pack=depth).packs)
    assert packs == sorted(packs, reverse=True)


@given(histograms(max_count=40))
def test_a_larger_limit_never_gives_more_packs(histogram):
    check_larger_limits(histogram)


@given(st.integers(0, 10_000), st.integers(1, 600), st.sampled_from([64, 1024, 8192]))
@settings(max_examples=12)
def test_a_larger_limit_never_gives_more_packs_of_many_lengths(seed, number, slots):
    lengths = np.random.default_rng(seed).lognormal(np.log(0.28 * slots), 0.72, number)
    check_larger_limits(clipped(lengths, slots))


def test_rounded_prices_do_not_weaken_the_bound_of_plain_ones():
    # 10^15 sequences: rounded to 2^-40 the programme's prices lose hundreds of packs, tokens / S loses none.
    counts = np.zeros(11, np.int64)
    counts[[1, 2, 4, 10]] = 115907747279068, 450560529567970, 541512058616028, 415459599923772
    histogram = LengthHistogram(counts)
    packing = proved(histogram, 4)
    assert packing.packs == packing.lower_bound == -(-histogram.tokens // 10)


@pytest.mark.parametrize("center, sigma", [(700, 1.2), (131_072 / 3.5, 0.5)])
def test_rows_of_131_072_slots_need_no_programme(center, sigma, monkeypatch):
    # The tables of the programme would take 131,072 x 131,072 numbers.
    monkeypatch.setattr(programmes, "relax", None)
    lengths = np.random.default_rng(0).lognormal(np.log(center) - sigma**2 / 2, sigma, 20_000)
    histogram = clipped(lengths, 131_072)
    packing = proved(histogram, None)
    assert packing.lower_bound == -(-histogram.tokens // 131_072)
    assert packing.gap <= max(1, 5e-4 * packing.lower_bound)


@pytest.mark.parametrize("depth", [slow(3), 8])
def test_in_long_rows_a_depth_that_matters_leaves_one_pack_at_most(depth):
    """Rows of 32,768 slots, where a decreasing fit alone is several packs above the bound."""
    counts = LengthHistogram.published("wikipedia_512").counts
    random = np.random.default_rng(0)
    lengths = 64 * random.choice(len(counts), 10_000, p=counts / counts.sum())
    histogram = clipped(lengths, 32_768)
    packing = proved(histogram, depth)
    fitted = sum(count for _, count in longest_first(histogram, depth))
    assert packing.gap <= 1 < fitted - packing.packs


def test_a_gap_that_is_worth_no_time_starts_no_search_at_smaller_limits(monkeypatch):
    """Such searches took 14.6 of 14.7 s here and won no pack."""
    depths = []

    def recorded(histogram, limits):
        depths.append(limits.max_sequences_per_pack)
        return pack_quickly(histogram, limits)

    monkeypatch.setattr(optimal, "pack_quickly", recorded)
    lengths = np.random.default_rng(0).lognormal(np.log(3000), 1.2, 100_000)
    packing = proved(clipped(lengths, 32_768), None)
    assert packing.gap == 1
    assert depths == [None]


@pytest.mark.parametrize("depth, seed", sample([(2, 0), (3, 1), (5, 0), (9, 1)], 2))
def test_the_grid_packs_everything_and_its_prices_prove_a_bound(depth, seed, monkeypatch):
    # The way of rows beyond 2,048 slots, at a size that the exhaustive tests and the full programme reach.
    histogram = synthetic_histogram(f"lognormal:mean=90,max=300,n=3000,seed={seed}")
    full = proved(histogram, depth)
    monkeypatch.setattr(programmes, "LONG_ROWS", 64)
    monkeypatch.setattr(programmes, "relax", None)
    packing = proved(histogram, depth)
    assert packing.lower_bound <= full.packs
    assert packing.packs <= 1.005 * full.packs
    assert packing.lower_bound >= 0.995 * full.lower_bound


def test_prices_of_the_programme_account_for_scarce_short_sequences():
    # A sequence of nearly a whole row takes two of the shortest, of which there are few. Plain prices take them for
    # granted; those of the programme do not.
    histogram = clipped(np.random.default_rng(0).lognormal(6.2, 1.0, 20_000), 2048)
    plain = pack_quickly(histogram, Limits.of(histogram, 3, None))
    improved = programmes.improved(plain)
    assert improved.lower_bound > plain.lower_bound
    assert improved.gap <= 2
    proof = {"certificate": improved.certificate, "lower_bound": improved.lower_bound}
    prove(Packing.of("found", histogram, 3, improved.packs, **proof))


# ---- time ------------------------------------------------------------------------------------------------------------


def test_a_spent_budget_gives_the_best_found_with_its_proof(monkeypatch):
    """Whenever time is up: all is packed, and the bound is proved. A clock that ticks at each look stands in."""
    histogram = synthetic_histogram("uniform:max=256,n=3000,seed=1")
    full = proved(histogram, 4)
    results = []
    for looks in (1, 4, 8, 16, 64, 10_000):
        clock = iter(range(1_000_000))
        monkeypatch.setattr(optimal.time, "perf_counter", lambda clock=clock: float(next(clock)))
        packing = proved(histogram, 4, budget=looks)
        assert packing.lower_bound <= full.packs <= packing.packs
        results.append((packing.packs, -packing.lower_bound))
    assert results[0] > results[-1] == min(results)  # it was cut short, and was not
    assert results[-1] == (full.packs, -full.lower_bound)


def test_without_a_budget_no_step_asks_the_clock(monkeypatch):
    histogram = synthetic_histogram("uniform:max=256,n=3000,seed=1")
    plain = proved(histogram, 3)
    clock = iter(range(0, 10**9, 1000))
    monkeypatch.setattr(optimal.time, "perf_counter", lambda: float(next(clock)))
    again = proved(histogram, 3)
    for name in ("strategies", "repeats", "certificate"):
        assert getattr(again, name) == getattr(plain, name)


def test_prices_that_prove_less_do_not_replace_those_that_prove_more():
    with programmes._Progress(1, Limits(1, None, np.inf)) as bar:
        bar.programme(9.0, 5.0, np.array([1.0]))
        bar.keep(7.0, np.array([2.0]))  # of the first programme, as it ends
        bar.programme(9.0, 6.0, np.array([3.0]))  # of the second one, which time may cut short
        assert bar.prices.tolist() == [2.0]
    with programmes._Progress(1, Limits(1, None, 0.0)) as bar, pytest.raises(programmes._TimeIsUp):
        bar.left(1)


# ---- larger data -----------------------------------------------------------------------------------------------------


def declared_maximum(path):
    """The number in the file's name that no length exceeds (`squad_1_1_384.csv`: 384), else the longest length."""
    longest = LengthHistogram.from_csv(path, 1 << 20).longest
    numbers = [int(number) for number in re.findall(r"\d+", path.stem)]
    return min((number for number in numbers if number >= longest), default=longest)


def test_every_histogram_of_the_data_folder(data_dir):
    for path in sorted((data_dir / "histograms").rglob("*.csv")):
        histogram = LengthHistogram.from_csv(path, declared_maximum(path))
        for depth in (2, 3, 4, 8, 16, None):
            assert proved(histogram, depth).gap <= 2, (path.name, depth)
