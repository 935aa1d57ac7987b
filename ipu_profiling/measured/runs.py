"""Measured cycles of an update compared with the model's.

A source is the directory of a run, the bundle of `packed-bert ipu-check` (or its directory), or a PopVision profile.
Settings that a source states must be equal to the configuration's; the first that differs is refused by name.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from ipu_packed_bert.run_files.folder import CONFIG, LOG, read_log
from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.settings.declare import plain
from ipu_packed_bert.settings.loading import config_from_tree
from ipu_packed_bert.settings.yaml_files import load_yaml
from ipu_profiling.cycles.calibration import Calibration, Interval
from ipu_profiling.cycles.pipeline import Pipeline
from ipu_profiling.measured.bundle import FORMAT, KIND
from ipu_profiling.measured.popvision import Work, read_profile
from pack_data.display.facts import (
    COMPUTED,
    HARDWARE,
    MODEL,
    PROFILE,
    Fact,
    Facts,
    number,
    with_unit,
)
from pack_data.reading.fields import Fields, named, read_object, shown

_POD = ("machine", "replicas", "ipus_per_replica", "layers_per_ipu", "available_memory_proportion")
# Settings that must be equal: section, settings (none: all of the section), and their name in a message.
_SAME_PROGRAM = (
    ("data", ("max_sequence_length", "max_sequences_per_pack"), "length and packing depth"),
    ("model", (), "model"),
    ("batch", ("micro_batch",), "batch"),
    ("placement", _POD, "pod"),
    ("engine", ("mask", "recompute_layers", "half_partials"), "mask and recomputation"),
)


class Measured(NamedTuple):
    """The measured updates of one configuration."""

    source: str  # HARDWARE or PROFILE
    detail: str  # the path of the source
    cycles: float  # of an update, the median over updates
    quartiles: Optional[Tuple[float, float]] = None  # of `cycles`
    settings: Dict[str, Any] = {}  # by section, those that the source states
    micro_batches: Optional[int] = None  # of a replica in an update
    work: Tuple[Work, ...] = ()  # of each IPU, without waiting for others


# Reading --------------------------------------------------------------------------------------------------------------


def read(path: Path, *, ipus: Optional[int] = None) -> Measured:
    """Read a source.

    Args:
        path: a run's directory, a bundle.json, a profile.pop, or a directory with one of these files.
        ipus: IPUs of a replica, which a profile does not state; None: all IPUs of the profile.

    Raises:
        ValueError: the path is none of these, or has no cycles.
    """
    if path.suffix == ".json" or (path / "bundle.json").is_file():
        return _of_bundle(path if path.suffix == ".json" else path / "bundle.json")
    if path.suffix == ".pop" or (path / "profile.pop").is_file():
        return _of_profile(path if path.suffix == ".pop" else path / "profile.pop", ipus)
    return _of_run(path)


def _of_run(folder: Path) -> Measured:
    """Read the steps of a run except the first, which compiles and warms up."""
    steps = _steps(folder / LOG)[1:]
    if not steps:
        raise ValueError(
            f"{folder / LOG}: fewer than 2 steps, and the first is a warm-up; train for at least 2 steps"
        )
    if any(step.get("cycles") is None for step in steps):
        raise ValueError(
            f"{folder / LOG}: steps without cycles; run on IPUs with engine.log_cycles=true, or compare seconds with "
            "run.compare_unpacked"
        )
    packs = int(median(step["packs"] for step in steps))
    cycles = sorted(step["cycles"] / step["packs"] * packs for step in steps)

    settings = _settings(folder / CONFIG)
    micro_batch = settings.get("batch", {}).get("micro_batch")
    replicas = settings.get("placement", {}).get("replicas")
    micro_batches = None
    if micro_batch and replicas:
        micro_batches = -(-packs // (micro_batch * replicas))
    quarter = len(cycles) // 4
    quartiles = (cycles[quarter], cycles[-1 - quarter])
    return Measured(HARDWARE, str(folder), median(cycles), quartiles, settings, micro_batches)


def _steps(log: Path) -> List[Dict[str, Any]]:
    """Return the lines of a log that are steps, with checked packs and cycles."""
    if not log.is_file():
        raise ValueError(
            f"{log}: no such file; pass the directory of a run, a bundle.json of packed-bert ipu-check, or a "
            "profile.pop"
        )
    steps = []
    for line, record in enumerate(read_log(log), start=1):
        if "seconds" not in record or "packs" not in record:
            continue
        fields = Fields.of(record, f"{log}, line {line}", "pass the directory of a finished run")
        fields.integer("packs", least=1)
        cycles = fields.optional("cycles", Fields.number)
        if cycles is not None and not 0.0 < cycles < 2.0**100:
            raise fields.error("cycles", "must be a number above 0")
        steps.append(record)
    return steps


def _settings(path: Path) -> Dict[str, Any]:
    """Return a run's configuration by section; nothing if the file is missing."""
    if not path.is_file():
        return {}
    fields = Fields.of(load_yaml(path), path, f"it must be the {CONFIG} that the run wrote")
    fields.object("data")
    fields.optional("model", Fields.object)
    fields.optional("engine", Fields.object)
    for name, setting in (("batch", "micro_batch"), ("placement", "replicas")):
        section = fields.optional(name, Fields.object)
        if section is not None:
            section.optional(setting, Fields.integer, least=1)
    return {name: values for name, values in fields.tree.items() if isinstance(values, dict)}


