"""The sections of a page about lengths and packs hold what histogram, packer and comparison give elsewhere."""

import json

import numpy as np
import pytest

from pack_data import page_sections as look
from pack_data.build import build
from pack_data.building.options import BuildOptions
from pack_data.compare import Case, compare
from pack_data.display.page import Page
from pack_data.histogram import LengthHistogram
from pack_data.lengths.counting import statistics
from pack_data.packers import get_packer
from pack_data.packing import Packing
from pack_data.proof import prove
from pack_data.store.data_set import PackStore
from tests.pages import check_page
from tests.tiny_runs import tiny_data


@pytest.fixture(scope="module")
def histogram():
    rng = np.random.default_rng(3)
    return LengthHistogram.from_lengths(np.minimum(32, rng.gamma(1.0, 6.0, 1000).astype(int) + 2), 32, "gamma")


def page_of(sections):
    return check_page(Page("page", "lead", sections).html())


def values(rows):
    return {row["what"]: row["value"] for row in rows}


@pytest.mark.parametrize("depth", [3, None])
def test_the_tables_are_those_of_the_commands(histogram, depth):
    depths, packers = (2,), ["none", "sort", "spfhp", "optimal"]
    sections = look.sections_of_histogram(histogram, packer="optimal", depth=depth, depths=depths, packers=packers)
    tables = page_of(sections).tables
    packing = get_packer("optimal")(histogram, max_sequences_per_pack=depth)

    facts = json.loads(json.dumps(statistics(histogram)))
    assert len(tables["lengths"]) == 9
    assert values(tables["lengths"]).items() <= facts.items()
    accounting = json.loads(json.dumps(packing.to_json()))
    assert values(tables["packing"]).items() <= accounting.items() and len(tables["packing"]) == 5

    rows = compare(Case(histogram, depths), packers)
    assert len(tables["packers"]) == len(rows) == 4
    for found, row in zip(tables["packers"], rows):
        for key, value in found.items():
            if key != "solve_seconds":
                assert value == getattr(row, key), key

    proof = prove(packing)
    proved = values(tables["proof"])
    assert (proved["packs"], proved["lower_bound"]) == (packing.packs, proof.lower_bound)
    assert proved["worth"] == pytest.approx(float(proof.worth)) and proved["best_pack_value"] <= 1

    listed = tables["strategies"]
    repeats = dict(zip(packing.strategies, packing.repeats))
    assert len(listed) == min(look._LISTED, len(repeats)) and listed[0]["packs"] == max(packing.repeats)
    for row in listed:
        strategy = tuple(row["strategy"])
        assert repeats.pop(strategy) == row["packs"]
        assert row["tokens"] + row["padding"] == 32 and row["tokens"] == sum(strategy)
    assert max(repeats.values(), default=0) <= listed[-1]["packs"]


def test_the_pictures_account_for_all_packs(histogram):
    packing = get_packer("spfhp")(histogram, max_sequences_per_pack=None)
    assert packing.largest_depth > 6  # more than have a colour of their own
    _, top, every, by_depth, by_room, _ = look.filling_section(packing, "SPFHP").parts
    for picture in (top, every):
        stacks = zip(*[series.values for series in picture.series])
        assert all(sum(part or 0 for part in stack) == 32 for stack in stacks)
    for picture in (by_depth, by_room):
        assert sum(picture.series[0].values) == packing.packs
    assert by_room.series[0].values[0] == sum(n for s, n in zip(packing.strategies, packing.repeats) if sum(s) == 32)
    assert every.edges[-1] == packing.packs and len(every.edges) == len(every.categories) + 1
    bars = look.lengths_section(histogram).parts[1]
    assert sum(bars.series[0].values) == histogram.sequences


def test_the_mask_is_that_of_the_pack():
    numbers = np.array([1, 1, 2, 3, 3, 3, 0, 0, 0])
    drawn = look.Drawn("by hand", numbers, *look._sequences_of(numbers))
    _, strip, mask, table = look.pack_section(drawn).parts
    painted = np.full((9, 9), -1)
    for tile in mask.tiles:
        painted[int(tile.top) : int(tile.bottom), int(tile.left) : int(tile.right)] = tile.series
    same = numbers[:, None] == numbers[None, :]
    assert ((painted >= 0) == same).all()
    assert (painted[same] == np.where(numbers > 0, numbers - 1, 3)[np.nonzero(same)[0]]).all()
    assert [(tile.left, tile.right) for tile in strip.tiles] == [(0, 2), (2, 3), (3, 6), (6, 9)]
    assert [row["tokens"] for row in table.rows] == [2, 1, 3]


def test_a_data_set_is_drawn_as_it_is(tmp_path):
    with PackStore.open(tiny_data(tmp_path / "data")) as store:
        packing = look.packing_of(store)
        assert (packing.packs, packing.sequences, packing.tokens) == (
            len(store),
            store.manifest.sequences,
            store.manifest.tokens,
        )
        assert (packing.placed() == look.histogram_of(store).counts).all()
        sections = look.sections_of_data_set(store, pack=2, depths=(3,), packers=["spfhp"])
        page = page_of(sections)
        batch = store.batch(np.array([2]))
        own = page.tables["pack"]
        assert [row["tokens"] for row in own] == np.bincount(batch["input_mask"][0])[1:].tolist()
        assert sum(row["masked"] for row in own) == (batch["masked_lm_weights"][0] > 0).sum() > 0
        assert sum(row["second"] for row in own) == batch["segment_ids"][0].sum()
        with pytest.raises(ValueError, match=f"packs 0 to {len(store) - 1}"):
            look.drawn_pack(store, len(store))


def test_the_recipe_of_a_data_set_brings_its_proof(tmp_path):
    options = dict(synthetic="squad_1_1_384", sequences=200, max_sequence_length=384, vocabulary_size=300, workers=1)
    with build(BuildOptions(out=tmp_path / "data", **options)) as store:
        packing = look.packing_of(store)
        assert packing == Packing.load(tmp_path / "data" / look.RECIPE) and packing.certificate is not None


def test_a_packing_without_packs_is_refused():
    none = get_packer("spfhp")(LengthHistogram([0, 0, 0]), max_sequences_per_pack=2)
    assert none.packs == 0
    with pytest.raises(ValueError, match="holds no pack"):
        look.filling_section(none, "SPFHP")


def test_few_sequences_have_a_page():
    one = LengthHistogram.from_lengths([5], 8, "one")
    page = page_of(look.sections_of_histogram(one, packer="none", depth=1, depths=(2,), packers=["spfhp"]))
    assert len(page.pictures) >= 9 and page.tables["pack"] == [{"sequence": 1, "first": 0, "last": 4, "tokens": 5}]


def test_long_packs_are_not_given_to_the_packer_that_lists_all_strategies(histogram):
    assert "nnlshp" in look.packers_for(histogram)
    assert "nnlshp" not in look.packers_for(histogram.with_max_sequence_length(2048))
