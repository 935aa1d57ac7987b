"""Checkpoints of format 1 become folders: equal bit for bit, resumed as before, nothing lost on the way."""

import shutil

import pytest
import torch

from ipu_packed_bert.checkpoint import checkpoints, former_checkpoints, load_checkpoint, load_newest, split
from ipu_packed_bert.commands import convert_checkpoint, pretrain
from ipu_packed_bert.run_folder import LOG, read_log
from pack_data.command import run_main
from tests.tiny_runs import tiny_config, tiny_data


def former(path, checkpoint, **changed):
    """The checkpoint as former versions wrote it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"format": "ipu_packed_bert checkpoint 1", **checkpoint._asdict(), **changed}, path)
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of 6 updates with checkpoints after 3 and 6."""
    folder = tmp_path_factory.mktemp("whole")
    config = tiny_config(folder / "tiny.yml", tiny_data(folder / "data"))
    options = ["--steps", "6", "--set", "optimizer.schedule_steps=9", "--set", "run.evaluate_every=0"]
    assert pretrain.main(["--config", str(config), "--out", str(folder / "run"), *options]) == 0
    return folder / "run"


@pytest.fixture
def run(whole, tmp_path):
    """The same run, its checkpoints of format 1."""
    shutil.copytree(str(whole), str(tmp_path / "run"))
    for path in checkpoints(tmp_path / "run" / "checkpoints"):
        former(path.with_suffix(".pt"), load_checkpoint(path))
        shutil.rmtree(str(path))
    return tmp_path / "run"


def tensors(path):
    return {f"{s} {n}": t for s, named in split(load_checkpoint(path).engine)[1].items() for n, t in named.items()}


def test_converted_it_is_the_same_and_goes_on_the_same(whole, run, tmp_path, capsys):
    resume = ["--steps", "9"]
    assert run_main(pretrain.main, ["--resume", str(run), *resume]) == 2
    assert f"convert-checkpoint {run}" in capsys.readouterr().err
    assert run_main(convert_checkpoint.main, [str(run)]) == 0
    before, after = checkpoints(whole / "checkpoints"), checkpoints(run / "checkpoints")
    assert [path.name for path in before] == [path.name for path in after] == ["step_00000003", "step_00000006"]
    for one, other in zip(before, after):
        there = tensors(other)
        assert len(there) > 50 and all(torch.equal(tensor, there[name]) for name, tensor in tensors(one).items())
        assert load_checkpoint(one)._replace(engine={}) == load_checkpoint(other)._replace(engine={})
    assert len(former_checkpoints(run / "checkpoints")) == 2  # left where they are

    shutil.copytree(str(whole), str(tmp_path / "again"))
    for folder in (run, tmp_path / "again"):
        assert pretrain.main(["--resume", str(folder), *resume]) == 0
    losses = [[record["loss"] for record in read_log(folder / LOG)] for folder in (run, tmp_path / "again")]
    assert losses[0] == losses[1] and len(losses[0]) == 9


def test_old_files_are_deleted_where_that_is_asked_for(run):
    assert run_main(convert_checkpoint.main, [str(run / "checkpoints")]) == 0
    written = checkpoints(run / "checkpoints")[0].stat().st_mtime_ns
    assert run_main(convert_checkpoint.main, [str(run), "--delete-old"]) == 0
    assert not former_checkpoints(run / "checkpoints")
    assert checkpoints(run / "checkpoints")[0].stat().st_mtime_ns == written  # whole already: not written again
    assert run_main(convert_checkpoint.main, [str(run)]) == 2


def test_one_file(run):
    assert run_main(convert_checkpoint.main, [str(run / "checkpoints" / "step_00000003.pt")]) == 0
    assert [path.name for path in checkpoints(run / "checkpoints")] == ["step_00000003"]


def test_a_damaged_one_is_set_aside_and_the_run_goes_on(run, capsys):
    newest = run / "checkpoints" / "step_00000006.pt"
    newest.write_bytes(newest.read_bytes()[:-100])
    assert run_main(convert_checkpoint.main, [str(run)]) == 0
    assert f"{newest}: " in capsys.readouterr().out
    assert load_newest(run / "checkpoints").step == 3
    assert newest.with_name(newest.name + ".aside").exists() and not newest.exists()


def test_another_checkpoint_of_the_step_is_not_replaced(whole, run, capsys):
    shutil.copytree(str(whole / "checkpoints" / "step_00000003"), str(run / "checkpoints" / "step_00000003"))
    file = run / "checkpoints" / "step_00000003.pt"
    found = load_checkpoint(run / "checkpoints" / "step_00000003")
    found.engine["model"]["bert.pooler.dense.bias"][0] += 1
    former(file, found)
    assert run_main(convert_checkpoint.main, [str(file), "--delete-old"]) == 2
    assert "move one of them away" in capsys.readouterr().err and file.exists()


HOSTILE = {
    "format": {"format": "ipu_packed_bert checkpoint 7"},
    "step": {"step": "3"},
    "engine": {"engine": [1]},
    "model": {"engine": {"model": {"a": 1}}},
    "moments": {"engine": {"model": {}, "optimizer": {"step": 1, "exp_avg": 3, "exp_avg_sq": {}}}},
    "no number": {"engine": {"model": {}, "more": float("nan")}},
    "batches": {"batches": {"a": torch.zeros(1)}},
    "config": {"config": {"a": 1}},
    "lower_case": {"lower_case": 1},
    "code": {"config": torch.nn.Linear},
}


@pytest.mark.parametrize("what", HOSTILE)
def test_what_is_no_checkpoint_is_one_line(whole, tmp_path, capsys, what):
    file = former(tmp_path / "a.pt", load_newest(whole / "checkpoints"), **HOSTILE[what])
    assert run_main(convert_checkpoint.main, [str(file)]) == 2
    text = capsys.readouterr().err
    assert text.startswith(f"error: {file}: ") and text.count("\n") == 1
    assert list(tmp_path.iterdir()) == [file]


def test_checkpoints_of_before_the_vocabulary_was_recorded(whole, tmp_path):
    found = load_newest(whole / "checkpoints")._asdict()
    del found["vocabulary"], found["lower_case"]
    torch.save({"format": "ipu_packed_bert checkpoint 1", **found}, tmp_path / "a.pt")
    assert run_main(convert_checkpoint.main, [str(tmp_path / "a.pt")]) == 0
    there = load_newest(tmp_path)
    assert (there.vocabulary, there.lower_case, there.step) == ("", None, 6)
