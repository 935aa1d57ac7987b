"""Packing: accounting worked by hand, the rules it checks, and the recipe file."""

import html
import json
import os

import numpy as np
import pytest
from hypothesis import given

import pack_data
from pack_data import spfhp
from pack_data.display import picture
from pack_data.packers import PACKERS, get_packer
from pack_data.packing.histogram import LengthHistogram
from pack_data.packing.packing import Packing, prove
from tests.pack_data.text_corpus import build_small, write_corpus
from tests.pack_data_strategies import depths, histograms
from tests.refusals import refused


@pytest.fixture
def packing():
    # S = 10: two packs of 6+3+1, one of 6, one of 5+5: 8 sequences... 2*3 + 1 + 2 = 9; tokens 2*10 + 6 + 10 = 36 of 40
    # slots.
    return Packing("hand", 10, 3, ((6, 3, 1), (6,), (5, 5)), (2, 1, 1), solve_seconds=1.5, lower_bound=4, lp_bound=3.6)


def test_accounting_by_hand(packing):
    assert packing.packs == 4
    assert packing.sequences == 2 * 3 + 1 + 2 == 9
    assert packing.tokens == 2 * 10 + 6 + 10 == 36
    assert packing.slots == 40
    assert packing.padding_tokens == 4
    assert packing.efficiency == 0.9
    assert packing.packing_factor == 9 / 4
    assert packing.theoretical_speedup == 10 * 9 / 36
    assert packing.largest_depth == 3
    assert packing.gap == 0
    assert packing.placed().tolist() == [0, 2, 0, 2, 0, 2, 3, 0, 0, 0, 0]


def test_nothing_packed():
    packing = Packing("hand", 10, None, (), ())
    assert (packing.packs, packing.sequences, packing.tokens, packing.largest_depth) == (0, 0, 0, 0)
    assert (packing.efficiency, packing.packing_factor, packing.theoretical_speedup) == (1.0, 1.0, 1.0)
    packing.check(LengthHistogram.from_lengths([], 10))
    assert "packs" in pack_data.table(packing)


def test_a_bound_of_no_packs_has_no_share():
    made = Packing("hand", 10, None, ((4,),), (3,), lower_bound=0, lp_bound=0.0)
    assert "3 packs above it" in pack_data.table(made)


def test_normal_form():
    histogram = LengthHistogram.from_lengths([3, 1, 1, 3, 4], 4)
    packing = Packing.of("hand", histogram, 2, [((1, 3), 1), ((4,), 1), ((3, 1), 1), ((), 5), ((2,), 0)])
    assert packing.strategies == ((4,), (3, 1))
    assert packing.repeats == (1, 2)
    packing.check(histogram)


@pytest.mark.parametrize("pack, words", [((1, 1, 1), "3 sequences, the limit is 2"), ((4, 1), "5 slots, a pack has 4")])
def test_packs_beyond_a_limit_are_refused_at_once(pack, words):
    with pytest.raises(ValueError, match=words):
        Packing.of("hand", LengthHistogram.from_lengths([*pack], 4), 2, [(pack, 1)])


def test_how_long_it_took_is_no_part_of_it():
    histogram = LengthHistogram.from_lengths([3], 4)
    assert Packing.of("x", histogram, 1, [((3,), 1)], solve_seconds=1.0) == Packing.of("x", histogram, 1, [((3,), 1)])


@pytest.mark.parametrize(
    "strategies, repeats, names",
    [
        (((6, 5),), (1,), [r"\(6, 5\)", 11, 10]),
        (((3, 3, 3, 1),), (1,), [r"\(3, 3, 3, 1\)", 4, 3]),
        (((3,),), (0,), [r"\(3,\)", 0]),
        (((3, 4),), (1,), [r"\(3, 4\)"]),
        (((3, 0),), (1,), [r"\(3, 0\)"]),
        (((),), (1,), [r"\(\)"]),
        (((3,), (3,)), (1, 1), [r"\(3,\) follows \(3,\)"]),
        (((3,), (4,)), (1, 1), [r"\(4,\) follows \(3,\)"]),
        (((3,),), (1, 1), ["1 strategies", "2 repeats"]),
        (((3,),), (2,), ["2 sequences", "length 3", 1]),
        (((4,),), (1,), ["0 sequences", "length 3", 1]),
        (((3,),), (1.0,), ["1.0"]),
        (((True,),), (1,), [True]),
        (((3,),), (2**62,), [r"2\^62"]),
    ],
)
def test_check_finds_what_is_wrong(strategies, repeats, names):
    with refused("hand", *names):
        Packing("hand", 10, 3, strategies, repeats).check(LengthHistogram.from_lengths([3], 10))


