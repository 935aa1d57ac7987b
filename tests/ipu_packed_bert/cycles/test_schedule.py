"""A weight update over time: spans leave no gap and add up to the price; each micro-batch passes each stage once."""

from dataclasses import fields, replace

import numpy as np
import pytest

from ipu_packed_bert.cycles import calibration
from ipu_packed_bert.cycles.parameters import Parameters
from ipu_packed_bert.cycles.pipeline import assemble
from ipu_packed_bert.cycles.schedule import BACKWARD, BUBBLE, FORWARD, HOST, RECOMPUTATION, WORK, schedule, stages_of
from ipu_packed_bert.cycles.workload import placement_of, shape_of
from ipu_packed_bert.report import measured
from ipu_packed_bert.report import schedule as report
from tests.ipu_packed_bert.report.test_search import SMALL

CALIBRATION = calibration.load()
PLACEMENTS = {
    "heads on the first IPU": {},
    "heads on the last IPU": {"heads_return": False},
    "nothing recomputed": {"recompute": False},
    "one IPU": {"layers_per_ipu": (4,), "memory_proportion": (0.2,)},
}


@pytest.fixture(scope="module", params=PLACEMENTS)
def pipeline(request, machine, load):
    config = load("packed_phase2_pod16.yml", *SMALL)
    shape = shape_of(config)
    placement = placement_of(config)._replace(**PLACEMENTS[request.param])
    graph = machine.traces.training(config, shape, calibration.POPART)
    update = machine.traces.update(config)
    return assemble(graph, update, placement, machine.planner, num_layers=4, micro_batch=shape.micro_batch)


def check(found, total):
    """No gap and no overlap, on any IPU, from 0 to the total."""
    at = 0.0
    for stretch in found.stretches:
        assert stretch.start == pytest.approx(at)
        for ipu in range(found.ipus):
            own = 0.0
            for span in [span for span in stretch.spans if span.ipu == ipu]:
                assert span.start == pytest.approx(own, abs=0.01) and span.cycles > 0
                own = span.start + span.cycles
            assert own == pytest.approx(stretch.cycles, abs=0.01)
        at = stretch.end
    assert abs(at - total) < 0.5 and found.cycles == at


@pytest.mark.parametrize("accumulation", [1, 3, 9, 1000])
def test_the_spans_add_up_to_the_priced_update(pipeline, accumulation):
    parameters = CALIBRATION.parameters
    step = pipeline.step(accumulation, parameters)
    found = schedule(pipeline, accumulation, parameters)
    check(found, step.cycles + step.once.host * pipeline.target.clock_hz)
    works = [sum(kinds[kind] for kind in WORK) for kinds in found.totals()]
    priced = [each["cycles"] for each in measured.model_work(pipeline, accumulation, parameters)]
    assert works == pytest.approx(priced)
    for kinds in found.totals():
        assert sum(kinds.values()) == pytest.approx(found.cycles)
        assert kinds[HOST] == pytest.approx(pipeline.target.clock_hz * step.once.host)


@pytest.mark.parametrize("accumulation", [1, 4, 20])
def test_each_micro_batch_passes_each_stage_once_and_in_order(pipeline, accumulation):
    found = schedule(pipeline, accumulation, CALIBRATION.parameters)
    stages = stages_of(pipeline.placement)
    where = {**stages.forward, **stages.turn, **stages.backward}
    assert list(where) == list(range(pipeline.placement.stages))
    seen = {}
    for stretch in found.stretches[:-1]:
        for repeat in range(stretch.repeats):
            for span in stretch.spans:
                if span.kind in (FORWARD, RECOMPUTATION, BACKWARD):
                    batch = stretch.number + repeat - span.stage
                    assert where[span.stage] == span.ipu and 0 <= batch < accumulation
                    seen.setdefault((span.stage, span.kind), []).append(batch)
    assert all(batches == list(range(accumulation)) for batches in seen.values())
    kinds = {stage: {kind for at, kind in seen if at == stage} for stage in where}
    for stage in stages.forward:
        assert kinds[stage] == {FORWARD}
    for stage in stages.turn:
        assert {FORWARD, BACKWARD} <= kinds[stage]
    for stage in stages.backward:
        assert kinds[stage] == ({RECOMPUTATION, BACKWARD} if pipeline.placement.recompute else {BACKWARD})
    if pipeline.placement.stages == 1:
        assert not any(kinds[BUBBLE] for kinds in found.totals())


