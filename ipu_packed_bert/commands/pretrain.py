"""Pre-train a packed BERT: python run_pretraining.py --config configs/packed_phase2_pod16.yml"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Optional, Sequence, Set, Type

from ipu_packed_bert.commands.run_options import Training, add_run_options, add_which_run, parse_run
from ipu_packed_bert.data.data_sets import described
from ipu_packed_bert.settings.pretraining import Config, load_config
from ipu_packed_bert.settings.shipped import config_file
from pack_data.cli.command import ArgumentParser, typed

if TYPE_CHECKING:
    from ipu_packed_bert.planning.plan import RunPlan
    from ipu_packed_bert.training.pretraining import PacksRun


class _Pretrain(Training[Config]):
    def parse(self, argv: Optional[Sequence[str]]) -> argparse.Namespace:
        parser = ArgumentParser(prog=typed("pretrain"), description=__doc__)
        add_which_run(parser, named="packed_phase2_pod16")
        parser.add_argument(
            "--start-from",
            metavar="RUN",
            help="a new run begins with the weights of that run's newest checkpoint (phase 2 after phase 1)",
        )
        parser.add_argument("--data", metavar="DIR", help="the packed data set; as --set data.directory=...")
        parser.add_argument(
            "--steps", type=int, metavar="N", help="weight updates of the whole run; as --set run.steps=..."
        )
        parser.add_argument(
            "--whole",
            action="store_true",
            help="where there are no IPUs, run the configuration in full, without its without_ipus block",
        )
        parser.add_argument(
            "--track", choices=("wandb", "mlflow"), help="a service that shows the curves, too; as --set run.track=..."
        )
        add_run_options(parser, setting="batch.micro_batch=4")
        parser.rare("--start-from", "--track", "--whole")
        args = parse_run(parser, argv, {"data": "data.directory", "steps": "run.steps", "track": "run.track"})
        if args.resume and args.whole:
            parser.error("--whole begins a new run; --resume continues a run as it was begun")
        if args.resume and args.start_from:
            parser.error("--start-from begins a new run; --resume continues with the run's own weights")
        return args

    def load(self, path: Path, overrides: Sequence[str], *, stored: bool) -> Config:
        return load_config(path, overrides)

    def _settled(self, args: argparse.Namespace) -> Set[str]:
        # What the file says in place of an option, where no IPUs are, the run has settled when it began.
        return {key for key, _ in load_config(config_file(args.config)).without_ipus}

    def _described(self, config: Config) -> Config:
        return described(config)[0]

    def _plan(self, config: Config, args: argparse.Namespace) -> RunPlan:
        from ipu_packed_bert.planning.plan import plan

        return plan(*described(config), packing_factor=args.packing_factor)

    def _for_run(self, config: Config, args: argparse.Namespace) -> Config:
        return dataclasses.replace(config, without_ipus=()) if args.whole else config

    def _kind(self) -> Type[PacksRun]:
        from ipu_packed_bert.training.pretraining import PacksRun

        return PacksRun


_COMMAND = _Pretrain()
parse, main, begun = _COMMAND.parse, _COMMAND.main, _COMMAND.begun
