"""The bound is checked against the true optimum by exhaustive search, and forged certificates are refused."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from itertools import combinations_with_replacement
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog

from pack_data.cli.command import run_main
from pack_data.inspection.verify_command import main
from pack_data.optimal import pack
from pack_data.packing import certificate, checker
from pack_data.packing.certificate import (
    Certificate,
    _beside_long_value,
    _divisible_value,
    best_pack_value,
    plain_certificate,
    proven_bound,
)
from pack_data.packing.histogram import LengthHistogram
from pack_data.packing.packing import Packing, prove
from tests.pack_data.text_corpus import build_small, write_corpus
from tests.refusals import refusal_of, refused


def fewest_packs(lengths, slots, depth):
    """The true optimum by dynamic programming over the multisets that remain; exponential, for a few sequences."""

    @lru_cache(maxsize=None)
    def fewest(left):
        if not left:
            return 0
        first, rest = left[0], left[1:]  # the first sequence goes somewhere: try every set of companions
        best = 1 + fewest(rest)
        seen = set()

        def companions(held, total, start, others):
            nonlocal best
            if held not in seen:
                seen.add(held)
                best = min(best, 1 + fewest(others))
            if len(held) + 1 < depth:
                for index in range(start, len(others)):
                    if total + others[index] <= slots:
                        companions(
                            held + (others[index],), total + others[index], index, others[:index] + others[index + 1 :]
                        )

        companions((), first, 0, rest)
        return best

    return fewest(tuple(sorted(lengths, reverse=True)))


small_sets = st.integers(1, 12).flatmap(
    lambda S: st.tuples(
        st.just(S), st.lists(st.integers(1, S), min_size=0, max_size=9), st.sampled_from([1, 2, 3, 4, None])
    )
)


@given(small_sets)
def test_the_bound_never_exceeds_the_true_optimum_and_the_packs_never_fall_below_it(case):
    slots, lengths, depth = case
    packing = pack(LengthHistogram.from_lengths(np.array(lengths, int), slots), max_sequences_per_pack=depth)
    truth = fewest_packs(lengths, slots, depth or len(lengths))
    assert packing.lower_bound <= truth <= packing.packs
    assert prove(packing).lower_bound == packing.lower_bound
    # The bound is the linear programme's: at most one pack below the truth for all but contrived sets, never two here.
    assert truth - packing.lower_bound <= 1
    assert packing.packs - truth <= 1


def test_a_length_above_the_pack_has_no_price():
    fields = {
        "max_sequence_length": 10,
        "max_sequences_per_pack": 3,
        "lengths": [4, 10],
        "prices": [1, 2],
        "denominator": 2,
    }
    assert Certificate.from_json(fields).lengths == (4, 10)
    with refused("certificate", "lengths", 10):
        Certificate.from_json({**fields, "lengths": [4, 11]})


def test_the_smallest_limits_are_limits():
    fields = {"max_sequence_length": 1, "max_sequences_per_pack": 1, "lengths": [1], "prices": [0], "denominator": 1}
    assert Certificate.from_json(fields).to_json() == fields
    for name in ("max_sequence_length", "max_sequences_per_pack", "denominator"):
        with refused("certificate", name, 1):
            Certificate.from_json({**fields, name: 0})


def test_packs_that_int64_might_not_hold_are_refused():
    """At 2^62 exactly, too: sums within the programme go beyond the best pack."""
    assert best_pack_value([5], [2**61 - 1], 10, 2) == 2**62 - 2
    for length, price, slots, depth in ((5, 2**61, 10, 2), (1, 2**60, 100, None)):
        with refused(price, depth or slots):
            best_pack_value([length], [price], slots, depth)


@pytest.mark.parametrize("depth", [3, None])
def test_a_programme_of_one_step_too_many_is_refused(depth, monkeypatch):
    """10 slots, two prices and depth 3: 60 steps; without a limit on the sequences 20."""
    steps = 60 if depth else 20
    monkeypatch.setattr(certificate, "_MOST_STEPS", steps)
    value = best_pack_value([2, 3], [2, 4], 10, depth)
    monkeypatch.setattr(certificate, "_MOST_STEPS", steps - 1)
    with refused("2 prices", "10 slots", f"{steps - 1}"):
        best_pack_value([2, 3], [2, 4], 10, depth)
    assert value == 12


def test_the_exhaustive_search_knows_hand_worked_cases():
    assert fewest_packs([5, 5, 5], 10, 9) == 2
    assert fewest_packs([6, 5, 5, 4], 10, 9) == 2  # 6 + 4, 5 + 5
    assert fewest_packs([2, 2, 2, 2, 2], 10, 2) == 3
    assert fewest_packs([], 10, 3) == 0


@given(
    st.lists(st.tuples(st.integers(1, 14), st.integers(0, 30)), min_size=1, max_size=7, unique_by=lambda pair: pair[0]),
    st.integers(1, 14),
    st.sampled_from([1, 2, 3, 5, None]),
)
def test_best_pack_value_is_that_of_the_best_of_all_packs(priced, slots, depth):
    priced = [(length, price) for length, price in priced if length <= slots]
    best = 0
    for size in range(1, (depth or slots) + 1):
        for chosen in combinations_with_replacement(priced, size):
            if sum(length for length, _ in chosen) <= slots:
                best = max(best, sum(price for _, price in chosen))
        if size * min([length for length, _ in priced], default=slots + 1) > slots:
            break
    assert best_pack_value([length for length, _ in priced], [price for _, price in priced], slots, depth) == best


@given(
    st.lists(st.tuples(st.integers(1, 14), st.integers(0, 30)), min_size=1, max_size=7, unique_by=lambda pair: pair[0]),
    st.integers(14, 40),
    st.sampled_from([1, 2, 3, 5, None]),
)
def test_the_quick_bound_is_the_linear_programme_of_one_pack(priced, slots, depth):
    lengths, prices = map(list, zip(*priced))
    quick = _divisible_value(lengths, prices, slots, depth)
    assert quick >= best_pack_value(lengths, prices, slots, depth)
    limits = [lengths] if depth is None else [lengths, [1] * len(lengths)]
    relaxed = linprog([-price for price in prices], A_ub=limits, b_ub=[slots] if depth is None else [slots, depth])
    assert quick == int(np.floor(-relaxed.fun + 1e-7))


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 30)), min_size=1, max_size=7, unique_by=lambda pair: pair[0]),
    st.integers(1, 40),
)
def test_the_quick_bound_beside_a_long_sequence_holds_for_whole_ones(priced, slots):
    lengths, prices = zip(*([pair for pair in priced if pair[0] <= slots] or [(slots, 1)]))
    quick = _beside_long_value(lengths, prices, slots)
    assert best_pack_value(lengths, prices, slots, None) <= quick
    assert quick <= _divisible_value(lengths, prices, slots, None)


def test_the_quick_bound_beside_a_long_sequence_by_hand():
    # 10 slots: 6 + 4 is worth 9. In parts, 10 slots of the longer one would be worth 10.
    assert _divisible_value([4, 6], [3, 6], 10, None) == 10 and _beside_long_value([4, 6], [3, 6], 10) == 9
    assert _beside_long_value([5], [5], 10) == 10  # two halves of a pack


def bound_l2(lengths, slots):
    """Martello and Toth's bound L2, as they write it."""
    best = 0
    for k in range(slots // 2 + 1):
        whole = [length for length in lengths if length > slots - k]
        large = [length for length in lengths if slots / 2 < length <= slots - k]
        small = [length for length in lengths if k <= length <= slots / 2]
        rest = sum(small) - (len(large) * slots - sum(large))
        best = max(best, len(whole) + len(large) + max(0, -(-rest // slots)))
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

    sums = [sum(u(k, Fraction(length, slots)) for length in lengths) for k in range(2, 49)]
    occurring = [length for length in set(lengths) if 2 * length <= slots <= 64 * length]
    return math.ceil(max(sums + [sum(phi(p, length) for length in lengths) for p in occurring]))


@given(
    st.integers(1, 60).flatmap(lambda slots: st.tuples(st.just(slots), st.lists(st.integers(1, slots), max_size=40)))
)
def test_the_bound_is_never_lower_than_the_published_ones(case):
    slots, lengths = case
    histogram = LengthHistogram.from_lengths(np.array(lengths, int), slots)
    for depth in (2, 5, None):
        bound = proven_bound(plain_certificate(histogram, depth), histogram.counts).lower_bound
        assert bound >= max(bound_l2(lengths, slots), dual_feasible_bound(lengths, slots))


def test_the_proof_of_the_long_ones_takes_no_table():
    # 100,000 prices at depth 50: a table for each depth would take hours.
    histogram = LengthHistogram(np.r_[0, np.ones(1 << 17, np.int64)])
    plain = plain_certificate(histogram, 50)
    assert proven_bound(plain, histogram.counts).lower_bound >= 1 << 16
    priced = [pair for pair in zip(plain.lengths, plain.prices) if pair[1]]
    assert checker._divisible(priced, 1 << 17, 50) <= plain.denominator


@given(small_sets)
def test_plain_prices_never_exceed_the_true_optimum(case):
    slots, lengths, depth = case
    histogram = LengthHistogram.from_lengths(np.array(lengths, int), slots)
    proof = proven_bound(plain_certificate(histogram, depth), histogram.counts)
    room = slots // min(lengths, default=1)  # sequences of the shortest length in a pack: a limit as well
    least = max(-(-sum(lengths) // slots), -(-len(lengths) // min(depth or room, room)))
    assert least <= proof.lower_bound <= fewest_packs(lengths, slots, depth or len(lengths))


def test_a_proof_by_hand():
    # Packs of 10 slots, sequences of 6 worth 1/2 + 1/10 and of 4 worth 2/5: 6 + 4 and 4 + 4 fit, worth 1 and 4/5.
    counts = np.zeros(11, np.int64)
    counts[[4, 6]] = 3, 8
    proof = proven_bound(Certificate(10, None, (4, 6), (4, 6), 10), counts)
    assert (proof.best_pack_value, proof.worth, proof.lower_bound) == (10, 6, 6)  # (3 * 4 + 8 * 6) / 10


@pytest.fixture(scope="module")
def squad():
    return pack(LengthHistogram.published("squad_1_1_384"), max_sequences_per_pack=3)


@pytest.mark.parametrize(
    "change, certified, names",
    [
        ({}, lambda c: {"prices": (*c.prices[:-1], c.prices[-1] + c.denominator // 100)}, ["more than 1"]),
        ({}, lambda c: {"denominator": c.denominator - 1}, ["more than 1"]),
        ({"lower_bound": 40_196}, lambda c: {}, [40_195, 40_196]),
        ({"max_sequences_per_pack": 4}, lambda c: {}, ["max_sequences_per_pack", 3, 4]),
        ({"lp_bound": 40_194.0}, lambda c: {}, ["lp_bound", 40_194.0]),
    ],
)
def test_a_forged_proof_is_refused(squad, change, certified, names):
    forged = replace(squad.certificate, **certified(squad.certificate))
    with refused("certificate", *names):
        prove(replace(squad, certificate=forged, **change))


def test_a_recipe_is_proved_again_from_its_file(tmp_path, squad, capsys):
    path = tmp_path / "recipe.json"
    squad.save(path)
    assert prove(Packing.load(path)) == prove(squad)
    assert run_main(main, [str(path)]) == 0
    assert "40,195" in capsys.readouterr().out


def forge(path, change):
    recipe = json.loads(path.read_text())
    change(recipe)
    path.write_text(json.dumps(recipe))


def raise_price(recipe):
    recipe["certificate"]["prices"][-1] *= 2


CHANGES = [
    raise_price,
    lambda recipe: recipe["accounting"].update(lower_bound=recipe["accounting"]["lower_bound"] + 1),
    lambda recipe: recipe["certificate"]["prices"].pop(0),
    lambda recipe: recipe["certificate"].update(denominator="1"),
    lambda recipe: recipe.update(certificate=None),
    lambda recipe: recipe["certificate"].pop("denominator"),
    lambda recipe: recipe["accounting"].update(lp_bound=recipe["accounting"]["lp_bound"] + 1e-6),
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_forged_recipe_is_one_line_and_status_2(change, tmp_path, squad, capsys):
    path = tmp_path / "recipe.json"
    squad.save(path)
    forge(path, change)
    refusal_of(main, [path], capsys, path, unchanged=tmp_path)


def test_a_packing_made_by_hand_breaks_no_limit_unseen():
    priced = Certificate(10, None, (4,), (1,), 2)
    packing = Packing("hand", 10, None, ((4, 4),), (3,), lower_bound=3, lp_bound=3.0, certificate=priced)
    assert prove(packing).lower_bound == 3
    for strategies in (((4, 7),), ((40,),), ((0,),)):  # too much, a length above the pack, none
        with refused("hand", "strategy"):
            prove(replace(packing, strategies=strategies))
    with refused("hand", "certificate"):
        prove(replace(packing, certificate=None))
    for wrong in ({"lengths": (11,)}, {"prices": (1, 2)}, {"denominator": 0}, {"prices": (-1,)}):
        with refused("certificate", "at least|ascend"):
            replace(priced, **wrong)


# ---- that a recipe packs what it is said to ------------------------------------------------------------------------


def test_a_recipe_is_held_against_the_histogram(tmp_path, squad, capsys):
    recipe, table = tmp_path / "recipe.json", tmp_path / "lengths.csv"
    squad.save(recipe)
    LengthHistogram.published("squad_1_1_384").to_csv(table)
    for source in ("squad_1_1_384", str(table)):
        assert run_main(main, [str(recipe), "--histogram", source]) == 0
        assert "packs exactly the 88,641 sequences" in capsys.readouterr().out.replace("\n", " ")
    lines = table.read_text().splitlines()
    table.write_text("\n".join(lines[:-1]))  # the recipe drops nothing, but the data lacks the longest
    refusal_of(main, [recipe, "--histogram", table], capsys, recipe, "the histogram has 0")


def test_a_data_set_s_own_recipe_packs_its_own_packs(tmp_path, capsys):
    data = tmp_path / "data"
    with build_small(write_corpus(tmp_path / "corpus", 10), data, packer="optimal") as store:
        sequences = store.manifest.sequences
    assert run_main(main, [str(data / "recipe.json"), "--histogram", str(data)]) == 0
    assert f"exactly the {sequences:,} sequences of {data}" in capsys.readouterr().out
    other = LengthHistogram.from_lengths([5, 7], Packing.load(data / "recipe.json").max_sequence_length)
    pack(other, max_sequences_per_pack=3).save(tmp_path / "other.json")
    refusal_of(main, [tmp_path / "other.json", "--histogram", data], capsys, "other.json", "the histogram has")
    refusal_of(main, [tmp_path / "other.json", "--workers", 1], capsys, "--workers", "recipe")
    refusal_of(main, [data, "--histogram", data], capsys, "--histogram", "data set")


# ---- the checker that needs no package -----------------------------------------------------------------------------


def checked(packing, counts=None):
    """None where the checker finds all right, else what it says."""
    recipe = json.loads(
        json.dumps(
            {
                "accounting": packing.to_json(),
                "certificate": packing.certificate and packing.certificate.to_json(),
                "strategies": packing.strategies,
                "repeats": packing.repeats,
            }
        ),
        parse_float=checker.Fraction,
    )
    try:
        checker.check(recipe, counts)
    except SystemExit as error:
        return str(error)
    return None


@given(small_sets)
def test_the_checker_agrees_with_the_proof(case):
    slots, lengths, depth = case
    histogram = LengthHistogram.from_lengths(np.array(lengths, int), slots)
    packing = pack(histogram, max_sequences_per_pack=depth)
    counts = {length: lengths.count(length) for length in lengths}
    for right in (checked(packing, counts), checked(packing), checked(replace(packing, lp_bound=None))):
        assert right is None
    assert "needed, but lower_bound is" in checked(replace(packing, lower_bound=packing.lower_bound + 1))
    assert "lp_bound is not" in checked(replace(packing, lp_bound=packing.lp_bound + 1))
    assert "the histogram has" in checked(packing, {**counts, slots: counts.get(slots, 0) + 1})
    if any(packing.certificate.prices):
        dearer = replace(packing.certificate, prices=tuple(8 * slots * each for each in packing.certificate.prices))
        assert "worth more than 1" in checked(replace(packing, certificate=dearer))


@given(
    st.lists(st.tuples(st.integers(1, 14), st.integers(1, 30)), min_size=1, max_size=7, unique_by=lambda pair: pair[0]),
    st.integers(14, 40),
    st.sampled_from([1, 2, 3, 5, 20, None]),
)
def test_the_checker_values_packs_as_the_proof_does(priced, slots, depth):
    lengths, prices = zip(*priced)
    assert checker._exactly(priced, slots, depth) == best_pack_value(lengths, prices, slots, depth)
    quick = _divisible_value(lengths, prices, slots, depth), _beside_long_value(lengths, prices, slots)
    assert checker._divisible(priced, slots, depth) == min(quick)


BY_HAND = {
    "accounting": dict(max_sequence_length=6, max_sequences_per_pack=2, packs=2, lower_bound=2, lp_bound=None),
    "certificate": dict(max_sequence_length=6, max_sequences_per_pack=2, lengths=[3], prices=[1], denominator=2),
    "strategies": [[3, 3], [3]],
    "repeats": [1, 1],
}


@pytest.mark.parametrize(
    "part, change, names",
    [
        ("strategies", [[3, 3], []], ["at least 1"]),
        ("repeats", [1, 0.5], ["at least 1"]),
        ("strategies", [[3, 3], [1.5, 1.5]], ["at least 1"]),
        ("strategies", [[3, 3, 3]], ["strategy"]),
        ("strategies", [[3, 3], [3, 3, 0]], ["at least 1"]),
        ("strategies", [[3, 3], [4, 3]], ["7 tokens"]),
        ("strategies", [[3, 3], [1, 1, 1]], ["3 sequences"]),
        ("accounting", {"packs": 3}, [2, 3]),
        ("accounting", {"lower_bound": 3}, [2, 3]),
        ("accounting", {"lp_bound": 2}, ["lp_bound", 1.5]),
        ("certificate", {"max_sequence_length": 5}, ["max_sequence_length"]),
        ("certificate", {"max_sequences_per_pack": None}, ["max_sequences_per_pack"]),
        ("certificate", {"lengths": [3, 3], "prices": [1, 1]}, ["one price"]),  # a length twice would count twice
        ("certificate", {"prices": [1, 1]}, ["one price"]),
        ("certificate", {"lengths": [2, 3], "prices": [-1, 1]}, ["below 0"]),  # a pack with it seems to be cheap
        ("certificate", {"lengths": [0, 3], "prices": [0, 1]}, ["at least 1"]),
        ("certificate", {"denominator": 0, "prices": [0]}, ["below 0"]),
        ("certificate", {"denominator": 2.0}, ["whole number"]),
        ("certificate", {"prices": [2]}, ["more than 1"]),
    ],
)
def test_the_checker_finds_every_forged_field(part, change, names):
    assert checker.check(BY_HAND, {3: 3}).startswith("right: 2 packs")
    forged = {**BY_HAND, part: {**BY_HAND[part], **change} if isinstance(change, dict) else change}
    with refused("wrong: ", *names, kind=SystemExit):
        checker.check(forged, None)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda recipe: recipe["certificate"]["prices"].__setitem__(0, None),
        lambda recipe: recipe["certificate"]["prices"].__setitem__(0, float("nan")),
        lambda recipe: recipe["certificate"].update(prices=None),
        lambda recipe: recipe["certificate"].update(denominator=float("nan")),
        lambda recipe: recipe["accounting"].update(max_sequence_length=1 << 60),
        lambda recipe: recipe["accounting"].update(max_sequences_per_pack="3"),
        lambda recipe: recipe["accounting"].update(lp_bound=float("inf")),
        lambda recipe: recipe.pop("accounting"),
        lambda recipe: recipe.update(strategies=[1]),
        lambda recipe: recipe.update(repeats={"a": 1}),
    ],
)
def test_the_checker_says_what_is_wrong_in_one_line(tmp_path, squad, wrong):
    recipe = tmp_path / "recipe.json"
    squad.save(recipe)
    given = json.loads(recipe.read_text())
    wrong(given)
    recipe.write_text(json.dumps(given))
    refused = subprocess.run([sys.executable, checker.__file__, str(recipe)], capture_output=True, text=True)
    assert refused.returncode == 1 and refused.stderr.startswith("wrong: ") and refused.stderr.count("\n") == 1


def test_the_checker_is_short_and_runs_without_any_package(tmp_path, squad):
    source = Path(checker.__file__)
    assert len(source.read_text().splitlines()) <= 220
    recipe, table = tmp_path / "recipe.json", tmp_path / "lengths.csv"
    squad.save(recipe)
    LengthHistogram.published("squad_1_1_384").to_csv(table)
    command = [sys.executable, "-I", "-S", "-O", str(source), str(recipe), str(table)]  # -S: no package is found
    assert subprocess.run(command, capture_output=True).returncode == 0
    forge(recipe, raise_price)
    refused = subprocess.run(command, capture_output=True, text=True)
    assert refused.returncode == 1 and refused.stderr == "wrong: a pack is worth more than 1\n"
