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
    """{label: words of the command}, continued lines joined; other lines of the plan left out."""
    joined = "\n".join(lines).replace("\\\n", " ").splitlines()
    found = {line[:11].strip(): shlex.split(line[11:]) for line in joined}
    return {label: words for label, words in found.items() if label != "ranks"}


def value(words, option):
    return words[words.index(option) + 1]


@pytest.mark.parametrize("name", OFFERED)
def test_lines_of_ipus(name):
    config = load_config(FOLDER / f"{name}.yml")
    found = commands(start_lines(config))
    offered = [int(value(words, "--num-instances")) if words[0] == "poprun" else 0 for words in found.values()]
    assert offered == OFFERED[name]
    for label, words in found.items():
        begin = words.index("python")
        assert words[begin + 1 :] == ["run_pretraining.py", "--config", name, "--engine", "ipu"]
        if words[0] == "poprun":
            replicas, instances = (int(value(words, f"--num-{what}")) for what in ("replicas", "instances"))
            assert (replicas, int(value(words, "--ipus-per-replica"))) == (config.placement.replicas, 4)
            assert replicas % instances == 0
            assert ("--host" in words) == label.endswith("hosts")
            assert ("--mpi-local-args=-x MASTER_ADDR=HOST0" in words) == ("--host" in words)
            if "--host" in words:
                assert len(value(words, "--host").split(",")) == int(label.split()[0]) == instances


def test_more_ipus_than_a_program_has_take_more_processes():
    config = load_config(FOLDER / "packed_phase2_pod64.yml", ["placement.replicas=128", "engine.kind=ipu"])
    assert config.ipus == 512 and instances_for(config) == 8
    found = commands(start_lines(config))
    assert "start" not in found and value(found["poprun"], "--num-instances") == "8"
    assert value(found["32 hosts"], "--num-instances") == "32" and "--engine" not in found["poprun"]
    assert config.ipus / 8 <= IPUS_OF_A_PROGRAM


def test_lines_of_gpus(capsys):
    assert plan_command.main(["--config", "packed_phase2_gpu8", "--plan", "--packing-factor", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (start,) = [line for line in lines if line.startswith("  start ")]
    assert start.split() == "start torchrun --nproc-per-node 8 run_pretraining.py --config packed_phase2_gpu8".split()
    assert any(line.startswith("  ranks     8 processes") and line.endswith(": 64 each") for line in lines)
    alone = commands(start_lines(load_config(FOLDER / "packed_phase2_gpu1.yml")))
    assert alone == {"start": ["python", "run_pretraining.py", "--config", "packed_phase2_gpu1"]}
    config = load_config(FOLDER / "packed_phase2_gpu8.yml")
    assert start_lines(config, micro_batches=513)[-1].endswith("of an update: 65 each, 7 of them empty")


def test_the_line_has_the_options_of_the_plan(capsys, tmp_path):
    """Parsed again it gives the same settings."""
    given = ["--config", "packed_phase2_pod16", "--steps", "7", "--set", "run.seed=3", "--out", str(tmp_path / "a b")]
    assert plan_command.main([*given, "--plan", "--packing-factor", "2"]) == 0
    text = capsys.readouterr().out
    found = commands([line for line in text.splitlines()[-4:] if not line.startswith("  verdict")])
    again = pretrain.parse(found["poprun"][found["poprun"].index("run_pretraining.py") + 1 :])
    wanted = pretrain.parse([*given, "--engine", "ipu"])
    assert not again.plan and Path(again.out) == tmp_path / "a b"
    assert again.config == wanted.config and sorted(again.overrides) == sorted(wanted.overrides)
    assert {each.split("=")[1] for each in again.overrides} == {"7", "3", "ipu"}


def test_fine_tuning_has_its_lines(capsys, tmp_path):
    given = ["--config", "finetune_squad_packed_pod16", "--data-dir", str(tmp_path), "--plan"]
    assert plan_command.main(given) == 0
    found = commands([line for line in capsys.readouterr().out.splitlines()[-3:] if "verdict" not in line])
    replicas = load_config(FOLDER / "finetune_squad_packed_pod16.yml").placement.replicas
    assert value(found["poprun"], "--num-replicas") == str(replicas)
    program = ["python", "-m", "ipu_packed_bert", "finetune", "--config", given[1], "--data-dir", str(tmp_path)]
    assert found["start"] == [*program, "--engine", "ipu"]
