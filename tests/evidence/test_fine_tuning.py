"""Fine-tuning in packs: a question has the same answer in a pack as alone, and without the mask another."""

import lzma

import pytest
import torch

from evidence import __main__ as command
from evidence import fine_tuning
from evidence.runner import RESULTS, Cell, read_results
from ipu_packed_bert.model.optimizer import build_optimizer
from ipu_packed_bert.training.examples import prepare
from pack_data.cli.command import run_main
from tests.fine_tuning_files import tiny_checkpoint, tiny_config, tiny_squad, training_file

pytestmark = pytest.mark.slow


def test_the_logits_of_a_pack_are_those_of_its_sequences_alone(checkpoint, tmp_path, monkeypatch):
    settings = tiny_config(
        checkpoint, training_file(tmp_path, "squad"), task="squad", optimizer={"learning_rate": 1e-3}
    )
    training = prepare(settings)
    model = training.engine.model.to(torch.float64)
    training.engine.optimizer = build_optimizer(model, training.config.optimizer, betas=(0.9, 0.999))
    monkeypatch.setattr(fine_tuning, "SLOTS", settings.data.max_sequence_length)
    monkeypatch.setattr(fine_tuning, "MICRO_BATCH", training.config.batch.micro_batch)
    (row,) = fine_tuning.measure(training)
    packed = row["answered_packed"]
    no_mask = row["answered_no_mask"]
    assert packed["different"] == 0
    assert row["updates"] == training.steps > 1
    assert packed["logits"] < 1e-12 < 1e-4 < no_mask["logits"]
    assert packed["answers"] == no_mask["answers"] == len(training.task.examples) > 10


def test_the_experiment_trains_and_answers_alike_packed_and_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(fine_tuning, "keep_buffers", lambda: True)  # not to be undone in this process
    start = tiny_checkpoint(tmp_path / "bert", positions=384)
    (tmp_path / "data" / "squad").mkdir(parents=True)
    for name, seed in ((fine_tuning.TRAINING, 1), (fine_tuning.EVALUATION, 2)):
        plain = tiny_squad(tmp_path / "plain.json", seed=seed)
        (tmp_path / "data" / name).write_bytes(lzma.compress(plain.read_bytes()))
    arguments = ["fine_tuning", "--out", str(tmp_path / "out"), "--size", "quick", "--seeds", "2", "--no-plot"]
    arguments += ["--checkpoint", str(start)]
    assert run_main(command.main, [*arguments, "--data-dir", str(tmp_path / "data")]) == 0
    cells = read_results(tmp_path / "out" / RESULTS).cells
    assert set(cells) == {Cell("squad_start", 5), Cell("squad_packed", 1), Cell("squad_packed", 2)}
    for rows in cells.values():
        assert rows[-1]["answered_packed"]["different"] == 0
    assert (tmp_path / "out" / "start" / "config.json").exists()
