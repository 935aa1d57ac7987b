"""`packed-bert COMMAND`: each command is the function of its other form, and tells people to type what they typed."""

import contextlib
import importlib
import inspect
import re
import shlex
import shutil
import sys
from functools import partial
from pathlib import Path

import pytest

from ipu_packed_bert import __main__ as packed_bert
from ipu_packed_bert.settings.shipped import FOLDER, config_file
from pack_data.cli.command import run_main, typed
from pack_data.lengths import packer_command
from tests.imports import ROOT
from tests.tiny_runs import tiny_config, tiny_data


def refused(capsys, *arguments):
    assert run_main(packed_bert.main, list(arguments)) == 2
    text = capsys.readouterr().err
    assert text.startswith("error: ") and text.count("\n") == 1
    return text


def test_alone_it_lists_every_command_with_a_line(capsys):
    for arguments in ([], ["--help"]):
        assert run_main(packed_bert.main, arguments) == 0
        listed = dict(re.findall(r"^  ([\w-]+) +(\S.*)", capsys.readouterr().out, re.M))
        assert listed == {name: command.summary for name, command in packed_bert.COMMANDS.items()}


@pytest.mark.parametrize("name", packed_bert.COMMANDS)
def test_each_is_a_function_of_its_arguments(name, capsys):
    assert (
        list(inspect.signature(importlib.import_module(packed_bert.COMMANDS[name].module).main).parameters)[0] == "argv"
    )
    try:
        assert packed_bert.main([name, "--help"]) == 0  # those that list what they run
    except SystemExit as left:  # argparse
        assert left.code == 0
    assert re.search(r"usage: (packed-bert|python) ", capsys.readouterr().out)


def printed(capsys, *arguments):
    with contextlib.suppress(SystemExit):  # argparse leaves by it
        assert packed_bert.main(list(arguments)) == 0
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("name", packed_bert.COMMANDS)
def test_the_help_of_each_fits_a_screen_and_names_the_way_to_the_rest(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    short, whole = (printed(capsys, name, option) for option in ("--help", "--help-all"))
    assert len(short) <= 30 and max(map(len, short)) <= 100
    options = [set(re.findall(r"^  (--[a-z-]+)", "\n".join(lines), re.M)) for lines in (short, whole)]
    assert options[0] <= options[1] and (options[0] or name == "export")
    if options[0] < options[1]:
        assert re.fullmatch(r"more options: (python|packed-bert) .+ --help-all", short[-1])


@pytest.mark.parametrize(
    "program, words",
    [
        ("/usr/bin/packed-bert", "packed-bert pretrain"),
        (str(ROOT / "ipu_packed_bert" / "__main__.py"), "python -m ipu_packed_bert pretrain"),
        ("../a b/run_pretraining.py", "python '../a b/run_pretraining.py'"),
        ("pytest", "python run_pretraining.py"),
    ],
)
def test_what_it_tells_to_type_is_what_was_typed(tmp_path, capsys, monkeypatch, program, words):
    config = str(tiny_config(tmp_path / "tiny.yml", tiny_data(tmp_path / "data")))
    monkeypatch.setattr(sys, "argv", [program])
    search = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name: program if name == "packed-bert" else search(name))
    options = ["--config", config, "--steps", "1", "--out", str(tmp_path / "run")]
    assert run_main(packed_bert.main, ["pretrain", *options]) == 0
    assert f"continue  {words} --resume {tmp_path / 'run'}" in capsys.readouterr().out
    other = "packed-bert export" if words.startswith("packed-bert") else "python -m ipu_packed_bert export"
    assert typed("export") == other and f"(try {other} --help)" in refused(capsys, "export", "--nonsense")
    assert "build --help)" in refused(capsys, "build", "--nonsense")


def test_pack_is_the_packer_named(capsys):
    arguments = ["--histogram", "squad_1_1_384", "--max-sequences-per-pack", "3", "--json"]
    for name in ("spfhp", "lpfhp"):
        assert run_main(partial(packer_command.main, name), arguments) == 0
        expected = capsys.readouterr().out
        assert run_main(packed_bert.main, ["pack", "--packer", name, *arguments]) == 0
        assert f'"algorithm": "{name}"' in expected
        times = re.compile(r'"\w+_seconds": [^,}]+')
        assert times.sub("", capsys.readouterr().out) == times.sub("", expected)
    assert "choose one of none, greedy" in refused(capsys, "pack", "--packer", "sphfp")
    assert "--packer: expected one argument" in refused(capsys, "pack", "--packer")


def test_a_plan_by_name_is_that_of_the_file(capsys, tmp_path, monkeypatch):
    name = "packed_phase2_pod16"
    assert config_file(name) == FOLDER / f"{name}.yml"
    assert config_file(f"configs/{name}.yml") == Path(f"configs/{name}.yml")
    monkeypatch.chdir(tmp_path)
    assert run_main(packed_bert.main, ["plan", "--config", name, "--packing-factor", "2"]) == 0
    planned = capsys.readouterr().out
    file = str(FOLDER / f"{name}.yml")
    assert run_main(packed_bert.main, ["pretrain", "--config", file, "--plan", "--packing-factor", "2"]) == 0
    # The lines to type name the configuration as it was typed here; a long one goes on below.
    whole = capsys.readouterr().out.replace(f"--config {shlex.quote(file)}", f"--config {name}")
    assert re.sub(r" \\\n +", " ", whole) == re.sub(r" \\\n +", " ", planned) and "2,137 updates" in planned
    assert f"{name}, " in refused(capsys, "plan", "--config", "zebra")


def test_a_file_comes_before_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "packed_host").write_text("")
    assert config_file("packed_host") == Path("packed_host")