def _of_bundle(path: Path) -> Measured:
    """Read the settings and the cycles of a bundle; a stage that was not reached left no keys."""
    way_out = "pass the bundle.json that packed-bert ipu-check wrote"
    bundle = read_object(path, way_out=way_out)
    if "kind" not in bundle or bundle.any("kind") != KIND:
        raise ValueError(f"{path}: not a bundle of packed-bert ipu-check; {way_out}")
    bundle.one_of("format", [FORMAT])
    checked = bundle.object("configuration")
    measured = bundle.object("measured")
    cycles = measured.optional("update_cycles", Fields.number)
    if cycles is None:
        raise ValueError(
            f"{path}: no measured cycles; run packed-bert ipu-check until its updates are done"
        )
    work = []
    for ipu in measured.optional("work", Fields.list_of, Fields.object) or ():
        work.append(Work(ipu.integer("ipu", least=0), ipu.number("cycles")))
    sections = checked.values_of("settings", Fields.object)
    return Measured(
        PROFILE if work else HARDWARE,
        str(path),
        cycles,
        settings={name: section.tree for name, section in sections.items()},
        micro_batches=checked.integer("micro_batches", least=1),
        work=tuple(work),
    )


def _of_profile(path: Path, ipus: Optional[int]) -> Measured:
    profile = read_profile(path, ipus=ipus)
    if not profile.work:
        raise ValueError(
            f"{path}: no execution; profile a run of the program, not only its compilation"
        )
    slowest = max(work.cycles for work in profile.work)
    return Measured(PROFILE, str(path), slowest, work=profile.work)


def with_micro_batches(measured: Measured, named_number: Optional[int]) -> Measured:
    """Return the source with its number of micro-batches.

    Args:
        measured: the source.
        named_number: the number given by --micro-batches; None if it was left out.

    Raises:
        ValueError: neither states the number, or both do and differ.
    """
    stated = measured.micro_batches
    if stated is None and named_number is None:
        raise ValueError(
            f"{measured.detail}: does not state the micro-batches of an update; pass --micro-batches N"
        )
    if stated is not None and named_number not in (None, stated):
        raise ValueError(
            f"{measured.detail}: {stated:,} micro-batches in an update, not {named_number:,}; leave --micro-batches out"
        )
    return measured._replace(micro_batches=stated or named_number)


# Configurations -------------------------------------------------------------------------------------------------------


