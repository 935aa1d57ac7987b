"""Fit the cycle model's parameters to the published points and store them: python profiling/calibrate.py

`--check` fits again and compares with what is stored, bit for bit, instead of writing. `--with FILE...` fits to
measured cycles too (sources as of overhead_report.py --measured), prints what moves, and stores nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

from ipu_packed_bert.cycles import calibration, matmul, uncertainty
from ipu_packed_bert.cycles.workload import Machine
from ipu_packed_bert.data.data_sets import packing_factor
from ipu_packed_bert.report import measured
from ipu_packed_bert.settings.pretraining import Config, load_config
from ipu_packed_bert.settings.shipped import config_file
from pack_data.cli.command import ArgumentParser, typed
from pack_data.display.table import CONFIGURED, MODEL, Column, Table
from pack_data.reading.files import write_atomically


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = ArgumentParser(prog=typed("calibrate"), description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="compare with the stored fit; exit status 1 where it differs"
    )
    parser.add_argument("--no-cache", action="store_true", help="search every plan and trace every graph again")
    parser.add_argument("--with", dest="measured", nargs="+", type=Path, default=[], metavar="FILE")
    parser.add_argument("--config", metavar="FILE|NAME", help="of the measured files that do not state their settings")
    args = parser.parse_args(argv)
    if args.measured and args.check:
        parser.error("--check compares the published points' fit; leave out --with or --check")
    if args.config is not None and not args.measured:
        parser.error("--config is that of the files of --with; give them, or leave it out")

    machine_of = calibration.machines(None if args.no_cache else matmul.cache_folder())
    if args.measured:
        print(refitted(args.measured, machine_of, None if args.config is None else _config_of(args.config)).text())
        return 0
    observations = calibration.observe(machine_of, load_config)
    fitted, draws = calibration.calibrate(observations), calibration.draw(observations)
    for machine in machine_of.values():
        machine.save()
    text = calibration.to_json(fitted)
    print(text, end="")
    if args.check:
        same = calibration.STORED.read_text(encoding="utf-8") == text
        print("stored fit reproduced bit for bit" if same else f"differs from {calibration.STORED}", file=sys.stderr)
        alike = uncertainty.alike(draws, uncertainty.load())
        print(f"stored draws {'say the same' if alike else 'differ'}", file=sys.stderr)
        return 0 if same and alike else 1
    write_atomically(calibration.STORED, text.encode())
    write_atomically(uncertainty.STORED, uncertainty.to_json(draws).encode())
    print(f"wrote {calibration.STORED} and {uncertainty.STORED}", file=sys.stderr)
    return 0


def _config_of(name: str) -> Config:
    return load_config(config_file(name), calibration.IPUS_ONLY)


def refitted(paths: Sequence[Path], machine_of: Dict[str, Machine], given: Optional[Config]) -> Table:
    """The parameters and the error of every point, as stored and as fitted with these files too."""
    stored = calibration.load()
    own, notes = [], []
    for path in paths:  # read before anything is fitted: a file that cannot be used is told at once
        found = measured.read(path, ipus=given.placement.ipus_per_replica if given else None)
        config = measured.configuration(found, given)
        found = measured.completed(found, config, lambda config: packing_factor(config, None).value)
        notes += [f"{found.detail}{found.taken}."] * bool(found.taken)
        own.append(measured.observation(found, config, machine_of[config.placement.machine], stored))
    published = calibration.observe(machine_of, load_config)
    after = calibration.fit((*published.throughputs, *own), (published.packed, published.unpacked))
    for machine in machine_of.values():
        machine.save()
    rows: List[Dict[str, Any]] = [
        {"what": name, "before": getattr(stored.parameters, name), "after": getattr(after, name)}
        for name in ("factor", "framework", "layout", "replica_seconds")
    ]
    for each in (*own, *published.throughputs):
        errors = [
            100 * (each.predicted(parameters) / each.point.sequences_per_second - 1)
            for parameters in (stored.parameters, after)
        ]
        rows.append({"what": f"error of {each.point.name}, %", "before": errors[0], "after": errors[1]})
    for row in rows:
        row["moved"] = row["after"] - row["before"]
    columns = [Column(key, key, MODEL, "+.4f") for key in ("before", "after", "moved")]
    return Table(
        "refitted",
        f"Fitted to the published points, and to {len(own)} measured file{'' if len(own) == 1 else 's'} too",
        (Column("what", "what", CONFIGURED), *columns),
        rows,
        ("Nothing is stored. Each point weighs as a published throughput; errors are of sequences a second.", *notes),
    )
