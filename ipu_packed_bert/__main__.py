"""`packed-bert COMMAND` or `python -m ipu_packed_bert COMMAND`: run a command; without a command, list all."""

from __future__ import annotations

import difflib
import importlib
import sys
from typing import Any, Dict, NamedTuple, Optional, Sequence

from ipu_packed_bert import __version__
from pack_data.cli.command import run_main, typed
from pack_data.packers import PACKERS


class Command(NamedTuple):
    """A command."""

    module: str  # has `main(argv)`
    summary: str  # one line


_GROUPS: Dict[str, Dict[str, Command]] = {
    "data": {
        "pack": Command(
            "ipu_packed_bert.commands.pack",
            "pack a histogram of lengths; --packer NAME (default optimal)",
        ),
        "build": Command(
            "ipu_packed_bert.commands.build",
            "build a packed data set from text or tokenised sequences",
        ),
        "verify": Command(
            "pack_data.inspection.verify_command", "read a data set or a packing again and prove it"
        ),
        "convert": Command(
            "pack_data.building.convert",
            "convert between file formats, and packs back to sequences",
        ),
        "compare": Command("pack_data.inspection.compare", "compare all packers on one histogram"),
        "stream": Command(
            "pack_data.stream.command",
            "pack a stream with a bounded buffer: gap, waiting times and speed",
        ),
    },
    "training": {
        "pretrain": Command(
            "ipu_packed_bert.commands.pretrain",
            "train a BERT on a packed data set, and build the data set if it is missing",
        ),
        "finetune": Command(
            "ipu_packed_bert.commands.finetune",
            "fine-tune a trained BERT on packs: questions, texts, words",
        ),
        "predict": Command(
            "ipu_packed_bert.commands.predict",
            "predict the records of a file with a fine-tuned model, packed",
        ),
        "export": Command(
            "ipu_packed_bert.commands.export", "convert a run to a Hugging Face directory, and back"
        ),
        "check-model": Command(
            "padding_free.check_model_command",
            "check that a Hugging Face model keeps the examples of a packed row apart",
        ),
    },
    "looking": {
        "look": Command(
            "ipu_packed_bert.commands.look",
            "show a histogram, a packed data set or a run, also as an HTML page",
        ),
        "benchmark": Command(
            "ipu_packed_bert.commands.benchmark", "measure the speed-up of packing on this machine"
        ),
        "report": Command(
            "ipu_profiling.report.command",
            "report cycles, overhead and speed-up on an IPU, from the cycle model or from runs",
        ),
    },
    "IPU": {
        "plan": Command(
            "ipu_profiling.planning.command",
            "describe what a configuration would run, where, and whether it fits; needs no device",
        ),
        "ipu-check": Command(
            "ipu_profiling.ipu_check.command",
            "compile, make ten updates on IPUs, and compare them with the plan",
        ),
    },
}
COMMANDS: Dict[str, Command] = {
    name: command for group in _GROUPS.values() for name, command in group.items()
}


def _build_missing(config: Any) -> None:
    """Build the data set of a configuration of pre-training; training itself does not reach the build."""
    importlib.import_module("ipu_packed_bert.commands.first_build").build_missing(config)


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run a command, or list all; return the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        width = max(map(len, COMMANDS))
        print(f"usage: {typed('COMMAND')} [options]; COMMAND --help describes the options of each")
        for title, group in _GROUPS.items():
            print(f"\n{title}:")
            for name, command in group.items():
                print(f"  {name:<{width}}  {command.summary}")
        return 0
    if arguments[0] == "--version":
        print(__version__)
        return 0
    name = arguments[0]
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        way_out = f"did you mean {near[0]}?" if near else f"the commands are {', '.join(COMMANDS)}"
        if name in PACKERS:
            way_out = f"type packed-bert pack --packer {name}"
        raise ValueError(f"{name}: no such command; {way_out}")
    if name in ("pretrain", "finetune") and "--plan" in arguments:
        planning = importlib.import_module(COMMANDS["plan"].module)
        return planning.plan_of(name, arguments[1:])
    command = importlib.import_module(COMMANDS[name].module).main
    if name == "pretrain":
        return command(arguments[1:], build=_build_missing)
    return command(arguments[1:]) or 0


def entry() -> int:
    """Run the console command."""
    return run_main(main)


if __name__ == "__main__":
    raise SystemExit(entry())
