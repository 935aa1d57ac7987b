"""Peak memory of a piece of work, by what the operating system counts."""

from __future__ import annotations

import numpy as np
import pytest

from pack_data import memory
from pack_data.memory import PeakMemory

MIB = 2**20


def test_what_is_used_and_freed_again_counts_and_earlier_work_does_not():
    np.ones(96 * MIB, np.uint8)
    peak = PeakMemory()
    before = peak.added()
    if before is None:
        pytest.skip("this system does not tell a process its peak memory")
    np.ones(48 * MIB, np.uint8)
    assert before < 16 * MIB
    assert 40 * MIB <= peak.added() - before <= 64 * MIB


def test_a_system_that_does_not_tell(monkeypatch):
    monkeypatch.setattr(memory, "_reset_peak", lambda: False)
    assert PeakMemory().added() is None
