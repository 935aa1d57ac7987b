"""Pre-train a packed BERT."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Optional

from ipu_packed_bert.commands import run_options
from ipu_packed_bert.processes.ranks import Processes
from ipu_packed_bert.settings.command_line import RunOptions
from ipu_packed_bert.settings.config import Config


def _start(
    config: Config,
    args: RunOptions,
    processes: Processes,
    build: Optional[run_options.Build] = None,
) -> int:
    from ipu_packed_bert.data.data_sets import refuse_missing

    processes.of_first(refuse_missing, config, build is not None)
    # torch is imported from here on: wrong configurations are refused without it.
    from ipu_packed_bert.training.pretraining import PacksRun
    from ipu_packed_bert.training.run import run

    if args.whole:
        config = dataclasses.replace(config, without_ipus=())
    return run(PacksRun, config, args, processes, build)


parse = partial(run_options.parse, "pretrain")
main = partial(run_options.train, "pretrain", _start)
