"""`packed-bert COMMAND`: each command is the function of its other form, and tells people to type what they typed."""

import importlib
import inspect
import re
import shutil
import sys
from functools import partial

import pytest

from ipu_packed_bert import __main__ as packed_bert
from pack_data.cli.command import run_main
from pack_data.cli.parser import runnable, typed
from pack_data.lengths import packer_command
from tests.imports import ROOT


def refused(capsys, *arguments):
    assert run_main(packed_bert.main, list(arguments)) == 2
    text = capsys.readouterr().err
    assert text.startswith("error: ")
    assert text.count("\n") == 1
    return text


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


@pytest.mark.parametrize(
    "program, words",
    [
        ("/usr/bin/packed-bert", "packed-bert pretrain"),
        (str(ROOT / "ipu_packed_bert" / "__main__.py"), "python -m ipu_packed_bert pretrain"),
        ("../a b/run_pretraining.py", "python '../a b/run_pretraining.py'"),
        ("pytest", "python run_pretraining.py"),
    ],
)
def test_what_it_tells_to_type_is_what_was_typed(capsys, monkeypatch, program, words):
    monkeypatch.setattr(sys, "argv", [program])
    search = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name: program if name == "packed-bert" else search(name))
    assert typed("pretrain") == words
    other = "packed-bert export" if words.startswith("packed-bert") else "python -m ipu_packed_bert export"
    assert typed("export") == other
    assert f"(try {other} --help)" in refused(capsys, "export", "--nonsense")
    assert runnable("pretrain").endswith(words.partition(" ")[2])


def test_pack_is_the_packer_named(capsys):
    arguments = ["--histogram", "squad_1_1_384", "--max-sequences-per-pack", "3", "--json"]
    for name in ("spfhp", "lpfhp"):
        assert run_main(partial(packer_command.main, name), arguments) == 0
        expected = capsys.readouterr().out
        assert run_main(packed_bert.main, ["pack", "--packer", name, *arguments]) == 0
        assert f'"algorithm": "{name}"' in expected
        times = re.compile(r'"\w+_seconds": [^,}]+')
        assert times.sub("", capsys.readouterr().out) == times.sub("", expected)
