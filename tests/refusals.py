"""A mistake is one line."""

import contextlib

import pytest

from pack_data.cli.command import run_main


@contextlib.contextmanager
def refused(words, kind=ValueError):
    """Inside, an error of this kind is raised; its text is one line in which these words, a pattern, are found."""
    with pytest.raises(kind, match=words) as caught:
        yield caught
    assert str(caught.value) and "\n" not in str(caught.value)


def refusal_of(main, arguments, capsys):
    """The command refuses: exit status 2, nothing printed but one line on stderr, which this gives."""
    assert run_main(main, list(map(str, arguments))) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ") and printed.err.count("\n") == 1 and not printed.out
    return printed.err
