"""What to type to start a run: in one process, or in several by torchrun or poprun, on one host or on several.

Loads no torch.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import List, Optional, Sequence

from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.settings.shipped import FOLDER
from pack_data.cli.command import typed

IPUS_OF_A_PROGRAM = 64  # and a process has one program
# IPUs of one host at least: a POD16 has one host, a POD64 one, two or four.
_IPUS_OF_A_HOST = 16
_MEETING_POINT = "--mpi-local-args=-x MASTER_ADDR=HOST0"


def start_lines(config: Config, options: Sequence[str] = (), *, micro_batches: Optional[int] = None) -> List[str]:
    """The lines to type that start a run of a configuration, of any task, each with a label.

    options: of the command, without those for the plan; none: the configuration alone.  micro_batches: of an update.
    """
    options = list(options) or ["--config", _name(config)]
    if config.engine.kind == "host":
        return _on_the_host(config, options, micro_batches)
    if config.engine.kind == "auto":
        options += ["--engine", "ipu"]
    program = shlex.split(typed(config.command)) + options
    placement = config.placement
    found = _lines("start", [], program) if _ipus(config) <= IPUS_OF_A_PROGRAM else []
    of_all = ["--num-replicas", str(placement.replicas), "--ipus-per-replica", str(placement.ipus_per_replica)]
    hosts = _divisor(placement.replicas, _ipus(config) // _IPUS_OF_A_HOST)
    for label, where, least in (
        ("poprun", [], 2),
        (f"{hosts} hosts", ["--host", ",".join(f"HOST{host}" for host in range(hosts)), _MEETING_POINT], hosts),
    ):
        if placement.replicas > 1 and least > 1:
            instances = ["--num-instances", str(instances_for(config, least))]
            found += _lines(label, ["poprun", *where, *instances, *of_all], program)
    return found


def _ipus(config: Config) -> int:
    return config.placement.replicas * config.placement.ipus_per_replica


def instances_for(config: Config, least: int = 1) -> int:
    """How many processes of poprun, of as many replicas each: `least`, or as many more as it takes."""
    return _divisor(config.placement.replicas, max(least, -(-_ipus(config) // IPUS_OF_A_PROGRAM)))


def _on_the_host(config: Config, options: List[str], micro_batches: Optional[int]) -> List[str]:
    number = config.engine.processes
    if number == 1:
        return _lines("start", [], shlex.split(typed(config.command)) + options)
    # torchrun runs a file, or a module after -m.
    python, *program = shlex.split(typed(config.command))
    if python != "python":
        program = ["-m", "ipu_packed_bert", config.command]
    found = _lines("start", ["torchrun", "--nproc-per-node", str(number)], program + options)
    if micro_batches is not None:
        own = -(-micro_batches // number)
        empty = f", {own * number - micro_batches} of them empty" if micro_batches % number else ""
        found.append(
            f"  ranks     {number} processes, a device each, share the {micro_batches:,} micro-batches of an update: "
            f"{own:,} each{empty}"
        )
    return found


def _lines(label: str, launcher: Sequence[str], program: Sequence[str]) -> List[str]:
    first, second = (" ".join(map(shlex.quote, words)) for words in (launcher, program))
    if first and len(first) + len(second) > 145:
        return [f"  {label:<9} {first} \\", f"  {'':<9}   {second}"]
    return [f"  {label:<9} {first}{' ' * bool(first)}{second}"]


def _divisor(number: int, least: int) -> int:
    """The least divisor of a number that is not below another one, else the number itself."""
    return next((each for each in range(max(1, least), number) if number % each == 0), number)


def compiled_words(file: str, processes: int) -> str:
    """Where the programs of engine.offline_export lie, and how they are run."""
    if processes > 1:
        return (
            f"{file}-I-of-{processes}, by each instance I its own; under the same poprun line: --set "
            f"engine.executable={file}"
        )
    return f"{file}; where the IPUs are: --set engine.executable={file}, with {file}.json beside it"


def _name(config: Config) -> str:
    """As --config takes it: the name of a configuration that comes with the program, else its file."""
    path = Path(config.path)
    return path.stem if path.parent.resolve() == FOLDER.resolve() else str(path)
