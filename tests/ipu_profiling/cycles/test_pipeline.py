"""Laws of the pipeline: costs add up, and more work never takes fewer cycles."""

import pytest

from ipu_profiling.cycles.layout import total
from ipu_profiling.cycles.lowering import COPIES, MASK_APPLICATION
from ipu_profiling.cycles.pipeline import Parameters
from ipu_profiling.cycles.tracing import ADDITIVE, PACKED, POPART
from ipu_profiling.cycles.workload import shape_of
from tests.refusals import refused
from tests.tolerances import same

PLAIN = Parameters(1.0, 3.125)
LARGE = "packed_phase2_pod16.yml"
# A narrow model: its products have fewer plans to search.
NARROW = (
    "model.hidden_size=256",
    "model.intermediate_size=1024",
    "model.num_heads=4",
    "model.vocabulary_size=8192",
    "data.vocabulary_size=8192",
    "placement.available_memory_proportion=[0.2, 0.2, 0.2, 0.2]",
)


def test_categories_add_up_on_every_ipu_and_over_all(machine, load):
    pipeline = machine.pipeline(load(LARGE, *NARROW))
    for ipu in pipeline.ipus:
        same(ipu.total, total(ipu.costs.values()))
    by_category = pipeline.category_cycles(PLAIN)
    assert sum(by_category.values()) == pytest.approx(pipeline.micro_batch_cycles(PLAIN))
    slowest = max(PLAIN.cycles(ipu.total) for ipu in pipeline.ipus)
    copies = max(map(pipeline.copy_cycles, pipeline.ipus))
    assert pipeline.pipeline_cycle(PLAIN) == pytest.approx(slowest + copies)
    assert pipeline.placement.stages == 9  # 5 forwards (0, 1, 2, 3 and 0 again), 4 more backwards


GROWING = [
    ["data.max_sequence_length=128", "data.max_sequence_length=512"],
    ["batch.micro_batch=1", "batch.micro_batch=2", "batch.micro_batch=3"],
    ["data.max_predictions_per_sequence=20", "data.max_predictions_per_sequence=76"],
    ["data.max_sequences_per_pack=2", "data.max_sequences_per_pack=3"],
]


@pytest.mark.parametrize("settings", GROWING)
def test_cycles_never_fall(machine, load, settings):
    """On every IPU and for both bounds of the layout parameter."""
    series = []
    for setting in settings:
        short = ["data.max_predictions_per_sequence=20"] if "length" in setting else []
        pipeline = machine.pipeline(load(LARGE, *NARROW, *short, setting))
        cycles = []
        for layout in (0.44, 5.148):
            cycles += [Parameters(1.0, layout).cycles(ipu.total) for ipu in pipeline.ipus]
        series.append(cycles)
    for smaller, larger in zip(series, series[1:]):
        assert all(before <= after for before, after in zip(smaller, larger))
        assert sum(smaller) < sum(larger)


def test_recomputation_is_one_more_forward_pass(machine, load):
    kept, recomputed = (
        machine.pipeline(load(LARGE, *NARROW, f"engine.recompute_layers={value}")).ipus[1].costs[MASK_APPLICATION]
        for value in ("false", "true")
    )
    same(recomputed, kept * 2.0)


def test_a_mask_made_once_travels_and_one_made_in_each_layer_does_not(machine, load):
    """Bytes of two rows of 512 x 512 halves; of two codes of 16 halves for each slot; none."""
    config = load(LARGE, *NARROW)
    sent = {}
    for arrangement in (ADDITIVE, PACKED, POPART):
        ipus = machine.pipeline(config, arrangement=arrangement).ipus
        sent[arrangement] = [ipu.link_bytes.get("mask", 0) for ipu in ipus]
        assert ipus[1].costs[COPIES].cycles(3.0) > 0
    assert sent[ADDITIVE] == [2 * 512 * 512 * 2] * 3 + [0]
    assert sent[PACKED] == [2 * 2 * 512 * 16 * 2] * 3 + [0]
    assert sent[POPART] == [0] * 4


def test_bow_takes_equal_cycles_on_chip_and_less_time(machines, load):
    config = load(LARGE, *NARROW)
    mk2 = machines["mk2"].pipeline(config)
    bow = machines["bow"].pipeline(config)
    assert [ipu.total for ipu in mk2.ipus] == [ipu.total for ipu in bow.ipus]
    rates = [pipeline.sequences_per_second(1024, 2.0, PLAIN) for pipeline in (mk2, bow)]
    assert 1.0 < rates[1] / rates[0] < 1.85 / 1.33


def test_an_unlimited_depth_is_refused(load):
    config = load(LARGE, "data.packer=spfhp", "data.max_sequences_per_pack=null")
    with refused("data.max_sequences_per_pack", "unlimited"):
        shape_of(config)
