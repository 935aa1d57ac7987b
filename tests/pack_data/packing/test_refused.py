"""Histograms, packings, recipes and certificates that are refused, each in one line that names field and value."""

# ruff: noqa: F401  names that the table uses

import json
from dataclasses import replace

import numpy as np

from pack_data import pack
from pack_data.packers import PACKERS, get_packer
from pack_data.packing import certificate as proofs
from pack_data.packing import checker
from pack_data.packing.certificate import Certificate, best_pack_value
from pack_data.packing.histogram import BUNDLED, LengthHistogram
from pack_data.packing.packing import Packing, prove
from tests.refusals import faults_of_refusals, rows_of

ONE = LengthHistogram.from_lengths([3], 10)
HISTOGRAM = {"name": "mine", "max_sequence_length": 8, "lengths": [2, 3], "counts": [1, 2]}
# S = 10: two packs of 6 + 3 + 1, one of 6, one of 5 + 5.
HAND = Packing("hand", 10, 3, ((6, 3, 1), (6,), (5, 5)), (2, 1, 1), lower_bound=4, lp_bound=3.6)
PRICED = Certificate(10, None, (4,), (1,), 2)
PROVED = Packing("hand", 10, None, ((4, 4),), (3,), lower_bound=3, lp_bound=3.0, certificate=PRICED)
PRICES = {
    "max_sequence_length": 10,
    "max_sequences_per_pack": 3,
    "lengths": [4, 10],
    "prices": [1, 2],
    "denominator": 2,
}
RECIPE = {
    "accounting": dict(max_sequence_length=6, max_sequences_per_pack=2, packs=2, lower_bound=2, lp_bound=None),
    "certificate": dict(max_sequence_length=6, max_sequences_per_pack=2, lengths=[3], prices=[1], denominator=2),
    "strategies": [[3, 3], [3]],
    "repeats": [1, 1],
}


def counted(*lengths, slots=4, name=""):
    return LengthHistogram.from_lengths(lengths, slots, name)


def checked(strategies, repeats=(1,)):
    Packing("hand", 10, 3, strategies, repeats).check(ONE)


def proved(**changes):
    prices = {name: changes.pop(name) for name in list(changes) if hasattr(PRICED, name)}
    priced = replace(PRICED, **prices)
    return prove(replace(PROVED, certificate=priced, **changes))


def forged(part, **changes):
    """Check a recipe of the checker with a part changed."""
    value = changes.get("to", {**RECIPE["accounting"], **changes})
    if part == "certificate":
        value = {**RECIPE["certificate"], **changes}
    checker.check({**RECIPE, part: value}, None)


def packed_at(depth):
    for name in PACKERS:
        get_packer(name)(counted(1, 2), max_sequences_per_pack=depth)


