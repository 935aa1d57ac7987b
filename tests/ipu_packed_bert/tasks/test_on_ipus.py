"""Every task on the IPU engine: updates and predictions are the host's, and those of each sequence alone.

On the stand-in for PopTorch, which is told to have float64, so that what is equal is equal to 1e-12.
"""

import re
import shutil

import numpy as np
import pytest
import torch

from ipu_packed_bert.commands import finetune
from ipu_packed_bert.engine import choose_engine
from ipu_packed_bert.engine.host import HostEngine
from ipu_packed_bert.model.optimizer import build_optimizer
from ipu_packed_bert.run_files.checkpoints import checkpoint_path, load_newest
from ipu_packed_bert.run_files.folder import read_log
from ipu_packed_bert.training.examples import ExamplesRun, prepare
from ipu_packed_bert.training.export import import_folder
from pack_data.cli.command import run_main
from tests.fakes.machine import machine
from tests.fakes.sdk import installed, missing
from tests.fine_tuning_files import KINDS, PIPELINE, tiny_config, training_file
from tests.refusals import refused
from tests.tiers import sample
from tests.tolerances import relative_error

pytest.importorskip("safetensors", reason="Hugging Face's files: pip install safetensors")

ON_IPUS = {
    "kind": "ipu",
    "half_weights": False,
    "stochastic_rounding": False,
    "loss_scaling": 16.0,
}
# The tiny network has two layers.
LAYOUTS = {
    "one IPU": {},
    "pipeline of 2, 2 replicas": PIPELINE,
    "pipeline of 4, embeddings alone": {
        "ipus_per_replica": 4,
        "layers_per_ipu": [0, 1, 0, 1],
        "available_memory_proportion": [0.2] * 4,
    },
}


@pytest.fixture
def sdk():
    with installed(ipus=16) as modules:
        machine.float64 = True
        yield modules
    machine.reset()


def prepared(checkpoint, folder, kind, placement, **sections):
    """A task on a tiny file with an IPU engine in float64."""
    sections.setdefault("engine", {}).update(ON_IPUS)
    sections.setdefault("batch", {"sequences_per_update": 24, "micro_batch": 3})
    # The host adds 1e-6 to the norm that an update is clipped by, as torch does; PopTorch does not.
    sections.setdefault("optimizer", {"max_gradient_norm": None})
    run = prepare(
        tiny_config(
            checkpoint,
            training_file(folder, kind),
            task=kind,
            placement=placement,
            **sections,
        )
    )
    run.engine._program.double()
    return run


def host_of(run):
    """The host engine of the same run, in float64 and with the same weights."""
    host = HostEngine(run.config, run.task, packing_factor=run.task.packs.packing.packing_factor)
    host.load_state({**host.state(), "model": run.engine.state()["model"]})
    host.model.double()
    host.optimizer = build_optimizer(host.model, run.config.optimizer, betas=(0.9, 0.999))
    return host


def exact(batch, layout):
    """The batch with its scales in float64."""
    scaled = dict(batch)
    for name, counted in layout.scales.items():
        scale = layout.micro_batches_per_update / np.count_nonzero(batch[counted])
        scaled[name] = np.full(layout.rows, scale)
    return scaled


def weights(engine):
    """Without the key's bias, whose gradient is zero but for rounding."""
    if isinstance(engine, HostEngine):
        network = engine.model
    else:
        engine._training.copyWeightsToHost()
        network = engine._network
    return [item.detach().clone() for name, item in network.named_parameters() if not name.endswith("key.bias")]


EACH = [(kind, layout) for kind in KINDS for layout in LAYOUTS if layout != "one IPU" or kind == "squad"]


@pytest.mark.parametrize("kind, layout", sample(EACH, 3))
def test_updates_and_predictions_are_the_hosts(sdk, checkpoint, tmp_path, kind, layout):
    run = prepared(checkpoint, tmp_path, kind, LAYOUTS[layout])
    host = host_of(run)
    before = weights(host)
    answers_before = predictions(run, host)
    rows = []  # of each update, those with a sequence
    for _ in range(run.batches.updates_per_epoch):
        batch = exact(next(run.batches), run.batches.layout)
        metrics = run.engine.step(batch, 1e-3).metrics
        assert metrics == pytest.approx(host.step(batch, 1e-3).metrics, rel=1e-12, abs=1e-12)
        rows.append(int(batch["input_mask"].any(axis=1).sum()))
    # One program makes updates with and without rows that have no sequence.
    assert min(rows) < run.batches.layout.rows or sum(rows) == len(run.task.packs)
    assert relative_error(weights(run.engine), weights(host)) <= 1e-12
    assert relative_error(weights(host), before) > 1e-4
    # Predicted before training and after it: by one program for all batches, with the weights as they are.
    assert np.abs(answers_before - predictions(run, host)).max() > 1e-4
    assert machine.compilations == ["inference", "training"]


