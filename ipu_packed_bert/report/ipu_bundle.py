"""The bundle of `packed-bert ipu-check`: what was measured on IPUs beside what was predicted, as JSON that can be sent.

docs/ipu_check.md describes its format. It holds no path, no host name and no user name: of the configuration only
numbers, switches and choices are taken, and every text passes `clean`.
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
from typing import Any, Dict, List, Optional, Tuple, Union, get_type_hints

from ipu_packed_bert.cycles.calibration import Interval
from ipu_packed_bert.report.popvision import Memory, Work
from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.settings.declare import nested
from pack_data.display.table import text_table
from pack_data.reading.fields import Fields, read_object
from pack_data.reading.files import write_atomically

FORMAT = 1
KIND = "packed-bert ipu-check"
DONE, FAILED, INTERRUPTED = "done", "failed", "interrupted"
_MIB = 1024.0 * 1024.0
# The first loss beside the host's, which has no dropout and float32: at the beginning both are nearly that of guessing.
_LOSS_DIFFERS = 0.02
# Cycles outside the model's interval by more than this; the same task differs by 13 % between frameworks.
_CYCLES_DIFFER = 0.25


# ------------------------------------------------------------------------------------------------------------- content
# The fields are the keys of the file (docs/ipu_check.md); one that has a default is left out while it has no value.


@dataclass
class Stage:
    name: str
    status: str  # DONE, FAILED or INTERRUPTED
    seconds: float
    said: str
    means: Optional[str] = None
    way_out: Optional[str] = None


@dataclass
class Checked:
    name: str
    micro_batches: int
    micro_batch: int
    replicas: int
    ipus_per_replica: int
    packs: int
    settings: Dict[str, Dict[str, Any]]


@dataclass
class CheckedDevice:
    architecture: Optional[int]
    bytes_per_tile: int


@dataclass
class Versions:
    commit: Optional[str]
    python: Optional[str]
    torch: Optional[str]
    numpy: Optional[str]
    poptorch: Optional[str]
    system: Optional[str]
    poplar: Optional[str] = None


@dataclass
class PlannedMemory:
    ipu: int
    together: float


@dataclass
class Predicted:
    fits: Optional[bool] = dataclasses.field(default=None, metadata={"null": True})
    memory: Optional[List[PlannedMemory]] = None
    loss: Optional[float] = None
    update_cycles: Optional[Interval] = None
    seconds: Optional[float] = None
    clock_hz: Optional[float] = None
    work: Optional[List[Work]] = None


@dataclass
class MeasuredUpdates:
    compile_seconds: Optional[float] = None
    losses: Optional[List[Optional[float]]] = None
    seconds: Optional[List[float]] = None
    update_cycles: Optional[float] = None
    memory: Optional[List[Memory]] = None
    work: Optional[List[Work]] = None


@dataclass
class Verdict:
    status: int
    problems: List[str]
    way_out: List[str]


@dataclass
class Bundle:
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


def _own_names() -> List[str]:
    names = [
        socket.gethostname(),
        socket.gethostname().partition(".")[0],
        os.path.basename(os.path.expanduser("~")),
    ]
    with contextlib.suppress(
        KeyError, OSError, ImportError
    ):  # a user whom the system has no name for
        names.append(getpass.getuser())
    # "root" and "user" are nobody's name, and a name of one or two letters would hide every word that holds it.
    found = {name for name in names if len(name) > 2 and name not in ("root", "user", "localhost")}
    return sorted(found, key=len, reverse=True)


def clean(text: str) -> str:
    """Remove absolute paths, internet addresses, and the names of host and user from a text."""
    text = _ADDRESS.sub("<address>", _PATH.sub("<path>", text))
    for name in _own_names():
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "<name>", text)
    return text


def public_settings(config: Config) -> Dict[str, Dict[str, Any]]:
    """Return the numbers, the switches and the texts that are one of several choices; no name of a file."""
    return nested(
        {
            key: config.value(key)
            for key, setting in config.settings.items()
            if "str" not in str(setting.kind)
            or setting.rule.choices  # the type: <class 'str'>, typing.Optional[str]
        }
    )


# ------------------------------------------------------------------------------------------------- writing and reading


def write_bundle(path: Path, bundle: Bundle) -> None:
    """Write a bundle; texts are cleaned, and numbers that are not finite are null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tree = {"format": FORMAT, "kind": KIND, **_tree(bundle)}
    write_atomically(
        path, (json.dumps(tree, indent=1, allow_nan=False, default=float) + "\n").encode()
    )