def test_check_wants_the_same_pack_length(packing):
    with refused(10, 12):
        packing.check(LengthHistogram.from_lengths([3], 12))


@given(histogram=histograms(), depth=depths())
def test_a_saved_recipe_comes_back(histogram, depth, tmp_path_factory):
    path = tmp_path_factory.mktemp("recipe") / "recipe.json"
    packing = spfhp.pack(histogram, max_sequences_per_pack=depth)
    packing.save(path)
    assert Packing.load(path) == packing
    assert Packing.load(path).solve_seconds == packing.solve_seconds
    assert [entry.name for entry in path.parent.iterdir()] == ["recipe.json"]  # nothing temporary is left


def test_a_certificate_travels_with_the_recipe(tmp_path):
    histogram = LengthHistogram.from_lengths([3, 4, 5, 5, 7, 9], 10)
    packing = get_packer("optimal")(histogram, max_sequences_per_pack=3)
    packing.save(tmp_path / "recipe.json")
    again = Packing.load(tmp_path / "recipe.json")
    assert again == packing
    assert again.certificate == packing.certificate is not None


def test_saving_fails_whole(tmp_path, packing, monkeypatch):
    packing.save(tmp_path / "recipe.json")
    before = (tmp_path / "recipe.json").read_bytes()
    monkeypatch.setattr(os, "replace", lambda *names: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        packing.save(tmp_path / "recipe.json")
    assert (tmp_path / "recipe.json").read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    "damage, names",
    [
        (lambda recipe: recipe.pop("repeats"), ["repeats"]),
        (lambda recipe: recipe["repeats"].__setitem__(0, 3), ["accounting"]),
        (lambda recipe: recipe["strategies"].__setitem__(0, [9, 9]), [18, 10]),
        (lambda recipe: recipe.update(format="something else"), ["format", "pack_data recipe 1"]),
        (lambda recipe: recipe["accounting"].pop("tokens"), ["accounting"]),
        *(
            (lambda recipe, repeats=repeats: recipe["repeats"].__setitem__(0, repeats), [r"2\^62"])
            for repeats in (2**63, 2**62, 10**30)
        ),
    ],
)
def test_a_damaged_recipe_is_refused(tmp_path, packing, damage, names):
    path = tmp_path / "recipe.json"
    packing.save(path)
    recipe = json.loads(path.read_text())
    damage(recipe)
    path.write_text(json.dumps(recipe))
    with refused(path, *names, unchanged=tmp_path):
        Packing.load(path)


def test_a_recipe_that_is_no_json(tmp_path):
    (tmp_path / "recipe.json").write_text("{")
    with refused("recipe.json", "JSON"):
        Packing.load(tmp_path / "recipe.json")


def test_the_table_says_what_matters(packing):
    table = pack_data.table(packing, "my data")
    for text in ("HAND", "my data", "at most 3 sequences", "90.000%", "2.250", "proven optimal", "1.50 s"):
        assert text in table
    above_the_bound = Packing("x", 10, 1, ((5,),), (4,), lower_bound=2)
    assert "2 packs above it" in pack_data.table(above_the_bound)
    nearly_full = "rows are nearly full without packing"
    assert nearly_full not in pack_data.table(Packing("x", 10, 1, ((9,),), (4,)))
    assert f"of at most 1.000: {nearly_full}" in pack_data.table(Packing("x", 10, 1, ((10,),), (4,)))


ODD = (None, True, -1, 0, 10**40, 0.5, "", "x", [], [[1]], {"a": 1}, ["1"], [1.0], [True], ...)


