"""The pictures of a run: what it learnt over the sequences it saw, and the padding it did without."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from pack_data.display.picture import Axis, Bars, Line, Lines, Series, write

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


def loss_picture(drawn: _Curves) -> Lines:
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


def slots_picture(drawn: _Curves) -> Bars:
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
    loss = loss_picture(drawn)
    write([loss._replace(title=f"{title}: {loss.title.lower()}"), slots_picture(drawn)], path)
