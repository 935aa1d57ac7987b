"""The bundle of `packed-bert ipu-check`: measured and predicted figures of a run on IPUs, as JSON to send.

docs/ipu_check.md describes its format. It contains no path, no host name and no user name: its settings are numbers,
switches and choices, and `_clean` edits every text.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import math
import os
import re
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.settings.declare import nested
from pack_data.display.facts import Fact, Facts, number, with_unit
from pack_data.reading.durable import write_atomically

FORMAT = 1
KIND = "packed-bert ipu-check"
# Statuses of a stage.
DONE = "done"
FAILED = "failed"
INTERRUPTED = "interrupted"
# Relative difference of the first loss from the host's, in float32 without dropout; both are close to that of a guess.
_LOSS_DIFFERS = 0.02
# Relative distance of cycles from the model's interval; those of the same task differ by 13 % between frameworks.
_CYCLES_DIFFER = 0.25


# ------------------------------------------------------------------------------------------------------------- content


def _nothing_predicted() -> Dict[str, Any]:
    return {"fits": None}


def _not_judged() -> Dict[str, Any]:
    return {"status": 1, "problems": [], "way_out": []}


@dataclass
class Bundle:
    """The content of the file in types of JSON; docs/ipu_check.md lists the keys of each field.

    A stage adds its figures to `predicted` or `measured`, so a stage that was not reached has no keys.
    """

    configuration: Dict[str, Any]
    device: Dict[str, Any]
    versions: Dict[str, Optional[str]]
    stages: List[Dict[str, Any]] = field(default_factory=list)
    predicted: Dict[str, Any] = field(default_factory=_nothing_predicted)
    measured: Dict[str, Any] = field(default_factory=dict)
    verdict: Dict[str, Any] = field(default_factory=_not_judged)


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


def write_bundle(path: Path, bundle: Bundle) -> None:
    """Write a bundle without paths and names in its texts; numbers that are not finite are written as null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tree = {"format": FORMAT, "kind": KIND, **vars(bundle)}
    text = json.dumps(_public(tree), indent=1, allow_nan=False, default=float)
    write_atomically(path, f"{text}\n".encode())


def _public(value: Any) -> Any:
    """Return a value of the file as it may be sent."""
    if isinstance(value, dict):
        return {key: _public(member) for key, member in value.items()}
    if isinstance(value, (list, tuple)):
        return [_public(member) for member in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return _clean(value) if isinstance(value, str) else value


# ------------------------------------------------------------------------------------------------------------- verdict


def problems(bundle: Bundle) -> List[str]:
    """Return a line for each figure that does not fit or differs; failed stages are not repeated."""
    lines: List[str] = []
    measured = bundle.measured
    predicted = bundle.predicted
    limit = bundle.device["bytes_per_tile"]
    for memory in measured.get("memory", ()):
        needed = memory["fullest_tile"]
        if needed > limit:
            lines.append(
                f"does not fit: the fullest tile of IPU {memory['ipu']} needs {needed:,} bytes of {limit:,}"
            )

    losses = measured.get("losses", [])
    host_loss = predicted.get("loss")
    if None in losses:
        lines.append(f"differs: the loss of update {losses.index(None) + 1} is not finite")
    elif losses and host_loss is not None and abs(losses[0] / host_loss - 1) > _LOSS_DIFFERS:
        lines.append(
            f"differs: the first loss is {number(losses[0], 'nats')}, more than {number(_LOSS_DIFFERS, 'share')} from "
            f"the host's {number(host_loss, 'nats')}"
        )

    # The cycles of a profile are not compared, because they include the overhead of profiling.
    cycles = measured.get("update_cycles")
    if cycles and "update_cycles" in predicted and "work" not in measured:
        low, _, high = predicted["update_cycles"]
        if not low * (1 - _CYCLES_DIFFER) <= cycles <= high * (1 + _CYCLES_DIFFER):
            lines.append(
                f"differs: an update takes {with_unit(cycles, 'cycles')}, more than {number(_CYCLES_DIFFER, 'share')} "
                f"outside the model's {number(low, 'cycles')} to {number(high, 'cycles')}"
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
    for place, proportion in enumerate(proportions):
        if ipu in (place, None):
            proportions[place] = proportion * 0.75
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


# --------------------------------------------------------------------------------------------------------------- print


def facts(bundle: Bundle) -> List[Facts]:
    """Return the measured figures beside the predicted ones, and the verdict."""
    problems = bundle.verdict["problems"]
    failed = [stage["name"] for stage in bundle.stages if stage["status"] == FAILED]
    title = (
        "{name}: {micro_batches} micro-batches of {micro_batch} packs in an update, {replicas} x {ipus_per_replica} "
        "IPUs".format(**bundle.configuration)
    )
    verdict = {}
    if failed:
        verdict["failed"] = Fact("failed", ", ".join(failed))
    for place, problem in enumerate(problems):
        verdict[f"problem {place}"] = Fact("verdict", problem)
    for place, change in enumerate(bundle.verdict["way_out"]):
        verdict[f"change {place}"] = Fact("" if place else "try", change)
    if not verdict:
        verdict["verdict"] = Fact("verdict", "nothing differs from the prediction")
    return [Facts(title, _measured(bundle)), Facts("", verdict)]


def _measured(bundle: Bundle) -> Dict[str, Fact]:
    """Return each number that was measured or predicted, with the prediction in a note."""
    measured = bundle.measured
    predicted = bundle.predicted
    losses = measured.get("losses") or [None]
    low, cycles, high = predicted.get("update_cycles", (None, None, None))
    seconds = sorted(measured.get("seconds", []))
    median = seconds[len(seconds) // 2] if seconds else None
    figures = [("first loss", "nats", losses[0], predicted.get("loss"))]
    if len(losses) > 1:
        figures.append((f"loss of update {len(losses)}", "nats", losses[-1], None))
    figures.append(("cycles of an update", "cycles", measured.get("update_cycles"), cycles))
    figures.append(("time of an update", "s", median, predicted.get("seconds")))
    planned = {memory["ipu"]: memory["together"] for memory in predicted.get("memory", ())}
    for memory in measured.get("memory", ()):
        name = f"memory of IPU {memory['ipu']}"
        figures.append((name, "bytes", memory["bytes"], planned.get(memory["ipu"])))
    modelled = {work["ipu"]: work["cycles"] for work in predicted.get("work", ())}
    for work in measured.get("work", ()):
        name = f"work of IPU {work['ipu']}"
        figures.append((name, "cycles", work["cycles"], modelled.get(work["ipu"])))

    rows = {}
    for name, unit, value, expected in figures:
        note = ""
        if expected is not None:
            note = f"predicted {number(expected, unit)}"
            if unit == "bytes":
                note += " without code and exchange"
            if name == "cycles of an update":
                note += f" ({number(low, unit)} to {number(high, unit)})"
            if value is not None:
                note += f", measured / predicted {number(value / expected, 'ratio')}"
        if value is not None or note:
            rows[name] = Fact(name, value, unit, note=note)
    return rows
