"""Pictures of a run, its losses and the padding that its packs avoid, and the page of a run. Loads no torch."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from ipu_packed_bert.run_files.folder import (
    CONFIG,
    ENVIRONMENT,
    EVALUATIONS,
    LOG,
    SUMMARY,
    read_log,
)
from ipu_packed_bert.settings.declare import flat
from ipu_packed_bert.settings.yaml_files import load_yaml
from pack_data.display.facts import Fact, Facts, number, quantity_with_unit, with_unit
from pack_data.display.page import Figure, Page, Section
from pack_data.display.picture import Axis, Bars, Line, Lines, Series, packing_bars, write
from pack_data.reading.fields import Fields, read_json
from pack_data.reading.words import counted
from pack_data.store import quantities

_WAY_OUT = "pass the directory of a run, with its files as they were written"
# Numbers of `compare_unpacked` in a summary: medians of the rates, the packing factor, the median of the ratio.
_COMPARED = (
    "packed_sequences_per_second",
    "unpacked_sequences_per_second",
    "packing_factor",
    "speedup",
)
_FACTOR = "sequences per pack"  # unit
_AVOIDED = "of the padding avoided"  # unit
_Records = Sequence[Mapping[str, Any]]  # the lines of log.jsonl or evaluation.jsonl


class _Losses(NamedTuple):
    """Losses over the number of sequences seen in training; those that are not finite are left out."""

    measure: str  # the metric that is drawn
    training: Line
    held_out: Line
    unigram: Optional[float]  # loss of always predicting the token frequencies, if it was evaluated


def _losses(records: _Records, evaluations: _Records, unigram: Optional[float]) -> _Losses:
    measure = "mlm_loss" if any("mlm_loss" in record for record in records) else "loss"
    steps = [record["step"] for record in records]
    sequences_seen = dict(zip(steps, accumulate(record["sequences"] for record in records)))

    def line(name: str, lines: _Records) -> Line:
        finite = [
            record
            for record in lines
            if record.get(measure) is not None and record["step"] in sequences_seen
        ]
        x = tuple(float(sequences_seen[record["step"]]) for record in finite)
        return Line(name, x, tuple(record[measure] for record in finite))

    training = line("training", records)
    return _Losses(
        measure,
        training,
        line("held out", evaluations),
        unigram=unigram if measure == "mlm_loss" else None,
    )


def _loss_picture(losses: _Losses) -> Lines:
    lines = tuple(line for line in (losses.training, losses.held_out) if line.x)
    levels: Tuple[Tuple[str, float], ...] = ()
    if losses.unigram is not None:
        levels = (("the token frequencies alone", losses.unigram),)

    values = [value for line in lines for value in line.y if value is not None]
    values += [value for _, value in levels]
    low = min(values, default=0.0)
    high = max(values, default=1.0)
    margin = 0.05 * (high - low) or 1.0
    return Lines(
        "Loss over the sequences seen",
        Axis("sequences seen"),
        Axis(
            "loss of a masked token (nats)" if losses.measure == "mlm_loss" else "loss (nats)",
            least=low - margin,
            most=high + margin,
        ),
        lines,
        levels=levels,
    )


def _total(records: _Records, name: str) -> Any:
    return sum(record[name] for record in records)


def _slots_picture(records: _Records, max_sequence_length: int) -> Bars:
    return packing_bars(
        "Slots of the rows that these sequences need",
        _total(records, "tokens"),
        _total(records, "sequences"),
        _total(records, "packs"),
        max_sequence_length,
    )


def draw_curves(
    path: Path,
    records: _Records,
    evaluations: _Records,
    *,
    title: str,
    max_sequence_length: int,
    unigram: Optional[float],
) -> None:
    """Draw the losses of a run and the slots of its rows into one file.

    Args:
        path: the file, .png, .pdf or .svg.
        records: lines of `log.jsonl`.
        evaluations: lines of `evaluation.jsonl`.
        title: begins the title of the picture.
        max_sequence_length: slots of a row.
        unigram: loss of always predicting the token frequencies, in nats, if it was evaluated.

    Raises:
        ValueError: matplotlib is not installed.
    """
    losses = _loss_picture(_losses(records, evaluations, unigram))
    losses = losses._replace(title=f"{title}: {losses.title.lower()}")
    write([losses, _slots_picture(records, max_sequence_length)], path)


# ---- the page --------------------------------------------------------------------------------------------------------


def page_of_run(folder: Path) -> Page:
    """Return the page of a run by its logs and, if it has ended, its summary.

    Args:
        folder: the directory of the run.

    Raises:
        ValueError: a file of the run is damaged, or the run has made no update.
    """
    records = read_log(folder / LOG, counted=True)
    evaluations = read_log(folder / EVALUATIONS, counted=True)
    if not records:
        raise ValueError(
            f"{folder / LOG}: has no updates; look again after the first update of the run"
        )

    summary = _object(folder / SUMMARY)
    fields = Fields.of(summary, folder / SUMMARY, _WAY_OUT)
    held_out = fields.optional("held_out", Fields.object)
    compared = fields.optional("compare_unpacked", Fields.object)
    unigram = held_out.optional("unigram_loss", Fields.number) if held_out else None
    losses = _losses(records, evaluations, unigram)
    slots = _slots(folder)

    sections = []
    if not summary:
        sections.append(
            Section("The run", ("No summary.json: the run has not ended, or it was killed.",))
        )
    speed: List[Any] = [_throughput_picture(records)]
    if slots is not None:
        speed.append(_slots_picture(records, slots))
    sections.append(Section("Speed and padding", tuple(speed)))
    if evaluations:
        sections.append(Section("Results on held-out data", (_evaluations_table(evaluations),)))

    first: List[Any] = [_loss_picture(losses)]
    if compared:
        first.append(_speed_picture(compared))
    raw = []
    if summary:
        raw.append(_values_table("summary", "Summary of the run (summary.json)", summary))
    environment = _object(folder / ENVIRONMENT)
    raw.append(_values_table("environment", "Environment (environment.json)", environment))
    return Page(
        f"Run {folder.resolve().name}",
        _answer(records[-1]["step"], losses, held_out),
        tuple(sections),
        (_loss_figure(losses), _speed_figure(records, compared), _packing_figure(records, slots)),
        tuple(first),
        tuple(raw),
    )


def _answer(steps: int, losses: _Losses, held_out: Optional[Fields]) -> str:
    accuracy = constant_accuracy = None
    if held_out:
        accuracy = held_out.optional("mlm_accuracy", Fields.number)
        constant_accuracy = held_out.optional("most_frequent_token_accuracy", Fields.number)
    if accuracy is not None and constant_accuracy is not None:
        return (
            f"After {counted(steps, 'update')} the model predicts {number(accuracy, 'share')} of the masked tokens "
            "of held-out texts; always predicting the most frequent token would give "
            f"{number(constant_accuracy, 'share')}."
        )

    values = losses.training.y
    if not values:
        return f"After {counted(steps, 'update')} there is no finite loss."
    answer = (
        f"After {counted(steps, 'update')} the training loss is {number(values[-1], 'nats')}; it began at "
        f"{number(values[0], 'nats')}"
    )
    if losses.held_out.y:
        answer += f", and is {number(losses.held_out.y[-1], 'nats')} on held-out texts"
    return answer + "."


def _loss_figure(losses: _Losses) -> Figure:
    """Show the last held-out loss, else the last one in training."""
    line = losses.held_out if losses.held_out.y else losses.training
    words = "loss held out" if losses.held_out.y else "loss in training"
    if losses.unigram is not None:
        words += f"; the token frequencies alone: {number(losses.unigram, 'nats')}"
    unit = "nats per masked token" if losses.measure == "mlm_loss" else "loss"
    return Figure(number(line.y[-1], "nats") if line.y else "none", unit, words)


def _speed_figure(records: _Records, compared: Optional[Fields]) -> Figure:
    """Show the speed-up over unpacked training, if it was measured, else the speed."""
    if compared:
        packed, unpacked, factor, speed_up = map(compared.number, _COMPARED)
        rate = number(packed, "sequences/s")
        unpacked_rate = with_unit(unpacked, "sequences/s")
        words = f"medians {rate} and {unpacked_rate}; packing factor {number(factor, _FACTOR)}"
        return Figure(with_unit(speed_up, "times"), "as fast as unpacked", words)
    seconds = _total(records, "seconds")
    if not seconds:
        return Figure("-", "sequences/s", "- tokens/s")
    sequence_rate = quantities.sequences_per_second(_total(records, "sequences"), seconds)
    token_rate = quantities.tokens_per_second(_total(records, "tokens"), seconds)
    tokens = quantity_with_unit("tokens_per_second", token_rate)
    return Figure(number(sequence_rate, "sequences/s"), "sequences/s", tokens)


def _packing_figure(records: _Records, slots: Optional[int]) -> Figure:
    """Show the padding avoided or, if the slots of a row are unknown, the packing factor."""
    packs = _total(records, "packs")
    sequences = _total(records, "sequences")
    factor = quantities.packing_factor(sequences, packs)
    if slots is None:
        return Figure(number(factor, _FACTOR), _FACTOR, "the packing factor")
    avoided = quantities.padding_avoided(packs, sequences, _total(records, "tokens"), slots)
    return Figure(number(avoided, _AVOIDED), _AVOIDED, with_unit(factor, _FACTOR))


def _throughput_picture(records: _Records) -> Lines:
    steps = tuple(float(record["step"]) for record in records)
    rates = []
    for record in records:
        rate = quantities.sequences_per_second(record["sequences"], record["seconds"])
        rates.append(rate or None)
    return Lines(
        "Throughput of each update",
        Axis("update"),
        Axis("sequences/s"),
        (Line("sequences/s", steps, tuple(rates)),),
        notes=("The first update of a process compiles or warms up.",),
    )


def _speed_picture(compared: Fields) -> Bars:
    """Draw the median of the speed-up with its quartiles, which contain it; the medians of the rates need not agree."""
    packed, unpacked, factor, speed_up = map(compared.number, _COMPARED)
    low, high = compared.list_of("speedup_quartiles", Fields.number)
    return Bars(
        "Packed and unpacked: the same sequences, the same updates",
        ("one a row", "in packs"),
        Axis("speed relative to one sequence a row"),
        (Series("speed", (1.0, speed_up), (None, low), (None, high)),),
        across=True,
        ends=(f"{number(unpacked, 'sequences/s')}/s", f"{number(packed, 'sequences/s')}/s"),
        levels=(("packing factor", factor),),
        notes=(
            f"Median and quartiles of {compared.integer('updates')} updates; on the right: median sequences/s.",
        ),
    )


def _evaluations_table(evaluations: _Records) -> Facts:
    rows = []
    for record in evaluations:
        row = {}
        for key, value in record.items():
            unit = "%" if key.endswith("accuracy") else ""
            row[key] = Fact(key.replace("_", " "), value, unit)
        rows.append(row)
    return Facts("Evaluations on held-out data (evaluation.jsonl)", rows, name="evaluations")


def _values_table(name: str, title: str, tree: Mapping[str, Any]) -> Facts:
    values = {key: Fact(key, value) for key, value in flat(tree).items()}
    return Facts(title, values, name=name)


def _object(path: Path) -> Dict[str, Any]:
    """Return the JSON object in a file, empty if there is no such file."""
    if not path.is_file():
        return {}
    fields = Fields.of(read_json(path, way_out=_WAY_OUT), path, _WAY_OUT)
    return dict(fields.values)


def _slots(folder: Path) -> Optional[int]:
    """Return the slots of a row from the run's configuration, if it has one."""
    path = folder / CONFIG
    if not path.is_file():
        return None
    data = Fields.of(load_yaml(path), path, _WAY_OUT).optional("data", Fields.object)
    return None if data is None else data.optional("max_sequence_length", Fields.integer, least=1)
