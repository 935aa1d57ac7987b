"""Names of the files in the directory of a run, and a reader of its logs. Loads no torch.

A log has one JSON object per line, each with the number of its step.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any, Callable, Dict, List, Union

from pack_data.reading.fields import Fields, parse_json
from pack_data.reading.files import open_regular

LOG = "log.jsonl"
EVALUATIONS = "evaluation.jsonl"
CONFIG = "config.yml"
ENVIRONMENT = "environment.json"
LOCK = "lock"
CHECKPOINTS = "checkpoints"
SUMMARY = "summary.json"
PICTURE = "run.png"
MODEL = "model"  # directory of a fine-tuned model
COUNTS = ("packs", "sequences", "tokens")  # fields of every record of a log
_NAME = re.compile(r"step_\d{8,}")  # of a checkpoint
_MAX_LINE = 1 << 20  # bytes; lines of a log have a few hundred


def environment_of(first_step: int) -> str:
    """Return the file that records how a run began, or was resumed after ``first_step`` updates."""
    return f"environment-from-step-{first_step}.json" if first_step else ENVIRONMENT


def checkpoints(folder: Union[str, Path]) -> List[Path]:
    """List all checkpoints, including damaged ones, oldest first."""
    directories = [path for path in Path(folder).glob("step_*") if path.is_dir()]
    named = [path for path in directories if _NAME.fullmatch(path.name)]
    return sorted(named, key=lambda path: int(path.name[5:]))


def _note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


def read_log(
    path: Union[str, Path], *, note: Callable[[str], None] = _note, counted: bool = False
) -> List[Dict[str, Any]]:
    """Read the records of a log.

    Args:
        path: the log; may be missing.
        note: receives a line if the last record is left out, because a kill cut it short.
        counted: require the fields that this program writes: `COUNTS`, seconds, and a loss that is a number or null.

    Returns:
        The records; none if there is no such file.

    Raises:
        ValueError: another line is not a JSON object with the number of its step.
    """
    path = Path(path)
    if not path.exists():
        return []
    records: List[Dict[str, Any]] = []
    with open_regular(path, way_out="pass the directory of a run") as file:
        lines = iter(lambda: file.readline(_MAX_LINE), b"")
        for number, line in enumerate(lines, start=1):
            try:
                records.append(_record(path, number, line.rstrip(b"\n"), counted))
            except ValueError:
                # Only the last line, without its end, can be the result of a kill.
                if line.endswith(b"\n") or len(line) == _MAX_LINE:
                    raise
                note(
                    f"{path}, line {number}: left out, because the run was killed while writing it"
                )
    return records


def _record(path: Path, number: int, line: bytes, counted: bool) -> Dict[str, Any]:
    way_out = "the line was changed after the run; remove it"
    source = f"{path}, line {number}"
    fields = Fields.of(parse_json(line, source, way_out), source, way_out)
    fields.integer("step", least=0)
    if counted:
        for name in COUNTS:
            fields.integer(name, least=0)
        fields.number("seconds", least=0.0)
        fields.optional("loss", Fields.number)
    return dict(fields.values)
