"""What a run's folder looks like: pictures of what it learnt and of the padding it did without, and a page. Loads no
torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from ipu_packed_bert.run_files.folder import CONFIG, ENVIRONMENT, EVALUATIONS, LOG, SUMMARY, read_log
from ipu_packed_bert.settings.reader import load_yaml
from pack_data.display.page import Section
from pack_data.display.picture import Axis, Bars, Line, Lines, Series, write
from pack_data.display.table import Column, Table
from pack_data.reading.fields import Fields, read_json

_WAY_OUT = "give the folder of a run as the program wrote it"
_Points = Tuple[List[int], List[float]]  # sequences seen, loss


def padding_avoided(packs: int, sequences: int, tokens: int, max_sequence_length: int) -> float:
    """Fraction of the padding of the same sequences, one in a row, that their packs do without; 0 if there is none."""
    unpacked = sequences * max_sequence_length - tokens
    packed = packs * max_sequence_length - tokens
    return 1.0 - packed / unpacked if unpacked else 0.0


class _Curves(NamedTuple):
    """What is drawn."""

    measure: str  # the metric whose curves these are
    training: _Points
    held_out: _Points
    unigram: Optional[float]  # loss of always predicting the token frequencies; None where it was not taken
    tokens: int
    packed_padding: int  # slots of the packs that hold no token
    unpacked_padding: int  # those that the same sequences would leave empty, each alone in its row
    padding_avoided: float  # a fraction


def curves(
    records: Sequence[Mapping[str, Any]],
    evaluations: Sequence[Mapping[str, Any]],
    *,
    max_sequence_length: int,
    unigram: Optional[float] = None,
) -> _Curves:
    """records, evaluations: the lines of log.jsonl and evaluation.jsonl. Losses that are not finite are left out."""
    measure = "mlm_loss" if any("mlm_loss" in record for record in records) else "loss"
    seen: Dict[int, int] = {}
    total = 0
    for record in records:
        total += record["sequences"]
        seen[record["step"]] = total

    def points(lines: Sequence[Mapping[str, Any]]) -> _Points:
        found = [(seen[line["step"]], line[measure]) for line in lines if line.get(measure) is not None]
        return [sequences for sequences, _ in found], [loss for _, loss in found]

    tokens, packs = (sum(record[name] for record in records) for name in ("tokens", "packs"))
    return _Curves(
        measure,
        points(records),
        points([line for line in evaluations if line["step"] in seen]),
        unigram if measure == "mlm_loss" else None,
        tokens,
        packs * max_sequence_length - tokens,
        total * max_sequence_length - tokens,
        padding_avoided(packs, total, tokens, max_sequence_length),
    )


def _loss_picture(drawn: _Curves) -> Lines:
    found = [("training", drawn.training), ("held out", drawn.held_out)]
    lines = tuple(Line(name, tuple(map(float, seen)), tuple(losses)) for name, (seen, losses) in found if seen)
    losses = [loss for line in lines for loss in line.y if loss is not None]
    losses += [] if drawn.unigram is None else [drawn.unigram]
    low, high = min(losses, default=0.0), max(losses, default=1.0)
    room = 0.05 * (high - low) or 1.0
    what = "loss of a masked token" if drawn.measure == "mlm_loss" else "loss"
    return Lines(
        "Loss over the sequences seen",
        Axis("sequences seen"),
        Axis(f"{what} (nats)", least=low - room, most=high + room),
        lines,
        levels=() if drawn.unigram is None else (("always the token frequencies", drawn.unigram),),
    )


def _slots_picture(drawn: _Curves) -> Bars:
    paddings = (drawn.unpacked_padding, drawn.packed_padding)
    return Bars(
        "Slots of the rows that these sequences need",
        ("one sequence a row", "in packs"),
        Axis("slots"),
        (
            Series("tokens", (float(drawn.tokens),) * 2),
            Series("padding", tuple(map(float, paddings)), padding=True),
        ),
        stacked=True,
        across=True,
        ends=tuple(f"{padding / max(1, drawn.tokens + padding):.1%} padding" for padding in paddings),
    )


def draw(drawn: _Curves, path: Path, *, title: str) -> None:
    """Both pictures as one file. Raises ValueError, one line, where matplotlib is not installed."""
    loss = _loss_picture(drawn)
    write([loss._replace(title=f"{title}: {loss.title.lower()}"), _slots_picture(drawn)], path)


# ------------------------------------------------------------------------------------------ the page


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
    rates = tuple(
        Lines(
            title,
            Axis("update"),
            Axis(f"{what}/s"),
            (Line(f"{what}/s", steps, tuple(_rate(record, what) for record in records)),),
            notes=(note,),
        )
        for title, what, note in (
            ("Throughput of each update", "sequences", "The first update of a process compiles or warms up."),
            ("Real tokens a second of each update", "tokens", "Padding is not counted."),
        )
    )
    found = [
        Section("The run", tuple(parts)),
        Section("What it learnt", (_loss_picture(drawn), *_evaluations(evaluations))),
    ]
    found.append(Section("How fast it was", rates))
    if slots is None:
        words = f"{folder / CONFIG} does not say how many slots a row has, so padding cannot be counted."
        found.append(Section("Padding saved", (words,)))
        return tuple(found)
    paddings = (drawn.unpacked_padding, drawn.packed_padding)
    saved = _slots_picture(drawn)
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
