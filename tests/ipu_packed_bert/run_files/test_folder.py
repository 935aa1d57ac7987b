"""Reading a run's logs: whole lines, a last line that a kill cut, and lines that are no records."""

import json
import subprocess
import sys

import pytest

from ipu_packed_bert.run_files.folder import LOG, read_log
from tests.refusals import refused

RECORDS = [{"step": 1, "loss": 2.5}, {"step": 2, "loss": None, "words": "é"}]
WHOLE = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in RECORDS).encode()


def test_a_log_cut_anywhere_has_its_whole_records_and_says_what_is_left_out(tmp_path):
    lengths = [WHOLE.index(b"\n"), len(WHOLE) - 1]  # of one and of two whole records, without the end of the line
    for length in range(len(WHOLE) + 1):
        (tmp_path / LOG).write_bytes(WHOLE[:length])
        notes = []
        assert read_log(tmp_path / LOG, note=notes.append) == RECORDS[: sum(length >= item for item in lengths)]
        whole = length in (0, lengths[0], lengths[0] + 1, lengths[1], len(WHOLE))
        assert len(notes) == (not whole)
        assert all(f"{LOG}, line " in note for note in notes)


def test_no_file_is_no_records(tmp_path):
    assert read_log(tmp_path / LOG) == []


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b'{"step": ',
        b"[1]",
        b"3",
        b"null",
        b"{}",
        b'{"step": "1"}',
        b'{"step": true}',
        b'{"step": 1.0}',
        b'{"step": -1}',
        b'{"step": 1, "loss": \xff}',
        b"[" * 100_000,
        b'{"step": ' + b"9" * 5000 + b"}" * 2,
    ],
)
def test_a_line_that_is_no_record_is_named(tmp_path, line):
    (tmp_path / LOG).write_bytes(b'{"step": 1}\n' + line + b'\n{"step": 3}\n')
    with pytest.raises(ValueError, match=f"{LOG}, line 2: ") as caught:
        read_log(tmp_path / LOG)
    assert "\n" not in str(caught.value)


COUNTED = {"step": 0, "packs": 0, "sequences": 0, "tokens": 0, "seconds": 0.0}


def test_each_number_of_an_update_is_at_least_0(tmp_path):
    def read(**changes):
        (tmp_path / LOG).write_text(json.dumps({**COUNTED, **changes}) + "\n")
        return read_log(tmp_path / LOG, counted=True)

    assert read() == [COUNTED]
    assert read(loss=None) == [{**COUNTED, "loss": None}]
    for name in (*COUNTED, "loss"):
        for value in ("1", True, -1 if name != "loss" else [1.0]):
            with refused(LOG, "line 1", name):
                read(**{name: value})


def test_it_loads_without_torch():
    code = "import sys, ipu_packed_bert.run_files.folder; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
