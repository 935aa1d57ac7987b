"""Programs compiled without a device, each with a JSON file of the facts it was compiled for. Loads without the SDK."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict, Tuple

from ipu_packed_bert.data.global_batches import Batch
from ipu_packed_bert.engine.ipu.poprun import Instance
from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.settings.declare import plain, shown
from ipu_packed_bert.tasks.task import Task
from pack_data.reading.durable import write_atomically
from pack_data.reading.fields import read_object

_FORMAT = 1
# Sections that determine a program, together with the model.
_SECTIONS = ("loss", "optimizer", "batch", "engine", "placement")
# Settings of these sections that do not affect the program: they concern the host and the paths of files, or their
# values are sent to the device with every update. All others do.
_NOT_COMPILED = frozenset(
    """
    model.initializer_range
    optimizer.learning_rate optimizer.warmup_fraction optimizer.schedule optimizer.schedule_power
    optimizer.schedule_steps optimizer.packing_adjustment optimizer.beta1 optimizer.beta2
    batch.gradient_accumulation batch.sequences_per_update
    engine.kind engine.device engine.precision engine.attention engine.compile engine.deterministic engine.threads
    engine.processes engine.executable_cache engine.executable engine.offline_export engine.ipu_model
    engine.asynchronous_loading engine.log_cycles placement.machine
    """.split()
)

Facts = Dict[str, Any]  # name -> plain value


def program_facts(
    config: Config,
    task: Task,
    *,
    accumulation: int,
    betas: Tuple[float, float],
    instance: Instance,
    versions: Dict[str, str],
) -> Facts:
    """Return the facts that determine a training program, except the shapes of its inputs.

    ``accumulation`` and ``betas`` are those after the adjustment to the packing factor.
    """
    facts: Facts = dict(versions)
    for key in config.settings:
        if key.partition(".")[0] in _SECTIONS:
            facts[key] = plain(config.value(key))
    for name, value in vars(task.model).items():
        facts[f"model.{name}"] = plain(value)
    facts.update(task.program_facts)
    facts = {name: value for name, value in facts.items() if name not in _NOT_COMPILED}

    facts["engine.recompute_layers"] = config.engine.recomputes(ipus=True)
    # Profiling changes the program, its directory does not.
    facts["engine.profile_directory"] = config.engine.profile_directory is not None
    if instance.instances > 1:
        facts["instance"] = f"{instance.rank} of {instance.instances}"
    facts["accumulation"] = accumulation
    facts["betas"] = list(betas)
    facts["replicas of a process"] = instance.replicas
    return facts


def input_facts(batch: Batch) -> Facts:
    """Return the shapes and types of a batch in the form of :func:`program_facts`."""
    return {f"input {name}": f"{array.dtype} {list(array.shape)}" for name, array in batch.items()}


def note_of(executable: str) -> Path:
    """Return the file with the facts of an executable."""
    return Path(executable + ".json")


def write_note(executable: str, facts: Facts) -> None:
    """Write the facts of an executable to its JSON file."""
    note = {"format": _FORMAT, "bytes": Path(executable).stat().st_size, "compiled_for": facts}
    write_atomically(note_of(executable), (json.dumps(note, indent=1) + "\n").encode())


def refuse_another(executable: str, facts: Facts) -> None:
    """Raise ValueError unless the executable exists, is complete, and was compiled for these facts."""
    again = (
        f"compile it again: --set engine.offline_export={executable} --set engine.executable=null"
    )
    note = read_object(note_of(executable), way_out=f"{again}, which writes this file too")
    if note.any("format") != _FORMAT:
        raise note.error("format", f"must be {_FORMAT}")
    if not Path(executable).is_file() or Path(executable).stat().st_size != note.any("bytes"):
        raise ValueError(
            f"engine.executable {executable}: missing, or not of the size that was written; {again}"
        )
    compiled = note.object("compiled_for")
    different = [
        name for name in facts if name not in compiled or compiled.any(name) != facts[name]
    ]
    if different:
        name = different[0]
        if name == "accumulation":
            again += " --packing-factor P, with the factor of this data set (see --plan)"
        more = f" ({len(different) - 1} more differ)" if len(different) > 1 else ""
        value = shown(compiled.any(name))[:200] if name in compiled else "of another version"
        raise ValueError(
            f"engine.executable {executable}: compiled for {name} {value}, but this run has {shown(facts[name])}"
            f"{more}; restore the setting, or {again}"
        )
