"""Every quantity has one definition: its formula, its function, and all that state it give the same number."""

import math
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pack_data.inspection import one_packer
from pack_data.packers import get_packer
from pack_data.packing.histogram import LengthHistogram
from pack_data.sort import batch
from pack_data.store.data_set import Manifest
from pack_data.store.packs import PackSchema
from pack_data.store.quantities import QUANTITIES

S = 32
COUNTS = "max_sequence_length sequences packs slots tokens".split()
lengths = st.lists(st.integers(1, S), max_size=40)


def _arguments(function, counts):
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    return {name: counts[name] for name in names}


@given(lengths.filter(len), st.integers(1, 4), st.floats(0.5, 90.0))
def test_formula_and_function_of_each_quantity_agree(lengths, depth, seconds):
    histogram = LengthHistogram.from_lengths(lengths, S)
    packing = get_packer("spfhp")(histogram, max_sequences_per_pack=depth)
    counts = {"seconds": seconds, **{name: getattr(packing, name) for name in COUNTS}}
    computed = {key: quantity for key, quantity in QUANTITIES.items() if quantity.function}
    assert len(computed) >= 8
    for key, quantity in computed.items():
        if key == "padding_avoided" and packing.tokens == packing.sequences * S:
            continue  # 0 / 0
        value = quantity.function(**_arguments(quantity.function, counts))
        assert math.isclose(value, eval(quantity.formula, dict(counts)), rel_tol=1e-12, abs_tol=1e-12), key


@given(lengths, st.integers(1, 4))
def test_all_places_state_the_same_quantities(lengths, depth):
    histogram = LengthHistogram.from_lengths(lengths, S)
    packing = get_packer("spfhp")(histogram, max_sequences_per_pack=depth)
    with pytest.MonkeyPatch.context() as patch:  # a measurement begins with a garbage collection
        patch.setattr(one_packer, "PeakMemory", lambda: SimpleNamespace(added=lambda: None))
        (row,) = one_packer.measure_each([("spfhp", depth)], histogram, 1, isolated=False)
    manifest = Manifest(
        PackSchema.bert(S, 4, 8, vocabulary_size=9),
        packing.sequences,
        packing.packs,
        packing.tokens,
        tuple(histogram.counts),
        *(0, (), None, "spfhp"),
    )
    sorted_alone = batch(histogram, batch_size=1)  # each row is as long as its sequence
    places = (packing, manifest, row, histogram)
    for key in QUANTITIES:
        if not hasattr(packing, key) or key in ("max_sequence_length", "padding_share", "solve_seconds"):
            continue
        stated = {getattr(place, key) for place in places if hasattr(place, key)}
        assert stated == {getattr(packing, key)}, key
    assert packing.padding_share == manifest.padding_share == 1 - row.efficiency
    assert sorted_alone.efficiency == 1 and sorted_alone.speedup == histogram.theoretical_speedup
    unpacked = get_packer("none")(histogram, max_sequences_per_pack=1)
    assert histogram.padding_share == unpacked.padding_share
