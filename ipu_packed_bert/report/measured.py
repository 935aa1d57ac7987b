"""What somebody measured, beside the model, and a packed run against an unpacked one.

A source is the folder of a run, the bundle of `packed-bert ipu-check` (or its folder), or a PopVision profile. What two
sources, or a source and a configuration, say of their settings must agree; what differs is refused by name.
Cycles are tile cycles of one update.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from ipu_packed_bert.cycles.calibration import Calibration
from ipu_packed_bert.cycles.pipeline import Parameters, Pipeline
from ipu_packed_bert.cycles.uncertainty import Interval
from ipu_packed_bert.report import popvision
from ipu_packed_bert.report.ipu_bundle import read_bundle
from ipu_packed_bert.run_files.folder import CONFIG, LOG, read_log
from ipu_packed_bert.settings.pretraining import Config, config_from_tree
from ipu_packed_bert.settings.reader import load_yaml, plain
from pack_data.display.table import COMPUTED, CONFIGURED, HARDWARE, HOST, MODEL, PROFILE, Column, Table, percent
from pack_data.reading.fields import Fields, named, shown

# What must agree: (section, settings, what that is called); no settings: all of them.
_POD = ("machine", "replicas", "ipus_per_replica", "layers_per_ipu")
_SAME_BUT_PACKED: Tuple[Tuple[str, Tuple[str, ...], str], ...] = (
    ("data", ("max_sequence_length",), "data.max_sequence_length"),
    ("model", (), "model"),
    ("batch", ("micro_batch", "gradient_accumulation"), "batch"),
    ("placement", _POD, "pod"),
    ("engine", ("mask", "recompute_layers"), "mask and recomputation"),
)
_SAME_PROGRAM = (
    ("data", ("max_sequence_length", "max_sequences_per_pack"), "length and packing depth"),
    ("model", (), "model"),
    ("batch", ("micro_batch",), "batch"),
    ("placement", _POD + ("available_memory_proportion",), "pod"),
    ("engine", ("mask", "recompute_layers", "half_partials"), "mask and recomputation"),
)


class Measured(NamedTuple):
    """What a source says of the updates of one configuration."""

    source: str  # HARDWARE, PROFILE or HOST
    detail: str  # what was read
    unit: str  # "cycles"; "seconds" where no device counted cycles
    per_pack: float  # the median over updates
    packs: int = 1  # of an update; 1 where they are not known
    quartiles: Optional[Tuple[float, float]] = None  # of `per_pack`
    packing_factor: Optional[float] = None
    settings: Dict[str, Any] = {}  # by section, as far as the source states them
    micro_batches: Optional[int] = None  # of a replica in an update
    work: Tuple[popvision.Work, ...] = ()  # of each IPU, without waiting for others


# Reading --------------------------------------------------------------------------------------------------------------


def read(path: Path, *, ipus: Optional[int] = None) -> Measured:
    """ipus: of a replica, which a profile does not say. ValueError, in one line, for what is no source."""
    if path.suffix == ".json" or (path / "bundle.json").is_file():
        return _of_bundle(path if path.suffix == ".json" else path / "bundle.json")
    if path.suffix == ".pop" or (path / "profile.pop").is_file():
        return _of_profile(path if path.suffix == ".pop" else path / "profile.pop", ipus)
    return _of_run(path)


def _of_run(folder: Path) -> Measured:
    """The median over the steps without the first, which compiles and warms up."""
    steps = _steps(folder / LOG)
    if len(steps) < 2:
        raise ValueError(
            f"{folder / LOG}: holds {len(steps)} steps; the first is a warm-up, so at least 2 are needed, train for "
            "more steps"
        )
    steps = steps[1:]
    counted = all(step.get("cycles") is not None for step in steps)
    unit, settings = "cycles" if counted else "seconds", _settings(folder / CONFIG)
    each = sorted(step[unit] / step["packs"] for step in steps)
    packs = int(median(step["packs"] for step in steps))
    micro_batch, replicas = (
        (settings.get(section) or {}).get(name)
        for section, name in (("batch", "micro_batch"), ("placement", "replicas"))
    )
    return Measured(
        HARDWARE if counted else HOST,
        str(folder),
        unit,
        median(each),
        packs,
        (each[len(each) // 4], each[-1 - len(each) // 4]),
        sum(step["sequences"] for step in steps) / sum(step["packs"] for step in steps),
        settings,
        -(-packs // (micro_batch * replicas)) if micro_batch and replicas else None,
    )


def _steps(log: Path) -> List[Dict[str, Any]]:
    """The lines of a log that are steps, checked: whole numbers of packs and sequences, positive finite times."""
    if not log.is_file():
        raise ValueError(
            f"{log}: no such file; give the folder of a run, a bundle.json of packed-bert ipu-check, or a profile.pop"
        )
    steps = []
    for number, record in enumerate(read_log(log), start=1):
        if "seconds" not in record or "packs" not in record:
            continue
        fields = Fields.of(record, f"{log}, line {number}", "give the folder of a finished run")
        for key in ("packs", "sequences"):
            fields.integer(key, least=1)
        for key in ("seconds", "cycles"):
            value = fields.number(key) if key == "seconds" else fields.optional(key, Fields.number)
            if value is not None and not 0.0 < value < 2.0**100:
                raise fields.error(key, "must be a number above 0")
        steps.append(record)
    return steps


def _settings(path: Path) -> Dict[str, Any]:
    """A run's configuration by section; nothing where it is missing."""
    if not path.is_file():
        return {}
    found = Fields.of(load_yaml(path), path, f"it must be the {CONFIG} that the run wrote")
    data = found.object("data")
    _, _, batch, placement = (found.optional(name, Fields.object) for name in ("model", "engine", "batch", "placement"))
    for section, name in (
        (data, "max_sequence_length"),
        (data, "max_sequences_per_pack"),
        (batch, "micro_batch"),
        (placement, "replicas"),
    ):
        if section is not None:
            section.optional(name, Fields.integer, least=1)
    return {name: values for name, values in found.tree.items() if isinstance(values, dict)}


