"""Fine-tune a BERT on packs."""

from __future__ import annotations

from functools import partial
from typing import Any

from ipu_packed_bert.commands import run_options
from ipu_packed_bert.processes.ranks import Processes
from ipu_packed_bert.settings.command_line import RunOptions
from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.tasks.files import located


def _start(config: Config, args: RunOptions, processes: Processes, _: Any = None) -> int:
    # With full paths, so that the run can be resumed without --data-dir.
    config = located(config, args.data_dir)
    # torch is imported from here on: wrong configurations are refused without it.
    from ipu_packed_bert.training.examples import ExamplesRun
    from ipu_packed_bert.training.run import run

    return run(ExamplesRun, config, args, processes)


parse = partial(run_options.parse, "finetune")
main = partial(run_options.train, "finetune", _start)
