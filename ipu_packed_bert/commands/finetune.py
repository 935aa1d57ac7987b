"""Fine-tune a BERT on packs: packed-bert finetune --config configs/finetune_squad_packed.yml"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Optional, Sequence, Set, Type

from ipu_packed_bert.commands.run_options import Training, add_run_options, add_trust, add_which_run, parse_run
from ipu_packed_bert.processes.ranks import Processes
from ipu_packed_bert.settings.finetuning import FinetuneConfig, load_config
from ipu_packed_bert.settings.user_task import trust_what_was_named
from ipu_packed_bert.tasks.files import located
from pack_data.cli.command import ArgumentParser, typed

if TYPE_CHECKING:
    from ipu_packed_bert.planning.plan import RunPlan
    from ipu_packed_bert.training.examples import ExamplesRun


class _Finetune(Training[FinetuneConfig]):
    def parse(self, argv: Optional[Sequence[str]]) -> argparse.Namespace:
        parser = ArgumentParser(prog=typed("finetune"), description=__doc__)
        add_which_run(parser, named="finetune_squad_packed", finished="; a finished one is evaluated again")
        parser.add_argument(
            "--data-dir", type=Path, metavar="DIR", help="folder in which the data files of the configuration lie"
        )
        add_run_options(parser, setting="data.packer=none")
        add_trust(parser)
        parser.rare("--trust-task")
        return parse_run(parser, argv)

    def load(self, path: Path, overrides: Sequence[str], *, stored: bool) -> FinetuneConfig:
        return load_config(path, overrides, stored=stored)

    def _settled(self, args: argparse.Namespace) -> Set[str]:
        return {"batch.micro_batch"}  # made to divide an update evenly

    def _plan(self, config: FinetuneConfig, args: argparse.Namespace) -> RunPlan:
        from ipu_packed_bert.planning.plan import plan

        return plan(config, data_dir=args.data_dir, packing_factor=args.packing_factor)

    def _for_run(self, config: FinetuneConfig, args: argparse.Namespace) -> FinetuneConfig:
        return located(config, args.data_dir)  # full names, so that the run can be resumed without --data-dir

    def _kind(self) -> Type[ExamplesRun]:
        from ipu_packed_bert.training.examples import ExamplesRun

        return ExamplesRun

    def begun(self, args: argparse.Namespace, processes: Processes) -> int:
        trust_what_was_named(args.trust_task, args.overrides)
        return super().begun(args, processes)


_COMMAND = _Finetune()
parse, main, begun = _COMMAND.parse, _COMMAND.main, _COMMAND.begun
