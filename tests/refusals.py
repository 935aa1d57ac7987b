"""A mistake is one line."""

import contextlib

import pytest


@contextlib.contextmanager
def refused(words, kind=ValueError):
    """Inside, an error of this kind is raised; its text is one line in which these words, a pattern, are found."""
    with pytest.raises(kind, match=words) as caught:
        yield caught
    assert str(caught.value) and "\n" not in str(caught.value)
