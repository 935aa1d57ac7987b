"""A handful of kills of each piece of work; a night of them: python -m tests.kills all --n 1000."""

import pytest

from pack_data.building import inputs, stages
from tests.kills import DRIVES, Drive, drive

# In children of a process with threads of torch, an update may wait without end: training is killed by
# tests/ipu_packed_bert/commands/test_pretrain_faults.py, and by the command.
IN_TESTS = ("build", "convert")


@pytest.mark.parametrize("name", IN_TESTS)
def test_killed_work_ends_with_the_bytes_of_undisturbed_work(tmp_path, name):
    if name == "convert":
        pytest.importorskip("google.protobuf", reason="needs the formats extra (protobuf)")
        pytest.importorskip("google_crc32c", reason="needs the formats extra (google-crc32c)")
    outcome = drive(DRIVES[name], tmp_path, kills=4, seed=0)
    assert outcome.kills >= 4 and outcome.wrong == []


@pytest.mark.parametrize("name", ["build", "stages"])
def test_work_in_this_process_leaves_the_sizes_of_builds(tmp_path, name):
    """Tests of crashes and of failing calls run it here; later tests of the same process had its small shards."""
    before = vars(inputs).copy(), vars(stages).copy()
    DRIVES[name].prepare(tmp_path)
    assert DRIVES[name].work(tmp_path) == 0
    assert (vars(inputs), vars(stages)) == before


def _count(folder, step):
    """Six files one after another; a file is there whole or not at all."""
    import time

    for number in range(6):
        path = folder / str(number)
        if not path.exists():
            time.sleep(0.01)
            part = folder.with_name(f"{folder.name} part")
            part.write_text(str(number + step))
            part.replace(path)


def test_the_drive_notices_a_result_that_a_kill_changed(tmp_path):
    def work(folder):
        begun = (folder / "begun").exists()
        (folder / "begun").write_text("")
        _count(folder, int(begun))  # after a kill it goes on otherwise
        return 0

    def result(folder):
        return [path.read_text() for path in sorted(folder.iterdir())]

    one = Drive(lambda folder: None, work, result)
    outcome = drive(one, tmp_path / "wrong", kills=6, seed=1)
    assert outcome.wrong and "another result" in outcome.wrong[0]
    right = Drive(lambda folder: None, lambda folder: _count(folder, 0) or 0, result)
    assert drive(right, tmp_path / "right", kills=6, seed=1).wrong == []