def configuration(measured: Measured, named_config: Optional[Config]) -> Config:
    """Return the configuration of a source.

    Args:
        measured: the source.
        named_config: the configuration of --config; None: that of the source.

    Raises:
        ValueError: a setting differs between both, or neither states the settings.
    """
    if named_config is not None:
        _check_settings(measured, named_config)
        return named_config
    if "model" not in measured.settings:
        raise ValueError(
            f"{measured.detail}: no settings in it; name the configuration with --config"
        )
    tree = {section: dict(values) for section, values in measured.settings.items()}
    tree.pop("without_ipus", None)
    return config_from_tree(tree, measured.detail, command="pretrain")


def _check_settings(measured: Measured, config: Config) -> None:
    """Raise ValueError for the first setting that differs between a source and a configuration."""
    sections = config.as_dict()
    for section, names, what in _SAME_PROGRAM:
        theirs = measured.settings.get(section) or {}
        ours = sections.get(section) or {}
        for name in names or sorted(theirs):
            if name in theirs and name in ours and plain(theirs[name]) != plain(ours[name]):
                raise ValueError(
                    f"{measured.detail}: {section}.{named(name)} is {shown(theirs[name])}, but {shown(ours[name])} in "
                    f"{config.path}; compare runs of the same {what}"
                )


# Comparison with the model --------------------------------------------------------------------------------------------


def beside(measured: Measured, config: Config, pipeline: Pipeline, fitted: Calibration) -> Facts:
    """Compare measured and predicted cycles of an update and, from a profile, of each IPU.

    Args:
        measured: the source, with its number of micro-batches.
        config: the configuration of the source.
        pipeline: the pipeline of the configuration.
        fitted: the fitted parameters.

    Raises:
        ValueError: the source has more IPUs than the pipeline.
    """
    micro_batches = measured.micro_batches
    assert micro_batches is not None  # with_micro_batches
    update = fitted.duration(lambda parameters: pipeline.step(micro_batches, parameters).cycles)
    rows = [_compared(measured.source, "update", measured.cycles, update)]
    for work in measured.work:
        if work.ipu >= len(pipeline.ipus):
            raise ValueError(
                f"{measured.detail}: cycles of IPU {work.ipu}, but {config.path} has {len(pipeline.ipus)} IPUs per "
                "replica; compare runs of the same pod"
            )
        predicted = fitted.duration(
            partial(pipeline.work_cycles, pipeline.ipus[work.ipu], micro_batches)
        )
        rows.append(_compared(measured.source, f"IPU {work.ipu}", work.cycles, predicted))

    notes = [
        f"{measured.detail}: {micro_batches:,} micro-batches of {config.batch.micro_batch} packs in an update."
    ]
    if measured.quartiles is not None:
        low, high = measured.quartiles
        notes.append(
            f"Quartiles over updates: {number(low, 'cycles')} to {with_unit(high, 'cycles')}, "
            f"{number(_percent_more(low, measured.cycles), 'percent more')} and "
            f"{with_unit(_percent_more(high, measured.cycles), 'percent more')}."
        )
    if measured.work:
        notes.append(
            "Cycles of an IPU exclude waiting for other IPUs; those of a profile include the overhead of profiling."
        )
    notes.append(
        "The interval has the width of the errors of the published throughputs, each left out of its own fit."
    )
    title = f"Measured and predicted: {config.name}, cycles of an update"
    return Facts(title, rows, notes, "measured_beside")


def _percent_more(cycles: float, than: float) -> float:
    return 100.0 * (cycles / than - 1.0)


def _compared(source: str, what: str, cycles: float, model: Interval) -> Dict[str, Fact]:
    """Return the row of an update or of an IPU."""
    difference = _percent_more(cycles, model.value)
    return {
        "what": Fact("of", what),
        "measured": Fact("measured", cycles, "cycles", source),
        "model": Fact("model", model.value, "cycles", MODEL),
        "lower": Fact("model, at least", model.lower, "cycles", MODEL),
        "upper": Fact("model, at most", model.upper, "cycles", MODEL),
        "difference": Fact("measured/model", difference, "percent more", COMPUTED),
    }
