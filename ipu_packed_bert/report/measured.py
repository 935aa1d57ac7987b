"""Cycles that somebody measured, beside those of the model: overhead_report.py --measured SOURCE.

A source is the folder of a run, the bundle of `packed-bert ipu-check` (or its folder), a PopVision profile, or a file
of cycles, as JSON (docs/cycle_model.md has the format). What a source says of its settings must agree with the
configuration that it is set beside; what differs is refused by name. All cycles are tile cycles of one update.
"""

from __future__ import annotations

from math import ceil
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Tuple

from ipu_packed_bert.cycles.arrangement import UNPACKED
from ipu_packed_bert.cycles.calibration import Calibration, Observation, ideal_cycles
from ipu_packed_bert.cycles.pipeline import Parameters, Pipeline
from ipu_packed_bert.cycles.points import Point
from ipu_packed_bert.cycles.uncertainty import Interval
from ipu_packed_bert.cycles.workload import Machine, engine_arrangement, shape_of
from ipu_packed_bert.report import popvision, sources
from ipu_packed_bert.report.ipu_bundle import KIND, read_bundle
from ipu_packed_bert.run_files.folder import CONFIG, LOG
from ipu_packed_bert.settings.pretraining import Config, config_from_tree
from pack_data.display.table import COMPUTED, CONFIGURED, HARDWARE, MODEL, PROFILE, Column, Table, percent
from pack_data.reading.fields import Fields, read_object, shown

_WAY_OUT = "see docs/cycle_model.md for the format"
_Settings = Mapping[str, Mapping[str, Any]]  # by section, as far as a source states them


class Measured(NamedTuple):
    """What a source says of one configuration's updates."""

    source: str  # HARDWARE or PROFILE
    detail: str  # what was read
    settings: _Settings
    micro_batches: Optional[int]  # of a replica in an update, where the source says it
    cycles: Optional[float]  # of an update, the median
    spread: Optional[Tuple[float, float]]  # quartiles over updates
    work: Tuple[popvision.Work, ...]  # of each IPU, without waiting for others
    taken: str = ""  # where the micro-batches are from, if not from the source


# Reading --------------------------------------------------------------------------------------------------------------


def read(path: Path, *, ipus: Optional[int] = None) -> Measured:
    """ipus: of a replica, which a profile does not say. ValueError, in one line, for what is no source."""
    if path.is_dir() and (path / LOG).is_file():
        return _of_run(path)
    if path.is_dir() and (path / "bundle.json").is_file():
        return _of_bundle(path / "bundle.json")
    if path.suffix == ".pop" or path.is_dir():
        return _of_profile(path if path.is_file() else popvision.find_profile(path), ipus)
    if path.suffix == ".json":
        found = read_object(path, way_out=_WAY_OUT)
        return _of_bundle(path) if found.tree.get("kind") == KIND else _of_object(found, path)
    raise ValueError(
        f"--measured {path}: {'is no source of cycles' if path.exists() else 'there is nothing'}; give a run's "
        "folder, a bundle.json, a profile.pop, or cycles as .json"
    )


def _of_run(folder: Path) -> Measured:
    measurement = sources.LoggedRun(folder).measure()
    if measurement.unit != "cycles":
        raise ValueError(
            f"{folder / LOG}: holds seconds and no cycles; run on IPUs with engine.log_cycles=true, or measure a GPU "
            "with make gpu"
        )
    settings = measurement.settings or {}
    rows = 1
    fields = Fields.of(settings, folder / CONFIG, f"it must be the {CONFIG} that the run wrote")
    for section, name in (("batch", "micro_batch"), ("placement", "replicas")):
        found = fields.optional(section, Fields.object)
        rows *= 0 if found is None else found.optional(name, Fields.integer, least=1) or 0
    number = ceil(measurement.packs_per_step / rows) if rows else None
    low, high = measurement.spread or (measurement.per_pack, measurement.per_pack)
    packs = measurement.packs_per_step
    return Measured(
        HARDWARE, str(folder), settings, number, measurement.per_pack * packs, (low * packs, high * packs), ()
    )


def _of_bundle(path: Path) -> Measured:
    bundle = read_bundle(path)
    checked, measured = bundle["configuration"], bundle["measured"]
    counted = measured.get("counted_cycles")
    cycles = measured.get("profiled_cycles") if counted is None else counted
    if cycles is None:
        raise ValueError(f"{path}: holds no measured cycles; the check ran on no IPU, or was stopped before")
    work = tuple(popvision.Work(each["ipu"], each["cycles"], each["classes"]) for each in measured.get("work", ()))
    source = PROFILE if counted is None else HARDWARE
    return Measured(source, str(path), checked["settings"], checked["micro_batches"], float(cycles), None, work)


def _of_profile(path: Path, ipus: Optional[int]) -> Measured:
    if ipus is None:
        raise ValueError(f"{path}: a profile says nothing of its configuration; name it with --config")
    profile = popvision.read_profile(path, ipus=ipus)
    if not profile.work:
        raise ValueError(f"{path}: holds no execution; run the program with profiling on, not only compile it")
    return Measured(PROFILE, str(path), {}, None, max(work.cycles for work in profile.work), None, profile.work)


