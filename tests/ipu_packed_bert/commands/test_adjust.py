"""From an unpacked configuration to the packed ones of the paper's section 3.3."""

import math

import pytest
import yaml

from ipu_packed_bert.commands import adjust
from ipu_packed_bert.settings.pretraining import load_config
from pack_data.cli.command import run_main
from pack_data.store.data_set import PackStore
from tests.tiny_runs import tiny_data, tiny_settings


def unpacked(tmp_path, **optimizer):
    settings = tiny_settings()
    settings["data"].update(packer="none", max_sequences_per_pack=1)
    settings["batch"]["gradient_accumulation"] = 16
    settings["optimizer"].update(optimizer)
    path = tmp_path / "unpacked_tiny.yml"
    path.write_text(yaml.safe_dump(settings))
    return path


def test_both_files_load_and_hold_what_the_paper_says(tmp_path):
    data, out, origin = tiny_data(tmp_path / "data"), tmp_path / "configs", unpacked(tmp_path)
    assert run_main(adjust.main, ["--config", str(origin), "--data", str(data), "--out", str(out)]) == 0
    assert sorted(path.name for path in out.iterdir()) == ["packed_tiny_accumulation.yml", "packed_tiny_betas.yml"]
    with PackStore.open(data) as store:
        factor = store.manifest.packing_factor
    assert factor > 1.2
    before = load_config(origin)
    divided, betas = load_config(out / "packed_tiny_accumulation.yml"), load_config(out / "packed_tiny_betas.yml")
    assert divided.accumulation(factor) == math.ceil(16 / factor) and divided.betas(factor) == before.betas(1.0)
    assert divided.run.steps == before.run.steps
    assert betas.accumulation(factor) == 16
    assert betas.betas(factor) == (before.optimizer.beta1**factor, before.optimizer.beta2**factor)
    assert betas.run.steps == math.ceil(before.run.steps / factor)
    assert divided.optimizer.learning_rate == betas.optimizer.learning_rate == before.optimizer.learning_rate
    assert divided.data.directory == betas.data.directory == str(data)


def test_a_stated_schedule_shrinks_with_the_steps(tmp_path):
    data, out = tiny_data(tmp_path / "data"), tmp_path / "configs"
    origin = unpacked(tmp_path, schedule_steps=24)
    assert run_main(adjust.main, f"--config {origin} --data {data} --out {out}".split()) == 0
    divided, betas = load_config(out / "packed_tiny_accumulation.yml"), load_config(out / "packed_tiny_betas.yml")
    assert divided.schedule_steps == 24 and betas.run.steps <= betas.schedule_steps <= 2 * betas.run.steps < 24


@pytest.mark.parametrize("depth, complaint", [(3, "starts from an unpacked configuration"), (1, "nothing to adjust")])
def test_what_cannot_be_adjusted_is_one_line(tmp_path, capsys, depth, complaint):
    data = tiny_data(tmp_path / "data", depth=depth)
    path = unpacked(tmp_path)
    if depth > 1:
        settings = tiny_settings(data)
        path.write_text(yaml.safe_dump(settings))
    assert run_main(adjust.main, ["--config", str(path), "--data", str(data)]) == 2
    text = capsys.readouterr().err
    assert complaint in text and text.count("\n") == 1


def test_no_file_is_overwritten(tmp_path, capsys):
    origin, data = unpacked(tmp_path), tiny_data(tmp_path / "data")
    arguments = f"--config {origin} --data {data} --out {tmp_path / 'configs'}".split()
    assert run_main(adjust.main, arguments) == 0
    former = (tmp_path / "configs" / "packed_tiny_betas.yml").read_bytes()
    assert run_main(adjust.main, arguments) == 2
    assert "is there already" in capsys.readouterr().err
    assert (tmp_path / "configs" / "packed_tiny_betas.yml").read_bytes() == former


def test_a_file_is_no_folder_to_write_to(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    arguments = ["--config", unpacked(tmp_path), "--data", tiny_data(tmp_path / "data"), "--out", tmp_path / "file"]
    assert run_main(adjust.main, [str(each) for each in arguments]) == 2
    assert f"--out {tmp_path / 'file'}: {tmp_path / 'file'} is a file" in capsys.readouterr().err
