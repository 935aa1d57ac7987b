"""The bundle of `packed-bert ipu-check`: measured and predicted figures of a run on IPUs, as JSON to send.

docs/ipu_check.md describes its format. It contains no path, no host name and no user name: its settings are numbers,
switches and choices, and `_clean` edits every text.
"""

from __future__ import annotations

import contextlib
import dataclasses
import getpass
import json
import math
import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union, get_type_hints

from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.settings.declare import nested
from ipu_profiling.cycles.calibration import Interval
from ipu_profiling.measured.popvision import Memory, Work
from pack_data.display.table import text_table
from pack_data.reading.durable import write_atomically
from pack_data.reading.fields import Fields, read_object

FORMAT = 1
KIND = "packed-bert ipu-check"
# Statuses of a stage.
DONE = "done"
FAILED = "failed"
INTERRUPTED = "interrupted"
_MIB = 1024.0 * 1024.0
# Relative difference of the first loss from the host's, in float32 without dropout; both are close to that of a guess.
_LOSS_DIFFERS = 0.02
# Relative distance of cycles from the model's interval; those of the same task differ by 13 % between frameworks.
_CYCLES_DIFFER = 0.25


# ------------------------------------------------------------------------------------------------------------- content
# The fields are the keys of the file (docs/ipu_check.md); a field with a default is left out while it has no value.


@dataclass
class Stage:
    """A stage of the check and its outcome."""

    name: str
    status: str  # DONE, FAILED or INTERRUPTED
    seconds: float
    said: str
    means: Optional[str] = None
    way_out: Optional[str] = None


@dataclass
class Checked:
    """The sizes of the checked configuration."""

    name: str
    micro_batches: int
    micro_batch: int
    replicas: int
    ipus_per_replica: int
    packs: int
    settings: Dict[str, Dict[str, Any]]


@dataclass
class CheckedDevice:
    """The IPU."""

    architecture: Optional[int]
    bytes_per_tile: int


@dataclass
class Versions:
    """Versions of the software; None: unknown."""

    commit: Optional[str]
    python: Optional[str]
    torch: Optional[str]
    numpy: Optional[str]
    poptorch: Optional[str]
    system: Optional[str]
    poplar: Optional[str] = None


@dataclass
class PlannedMemory:
    """Planned bytes on one IPU."""

    ipu: int
    together: float


@dataclass
class Predicted:
    """Predicted figures, as far as the check computed them."""

    fits: Optional[bool] = dataclasses.field(default=None, metadata={"null": True})
    memory: Optional[List[PlannedMemory]] = None
    loss: Optional[float] = None
    update_cycles: Optional[Interval] = None
    seconds: Optional[float] = None
    clock_hz: Optional[float] = None
    work: Optional[List[Work]] = None


@dataclass
class MeasuredUpdates:
    """Measured figures, as far as the check measured them."""

    compile_seconds: Optional[float] = None
    losses: Optional[List[Optional[float]]] = None
    seconds: Optional[List[float]] = None
    update_cycles: Optional[float] = None
    memory: Optional[List[Memory]] = None
    work: Optional[List[Work]] = None


@dataclass
class Verdict:
    """The exit status, and the reasons for it with their way out."""

    status: int
    problems: List[str]
    way_out: List[str]


@dataclass
class Bundle:
    """The content of the file."""

    stages: List[Stage]
    configuration: Checked
    device: CheckedDevice
    versions: Versions
    predicted: Predicted
    measured: MeasuredUpdates
    verdict: Verdict


# ------------------------------------------------------------------------------------------------------------- privacy

_PATH = re.compile(r"""(?<![\w.:])(?:~|[A-Za-z]:)?[/\\][^\s'"`,;:()\[\]]+""")
_ADDRESS = re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b")


def _local_names() -> List[str]:
    """Return the names of this host and user, the longest first."""
    host = socket.gethostname()
    names = {host, host.partition(".")[0], os.path.basename(os.path.expanduser("~"))}
    # The system may have no name for the user.
    with contextlib.suppress(KeyError, OSError, ImportError):
        names.add(getpass.getuser())
    # These identify nobody, and names of one or two letters are parts of other words.
    names -= {"root", "user", "localhost"}
    return sorted((name for name in names if len(name) > 2), key=len, reverse=True)


def _clean(text: str) -> str:
    """Remove absolute paths, internet addresses, and the names of host and user from a text."""
    text = _ADDRESS.sub("<address>", _PATH.sub("<path>", text))
    for name in _local_names():
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "<name>", text)
    return text


def public_settings(config: Config) -> Dict[str, Dict[str, Any]]:
    """Return the settings that are numbers, switches or one of several choices, by section; no name of a file."""
    settings = {}
    for key, setting in config.settings.items():
        is_text = "str" in str(setting.kind)  # <class 'str'>, typing.Optional[str]
        if not is_text or setting.rule.choices:
            settings[key] = config.value(key)
    return nested(settings)


