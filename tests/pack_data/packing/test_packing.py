"""Packing: accounting worked by hand, the rules it checks, and the recipe file."""

import html
import json
from dataclasses import replace

import pytest
from hypothesis import given

import pack_data
from pack_data import spfhp
from pack_data.display import accounting
from pack_data.packers import get_packer
from pack_data.packing.histogram import LengthHistogram
from pack_data.packing.packing import Packing, prove
from tests.pack_data.text_corpus import build_small, write_corpus
from tests.pack_data_strategies import depths, histograms


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
    for name in ("packs", "sequences", "tokens", "largest_depth"):
        assert getattr(packing, name) == 0
    for name in ("efficiency", "packing_factor", "theoretical_speedup"):
        assert getattr(packing, name) == 1.0
    packing.check(LengthHistogram.from_lengths([], 10))
    assert "packs" in pack_data.table(packing)
    assert replace(packing, solve_seconds=1.0) == packing
    loose = Packing("hand", 10, None, ((4,),), (3,), lower_bound=0, lp_bound=0.0)
    assert "3 packs above it" in pack_data.table(loose)


def test_normal_form():
    histogram = LengthHistogram.from_lengths([3, 1, 1, 3, 4], 4)
    packing = Packing.of("hand", histogram, 2, [((1, 3), 1), ((4,), 1), ((3, 1), 1), ((), 5), ((2,), 0)])
    assert packing.strategies == ((4,), (3, 1))
    assert packing.repeats == (1, 2)
    packing.check(histogram)


@given(histogram=histograms(), depth=depths())
def test_a_saved_recipe_comes_back(histogram, depth, tmp_path_factory):
    path = tmp_path_factory.mktemp("recipe") / "recipe.json"
    packing = spfhp.pack(histogram, max_sequences_per_pack=depth)
    packing.save(path)
    assert Packing.load(path) == packing
    assert Packing.load(path).solve_seconds == packing.solve_seconds
    assert [entry.name for entry in path.parent.iterdir()] == ["recipe.json"]  # nothing temporary is left


ODD = (None, True, -1, 0, 10**40, 0.5, "", "x", [], [[1]], {"a": 1}, ["1"], [1.0], [True], ...)


def places_in(recipe):
    """Yield every list and dictionary of a recipe with a key of it."""
    priced = recipe["certificate"]
    for holder in (recipe, recipe["accounting"], priced):
        for name in list(holder):
            yield holder, name
    for holder in (recipe["strategies"], recipe["strategies"][0], recipe["repeats"]):
        yield holder, 0
    yield priced["lengths"], 0
    yield priced["prices"], 0


def test_every_changed_field_of_a_recipe_is_one_line(tmp_path):
    """Any field of a recipe and its certificate, replaced by any odd value or taken out; what is read is whole."""
    path = tmp_path / "recipe.json"
    histogram = LengthHistogram.from_lengths([1, 2, 3, 5, 8, 8], 10)
    get_packer("optimal")(histogram, max_sequences_per_pack=3).save(path)
    recipe = json.loads(path.read_text())
    free = ("solve_seconds", "lp_bound", "certificate", "prices", "denominator")
    refused = 0
    for holder, name in places_in(recipe):
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
                assert "\n" not in str(error) and len(str(error)) < 600
            else:
                assert name in free or packing.to_json() == recipe["accounting"], (name, value)
            if isinstance(holder, list) and value is ...:
                holder.insert(name, kept)
            else:
                holder[name] = kept
    assert refused > 300


def test_a_notebook_shows_the_accounting():
    packed = pack_data.pack([300, 200, 512, 17], max_sequence_length=512)
    shown = packed._repr_html_()
    accounting = json.loads(html.unescape(shown)[len("<pre>") : -len("</pre>")])
    assert accounting == packed.packing.to_json()


def test_results_and_data_sets_draw_their_padding(tmp_path, monkeypatch):
    """A stored data set draws the numbers of its packing: one row a sequence, and the packs."""
    drawn = []
    monkeypatch.setattr(accounting, "write", lambda pictures, path: drawn.extend(pictures))
    packed = pack_data.pack([300, 200, 512, 17], max_sequence_length=512)
    with build_small(write_corpus(tmp_path / "texts", 6), tmp_path / "data") as store:
        for value in (packed, packed.packing, store):
            pack_data.plot(value, "a.svg")
        slots = store.schema.max_sequence_length
        manifest = store.manifest
    tokens, padding = drawn[0].series
    assert drawn[0] == drawn[1]
    assert tokens.values == (1029,) * 2
    assert padding.values == (4 * 512 - 1029, 3 * 512 - 1029)
    unpacked = manifest.sequences * slots - manifest.tokens
    assert drawn[2].series[1].values == (unpacked, manifest.padding_tokens)
