"""Every `--set` and command that the program and its pages print is accepted, on the configurations that
come with the program. Commands are parsed by their own parsers and stop there.

`python -m tests.test_printed_lines FILE` writes the list of what was executed.
"""

import argparse
import contextlib
import io
import json
import re
import shlex
import shutil
import subprocess
import sys
from functools import lru_cache, partial
from pathlib import Path

import pytest

from ipu_packed_bert import __main__ as packed_bert
from ipu_packed_bert.settings.launch_lines import start_lines
from ipu_packed_bert.settings.loading import load_config
from ipu_packed_bert.settings.shipped import config_file, shipped_names
from pack_data.cli.command import run_main
from pack_data.lengths import packer_command
from tests.imports import ROOT
from tests.source_texts import texts_of_the_program
from tests.test_docs_blocks import run_blocks

PAGES = [ROOT / page for page in run_blocks.all_pages()]
# Pages whose running text has whole commands; that of the others has parts of commands.
WHOLE = ("ipu", "ipu_check", "cluster")
NAMES = shipped_names()
SET = re.compile(r"--set (\S+?=[^\s;`]+)")
# Neither tells what to type: the form of a setting.
_FORMS = {"a.b", "section.key", "KEY"}
_OF_PRETRAINING = {"engine.half_logits"}  # printed by ipu-check, which takes no other configuration
EXECUTED = set()  # (line, where it is printed)


def loaded(name, settings=()):
    return load_config(config_file(name), settings)


shipped = lru_cache(None)(loaded)


def executed(line, where):
    EXECUTED.add((" ".join(line.split()), where))


@lru_cache(None)
def settings_in_sources():
    """{(key, value)} of every `--set key=value` in a text of the program; value None where it is put in later."""
    settings = {}
    for path, text in texts_of_the_program():
        for key, value in re.findall(r"--set \0?([\w.]+)=([\w.\[\]-]*\0?)", text):
            known = value.rstrip(".") and not re.search(r"\0|[A-Z]|\.\.", value)
            if key not in _FORMS:
                settings[key, value.rstrip(".") if known else None] = path.relative_to(ROOT).as_posix()
    return settings


def setting(config, key):
    """A (value, whether there is such a setting) of a configuration."""
    return (config.value(key), True) if key in config.settings else (None, False)


def as_typed(value):
    return json.dumps(value).replace(" ", "")


def test_there_are_settings_in_sources():
    settings = settings_in_sources()
    assert len(settings) > 25 and {"placement.layers_per_ipu", "engine.executable"} <= {key for key, _ in settings}
    assert ("engine.half_logits", "true") in settings and ("engine.offline_export", None) in settings


def test_each_setting_in_a_text_of_the_program_is_one():
    """Its key is a setting of the configurations that come with the program; the value that is printed is taken."""
    for (key, value), where in settings_in_sources().items():
        names = [name for name in NAMES if not (key in _OF_PRETRAINING and name.startswith("finetune"))]
        having = [name for name in names if setting(shipped(name), key)[1]]
        assert having, f"{where}: no configuration has {key}"
        for name in (having[0], having[-1]):
            own = value or as_typed(setting(shipped(name), key)[0])
            more = ["placement.replicated_tensor_sharding=false"] if key == "placement.replicas" and own == "1" else []
            assert loaded(name, [f"{key}={own}", *more]).origins[key] == "--set", where
            executed(f"--set {key}={own}", f"{where}, on {name}")


class _Parsed(Exception):
    """The command line was taken."""


def parse(words, monkeypatch, main=packed_bert.main):
    """Parse the words with the parser of the command, without running it."""
    original = argparse.ArgumentParser.parse_args

    def parse_args(self, args=None, namespace=None):
        raise _Parsed(original(self, args, namespace))

    with monkeypatch.context() as patched:
        patched.setattr(argparse.ArgumentParser, "parse_args", parse_args)
        patched.setattr(sys, "argv", ["packed-bert", *words])
        with pytest.raises(_Parsed) as taken:
            main(words)
    return taken.value.args[0]


def own_words(line):
    """The words of a command of packed-bert in a line that is typed; None where it is another program's."""
    words = shlex.split(line.split(" # ")[0], comments=False)
    for start, more in (
        (["packed-bert"], []),
        (["python", "-m", "ipu_packed_bert"], []),
        (["-m", "ipu_packed_bert"], []),
        (["python", "run_pretraining.py"], ["pretrain"]),
        (["run_pretraining.py"], ["pretrain"]),
    ):
        for place in range(len(words) - len(start) + 1):
            if words[place : place + len(start)] == start:
                own = more + words[place + len(start) :]
                ends = [at for at, word in enumerate(own) if word in ("|", ">", "&&", ";")]
                return own[: min(ends, default=len(own))]
    return None


def packer_words(line):
    """The packer and its arguments in a line that runs `python -m pack_data.PACKER`."""
    match = re.match(r"python -m pack_data\.(\w+)(.*)", line)
    return (match[1], shlex.split(match[2])) if match else None


def taken(line, where, monkeypatch):
    words = own_words(line)
    assert words and words[0] in packed_bert.COMMANDS, line
    args = parse(words, monkeypatch)
    named = getattr(args, "config", None)
    settings = getattr(args, "overrides", None) or []
    for name in named if isinstance(named, list) else [named]:
        if name in shipped_names():
            loaded(name, settings) if settings else shipped(name)
    executed(line, where)