def test_a_program_stays_on_the_ipus_for_all_batches(sdk, checkpoint, tmp_path):
    """Taking a program off the IPUs and putting it back takes seconds there: not between two batches."""
    run = prepared(checkpoint, tmp_path, "tokens", {})
    machine.ipus = 1  # room for one program
    engine = run.engine
    host = host_of(run)
    batch = exact(next(run.batches), run.batches.layout)
    for _ in range(2):
        engine.step(batch, 1e-2)
        host.step(batch, 1e-2)
        uploads = machine.uploads
        logits = [engine.predict(batch) for _ in range(3)]
        assert machine.uploads == uploads + 1
        assert np.abs(logits[2] - host.predict(batch)).max() <= 1e-12
        assert engine.evaluate(batch).loss == pytest.approx(host.evaluate(batch).loss, rel=1e-12)
    assert machine.attachments == ["training", "inference", "inference"] * 2
    # Other weights while it is there.
    engine.predict(batch)
    state = engine.state()
    doubled = {name: 2 * weight for name, weight in state["model"].items()}
    engine.load_state({**state, "model": doubled})
    assert np.abs(engine.predict(batch) - logits[2]).max() > 1e-3
    engine.close()
    assert machine.attached == 0


def predictions(run, host):
    """Return the predictions for all held-out sequences, and check that both engines agree."""
    outputs, expected = (run.task.predict(engine, run.batches.held_out()).outputs for engine in (run.engine, host))
    assert len(outputs) == len(run.task.evaluation)
    flat, expected_flat = (np.concatenate([values.ravel() for values in item]) for item in (outputs, expected))
    assert np.abs(flat - expected_flat).max() <= 1e-12
    return flat


@pytest.mark.parametrize("kind, mask", sample([*((kind, "product") for kind in KINDS), ("squad", "additive")], 2))
def test_a_packed_update_is_the_unpacked_one(sdk, checkpoint, tmp_path, kind, mask):
    """The same sequences in packs and each alone in its row, by two programs on IPUs."""
    run = prepared(checkpoint, tmp_path, kind, {}, engine={"mask": mask})
    packs = run.task.training_packs
    layout = run.batches.layout
    numbers = packs.order(0)[: layout.packs_per_update]
    alone = packs.alone(numbers, 0)
    rows = len(alone["input_ids"])
    assert rows > 1.2 * len(numbers)
    config = run.config.changed("batch", sequences_per_update=rows, micro_batch=1)
    engine = sdk[0].engine.IpuEngine(config, run.task, run.engine.device, packing_factor=1.0)
    engine.load_state(run.engine.state())
    engine._program.double()
    before = weights(host_of(run))
    single = layout._replace(micro_batch=1).of_packs(rows)
    unpacked = engine.step(exact(single.filled(alone), single), 1e-3)
    packed = run.engine.step(exact(layout.filled(packs.batch(numbers, 0)), layout), 1e-3)
    assert packed.metrics == pytest.approx(unpacked.metrics, rel=1e-12, abs=1e-12)
    assert relative_error(weights(run.engine), weights(engine)) <= 1e-12
    assert relative_error(weights(engine), before) > 1e-4


@pytest.mark.parametrize("kind", sample(KINDS, 2))
def test_a_batch_that_is_predicted_needs_no_labels(sdk, checkpoint, tmp_path, kind):
    run = prepared(checkpoint, tmp_path, kind, {})
    host = host_of(run)
    batch = exact(next(run.batches), run.batches.layout)
    fields = {name: batch[name] for name in run.task.prediction_fields}
    for engine in (run.engine, host):
        assert np.array_equal(engine.predict(fields), engine.predict(batch))
        with refused("the batch has no", "scale"):
            engine.evaluate(fields)
    expected = host.evaluate(batch).metrics
    assert run.engine.evaluate(batch).metrics == pytest.approx(expected, rel=1e-12, abs=1e-12)


def command(*arguments):
    return run_main(finetune.main, [str(argument) for argument in arguments])


def written(folder, checkpoint, kind, **sections):
    """A configuration file for data in the folder, with an update that is clipped."""
    training = training_file(folder, kind)
    sections.setdefault("engine", {}).update(half_weights=False, loss_scaling=16.0)
    sections.setdefault("batch", {"sequences_per_update": 24, "micro_batch": 2})
    sections.setdefault("placement", LAYOUTS["pipeline of 2, 2 replicas"])
    (folder / "tiny.yml").write_text(tiny_config(checkpoint, training, task=kind, **sections).to_yaml())
    return folder / "tiny.yml"


