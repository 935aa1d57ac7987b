"""The sections of a page about lengths and packs hold what histogram, packer and comparison give elsewhere."""

import json

import numpy as np
import pytest

from pack_data.inspection import one_packer
from pack_data.inspection import page_sections as look
from pack_data.inspection.compare import compare
from pack_data.packers import get_packer
from pack_data.packing.histogram import LengthHistogram
from pack_data.packing.packing import statement
from pack_data.store.data_set import PackStore, StoreWriter
from pack_data.store.packs import PackSchema
from tests.pages import check_page
from tests.refusals import refused
from tests.tiny_runs import tiny_data

PACKERS = ("none", "sort", "greedy", "spfhp", "nnlshp", "optimal")


class Unmeasured:
    """No measurement of memory, which begins with a garbage collection."""

    def added(self):
        return None


@pytest.fixture(autouse=True)
def few(monkeypatch):
    """All packers at all depths are the comparison's own tests."""
    monkeypatch.setattr(look, "_DEPTHS", (2,))
    monkeypatch.setattr(look, "ALGORITHMS", PACKERS)
    monkeypatch.setattr(one_packer, "PeakMemory", Unmeasured)


@pytest.fixture(scope="module")
def histogram():
    lengths = np.random.default_rng(3).gamma(1.0, 6.0, 1000).astype(int) + 2
    return LengthHistogram.from_lengths(np.minimum(32, lengths), 32, "gamma")


def tables_of(page):
    return page.to_json()["tables"]


def values_of(rows):
    return {row["what"]: row["value"] for row in rows}


def parts_of(page, title):
    return next(section.parts for section in page.sections if section.title == title)


@pytest.mark.parametrize("depth", [3, None])
def test_the_tables_are_those_of_the_commands(histogram, depth):
    page = look.page_of_histogram(histogram, packer="optimal", depth=depth)
    tables = tables_of(page)
    packing = get_packer("optimal")(histogram, max_sequences_per_pack=depth)
    padding = f"{packing.padding_share:.1%}"
    figures = [figure.value for figure in page.figures]
    assert figures == [
        f"{packing.packing_factor:.3f}",
        padding,
        f"{packing.gap:,}",
    ]
    for stated in (
        f"{packing.sequences:,}",
        f"{packing.packs:,}",
        padding,
    ):
        assert stated in page.answer
    assert f"{histogram.padding_share:.1%}" in page.answer

    for key, value in values_of(tables["lengths"]).items():
        assert value == getattr(histogram, key), key
    for key, value in values_of(tables["packing"]).items():
        assert value == getattr(packing, key), key
    rows = compare(histogram, look._DEPTHS, PACKERS)
    assert len(tables["packers"]) == len(rows) == 6
    for shown, row in zip(tables["packers"], rows):
        shown.pop("solve_seconds")
        assert shown == {key: getattr(row, key) for key in shown}

    words, prices = parts_of(page, "The proof")
    priced = packing.certificate
    assert statement(packing)[1:] in words
    assert prices.lines[0].y == tuple(price / priced.denominator for price in priced.prices)

    listed = tables["strategies"]
    repeats = dict(zip(packing.strategies, packing.repeats))
    assert len(listed) == min(look._MOST_LISTED_STRATEGIES, len(repeats))
    for row in listed:
        strategy = tuple(row["strategy"])
        assert repeats.pop(strategy) == row["packs"]
        assert row["tokens"] == sum(strategy) == 32 - row["padding"]
    assert max(repeats.values(), default=0) <= listed[-1]["packs"]


def page_of(histogram, packer, depth=None):
    return look.page_of_histogram(histogram, packer=packer, depth=depth)


def stacks_of(picture):
    """Return the heights in each stack of a picture."""
    columns = zip(*(series.values for series in picture.series))
    return [[height or 0 for height in column] for column in columns]


def test_the_pictures_account_for_all_packs(histogram):
    """Rows before and after packing share an axis as wide as the rows before, so that widths are numbers of rows."""
    packing = get_packer("spfhp")(histogram, max_sequences_per_pack=None)
    assert packing.largest_depth > 3  # more than have a colour of their own
    page = page_of(histogram, "spfhp")
    lengths, filling, *_ = page.sections
    top, by_depth, *_ = filling.parts
    for picture in (top, *page.first):
        assert picture.series[-1].role == "padding"
        filled = [sum(stack) for stack in stacks_of(picture)]
        assert set(filled) <= {0, 32}
        assert any(filled)
    assert sum(by_depth.series[0].values) == packing.packs
    assert sum(lengths.parts[0].series[0].values) == histogram.sequences
    for picture, packs in zip(page.first, (histogram.sequences, packing.packs)):
        assert f"{packs:,} rows" in picture.title
        assert picture.edges[-1] == histogram.sequences
        drawn = sum(value is not None for value in picture.series[0].values)
        share = packs / histogram.sequences
        assert drawn == pytest.approx(look._MOST_ROW_BARS * share, abs=1)


def test_a_data_set_is_drawn_as_it_is(tmp_path):
    with PackStore.open(tiny_data(tmp_path / "data")) as store:
        tables = tables_of(look.page_of_data_set(store, pack=2))
        manifest = store.manifest
        packing = values_of(tables["packing"])
        lengths = values_of(tables["lengths"])
        assert packing["packs"] == len(store)
        assert packing["packing_factor"] == manifest.packing_factor
        assert lengths["sequences"] == manifest.sequences
        assert lengths["tokens"] == manifest.tokens

        batch = store.batch(np.array([2]))
        rows = tables["pack"]
        counts = np.bincount(batch["input_mask"][0])[1:]
        assert [row["tokens"] for row in rows] == counts.tolist()
        masked = (batch["masked_lm_weights"][0] > 0).sum()
        assert sum(row["masked"] for row in rows) == masked > 0
        assert sum(row["second"] for row in rows) == batch["segment_ids"][0].sum()
        with refused("--pack", len(store), len(store) - 1):
            look.page_of_data_set(store, pack=len(store))


def test_a_packing_without_packs_is_refused(tmp_path):
    writer = StoreWriter(tmp_path, PackSchema.bert(8, 2, 4, vocabulary_size=50))
    with writer.finish(algorithm="none") as store, refused(tmp_path, "no packs"):
        look.page_of_data_set(store, pack=0)
    with refused("packing", "no packs"):
        page_of(LengthHistogram([0, 0, 0]), "spfhp")


def test_few_sequences_have_a_page():
    page = page_of(LengthHistogram.from_lengths([5], 8, "one"), "none", depth=1)
    shown = check_page(page.html())
    assert len(shown.pictures) >= 7
    assert shown.tables == json.loads(json.dumps(tables_of(page)))
    assert shown.tables["pack"] == [{"sequence": 1, "first": 0, "last": 4, "tokens": 5}]


@pytest.mark.parametrize(
    "slots, sequences, left_out",
    [
        (64, 1, []),
        (512, 1, ["nnlshp"]),
        (64, 1_000_001, ["greedy"]),
    ],
)
def test_packers_that_take_longer_than_all_others_are_left_out_and_named(slots, sequences, left_out):
    counts = np.zeros(slots + 1, int)
    counts[5] = sequences
    page = page_of(LengthHistogram(counts, "one"), "none")
    measured = {row["algorithm"] for row in tables_of(page)["packers"]}
    assert {"nnlshp", "greedy"} - measured == set(left_out)
    notes = " ".join(page.tables()[-2].notes)
    for name in ("nnlshp", "greedy"):
        assert (f"{name.upper()} takes long" in notes) == (name in left_out)
