"""What a configuration would run and where, without a device; exit status 1 where it does not fit."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Optional, Sequence

from ipu_packed_bert.commands import finetune, plan_search, pretrain
from ipu_packed_bert.run_files.folder import CONFIG
from ipu_packed_bert.settings.reader import ConfigError, load_yaml, peek
from ipu_packed_bert.settings.schema import PRETRAINING
from ipu_packed_bert.settings.shipped import config_file


def main(argv: Optional[Sequence[str]] = None) -> int:
    """`pretrain --plan` or `finetune --plan`, as the configuration says, under a name of its own; or the search."""
    given = sys.argv[1:] if argv is None else argv
    if "--search" in given:
        return plan_search.main(argv)
    if "-h" in given or "--help" in given:
        print(f"{plan_search.options().format_usage()}\nand, without --search:\n")
    arguments = [*given, "--plan"]
    return finetune.main(arguments) if _of_fine_tuning(arguments) else pretrain.main(arguments)


def _of_fine_tuning(arguments: Sequence[str]) -> bool:
    """Whether the options name a configuration of fine-tuning; other mistakes are left to the command's own parser."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", nargs="?")
    parser.add_argument("--resume", nargs="?")
    parser.add_argument("--set", action="append", nargs="?", default=[])
    named, _ = parser.parse_known_args(arguments)
    path = Path(named.resume, CONFIG) if named.resume else config_file(named.config) if named.config else None
    if path is None:
        return False
    try:
        tree, overrides = load_yaml(path), [each for each in named.set if each]
    except ConfigError:
        return False
    task = peek("task.name", tree, overrides)
    if task is None:  # only fine-tuning has these; its first task need not be named
        return any(peek(f"data.{name}", tree, overrides) is not None for name in ("training", "evaluation"))
    return task != PRETRAINING
