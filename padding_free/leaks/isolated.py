"""An assertion for test suites: the examples of a packed row do not affect each other."""

from __future__ import annotations

import textwrap
from typing import Any

from padding_free.leaks.probe import Probed, check_no_leak
from padding_free.models import Leak

# Columns of a failure message: its 300 characters take at most three lines below the first.
_WIDTH = 110


def assert_isolated(model: Any, **options: Any) -> Probed:
    """Assert that each example of a packed row gets the same logits, loss and gradients as alone.

        def test_my_model():
            assert_isolated(build_my_model(), longest=64)

    Args:
        model: The model to judge.
        options: The options of `check_no_leak`: longest, row, forward, collator, loss, mean, quick.

    Returns:
        The rows, dtypes and time of the check.

    Raises:
        AssertionError: The examples affect each other. The message has at most five lines; it names the first wrong
            token, the first layer that differs, and the inputs that are ignored.
        ValueError: The model cannot be judged.
    """
    __tracebackhide__ = True
    try:
        return check_no_leak(model, **options)
    except Leak as leak:
        reason = textwrap.fill(str(leak), _WIDTH, break_on_hyphens=False)
        raise AssertionError(f"the examples of a packed row affect each other:\n{reason}") from None
