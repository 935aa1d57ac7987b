"""Plan BERT-large at 512 slots on a POD16 without IPUs: placement, cost of packing, compiled program.

    python examples/pod16_walkthrough.py [--out FOLDER]

1. The plan: pipeline, memory of each IPU, packs of an update (computed).
2. The cycle model: the time of an update, packed and unpacked (computed).
3. Compile for 16 IPUs. This needs the Poplar SDK, but no IPU. Without the SDK the step prints what is missing.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Optional, Sequence

from ipu_packed_bert import config_file, load_config
from ipu_packed_bert.__main__ import main as packed_bert
from ipu_profiling.planning import command as plan
from ipu_profiling.report import command as report
from pack_data import BuildOptions, LengthHistogram, build, get_packer
from pack_data.cli.command import run_main


def main(argv: Optional[Sequence[str]] = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--config", default="packed_phase2_pod16", help="the name of a configuration, or a file"
    )
    parser.add_argument(
        "--sequences",
        type=int,
        default=40_000,
        help="size of the synthetic data; an update takes 16,384",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("pod16"),
        help="directory for the synthetic data and the program",
    )
    options = parser.parse_args(argv)
    config = ["--config", str(config_file(options.config))]
    depth = load_config(config[1]).data.max_sequences_per_pack

    # Wikipedia's lengths are published, so the packing needs no texts.
    packing = get_packer("optimal")(
        LengthHistogram.published("wikipedia_512"), max_sequences_per_pack=depth
    )
    print(
        f"packing   {packing.packing_factor:.4f} sequences in a row of 512, {packing.efficiency:.2%} of the slots used"
    )
    factor = ["--packing-factor", f"{packing.packing_factor:.4f}"]

    print("\n1. The plan")
    plan.main([*config, *factor])

    print("\n2. The cycle model")
    report.main([*config, *factor])

    print("\n3. Compile without a device")
    # Use random tokens of these lengths, because a program depends only on shapes.
    how = {"synthetic": "wikipedia_512", "vocabulary_size": 30522, "max_sequences_per_pack": depth}
    build(BuildOptions(options.out / "data", sequences=options.sequences, **how)).close()
    program = str(options.out / "program.poptorch")
    settings = ["--set", f"engine.offline_export={program}", "--engine", "ipu"]
    settings += ["--data", str(options.out / "data")]
    try:
        packed_bert(["pretrain", *config, *settings])
    except ValueError as error:
        print(f"not compiled: {error}")


if __name__ == "__main__":
    raise SystemExit(run_main(main))
