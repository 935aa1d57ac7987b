"""What packing brings on this machine: `packed-bert benchmark`.

The same sequences go through forward and backward pass twice, packed and each alone in its row, in one process and in
turn, so that both see the same machine. Lengths come from a histogram through a real packer, tokens are random.
The unpacked side is canonical BERT: a padding mask for each row, no block mask. The weight update is left out: it
comes once after hundreds of micro-batches, and is the same for both. Beside them, where Transformers is installed, run
the best loops without packs: Hugging Face's BERT, sorted by length, and on a GPU by FlashAttention without padding.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from statistics import mean
from typing import Any, Dict, List, Optional, Sequence, Tuple

from ipu_packed_bert.benchmarks.work import SIZES, config_of, draw_work
from ipu_packed_bert.processes.ranks import Processes, joined
from ipu_packed_bert.settings.schema import EngineConfig
from pack_data.cli.command import (
    ArgumentParser,
    available_cores,
    counted,
    parse_depth,
    positive_int,
    positive_ints,
    process_count,
    progress_bar,
    typed,
)
from pack_data.lengths.options import add_histogram_arguments, histogram_from
from pack_data.packers import PACKERS, get_packer
from pack_data.packing.histogram import LengthHistogram
from pack_data.packing.packing import Packing
from pack_data.store.packs import default_predictions

_BOTH = ("float32", "bfloat16")

_RIVAL = (
    "Sorted HF: time of Hugging Face's BERT over ours, above 1 where packs win: sequences sorted by length, batches of"
    " as many slots as a micro-batch, heads on masked tokens alone.",
)
# MLPerf Training v4.0, BERT-large packed at 512 slots and depth 3, 8 H100: 7,760 sequences/s; 989 TFLOP/s in bfloat16.
_OTHERS = (
    "Dense mask, HF Flash: the same of our packs with a mask, and of Hugging Face's BERT without padding. BERT-large at"
    " 512 on an H100: NVIDIA trains 970 sequences/s in FP8 (MLPerf v4.0, packed, 485 useful TFLOP/s); 890 in bfloat16"
    " would be 45 % of its peak (445).",
)

_HERE = "here"  # in place of --ranks' numbers: this process measures for itself; the last --ranks of a line counts


def _parse_ranks(text: str) -> List[int]:
    return [] if text == _HERE else [process_count(part) for part in text.split(",")]


def _parse(argv: Optional[Sequence[str]]) -> argparse.Namespace:
    parser = ArgumentParser(
        prog=typed("benchmark"),
        description="Sequences per second, packed over unpacked, on this machine's CPU or CUDA device.",
    )
    add_histogram_arguments(parser)
    parser.add_argument(
        "--size", choices=sorted(SIZES), default="base3", help="of the model; default base3"
    )
    parser.add_argument(
        "--micro-batch", type=positive_int, default=2, metavar="ROWS", help="default 2"
    )
    parser.add_argument(
        "--packs",
        type=positive_int,
        default=4,
        help="a round; a multiple of --micro-batch, default 4",
    )
    parser.add_argument("--rounds", type=positive_int, default=9, help="counted; default 9")
    parser.add_argument("--compile", action="store_true", help="with torch.compile")
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--packer", choices=PACKERS, default="optimal")
    parser.add_argument("--max-sequences-per-pack", type=parse_depth, default=3, metavar="D")
    parser.add_argument("--vocabulary-size", type=positive_int, default=30522, metavar="V")
    parser.add_argument(
        "--precision",
        choices=("float32", "tf32", "bfloat16", "both", "auto"),
        default="auto",
        help="auto, the default: both, but no bfloat16 where it is only emulated; tf32 is for CUDA",
    )
    parser.add_argument(
        "--slots",
        type=positive_ints,
        metavar="S,S,...",
        help="row lengths, multiples of the histogram's, to whose length the sequences are stretched; default: its own",
    )
    parser.add_argument(
        "--ranks",
        type=_parse_ranks,
        metavar="N,N,...",
        help="processes that share each batch, as under torchrun; one number after the other; default: this process",
    )
    parser.add_argument("--threads", type=positive_int, help="default: as many as torch chooses")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of the table"
    )
    parser.rare(
        "--synthetic",
        "--compile",
        "--seed",
        "--packer",
        "--max-sequences-per-pack",
        "--vocabulary-size",
    )
    parser.rare("--slots", "--ranks", "--threads")
    args = parser.parse_args(argv)
    if args.packs % args.micro_batch:
        raise ValueError(
            f"--packs {args.packs} is not a multiple of --micro-batch {args.micro_batch}"
        )
    for ranks in args.ranks or ():
        if args.packs % (ranks * args.micro_batch):
            raise ValueError(
                f"--packs {args.packs}: {ranks} ranks of --micro-batch {args.micro_batch} need a multiple of"
                f" {ranks * args.micro_batch}"
            )
    return args


def main(argv: Optional[Sequence[str]] = None) -> int:
    args = _parse(argv)
    if args.ranks and os.environ.get("WORLD_SIZE", "1") == "1":
        return _in_ranks(args, list(sys.argv[1:] if argv is None else argv))
    with joined(command="a benchmark of the host") as processes:
        found = _measured(args, processes)
        _report(found, as_json=args.json)
    return 0


def _in_ranks(args: argparse.Namespace, options: List[str]) -> int:
    """Each number of ranks after the other, by torchrun; one table, or one JSON object, of all."""
    found: List[Dict[str, Any]] = []
    _plans(args)  # refused here, and not by each rank
    for ranks in args.ranks:
        # Without these, torchrun says at length that it takes one.
        threads = args.threads or max(1, available_cores() // ranks)
        torchrun = (
            ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
            if ranks > 1
            else []
        )
        module = ["ipu_packed_bert", "benchmark", *options, "--ranks", _HERE, "--json"]
        command = [sys.executable, "-m", *torchrun, *module]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        finished = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
        if finished.returncode:
            return finished.returncode
        found.append(json.loads(finished.stdout.splitlines()[-1]))
    whole = {**found[0], "measurements": [each for one in found for each in one["measurements"]]}
    _report(whole, as_json=args.json)
    return 0


def _plans(args: argparse.Namespace) -> Tuple[LengthHistogram, Packing, List[Packing]]:
    """Return the lengths, their packing, and the packings for rows of each number of slots."""
    histogram = histogram_from(args)
    packing = get_packer(args.packer)(histogram, max_sequences_per_pack=args.max_sequences_per_pack)
    return (
        histogram,
        packing,
        [_stretched(packing, slots) for slots in args.slots or [packing.max_sequence_length]],
    )


def _measured(args: argparse.Namespace, processes: Processes) -> Dict[str, Any]:
    """Return what `--json` prints."""
    # torch loads from here on: a wrong option is refused without it.
    import torch

    from ipu_packed_bert.benchmarks.packed import RIVALS, compare_layouts
    from ipu_packed_bert.benchmarks.work import machine

    histogram, packing, plans = _plans(args)
    precisions = _pick_precisions(args.precision, processes)
    works = [
        draw_work(
            plan,
            packs=args.packs,
            micro_batch=args.micro_batch,
            vocabulary=args.vocabulary_size,
            max_predictions=default_predictions(plan.max_sequence_length),
            seed=args.seed,
            share=(processes.rank, processes.size),
        )
        for plan in plans
    ]
    engines = [
        EngineConfig(kind="host", precision=precision, compile=args.compile, threads=args.threads)
        for precision in precisions
    ]
    cases = [
        (config_of(args.size, work, engine, micro_batch=args.micro_batch), work)
        for work in works
        for engine in engines
    ]
    rival = find_spec("transformers") is not None and processes.size == 1
    measurements = []
    sides = 2 + rival * (1 + len(RIVALS["cuda" if torch.cuda.is_available() else "cpu"]))
    with progress_bar(sides * (args.rounds + 1) * len(cases), "rounds", unit=" rounds") as bar:
        bar.disable |= processes.rank > 0
        for case in cases:
            try:
                found = compare_layouts(
                    *case, rounds=args.rounds, bar=bar, processes=processes, rivals=rival
                )
            except torch.cuda.OutOfMemoryError:
                raise ValueError(
                    f"--micro-batch {args.micro_batch}: the GPU has too little memory for these rows of model "
                    f"{args.size}; make it smaller, and --packs a multiple of it"
                ) from None
            measurements.append(found)
    hidden, layers, _, _ = SIZES[args.size]
    return {
        "size": args.size,
        "hidden_size": hidden,
        "layers": layers,
        "vocabulary_size": args.vocabulary_size,
        "histogram": histogram.name or args.histogram,
        "algorithm": packing.algorithm,
        "packs": args.packs,
        "sequences": works[-1].sequences,
        "tokens": works[-1].tokens,
        "micro_batch": args.micro_batch,
        "rounds": args.rounds,
        "machine": machine(),
        "measurements": measurements,
    }


def _stretched(packing: Packing, slots: int) -> Packing:
    """Multiply all lengths of the packs, so that rows of `slots`, a multiple of the packing's, are as full."""
    factor, rest = divmod(slots, packing.max_sequence_length)
    if rest:
        raise ValueError(
            f"rows of {slots} slots: not a multiple of {packing.max_sequence_length}, the histogram's; only whole "
            "multiples are stretched to"
        )
    strategies = tuple(
        tuple(factor * length for length in strategy) for strategy in packing.strategies
    )
    return Packing(
        packing.algorithm, slots, packing.max_sequences_per_pack, strategies, packing.repeats
    )


