"""The sections of a page about lengths and packs hold what histogram, packer and comparison give elsewhere."""

import json

import numpy as np
import pytest

from pack_data.building.command import build
from pack_data.building.options import BuildOptions
from pack_data.inspection import page_sections as look
from pack_data.inspection.compare import compare
from pack_data.packers import get_packer
from pack_data.packing.histogram import LengthHistogram
from pack_data.packing.packing import Packing, prove, statement
from pack_data.store.data_set import PackStore, StoreWriter
from pack_data.store.packs import PackSchema
from tests.pages import check_page
from tests.refusals import refused
from tests.tiny_runs import tiny_data


@pytest.fixture(autouse=True)
def few(monkeypatch):
    """All packers at all depths are the comparison's own tests."""
    monkeypatch.setattr(look, "_DEPTHS", (2,))
    monkeypatch.setattr(look, "ALGORITHMS", ("none", "sort", "greedy", "spfhp", "nnlshp", "optimal"))


@pytest.fixture(scope="module")
def histogram():
    rng = np.random.default_rng(3)
    return LengthHistogram.from_lengths(np.minimum(32, rng.gamma(1.0, 6.0, 1000).astype(int) + 2), 32, "gamma")


def read(page):
    return check_page(page.html())


def values(rows):
    return {row["what"]: row["value"] for row in rows}


@pytest.mark.parametrize("depth", [3, None])
def test_the_tables_are_those_of_the_commands(histogram, depth):
    page = look.page_of_histogram(histogram, packer="optimal", depth=depth)
    tables = read(page).tables
    packing = get_packer("optimal")(histogram, max_sequences_per_pack=depth)
    assert f"{packing.sequences:,} sequences fit into {packing.packs:,} packs of 32 slots" in page.answer
    padding = f"{1 - packing.efficiency:.1%}"
    assert [each.value for each in page.figures] == [f"{packing.packing_factor:.3f}", padding, f"{packing.gap:,}"]
    assert padding in page.answer and f"{histogram.padding_share:.1%}" in page.answer

    assert len(tables["lengths"]) == 9
    for key, value in values(tables["lengths"]).items():
        assert value == getattr(histogram, key), key
    accounting = json.loads(json.dumps(packing.to_json()))
    assert values(tables["packing"]).items() <= accounting.items() and len(tables["packing"]) == 5

    rows = compare(histogram, look._DEPTHS, look.ALGORITHMS)
    assert len(tables["packers"]) == len(rows) == 6
    for found, row in zip(tables["packers"], rows):
        for key, value in found.items():
            if key != "solve_seconds":
                assert value == getattr(row, key), key

    proof = prove(packing)
    (words, prices) = next(each.parts for each in page.sections if each.title == "The proof")
    assert statement(packing)[1:] in words and f"{proof.lower_bound:,}" in words
    assert prices.lines[0].y == tuple(each / packing.certificate.denominator for each in packing.certificate.prices)

    listed = tables["strategies"]
    repeats = dict(zip(packing.strategies, packing.repeats))
    assert len(listed) == min(look._MOST_LISTED_STRATEGIES, len(repeats)) and listed[0]["packs"] == max(packing.repeats)
    for row in listed:
        strategy = tuple(row["strategy"])
        assert repeats.pop(strategy) == row["packs"]
        assert row["tokens"] + row["padding"] == 32 and row["tokens"] == sum(strategy)
    assert max(repeats.values(), default=0) <= listed[-1]["packs"]


def page_of(histogram, packer, depth=None):
    return look.page_of_histogram(histogram, packer=packer, depth=depth)


def test_the_pictures_account_for_all_packs(histogram):
    packing = get_packer("spfhp")(histogram, max_sequences_per_pack=None)
    assert packing.largest_depth > 3  # more than have a colour of their own
    page = page_of(histogram, "spfhp")
    lengths, filling, *_ = page.sections
    top, by_depth, *_ = filling.parts
    for picture in (top, *page.first):
        assert [series.role for series in picture.series][-1] == "padding"
        stacks = [[part or 0 for part in stack] for stack in zip(*[series.values for series in picture.series])]
        assert all(sum(stack) in (0, 32) for stack in stacks) and any(map(sum, stacks))
    assert sum(by_depth.series[0].values) == packing.packs
    assert sum(lengths.parts[0].series[0].values) == histogram.sequences


