"""The bundle of `packed-bert ipu-check`: what was measured on IPUs beside what was predicted, as JSON that can be sent.

docs/ipu_check.md describes its format. It holds no path, no host name and no user name: of the configuration only
numbers, switches and choices are taken, and every text passes `clean`.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import math
import os
import re
import socket
from pathlib import Path
from typing import Any, Dict, List, Optional

from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.settings.declare import nested
from pack_data.display.table import text_table
from pack_data.reading.fields import read_object
from pack_data.reading.files import write_atomically

FORMAT = 1
KIND = "packed-bert ipu-check"
DONE, FAILED, INTERRUPTED = "done", "failed", "interrupted"
_MIB = 1024.0 * 1024.0
# The first loss beside the host's, which has no dropout and float32: at the beginning both are nearly that of guessing.
_LOSS_DIFFERS = 0.02
# Cycles outside the model's interval by more than this; the same task differs by 13 % between frameworks.
_CYCLES_DIFFER = 0.25

_Bundle = Dict[str, Any]


# ------------------------------------------------------------------------------------------------------------- privacy

_PATH = re.compile(r"""(?<![\w.:])(?:~|[A-Za-z]:)?[/\\][^\s'"`,;:()\[\]]+""")
_ADDRESS = re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b")


def _own_names() -> List[str]:
    names = [socket.gethostname(), socket.gethostname().partition(".")[0], os.path.basename(os.path.expanduser("~"))]
    with contextlib.suppress(KeyError, OSError, ImportError):  # a user whom the system has no name for
        names.append(getpass.getuser())
    # "root" and "user" are nobody's name, and a name of one or two letters would hide every word that holds it.
    found = {name for name in names if len(name) > 2 and name not in ("root", "user", "localhost")}
    return sorted(found, key=len, reverse=True)


def clean(text: str) -> str:
    """A text without absolute paths, internet addresses, and the names of host and user."""
    text = _ADDRESS.sub("<address>", _PATH.sub("<path>", text))
    for name in _own_names():
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "<name>", text)
    return text


