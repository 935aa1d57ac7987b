"""The cost of a row: the fit finds the coefficients that made the times; a model is measured; two processes run."""

import numpy as np
import pytest

from ipu_packed_bert.padding_free.cost import fit

ROWS = [[64], [16] * 4, [4] * 16, [128], [32] * 4, [256], [64] * 4, [100, 7, 3]]


def test_the_fit_finds_the_coefficients():
    def seconds(constant, linear, quadratic):
        return [constant + linear * sum(row) + quadratic * sum(n * n for n in row) for row in ROWS]

    for made in ((1e-3, 2e-6, 3e-9), (0.0, 2e-6, 0.0), (5e-4, 0.0, 1e-8)):
        found = fit(ROWS, seconds(*made))
        assert (found.constant, found.cost.linear, found.cost.quadratic) == pytest.approx(made, rel=1e-9, abs=1e-16)
        assert found.error < 1e-9
    with pytest.raises(ValueError, match="do not grow with the tokens"):
        fit(ROWS, [1e-3] * len(ROWS))
    noisy = np.array(seconds(1e-3, 2e-6, 3e-9)) * np.random.default_rng(0).uniform(0.95, 1.05, len(ROWS))
    found = fit(ROWS, noisy)
    assert 0 < found.error < 0.1 and found.cost.linear == pytest.approx(2e-6, rel=0.5)


def test_a_model_is_measured_and_two_processes_take_their_steps(capsys, monkeypatch):
    pytest.importorskip("transformers", minversion="4.50", reason="needs transformers 4.50 or newer")
    from ipu_packed_bert.padding_free import cost

    def seconds(sides, *_, **__):  # the passes are made; how long they take depends on what else the machine does
        return {row: np.array(1e-3 + 1e-6 * sum(row)) for row, work in sides.items() if work() is None}

    monkeypatch.setattr(cost, "seconds_in_turn", seconds)
    given = ["--max-sequence-length", "128", "--examples", "200", "--steps", "2"]
    assert cost.main(given) == 0
    printed = capsys.readouterr().out
    assert "a row costs 1.00 ms, 1.00 us a token" in printed and "2 processes, 2 steps" in printed


def test_rows_that_say_nothing_are_refused():
    pytest.importorskip("transformers", minversion="4.50", reason="needs transformers 4.50 or newer")
    from ipu_packed_bert.padding_free.cost import measure_cost

    with pytest.raises(ValueError, match="64 tokens"):
        measure_cost(None, max_sequence_length=32)
