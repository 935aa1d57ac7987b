"""The options of a run: a command line of `pretrain`, `finetune` or `plan`, parsed once.  Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Optional, Sequence, Tuple

from ipu_packed_bert.settings.reader import Override
from ipu_packed_bert.settings.schema import FINETUNE, PRETRAIN
from pack_data.reading.declare import setting


@dataclass(frozen=True)
class RunOptions:
    """The options of a run; `of` names the command that has an option alone."""

    command: str  # of the configuration
    overrides: Sequence[Override] = ()  # --set, and the options that are short for it
    config: str = setting(
        "",
        "settings of a new run: a file, or the name of a bundled configuration such as packed_phase2_pod16 or "
        "finetune_squad_packed",
        metavar="FILE|NAME",
    )
    resume: Optional[str] = setting(
        None,
        "continue the run in this directory from its newest checkpoint; evaluate a finished fine-tuning again",
        metavar="RUN",
    )
    start_from: Optional[str] = setting(
        None,
        "begin with the weights of that run's newest checkpoint (phase 2 after phase 1)",
        metavar="RUN",
        of=PRETRAIN,
        rare=True,
    )
    whole: bool = setting(
        False,
        "without IPUs, run the whole configuration and ignore its without_ipus block",
        of=PRETRAIN,
        rare=True,
    )
    data_dir: Optional[Path] = setting(
        None,
        "directory of the data files that the configuration names",
        metavar="DIR",
        of=FINETUNE,
    )
    trust_task: Tuple[str, ...] = setting(
        (),
        "allow a configuration or run whose task.name is FILE.py:CLASS to run this file, now and later if it is"
        " unchanged; implied by --set task.name=FILE.py:CLASS",
        several="append",
        metavar="FILE.py",
        of=FINETUNE,
        rare=True,
    )
    out: Optional[str] = setting(
        None, "directory of a new run (default runs/NAME-TIME)", metavar="RUN"
    )
    resume_if_there: bool = setting(
        False,
        "with --config and --out: resume the run in that directory if it has a checkpoint, else begin it, so that"
        " one command starts and restarts a run (torchrun --max-restarts, job queues)",
        rare=True,
    )
    allow_change: Tuple[str, ...] = setting(
        (),
        "with --resume: settings that may differ from those of the checkpoint although they change the experiment",
        several="append",
        metavar="KEY[,KEY]",
        rare=True,
    )
    plan: bool = setting(False, "print what would run and where, and exit; needs no device")
    packing_factor: Optional[float] = setting(
        None,
        "sequences per pack for the plan; default: those of the data set, if it exists",
        minimum=1,
        note=": a pack holds at least one sequence",
        rare=True,
    )
    show_config: bool = setting(False, "print all settings and their origins, and exit")
