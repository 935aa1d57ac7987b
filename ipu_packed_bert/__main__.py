"""`packed-bert COMMAND`, or `python -m ipu_packed_bert COMMAND`: every command under one name; alone it lists them."""

from __future__ import annotations

import difflib
import importlib
import sys
from typing import Callable, Dict, NamedTuple, Optional, Sequence

from ipu_packed_bert import __version__
from pack_data.cli.command import run_main, typed
from pack_data.cli.moved_commands import MOVED
from pack_data.packers import PACKERS


class Command(NamedTuple):
    """A module with `main(argv)`, and its summary in one line."""

    module: str
    summary: str

    def main(self) -> Callable[[Optional[Sequence[str]]], Optional[int]]:
        """Import the command's module and return its `main`."""
        return importlib.import_module(self.module).main


_GROUPS: Dict[str, Dict[str, Command]] = {
    "data": {
        "pack": Command(
            "ipu_packed_bert.commands.pack",
            "packs a histogram of lengths; --packer NAME, optimal unless told otherwise",
        ),
        "build": Command("pack_data.building.command", "text, or sequences made elsewhere, to a packed data set"),
        "verify": Command("pack_data.inspection.verify_command", "reads a data set or a packing again and proves it"),
        "convert": Command("pack_data.building.convert", "one file format to another, and packs back to sequences"),
        "compare": Command("pack_data.inspection.compare", "every packer on one histogram, side by side"),
        "stream": Command(
            "pack_data.stream.command", "packs a stream with a bounded buffer: gap, waiting times and speed"
        ),
    },
    "training": {
        "pretrain": Command(
            "ipu_packed_bert.commands.pretrain",
            "trains a BERT on a packed data set, and builds that where it is missing",
        ),
        "finetune": Command(
            "ipu_packed_bert.commands.finetune", "fine-tunes a trained BERT on packs: questions, texts"
        ),
        "predict": Command(
            "ipu_packed_bert.commands.predict", "answers a file's records with a fine-tuned model, packed"
        ),
        "export": Command(
            "ipu_packed_bert.commands.export", "a run to a Hugging Face folder, and such a folder to a run"
        ),
        "check-model": Command(
            "ipu_packed_bert.commands.check_model",
            "whether a Hugging Face model keeps the examples of a packed row apart",
        ),
    },
    "looking": {
        "look": Command(
            "ipu_packed_bert.commands.look", "one HTML page of a histogram, a packed data set or a run, with pictures"
        ),
        "benchmark": Command(
            "ipu_packed_bert.commands.benchmark", "sequences per second on this machine, packed over unpacked"
        ),
        "report": Command(
            "ipu_packed_bert.report.command",
            "cycles, overhead and speed-up on an IPU, from the cycle model or from runs",
        ),
    },
    "IPU": {
        "plan": Command(
            "ipu_packed_bert.commands.plan",
            "what a configuration would run and where, and whether it fits; no device needed",
        ),
        "ipu-check": Command(
            "ipu_packed_bert.commands.ipu_check",
            "the first day on IPUs: compiles, runs ten updates, compares them with the plan",
        ),
    },
}
COMMANDS: Dict[str, Command] = {name: command for group in _GROUPS.values() for name, command in group.items()}


def main(argv: Optional[Sequence[str]] = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        width = max(map(len, COMMANDS))
        print(f"usage: {typed('COMMAND')} [options]; COMMAND --help says more about each")
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
        if name in MOVED:
            way_out = f"type {MOVED[name]}"
        elif name in PACKERS:
            way_out = f"type packed-bert pack --packer {name}"
        raise ValueError(f"{name}: no such command; {way_out}")
    return COMMANDS[name].main()(arguments[1:]) or 0


def entry() -> int:
    """Run the console command."""
    return run_main(main)


if __name__ == "__main__":
    raise SystemExit(entry())
