"""What every command shares: how mistakes are printed, and the list of commands."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from pack_data import spfhp
from pack_data.command import ArgumentParser, NotFinite, Problems, list_commands, run_main

ROOT = Path(__file__).resolve().parents[2]


def raising(error):
    def main(argv):
        raise error

    return main


@pytest.mark.parametrize(
    "error, printed",
    [
        (ValueError("a\n  b"), "error: a   b\n"),
        (FileNotFoundError(2, "No such file", "x"), "error: [Errno 2] No such file: 'x'\n"),
        (Problems("config.yml: 2 problems\n  one\n  two"), "error: config.yml: 2 problems\n  one\n  two\n"),
    ],
)
def test_one_line_unless_it_is_several_problems(error, printed, capsys):
    assert run_main(raising(error), []) == 2
    assert capsys.readouterr().err == printed


def test_other_errors_are_our_own():
    with pytest.raises(ZeroDivisionError):
        run_main(raising(ZeroDivisionError()), [])


def test_interruption_and_status(capsys):
    assert run_main(raising(NotFinite("update 3: the loss is nan")), []) == 3
    assert capsys.readouterr().err == "error: update 3: the loss is nan\n"
    assert run_main(raising(KeyboardInterrupt()), []) == 130
    assert run_main(lambda argv: None, []) == 0 and run_main(lambda argv: 3, []) == 3
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize(
    "given, words",
    [
        (["--colum", "a"], "required: --corpus (try"),  # what begins an option is that option
        (["--corpsu", "a"], "; --corpsu is no option, did you mean --corpus?"),
        (["--corpus", "a", "--colums=b"], "; --colums is no option, did you mean --columns?"),
        (["--corpus", "a", "--elsewhere"], "unrecognized arguments: --elsewhere (try"),
        (["--", "--corpsu"], "required: --corpus (try"),
    ],
)
def test_an_option_that_is_nearly_one(given, words):
    parser = ArgumentParser(prog="program")
    parser.add_argument("--corpus", required=True)
    parser.add_argument("--columns")
    parser.add_argument("rest", nargs="?")
    with pytest.raises(ValueError) as caught:
        parser.parse_args(given)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "options, words",
    [
        (
            ["--histogram", "nosuch.csv", "--max-sequence-length", "64"],
            "--histogram nosuch.csv: neither a file, nor a folder, nor a shipped name",
        ),
        (["--out", "nosuch/recipe.json"], "--out nosuch/recipe.json: there is no folder nosuch; make it first"),
    ],
)
def test_a_packer_names_the_option_whose_path_is_missing(options, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run_main(spfhp.main, options) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("error: " + words) and printed.err.count("\n") == 1 and not printed.out


def commands_of(package):
    """The modules of a package's top that run as programs, read from the source."""
    folder = ROOT / package
    files = [
        path.stem
        for path in folder.glob("*.py")
        if path.stem != "__main__" and '__name__ == "__main__"' in path.read_text(encoding="utf-8")
    ]
    return files + [path.parent.name for path in folder.glob("*/__main__.py")]


def test_the_package_lists_its_commands():
    done = subprocess.run([sys.executable, "-m", "pack_data"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    listed = re.findall(r"^  (\w+) +\S", done.stdout, re.M)
    assert sorted(listed) == sorted(commands_of("pack_data")) and len(set(listed)) == len(listed) > 4


def test_the_list_runs_no_command(capsys):
    assert (
        run_main(lambda argv: list_commands("p", {"one": "does it", "other": "does more"}, argv), ["one", "--fast"])
        == 2
    )
    assert run_main(lambda argv: list_commands("p", {"one": "does it", "other": "does more"}, argv), ["three"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].endswith("type python -m p.one --fast") and lines[1].endswith("the commands are one, other")


@pytest.mark.parametrize(
    "error", [MemoryError(), MemoryError((10, 3)), RuntimeError("DefaultCPUAllocator: can't allocate memory:\n8 bytes")]
)
def test_memory_that_is_not_there_is_one_line(capsys, error):
    def main(argv):
        raise error

    assert run_main(main, []) == 2
    text = capsys.readouterr().err
    assert text.startswith("error: not enough memory") and text.count("\n") == 1
    error = RuntimeError("a mistake of ours")
    with pytest.raises(RuntimeError, match="of ours"):
        run_main(main, [])
