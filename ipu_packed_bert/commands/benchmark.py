"""Measure the speed-up of packing on this machine: `packed-bert benchmark`.

The same sequences run through the forward and backward pass twice, packed and with one sequence per row. Both sides run
in turn in one process, so that the state of the machine affects them equally. Lengths come from a histogram and a real
packer; tokens are random. The unpacked side is plain BERT, with a padding mask and no block mask. The weight update is
left out: it comes once per hundreds of micro-batches and is the same on both sides. If Transformers is installed, the
best loops without packing are measured too: Hugging Face's BERT with sequences sorted by length and, on a GPU, with
FlashAttention and no padding.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from typing import Any, Dict, List, Optional, Sequence, Tuple

from ipu_packed_bert.benchmarks.work import SIZES, BenchmarkWork, config_of, draw_work
from ipu_packed_bert.processes.ranks import ONE, Processes, joined
from ipu_packed_bert.settings.config import Config, fast_micro_batch
from ipu_packed_bert.settings.schema import EngineConfig
from pack_data.cli.command import (
    ArgumentParser,
    available_cores,
    parse_depth,
    positive_int,
    positive_ints,
    process_count,
    typed,
)
from pack_data.cli.terminal import progress_bar
from pack_data.display.facts import number, printed, with_unit
from pack_data.lengths.options import add_histogram_arguments, histogram_from
from pack_data.packers import PACKERS, get_packer
from pack_data.packing.histogram import LengthHistogram
from pack_data.packing.packing import Packing
from pack_data.reading.words import counted
from pack_data.store.packs import default_predictions

_BOTH = ("float32", "bfloat16")

_RIVAL = (
    "Sorted HF: time of Hugging Face's BERT divided by ours (above 1: packing is faster). All sequences are sorted by"
    " length, batches without padding get no mask, heads compute masked tokens only, and batches have the fastest of"
    " three sizes, in rows of as many slots as a pack, and the faster of two attentions (column micro-batch)."
)
# MLPerf Training v4.0, BERT-large packed at 512 slots and depth 3, 8 H100: 7,760 sequences/s; 989 TFLOP/s in bfloat16.
_OTHERS = (
    "Dense mask, HF Flash: the same ratio for our packs with a mask, and for Hugging Face's BERT without padding."
    " BERT-large at 512 on an H100: NVIDIA trains 970 sequences/s in FP8 (MLPerf v4.0, packed, 485 useful TFLOP/s); 890"
    " in bfloat16 would be 45 % of its peak (445).",
)

# Value of --ranks in the processes of torchrun: measure in this process. It overrides an earlier --ranks.
_HERE = "here"


def _parse_ranks(text: str) -> List[int]:
    return [] if text == _HERE else [process_count(part) for part in text.split(",")]


def _parse(argv: Optional[Sequence[str]]) -> argparse.Namespace:
    parser = ArgumentParser(
        prog=typed("benchmark"),
        description="Measure sequences per second, packed and unpacked, on the CPU or CUDA device of this machine.",
    )
    add_histogram_arguments(parser)
    parser.add_argument(
        "--size", choices=sorted(SIZES), default="base3", help="model size (default base3)"
    )
    parser.add_argument(
        "--micro-batch",
        type=positive_int,
        metavar="ROWS",
        help="rows per micro-batch (default: as batch.micro_batch auto)",
    )
    parser.add_argument(
        "--packs",
        type=positive_int,
        default=24,
        help="packs per round, a multiple of --micro-batch (default 24)",
    )
    parser.add_argument(
        "--rounds", type=positive_int, default=9, help="measured rounds (default 9)"
    )
    parser.add_argument("--compile", action="store_true", help="use torch.compile")
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--packer", choices=PACKERS, default="optimal")
    parser.add_argument("--max-sequences-per-pack", type=parse_depth, default=3, metavar="D")
    parser.add_argument("--vocabulary-size", type=positive_int, default=30522, metavar="V")
    parser.add_argument(
        "--precision",
        choices=("float32", "tf32", "bfloat16", "both", "auto"),
        default="auto",
        help="auto (default): both, without bfloat16 if the CPU emulates it; tf32 needs CUDA",
    )
    parser.add_argument(
        "--slots",
        type=positive_ints,
        metavar="S,S,...",
        help="row lengths, multiples of the histogram's; sequences are stretched as much (default: the histogram's)",
    )
    parser.add_argument(
        "--ranks",
        type=_parse_ranks,
        metavar="N,N,...",
        help="numbers of processes that share each batch, measured in turn with torchrun (default: this process only)",
    )
    parser.add_argument("--threads", type=positive_int, help="threads (default: torch's choice)")
    parser.add_argument(
        "--profile",
        action="store_true",
        help="print the share of each part of an update of the packs on the CPU instead",
    )
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
    parser.rare("--columns", "--split", "--slots", "--ranks", "--threads")
    args = parser.parse_args(argv)
    if args.profile and args.ranks:
        raise ValueError("--ranks: is not profiled; leave it out with --profile")
    return args


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Measure packed and unpacked training, and print a table or JSON."""
    args = _parse(argv)
    if args.ranks and os.environ.get("WORLD_SIZE", "1") == "1":
        return _in_ranks(args, list(sys.argv[1:] if argv is None else argv))
    with joined(command="a benchmark of the host") as processes:
        if args.profile:
            _profile(args)
        else:
            _report(_measure(args, processes), as_json=args.json)
    return 0


