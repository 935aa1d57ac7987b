"""Tolerances between two computations of the same value, by dtype; measured worst cases are far below."""

import pytest
import torch

# Relative L2 over all gradients. Measured packed against unpacked: 4e-15 and 2e-6.
_EXACT = {torch.float64: 1e-12, torch.float32: 2e-5}


def relative_tolerance(*, dtype):
    return _EXACT[dtype]


# Share of the pixels of a picture drawn again that are not where they were, give or take 4 pixels: letters without
# hinting move 0.0002 of them, a curve that is 0.05 nats higher 0.0007.
PICTURES_APART = 0.0004


def relative_error(found, expected):
    """|found - expected| / |expected|, L2 over all tensors of two equally long lists."""
    difference = 0.0
    size = 0.0
    for value, reference in _pairs(found, expected):
        difference += float(((value - reference) ** 2).sum())
        size += float((reference**2).sum())
    assert size > 0
    return (difference / size) ** 0.5


def _pairs(found, expected):
    """Return the tensors side by side, in float64."""
    values = [tensor.double() for tensor in found]
    references = [tensor.double() for tensor in expected]
    assert len(values) == len(references) > 0
    return list(zip(values, references))


def assert_same(*, found, expected, dtype):
    """`found` and `expected` are lists of tensors, equal up to the rounding of `dtype`."""
    error = relative_error(found, expected)
    allowed = relative_tolerance(dtype=dtype)
    assert error <= allowed, f"relative L2 error {error:.1e} over {allowed:.1e}"


def same_state(one, several):
    """Weights and both moments of a checkpoint in float64, within 1e-12 of their size."""
    for part in ("model", "exp_avg", "exp_avg_sq"):
        expected = _part(one, part)
        part_found = _part(several, part)
        assert expected.keys() == part_found.keys()
        dtypes = {tensor.dtype for tensor in part_found.values()}
        assert dtypes == {torch.float64}
        assert_same(
            found=[part_found[name] for name in expected],
            expected=expected.values(),
            dtype=torch.float64,
        )


def _part(checkpoint, part):
    """Return the tensors of the model or of a moment by their names."""
    engine = checkpoint["engine"]
    return {**engine, **engine["optimizer"]}[part]


def same_records(one, several, *, rel=1e-11):
    """Numbers of two logs, update by update, but for wall-clock seconds; what was not measured is null in both."""
    assert len(one) == len(several) > 0
    for expected, found in zip(one, several):
        assert found.keys() == expected.keys()
        for name in expected.keys() - {"seconds"}:
            wanted = expected[name]
            if wanted is not None:
                wanted = pytest.approx(wanted, rel=rel)
            assert found[name] == wanted, name


def same(found, expected):
    """Compare the fields of two dataclasses of numbers, such as costs, but for rounding."""
    for field in expected.__dataclass_fields__:
        wanted = pytest.approx(getattr(expected, field))
        assert getattr(found, field) == wanted, field
