"""Check a recipe and its proof with the standard library alone: `python checker.py RECIPE [HISTOGRAM.csv]`.

This file is meant to be read, and shares no code with the program that made the recipe. It checks in exact arithmetic:
1. no pack holds more than S tokens or D sequences;
2. the packs hold exactly the sequences of the histogram, a CSV file `length,count` (skipped without a histogram);
3. no pack that obeys S and D is worth more than 1 at the certificate's prices: each length has a price, in units of
   1 / denominator. So a packing needs at least as many packs as all sequences together are worth (weak duality);
4. `lower_bound` is that worth, rounded up, and `lp_bound` is that worth as a float, or null.
Exit status 0: all rules hold. 1: the first violation is printed.
"""

import csv
import json
import sys
from bisect import bisect
from fractions import Fraction
from itertools import accumulate
from pathlib import Path

_MOST_SLOTS = 1 << 25  # slots of a pack; a longer table would not fit into memory


def check(recipe, counts):
    """Check a recipe, with all floats as fractions; counts: length -> sequences, or None. SystemExit if it is wrong."""
    accounting = recipe["accounting"]
    S = accounting["max_sequence_length"]
    D = accounting["max_sequences_per_pack"]
    packs, placed = _count(recipe["strategies"], recipe["repeats"], S, D)
    stated = accounting["packs"]
    _need(packs == stated, f"{packs} packs, but {stated} in the recipe")
    if counts is not None:
        for length in sorted({*placed, *counts}):
            actual = placed.get(length, 0)
            expected = counts.get(length, 0)
            _need(
                actual == expected,
                f"{actual} sequences of length {length}; the histogram has {expected}",
            )

    certificate = recipe["certificate"]
    _need(certificate, "the recipe has no certificate")
    _need(
        certificate["max_sequence_length"] == S, "the certificate has another max_sequence_length"
    )
    _need(
        certificate["max_sequences_per_pack"] == D,
        "the certificate has another max_sequences_per_pack",
    )
    worth = _worth(placed, certificate, S, D)
    bound = -(-worth.numerator // worth.denominator)
    stated = accounting["lower_bound"]
    _need(bound == stated, f"at least {bound} packs are needed, but lower_bound is {stated}")
    lp_bound = accounting["lp_bound"]
    if lp_bound is not None:
        rounding = max(1, worth) / 10**12
        _need(abs(lp_bound - worth) <= rounding, f"lp_bound is not {float(worth)!r}")
    return f"right: {packs:,} packs; no packing has fewer than {bound:,}"


def _need(holds, otherwise):
    if not holds:
        sys.exit(f"wrong: {otherwise}")


def _count(strategies, repeats, S, D):
    """Return the number of packs, and length -> sequences in all packs."""
    packs = 0
    placed: dict = {}
    _need(len(strategies) == len(repeats), "there must be one repeat count for each strategy")
    for strategy, repeat in zip(strategies, repeats):
        positive = all(type(number) is int and number > 0 for number in (repeat, *strategy))
        _need(
            strategy and positive,
            f"{repeat} times {strategy}: numbers must be whole and at least 1",
        )
        tokens = sum(strategy)
        depth = len(strategy)
        _need(tokens <= S, f"a pack of {tokens} tokens: {strategy}")
        _need(D is None or depth <= D, f"a pack of {depth} sequences: {strategy}")
        packs += repeat
        for length in strategy:
            placed[length] = placed.get(length, 0) + repeat
    return packs, placed


def _worth(placed, certificate, S, D):
    """Check the prices and return the worth of all sequences together, in packs."""
    lengths = certificate["lengths"]
    prices = certificate["prices"]
    unit = certificate["denominator"]
    distinct = len(set(lengths)) == len(lengths)
    _need(
        distinct and len(lengths) == len(prices),
        "there must be one price for each length",
    )
    for number in (unit - 1, *lengths, *prices):
        _need(
            type(number) is int and number >= 0,
            "the denominator, a length or a price is below 0 or not a whole number",
        )
    _need(min(lengths, default=1) > 0, "a length must be at least 1")
    _need(S < _MOST_SLOTS, f"{S} slots; at most {_MOST_SLOTS} can be checked")

    price_of = dict(zip(lengths, prices))
    priced = [pair for pair in price_of.items() if pair[1] > 0]
    proved = _divisible(priced, S, D) <= unit or _exactly(priced, S, D) <= unit
    _need(proved, "a pack is worth more than 1")
    units = sum(count * price_of.get(length, 0) for length, count in placed.items())
    return Fraction(units, unit)


def _exactly(priced, S, D):
    """Return the value of the most valuable pack."""
    # best[c] is the value of the best pack of at most c tokens; each round allows one more sequence.
    best = [0] * (S + 1)
    shortest = min((length for length, _ in priced), default=1)
    if D is None or D * shortest >= S:
        for length, price in priced:
            for tokens in range(length, S + 1):
                best[tokens] = max(best[tokens], best[tokens - length] + price)
        return best[S]

    for _ in range(D):
        before = best[:]
        for length, price in priced:
            without_it = before[: S + 1 - length]
            with_it = [value + price for value in without_it]
            best[length:] = map(max, best[length:], with_it)
    return best[S]


def _divisible(priced, S, D):
    """Return a value that no pack exceeds: the lesser of two bounds that are quick to compute."""
    beside_long = _beside_long(priced, S)
    by_hull = _by_hull(priced, S, D or S)
    return int(min(beside_long, by_hull))


def _beside_long(priced, S):
    """Return the value of the best pack of one sequence longer than S / 2 and parts of the sequences beside it."""
    short = sorted(pair for pair in priced if 2 * pair[0] <= S)
    rates = [Fraction(price, length) for length, price in short]
    best_rates = [0, *accumulate(rates, max)]
    best = S * best_rates[-1]
    for length, price in priced:
        if 2 * length > S:
            room = S - length
            fitting = bisect(short, (room + 1,))
            best = max(best, price + room * best_rates[fitting])
    return best


def _by_hull(priced, S, D):
    """Return the least bound rate * S + D * excess, rate >= 0; excess: the most that a price exceeds rate * length."""
    # Corners of the least concave function above all prices; the best rate is one of its slopes.
    corners = [(0, 0)]
    for pair in sorted(priced):
        while len(corners) > 1:
            before, last = corners[-2:]
            if _slope(before, last) > _slope(before, pair):
                break
            corners.pop()
        if pair[1] > corners[-1][1]:
            corners.append(pair)

    bounds = []
    slopes = map(_slope, corners, corners[1:])
    for rate in [0, *slopes]:
        excess = max(price - rate * length for length, price in corners)
        bounds.append(rate * S + D * excess)
    return min(bounds)


def _slope(a, b):
    return Fraction(b[1] - a[1], b[0] - a[0])


def _read(path):
    return Path(path).read_text(encoding="utf-8-sig")


def _counts(path):
    """Return length -> sequences of a table."""
    counts = {}
    for row in csv.DictReader(_read(path).splitlines()):
        length = int(row["length"])
        counts[length] = int(row["count"])
    return counts


if __name__ == "__main__":
    if sys.argv[1:2] in ([], ["-h"], ["--help"]):
        sys.exit(__doc__)
    try:
        recipe = json.loads(_read(sys.argv[1]), parse_float=Fraction)  # floats exactly
        counts = _counts(sys.argv[2]) if len(sys.argv) > 2 else None
        print(check(recipe, counts))
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        OSError,
        RecursionError,
        TypeError,
        ValueError,
    ) as error:
        sys.exit(
            f"wrong: {' '.join(sys.argv[1:])}: not a recipe in JSON, or not a table with the columns length and count: "
            f"{type(error).__name__}: {ascii(str(error))[:200]}"
        )
