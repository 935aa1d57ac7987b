"""Print what a configuration would run and where, without a device; exit status 1 if it does not fit."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Optional, Sequence

from ipu_packed_bert.commands import finetune, pretrain
from ipu_packed_bert.run_files.folder import CONFIG
from ipu_packed_bert.settings.config import ConfigError
from ipu_packed_bert.settings.reader import peek
from ipu_packed_bert.settings.schema import PRETRAINING
from ipu_packed_bert.settings.shipped import config_file
from ipu_packed_bert.settings.yaml_files import load_yaml
from pack_data.cli.command import ArgumentParser, typed

_ABOUT = """Print what a configuration would run and where, without a device, and whether it fits: --config, and every
option of pretrain or finetune.

Nothing is measured: memory is counted from the network's sizes.

Exit status: 0 it fits or may fit; 1 it does not fit; 2 a usage error.
"""


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run `pretrain --plan` or `finetune --plan`, depending on the configuration."""
    given = sys.argv[1:] if argv is None else argv
    if "--search" in given:
        raise ValueError(
            "--search: plan no longer searches; change batch and placement with --set, and compare the plans or, with "
            "packed-bert report, their speed"
        )
    if {"-h", "--help", "--help-all"} & {*given}:
        _parser().parse_args(
            [option for option in given if option in ("-h", "--help", "--help-all")]
        )
    arguments = [*given, "--plan"]
    return finetune.main(arguments) if _of_fine_tuning(arguments) else pretrain.main(arguments)


def _parser() -> ArgumentParser:
    """Return the parser of --help; the options themselves are those of pretrain and finetune."""
    parser = ArgumentParser(prog=typed("plan"), description=_ABOUT)
    parser.add_argument(
        "--config",
        metavar="FILE|NAME",
        required=True,
        help="a configuration of pretrain or finetune",
    )
    parser.add_argument(
        "--set",
        metavar="a.b=c",
        action="append",
        help="change a setting, as in pretrain and finetune",
    )
    parser.add_argument(
        "--packing-factor", metavar="P", help="sequences per pack, instead of the histogram's"
    )
    return parser


def _of_fine_tuning(arguments: Sequence[str]) -> bool:
    """Return True if the options name a fine-tuning configuration; the command's own parser reports other mistakes."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", nargs="?")
    parser.add_argument("--resume", nargs="?")
    parser.add_argument("--set", action="append", nargs="?", default=[])
    named, _ = parser.parse_known_args(arguments)
    path = (
        Path(named.resume, CONFIG)
        if named.resume
        else config_file(named.config)
        if named.config
        else None
    )
    if path is None:
        return False
    try:
        tree, overrides = load_yaml(path), [each for each in named.set if each]
    except ConfigError:
        return False
    task = peek("task.name", tree, overrides)
    if task is None:  # only fine-tuning has these; its first task need not be named
        return any(
            peek(f"data.{name}", tree, overrides) is not None for name in ("training", "evaluation")
        )
    return task != PRETRAINING