def test_arrays_of_draws_say_what_each_draw_says(pipeline):
    drawn = CALIBRATION.draws.parameters
    every = report.cycles_by_kind(pipeline, 20, drawn)
    for number in (0, 17, 399):
        one = Parameters(**{field.name: getattr(drawn, field.name)[number] for field in fields(Parameters)})
        assert every[:, number] == pytest.approx(report.cycles_by_kind(pipeline, 20, one)[:, 0], abs=0.01)
    doubled = replace(CALIBRATION.parameters, factor=2 * CALIBRATION.parameters.factor)
    assert report.cycles_by_kind(pipeline, 20, doubled).sum() > report.cycles_by_kind(pipeline, 20, drawn).mean(1).sum()


@pytest.mark.parametrize("accumulation", [2, 1000])
def test_the_picture_leaves_out_only_what_it_says(pipeline, accumulation):
    table = report.table("x", pipeline, accumulation, CALIBRATION)
    found = schedule(pipeline, accumulation, CALIBRATION.parameters)
    (picture,) = table.pictures
    left_out = [skip for skip in picture.x.skips if "more pipeline cycles" in skip.about]
    assert len(left_out) == (accumulation == 1000)
    for ipu in range(found.ipus):
        tiles = [tile for tile in picture.tiles if int(tile.top) == ipu]
        ends = sorted([(tile.left, tile.right) for tile in tiles] + [(skip.start, skip.end) for skip in left_out])
        assert ends[0][0] == 0.0 and 1e6 * ends[-1][1] == pytest.approx(found.cycles)
        for before, after in zip(ends, ends[1:]):
            assert before[1] == pytest.approx(after[0], abs=1e-7)
    for row in table.rows:
        assert row["cycles_lower"] <= row["cycles"] <= row["cycles_upper"]
        if row["what"] in (FORWARD, BACKWARD):  # what is drawn of a kind is its share of the micro-batches
            number = picture.series.index(row["what"])
            tiles = [t for t in picture.tiles if t.series == number and f"IPU {int(t.top)}" == row["ipu"]]
            width = sum(tile.right - tile.left for tile in tiles)
            steady = [s for s in found.stretches if s.repeats > 3]
            for stretch in steady:
                own = [s.cycles for s in stretch.spans if f"IPU {s.ipu}" == row["ipu"] and s.kind == row["what"]]
                width += (stretch.repeats - 2) * sum(own) / 1e6
            assert 1e6 * width == pytest.approx(row["cycles"])


def test_measured_cycles_stand_in_the_ipus_rows(pipeline):
    work = measured.model_work(pipeline, 20, CALIBRATION.parameters)
    cycles = tuple(measured.popvision.Work(each["ipu"], 1.1 * each["cycles"], {}) for each in work[:-1] or work)
    found = measured.Measured(measured.HARDWARE, "mine.csv", {}, 20, None, None, cycles)
    table = report.table("x", pipeline, 20, CALIBRATION, found)
    beside = [row for row in table.rows if "measured" in row]
    assert [(row["ipu"], row["what"]) for row in beside] == [(f"IPU {each.ipu}", report.WORKS) for each in cycles]
    assert [row["difference"] for row in beside] == pytest.approx([10.0] * len(cycles))
    assert all(np.isclose(row["measured"], each.cycles) for row, each in zip(beside, cycles))
    assert sum("measured" in name for name in table.pictures[0].rows) == len(cycles)
