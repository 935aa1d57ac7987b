"""A sample of calls that fail; all of them: python -m tests.failing_calls all."""

import sys

import pytest

from tests.failing_calls import WRITE, complaint, try_calls
from tests.kills import memory_folder
from tests.tiers import slow

# pathlib of older versions keeps functions of `os`, so that no call of them is seen.
pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="calls of pathlib are seen from Python 3.11 on")


# Call and step: call number 1 fails, and each one a step later.
FEW = [
    (WRITE, 124),
    ("fsync", 244),
    ("replace", 124),
    ("mkdir", 4),
    ("unlink", 82),
    ("flock", 4),
    ("statvfs", 4),
]
MANY = [
    (WRITE, 31),
    ("fsync", 61),
    ("replace", 31),
    ("mkdir", 2),
    ("unlink", 41),
    ("flock", 1),
    ("statvfs", 1),
]


@pytest.mark.parametrize("call, every", FEW + [slow(case) for case in MANY])
def test_a_build_goes_on_once_the_cause_is_gone(call, every):
    with memory_folder("calls-") as folder:
        problems = list(try_calls("replace", folder, every, [call]))
    assert len(problems) > 3 and sum(problems, []) == []


@pytest.mark.parametrize(
    "text",
    ["error: [Errno 28] No space left on device", "Traceback\nerror: /x: no; y", "error: /x: no"],
)
def test_a_line_without_path_or_way_out_is_noticed(tmp_path, text):
    assert complaint(text, tmp_path.parent)
    assert complaint(f"error: {tmp_path}: No space left on device; make room", tmp_path) is None
