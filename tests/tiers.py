"""The slow tier: what `make test` leaves to `make test-slow`."""

import random

import pytest


def sample(cases, size):
    """Return all cases for parametrize; mark those outside a fixed draw of ``size`` as slow."""
    cases = list(cases)
    drawn = random.Random(len(cases)).sample(range(len(cases)), size)
    return [case if number in drawn else slow(case) for number, case in enumerate(cases)]


def slow(case):
    """Mark one case of parametrize as slow; a tuple has the values of several arguments."""
    if hasattr(case, "marks"):
        return case._replace(marks=[*case.marks, pytest.mark.slow])
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.slow)