def _profile(args: argparse.Namespace) -> None:
    """Print where the time of an update goes."""
    # Otherwise torch prints when its profiler starts and stops.
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")
    from ipu_packed_bert.benchmarks.profile import profile_facts, where_time_goes
    from ipu_packed_bert.benchmarks.work import machine
    from pack_data.cli.memory import keep_buffers

    keep_buffers()  # as in training
    _, _, cases = _cases(args, ONE, device="cpu")
    shares = {}
    for config, work in cases:
        name = f"{config.engine.precision}, {work.slots} slots"
        shares[name] = where_time_goes(config, work)
    if args.json:
        print(json.dumps(shares))
        return
    notes = (f"{args.packs} packs, vocabulary {args.vocabulary_size}", machine())
    print(printed(profile_facts(shares, f"Model {args.size}: share of an update", notes)))


def _in_ranks(args: argparse.Namespace, options: List[str]) -> int:
    """Measure with each number of ranks in turn, by torchrun; print one table or JSON object of all."""
    results: List[Dict[str, Any]] = []
    measurements: List[Dict[str, Any]] = []
    _, _, plans = _plans(args)  # refuses mistakes here, instead of in each rank
    for ranks in args.ranks:
        for plan in plans:
            _micro_batch(args, plan, ranks)
    for ranks in args.ranks:
        # Without OMP_NUM_THREADS, torchrun prints a long warning and uses one thread.
        threads = args.threads or max(1, available_cores() // ranks)
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        command = [sys.executable, "-m"]
        if ranks > 1:
            command += ["torch.distributed.run", "--standalone"]
            command += ["--nproc-per-node", str(ranks), "-m"]
        command += ["ipu_packed_bert", "benchmark", *options, "--ranks", _HERE, "--json"]
        finished = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
        if finished.returncode:
            return finished.returncode
        result = json.loads(finished.stdout.splitlines()[-1])
        results.append(result)
        measurements += result["measurements"]
    _report({**results[0], "measurements": measurements}, as_json=args.json)
    return 0


def _plans(args: argparse.Namespace) -> Tuple[LengthHistogram, Packing, List[Packing]]:
    """Return the lengths, their packing, and a packing for each number of slots per row."""
    histogram = histogram_from(args)
    packing = get_packer(args.packer)(histogram, max_sequences_per_pack=args.max_sequences_per_pack)
    all_slots = args.slots or [packing.max_sequence_length]
    return histogram, packing, [_stretched(packing, slots) for slots in all_slots]


def _micro_batch(args: argparse.Namespace, plan: Packing, ranks: int) -> int:
    """Return the rows of a micro-batch; raise ValueError if the packs of a rank do not divide into them."""
    rows = args.micro_batch
    if rows is None:
        rows = fast_micro_batch(args.packs, plan.max_sequence_length, ranks=ranks)
    if args.packs % (ranks * rows):
        raise ValueError(
            f"--packs {args.packs}: must be a multiple of {ranks * rows}: {counted(ranks, 'rank')} of --micro-batch"
            f" {rows}"
        )
    return rows


def _cases(
    args: argparse.Namespace, processes: Processes, *, device: str = "auto"
) -> Tuple[LengthHistogram, Packing, List[Tuple[Config, BenchmarkWork]]]:
    """Return the lengths, their packing, and the configuration and work of each table row."""
    histogram, packing, plans = _plans(args)
    micro_batches = [_micro_batch(args, plan, processes.size) for plan in plans]
    precisions = _pick_precisions(args.precision, processes)
    engines = [
        EngineConfig(
            kind="host",
            device=device,
            precision=precision,
            compile=args.compile,
            threads=args.threads,
        )
        for precision in precisions
    ]
    cases = []
    for plan, rows in zip(plans, micro_batches):
        work = draw_work(
            plan,
            packs=args.packs,
            micro_batch=rows,
            vocabulary=args.vocabulary_size,
            max_predictions=default_predictions(plan.max_sequence_length),
            seed=args.seed,
            share=(processes.rank, processes.size),
        )
        for engine in engines:
            config = config_of(args.size, work, engine, micro_batch=rows)
            cases.append((config, work))
    return histogram, packing, cases


def _measure(args: argparse.Namespace, processes: Processes) -> Dict[str, Any]:
    """Return the JSON object of `--json`."""
    # torch is imported from here on: wrong options are refused without it.
    import torch

    from ipu_packed_bert.benchmarks.packed import RIVALS, compare_layouts
    from ipu_packed_bert.benchmarks.work import machine
    from pack_data.cli.memory import keep_buffers

    if not torch.cuda.is_available():
        keep_buffers()  # as in training
    histogram, packing, cases = _cases(args, processes)
    _, work = cases[0]
    rivals = find_spec("transformers") is not None and processes.size == 1
    sides = 2  # packed and unpacked
    if rivals:
        sides += 1 + len(RIVALS["cuda" if torch.cuda.is_available() else "cpu"])
    measurements = []
    with progress_bar(sides * (args.rounds + 1) * len(cases), "rounds", unit=" rounds") as bar:
        bar.disable |= processes.rank > 0
        for config, work in cases:
            try:
                measurement = compare_layouts(
                    config, work, rounds=args.rounds, bar=bar, processes=processes, rivals=rivals
                )
            except torch.cuda.OutOfMemoryError:
                raise ValueError(
                    f"--micro-batch {config.batch.micro_batch}: the GPU has too little memory for {args.size} with so"
                    " many rows; lower it, and make --packs a multiple"
                ) from None
            measurements.append(measurement)
    hidden, layers, _, _ = SIZES[args.size]
    return {
        "size": args.size,
        "hidden_size": hidden,
        "layers": layers,
        "vocabulary_size": args.vocabulary_size,
        "histogram": histogram.name or args.histogram,
        "algorithm": packing.algorithm,
        "packs": args.packs,
        "sequences": work.sequences,
        "tokens": work.tokens,
        "rounds": args.rounds,
        "machine": machine(),
        "measurements": measurements,
    }


def _stretched(packing: Packing, slots: int) -> Packing:
    """Multiply all lengths of a packing so that rows of ``slots`` have the same fraction of padding."""
    factor, rest = divmod(slots, packing.max_sequence_length)
    if rest:
        raise ValueError(
            f"--slots {slots}: must be a multiple of {packing.max_sequence_length}, the row length of the histogram"
        )
    strategies = []
    for strategy in packing.strategies:
        strategies.append(tuple(factor * length for length in strategy))
    return Packing(
        packing.algorithm, slots, packing.max_sequences_per_pack, tuple(strategies), packing.repeats
    )


def _pick_precisions(option: str, processes: Processes) -> Tuple[str, ...]:
    import torch

    from ipu_packed_bert.benchmarks.packed import bfloat16_slowdown
    from ipu_packed_bert.engine.host.devices import computes_in

    if option != "auto":
        return _BOTH if option == "both" else (option,)
    if torch.cuda.is_available():
        cuda = torch.device("cuda")
        return tuple(precision for precision in _BOTH if computes_in(precision, cuda))
    # Measured by one process: ranks that decide differently would wait for each other.
    slowdown = processes.of_first(bfloat16_slowdown)
    if slowdown <= 1.5:  # a CPU with native bfloat16 is faster than in float32
        return _BOTH
    print(
        f"bfloat16 is left out: this CPU takes {with_unit(slowdown, 'times')} as long as in float32; use --precision"
        " both to measure it",
        file=sys.stderr,
    )
    return _BOTH[:1]


def _report(result: Dict[str, Any], *, as_json: bool) -> None:
    from ipu_packed_bert.benchmarks.packed import facts

    if as_json:
        print(json.dumps(result))
        return
    measurements = result["measurements"]
    notes = [
        *dict.fromkeys(measurement["engine"] for measurement in measurements),
        f"Hidden {result['hidden_size']}, {result['layers']} layers, vocabulary {result['vocabulary_size']}; forward"
        f" and backward pass; {result['sequences']} sequences of {result['histogram']} in {result['packs']} packs by"
        f" {result['algorithm']}; medians and quartiles of {result['rounds']} rounds.",
    ]
    ratios = [figures["sorted_time"] for figures in measurements if "sorted_time" in figures]
    if ratios:
        notes.append(_RIVAL)
    if any("dense_time" in measurement for measurement in measurements):
        notes += _OTHERS
    notes.append(result["machine"])
    if ratios:
        notes.append(_sentence(result, ratios))
    print(printed(facts(measurements, f"Model {result['size']}: packed and unpacked", notes)))


def _sentence(result: Dict[str, Any], ratios: Sequence[float]) -> str:
    """Return the result against sorted sequences in one sentence."""
    times = sorted({number(ratio, "times") for ratio in (min(ratios), max(ratios))})
    processor = result["machine"].partition(",")[0]
    factor = number(result["measurements"][0]["packing_factor"], "sequences per pack")
    return (
        f"On {processor}, Hugging Face's BERT on sorted sequences at its best takes {' to '.join(times)} times as long"
        f" as packs of {factor} sequences: the same {result['sequences']} sequences, model {result['size']}."
    )
