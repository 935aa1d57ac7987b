"""What this program does on this machine's GPU: its tests marked `cuda`, then training steps in several layouts.

`make gpu PYTHON=...` runs it with an interpreter that has torch already. It builds nothing, needs no network, and takes
at most about 8 minutes. It writes one JSON file, and prints the same as a table.

Exit status: 0 done; 1 a test fails, or two layouts did not do the same work; 2 there is no GPU.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

from ipu_packed_bert.benchmarks.work import DROPOUT, SIZES, add_arguments, check_arguments, config_of, draw_work
from ipu_packed_bert.settings.schema import EngineConfig
from pack_data.cli.command import ArgumentParser, typed
from pack_data.display.table import Column, Table
from pack_data.lengths.options import histogram_from
from pack_data.reading.files import write_atomically
from pack_data.spfhp import pack
from pack_data.store.packs import default_predictions

ROOT = Path(__file__).resolve().parents[2]
_FORMAT = 1  # of the JSON file
_TESTS = "tests/ipu_packed_bert/engine/test_cuda.py"
TEST_SECONDS, SIDE_SECONDS = 270, 15.0  # for all tests; for each layout, which is measured twice at least
_DEPTH = 3
# MLPerf Training v4.0, BERT-large packed at 512 slots and depth 3, 8 H100: 7,760 sequences/s; 989 TFLOP/s in bfloat16.
_OTHERS = (
    "BERT-large at 512 on an H100: NVIDIA trains 970 sequences/s in FP8 (MLPerf v4.0, packed, 485 useful TFLOP/s); 890"
    " in bfloat16 would be 45 % of its peak (445)."
)


def _parse(argv: Optional[Sequence[str]]) -> Any:
    parser = ArgumentParser(
        prog=typed("gpu"), description="The tests marked cuda, and training steps in several layouts."
    )
    add_arguments(parser, size="base", micro_batch=32, packs=128, rounds=10)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--precision",
        action="append",
        choices=("float32", "tf32", "bfloat16"),
        help="any number of times; default bfloat16, and float32 on a CPU",
    )
    parser.add_argument(
        "--json", type=Path, default=Path("build/gpu.json"), metavar="FILE", help="default build/gpu.json"
    )
    args = parser.parse_args(argv)
    check_arguments(args)
    return args


def main(argv: Optional[Sequence[str]] = None) -> int:
    args = _parse(argv)
    if importlib.util.find_spec("torch") is None:
        raise ValueError(f"no torch in {sys.executable}; name an interpreter that has it: make gpu PYTHON=...")
    import torch

    if args.device == "cuda" and not torch.cuda.is_available():
        why = "finds none" if torch.version.cuda else "is built for CPUs"
        raise ValueError(f"no CUDA device: torch {torch.__version__} {why}; nothing was run")
    device = torch.device(args.device)
    from ipu_packed_bert.benchmarks.work import details

    print(", ".join(f"{key} {value}" for key, value in details(device).items() if value), flush=True)
    tests = None if args.device == "cpu" else run_tests()
    try:
        found = _benchmark(args, device, tests)
    except AssertionError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    args.json.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(args.json, json.dumps(found, indent=1).encode())
    print(f"written to {args.json}")
    return 1 if tests == "failed" else 0


def run_tests() -> str:
    """ "passed", "failed", or why the tests were not run."""
    missing = [name for name in ("pytest", "hypothesis") if importlib.util.find_spec(name) is None]
    if missing or not (ROOT / _TESTS).is_file():
        why = f"not run: {' and '.join(missing)} missing" if missing else "not run: no tests beside the program"
        print(f"tests marked cuda: {why}", flush=True)
        return why
    command = [sys.executable, "-m", "pytest", "-q", "-m", "cuda", "-p", "no:cacheprovider"]
    if importlib.util.find_spec("xdist") is not None:
        command += ["-n", "0"]
    try:
        finished = subprocess.run([*command, _TESTS], cwd=ROOT, timeout=TEST_SECONDS)
    except subprocess.TimeoutExpired:
        print(f"tests marked cuda: stopped after {TEST_SECONDS} s", flush=True)
        return "failed"
    return "failed" if finished.returncode else "passed"


def _useful_flop(work: Any, size: str) -> float:
    """Of the products of all sequences in forward and backward passes: no padding, no scores between sequences.

    work: `BenchmarkWork`; masked tokens alone have logits.
    """
    import numpy as np

    hidden, layers, _, inner = SIZES[size]
    lengths = [np.bincount(row)[1:].astype(np.float64) for row in work.packed["input_mask"]]
    squares = sum(float((each**2).sum()) for each in lengths)
    masked = int((work.packed["masked_lm_weights"] > 0).sum())
    layer = work.tokens * (4 * hidden**2 + 2 * hidden * inner) + 2 * squares * hidden
    return 6.0 * (layers * layer + masked * hidden * (hidden + work.vocabulary))


def _benchmark(args: Any, device: Any, tests: Optional[str]) -> Dict[str, Any]:
    """The layouts in each precision, printed as a table; what is written as JSON."""
    from ipu_packed_bert.benchmarks.layouts import COLUMNS, measure_layouts, to_json
    from ipu_packed_bert.benchmarks.work import details

    histogram = histogram_from(args)
    slots = histogram.max_sequence_length
    packing = pack(histogram, max_sequences_per_pack=_DEPTH)
    work = draw_work(
        packing,
        packs=args.packs,
        micro_batch=args.micro_batch,
        vocabulary=512 if args.size == "tiny" else 30522,
        max_predictions=default_predictions(slots),
        seed=args.seed,
    )
    rows: List[Dict[str, Any]] = []
    missing: List[Dict[str, str]] = []
    for precision in args.precision or (["float32"] if args.device == "cpu" else ["bfloat16"]):
        print(f"{args.size} in {precision}, {work.sequences} sequences in {args.packs} packs of {slots}:", flush=True)
        engine = EngineConfig(kind="host", device=args.device, precision=precision, compile=args.compile)
        outcome = measure_layouts(
            config_of(args.size, work, engine, micro_batch=args.micro_batch),
            work,
            device,
            rounds=args.rounds,
            seconds=SIDE_SECONDS,
            say=lambda line: print(f"  {line}", flush=True),
        )
        each_sequence = _useful_flop(work, args.size) / work.sequences
        for row in to_json(outcome, work):
            rows.append({**row, "useful_tflops": 1e-12 * each_sequence * row["sequences_per_second"]})
        missing += [{"name": name, "precision": precision, "reason": why} for name, why in outcome.missing]
    note = (
        f"Packing factor {work.packing_factor:.3f}; forward and backward pass, median of up to {args.rounds} rounds,"
        f" micro-batches of {args.micro_batch} rows, dropout {DROPOUT:g}."
    )
    columns = (*COLUMNS, Column("useful_tflops", "useful TFLOP/s", form=",.3g"))
    print("\n" + Table("layouts", f"Training steps of {args.size}", columns, rows, (note, _OTHERS)).text())
    return {
        "format": _FORMAT,
        "machine": details(device),
        "tests": tests,
        "model": {"size": args.size, **dict(zip(("hidden_size", "layers", "heads", "inner"), SIZES[args.size]))},
        "packing": {
            "histogram": histogram.name or str(args.histogram),
            "algorithm": packing.algorithm,
            "slots": slots,
            "depth": _DEPTH,
            "factor": work.packing_factor,
            "tokens_of_slots": work.tokens / (args.packs * slots),
        },
        "work": {
            "packs": args.packs,
            "sequences": work.sequences,
            "tokens": work.tokens,
            "micro_batch": args.micro_batch,
            "dropout": DROPOUT,
            "seed": args.seed,
        },
        "layouts": rows,
        "not_measured": missing,
    }
