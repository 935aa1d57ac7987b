"""Checks that bad input is refused in one line that names what is wrong, and that nothing was written."""

import contextlib
import re
from pathlib import Path

import pytest

from pack_data.cli.command import run_main


def _assert_names(text, names):
    """Every name (a field, file or value as it is, or a pattern) stands in the text."""
    for name in map(str, names):
        assert name in text or re.search(name, text), f"{name!r} is not named in: {text}"


def _contents(directory):
    """Path below the directory -> its bytes, None for a directory."""
    paths = sorted(Path(directory).rglob("*"))
    return {path.relative_to(directory): path.read_bytes() if path.is_file() else None for path in paths}


@contextlib.contextmanager
def refused(*names, kind=ValueError, unchanged=None):
    """Check that the block raises one line that names every given field, file and value, and changes no file.

    kind: the type of the error. unchanged: a directory whose files stay as they are.
    """
    before = _contents(unchanged) if unchanged else None
    with pytest.raises(kind) as caught:
        yield caught
    text = str(caught.value)
    assert text and "\n" not in text
    _assert_names(text, names)
    if unchanged:
        assert _contents(unchanged) == before


def refusal_of(main, arguments, capsys, *names, unchanged=None, after=""):
    """Check that a command exits with status 2 and prints one line that names every field, file and value; return it.

    Nothing else is printed. unchanged: a directory whose files stay as they are. after: a pattern of what the command
    may print before the line.
    """
    before = _contents(unchanged) if unchanged else None
    assert run_main(main, list(map(str, arguments))) == 2
    printed = capsys.readouterr()
    earlier, sign, line = printed.err.rpartition("error: ")
    assert sign and line.count("\n") == 1 and line.endswith("\n"), printed
    assert re.fullmatch(after, printed.out + earlier, re.DOTALL), printed
    _assert_names(line, names)
    if unchanged:
        assert _contents(unchanged) == before
    return sign + line


def rows_of(text):
    """Parse a table, a row a line: `call => name | name`, and in some tables a third column.

    A line that begins with spaces continues the row above it; a line with `#` in front is a comment.
    """
    rows = []
    for line in text.strip().replace("\n    ", " ").splitlines():
        if not line.startswith("#"):
            call, names, *others = line.split(" => ")
            rows.append((call, names.split(" | "), *others))
    return rows


def faults_of_refusals(table, scope, *, unchanged=None):
    """Run a table of refused calls; return a line for each row that is not refused as it says.

    A row is (call, names) or (call, names, kind). call: an expression as text, evaluated with the names of `scope`.
    names: what the message must hold, as it is or as a pattern. kind: the type of the error, or its name; ValueError if
    left out.
    unchanged: a directory whose files stay as they are.
    """
    before = _contents(unchanged) if unchanged else None
    faults = []
    for call, names, *kinds in table:
        kind = kinds[0] if kinds else ValueError
        if isinstance(kind, str):
            kind = eval(kind, dict(scope))
        try:
            eval(call, dict(scope))
        except kind as error:
            text = str(error)
            missing = [name for name in map(str, names) if name not in text and not re.search(name, text)]
            if missing or not text or "\n" in text:
                faults.append(f"{call}: {missing or 'one line'} is missing in: {text!r}")
        else:
            faults.append(f"{call}: is not refused")
        if unchanged and _contents(unchanged) != before:
            faults.append(f"{call}: changed a file")
    return faults