def test_a_run_is_trained_evaluated_exported_and_resumed_on_ipus_and_elsewhere(checkpoint, tmp_path, capsys):
    """From our own pre-training; stopped and resumed it has the weights of the run that was not stopped."""
    import_folder(checkpoint, tmp_path / "pretrained")
    run = {"epochs": 2, "checkpoint_every": 2, "evaluate_every": 2, "keep_checkpoints": 9}
    dropout = {"hidden_dropout": 0.2}
    config = written(tmp_path, tmp_path / "pretrained", "single_label", model=dropout, run=run)
    with installed(ipus=16):
        assert command("--config", config, "--engine", "ipu", "--out", tmp_path / "whole") == 0
        assert machine.compilations == ["training", "inference"]
        assert all(program.stages == [0, 1] for program in machine.programs)
    assert "IPU hardware: 4 IPUs (2 x 2)" in capsys.readouterr().out
    whole = load_newest(tmp_path / "whole" / "checkpoints")
    records = read_log(tmp_path / "whole" / "log.jsonl")
    assert len(records) == whole.step > 3
    assert all(np.isfinite(record["loss"]) for record in records)
    assert len(read_log(tmp_path / "whole" / "evaluation.jsonl")) == len(records) // 2 + len(records) % 2
    for name in ("predictions.json", "model/config.json"):
        assert (tmp_path / "whole" / name).is_file()

    shutil.copytree(tmp_path / "whole", tmp_path / "stopped")
    for step in range(4, whole.step + 1, 2):
        shutil.rmtree(checkpoint_path(tmp_path / "stopped" / "checkpoints", step))
    # The run's own configuration states where it ran; without IPUs it goes on where that is asked for.
    shutil.copytree(tmp_path / "stopped", tmp_path / "moved")
    with missing():
        assert command("--resume", tmp_path / "moved") == 2
    assert "the Poplar SDK is missing" in capsys.readouterr().err
    assert command("--resume", tmp_path / "moved", "--engine", "host") == 0
    assert len(read_log(tmp_path / "moved" / "log.jsonl")) == whole.step
    with installed(ipus=16):
        assert command("--resume", tmp_path / "stopped") == 0
    assert "from update 2" in capsys.readouterr().out
    resumed = load_newest(tmp_path / "stopped" / "checkpoints")
    assert resumed.step == whole.step
    for name, weight in whole.engine["model"].items():
        assert torch.equal(resumed.engine["model"][name], weight)


def test_a_program_compiled_elsewhere(checkpoint, tmp_path, capsys):
    config = written(tmp_path, checkpoint, "tokens")
    file = tmp_path / "programs" / "tokens.poptorch"
    run = ("--config", config, "--engine", "ipu", "--out", tmp_path / "run")
    with installed(ipus=0):
        assert command(*run, "--set", f"engine.offline_export={file}") == 0
        assert not (tmp_path / "run").exists()
        assert file.is_file()
    with installed(ipus=16):
        assert command(*run, "--set", f"engine.executable={file}") == 0
        assert machine.compilations == ["inference"]
    # Of another number of labels it is another program.
    (tmp_path / "train.txt").write_text((tmp_path / "train.txt").read_text().replace("B-THING", "O"))
    capsys.readouterr()
    with installed(ipus=16):
        other = ("--config", config, "--engine", "ipu", "--out", tmp_path / "other")
        assert command(*other, "--set", f"engine.executable={file}") == 2
    assert "compiled for labels 4, but this run has 3" in capsys.readouterr().err


def test_sequences_of_an_update_that_are_too_few_are_enough_as_the_message_says(checkpoint, tmp_path, capsys):
    config = written(tmp_path, checkpoint, "single_label", run={"epochs": 1})
    run = ("--config", config, "--engine", "ipu", "--out", tmp_path / "run", "--set")
    with installed(ipus=4):
        assert command(*run, "batch.sequences_per_update=5") == 2
        output = re.search(r"--set (batch.sequences_per_update=\d+)", capsys.readouterr().err).group(1)
        assert command(*run, output) == 0


def test_a_network_is_simulated_only_where_that_is_asked_for(tmp_path):
    """Without IPUs `auto` runs on the host, though the SDK is there."""
    kinds = []
    with installed(ipus=0):
        for is_asked in (False, True):
            config = tiny_config(
                None,
                tmp_path / "t.csv",
                task="single_label",
                engine={"ipu_model": is_asked},
            )
            kinds.append(choose_engine(config, simulated=ExamplesRun.simulated).kind)
    assert kinds == ["host", "ipu_model"]
