"""The plan of a fine-tuning run: parameters as in the network, updates and stages as in the run."""

import pytest

from ipu_packed_bert import __main__ as packed_bert
from ipu_packed_bert.training.examples import prepare
from ipu_profiling.planning.plan import plan
from pack_data.cli.command import run_main
from tests.fakes.machine import machine
from tests.fakes.sdk import installed
from tests.fine_tuning_files import KINDS, PIPELINE, tiny_config, training_file
from tests.refusals import refusal_of

pytest.importorskip("safetensors", reason="Hugging Face's files: pip install safetensors")


def configured(checkpoint, folder, kind, **sections):
    sections.setdefault("placement", PIPELINE)
    sections.setdefault("batch", {"sequences_per_update": 24, "micro_batch": 3})
    return tiny_config(checkpoint, training_file(folder, kind), task=kind, **sections)


@pytest.mark.parametrize("kind", KINDS)
def test_the_plan_is_what_runs(checkpoint, tmp_path, kind):
    config = configured(checkpoint, tmp_path, kind, engine={"kind": "ipu", "half_weights": False})
    planned = plan(config)
    with installed(ipus=16):
        run = prepare(config)
        run.engine.step(next(run.batches), 1e-3)
        (program,) = machine.programs
    assert planned.update.packs == run.batches.packs_per_update
    assert planned.update.accumulation == run.engine.accumulation
    assert planned.config.batch == run.config.batch
    assert planned.config.placement == run.config.placement
    assert planned.training_stages == 2 * len(program.stages) - 1 == config.pipeline_stages == 3
    # Every weight is counted, on the IPU on which it is read; of a head two outputs.
    read = [0, 0]
    for name, parameter in run.engine._program.named_parameters():
        size = parameter.numel()
        if "classifier" in name and kind != "squad":
            size = size // parameter.shape[0] * 2
        read[program.homes[name]] += size
    assert [memory.parameters for memory in planned.memory] == read
    # Bytes of a row, as the host sends them.
    batch = run.batches.first()
    assert planned.bytes_per_pack == sum(batch[name][0].nbytes for name in planned.task.fields)


def printed(capsys, *arguments, status=0):
    """Return what `packed-bert plan` prints, in one line."""
    assert run_main(packed_bert.main, ["plan", *map(str, arguments)]) == status
    return " ".join(capsys.readouterr().out.split())


# Rows of an update = micro-batch x accumulation x replicas, about the sequences of the shipped configuration.
WITHOUT_FILES = [
    ("finetune_squad_packed_base_pod4", "2.2", "15 rows, about 33 sequences = micro-batch 1 x accumulation 15"),
    ("finetune_squad_packed_base_pod16", "2.2", "29 rows, about 64 sequences = micro-batch 1 x accumulation 8"),
    ("finetune_squad_packed_pod16", "2.2", "116 rows, about 255 sequences = micro-batch 3 x accumulation 20"),
    ("finetune_squad_packed_pod4", "2.2", "116 rows, about 255 sequences = micro-batch 2 x accumulation 58"),
    ("finetune_classification_packed_base_pod4", "6", "21 rows, about 126 sequences = micro-batch 2 x acc"),
    ("finetune_tokens_packed_base_pod4", "4", "16 rows, about 64 sequences = micro-batch 1 x accumulation 16"),
]


def test_shipped_configurations_are_planned_without_files(capsys):
    for name, factor, rows in WITHOUT_FILES:
        text = printed(capsys, "--config", name, "--packing-factor", factor)
        assert rows in text
        assert "is missing" in text
    assert "give --packing-factor" in printed(capsys, "--config", "finetune_tokens_packed_base_pod4")


def test_the_proposal_for_a_network_that_does_not_fit_fits(capsys):
    options = ["--config", "finetune_squad_packed_pod4", "--packing-factor", "2"]
    options += ["--set", "batch.micro_batch=16", "--set", "batch.sequences_per_update=1024"]
    text = printed(capsys, *options, status=1)
    proposal = text.rsplit("--set ", 1)[1].split(" ")[0]
    assert "fits: " in printed(capsys, *options, "--set", proposal)


def test_layers_of_another_network_are_refused(checkpoint, tmp_path, capsys):
    config = configured(checkpoint, tmp_path, "tokens", placement={**PIPELINE, "layers_per_ipu": [6, 6]})
    (tmp_path / "tiny.yml").write_text(config.to_yaml())
    arguments = ["plan", "--config", tmp_path / "tiny.yml"]
    refusal_of(packed_bert.main, arguments, capsys, "placement.layers_per_ipu", "12", "2")