def _of_bundle(path: Path) -> Measured:
    bundle = read_bundle(path)
    checked, measured = bundle["configuration"], bundle["measured"]
    cycles = measured.get("update_cycles")
    if cycles is None:
        raise ValueError(f"{path}: holds no measured cycles; the check was stopped before")
    work = tuple(popvision.Work(each["ipu"], each["cycles"], each["classes"]) for each in measured.get("work", ()))
    source, packs = PROFILE if work else HARDWARE, int(checked["packs"])
    stated = {"settings": checked["settings"], "micro_batches": checked["micro_batches"], "work": work}
    return Measured(source, str(path), "cycles", float(cycles) / packs, packs, **stated)


def _of_profile(path: Path, ipus: Optional[int]) -> Measured:
    profile = popvision.read_profile(path, ipus=ipus)
    if not profile.work:
        raise ValueError(f"{path}: holds no execution; run the program with profiling on, not only compile it")
    return Measured(PROFILE, str(path), "cycles", max(work.cycles for work in profile.work), work=profile.work)


# What belongs together ------------------------------------------------------------------------------------------------


def _refuse_differences(
    one: str,
    settings: Mapping[str, Any],
    other: str,
    others: Mapping[str, Any],
    rules: Sequence[Tuple[str, Tuple[str, ...], str]],
) -> None:
    """Raises ValueError that names the first setting in which the two differ; what only one states is not compared."""
    for section, names, what in rules:
        mine, theirs = settings.get(section) or {}, others.get(section) or {}
        for name in names or sorted(set(mine) & set(theirs)):
            if name in mine and name in theirs and plain(mine[name]) != plain(theirs[name]):
                raise ValueError(
                    f"{one} has {section}.{named(name)} {shown(mine[name])}, {other} {shown(theirs[name])}; "
                    f"compare runs of the same {what}"
                )


def configuration(found: Measured, given: Optional[Config]) -> Config:
    """The configuration that a source was measured with: the one given, where both agree, else as the source states it.

    Raises ValueError, in one line, that names the first setting in which they differ.
    """
    if given is not None:
        _refuse_differences(found.detail, found.settings, given.path, given.as_dict(), _SAME_PROGRAM)
        return given
    if "model" not in found.settings:
        raise ValueError(f"{found.detail}: does not state its settings; name the configuration with --config")
    tree = {section: dict(values) for section, values in found.settings.items() if section != "without_ipus"}
    return config_from_tree(tree, found.detail)


def check_pair(packed: Measured, unpacked: Measured) -> None:
    """Raises ValueError where the two differ in more than packing, as far as that is known."""
    if (packed.source, packed.unit) != (unpacked.source, unpacked.unit):
        raise ValueError(
            f"{packed.detail} gives {packed.unit} ({packed.source}), {unpacked.detail} gives {unpacked.unit} "
            f"({unpacked.source}); compare runs of the same engine"
        )
    _refuse_differences(packed.detail, packed.settings, unpacked.detail, unpacked.settings, _SAME_BUT_PACKED)
    if (unpacked.packing_factor or 1.0) > 1.0:
        raise ValueError(
            f"{unpacked.detail}: holds {unpacked.packing_factor:.3f} sequences a pack; the run to compare with must be "
            "unpacked (data.max_sequences_per_pack: 1)"
        )


