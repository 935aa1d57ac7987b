"""What a run's folder looks like: the sections of a page. Loads no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Tuple

from ipu_packed_bert.run_files.folder import CONFIG, ENVIRONMENT, EVALUATIONS, LOG, SUMMARY, read_log
from ipu_packed_bert.settings.reader import load_yaml
from ipu_packed_bert.training.picture import curves, loss_picture, slots_picture
from pack_data.display.page import Section
from pack_data.display.picture import Axis, Line, Lines
from pack_data.display.table import Column, Table
from pack_data.reading.fields import Fields, read_json

_WAY_OUT = "give the folder of a run as the program wrote it"


def is_run(folder: Path) -> bool:
    return (folder / LOG).is_file()


def sections_of_run(folder: Path) -> Tuple[Section, ...]:
    """From the run's logs and, where it has ended, its summary. ValueError, one line, where a file is damaged."""
    records, evaluations = read_log(folder / LOG, counted=True), read_log(folder / EVALUATIONS, counted=True)
    if not records:
        raise ValueError(f"{folder / LOG}: holds no update; look again when the run has made one")
    summary = _object(folder / SUMMARY)
    slots = _slots(folder)
    held_out = summary.get("held_out")
    unigram = held_out.get("unigram_loss") if isinstance(held_out, dict) else None
    drawn = curves(records, evaluations, max_sequence_length=slots or 1, unigram=unigram)
    parts: List[Any] = [_facts("summary", "What the run came to (summary.json)", summary)] if summary else []
    if not summary:
        parts.append("The run has no summary.json: it has not ended, or it was killed.")
    parts.append(_facts("environment", "What it ran on (environment.json)", _object(folder / ENVIRONMENT)))
    steps = tuple(float(record["step"]) for record in records)
    rates = Lines(
        "Throughput of each update",
        Axis("update"),
        Axis("sequences/s"),
        (Line("sequences/s", steps, tuple(_rate(record, "sequences") for record in records)),),
        notes=("The first update of a process compiles or warms up.",),
    )
    tokens = Lines(
        "Real tokens a second of each update",
        Axis("update"),
        Axis("tokens/s"),
        (Line("tokens/s", steps, tuple(_rate(record, "tokens") for record in records)),),
        notes=("Padding is not counted.",),
    )
    found = [
        Section("The run", tuple(parts)),
        Section("What it learnt", (loss_picture(drawn), *_evaluations(evaluations))),
    ]
    found.append(Section("How fast it was", (rates, tokens)))
    if slots is None:
        words = f"{folder / CONFIG} does not say how many slots a row has, so padding cannot be counted."
        found.append(Section("Padding saved", (words,)))
        return tuple(found)
    paddings = (drawn.unpacked_padding, drawn.packed_padding)
    saved = slots_picture(drawn)
    table = Table(
        "padding",
        "Padding of all updates",
        (
            Column("rows", "rows"),
            Column("tokens", "tokens"),
            Column("padding", "padding, slots"),
            Column("share", "of the slots", form=".2%"),
        ),
        [
            {
                "rows": name,
                "tokens": drawn.tokens,
                "padding": padding,
                "share": padding / max(1, drawn.tokens + padding),
            }
            for name, padding in zip(saved.categories, paddings)
        ],
        (f"Packs do without {drawn.padding_avoided:.2%} of the padding.",),
    )
    return (*found, Section("Padding saved", (saved, table)))


def _rate(record: Mapping[str, Any], what: str) -> Optional[float]:
    return record[what] / record["seconds"] if record["seconds"] else None


def _evaluations(evaluations: List[Dict[str, Any]]) -> Tuple[Table, ...]:
    if not evaluations:
        return ()
    keys = list(dict.fromkeys(key for record in evaluations for key in record))
    columns = tuple(Column(key, key.replace("_", " "), form=".2%" if key.endswith("accuracy") else "") for key in keys)
    return (Table("evaluations", "Evaluations on held-out data (evaluation.jsonl)", columns, evaluations),)


def _facts(name: str, title: str, tree: Mapping[str, Any]) -> Table:
    rows = [{"what": key, "value": value} for key, value in _flat(tree)]
    return Table(name, title, (Column("what", "what"), Column("value", "value")), rows)


def _flat(tree: Mapping[str, Any], before: str = "") -> List[Tuple[str, Any]]:
    found: List[Tuple[str, Any]] = []
    for key, value in tree.items():
        if isinstance(value, dict):
            found += _flat(value, f"{before}{key}.")
        else:
            found.append((f"{before}{key}", value))
    return found


def _object(path: Path) -> Dict[str, Any]:
    """The JSON object in a file; empty where there is no such file."""
    if not path.is_file():
        return {}
    fields = Fields.of(read_json(path, way_out=_WAY_OUT), path, _WAY_OUT)
    return dict(fields.values)


def _slots(folder: Path) -> Optional[int]:
    path = folder / CONFIG
    if not path.is_file():
        return None
    data = Fields.of(load_yaml(path), path, _WAY_OUT).optional("data", Fields.object)
    return None if data is None else data.optional("max_sequence_length", Fields.integer, least=1)
