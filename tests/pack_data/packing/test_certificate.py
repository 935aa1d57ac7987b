"""The bound is checked against the true optimum by exhaustive search, and forged certificates are refused."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from itertools import combinations_with_replacement

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog

from pack_data.cli.command import run_main
from pack_data.inspection.verify_command import main
from pack_data.optimal import pack
from pack_data.packing import checker
from pack_data.packing.certificate import (
    Certificate,
    _beside_long_value,
    _divisible_value,
    best_pack_value,
    plain_certificate,
    proven_bound,
)
from pack_data.packing.dual_feasible import _rounded_to_parts
from pack_data.packing.histogram import LengthHistogram
from pack_data.packing.packing import Packing, prove
from tests.pack_data.text_corpus import build_small, write_corpus
from tests.pack_data_strategies import fewest_packs
from tests.refusals import refusal_of


def histogram_of(lengths, slots):
    return LengthHistogram.from_lengths(np.array(lengths, int), slots)


@st.composite
def small_sets(draw):
    """Slots, lengths of a few sequences, and a depth."""
    slots = draw(st.integers(1, 12))
    lengths = draw(st.lists(st.integers(1, slots), max_size=9))
    return slots, lengths, draw(st.sampled_from([1, 2, 3, 4, None]))


@given(small_sets())
def test_lengths_are_rounded_to_the_parts_that_are_worth_most(case):
    """Lengths of at least j (k + 1)-ths of a row are worth j / k; the best k of 2 to 48."""
    slots, lengths, _ = case
    lengths.append(slots)

    def worth(length, k):
        parts, rest = divmod((k + 1) * length, slots)
        return Fraction(parts, k) if rest else Fraction(length, slots)

    prices = _rounded_to_parts(histogram_of(lengths, slots))
    price_of = dict(zip(sorted(set(lengths)), prices.by_length.tolist()))
    total = sum(Fraction(price_of[length], prices.unit) for length in lengths)
    assert total == max(sum(worth(length, k) for length in lengths) for k in range(2, 49))


def priced_lengths(longest):
    """Pairs of a length and its price."""
    pairs = st.tuples(st.integers(1, longest), st.integers(0, 30))
    return st.lists(pairs, min_size=1, max_size=7, unique_by=lambda pair: pair[0])


@given(small_sets())
def test_the_bound_never_exceeds_the_true_optimum_and_the_packs_never_fall_below_it(case):
    slots, lengths, depth = case
    histogram = histogram_of(lengths, slots)
    packing = pack(histogram, max_sequences_per_pack=depth)
    truth = fewest_packs(lengths, slots, depth)
    assert packing.lower_bound <= truth <= packing.packs
    assert proven_bound(plain_certificate(histogram, depth), histogram.counts).lower_bound <= truth
    assert prove(packing).lower_bound == packing.lower_bound
    # The bound is the linear programme's: at most one pack below the truth for all but contrived sets, never two here.
    assert truth - packing.lower_bound <= 1
    assert packing.packs - truth <= 1


@given(priced_lengths(14), st.integers(1, 14), st.sampled_from([1, 2, 3, 5, None]))
def test_best_pack_value_is_that_of_the_best_of_all_packs(priced, slots, depth):
    fitting = [pair for pair in priced if pair[0] <= slots]
    lengths = [length for length, _ in fitting]
    prices = [price for _, price in fitting]
    shortest = min(lengths, default=slots + 1)
    best = 0
    for size in range(1, min(depth or slots, slots // shortest) + 1):
        for chosen in combinations_with_replacement(fitting, size):
            if sum(length for length, _ in chosen) <= slots:
                best = max(best, sum(price for _, price in chosen))
    assert best_pack_value(lengths, prices, slots, depth) == best


@given(priced_lengths(14), st.integers(14, 40), st.sampled_from([1, 2, 3, 5, 20, None]))
def test_the_quick_bounds_hold_and_the_checker_has_the_same(priced, slots, depth):
    """One is the linear programme of one pack, the other allows one long sequence."""
    lengths, prices = zip(*priced)
    exact = best_pack_value(lengths, prices, slots, depth)
    divisible = _divisible_value(lengths, prices, slots, depth)
    beside_long = _beside_long_value(lengths, prices, slots)
    assert exact <= min(divisible, beside_long)
    assert beside_long <= _divisible_value(lengths, prices, slots, None)
    assert checker._exactly(priced, slots, depth) == exact
    assert checker._divisible(priced, slots, depth) == min(divisible, beside_long)

    limits = [lengths]
    amounts = [slots]
    if depth is not None:
        limits.append([1] * len(lengths))
        amounts.append(depth)
    relaxed = linprog(-np.array(prices), A_ub=limits, b_ub=amounts)
    assert divisible == int(np.floor(-relaxed.fun + 1e-7))


def bound_l2(lengths, slots):
    """Martello and Toth's bound L2, as they write it."""
    best = 0
    for k in range(slots // 2 + 1):
        alone = [length for length in lengths if length > slots / 2]
        large = [length for length in alone if length <= slots - k]
        small = [length for length in lengths if k <= length <= slots / 2]
        rest = sum(small) + sum(large) - len(large) * slots
        more = max(0, -(-rest // slots))
        best = max(best, len(alone) + more)
    return best


def dual_feasible_bound(lengths, slots):
    """The best of u^(k) and phi^(p / S), as Fekete and Schepers write them, over their parameters one by one."""

    def u(k, x):
        return x if (k + 1) * x % 1 == 0 else Fraction((k + 1) * x // 1, k)

    def phi(p, length):
        most = slots // p
        if 2 * length > slots:
            return 1 - Fraction((slots - length) // p, most)
        return Fraction(1, most) if length >= p else 0

    bounds = []
    for k in range(2, 49):
        shares = [Fraction(length, slots) for length in lengths]
        bounds.append(sum(u(k, share) for share in shares))
    for p in set(lengths):
        if 2 * p <= slots <= 64 * p:
            bounds.append(sum(phi(p, length) for length in lengths))
    return math.ceil(max(bounds))


@given(st.data(), st.integers(1, 60))
def test_the_bound_is_never_lower_than_the_published_ones(data, slots):
    lengths = data.draw(st.lists(st.integers(1, slots), max_size=40))
    histogram = histogram_of(lengths, slots)
    for depth in (2, 5, None):
        bound = proven_bound(plain_certificate(histogram, depth), histogram.counts).lower_bound
        assert bound >= max(bound_l2(lengths, slots), dual_feasible_bound(lengths, slots))


def test_the_proof_of_the_long_ones_takes_no_table():
    # 32,768 prices at depth 50: a table for each depth would take hours.
    histogram = LengthHistogram(np.r_[0, np.ones(1 << 15, np.int64)])
    plain = plain_certificate(histogram, 50)
    assert proven_bound(plain, histogram.counts).lower_bound >= 1 << 14
    priced = [pair for pair in zip(plain.lengths, plain.prices) if pair[1]]
    assert checker._divisible(priced, 1 << 15, 50) <= plain.denominator


def test_a_proof_by_hand():
    # Packs of 10 slots, sequences of 6 worth 1/2 + 1/10 and of 4 worth 2/5: 6 + 4 and 4 + 4 fit, worth 1 and 4/5.
    counts = np.zeros(11, np.int64)
    counts[[4, 6]] = 3, 8
    proof = proven_bound(Certificate(10, None, (4, 6), (4, 6), 10), counts)
    assert (proof.best_pack_value, proof.worth, proof.lower_bound) == (
        10,
        6,
        6,
    )  # (3 * 4 + 8 * 6) / 10


# ---- the checker that needs no package -----------------------------------------------------------------------------


@given(small_sets())
def test_the_checker_agrees_with_the_proof(case):
    slots, lengths, depth = case
    packing = pack(histogram_of(lengths, slots), max_sequences_per_pack=depth)
    counts = {length: lengths.count(length) for length in lengths}
    assert faults_of(packing, counts) == faults_of(packing) == ""
    assert faults_of(replace(packing, lp_bound=None)) == ""

    assert "lower_bound" in faults_of(replace(packing, lower_bound=packing.lower_bound + 1))
    assert "lp_bound" in faults_of(replace(packing, lp_bound=packing.lp_bound + 1))
    counts[slots] = counts.get(slots, 0) + 1
    assert "histogram" in faults_of(packing, counts)
    priced = packing.certificate
    if any(priced.prices):
        dearer = tuple(8 * slots * price for price in priced.prices)
        forged = replace(packing, certificate=replace(priced, prices=dearer))
        assert "more than 1" in faults_of(forged)


def faults_of(packing, counts=None):
    """Return what the checker finds wrong; "" for a right recipe."""
    text = json.dumps(packing.recipe())
    try:
        checker.check(json.loads(text, parse_float=Fraction), counts)
    except SystemExit as error:
        return str(error)
    return ""


DAMAGES = (
    lambda recipe: recipe["certificate"]["prices"].__setitem__(-1, 10**9),
    lambda recipe: recipe["certificate"]["prices"].__setitem__(0, None),
    lambda recipe: recipe["certificate"].update(denominator=float("nan")),
    lambda recipe: recipe["accounting"].update(max_sequence_length=1 << 60),
    lambda recipe: recipe["accounting"].update(max_sequences_per_pack="3"),
    lambda recipe: recipe.pop("accounting"),
    lambda recipe: recipe.update(strategies=[1]),
)


def test_checker_and_command_agree_on_a_recipe_and_its_damages(tmp_path, capsys):
    """The checker runs without any package: -S leaves out site-packages."""
    histogram = histogram_of([3, 4, 5, 5, 7, 9], 10)
    recipe = tmp_path / "recipe.json"
    table = tmp_path / "lengths.csv"
    histogram.to_csv(table)
    pack(histogram, max_sequences_per_pack=3).save(recipe)
    whole = json.loads(recipe.read_text())
    plain = [sys.executable, "-I", "-S", "-O", checker.__file__, str(recipe), str(table)]

    assert subprocess.run(plain, capture_output=True).returncode == 0
    proof = ["--histogram", str(table), "--max-sequence-length", "10"]
    assert run_main(main, [str(recipe), *proof[:2]]) == 0
    assert f"{len(histogram.lengths) + 1} sequences" in capsys.readouterr().out
    for damage in DAMAGES:
        damaged = json.loads(json.dumps(whole))
        damage(damaged)
        recipe.write_text(json.dumps(damaged))
        refused = subprocess.run(plain, capture_output=True, text=True)
        assert refused.returncode == 1
        assert refused.stderr.startswith("wrong: ") and refused.stderr.count("\n") == 1
        refusal_of(main, [recipe], capsys, recipe, unchanged=tmp_path)


def test_a_data_set_has_the_lengths_of_its_own_recipe_alone(tmp_path, capsys):
    folder = tmp_path / "data"
    with build_small(write_corpus(tmp_path / "corpus", 6), folder, packer="optimal") as store:
        sequences = store.manifest.sequences
    recipe = folder / "recipe.json"
    assert run_main(main, [str(recipe), "--histogram", str(folder)]) == 0
    assert f"{sequences:,} sequences" in capsys.readouterr().out
    slots = Packing.load(recipe).max_sequence_length
    other = tmp_path / "other.json"
    pack(histogram_of([5, 7], slots), max_sequences_per_pack=3).save(other)
    refusal_of(main, [other, "--histogram", folder], capsys, "other.json", "histogram")
    refusal_of(main, [other, "--workers", 1], capsys, "--workers", "recipe")
    refusal_of(main, [folder, "--histogram", folder], capsys, "--histogram", "data set")