def lines_of_pages():
    """Each line of a block, and each whole command in running text of the pages about machines."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for block in re.findall(r"^```sh\n(.*?)^```", text, re.M | re.S):
            for line in re.sub(r"\\\n|<<END.*?^END$", " ", block, flags=re.M | re.S).splitlines():
                typed = " ".join(line.split(" # ")[0].split())
                if not line.startswith("#") and (own_words(line) or packer_words(typed)):
                    yield page.name, typed
        for line in re.findall(r"`(packed-bert [^`]*--[^`]*)`", text):
            if "..." not in line and page.stem in WHOLE:
                yield page.name, line


def test_there_are_lines_on_the_pages():
    pages, lines = zip(*lines_of_pages())
    assert len(lines) > 80 and len(set(pages)) > 20 and any("srun" in line for line in lines)


@pytest.mark.parametrize("page, line", list(dict.fromkeys(lines_of_pages())))
def test_each_command_of_a_page_is_taken(page, line, monkeypatch):
    if not packer_words(line):
        taken(line, page, monkeypatch)
        return
    name, words = packer_words(line)
    parse(words, monkeypatch, partial(packer_command.main, name))
    executed(line, page)


@pytest.mark.parametrize("name", NAMES)
def test_each_line_that_the_plan_prints_is_taken(name, monkeypatch):
    text = "\n".join(start_lines(shipped(name))).replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines() if own_words(line) is not None]
    assert lines
    for line in lines:
        taken(re.sub(r"^(start|poprun|\d+ hosts) +", "", line), f"plan of {name}", monkeypatch)


@lru_cache(None)
def options_of(command):
    """The options in the help of a command."""
    with io.StringIO() as out:
        with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
            packed_bert.main([command, "--help-all"])
        return {"--help-all", *re.findall(r"--[a-z][a-z-]+", out.getvalue())}


def test_each_command_in_a_text_of_the_program_exists_with_its_options():
    """Words of this program in a message: `packed-bert NAME ... --option`."""
    commands = re.compile(r"packed-bert (?!from this |in the )([a-z][a-z-]+)\b((?: (?!packed-bert)[^\s;,`:()]+)*)")
    shown = [(path, *words) for path, text in texts_of_the_program() for words in commands.findall(text)]
    with_options = 0
    for path, name, rest in shown:
        assert name in packed_bert.COMMANDS, path
        options = re.findall(r"(?<= )--[a-z][a-z-]+", rest)
        assert set(options) <= options_of(name), f"{path}: packed-bert {name}{rest}"
        with_options += bool(options)
    assert with_options > 10


def make_lines():
    """{target: where it is shown} of each `make TARGET` in help, messages and pages."""
    shown = [(path, text, r"(?:`|run )make (?!it\b|the\b|room\b)") for path, text in texts_of_the_program()]
    for page in PAGES:
        shown.append((page, page.read_text(encoding="utf-8"), r"(?:`|^|&& )make (?=.* |[a-z-]+`)"))
    shown.append((ROOT / "Makefile", (ROOT / "Makefile").read_text(encoding="utf-8"), r'echo "make '))
    targets = {}
    for path, text, before in shown:
        for target in re.findall(before + r"((?:\.venv/)?[a-z][a-z-]+)", text, re.M):
            targets.setdefault(target, path.name)
    return targets


def test_each_target_that_is_shown_runs_without_an_environment_in_a_directory_with_a_space(tmp_path):
    """Printed, not run: each path of the directory is one word of the shell."""
    copy = tmp_path / "a copy"
    copy.mkdir()
    for name in ("Makefile", "setup.cfg", "pyproject.toml", *(path.name for path in ROOT.glob("requirements*.txt"))):
        shutil.copy(ROOT / name, copy)
    for target in make_lines():
        words = ["make", "--dry-run", "--no-print-directory", target, "PYTHON38=python3.8"]
        done = subprocess.run(words, cwd=copy, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert not re.search(r"(^|&& |; )(python|packed-bert) ", done.stdout, re.M)  # neither is on the path
        for line in done.stdout.replace("\\\n", " ").splitlines():
            if str(tmp_path) in line and "$(" not in line:
                cut = [word for word in shlex.split(line) if str(tmp_path) in word and str(copy) not in word]
                assert not cut, line


def test_targets_are_shown():
    assert {"pretrain", "test", "check", "test-ipu", "gpu", ".venv/ready"} <= set(make_lines())


@pytest.mark.parametrize(
    "page, main, words",
    [
        ("ipu", packed_bert.main, ["plan", "--config", "packed_phase2_pod16"]),
        ("packing", partial(packer_command.main, "optimal"), ["--histogram", "wikipedia_512"]),
    ],
    ids=["ipu", "packing"],
)
def test_the_output_on_a_page_is_printed(page, main, words, capsys):
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"<!-- generated: [^`]*?```text\n(.*?)```", text, re.S)
    assert not run_main(main, words)
    printed = capsys.readouterr().out.splitlines()
    missing = [line for line in block.splitlines() if line not in printed]
    assert block and not missing


def test_a_line_that_is_wrong_is_found(monkeypatch):
    with pytest.raises(ValueError):
        taken("packed-bert plan --config packed_phase2_pod16 --hitsogram x", "", monkeypatch)
    with pytest.raises(ValueError, match="micro_bach"):
        taken("packed-bert plan --config packed_phase2_pod16 --set batch.micro_bach=3", "", monkeypatch)
    with pytest.raises(AssertionError):
        taken("packed-bert pretrian --config packed_phase2_pod16", "", monkeypatch)


if __name__ == "__main__":

    class Plugin:
        """Keeps what the tests executed, which pytest imports anew."""

        def pytest_sessionfinish(self, session):
            lines = session.items[0].module.EXECUTED
            text = "".join(f"{line}    [{where}]\n" for line, where in sorted(lines))
            Path(sys.argv[1]).write_text(text, encoding="utf-8")

    raise SystemExit(pytest.main(["-q", "-n", "0", __file__], plugins=[Plugin()]))
