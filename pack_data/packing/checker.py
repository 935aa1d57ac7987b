"""Checks a recipe and its proof with Python alone, no package: `python checker.py RECIPE [HISTOGRAM.csv]`.

Written to be read. It shares no line with the program that made the recipe. What it establishes, in whole numbers:
1. no pack holds more than S tokens or D sequences;
2. the packs hold exactly the sequences of the histogram, a CSV file `length,count` (without one this is not checked);
3. no pack that obeys S and D is worth more than 1 at the certificate's prices: each length has a price, in units of
   1 / denominator. So a packing needs as many packs as all sequences together are worth (weak duality);
4. `lower_bound` is that number, rounded up, and `lp_bound` that number as a float, or null.
Exit status 0: all hold. 1: the first that does not is printed.
"""

import csv
import json
import sys
from bisect import bisect
from fractions import Fraction
from itertools import accumulate
from pathlib import Path


def divisible(priced, S, D):
    """What no pack is worth more than, the less of two: one sequence longer than S / 2 and parts of those that fit in
    beside it; for any rate >= 0, rate * S + D * (the most that a price exceeds rate * length)."""
    short, D = sorted(each for each in priced if 2 * each[0] <= S), D or S
    rates = [0, *accumulate((Fraction(price, length) for length, price in short), max)]
    beside = [price + (S - long) * rates[bisect(short, (S - long + 1,))] for long, price in priced if 2 * long > S]
    corners = [(0, 0)]  # of the least concave function above all prices; the best rate is one of its slopes
    for length, price in sorted(priced):
        while len(corners) > 1 and _slope(corners[-2], corners[-1]) <= _slope(corners[-2], (length, price)):
            corners.pop()
        if price > corners[-1][1]:
            corners.append((length, price))
    slopes = [_slope(a, b) for a, b in zip(corners, corners[1:])] + [0]
    hulls = (rate * S + D * max(price - rate * length for length, price in corners) for rate in slopes)
    return int(min(max([S * rates[-1], *beside]), *hulls))


def _slope(a, b):
    return Fraction(b[1] - a[1], b[0] - a[0])


def exactly(priced, S, D):
    """The most valuable pack. best[c]: of at most c tokens, and of at most as many sequences as there were rounds."""
    best = [0] * (S + 1)
    if D is None or D * min((length for length, _ in priced), default=1) >= S:
        for length, price in priced:
            for tokens in range(length, S + 1):
                best[tokens] = max(best[tokens], best[tokens - length] + price)
        return best[S]
    for _ in range(D):
        before = best[:]
        for length, price in priced:
            best[length:] = map(max, best[length:], (value + price for value in before[: S + 1 - length]))
    return best[S]


def need(holds, otherwise):
    return holds or sys.exit(f"wrong: {otherwise}")


def check(recipe, counts):
    said, certificate, lp = recipe["accounting"], recipe["certificate"], recipe["accounting"]["lp_bound"]
    S, D, packs = said["max_sequence_length"], said["max_sequences_per_pack"], 0
    placed: dict = {}  # length -> sequences
    need(len(recipe["strategies"]) == len(recipe["repeats"]), "strategies and repeats are not as many")
    for strategy, repeat in zip(recipe["strategies"], recipe["repeats"]):
        whole = all(type(number) is int and number > 0 for number in (repeat, *strategy))
        need(strategy and whole, f"{repeat} times {strategy}: it takes whole numbers of at least 1")
        need(sum(strategy) <= S, f"a pack of {sum(strategy)} tokens: {strategy}")
        need(D is None or len(strategy) <= D, f"a pack of {len(strategy)} sequences: {strategy}")
        packs += repeat
        for length in strategy:
            placed[length] = placed.get(length, 0) + repeat
    need(packs == said["packs"], f"{packs} packs; the recipe says {said['packs']}")
    for length in sorted({*placed, *counts}) if counts is not None else ():
        has, wanted = placed.get(length, 0), counts.get(length, 0)
        need(has == wanted, f"{has} sequences of length {length}; the histogram has {wanted}")
    need(certificate, "the recipe has no certificate")
    lengths, prices, one = certificate["lengths"], certificate["prices"], certificate["denominator"]
    need((certificate["max_sequence_length"], certificate["max_sequences_per_pack"]) == (S, D), "other limits")
    need(len(lengths) == len(set(lengths)) == len(prices) and min(lengths, default=1) > 0, "one price for each length")
    whole = all(type(number) is int and number >= 0 for number in (one - 1, *lengths, *prices))
    need(whole and S < 1 << 25, "the denominator, or a price, is below 0 or no whole number")
    priced = [(length, price) for length, price in zip(lengths, prices) if price > 0]
    need(divisible(priced, S, D) <= one or exactly(priced, S, D) <= one, "a pack is worth more than 1")
    worth = Fraction(sum(placed.get(length, 0) * price for length, price in zip(lengths, prices))) / one
    bound = -(-worth.numerator // worth.denominator)
    need(bound == said["lower_bound"], f"at least {bound} packs are needed; the recipe says {said['lower_bound']}")
    need(lp is None or abs(lp - worth) <= max(1, worth) / 10**12, f"lp_bound is not {float(worth)!r}")
    return f"right: {packs:,} packs; no packing has fewer than {bound:,}"


if __name__ == "__main__":
    if sys.argv[1:2] in ([], ["-h"], ["--help"]):
        sys.exit(__doc__)
    try:
        given, *table = (Path(path).read_text(encoding="utf-8-sig").splitlines() for path in sys.argv[1:3])
        rows = [(int(row["length"]), int(row["count"])) for row in csv.DictReader(table[0])] if table else None
        print(check(json.loads("\n".join(given), parse_float=Fraction), rows and dict(rows)))  # floats exactly
    except (ArithmeticError, AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError) as error:
        sys.exit(f"wrong: no recipe, or no histogram: {type(error).__name__}: {ascii(str(error))[:200]}")
