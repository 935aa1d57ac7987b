"""Peak memory of a piece of work, by what the operating system counts."""

import subprocess
import sys

import pytest

from pack_data.cli import memory
from pack_data.cli.memory import PeakMemory

MIB = 2**20


# In a process of its own: other tests leave threads, and memory that the C library keeps.
PEAK = """
import ctypes, sys
import numpy as np
from pack_data.cli.memory import PeakMemory

if sys.argv[1] == "kept":
    # 190 MiB of freed small blocks at the end of the heap, which malloc_trim keeps: something else moved the break.
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    blocks = [libc.malloc(100_000) for _ in range(2000)]
    for block in blocks:
        ctypes.memset(block, 1, 100_000)
    libc.sbrk(4096)
    for block in blocks:
        libc.free(block)
np.ones(96 * 2**20, np.uint8)
peak = PeakMemory()
before = peak.added()
np.ones(48 * 2**20, np.uint8)
print(before, peak.added())
"""


@pytest.mark.parametrize("earlier", ["kept", "none"])
def test_what_is_used_and_freed_again_counts_and_earlier_work_does_not(earlier):
    command = [sys.executable, "-c", PEAK, earlier]
    before, after = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.split()
    if before == "None":
        pytest.skip("this system does not tell a process its peak memory")
    assert int(before) < 16 * MIB
    assert 40 * MIB <= int(after) - int(before) <= 64 * MIB


KEPT = """
import ctypes, resource
from pack_data.cli.memory import keep_buffers

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