def test_rows_stand_side_by_side_before_and_after(histogram):
    """Both on an axis as wide as the rows before, so that their widths are their numbers."""
    before, after = page_of(histogram, "optimal", depth=3).first
    packing = get_packer("optimal")(histogram, max_sequences_per_pack=3)
    for picture, packs in ((before, histogram.sequences), (after, packing.packs)):
        assert f"{packs:,} rows" in picture.title
        assert picture.edges[-1] == histogram.sequences and len(picture.edges) == len(picture.categories) + 1
        drawn = sum(value is not None for value in picture.series[0].values)
        assert drawn == pytest.approx(look._MOST_ROW_BARS * packs / histogram.sequences, abs=1)
    assert [series.role for series in after.series] == ["first", "second", "third", "padding"]


def test_bars_are_the_rows_at_even_distances(monkeypatch):
    monkeypatch.setattr(look, "_MOST_ROW_BARS", 4)
    packing = Packing("by hand", 8, 3, ((8,), (4, 4), (3, 3, 2)), (20, 10, 10))
    picture = look.rows_picture(packing, "rows", 40)
    assert picture.categories == ("8", "8", "2 x 4", "2 x 3 + 2")
    rows = [tuple(part for part in row if part) for row in zip(*[each.values for each in picture.series])]
    assert rows == [(8,), (8,), (4, 4), (3, 3, 2)]


def test_the_mask_is_that_of_the_pack():
    numbers = np.array([1, 1, 1, 2, 2, 3, 0, 0, 0])
    _, mask, table = page_of(LengthHistogram.from_lengths([2, 1, 3], 9), "optimal").sections[-1].parts
    drawn = np.full(9, -1)
    for start, stop, number in mask.runs:
        assert (drawn[start:stop] == -1).all()
        drawn[start:stop] = number
    assert drawn.tolist() == numbers.tolist()
    assert [row["tokens"] for row in table.rows] == [3, 2, 1]


def test_a_data_set_is_drawn_as_it_is(tmp_path):
    with PackStore.open(tiny_data(tmp_path / "data")) as store:
        page = read(look.page_of_data_set(store, pack=2))
        manifest, packing = store.manifest, values(page.tables["packing"])
        assert (packing["packs"], packing["packing_factor"]) == (len(store), manifest.packing_factor)
        lengths = values(page.tables["lengths"])
        assert (lengths["sequences"], lengths["tokens"]) == (manifest.sequences, manifest.tokens)
        batch = store.batch(np.array([2]))
        own = page.tables["pack"]
        assert [row["tokens"] for row in own] == np.bincount(batch["input_mask"][0])[1:].tolist()
        assert sum(row["masked"] for row in own) == (batch["masked_lm_weights"][0] > 0).sum() > 0
        assert sum(row["second"] for row in own) == batch["segment_ids"][0].sum()
        with refused("--pack", len(store), len(store) - 1):
            look.page_of_data_set(store, pack=len(store))


def test_the_recipe_of_a_data_set_brings_its_proof(tmp_path):
    options = dict(synthetic="squad_1_1_384", sequences=200, max_sequence_length=384, vocabulary_size=300, workers=1)
    with build(BuildOptions(out=tmp_path / "data", **options)) as store:
        page = look.page_of_data_set(store, pack=0)
        (words, _) = next(each.parts for each in page.sections if each.title == "The proof")
        assert f"at least {store.manifest.lower_bound:,} packs are needed" in words


def test_a_packing_without_packs_is_refused(tmp_path):
    writer = StoreWriter(tmp_path, PackSchema.bert(8, 2, 4, vocabulary_size=50))
    with writer.finish(algorithm="none") as store, refused(tmp_path, "no packs"):
        look.page_of_data_set(store, pack=0)
    with refused("packing", "no packs"):
        page_of(LengthHistogram([0, 0, 0]), "spfhp")


def test_few_sequences_have_a_page():
    page = read(page_of(LengthHistogram.from_lengths([5], 8, "one"), "none", depth=1))
    assert len(page.pictures) >= 7 and page.tables["pack"] == [{"sequence": 1, "first": 0, "last": 4, "tokens": 5}]


@pytest.mark.parametrize(
    "slots, sequences, left_out",
    [(64, 1, []), (512, 1, ["nnlshp"]), (64, 1_000_001, ["greedy"]), (512, 2_000_000, ["nnlshp", "greedy"])],
)
def test_packers_that_take_longer_than_all_others_are_left_out_and_named(slots, sequences, left_out):
    counts = np.zeros(slots + 1, int)
    counts[5] = sequences
    page = read(page_of(LengthHistogram(counts, "one"), "none"))
    assert {"nnlshp", "greedy"} - {row["algorithm"] for row in page.tables["packers"]} == set(left_out)
    named = [note.split()[0].lower() for note in page.notes if "packed-bert compare" in note]
    assert named == left_out