def _tree(value: Any) -> Any:
    """Return a value as JSON has it."""
    if dataclasses.is_dataclass(value):
        tree = {}
        for field in dataclasses.fields(value):
            member = getattr(value, field.name)
            if (
                member is not None
                or field.default is dataclasses.MISSING
                or field.metadata.get("null")
            ):
                tree[field.name] = _tree(member)
        return tree
    if isinstance(value, dict):
        return {key: _tree(member) for key, member in value.items()}
    if isinstance(value, (list, tuple)):
        return [_tree(member) for member in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return clean(value) if isinstance(value, str) else value


def read_bundle(path: Path) -> Bundle:
    """Read a bundle.

    Raises:
        ValueError: if the file is no bundle, one of another format, or damaged.
    """
    fields = read_object(
        Path(path), way_out="pass the bundle.json that packed-bert ipu-check wrote"
    )
    if not all(key in fields for key in ("kind", "format")) or fields.any("kind") != KIND:
        raise ValueError(
            f"{path}: no bundle of packed-bert ipu-check; pass the bundle.json that it wrote"
        )
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
        return {
            name: section.tree for name, section in fields.values_of(key, Fields.object).items()
        }
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
    """Return what does not fit or differs, a line each; stages that failed are not repeated."""
    lines: List[str] = []
    measured, predicted = bundle.measured, bundle.predicted
    limit = bundle.device.bytes_per_tile
    for memory in measured.memory or ():
        if memory.fullest_tile > limit:
            lines.append(
                f"does not fit: the fullest tile of IPU {memory.ipu} wants {memory.fullest_tile:,} bytes of {limit:,}"
            )
    losses = measured.losses or []
    broken = [number for number, loss in enumerate(losses, start=1) if loss is None]
    if broken:
        lines.append(f"differs: the loss of update {broken[0]} is not finite")
    elif losses and predicted.loss is not None:
        first = float(losses[0] or 0.0)
        if abs(first / predicted.loss - 1) > _LOSS_DIFFERS:
            lines.append(
                f"differs: the first loss is {first:.4f}, the host's {predicted.loss:.4f};"
                f" more than {_LOSS_DIFFERS:.0%}"
            )
    # A profile's cycles hold its own overhead, which is no difference.
    cycles = measured.update_cycles
    if cycles and predicted.update_cycles and not measured.work:
        low, _, high = predicted.update_cycles
        if not low * (1 - _CYCLES_DIFFER) <= cycles <= high * (1 + _CYCLES_DIFFER):
            lines.append(
                f"differs: an update takes {cycles:,.0f} cycles, the model says {low:,.0f} to {high:,.0f};"
                f" more than {_CYCLES_DIFFER:.0%} outside"
            )
    return lines


def way_out(config: Config, *, ipu: Optional[int], smaller: Optional[int]) -> List[str]:
    """Return the changes for a program that does not fit, the cheapest first, as --set options.

    ipu: the one that is too full, None where it is not known. smaller: a micro-batch that fits by the plan.
    """
    found = []
    engine, placement = config.engine, config.placement
    if not engine.recomputes(ipus=True):
        found.append("recompute the layers: --set engine.recompute_layers=true")
    if not engine.half_logits and ipu in (0, None):
        found.append("the loss of masked tokens in half, on IPU 0: --set engine.half_logits=true")
    # On the IPU Model the block without_ipus is checked, whose placement has names of its own.
    block = (
        "without_ipus." if config.origins.get("placement.layers_per_ipu") == "without_ipus" else ""
    )
    proportions = list(placement.available_memory_proportion)
    lower = [
        round(share * (0.75 if ipu in (number, None) else 1.0), 3)
        for number, share in enumerate(proportions)
    ]
    found.append(
        f"less temporary memory for products, which makes them slower: --set {block}placement."
        "available_memory_proportion=" + str(lower).replace(" ", "")
    )
    if not placement.optimizer_state_off_chip:
        found.append(
            "optimiser state beside the chip: --set placement.optimizer_state_off_chip=true"
        )
    micro_batch = config.batch.micro_batch
    if smaller is None and micro_batch > 1:
        smaller = micro_batch // 2
    if smaller:
        accumulation = -(-micro_batch * config.batch.gradient_accumulation // smaller)
        found.append(
            f"a smaller micro-batch, with updates as large: --set batch.micro_batch={smaller} --set"
            f" batch.gradient_accumulation={accumulation}"
        )
    layers = list(placement.layers_per_ipu)
    if len(layers) > 1 and max(layers):
        full = layers.index(max(layers))
        if ipu is not None and any(layers[ipu : ipu + 1]):
            full = ipu
        # The first IPU holds embeddings and heads: it takes a layer only where there is no other.
        other = min(
            (number for number in range(len(layers)) if number != full),
            key=lambda n: (n == 0, layers[n]),
        )
        layers[full], layers[other] = layers[full] - 1, layers[other] + 1
        found.append(
            f"fewer layers on the IPU that is too full: --set {block}placement.layers_per_ipu="
            + str(layers).replace(" ", "")
        )
    return found


# ---------------------------------------------------------------------------------------------------------------- page


def page(bundle: Bundle) -> List[str]:
    """Return measured beside predicted, and the verdict, as lines for a terminal."""
    checked = bundle.configuration
    problems, ways = bundle.verdict.problems, bundle.verdict.way_out
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
    lines += [f"verdict   {problem}" for problem in problems]
    lines += [f"{'' if number else 'try':<10}{line}" for number, line in enumerate(ways)]
    if not (problems or failed):
        lines.append("verdict   nothing differs from what was predicted")
    return lines


def _rows(bundle: Bundle) -> List[List[str]]:
    """Return name, measured, predicted and their quotient of each number that either side has."""
    measured, predicted = bundle.measured, bundle.predicted
    rows: List[List[str]] = []

    def add(
        what: str, found: Optional[float], expected: Optional[float], form: str, interval: str = ""
    ) -> None:
        if found is None and expected is None:
            return
        quotient = f"{found / expected:.3f}" if found is not None and expected else "-"
        shown = ["-" if number is None else format(number, form) for number in (found, expected)]
        rows.append([what, shown[0], shown[1] + interval, quotient])

    losses, seconds = measured.losses or [None], measured.seconds
    add("first loss", losses[0], predicted.loss, ".4f")
    if len(losses) > 1:
        add(f"loss of update {len(losses)}", losses[-1], None, ".4f")
    if predicted.update_cycles is None:
        add("cycles of an update", measured.update_cycles, None, ",.0f")
    else:
        low, value, high = predicted.update_cycles
        add(
            "cycles of an update",
            measured.update_cycles,
            value,
            ",.0f",
            f", {low:,.0f} to {high:,.0f}",
        )
    median = sorted(seconds)[len(seconds) // 2] if seconds else None
    add("seconds of an update", median, predicted.seconds, ".4f")

    planned = {memory.ipu: memory.together / _MIB for memory in predicted.memory or ()}
    for memory in measured.memory or ():
        what = f"MiB on IPU {memory.ipu}, code and exchange not predicted"
        add(what, memory.bytes / _MIB, planned.get(memory.ipu), ",.1f")
    expected = {work.ipu: work.cycles / 1000.0 for work in predicted.work or ()}
    for work in measured.work or ():
        what = f"thousand cycles that IPU {work.ipu} works"
        add(what, work.cycles / 1000.0, expected.get(work.ipu), ",.1f")
    return rows
