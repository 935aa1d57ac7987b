"""Progress: a bar on a terminal, lines elsewhere, nothing of what is quickly done."""

import fcntl
import io
import os
import re
import struct
import sys
import termios

import pytest

from pack_data.cli.terminal import progress_bar, progress_shown
from pack_data.cli.timing import time_text


class Clock:
    """The time that tqdm sees."""

    def __init__(self, monkeypatch):
        self.now = 1000.0
        monkeypatch.setattr("tqdm.std.time", lambda: self.now)


@pytest.fixture(autouse=True)
def shown():
    """Bars are shown, as in a command."""
    with progress_shown():
        yield


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def work(clock, seconds, total=400, of=400):
    with progress_bar(total, "experiment", unit=" cells") as bar:
        for _ in range(of):
            clock.now += seconds
            bar.update()


def test_a_file_gets_a_line_every_ten_seconds_with_the_time_left(clock, capsys):
    work(clock, 1.0)
    lines = capsys.readouterr().err.splitlines()
    done = [int(re.fullmatch(r"experiment: (\d+) of 400 cells, .+ left", line)[1]) for line in lines[:-1]]
    assert len(lines) >= 30 and all(later - earlier >= 10 for earlier, later in zip(done, done[1:]))
    for number, line in zip(done, lines):
        assert line.endswith(f", {time_text(400 - number)} left")


def on_a_terminal(task, *, size=(24, 80)):
    reads, writes = os.openpty()
    fcntl.ioctl(writes, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
    before = sys.stderr
    try:
        sys.stderr = os.fdopen(writes, "w")
        task()
        os.write(sys.stderr.fileno(), b".")
        printed = ""
        while not printed.endswith("."):  # a terminal gives what it has, which may be a part
            printed += os.read(reads, 1 << 20).decode()
        sys.stderr.close()
    finally:
        sys.stderr = before
        os.close(reads)
    return printed


@pytest.mark.parametrize("size", [(24, 80), (0, 0)])  # one that does not know its size has a bar too
def test_a_terminal_has_a_bar_of_what_takes_long_and_it_is_taken_away(clock, size):
    assert on_a_terminal(lambda: work(clock, 0.0001)) == "."
    printed = on_a_terminal(lambda: work(clock, 0.3, of=20), size=size)
    assert "/400" in printed and re.search(r"\r +\r\.$", printed)


@pytest.mark.parametrize("closed", [False, True])
def test_without_a_standard_error_the_work_goes_on(clock, monkeypatch, closed):
    stream = io.StringIO() if closed else None
    if stream is not None:
        stream.close()
    monkeypatch.setattr(sys, "stderr", stream)
    work(clock, 5.0, of=4)