def _pick_precisions(asked: str, processes: Processes) -> Tuple[str, ...]:
    import torch

    from ipu_packed_bert.benchmarks.packed import bfloat16_slowdown
    from ipu_packed_bert.engine.host.devices import computes_in

    if asked != "auto":
        return _BOTH if asked == "both" else (asked,)
    if torch.cuda.is_available():
        return tuple(each for each in _BOTH if computes_in(each, torch.device("cuda")))
    slowdown = processes.of_first(
        bfloat16_slowdown
    )  # each would measure another one, and wait for other batches
    if slowdown <= 1.5:  # where bfloat16 is native it is faster
        return _BOTH
    print(
        f"bfloat16 is left out: this CPU takes {slowdown:.1f} times as long for it as for float32"
        " (--precision both measures it all the same)",
        file=sys.stderr,
    )
    return _BOTH[:1]


def _report(found: Dict[str, Any], *, as_json: bool) -> None:
    from ipu_packed_bert.benchmarks.packed import table

    if as_json:
        print(json.dumps(found))
        return
    measurements = found["measurements"]
    notes = [
        *dict.fromkeys(each["engine"] for each in measurements),
        f"Hidden {found['hidden_size']}, {found['layers']} layers, vocabulary {found['vocabulary_size']}; forward and"
        f" backward pass; {found['sequences']} sequences of {found['histogram']} in {found['packs']} packs by"
        f" {found['algorithm']}, {counted(found['micro_batch'], 'row')} a micro-batch; medians and"
        f" quartiles of {found['rounds']} rounds.",
        *_RIVAL * any("sorted_time" in each for each in measurements),
        *_OTHERS * any("dense_time" in each for each in measurements),
        *_scaling(measurements),
        found["machine"],
    ]
    print(table(measurements, f"Model {found['size']}: packed and unpacked", notes).text())


def _scaling(measurements: Sequence[Dict[str, Any]]) -> List[str]:
    """Packed sequences of several ranks over those of one process, which were measured one after the other."""
    rates: Dict[
        Tuple[int, str], Dict[int, List[float]]
    ] = {}  # as often as there are unpacked sides
    for each in measurements:
        of_ranks = rates.setdefault((each["slots"], each["precision"]), {})
        of_ranks.setdefault(each["ranks"], []).append(each["packed_sequences_per_second"])
    return [
        f"{ranks} ranks make {times:.2f} times the packed sequences of one process, {times / ranks:.2f} of {ranks}"
        f" times, at {slots:,} slots in {precision}."
        for (slots, precision), found in rates.items()
        for ranks, times in (
            (ranks, mean(found[ranks]) / mean(found[1])) for ranks in found if 1 in found
        )
        if ranks > 1
    ]
