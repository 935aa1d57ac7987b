"""BERT-large at 512 slots on a POD16, from a desk without one: what would run, what packing costs, the program.

    python examples/pod16_walkthrough.py [--out FOLDER]

1. The plan: pipeline, memory of each IPU, packs of an update.  2. The cycle model: how long an update takes, packed and
unpacked.  Both are computed, nothing is measured.  3. Compiling for 16 IPUs without any: this needs the Poplar SDK, not
an IPU; where the SDK is not installed the last step prints what is missing, and how to go on.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Optional, Sequence

from ipu_packed_bert import config_file, load_config
from ipu_packed_bert.commands import plan, pretrain
from ipu_packed_bert.report import command as report
from pack_data import BuildOptions, LengthHistogram, build, get_packer
from pack_data.cli.command import run_main


def main(argv: Optional[Sequence[str]] = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--config", default="packed_phase2_pod16", help="a configuration's name, or a file"
    )
    parser.add_argument(
        "--sequences", type=int, default=40_000, help="of the stand-in data; an update takes 16,384"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("pod16"),
        help="folder for the stand-in data and the program",
    )
    options = parser.parse_args(argv)
    config = ["--config", str(config_file(options.config))]
    depth = load_config(config[1]).data.max_sequences_per_pack

    # Wikipedia's lengths are published, so the packing is known before any text is.
    packing = get_packer("optimal")(
        LengthHistogram.published("wikipedia_512"), max_sequences_per_pack=depth
    )
    print(
        f"packing   {packing.packing_factor:.4f} sequences in a row of 512, {packing.efficiency:.2%} of the slots used"
    )
    factor = ["--packing-factor", f"{packing.packing_factor:.4f}"]

    print("\n1. What would run where")
    plan.main([*config, *factor])

    print("\n2. What the cycle model says")
    report.main([*config, *factor])

    print("\n3. The program, compiled without a device")
    # Random tokens of these lengths: a program depends on shapes, not on what stands in them.
    how = {"synthetic": "wikipedia_512", "vocabulary_size": 30522, "max_sequences_per_pack": depth}
    build(BuildOptions(options.out / "data", sequences=options.sequences, **how)).close()
    program = str(options.out / "program.poptorch")
    settings = [
        "--set",
        f"engine.offline_export={program}",
        "--data",
        str(options.out / "data"),
        "--engine",
        "ipu",
    ]
    try:
        pretrain.main([*config, *settings])
    except ValueError as error:
        print(f"not compiled: {error}")


if __name__ == "__main__":
    raise SystemExit(run_main(main))