# Beside the model -----------------------------------------------------------------------------------------------------


def beside(found: Measured, config: Config, micro_batches: int, pipeline: Pipeline, calibration: Calibration) -> Table:
    """Measured and predicted cycles of an update, of each IPU and of each class of operator.

    micro_batches: of a replica in an update, where the source names none.
    """
    if found.unit != "cycles":
        raise ValueError(
            f"{found.detail}: holds seconds and no cycles; run on IPUs with engine.log_cycles=true, or measure a GPU "
            "with make gpu"
        )
    number = found.micro_batches or micro_batches
    rows: List[Dict[str, Any]] = []

    def add(what: str, kind: str, measured: float, predicted: Interval) -> None:
        rows.append(
            {
                "what": what,
                "class": kind,
                "measured": measured,
                "lower": predicted.lower,
                "model": predicted.value,
                "upper": predicted.upper,
                "difference": percent(measured / predicted.value - 1.0) if predicted.value else None,
            }
        )

    def expected(ipu: int, kind: Optional[str] = None) -> Interval:
        def cycles(each: Parameters) -> Any:
            work = model_work(pipeline, number, each)[ipu]
            return (work["cycles"] if kind is None else work["classes"].get(kind, 0.0)) + 0.0 * each.factor

        return calibration.draws.interval(cycles)

    update = calibration.draws.interval(lambda each: pipeline.step(number, each).cycles)
    add("update", "", found.per_pack * found.packs, update)
    for work in found.work:
        if work.ipu >= len(pipeline.ipus):
            raise ValueError(
                f"{found.detail}: has IPU {work.ipu}, {config.path} {len(pipeline.ipus)} IPUs a replica; compare runs "
                "of the same pod"
            )
        add(f"IPU {work.ipu}", "all", work.cycles, expected(work.ipu))
        for kind in popvision.CLASSES:
            if kind in work.classes:
                add(f"IPU {work.ipu}", kind, work.classes[kind], expected(work.ipu, kind))
    taken = "" if found.micro_batches else f"; the source names no micro_batches: these are {config.name}'s"
    notes = [f"{found.detail}: {number:,} micro-batches of {config.batch.micro_batch} packs in an update{taken}."]
    if found.quartiles is not None:
        low, high = (end * found.packs for end in found.quartiles)
        notes.append(
            f"Quartiles over updates: {low:,.0f} to {high:,.0f} cycles, "
            f"{percent(found.quartiles[0] / found.per_pack - 1):+.1f} and "
            f"{percent(found.quartiles[1] / found.per_pack - 1):+.1f} %."
        )
    if found.work:
        notes.append(
            "Of an IPU only what it works counts, not its waiting; a profile's own overhead is in its numbers."
        )
    return Table(
        "measured_beside",
        f"Measured beside predicted: {config.name}, cycles of an update",
        (
            Column("what", "of", CONFIGURED),
            Column("class", "class", CONFIGURED),
            Column("measured", "measured", found.source, ",.0f"),
            Column("model", "model", MODEL, ",.0f", ("lower", "upper")),
            Column("difference", "measured/model %", COMPUTED, "+.1f"),
        ),
        rows,
        tuple(notes),
    )


def model_work(pipeline: Pipeline, micro_batches: int, parameters: Parameters) -> List[Dict[str, Any]]:
    """Cycles that each IPU works in an update, by class, as the cycle model says."""
    target, found = pipeline.target, []
    for ipu, once in zip(pipeline.ipus, pipeline.updates):
        cost = ipu.total * float(micro_batches) + once.cost
        classes = {
            popvision.PRODUCTS: parameters.product_cycles(cost),
            popvision.COMPUTE: cost.vertices,
            popvision.REARRANGEMENTS: parameters.layout_cycles(cost),
            popvision.EXCHANGE: parameters.exchange * cost.exchange,
            popvision.SYNC: parameters.sync * cost.sync,
        }
        classes = {name: parameters.factor * cycles for name, cycles in classes.items()}
        leaving = target.link_cycles(sum(ipu.link_bytes.values()))
        update = pipeline.ipu_update(ipu.number, parameters)
        summed = update.links + update.gateways + update.steps
        classes[popvision.LINKS] = parameters.links * micro_batches * leaving + summed * target.clock_hz
        classes[popvision.HOST] = update.streaming * target.clock_hz
        found.append({"ipu": ipu.number, "cycles": sum(classes.values()), "classes": classes})
    return found
