"""A pytest plugin with the fixture `assert_isolated`; pytest loads it from the entry points of the package."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(name="assert_isolated", scope="session")
def _assert_isolated() -> Any:
    """Assert that each example of a packed row gets the same logits, loss and gradients as alone."""
    # Not imported at the start, because pytest loads plugins in every run.
    from padding_free import assert_isolated

    return assert_isolated
