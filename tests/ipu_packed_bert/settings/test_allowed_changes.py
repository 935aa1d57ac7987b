"""Changes on resuming: every setting is in one class, and all differences are reported at once."""

import shutil

import pytest
import yaml

from ipu_packed_bert.commands import pretrain
from ipu_packed_bert.engine.host import HostEngine
from ipu_packed_bert.run_files.checkpoints import checkpoints, load_checkpoint
from ipu_packed_bert.run_files.folder import CHECKPOINTS, CONFIG, LOG, read_log
from ipu_packed_bert.settings.allowed_changes import check_allowed, compare
from ipu_packed_bert.settings.config import ConfigError, settings_of
from ipu_packed_bert.settings.finetuning import TASKS
from ipu_packed_bert.settings.loading import config_from_tree
from pack_data.cli.command import run_main
from pack_data.reading.declare import ASK, FREE
from tests.refusals import faults_of_refusals
from tests.tiny_runs import logged, tiny_settings

SETTINGS = dict(settings_of("pretrain"))
for each in TASKS.values():
    SETTINGS.update(settings_of("finetune", each.settings))
# Settings that change the updates to come.
EXPERIMENT = {key for key, setting in SETTINGS.items() if setting.resume == ASK}
NEVER = {key for key, setting in SETTINGS.items() if setting.resume not in (ASK, FREE)}


def configured(*overrides):
    return config_from_tree(tiny_settings(), "tiny.yml", overrides)


STORED = configured().to_yaml()
# Another value of each setting, all of them together a configuration that can be.
OTHERS = {
    "run.keep_checkpoints": "7",
    "run.checkpoint_every": "2",
    "engine.threads": "2",
    "engine.kind": "auto",
    "optimizer.name": "adamw",
    "optimizer.learning_rate": "0.02",
    "optimizer.max_gradient_norm": "1.0",
    "loss.normalisation": "sequence",
    "model.hidden_dropout": "0.2",
    "engine.precision": "bfloat16",
    "batch.micro_batch": "4",
    "batch.gradient_accumulation": "5",
    "model.hidden_size": "32",
    "model.num_heads": "4",
    "run.seed": "6",
    "run.steps": "20",
}


def test_every_difference_is_named_in_one_message():
    config = configured(*(f"{key}={value}" for key, value in OTHERS.items()))
    with pytest.raises(ConfigError) as caught:
        compare("runs/a", STORED, config)
    first, *lines = str(caught.value).split("\n")
    refused = {key for key in OTHERS if key in EXPERIMENT or key in NEVER}
    assert first == f"runs/a: {len(refused)} problems"
    assert {line.split()[0] for line in lines} == refused
    for line in lines:
        key = line.split()[0]
        assert ("--allow-change " + key in line) == (key in EXPERIMENT)
        assert "by --set" in line


@pytest.mark.parametrize("key", sorted(set(OTHERS) & EXPERIMENT))
def test_what_changes_the_experiment_is_refused_unless_it_is_allowed_by_name(key):
    config = configured(f"{key}={OTHERS[key]}")
    with pytest.raises(ConfigError, match=f"{key} is .* there, {OTHERS[key]} by --set; .*--allow-change {key}$"):
        compare("runs/a", STORED, config, allowed=sorted(EXPERIMENT - {key}))
    actual = compare("runs/a", STORED, config, allowed=[key])
    assert [change.key for change in actual.allowed] == [key]
    assert actual.noted == ()


def test_a_number_is_compared_as_one():
    tree = yaml.safe_load(STORED)
    tree["optimizer"]["learning_rate"] = "1e-2"
    tree["placement"]["layers_per_ipu"] = (2,)
    assert compare("runs/a", yaml.dump(tree).replace("!!python/tuple", ""), configured()).lines == []


REFUSED = [
    ("check_allowed(['optimizer.learningrate'], configured())", ["optimizer.learningrate", "optimizer.learning_rate"]),
    ("check_allowed(['model.hidden_size'], configured())", ["model.hidden_size", "cannot be changed"]),
    ("check_allowed(['batch.micro_batch,optimizer.nome'], configured())", ["optimizer.nome", "optimizer.name"]),
    *[(f"compare('runs/a', {damaged!r}, configured())", ["runs/a", "damaged"]) for damaged in ("[1]", "a: [", "")],
]


def test_what_cannot_be_allowed_or_compared_is_one_line():
    scope = {"check_allowed": check_allowed, "compare": compare, "configured": configured}
    faults = faults_of_refusals([(*row, ConfigError) for row in REFUSED], scope)
    assert not faults, "\n".join(faults)


@pytest.fixture(scope="module")
def trained(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("resuming")
    options = ["--steps", "2", "--set", "optimizer.schedule_steps=8", "--set", "run.evaluate_every=0"]
    assert pretrain.main(["--config", tiny, "--out", str(folder / "run"), *options]) == 0
    return folder / "run"


@pytest.fixture
def copied(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


def test_a_changed_run_is_refused_by_name_or_goes_on_where_it_is_allowed(copied, capsys, monkeypatch):
    changed = ["--set", "batch.micro_batch=1", "--set", "optimizer.name=adamw", "--set", "run.keep_checkpoints=3"]
    resume = ["--resume", str(copied), "--steps", "3", *changed]
    capsys.readouterr()
    assert run_main(pretrain.main, resume) == 2
    assert capsys.readouterr().err.count("\n") == 3
    allow = ["--allow-change", "batch.micro_batch,optimizer.name"]
    with monkeypatch.context() as patch:  # killed before its first checkpoint
        patch.setattr(HostEngine, "step", lambda *_: (_ for _ in ()).throw(MemoryError("killed")))
        with pytest.raises(MemoryError):
            pretrain.main([*resume, *allow])
    assert "allowed   optimizer.name lamb -> adamw, batch.micro_batch 2 -> 1" in capsys.readouterr().out
    assert run_main(pretrain.main, ["--resume", str(copied)]) == 2  # nothing was saved since: it is asked again
    assert "--allow-change optimizer.name" in capsys.readouterr().err
    assert pretrain.main(["--resume", str(copied), *allow]) == 0
    assert logged(copied) == [1, 2, 3]
    newest = load_checkpoint(checkpoints(copied / CHECKPOINTS)[-1])
    assert newest.batches["packs_per_update"] == 2
    assert newest.batches["packs"] == 4 + 4 + 2


def test_a_run_of_ipus_goes_on_without_them_as_it_is(copied, capsys):
    """Its configuration has the block that a new run on such a machine would have applied."""
    tree = yaml.safe_load((copied / CONFIG).read_text())
    tree["engine"]["kind"] = "ipu"
    tree["without_ipus"] = {"batch": {"gradient_accumulation": 1}}
    (copied / CONFIG).write_text(yaml.safe_dump(tree))
    assert pretrain.main(["--resume", str(copied), "--steps", "3", "--engine", "host"]) == 0
    assert "block applies" not in capsys.readouterr().out
    assert [record["packs"] for record in read_log(copied / LOG)] == [4, 4, 4]
