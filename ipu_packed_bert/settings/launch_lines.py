"""Commands that start a run: in one process, or in several by torchrun or poprun, on one host or on several.

Loads no torch.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import List, Optional, Sequence, Tuple

from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.settings.shipped import FOLDER
from pack_data.cli.command import typed

IPUS_OF_A_PROGRAM = 64  # the most that one program uses; a process has one program
_MIN_IPUS_PER_HOST = 16  # a POD16 has one host, a POD64 one, two or four
_MAX_LINE = 145  # characters of a command before it is printed on two lines
_MEETING_POINT = "--mpi-local-args=-x MASTER_ADDR=HOST0"


def start_lines(
    config: Config, options: Sequence[str] = (), *, micro_batches: Optional[int] = None
) -> List[str]:
    """Return labelled commands that start a run of a configuration.

    Args:
        config: the configuration, of any task.
        options: options of the command, without those of the plan; empty: the configuration alone.
        micro_batches: micro-batches of an update, if known.
    """
    options = list(options) or ["--config", _name(config)]
    if config.engine.kind == "host":
        return _on_the_host(config, options, micro_batches)
    if config.engine.kind == "auto":
        options += ["--engine", "ipu"]
    program = shlex.split(typed(config.command)) + options
    placement = config.placement
    lines = _lines("start", [], program) if config.ipus <= IPUS_OF_A_PROGRAM else []
    if placement.replicas == 1:
        return lines

    devices = [
        "--num-replicas",
        str(placement.replicas),
        "--ipus-per-replica",
        str(placement.ipus_per_replica),
    ]
    hosts = _smallest_divisor(placement.replicas, config.ipus // _MIN_IPUS_PER_HOST)
    names = ",".join(f"HOST{host}" for host in range(hosts))
    launchers: List[Tuple[str, List[str], int]] = [("poprun", [], 2)]
    if hosts > 1:
        launchers.append((f"{hosts} hosts", ["--host", names, _MEETING_POINT], hosts))
    for label, options_of_hosts, least in launchers:
        instances = ["--num-instances", str(instances_for(config, least))]
        lines += _lines(label, ["poprun", *options_of_hosts, *instances, *devices], program)
    return lines


def instances_for(config: Config, least: int = 1) -> int:
    """Return the number of poprun processes, with equally many replicas each: at least ``least``."""
    programs = -(-config.ipus // IPUS_OF_A_PROGRAM)
    return _smallest_divisor(config.placement.replicas, max(least, programs))


def _on_the_host(config: Config, options: List[str], micro_batches: Optional[int]) -> List[str]:
    processes = config.engine.processes
    if processes == 1:
        return _lines("start", [], shlex.split(typed(config.command)) + options)
    # torchrun runs a file, or a module after -m.
    python, *program = shlex.split(typed(config.command))
    if python != "python":
        program = ["-m", "ipu_packed_bert", config.command]
    lines = _lines("start", ["torchrun", "--nproc-per-node", str(processes)], program + options)
    if micro_batches is not None:
        share = -(-micro_batches // processes)
        empty = share * processes - micro_batches
        lines.append(
            f"  ranks     {processes} processes, a device each, share the {micro_batches:,} micro-batches of an update:"
            f" {share:,} each{f', {empty} of them empty' if empty else ''}"
        )
    return lines


def _lines(label: str, launcher: Sequence[str], program: Sequence[str]) -> List[str]:
    launch_words = " ".join(map(shlex.quote, launcher))
    program_words = " ".join(map(shlex.quote, program))
    if not launcher:
        return [f"  {label:<9} {program_words}"]
    if len(launch_words) + len(program_words) > _MAX_LINE:
        return [f"  {label:<9} {launch_words} \\", f"  {'':<9}   {program_words}"]
    return [f"  {label:<9} {launch_words} {program_words}"]


def _smallest_divisor(number: int, least: int) -> int:
    """Return the smallest divisor of ``number`` from ``least`` on, else ``number`` itself."""
    for divisor in range(max(1, least), number):
        if number % divisor == 0:
            return divisor
    return number


def compiled_words(file: str, processes: int) -> str:
    """Describe the files of engine.offline_export and the option that runs them."""
    if processes > 1:
        return (
            f"{file}-I-of-{processes}, one for each instance I; with the same poprun command, run them by --set "
            f"engine.executable={file}"
        )
    return f"{file}; on a machine with IPUs: --set engine.executable={file}, with {file}.json in the same directory"


def _name(config: Config) -> str:
    """Return the value of --config: the name of a configuration that comes with the program, else its file."""
    path = Path(config.path)
    return path.stem if path.parent.resolve() == FOLDER.resolve() else str(path)
