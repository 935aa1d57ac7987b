"""Errors of commands, and the list of commands."""

import argparse
import contextlib
import os
import re
import subprocess
import sys
from functools import partial
from unittest import mock

import pytest

from pack_data.cli import bars
from pack_data.cli.command import (
    ArgumentParser,
    NotFinite,
    available_cores,
    byte_count,
    count_from_zero,
    list_commands,
    positive_int,
    progress_bar,
    run_main,
)
from pack_data.reading.words import Problems
from tests.imports import ROOT
from tests.refusals import refusal_of


def raising(error):
    def main(argv):
        raise error

    return main


@pytest.mark.parametrize(
    "error, printed",
    [
        (ValueError("a\n  b"), "error: a   b\n"),
        (FileNotFoundError("No such file: 'x'"), "error: No such file: 'x'\n"),
        (Problems("config.yml: 2 problems\n  one\n  two"), "error: config.yml: 2 problems\n  one\n  two\n"),
    ],
)
def test_one_line_unless_it_is_several_problems(error, printed, capsys):
    assert run_main(raising(error), []) == 2
    assert capsys.readouterr().err == printed


EVIL = "a\x1b]0;title\x07\x1b[31m\rerror: all is well\x9b2K\u202egnp.csv"


def test_a_name_moves_no_cursor_and_changes_no_colour(capsys):
    assert run_main(raising(ValueError(f"{EVIL}: no such file")), []) == 2
    assert capsys.readouterr().err.rstrip("\n").isprintable()


def everything_in(terminal):
    """Read a terminal whose other end is closed: the kernel delivers what was written in several pieces."""
    pieces = []
    with contextlib.suppress(OSError):
        while not pieces or pieces[-1]:
            pieces.append(os.read(terminal, 1 << 16))
    os.close(terminal)
    return b"".join(pieces).decode()


def test_no_control_character_comes_to_a_terminal_but_those_of_bars(monkeypatch):
    monkeypatch.setattr(bars, "_DELAY", 0.0)

    def says(argv):
        print(EVIL)
        print(f"note: {EVIL}", file=sys.stderr)
        with progress_bar(2, EVIL) as bar:
            bar.update()
        progress_bar(None, EVIL, at_once=True).close()

    reads, writes = os.openpty()
    streams = sys.stdout, sys.stderr
    try:
        sys.stdout = sys.stderr = os.fdopen(writes, "w")
        assert run_main(says, []) == 0
        sys.stdout.close()
    finally:
        sys.stdout, sys.stderr = streams
    said = everything_in(reads)
    assert said.count("gnp.csv") >= 3 and "0/2" in said
    assert set(re.findall(r"[^ -~]", said)) <= {"\r", "\n", *"█▏▎▍▌▋▊▉"}
    assert sys.stdout is streams[0] and sys.stderr is streams[1]


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
        (["--corpsu", "a"], "there is no option --corpsu, did you mean --corpus?"),
        (["--corpus", "a", "--colums=b"], "there is no option --colums, did you mean --columns?"),
        (["--corpus", "a", "--elsewhere"], "unrecognized arguments: --elsewhere (try"),
        (["--", "--corpsu"], "required: --corpus (try"),
        (["--corpus", "a", "--lr=1"], "no option --lr, did you mean --set optimizer.learning_rate=VALUE?"),
        (["--corpus", "a", "--batch-size", "1"], "no option --batch-size, did you mean --set batch.micro_batch=VALUE?"),
        (["--corpus", "a", "--depth", "3"], "did you mean --set data.max_sequences_per_pack=VALUE?"),
        (["--corpus", "a", "--seq-len", "3"], "did you mean --max-sequence-length?"),
        (["--corpus", "a", "--epochs", "3"], "did you mean --steps?"),
    ],
)
def test_an_option_that_is_nearly_one(given, words):
    parser = ArgumentParser(prog="program")
    parser.add_argument("--corpus", required=True)
    for option in ("--columns", "--max-sequence-length", "--steps", "--set"):
        parser.add_argument(option)
    parser.add_argument("rest", nargs="?")
    with pytest.raises(ValueError) as caught:
        parser.parse_args(given)
    assert words in str(caught.value)


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
    main = partial(list_commands, "p", {"one": "does it", "other": "does more"})
    assert refusal_of(main, ["one", "--fast"], capsys).endswith("type python -m p.one --fast\n")
    assert refusal_of(main, ["three"], capsys).endswith("the commands are one, other\n")
    assert main(["--help"]) == 0 and "  other  does more" in capsys.readouterr().out


@pytest.mark.parametrize(
    "error", [MemoryError(), MemoryError((10, 3)), RuntimeError("DefaultCPUAllocator: can't allocate memory:\n8 bytes")]
)
def test_memory_that_is_not_there_is_one_line(capsys, error):
    assert refusal_of(raising(error), [], capsys).startswith("error: not enough memory")
    with pytest.raises(RuntimeError, match="of ours"):
        run_main(raising(RuntimeError("a mistake of ours")), [])


@pytest.mark.parametrize("typed", ["7", "1,000", "12,345,678", "1_000"])
def test_thousands_may_be_set_apart(typed):
    assert positive_int(typed) == count_from_zero(typed) == int(typed.replace(",", "").replace("_", ""))


@pytest.mark.parametrize("typed", ["2,4", "1,5", "8,64", "1024,2048", ",", "1,", "1e3", "-1", "", "9" * 5000])
def test_several_numbers_are_not_read_as_one(typed):
    for number in (positive_int, count_from_zero, byte_count):
        with pytest.raises(argparse.ArgumentTypeError):
            number(typed)


def test_what_the_system_refuses_names_the_file_and_a_way_out(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert run_main(lambda argv: open(tmp_path / "file" / "y", "w").close()) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"error: {tmp_path / 'file' / 'y'}: ") and "choose another" in told and "Errno" not in told


def test_cores_are_counted_without_affinity(monkeypatch):
    """macOS has no sched_getaffinity, and a sandbox may refuse it."""
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    monkeypatch.setattr(os, "sched_getaffinity", mock.Mock(side_effect=OSError("not permitted")), raising=False)
    assert available_cores() == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    assert available_cores() == 3
