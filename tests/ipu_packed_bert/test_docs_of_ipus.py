"""The commands of docs/ipu.md and docs/ipu_check.md exist, with the options and the configurations that are named."""

import re
import shlex
from pathlib import Path

import pytest

from ipu_packed_bert import __main__ as packed_bert
from ipu_packed_bert.configurations import config_file

ROOT = Path(__file__).resolve().parents[2]
OWN = ("packed-bert ", "python -m pack_data.", "python run_pretraining.py ")


def commands():
    """The indented lines of both pages that type a command of this project, each whole."""
    found = []
    for page in ("ipu.md", "ipu_check.md"):
        text = (ROOT / "docs" / page).read_text(encoding="utf-8").replace("\\\n", " ")
        for line in re.findall(r"^    (\S.*)$", text, re.M):
            if line.startswith(OWN):
                found.append(shlex.split(line, comments=True))
    return found


@pytest.fixture(scope="module")
def help_of():
    """name of a command -> its help"""
    import contextlib
    import io

    known = {}

    def text(name):
        if name not in known:
            with io.StringIO() as out, contextlib.redirect_stdout(out):
                with contextlib.suppress(SystemExit):
                    packed_bert.main([name, "--help"])
                known[name] = out.getvalue()
        return known[name]

    return text


def test_there_are_commands():
    assert len(commands()) > 10


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_each_command_is_one(words, help_of):
    if words[0] == "packed-bert":
        name, rest = words[1], words[2:]
    elif words[1] == "-m":
        name, rest = words[2][len("pack_data.") :], words[3:]
    else:
        name, rest = "pretrain", words[2:]
    assert name in packed_bert.COMMANDS
    for option in (word for word in rest if word.startswith("--")):
        assert re.search(rf"(?<![\w-]){option}(?![\w-])", help_of(name)), option
    for option, value in zip(rest, rest[1:]):
        if option == "--config" and "/" not in value and value.startswith(("packed", "unpacked", "finetune")):
            assert Path(config_file(value)).is_file()
