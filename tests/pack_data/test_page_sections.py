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


def sections_of(histogram, packer, depth=None, depths=(2,), packers=("spfhp",)):
    return look.sections_of_histogram(histogram, packer=packer, depth=depth, depths=depths, packers=packers)


def test_the_pictures_account_for_all_packs(histogram):
    packing = get_packer("spfhp")(histogram, max_sequences_per_pack=None)
    assert packing.largest_depth > 6  # more than have a colour of their own
    lengths, filling, *_ = sections_of(histogram, "spfhp")
    _, top, every, by_depth, by_room, _ = filling.parts
    for picture in (top, every):
        stacks = zip(*[series.values for series in picture.series])
        assert all(sum(part or 0 for part in stack) == 32 for stack in stacks)
    for picture in (by_depth, by_room):
        assert sum(picture.series[0].values) == packing.packs
    assert by_room.series[0].values[0] == sum(n for s, n in zip(packing.strategies, packing.repeats) if sum(s) == 32)
    assert every.edges[-1] == packing.packs and len(every.edges) == len(every.categories) + 1
    assert sum(lengths.parts[1].series[0].values) == histogram.sequences


def test_the_mask_is_that_of_the_pack():
    numbers = np.array([1, 1, 1, 2, 2, 3, 0, 0, 0])
    _, strip, mask, table = sections_of(LengthHistogram.from_lengths([2, 1, 3], 9), "optimal")[-1].parts
    painted = np.full((9, 9), -1)
    for tile in mask.tiles:
        painted[int(tile.top) : int(tile.bottom), int(tile.left) : int(tile.right)] = tile.series
    same = numbers[:, None] == numbers[None, :]
    assert ((painted >= 0) == same).all()
    assert (painted[same] == np.where(numbers > 0, numbers - 1, 3)[np.nonzero(same)[0]]).all()
    assert [(tile.left, tile.right) for tile in strip.tiles] == [(0, 3), (3, 5), (5, 6), (6, 9)]
    assert [row["tokens"] for row in table.rows] == [3, 2, 1]


def test_a_data_set_is_drawn_as_it_is(tmp_path):
    with PackStore.open(tiny_data(tmp_path / "data")) as store:
        page = page_of(look.sections_of_data_set(store, pack=2, depths=(3,), packers=["spfhp"]))
        manifest, packing = store.manifest, values(page.tables["packing"])
        assert (packing["packs"], packing["packing_factor"]) == (len(store), manifest.packing_factor)
        lengths = values(page.tables["lengths"])
        assert (lengths["sequences"], lengths["tokens"]) == (manifest.sequences, manifest.tokens)
        batch = store.batch(np.array([2]))
        own = page.tables["pack"]
        assert [row["tokens"] for row in own] == np.bincount(batch["input_mask"][0])[1:].tolist()
        assert sum(row["masked"] for row in own) == (batch["masked_lm_weights"][0] > 0).sum() > 0
        assert sum(row["second"] for row in own) == batch["segment_ids"][0].sum()
        with pytest.raises(ValueError, match=f"packs 0 to {len(store) - 1}"):
            look.sections_of_data_set(store, pack=len(store), depths=(3,), packers=["spfhp"])


def test_the_recipe_of_a_data_set_brings_its_proof(tmp_path):
    options = dict(synthetic="squad_1_1_384", sequences=200, max_sequence_length=384, vocabulary_size=300, workers=1)
    with build(BuildOptions(out=tmp_path / "data", **options)) as store:
        page = page_of(look.sections_of_data_set(store, pack=0, depths=(3,), packers=["spfhp"]))
        assert values(page.tables["proof"])["lower_bound"] == store.manifest.lower_bound


def test_a_packing_without_packs_is_refused():
    with pytest.raises(ValueError, match="holds no pack"):
        sections_of(LengthHistogram([0, 0, 0]), "spfhp")


def test_few_sequences_have_a_page():
    page = page_of(sections_of(LengthHistogram.from_lengths([5], 8, "one"), "none", depth=1))
    assert len(page.pictures) >= 9 and page.tables["pack"] == [{"sequence": 1, "first": 0, "last": 4, "tokens": 5}]


@pytest.mark.parametrize("slots", [64, 2048])
def test_long_packs_are_not_given_to_the_packer_that_lists_all_strategies(slots):
    one = LengthHistogram.from_lengths([5], slots, "one")
    rows = page_of(sections_of(one, "none", packers=None)).tables["packers"]
    assert any(row["algorithm"] == "nnlshp" for row in rows) == (slots == 64)
