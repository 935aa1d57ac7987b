"""The plan of a fine-tuning run: parameters as in the network, updates and stages as in the run."""

import re

import pytest

from ipu_packed_bert import __main__ as packed_bert
from ipu_packed_bert.training.examples import prepare
from ipu_profiling.planning import command as plan_command
from ipu_profiling.planning.plan import plan
from pack_data.cli.command import run_main
from tests.fakes.machine import machine
from tests.fakes.sdk import installed
from tests.fine_tuning_files import KINDS, PIPELINE, tiny_config, training_file

pytest.importorskip("safetensors", reason="Hugging Face's files: pip install safetensors")


def configured(checkpoint, folder, kind, **sections):
    sections.setdefault("placement", PIPELINE)
    sections.setdefault("batch", {"sequences_per_update": 24, "micro_batch": 3})
    return tiny_config(checkpoint, training_file(folder, kind), task=kind, **sections)


@pytest.mark.parametrize("kind", KINDS)
def test_the_plan_is_what_runs(checkpoint, tmp_path, kind):
    config = configured(checkpoint, tmp_path, kind, engine={"kind": "ipu", "half_weights": False})
    made = plan(config)
    with installed(ipus=16):
        run = prepare(config)
        run.engine.step(next(run.batches), 1e-3)
        (program,) = machine.programs
    update, batches = made.update, run.batches
    assert (update.packs, update.accumulation) == (batches.packs_per_update, run.engine.accumulation)
    assert made.config.batch == run.config.batch and made.config.placement == run.config.placement
    assert made.training_stages == 2 * len(program.stages) - 1 == config.pipeline_stages == 3
    # Every weight is counted, on the IPU on which it is read; of a head two outputs.
    counted = [memory.parameters for memory in made.memory]
    read = [0, 0]
    for name, parameter in run.engine._program.named_parameters():
        size = parameter.numel()
        if "classifier" in name and kind != "squad":
            size = size // parameter.shape[0] * 2
        read[program.homes[name]] += size
    assert counted == read
    # Bytes of a row, as the host sends them.
    batch = batches.first()
    assert made.bytes_per_pack == sum(batch[name][0].nbytes for name in made.task.fields)


def command(*arguments):
    return run_main(packed_bert.main, [str(argument) for argument in arguments])


@pytest.mark.parametrize(
    "name, factor, rows",
    [
        ("finetune_squad_packed_base_pod4", "2.2", "15 rows, about 33 sequences = micro-batch 1 x accumulation 15"),
        ("finetune_squad_packed_base_pod16", "2.2", "29 rows, about 64 sequences = micro-batch 1 x accumulation 8"),
        ("finetune_squad_packed_pod16", "2.2", "116 rows, about 255 sequences = micro-batch 3 x accumulation 20"),
        ("finetune_squad_packed_pod4", "2.2", "116 rows, about 255 sequences = micro-batch 2 x accumulation 58"),
        ("finetune_classification_packed_base_pod4", "6", "21 rows, about 126 sequences = micro-batch 2 x acc"),
        ("finetune_tokens_packed_base_pod4", "4", "16 rows, about 64 sequences = micro-batch 1 x accumulation 16"),
    ],
)
def test_the_committed_ones_without_files(name, factor, rows, capsys):
    assert command("plan", "--config", name, "--packing-factor", factor) == 0
    text = capsys.readouterr().out
    assert rows in text and "is missing" in text and "sizes: the configuration's" in text
    assert "traffic " in text and "verdict " in text
    assert command("plan", "--config", name, "--set", "run.epochs=1", "--set", "data.packer=none") == 0
    assert "1.000 sequences in a row" in capsys.readouterr().out


def test_what_nobody_knows_is_said(capsys):
    assert command("plan", "--config", "finetune_tokens_packed_base_pod4") == 0
    assert "update    unknown without the files; give --packing-factor" in capsys.readouterr().out


def test_with_files_and_weights(checkpoint, tmp_path, capsys):
    config = configured(checkpoint, tmp_path, "multi_label", engine={"threads": 1})
    (tmp_path / "tiny.yml").write_text(config.to_yaml())
    assert run_main(plan_command.main, ["--config", str(tmp_path / "tiny.yml"), "--plan"]) == 0
    text = capsys.readouterr().out
    assert f"sizes: {checkpoint}" in text and "40 sequences in" in text and "2 epochs of" in text
    assert re.search(r"traffic +[\d.]+ MiB an update .* rows of [\d,]+ bytes", text)
    # As `plan` under its own name, and on the host, whose memory it is then.
    assert command("plan", "--config", tmp_path / "tiny.yml") == 0
    assert capsys.readouterr().out == text
    assert command("plan", "--config", tmp_path / "tiny.yml", "--set", "engine.kind=host") == 0
    assert "devices   the host" in capsys.readouterr().out


def test_what_does_not_fit_says_what_does(checkpoint, tmp_path, capsys):
    name = "finetune_squad_packed_pod4"
    large = ("--set", "batch.micro_batch=16", "--set", "batch.sequences_per_update=1024", "--packing-factor", "2")
    assert command("plan", "--config", name, *large) == 1
    text = capsys.readouterr().out
    assert "verdict   does not fit" in text
    said = text.rsplit("--set ", 1)[1].split(" ")[0]
    assert command("plan", "--config", name, *large, "--set", said) == 0
    assert "fits: at most" in capsys.readouterr().out


def test_layers_of_another_network_are_refused(checkpoint, tmp_path, capsys):
    placement = {**PIPELINE, "layers_per_ipu": [6, 6]}
    config = configured(checkpoint, tmp_path, "tokens", placement=placement)
    (tmp_path / "tiny.yml").write_text(config.to_yaml())
    assert command("plan", "--config", tmp_path / "tiny.yml") == 2
    assert "placement.layers_per_ipu places 12 layers, the network has 2" in capsys.readouterr().err


def test_a_task_that_is_not_named_is_questions(tmp_path, capsys):
    """Without task.name a file is of fine-tuning where it names data files of it, and of pre-training otherwise."""
    file, factor = tmp_path / "tiny.yml", ("--packing-factor", "2", "--set", "engine.kind=host")
    file.write_text("data: {training: questions.json}\n")
    assert command("plan", "--config", file, *factor) == 0
    assert "squad, rows of 384 slots" in capsys.readouterr().out
    file.write_text("data: {directory: packs}\n")
    assert command("plan", "--config", file, *factor) == 0
    assert "squad" not in capsys.readouterr().out