def _cleaned(value: Any) -> Any:
    """A tree of plain values with every text cleaned, and None for a number that is not finite."""
    if isinstance(value, dict):
        return {key: _cleaned(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_cleaned(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return clean(value) if isinstance(value, str) else value


def public_settings(config: Config) -> Dict[str, Dict[str, Any]]:
    """Of a configuration the numbers, the switches and the texts that are one of several choices; no name of a file."""
    return nested(
        {
            key: config.value(key)
            for key, setting in config.settings.items()
            if "str" not in str(setting.kind) or setting.rule.choices  # the type: <class 'str'>, typing.Optional[str]
        }
    )


# ------------------------------------------------------------------------------------------------------------- reading


def write_bundle(path: Path, bundle: _Bundle) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, (json.dumps(_cleaned(bundle), indent=1, allow_nan=False, default=float) + "\n").encode())


def read_bundle(path: Path) -> _Bundle:
    """Raises ValueError, in one line, where the file is no bundle or one of another format."""
    found = read_object(Path(path), way_out="give the bundle.json that packed-bert ipu-check wrote")
    if not all(key in found for key in ("kind", "format")) or found.any("kind") != KIND:
        raise ValueError(f"{path}: no bundle of packed-bert ipu-check; give the bundle.json that it wrote")
    if found.any("format") != FORMAT:
        raise found.error("format", f"must be {FORMAT}")
    bundle = found.tree
    try:
        page(bundle)
        int(bundle["verdict"]["status"])
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path}: the bundle is cut or changed ({problem}); get the file again") from None
    return bundle


# ------------------------------------------------------------------------------------------------------------- verdict


def problems(bundle: _Bundle) -> List[str]:
    """What does not fit or differs, a line each; stages that failed are not repeated."""
    found: List[str] = []
    measured, predicted = bundle.get("measured", {}), bundle.get("predicted", {})
    for memory in measured.get("memory", ()):
        limit = bundle["device"]["bytes_per_tile"]
        if memory["fullest_tile"] > limit:
            found.append(
                f"does not fit: the fullest tile of IPU {memory['ipu']} wants {memory['fullest_tile']:,} bytes of"
                f" {limit:,}"
            )
    losses, expected = measured.get("losses", ()), predicted.get("loss")
    broken = [number for number, loss in enumerate(losses, start=1) if loss is None]
    if broken:
        found.append(f"differs: the loss of update {broken[0]} is not finite")
    elif losses and expected is not None and abs(losses[0] / expected - 1) > _LOSS_DIFFERS:
        found.append(
            f"differs: the first loss is {losses[0]:.4f}, the host's {expected:.4f}; more than {_LOSS_DIFFERS:.0%}"
        )
    # A profile's cycles hold its own overhead, which is no difference.
    cycles, interval = measured.get("update_cycles"), predicted.get("update_cycles")
    if cycles and interval and not measured.get("work"):
        low, _, high = interval
        if not low * (1 - _CYCLES_DIFFER) <= cycles <= high * (1 + _CYCLES_DIFFER):
            found.append(
                f"differs: an update takes {cycles:,.0f} cycles, the model says {low:,.0f} to {high:,.0f};"
                f" more than {_CYCLES_DIFFER:.0%} outside"
            )
    return found


def way_out(config: Config, *, ipu: Optional[int], smaller: Optional[int]) -> List[str]:
    """What to change where a program does not fit, the cheapest first, as --set options.

    ipu: the one that is too full, None where it is not known. smaller: a micro-batch that fits by the plan.
    """
    found = []
    engine, placement = config.engine, config.placement
    if not engine.recomputes(ipus=True):
        found.append("recompute the layers: --set engine.recompute_layers=true")
    if not engine.half_logits and ipu in (0, None):
        found.append("the loss of masked tokens in half, on IPU 0: --set engine.half_logits=true")
    # On the IPU Model the block without_ipus is checked, whose placement has names of its own.
    block = "without_ipus." if config.origins.get("placement.layers_per_ipu") == "without_ipus" else ""
    proportions = list(placement.available_memory_proportion)
    lower = [round(share * (0.75 if ipu in (number, None) else 1.0), 3) for number, share in enumerate(proportions)]
    found.append(
        f"less temporary memory for products, which makes them slower: --set {block}placement."
        "available_memory_proportion=" + str(lower).replace(" ", "")
    )
    if not placement.optimizer_state_off_chip:
        found.append("optimiser state beside the chip: --set placement.optimizer_state_off_chip=true")
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
        other = min((number for number in range(len(layers)) if number != full), key=lambda n: (n == 0, layers[n]))
        layers[full], layers[other] = layers[full] - 1, layers[other] + 1
        found.append(
            f"fewer layers on the IPU that is too full: --set {block}placement.layers_per_ipu="
            + str(layers).replace(" ", "")
        )
    return found


# ---------------------------------------------------------------------------------------------------------------- page


def page(bundle: _Bundle) -> List[str]:
    """Measured beside predicted, and the verdict, as lines for a terminal."""
    checked, measured, predicted = bundle["configuration"], bundle["measured"], bundle["predicted"]
    rows = [["", "measured", "predicted", "measured / predicted"]]

    def add(what: str, found: Optional[float], expected: Optional[float], form: str, interval: str = "") -> None:
        if found is not None or expected is not None:
            both = f"{found / expected:.3f}" if found is not None and expected else "-"
            told = "-" if expected is None else format(expected, form) + interval
            rows.append([what, "-" if found is None else format(found, form), told, both])

    losses, seconds = measured.get("losses") or [None], measured.get("seconds")
    add("first loss", losses[0], predicted.get("loss"), ".4f")
    if len(losses) > 1:
        add(f"loss of update {len(losses)}", losses[-1], None, ".4f")
    low, middle, high = predicted.get("update_cycles") or (None, None, None)
    interval = "" if middle is None else f", {low:,.0f} to {high:,.0f}"
    add("cycles of an update", measured.get("update_cycles"), middle, ",.0f", interval)
    middle_one = sorted(seconds)[len(seconds) // 2] if seconds else None
    add("seconds of an update", middle_one, predicted.get("seconds"), ".4f")
    for what, key, name, scale, form in (
        ("MiB on IPU {}, code and exchange not predicted", "memory", "bytes", _MIB, ",.1f"),
        ("thousand cycles that IPU {} works", "work", "cycles", 1000.0, ",.1f"),
    ):
        expected = {each["ipu"]: each for each in predicted.get(key, ())}
        for each in measured.get(key, ()):
            told = expected.get(each["ipu"], {}).get("together" if key == "memory" else name)
            add(what.format(each["ipu"]), each[name] / scale, None if told is None else told / scale, form)
    found = bundle["verdict"]["problems"]
    failed = [stage["name"] for stage in bundle["stages"] if stage["status"] == FAILED]
    return [
        f"{checked['name']}: {checked['micro_batches']} micro-batches of {checked['micro_batch']} packs in an update,"
        f" {checked['replicas']} x {checked['ipus_per_replica']} IPUs",
        "",
        *text_table(rows, left={0}),
        "",
        *([f"failed    {', '.join(failed)}"] if failed else []),
        *(f"verdict   {problem}" for problem in found),
        *(f"{'' if number else 'try':<10}{line}" for number, line in enumerate(bundle["verdict"]["way_out"])),
        *([] if found or failed else ["verdict   nothing differs from what was predicted"]),
    ]