# ------------------------------------------------------------------------------------------------- writing and reading


def write_bundle(path: Path, bundle: Bundle) -> None:
    """Write a bundle without paths and names in its texts; numbers that are not finite are written as null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tree = {"format": FORMAT, "kind": KIND, **_tree(bundle)}
    text = json.dumps(tree, indent=1, allow_nan=False, default=float)
    write_atomically(path, f"{text}\n".encode())


def _tree(value: Any) -> Any:
    """Return a value in types of JSON."""
    if dataclasses.is_dataclass(value):
        tree = {}
        for field in dataclasses.fields(value):
            member = getattr(value, field.name)
            written_as_null = field.default is dataclasses.MISSING or field.metadata.get("null")
            if member is not None or written_as_null:
                tree[field.name] = _tree(member)
        return tree
    if isinstance(value, dict):
        return {key: _tree(member) for key, member in value.items()}
    if isinstance(value, (list, tuple)):
        return [_tree(member) for member in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return _clean(value) if isinstance(value, str) else value


def read_bundle(path: Path) -> Bundle:
    """Read a bundle.

    Raises:
        ValueError: the file is not a bundle, has another format, or is damaged.
    """
    way_out = "pass the bundle.json that packed-bert ipu-check wrote"
    fields = read_object(Path(path), way_out=way_out)
    if "kind" not in fields or "format" not in fields or fields.any("kind") != KIND:
        raise ValueError(f"{path}: not a bundle of packed-bert ipu-check; {way_out}")
    fields.one_of("format", [FORMAT])
    return _read(fields, Bundle)


def _read(fields: Fields, kind: Any) -> Any:
    """Read an object of the file as a dataclass."""
    return kind(**{name: _value(fields, name, hint) for name, hint in get_type_hints(kind).items()})


def _value(fields: Fields, key: Any, hint: Any) -> Any:
    """Read a value by the annotation of its field."""
    origin = getattr(hint, "__origin__", None)
    inner: Tuple[Any, ...] = getattr(hint, "__args__", ())
    if origin is Union:  # Optional
        return fields.optional(key, _value, inner[0])
    if origin is list:
        return fields.list_of(key, _value, inner[0])
    if origin is dict:
        sections = fields.values_of(key, Fields.object)
        return {name: section.tree for name, section in sections.items()}
    if hint is Interval:
        return Interval(*fields.list_of(key, Fields.number, length=3))
    if hint is str:
        return fields.text(key, printable=False)
    if dataclasses.is_dataclass(hint):
        return _read(fields.object(key), hint)
    readers: Dict[Any, Any] = {int: Fields.integer, float: Fields.number, bool: Fields.boolean}
    return readers[hint](fields, key)


# ------------------------------------------------------------------------------------------------------------- verdict


def problems(bundle: Bundle) -> List[str]:
    """Return a line for each figure that does not fit or differs; failed stages are not repeated."""
    lines: List[str] = []
    measured = bundle.measured
    predicted = bundle.predicted
    limit = bundle.device.bytes_per_tile
    for memory in measured.memory or ():
        if memory.fullest_tile > limit:
            lines.append(
                f"does not fit: the fullest tile of IPU {memory.ipu} needs {memory.fullest_tile:,} bytes of {limit:,}"
            )

    losses = measured.losses or []
    if None in losses:
        lines.append(f"differs: the loss of update {losses.index(None) + 1} is not finite")
    elif losses and predicted.loss is not None:
        first = float(losses[0] or 0.0)
        if abs(first / predicted.loss - 1) > _LOSS_DIFFERS:
            lines.append(
                f"differs: the first loss is {first:.4f}, more than {_LOSS_DIFFERS:.0%} from the host's "
                f"{predicted.loss:.4f}"
            )

    # The cycles of a profile are not compared, because they include the overhead of profiling.
    cycles = measured.update_cycles
    if cycles and predicted.update_cycles and not measured.work:
        low, _, high = predicted.update_cycles
        if not low * (1 - _CYCLES_DIFFER) <= cycles <= high * (1 + _CYCLES_DIFFER):
            lines.append(
                f"differs: an update takes {cycles:,.0f} cycles, more than {_CYCLES_DIFFER:.0%} outside the model's "
                f"{low:,.0f} to {high:,.0f}"
            )
    return lines


def way_out(
    config: Config, *, ipu: Optional[int], smaller: Optional[int], memory: Sequence[float]
) -> List[str]:
    """Return changes for a program that does not fit, the cheapest first, as --set options.

    Args:
        config: the user's configuration, which does not fit. Its accumulation is that of the run, not of a check.
        ipu: the full IPU, None if it is unknown.
        smaller: a micro-batch that fits according to the plan, if there is one.
        memory: planned bytes of each IPU.
    """
    engine = config.engine
    placement = config.placement
    changes = []
    if not engine.recomputes(ipus=True):
        changes.append("recompute the layers: --set engine.recompute_layers=true")
    if not engine.half_logits and ipu in (0, None):
        changes.append(
            "compute the loss of masked tokens in half, on IPU 0: --set engine.half_logits=true"
        )

    # On the IPU Model the placement of the block without_ipus is checked.
    on_model = config.origins.get("placement.layers_per_ipu") == "without_ipus"
    block = "without_ipus." if on_model else ""
    proportions = list(placement.available_memory_proportion)
    for number, proportion in enumerate(proportions):
        if ipu in (number, None):
            proportions[number] = proportion * 0.75
    rounded = ",".join(str(round(proportion, 3)) for proportion in proportions)
    changes.append(
        f"give products less temporary memory, which makes them slower: --set {block}placement."
        f"available_memory_proportion=[{rounded}]"
    )
    if not placement.optimizer_state_off_chip:
        changes.append(
            "keep the optimiser state off the chip: --set placement.optimizer_state_off_chip=true"
        )

    if smaller is None:
        smaller = config.batch.micro_batch // 2
    if smaller:
        # The packing factor of the data is unknown here; it may change how the number of micro-batches is rounded.
        changes.append(
            f"reduce the micro-batch at about the same size of an update: {config.on_micro_batch(smaller, 1.0)}"
        )

    layers = _with_a_layer_moved(placement.layers_per_ipu, ipu, memory)
    if layers is not None:
        words = ",".join(map(str, layers))
        changes.append(
            f"move a layer from the full IPU: --set {block}placement.layers_per_ipu=[{words}]"
        )
    return changes


def _with_a_layer_moved(
    layers_per_ipu: Sequence[int], ipu: Optional[int], memory: Sequence[float]
) -> Optional[List[int]]:
    """Move a layer from the full IPU, or else the fullest, to the emptiest; return None if no move helps."""
    layers = list(layers_per_ipu)
    if len(memory) < 2:
        return None
    full = ipu
    if full is None or full >= len(layers):
        full = max(range(len(layers)), key=lambda number: memory[number])
    emptiest = min(range(len(layers)), key=lambda number: memory[number])
    if full == emptiest or not layers[full]:
        return None
    layers[full] -= 1
    layers[emptiest] += 1
    return layers


# ---------------------------------------------------------------------------------------------------------------- page


def page(bundle: Bundle) -> List[str]:
    """Return measured and predicted figures, and the verdict, as lines for a terminal."""
    checked = bundle.configuration
    verdict = bundle.verdict
    failed = [stage.name for stage in bundle.stages if stage.status == FAILED]
    lines = [
        f"{checked.name}: {checked.micro_batches} micro-batches of {checked.micro_batch} packs in an update,"
        f" {checked.replicas} x {checked.ipus_per_replica} IPUs",
        "",
        *text_table(
            [["", "measured", "predicted", "measured / predicted"], *_rows(bundle)], left={0}
        ),
        "",
    ]
    if failed:
        lines.append(f"failed    {', '.join(failed)}")
    lines += [f"verdict   {problem}" for problem in verdict.problems]
    for number, change in enumerate(verdict.way_out):
        label = "" if number else "try"
        lines.append(f"{label:<10}{change}")
    if not (verdict.problems or failed):
        lines.append("verdict   nothing differs from the prediction")
    return lines


def _rows(bundle: Bundle) -> List[List[str]]:
    """Return name, measured, predicted and their quotient for each number that was measured or predicted."""
    measured = bundle.measured
    predicted = bundle.predicted
    rows: List[List[str]] = []

    def add(name: str, value: Optional[float], expected: Optional[float], form: str) -> None:
        if value is None and expected is None:
            return
        texts = ["-" if number is None else format(number, form) for number in (value, expected)]
        quotient = f"{value / expected:.3f}" if value is not None and expected else "-"
        rows.append([name, *texts, quotient])

    losses = measured.losses or [None]
    add("first loss", losses[0], predicted.loss, ".4f")
    if len(losses) > 1:
        add(f"loss of update {len(losses)}", losses[-1], None, ".4f")
    cycles = predicted.update_cycles
    add("cycles of an update", measured.update_cycles, cycles.value if cycles else None, ",.0f")
    if cycles is not None:
        rows[-1][2] += f", {cycles.lower:,.0f} to {cycles.upper:,.0f}"
    median = None
    if measured.seconds:
        median = sorted(measured.seconds)[len(measured.seconds) // 2]
    add("seconds of an update", median, predicted.seconds, ".4f")

    planned = {memory.ipu: memory.together / _MIB for memory in predicted.memory or ()}
    for memory in measured.memory or ():
        name = f"MiB on IPU {memory.ipu}, code and exchange not predicted"
        add(name, memory.bytes / _MIB, planned.get(memory.ipu), ",.1f")
    modelled = {work.ipu: work.cycles / 1000.0 for work in predicted.work or ()}
    for work in measured.work or ():
        name = f"thousand cycles of work of IPU {work.ipu}"
        add(name, work.cycles / 1000.0, modelled.get(work.ipu), ",.1f")
    return rows
