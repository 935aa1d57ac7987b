"""The commands that the plan prints start the run: parsed again, they have its instances, replicas and ranks."""

import shlex
from pathlib import Path

import pytest

from ipu_packed_bert.commands import pretrain
from ipu_packed_bert.settings.launch_lines import IPUS_OF_A_PROGRAM, instances_for, start_lines
from ipu_packed_bert.settings.loading import load_config
from ipu_packed_bert.settings.shipped import FOLDER
from ipu_profiling.planning import command as plan_command

# Name -> instances that are offered, on one host and on several; 0: one process that poprun does not start.
OFFERED = {
    "packed_phase2_pod4": [0],
    "packed_phase2_pod16": [0, 2],
    "unpacked_phase2_384_base_bow_pod64": [0, 2, 4],
    "packed_small_ipu1": [0],
}


def commands(lines):
    """Return {label: words of the command}, continued lines joined; other lines of the plan are left out."""
    joined = "\n".join(lines).replace("\\\n", " ").splitlines()
    words_of = {line[:11].strip(): shlex.split(line[11:]) for line in joined}
    words_of.pop("ranks", None)
    return words_of


def value(words, option):
    return words[words.index(option) + 1]


@pytest.mark.parametrize("name", OFFERED)
def test_lines_of_ipus(name):
    config = load_config(FOLDER / f"{name}.yml")
    offered = []
    for label, words in commands(start_lines(config)).items():
        launcher = words[: words.index("python")]
        program = words[len(launcher) + 1 :]
        assert program == ["run_pretraining.py", "--config", name, "--engine", "ipu"]
        if not launcher:
            offered.append(0)
            continue
        instances = int(value(words, "--num-instances"))
        offered.append(instances)
        assert int(value(words, "--num-replicas")) == config.placement.replicas
        assert int(value(words, "--ipus-per-replica")) == 4
        assert config.placement.replicas % instances == 0
        several = label.endswith("hosts")
        assert ("--host" in words) == several
        assert ("--mpi-local-args=-x MASTER_ADDR=HOST0" in words) == several
        if several:
            hosts = value(words, "--host").split(",")
            assert len(hosts) == int(label.split()[0]) == instances
    assert offered == OFFERED[name]


def test_more_ipus_than_a_program_has_take_more_processes():
    config = load_config(FOLDER / "packed_phase2_pod64.yml", ["placement.replicas=128", "engine.kind=ipu"])
    assert config.ipus == 512
    assert instances_for(config) == 8
    lines = commands(start_lines(config))
    assert set(lines) == {"poprun", "32 hosts"}
    assert value(lines["poprun"], "--num-instances") == "8"
    assert value(lines["32 hosts"], "--num-instances") == "32"
    assert "--engine" not in lines["poprun"]
    assert config.ipus / 8 <= IPUS_OF_A_PROGRAM


def test_lines_of_gpus():
    alone = commands(start_lines(load_config(FOLDER / "packed_phase2_gpu1.yml")))
    assert alone == {"start": ["python", "run_pretraining.py", "--config", "packed_phase2_gpu1"]}
    config = load_config(FOLDER / "packed_phase2_gpu8.yml")
    started = "torchrun --nproc-per-node 8 run_pretraining.py --config packed_phase2_gpu8"
    assert commands(start_lines(config)) == {"start": started.split()}
    assert start_lines(config, micro_batches=513)[-1].endswith("of an update: 65 each, 7 of them empty")


def test_the_line_has_the_options_of_the_plan(capsys, tmp_path):
    """Parsed again it gives the same settings."""
    options = ["--config", "packed_phase2_pod16", "--steps", "7", "--set", "run.seed=3", "--out", str(tmp_path / "a b")]
    assert plan_command.main([*options, "--plan", "--packing-factor", "2"]) == 0
    last_lines = capsys.readouterr().out.splitlines()[-4:]
    words = commands([line for line in last_lines if not line.startswith("  verdict")])["poprun"]
    again = pretrain.parse(words[words.index("run_pretraining.py") + 1 :])
    assert not again.plan
    assert Path(again.out) == tmp_path / "a b"
    assert again.config == "packed_phase2_pod16"
    assert sorted(each.text for each in again.overrides) == ["engine.kind=ipu", "run.seed=3", "run.steps=7"]
