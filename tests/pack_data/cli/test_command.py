"""Errors of commands, and the list of commands."""

import argparse
import contextlib
import os
import re
import sys
from unittest import mock

import pytest

from pack_data.__main__ import COMMANDS, _main
from pack_data.cli import bars
from pack_data.cli.command import (
    ArgumentParser,
    NotFinite,
    available_cores,
    byte_count,
    count_from_zero,
    positive_int,
    run_main,
)
from pack_data.cli.terminal import progress_bar
from pack_data.reading.words import Problems
from tests.imports import ROOT
from tests.refusals import refusal_of


def raising(error):
    def main(argv):
        raise error

    return main


NO_MEMORY = RuntimeError("DefaultCPUAllocator: can't allocate memory:\n8 bytes")
NO_DIRECTORY = NotADirectoryError(20, "Not a directory", "a/y")
# An error of a command -> its exit status, and what is printed.
ENDS = [
    (ValueError("a\n  b"), 2, "error: a   b\n"),
    (Problems("x.yml: 2 problems\n  one\n  two"), 2, "error: x.yml: 2 problems\n  one\n  two\n"),
    (NO_DIRECTORY, 2, "error: a/y: Not a directory; .*choose another.*\n"),
    (MemoryError((10, 3)), 2, "error: not enough memory.*\n"),
    (NO_MEMORY, 2, "error: not enough memory.*8 bytes.*\n"),
    (ModuleNotFoundError("no torch", name="torch"), 2, "error: .*pip install torch\n"),
    (NotFinite("update 3: the loss is nan"), 3, "error: update 3: the loss is nan\n"),
    (KeyboardInterrupt(), 130, "interrupted\n"),
]


def test_every_end_of_a_command_has_its_status_and_one_line(capsys):
    for error, status, printed in ENDS:
        assert run_main(raising(error), []) == status
        assert re.fullmatch(printed, capsys.readouterr().err)
    assert run_main(lambda argv: None, []) == 0
    assert run_main(lambda argv: 3, []) == 3
    for ours in (ZeroDivisionError(), RuntimeError("a mistake of ours")):
        with pytest.raises(type(ours)):
            run_main(raising(ours), [])


def test_the_package_lists_the_commands_of_its_modules(capsys):
    programs = []
    for path in (ROOT / "pack_data").glob("*.py"):
        if path.stem != "__main__" and '__name__ == "__main__"' in path.read_text(encoding="utf-8"):
            programs.append(path.stem)
    assert sorted(COMMANDS) == sorted(programs)
    assert "python -m pack_data.sort --fast" in refusal_of(_main, ["sort", "--fast"], capsys)
    assert "none, sort" in refusal_of(_main, ["three"], capsys)
    assert _main(["--help"]) == 0
    assert "  sort       sorted batching" in capsys.readouterr().out


def test_numbers_may_have_separators_between_thousands_only():
    for typed, number in (("7", 7), ("1,000", 1000), ("12,345,678", 12_345_678), ("1_000", 1000)):
        assert positive_int(typed) == count_from_zero(typed) == number
    for typed in ("2,4", "1,5", "8,64", "1024,2048", ",", "1,", "1e3", "-1", "", "9" * 5000):
        for parse in (positive_int, count_from_zero, byte_count):
            with pytest.raises(argparse.ArgumentTypeError):
                parse(typed)


EVIL = "a\x1b]0;title\x07\x1b[31m\rerror: all is well\x9b2K\u202egnp.csv"


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
    printed = everything_in(reads)
    assert printed.count("gnp.csv") >= 3 and "0/2" in printed
    assert set(re.findall(r"[^ -~]", printed)) <= {"\r", "\n", *"█▏▎▍▌▋▊▉"}
    assert sys.stdout is streams[0] and sys.stderr is streams[1]


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


def test_cores_are_counted_without_affinity(monkeypatch):
    """macOS has no sched_getaffinity, and a sandbox may refuse it."""
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    monkeypatch.setattr(os, "sched_getaffinity", mock.Mock(side_effect=OSError("not permitted")), raising=False)
    assert available_cores() == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    assert available_cores() == 3
