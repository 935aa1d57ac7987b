"""The cycle model against published numbers: 15 throughputs, the overheads of Table 1, and the fit itself."""

import pytest

from ipu_profiling.cycles import calibration
from ipu_profiling.cycles.pipeline import Parameters
from ipu_profiling.cycles.points import PAPER_CONFIG, PAPER_OVERHEAD, POINTS
from ipu_profiling.cycles.tracing import POPART
from tests.imports import ROOT


@pytest.fixture(scope="session")
def observations(machines):
    return calibration.observe(machines)


def test_published_throughputs_have_the_stored_errors(observations, monkeypatch):
    """The stored errors have four decimals, so this holds every formula on the way from the graph to the throughput."""
    stored = calibration.load()
    left_out = [stored.left_out[name] for name in stored.report["fitted_on"]]
    fits = iter([stored.parameters, *left_out])
    monkeypatch.setattr(
        calibration,
        "_fit",
        lambda observations, paper: next(fits),
    )
    fitted = calibration.calibrate(observations)
    assert calibration.to_json(fitted) == calibration.STORED.read_text(encoding="utf-8")
    assert len(observations.throughputs) == len(POINTS) == 15


def test_errors_left_out_are_4_percent_on_average_and_13_at_worst():
    report = calibration.load().report
    assert report["mean_error"]["left_out"] < 0.04
    assert report["worst_error"]["left_out"] < 0.13


@pytest.mark.slow
def test_the_stored_fit_is_reproduced_bit_for_bit(observations):
    fitted = calibration.calibrate(observations)
    assert calibration.to_json(fitted) == calibration.STORED.read_text(encoding="utf-8")


def test_planted_parameters_are_found(observations):
    """Throughputs that the model predicts give its parameters back."""
    planted = Parameters(1.1, 2.0, 0.03, 1.2, 0.012)
    planted_observations = []
    for found in observations.throughputs:
        point = found.point._replace(sequences_per_second=found.predicted(planted))
        planted_observations.append(found._replace(point=point))
    fitted = calibration._fit(planted_observations, None)
    assert calibration.named(fitted) == pytest.approx(calibration.named(planted), rel=0.05)


def test_overheads_of_table_1(observations, machines, load):
    """The paper's overhead at depths 2 (fitted), 3, 4, 8 and 16: within a tenth, and growing."""
    stored = calibration.load()
    config = load(PAPER_CONFIG)
    overheads = {}
    for depth in PAPER_OVERHEAD:
        packed = machines["mk2"].pipeline(config, arrangement=POPART, depth=depth)
        overheads[depth] = 100 * calibration.overhead(packed, observations.unpacked, stored.parameters)
    assert overheads == pytest.approx(PAPER_OVERHEAD, rel=0.1)
    assert list(overheads.values()) == sorted(overheads.values())
    assert round(overheads[2], 4) == stored.report["overhead_fitted_depth"]["model"]


def test_the_page_states_the_errors():
    report = calibration.load().report
    errors = [100 * row["left_out_error"] for row in report["points"]]
    mean = sum(map(abs, errors)) / len(errors)
    page = (ROOT / "docs" / "cycle_model.md").read_text(encoding="utf-8")
    worst = max(map(abs, errors))
    assert f"{mean:.1f} % on average, {worst:.1f} % at worst" in page
    for point, error in zip(POINTS, errors):
        beginning = f"| {point.name} |"
        ending = f"| {point.sequences_per_second:,} | {error:+.1f} |"
        (row,) = [line for line in page.splitlines() if line.startswith(beginning)]
        assert row.endswith(ending)


def test_intervals_are_of_the_errors_left_out():
    """Errors of -10 and +25 %: 100 predicted was 80 to 111 measured."""
    report = {"points": [{"left_out_error": error} for error in (-0.1, 0.0, 0.25)]}
    fitted = calibration.Calibration(
        Parameters(1.2),
        {},
        report,
    )
    assert fitted.throughput(lambda parameters: 100.0) == pytest.approx((80.0, 100.0, 100 / 0.9))
    assert fitted.duration(lambda parameters: 100.0) == pytest.approx((90.0, 100.0, 125.0))
