"""Peak memory of a piece of work, by what the operating system counts."""

from __future__ import annotations

import subprocess
import sys

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


KEPT = """
import ctypes, resource
from pack_data.memory import keep_buffers

kept = keep_buffers()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
faults = []
for _ in range(6):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    buffer = libc.malloc(96 * 2**20)
    ctypes.memset(buffer, 1, 96 * 2**20)
    libc.free(buffer)
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(kept, *faults)
"""


def test_a_buffer_is_used_again_without_new_pages():
    finished = subprocess.run([sys.executable, "-c", KEPT], capture_output=True, text=True, check=True)
    kept, first, *later = finished.stdout.split()
    if kept == "False":
        pytest.skip("this C library is not glibc")
    # The least of them: the system may take pages from a process, or move them, at any time.
    assert int(first) > 40 and min(map(int, later)) < int(first) / 10


def test_a_system_that_does_not_tell(monkeypatch):
    monkeypatch.setattr(memory, "_reset_peak", lambda: False)
    assert PeakMemory().added() is None
