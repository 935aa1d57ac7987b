"""What the files in a run's folder are called, and how its logs are read.

A log has one JSON object a line, each with the number of its step.  Loads no torch.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Callable, Dict, List, Union

from pack_data.reading.fields import Fields, parse_json
from pack_data.reading.files import open_regular

LOG, EVALUATIONS = "log.jsonl", "evaluation.jsonl"
CONFIG, ENVIRONMENT, LOCK = "config.yml", "environment.json", "lock"
CHECKPOINTS = "checkpoints"
COUNTS = ("packs", "sequences", "tokens")  # of a batch, in every record of a log
SUMMARY, PICTURE = "summary.json", "run.png"
_LONGEST_LINE = 1 << 20  # of a log, in bytes; one has some hundred
MODEL = "model"  # of fine-tuning


def environment_of(first_step: int) -> str:
    """Return the file that records how a run began, or was resumed after ``first_step`` updates."""
    return f"environment-from-step-{first_step}.json" if first_step else ENVIRONMENT


def _note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


def read_log(
    path: Union[str, Path], *, note: Callable[[str], None] = _note, counted: bool = False
) -> List[Dict[str, Any]]:
    """Read the records of a log, the first one from line 1; none if there is no such file.

    counted: each has to have its `COUNTS` and seconds, and a loss that is a number or null, if any, as those that this
    program writes have.
    A last line that a kill cut short is left out, and ``note`` is told so.
    Raises ValueError, with file and line, for any other line that is not a JSON object with the number of its step.
    """
    path = Path(path)
    if not path.exists():
        return []
    records: List[Dict[str, Any]] = []
    with open_regular(path, way_out="name a run as it was written") as file:
        for number, line in enumerate(iter(lambda: file.readline(_LONGEST_LINE), b""), start=1):
            try:
                records.append(_record(path, number, line.rstrip(b"\n"), counted))
            except ValueError:
                # A kill may have left out no more than the end of the line.
                if line.endswith(b"\n") or len(line) == _LONGEST_LINE:
                    raise
                note(
                    f"{path}, line {number}: the last line is cut short, as by a kill; it is left out"
                )
    return records


def _record(path: Path, number: int, line: bytes, counted: bool) -> Dict[str, Any]:
    way_out = "the line was changed after the run, remove it"
    source = f"{path}, line {number}"
    fields = Fields.of(parse_json(line, source, way_out), source, way_out)
    fields.integer("step", least=0)
    if counted:
        for name in COUNTS:
            fields.integer(name, least=0)
        fields.number("seconds", least=0.0)
        fields.optional("loss", Fields.number)
    return dict(fields.values)
