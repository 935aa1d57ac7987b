"""`python -m evidence NAME`: run one experiment, or list all.

An experiment is a module of this package with SUMMARY (its result, default size and measured time), SIZES by name,
add_arguments(parser), settings(options) (all settings that determine the measurements of a cell) and run(options,
runner), which returns the exit status, 1 if the experiment shows nothing. DEFAULT is the name of its size unless that
is "default". The options of every experiment: data_dir, out, size, seeds, plot.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Optional, Sequence

from evidence.runner import Runner
from ipu_packed_bert.processes.ranks import refuse_several
from pack_data.cli.command import ArgumentParser, positive_int, run_main
from pack_data.reading.files import locked

# Names and summaries; only the module of the experiment that runs is imported.
EXPERIMENTS = {
    "updates": "is the update of packs that of their sequences; the effect of each adjustment (paper, Figures 3 and 4)",
    "order": "does the order of packs change the learned weights (beyond the paper)",
    "fine_tuning": "does a model fine-tuned in packs answer in a pack as alone (paper, Table 3; needs --data-dir)",
    "position_ids": "nine ways to make batches for a causal model (packing with position ids, Tables 2 to 6)",
    "rival": "Hugging Face's BERT without packs at its best against packs (forward and backward pass)",
    "leaks": "stock Transformers and torch in padding-free rows: the change of one example when only another changes",
}


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run an experiment; return its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        width = max(map(len, EXPERIMENTS))
        print(
            "usage: python -m evidence NAME [options]\n\nexperiments (NAME --help-all prints sizes and times; "
            "python -m evidence.figures writes their results):"
        )
        for name, line in EXPERIMENTS.items():
            print(f"  {name:<{width}}  {line}", flush=True)
        return 0
    name = arguments[0]
    if name not in EXPERIMENTS:
        raise ValueError(f"{name}: no such experiment; choose one of {', '.join(EXPERIMENTS)}")
    experiment = importlib.import_module(f"evidence.{name}")
    parser = ArgumentParser(prog=f"python -m evidence {name}", description=experiment.SUMMARY)
    parser.add_argument(
        "--data-dir",
        type=Path,
        metavar="DIR",
        help="directory of larger data (wikipedia/, squad/, ...); default: the embedded corpus",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs", "evidence", name),
        metavar="DIR",
        help="directory of the results, in which a stopped run continues; default %(default)s",
    )
    size = getattr(experiment, "DEFAULT", "default")
    parser.add_argument(
        "--size",
        choices=experiment.SIZES,
        default=size,
        help="amount of work; quick only tests the program; default %(default)s",
    )
    parser.add_argument(
        "--seeds",
        type=positive_int,
        default=3,
        metavar="N",
        help="runs of each variant, default %(default)s",
    )
    parser.add_argument(
        "--no-plot",
        action="store_false",
        dest="plot",
        help="do not draw pictures, which requires matplotlib",
    )
    if hasattr(experiment, "add_arguments"):
        experiment.add_arguments(parser)
    options = parser.parse_args(arguments[1:])
    refuse_several("an experiment")
    settings = experiment.settings(options)
    options.out.mkdir(parents=True, exist_ok=True)
    busy = f"{options.out}: another process measures here; pass another --out"
    with locked(options.out / "lock", busy):
        return experiment.run(options, Runner(options.out, settings)) or 0


if __name__ == "__main__":
    sys.exit(run_main(main))