REFUSED = [
    *rows_of(
        r"""
counted(3, 0) => sequence 1 | length 0
counted(3, 6, name='mine') => mine: | length 6 | max_sequence_length = 4
counted(3.5) => lengths | float64
LengthHistogram(np.array([1, 1])) => length 0
LengthHistogram(np.array([0, -1])) => length 1 | -1
LengthHistogram(np.array([0, 0, 2**62])) => length 2 | 4611686018427387904
LengthHistogram(np.array([0, 2**63], np.uint64), 'mine') => mine: | 9223372036854775808
LengthHistogram([0] * 500 + [4 * 10**18]) => length 500|2.62
LengthHistogram(np.array([0.0, 1.0])) => float64
LengthHistogram(np.array([0])) => \(1,\)
LengthHistogram([[0, 1], [2]]) => counts
LengthHistogram([0, None]) => a histogram|counts
counted(4).with_max_sequence_length(3) => 4 | max_sequence_length = 3
counted(4).rounded_up(3) => multiple_of | 3 | 4
counted(1) + counted(1, slots=5) => 4 | 5
counted(1) + 1 => LengthHistogram | int => TypeError
LengthHistogram.from_json({**HISTOGRAM, 'lengths': [3, 3]}) => lengths | once
LengthHistogram.from_json({**HISTOGRAM, 'counts': [1, 2**62 + 1]}) => ^histogram: counts | 4611686018427387904
# Packings.
checked(((6, 5),)) => \(6, 5\) | 11 | 10
checked(((3, 3, 3, 1),)) => \(3, 3, 3, 1\) | 4 | 3
checked(((3,),), (0,)) => \(3,\) | 0
checked(((3, 4),)) => \(3, 4\) | longest
checked(((3, 0),)) => \(3, 0\) | 1
checked(((),)) => \(\) | 1
checked(((3,), (4,)), (1, 1)) => \(4,\) | \(3,\)
checked(((3,),), (1, 1)) => 1 strategies | 2 repeats
checked(((3,),), (2,)) => 2 sequences | length 3
checked(((3,),), (1.0,)) => 1.0 | int
checked(((True,),)) => True | int
checked(((3,),), (2**62,)) => 2\^62
HAND.check(LengthHistogram.from_lengths([3], 12)) => 10 | 12
Packing.of('hand', ONE, 2, [((1, 1, 1), 1)]) => 3 sequences | 2
Packing.of('hand', ONE, 2, [((9, 2), 1)]) => 11 slots | 10
# Proofs.
proved(prices=(3,), denominator=5) => certificate | more than 1
proved(lower_bound=4) => certificate | 3 | 4
proved(lp_bound=3.5) => lp_bound | 3.5
prove(replace(PROVED, max_sequences_per_pack=4)) => max_sequences_per_pack | None | 4
prove(replace(PROVED, certificate=None)) => hand | certificate
prove(replace(PROVED, strategies=((4, 7),))) => hand | strategy
replace(PRICED, lengths=(11,)) => certificate | 10
replace(PRICED, prices=(1, 2)) => certificate | price
replace(PRICED, denominator=0) => certificate | denominator
replace(PRICED, prices=(-1,)) => certificate | prices
Certificate.from_json({**PRICES, 'lengths': [4, 11]}) => certificate | lengths | 10
# Sums of 2^62 would not fit int64: at 2^62 exactly, too.
best_pack_value([5], [2**61], 10, 2) => 2305843009213693952 | 2
best_pack_value([1], [2**60], 100, None) => 1152921504606846976 | 100
"""
    ),
    ("LengthHistogram.published('wikipedia_128')", ["'wikipedia_128'", *BUNDLED]),
    *(
        (f"{call.format(slots)}", ["max_sequence_length = ", 16777216])
        for call in (
            "counted(1, slots={})",
            "counted(1).with_max_sequence_length({})",
            "pack([1], max_sequence_length={})",
            "Packing('hand', {}, 3, ((1,),), (1,))",
        )
        for slots in ("8.0", "True", "'8'", "None", "[8]", "0", "-1", "10**30")
    ),
    *(
        (call.format(lengths), ["lengths"])
        for call in ("LengthHistogram.from_lengths({}, 4)", "pack({}, max_sequence_length=4)")
        for lengths in ("[[1, 2], [3]]", "['1']", "[None]", "{'a': 1}", "[2**64]", "[True]", "2.5")
    ),
    *((f"packed_at({depth})", ["max_sequences_per_pack = "]) for depth in ("2.0", "True", "'2'", "0", "[2]")),
    *(
        (f"LengthHistogram.from_json({{**HISTOGRAM, '{name}': {value}}})", [f"^histogram: {name}"])
        for name in HISTOGRAM
        for value in ("None", "-1", "2.5", "[1.5]", "[-1, 3]", "[9, 9, 9]", "{'a': 1}", "10**40")
    ),
    *(
        (f"Certificate.from_json({{**PRICES, '{name}': 0}})", ["certificate", name, 1])
        for name in ("max_sequence_length", "max_sequences_per_pack", "denominator")
    ),
]

# The checker in plain Python ends the program.
FORGED = rows_of(
    """
forged('strategies', to=[[3, 3], []]) => at least 1
forged('repeats', to=[1, 0.5]) => at least 1
forged('strategies', to=[[3, 3], [1.5, 1.5]]) => at least 1
forged('strategies', to=[[3, 3, 3]]) => strategy
forged('strategies', to=[[3, 3], [4, 3]]) => 7 tokens
forged('strategies', to=[[3, 3], [1, 1, 1]]) => 3 sequences
forged('accounting', packs=3) => 2 | 3
forged('accounting', lower_bound=3) => 2 | 3
forged('accounting', lp_bound=2) => lp_bound | 1.5
forged('certificate', max_sequence_length=5) => max_sequence_length
forged('certificate', max_sequences_per_pack=None) => max_sequences_per_pack
# A length that stands twice would count twice.
forged('certificate', lengths=[3, 3], prices=[1, 1]) => one price
forged('certificate', prices=[1, 1]) => one price
forged('certificate', lengths=[2, 3], prices=[-1, 1]) => below 0
forged('certificate', lengths=[0, 3], prices=[0, 1]) => at least 1
forged('certificate', denominator=0, prices=[0]) => below 0
forged('certificate', denominator=2.0) => whole number
forged('certificate', prices=[2]) => more than 1
checker.check(RECIPE, {3: 4}) => length 3 | 4
"""
)