def _of_object(fields: Fields, path: Path) -> Measured:
    fields.only("settings", "micro_batches", "update_cycles", "ipus")
    settings = fields.values_of("settings", Fields.object) if "settings" in fields else {}
    cycles = fields.optional("update_cycles", Fields.number, least=1)
    work: List[popvision.Work] = []
    for each in fields.optional("ipus", Fields.list_of, Fields.object) or ():
        classes = each.values_of("classes", Fields.number, least=0) if "classes" in each else {}
        _refuse_unknown(path, classes)
        ipu, total = each.integer("ipu", least=0), each.optional("cycles", Fields.number, least=0)
        if ipu in {one.ipu for one in work}:
            raise ValueError(f"{path}: IPU {ipu} stands there twice; {_WAY_OUT}")
        if total is None and not classes:
            raise ValueError(f"{path}: IPU {ipu} has neither cycles nor classes; {_WAY_OUT}")
        work.append(popvision.Work(ipu, sum(classes.values()) if total is None else total, classes))
    if cycles is None and not work:
        raise ValueError(f"{path}: neither cycles of an update nor of an IPU; {_WAY_OUT}")
    stated = {name: section.tree for name, section in settings.items()}
    number = fields.optional("micro_batches", Fields.integer, least=1)
    return Measured(HARDWARE, str(path), stated, number, cycles, None, tuple(work))


def _refuse_unknown(path: Path, classes: Mapping[str, float]) -> None:
    for name in classes:
        if name not in popvision.CLASSES:
            raise ValueError(f"{path}: class {shown(name)}; must be one of {', '.join(popvision.CLASSES)}; {_WAY_OUT}")


# Beside the model -----------------------------------------------------------------------------------------------------


def configuration(found: Measured, given: Optional[Config]) -> Config:
    """The configuration that a source was measured with: the one given, where both agree, else as the source states it.

    Raises ValueError, in one line, that names the first setting in which they differ.
    """
    if given is not None:
        sources.refuse_differences(found.detail, found.settings, given.path, given.as_dict(), sources.SAME_PROGRAM)
        return given
    if "model" not in found.settings:
        raise ValueError(f"{found.detail}: does not state its settings; name the configuration with --config")
    tree = {section: dict(values) for section, values in found.settings.items() if section != "without_ipus"}
    return config_from_tree(tree, found.detail)


def completed(found: Measured, config: Config, factor_of: Callable[[Config], float]) -> Measured:
    """With the micro-batches of the configuration's packed update, where the source names none."""
    if found.micro_batches is not None:
        return found
    factor = factor_of(config)
    taken = f"; the source names no micro_batches: these are {config.name}'s at {factor:.3f} sequences a pack"
    return found._replace(micro_batches=config.accumulation(factor), taken=taken)


def micro_batches_of(found: Measured) -> int:
    """Of a replica in an update, after :func:`completed`."""
    assert found.micro_batches is not None
    return found.micro_batches


def beside(found: Measured, config: Config, pipeline: Pipeline, calibration: Calibration) -> Table:
    """Measured and predicted cycles of an update, of each IPU and of each class of operator."""
    number = micro_batches_of(found)
    rows: List[Dict[str, Any]] = []

    def add(what: str, kind: str, measured: float, predicted: Tuple[float, float, float]) -> None:
        low, middle, high = predicted
        rows.append(
            {
                "what": what,
                "class": kind,
                "measured": measured,
                "lower": low,
                "model": middle,
                "upper": high,
                "difference": percent(measured / middle - 1.0) if middle else None,
            }
        )

    if found.cycles is not None:
        add("update", "", found.cycles, calibration.interval(lambda each: pipeline.step(number, each).cycles))

    def expected(ipu: int, kind: Optional[str] = None) -> Interval:
        def cycles(each: Parameters) -> Any:
            work = model_work(pipeline, number, each)[ipu]
            return (work["cycles"] if kind is None else work["classes"].get(kind, 0.0)) + 0.0 * each.factor

        return calibration.interval(cycles)

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
    notes = [f"{found.detail}: {number:,} micro-batches of {config.batch.micro_batch} packs in an update{found.taken}."]
    if found.spread is not None and found.cycles is not None:
        notes.append(
            f"Quartiles over updates: {found.spread[0]:,.0f} to {found.spread[1]:,.0f} cycles, "
            f"{percent(found.spread[0] / found.cycles - 1):+.1f} and "
            f"{percent(found.spread[1] / found.cycles - 1):+.1f} %."
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


def observation(found: Measured, config: Config, machine: Machine, calibration: Calibration) -> Observation:
    """A source as a point to fit to. Counted cycles hold nothing of the host between calls: the fitted part is added.

    Raises ValueError where the source has no cycles of an update.
    """
    if found.cycles is None:
        raise ValueError(f"{found.detail}: holds no cycles of an update, only of IPUs; there is nothing to fit to")
    shape, number = shape_of(config), micro_batches_of(found)
    arrangement = engine_arrangement(config) if shape.depth > 1 else UNPACKED
    pipeline = machine.pipeline(config, arrangement=arrangement)
    host = pipeline.update_cost(calibration.parameters).host
    packs = number * config.batch.micro_batch * config.placement.replicas
    rate = packs / (machine.target.seconds(found.cycles) + host)
    name = Path(found.detail).name
    settings = (name, config.name, config.path, (), arrangement, machine.target.name)
    point = Point(*settings, number, 1.0, rate, found.detail, pytorch=True)
    return Observation(point, pipeline, ideal_cycles(machine.traces.training(config, shape, arrangement), pipeline))


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
