"""The picture in a run's folder: what it learnt over the sequences it saw, and the padding it did without."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from pack_data.plotting import new_figure, save

Points = Tuple[List[int], List[float]]  # sequences seen, loss


def padding_avoided(packs: int, sequences: int, tokens: int, max_sequence_length: int) -> float:
    """Fraction of the padding of the same sequences, one in a row, that their packs do without; 0 if there is none."""
    unpacked = sequences * max_sequence_length - tokens
    packed = packs * max_sequence_length - tokens
    return 1.0 - packed / unpacked if unpacked else 0.0


class Curves(NamedTuple):
    """What is drawn."""

    measure: str  # the metric whose curves these are
    training: Points
    held_out: Points
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
) -> Curves:
    """records, evaluations: the lines of log.jsonl and evaluation.jsonl. Losses that are not finite are left out."""
    measure = "mlm_loss" if any("mlm_loss" in record for record in records) else "loss"
    seen: Dict[int, int] = {}
    total = 0
    for record in records:
        total += record["sequences"]
        seen[record["step"]] = total

    def points(lines: Sequence[Mapping[str, Any]]) -> Points:
        found = [(seen[line["step"]], line[measure]) for line in lines if line.get(measure) is not None]
        return [sequences for sequences, _ in found], [loss for _, loss in found]

    tokens, packs = (sum(record[name] for record in records) for name in ("tokens", "packs"))
    return Curves(
        measure,
        points(records),
        points([line for line in evaluations if line["step"] in seen]),
        unigram if measure == "mlm_loss" else None,
        tokens,
        packs * max_sequence_length - tokens,
        total * max_sequence_length - tokens,
        padding_avoided(packs, total, tokens, max_sequence_length),
    )


def draw(drawn: Curves, path: Path, *, title: str) -> None:
    """Raises ValueError, one line, where matplotlib is not installed."""
    figure, (loss, slots) = new_figure(8.0, 6.0, rows=2)
    loss.get_gridspec().set_height_ratios([3, 1])
    loss.set_title(title, loc="left")
    loss.plot(*drawn.training, color="tab:blue", linewidth=0.8, alpha=0.7, label="training")
    if drawn.held_out[0]:
        loss.plot(*drawn.held_out, color="tab:orange", marker="o", label="held out")
    if drawn.unigram is not None:
        words = f"always the token frequencies: {drawn.unigram:.2f}"
        loss.axhline(drawn.unigram, color="black", linestyle="--", linewidth=1.0, label=words)
    loss.set_xlabel("sequences seen")
    loss.set_ylabel("loss of a masked token (nats)" if drawn.measure == "mlm_loss" else "loss")
    loss.xaxis.set_major_formatter("{x:,.0f}")
    loss.legend(frameon=False)

    paddings = (drawn.unpacked_padding, drawn.packed_padding)
    for row, padding in enumerate(paddings):
        whole = drawn.tokens + padding
        slots.barh(row, drawn.tokens, color="tab:blue")
        slots.barh(row, padding, left=drawn.tokens, color="lightgrey", hatch="//")
        slots.text(drawn.tokens / 2, row, "tokens", ha="center", va="center", color="white")
        slots.text(whole, row, f" {padding / max(1, whole):.1%} padding", va="center")
    slots.set_yticks([0, 1], ["one sequence\na row", "in packs"])
    slots.set_xlim(right=1.2 * (drawn.tokens + max(paddings)))
    slots.xaxis.set_major_formatter("{x:,.0f}")
    slots.set_xlabel("slots of these sequences' rows")
    save(figure, path)