TABLES = [
    (b"", ["''", "length,count"]),
    (b"1,2\n", ["'1,2'"]),
    (b"length,count\n1\n", ["line 2", "'1'"]),
    (b"length,count\n1,x\n", ["line 2", "'1,x'"]),
    (b"length,count\n1,2\n11,1\n", ["line 3", 11, "max_sequence_length = 10"]),
    (b"length,count\n0,2\n", ["line 2", "length 0"]),
    (b"length,count\n4,2\n4,2\n", ["line 3", "length 4"]),
    (b"length,count\n4,-2\n", ["line 2", "count -2"]),
    (b"length,count\n4,99999999999999999999\n", ["line 2", "count 99999999999999999999"]),
    (b"length,count\n" + b"1" * 5000 + b",1\n", []),
    (b'length,count\n"' + b"\n" * 300_000, []),
    (b"length,count\n\xff,1\n", ["text table"]),
    (b"length,count\n1\0,2\n", []),
    (f"length,count\n8,{2**61}\n9,{2**61}\n".encode(), ["bad: ", r"2\^62"]),
]


def test_what_cannot_be_packed_or_proved_is_refused(monkeypatch):
    assert prove(PROVED).lower_bound == 3 and checker.check(RECIPE, {3: 3}).startswith("right: 2 packs")
    assert best_pack_value([5], [2**61 - 1], 10, 2) == 2**62 - 2
    faults = faults_of_refusals(REFUSED, globals())
    faults += faults_of_refusals([(*row, SystemExit) for row in FORGED], globals())
    # 10 slots, two prices and depth 3: 60 steps; without a limit on the sequences 20.
    for depth, steps in ((3, 60), (None, 20)):
        monkeypatch.setattr(proofs, "_MOST_STEPS", steps)
        assert best_pack_value([2, 3], [2, 4], 10, depth) == 12
        monkeypatch.setattr(proofs, "_MOST_STEPS", steps - 1)
        call = f"best_pack_value([2, 3], [2, 4], 10, {depth})"
        faults += faults_of_refusals([(call, ["2 prices", "10 slots", steps - 1])], globals())
    assert not faults, "\n".join(faults)


def test_tables_that_are_no_histogram_are_refused(tmp_path):
    path = tmp_path / "bad.csv"
    call = "LengthHistogram.from_csv(path, 10)"
    faults = []
    for content, names in TABLES:
        path.write_bytes(content)
        faults += faults_of_refusals([(call, [path, *names])], {**globals(), "path": path})
    for other in ("/dev/zero", tmp_path, tmp_path / "none"):
        faults += faults_of_refusals([(call, [other, "length,count"])], {**globals(), "path": other})
    assert not faults, "\n".join(faults)


def test_damaged_recipes_are_refused(tmp_path):
    path = tmp_path / "recipe.json"
    HAND.save(path)
    whole = json.loads(path.read_text())
    accounting = whole["accounting"]
    damaged = [
        ({"repeats": None}, ["repeats"]),
        ({"repeats": [3, 1, 1]}, ["accounting"]),
        ({"strategies": [[9, 9], [6], [5, 5]]}, [18, 10]),
        ({"format": "something else"}, ["format", "pack_data recipe 1"]),
        ({"accounting": {**accounting, "tokens": 37}}, ["accounting"]),
        *(({"repeats": [number, 1, 1]}, [r"2\^62"]) for number in (2**63, 2**62, 10**30)),
    ]
    faults = []
    for change, names in [*damaged, (None, ["JSON"])]:
        path.write_text("{" if change is None else json.dumps({**whole, **change}))
        row = ("Packing.load(path)", [path, *names])
        faults += faults_of_refusals([row], {**globals(), "path": path}, unchanged=tmp_path)
    assert not faults, "\n".join(faults)
