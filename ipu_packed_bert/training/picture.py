"""What a run's folder looks like: pictures of what it learnt and of the padding it did without, and a page. Loads no
torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from ipu_packed_bert.run_files.folder import CONFIG, ENVIRONMENT, EVALUATIONS, LOG, SUMMARY, read_log
from ipu_packed_bert.settings.reader import load_yaml
from pack_data.display.page import Figure, Page, Section
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
            Series("tokens", (float(drawn.tokens),) * 2, role="tokens"),
            Series("padding", tuple(map(float, paddings)), role="padding"),
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


def page_of_run(folder: Path) -> Page:
    """From the run's logs and, where it has ended, its summary. ValueError, one line, where a file is damaged."""
    records, evaluations = read_log(folder / LOG, counted=True), read_log(folder / EVALUATIONS, counted=True)
    if not records:
        raise ValueError(f"{folder / LOG}: holds no update; look again when the run has made one")
    summary, slots = _object(folder / SUMMARY), _slots(folder)
    fields = Fields.of(summary, folder / SUMMARY, _WAY_OUT)
    held_out, compared = (fields.optional(name, Fields.object) for name in ("held_out", "compare_unpacked"))
    unigram = held_out.optional("unigram_loss", Fields.number) if held_out else None
    drawn = curves(records, evaluations, max_sequence_length=slots or 1, unigram=unigram)
    rates = tuple(each["sequences"] / each["seconds"] if each["seconds"] else None for each in records)
    throughput = Lines(
        "Throughput of each update",
        Axis("update"),
        Axis("sequences/s"),
        (Line("sequences/s", tuple(float(record["step"]) for record in records), rates),),
        notes=("The first update of a process compiles or warms up.",),
    )
    sections = [Section("Speed and padding", (throughput, *([] if slots is None else [_slots_picture(drawn)])))]
    if evaluations:
        sections.append(Section("What it learnt", (_evaluations(evaluations),)))
    if not summary:
        sections.insert(0, Section("The run", ("It has no summary.json: it has not ended, or it was killed.",)))
    raw = [_facts("summary", "What the run came to: summary.json", summary)] if summary else []
    return Page(
        f"Run {folder.resolve().name}",
        _answer(records, drawn, held_out),
        tuple(sections),
        _figures(records, drawn, compared, slots),
        (_loss_picture(drawn), *([_side_by_side(compared)] if compared else [])),
        (*raw, _facts("environment", "What it ran on: environment.json", _object(folder / ENVIRONMENT))),
    )


def _answer(records: Sequence[Mapping[str, Any]], drawn: _Curves, held_out: Optional[Fields]) -> str:
    after = f"After {records[-1]['step']:,} updates"
    names = ("mlm_accuracy", "most_frequent_token_accuracy")
    right, constant = (held_out.optional(name, Fields.number) if held_out else None for name in names)
    if right is not None and constant is not None:
        return (
            f"{after} the model gets {right:.1%} of the masked tokens right, in texts that it has not seen; always the "
            f"most frequent token would get {constant:.1%}."
        )
    if not drawn.training[1]:
        return f"{after} there is no finite loss."
    words = f"{after} the loss in training is {drawn.training[1][-1]:.3f}; it began at {drawn.training[1][0]:.3f}"
    return words + (f", and is {drawn.held_out[1][-1]:.3f} on texts that were held out." if drawn.held_out[1] else ".")


def _figures(
    records: Sequence[Mapping[str, Any]], drawn: _Curves, compared: Optional[Fields], slots: Optional[int]
) -> Tuple[Figure, ...]:
    """What it learnt, how fast, and what packing saved."""
    packs, sequences, seconds = (sum(record[name] for record in records) for name in ("packs", "sequences", "seconds"))
    where, (_, losses) = ("held out", drawn.held_out) if drawn.held_out[1] else ("in training", drawn.training)
    baseline = "" if drawn.unigram is None else f"; always the token frequencies: {drawn.unigram:.3f}"
    what = "nats a masked token" if drawn.measure == "mlm_loss" else "loss"
    loss = Figure(f"{losses[-1]:.3f}" if losses else "none", what, f"loss {where}{baseline}")
    if compared:
        packed, unpacked, factor, ratio = map(compared.number, _SIDES)
        words = f"{packed:,.1f} against {unpacked:,.1f} sequences/s; packing factor {factor:.3f}"
        speed = Figure(f"{ratio:.2f} times", "as fast as unpacked", words)
    else:
        rates = (f"{count / seconds:,.1f}" if seconds else "-" for count in (sequences, drawn.tokens))
        speed = Figure(next(rates), "sequences/s", f"{next(rates)} tokens/s")
    filled = Figure(f"{sequences / max(1, packs):.3f}", "sequences in a pack", "the packing factor")
    if slots is None:
        return loss, speed, filled
    return loss, speed, Figure(f"{drawn.padding_avoided:.1%}", "of the padding avoided", " ".join(filled[:2]))


_SIDES = ("packed_sequences_per_second", "unpacked_sequences_per_second", "packing_factor", "speedup")


def _side_by_side(compared: Fields) -> Bars:
    """The interval of the speed-up stands at the packed side."""
    packed, unpacked, factor, _ = map(compared.number, _SIDES)
    low, high = (unpacked * ratio for ratio in compared.list_of("speedup_quartiles", Fields.number))
    return Bars(
        "Packed beside unpacked: the same sequences, the same updates",
        ("one a row", "in packs"),
        Axis("sequences/s"),
        (Series("sequences/s", (unpacked, packed), (None, low), (None, high)),),
        across=True,
        ends=(f"{unpacked:,.1f}", f"{packed:,.1f}"),
        levels=(("unpacked times the packing factor", unpacked * factor),),
        notes=(f"Medians of {compared.integer('updates')} updates, and quartiles of their ratio.",),
    )


def _evaluations(evaluations: List[Dict[str, Any]]) -> Table:
    keys = list(dict.fromkeys(key for record in evaluations for key in record))
    columns = tuple(Column(key, key.replace("_", " "), form=".2%" if key.endswith("accuracy") else "") for key in keys)
    return Table("evaluations", "Evaluations on held-out data (evaluation.jsonl)", columns, evaluations)


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
