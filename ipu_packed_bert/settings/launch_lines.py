"""Commands that start a run in one process, or in several with torchrun or poprun, on one host or on several.

Loads no torch.
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import List, Optional, Sequence

from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.settings.shipped import FOLDER
from pack_data.cli.parser import program_name, runnable, typed

IPUS_OF_A_PROGRAM = 64  # the most that one program uses; a process has one program
_MIN_IPUS_PER_HOST = 16  # a POD16 has one host; a POD64 has one, two or four
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
    replicas = config.placement.replicas
    lines = []
    if config.ipus <= IPUS_OF_A_PROGRAM:
        lines += _lines("start", [], program)
    if replicas > 1:
        lines += _lines("poprun", _poprun(config, 2), program)
        hosts = _smallest_divisor(replicas, config.ipus // _MIN_IPUS_PER_HOST)
        if hosts > 1:
            names = ",".join(f"HOST{host}" for host in range(hosts))
            launcher = _poprun(config, hosts, "--host", names, _MEETING_POINT)
            lines += _lines(f"{hosts} hosts", launcher, program)
    return lines


def _poprun(config: Config, least: int, *options: str) -> List[str]:
    """Return the words of poprun before the program, for at least ``least`` processes."""
    instances = instances_for(config, least)
    replicas = config.placement.replicas
    ipus = config.placement.ipus_per_replica
    numbers = f"--num-instances {instances} --num-replicas {replicas} --ipus-per-replica {ipus}"
    return ["poprun", *options, *numbers.split()]


def instances_for(config: Config, least: int = 1) -> int:
    """Return the number of poprun processes, which have the same number of replicas each.

    Args:
        config: the configuration, of any task.
        least: the least number of processes.
    """
    programs = -(-config.ipus // IPUS_OF_A_PROGRAM)
    return _smallest_divisor(config.placement.replicas, max(least, programs))


def _on_the_host(config: Config, options: List[str], micro_batches: Optional[int]) -> List[str]:
    """Return labelled commands that start a run on the host, in one process or with torchrun."""
    processes = config.engine.processes
    if processes == 1:
        return _lines("start", [], shlex.split(runnable(config.command)) + options)
    # torchrun runs a file, or a module after -m.
    started, *program = shlex.split(typed(config.command))
    if started != "python":
        program = ["-m", "ipu_packed_bert", config.command]
    torchrun = program_name(os.path.join(os.path.dirname(sys.executable), "torchrun"))
    lines = _lines("start", [torchrun, "--nproc-per-node", str(processes)], program + options)
    if micro_batches is not None:
        share = -(-micro_batches // processes)
        empty = share * processes - micro_batches
        words = f", {empty} of them empty" if empty else ""
        lines.append(
            f"  ranks     {processes} processes, a device each, share the {micro_batches:,} micro-batches of an update:"
            f" {share:,} each{words}"
        )
    return lines


def _lines(label: str, launcher: Sequence[str], program: Sequence[str]) -> List[str]:
    """Return a labelled command, on two lines if it is long."""
    parts = [" ".join(map(shlex.quote, part)) for part in (launcher, program) if part]
    if launcher and sum(map(len, parts)) > _MAX_LINE:
        return [f"  {label:<9} {parts[0]} \\", f"  {'':<9}   {parts[1]}"]
    return [f"  {label:<9} {' '.join(parts)}"]


def _smallest_divisor(number: int, least: int) -> int:
    """Return the smallest divisor of ``number`` that is at least ``least``, or ``number``."""
    larger = range(max(1, least), number)
    return next((divisor for divisor in larger if number % divisor == 0), number)


def compiled_words(file: str, processes: int) -> str:
    """Describe the files of engine.offline_export and the option that runs them.

    Args:
        file: the value of engine.offline_export.
        processes: processes that compiled.
    """
    if processes > 1:
        return (
            f"{file}-I-of-{processes}, one for each instance I; to run them, add --set engine.executable={file} to the "
            "same poprun command"
        )
    return f"{file}; to run it on IPUs, keep {file}.json in its directory and add --set engine.executable={file}"


def _name(config: Config) -> str:
    """Return the value of --config: the name of a configuration of the program, or the path of a file."""
    path = Path(config.path)
    is_shipped = path.parent.resolve() == FOLDER.resolve()
    return path.stem if is_shipped else str(path)