def test_every_changed_field_of_a_recipe_is_one_line(tmp_path):
    """Any field of a recipe and its certificate, replaced by any odd value or taken out; what is read is whole."""
    path = tmp_path / "recipe.json"
    get_packer("optimal")(LengthHistogram.from_lengths([1, 2, 3, 5, 8, 8], 10), max_sequences_per_pack=3).save(path)
    recipe = json.loads(path.read_text())
    places = [(recipe, name) for name in recipe]
    places += [(recipe[outer], name) for outer in ("accounting", "certificate") for name in recipe[outer]]
    places += [(recipe["strategies"], 0), (recipe["strategies"][0], 0), (recipe["repeats"], 0)]
    places += [(recipe["certificate"]["lengths"], 0), (recipe["certificate"]["prices"], 0)]
    free = ("solve_seconds", "lp_bound", "certificate", "prices", "denominator")
    refused = 0
    for holder, name in places:
        kept = holder[name]
        for value in ODD:
            if value is ...:
                del holder[name]
            else:
                holder[name] = value
            path.write_text(json.dumps(recipe))
            try:
                packing = Packing.load(path)
                packing.placed()
                if packing.certificate is not None:
                    prove(packing)
            except ValueError as error:
                refused += 1
                assert len(str(error).splitlines()) == 1 and len(str(error)) < 600
            else:
                assert name in free or packing.to_json() == recipe["accounting"], (name, value)
            if isinstance(holder, list) and value is ...:
                holder.insert(name, kept)
            else:
                holder[name] = kept
    assert refused > 300


@pytest.mark.parametrize("value", [8.0, True, "8", 0, -1, [8], 2**30])
def test_slots_of_a_pack_are_a_whole_number(value):
    with refused("max_sequence_length = ", 1):
        Packing("hand", value, 3, ((1,),), (1,))


@pytest.mark.parametrize("name", PACKERS)
@pytest.mark.parametrize("value", [2.0, True, "2", 0, -1, [2]])
def test_a_packing_depth_is_a_whole_number_in_every_packer(name, value):
    with refused("max_sequences_per_pack = ", 1):
        get_packer(name)(LengthHistogram.from_lengths([1, 2], 4), max_sequences_per_pack=value)
    as_numpy = get_packer(name)(LengthHistogram.from_lengths([1, 2], 4), max_sequences_per_pack=np.int64(2))
    assert as_numpy == get_packer(name)(LengthHistogram.from_lengths([1, 2], 4), max_sequences_per_pack=2)


def test_a_notebook_shows_the_accounting(tmp_path):
    packed = pack_data.pack([300, 200, 512, 17], max_sequence_length=512)
    shown = packed._repr_html_()
    assert shown == packed.packing._repr_html_()
    accounting = json.loads(html.unescape(shown)[len("<pre>") : -len("</pre>")])
    assert accounting == packed.packing.to_json()
    with build_small(write_corpus(tmp_path / "texts", 6), tmp_path / "a<b") as store:
        text = store._repr_html_()
        assert "a&lt;b" in text and f"{len(store):,} packs" in text and f"{store.manifest.efficiency:.1%}" in text


def test_results_and_data_sets_draw_their_padding(tmp_path, monkeypatch):
    """The numbers of a stored data set are those of its packing: one row a sequence, and the packs."""
    drawn = []
    monkeypatch.setattr(picture, "write", lambda pictures, path: drawn.extend(pictures))
    packed = pack_data.pack([300, 200, 512, 17], max_sequence_length=512)
    with build_small(write_corpus(tmp_path / "texts", 6), tmp_path / "data") as store:
        for each in (packed, packed.packing, store):
            pack_data.plot(each, "a.svg")
        slots, manifest = store.schema.max_sequence_length, store.manifest
    tokens, padding = drawn[0].series
    assert drawn[0] == drawn[1] and tokens.values == (1029,) * 2 and padding.values == (4 * 512 - 1029, 3 * 512 - 1029)
    rows = [manifest.sequences, manifest.packs]
    assert drawn[2].series[1].values == tuple(count * slots - manifest.tokens for count in rows)
