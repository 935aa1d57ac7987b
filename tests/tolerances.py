"""Tolerances between two computations of the same value, by dtype; measured worst cases are far below."""

import pytest
import torch

# Relative L2 over all gradients. Measured packed against unpacked: 4e-15 and 2e-6.
_EXACT = {torch.float64: 1e-12, torch.float32: 2e-5}


def relative_tolerance(*, dtype: torch.dtype) -> float:
    return _EXACT[dtype]


def relative_error(found, expected) -> float:
    """|found - expected| / |expected|, L2 over all tensors of two equally long lists."""
    found, expected = list(found), list(expected)
    assert len(found) == len(expected) > 0
    difference = sum(float(((a.double() - b.double()) ** 2).sum()) for a, b in zip(found, expected))
    size = sum(float((b.double() ** 2).sum()) for b in expected)
    assert size > 0
    return (difference / size) ** 0.5


def assert_same(*, found, expected, dtype: torch.dtype) -> None:
    """`found` and `expected` are lists of tensors, equal up to the rounding of `dtype`."""
    error, allowed = relative_error(found, expected), relative_tolerance(dtype=dtype)
    assert error <= allowed, f"relative L2 error {error:.1e} over {allowed:.1e}"


def same_state(one, several):
    """Weights and both moments of a checkpoint in float64, within 1e-12 of their size."""
    for part in ("model", "exp_avg", "exp_avg_sq"):
        expected, found = ({**each["engine"], **each["engine"]["optimizer"]}[part] for each in (one, several))
        assert expected.keys() == found.keys() and {tensor.dtype for tensor in found.values()} == {torch.float64}
        assert_same(found=[found[name] for name in expected], expected=expected.values(), dtype=torch.float64)


def same_records(one, several, *, rel=1e-11) -> None:
    """Numbers of two logs, update by update, but for wall-clock seconds; what was not measured is null in both."""
    assert len(one) == len(several) > 0
    for expected, found in zip(one, several):
        assert found.keys() == expected.keys()
        for name in expected.keys() - {"seconds"}:
            number = expected[name]
            assert found[name] == (number if number is None else pytest.approx(number, rel=rel)), name


def same(found, expected) -> None:
    """Compare the fields of two dataclasses of numbers, such as costs, but for rounding."""
    for field in expected.__dataclass_fields__:
        assert getattr(found, field) == pytest.approx(getattr(expected, field)), field
