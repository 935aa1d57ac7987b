"""Every command prints what `tests/golden` holds: `make golden` records it again, and review shows the difference."""

import difflib
import subprocess
import sys

import pytest

pytest.importorskip("transformers", reason="check-model needs transformers")

from tests.transcripts import GOLDEN, SESSIONS


@pytest.mark.skipif(sys.version_info < (3, 11), reason="transcripts are recorded with the versions of requirements.txt")
def test_commands_print_their_transcripts(tmp_path):
    # A process of its own: what other tests imported or replaced must not show.
    subprocess.run([sys.executable, "-m", "tests.transcripts", "--to", str(tmp_path)], check=True)
    faults = []
    for name in SESSIONS:
        recorded = (GOLDEN / f"{name}.txt").read_text(encoding="utf-8").splitlines()
        printed = (tmp_path / f"{name}.txt").read_text(encoding="utf-8").splitlines()
        faults += difflib.unified_diff(recorded, printed, f"tests/golden/{name}.txt", "printed now", lineterm="")
    assert not faults, "\n".join(["`make golden` records this:", *faults])
    assert {path.stem for path in GOLDEN.iterdir()} == set(SESSIONS)
