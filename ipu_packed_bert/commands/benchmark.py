"""What packing brings on this machine: `packed-bert benchmark`.

The same sequences go through forward and backward pass twice, packed and each alone in its row, in one process and in
turn, so that both see the same machine. Lengths come from a histogram through a real packer, tokens are random.
The unpacked side is canonical BERT: a padding mask for each row, no block mask. The weight update is left out: it
comes once after hundreds of micro-batches, and is the same for both.

`--lengths 512,2048,8192` asks another question: from which row length on does attention within each sequence beat a
dense mask over the row? The same packs, their sequences stretched to each length, go through both in turn.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from typing import Any, Dict, List, Optional, Sequence, Tuple

from ipu_packed_bert.config import BatchConfig, Config, DataConfig
from ipu_packed_bert.processes import Processes, joined
from ipu_packed_bert.schema import EngineConfig, ModelConfig
from pack_data.cli.command import ArgumentParser, counted, parse_depth, positive_int, process_count, progress_bar, typed
from pack_data.lengths.options import add_histogram_arguments, histogram_from
from pack_data.packers import PACKERS, get_packer
from pack_data.packing import Packing
from pack_data.store.packs import default_predictions

# hidden size, layers, heads, intermediate size. `base3` is BERT-base with 3 layers, which takes a quarter of its time.
SIZES = {
    "tiny": (128, 2, 2, 512),
    "small": (256, 4, 4, 1024),
    "base3": (768, 3, 12, 3072),
    "base": (768, 12, 12, 3072),
    "large": (1024, 24, 16, 4096),
}

BOTH = ("float32", "bfloat16")

HERE = "here"  # in place of --ranks' numbers: this process measures for itself; the last --ranks of a line counts


def parse_lengths(text: str) -> List[int]:
    return [positive_int(part) for part in text.split(",")]


def parse_ranks(text: str) -> List[int]:
    return [] if text == HERE else [process_count(part) for part in text.split(",")]


def model_of(size: str, *, vocabulary: int, slots: int, dropout: float) -> ModelConfig:
    hidden, layers, heads, intermediate = SIZES[size]
    return ModelConfig(
        vocabulary_size=vocabulary,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        intermediate_size=intermediate,
        max_position_embeddings=slots,
        hidden_dropout=dropout,
    )


def compare_lengths(args, packing: Packing, size: str, rounds: int, precisions: Sequence[str]) -> int:
    """What `--lengths` prints; the same number of packs at each length."""
    from ipu_packed_bert.throughput import compare_attention, comparison_table, draw_work, stretched

    plans = [stretched(packing, slots) for slots in args.lengths]
    comparisons = []
    with progress_bar(2 * (rounds + 1) * len(plans) * len(precisions), "rounds") as bar:
        for plan in plans:
            slots = plan.max_sequence_length
            work = draw_work(
                plan,
                packs=args.packs,
                micro_batch=args.micro_batch,
                vocabulary=args.vocabulary_size,
                max_predictions=default_predictions(slots),
                seed=args.seed,
            )
            depth = work.packed["next_sentence_positions"].shape[1]
            for precision in precisions:
                config = Config(
                    data=DataConfig(max_sequence_length=slots),
                    model=model_of(size, vocabulary=args.vocabulary_size, slots=slots, dropout=args.dropout),
                    engine=EngineConfig(kind="host", precision=precision, threads=args.threads),
                    batch=BatchConfig(micro_batch=args.micro_batch),
                )
                comparisons.append(compare_attention(config, work, depth, rounds=rounds, bar=bar))
    if args.json:
        print(json.dumps({"size": size, "packs": args.packs, "comparisons": [each.to_json() for each in comparisons]}))
        return 0
    print(
        f"model {size}; forward and backward pass of {counted(args.packs, 'pack')} of {packing.max_sequence_length} by"
        f" {packing.algorithm}, stretched to each length, {counted(args.micro_batch, 'row')} a micro-batch; median of"
        f" {rounds} rounds\n"
    )
    print(comparison_table(comparisons))
    return 0


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = ArgumentParser(
        prog=typed("benchmark"),
        description="Sequences per second, packed over unpacked, on this machine's CPU or CUDA device.",
    )
    add_histogram_arguments(parser)
    parser.add_argument("--packer", choices=PACKERS, default="optimal")
    parser.add_argument("--max-sequences-per-pack", type=parse_depth, default=3, metavar="D")
    parser.add_argument("--size", choices=sorted(SIZES), default="base3", help="of the model; default base3")
    parser.add_argument("--vocabulary-size", type=positive_int, default=30522, metavar="V")
    parser.add_argument(
        "--precision",
        choices=("float32", "tf32", "bfloat16", "both", "auto"),
        default="auto",
        help="auto, the default: both, but no bfloat16 where it is only emulated; tf32 is for CUDA",
    )
    parser.add_argument("--attention", choices=("auto", "eager", "sdpa", "varlen"), default="auto")
    parser.add_argument(
        "--slots",
        type=parse_lengths,
        metavar="S,S,...",
        help="row lengths, multiples of the histogram's, to whose length the sequences are stretched; default: its own",
    )
    parser.add_argument(
        "--lengths",
        type=parse_lengths,
        metavar="S,S,...",
        help="compare a dense mask with attention within sequences at these row lengths, multiples of the histogram's",
    )
    parser.add_argument(
        "--ranks",
        type=parse_ranks,
        metavar="N,N,...",
        help="processes that share each batch, as under torchrun; one number after the other; default: this process",
    )
    parser.add_argument("--micro-batch", type=positive_int, default=2, metavar="ROWS")
    parser.add_argument("--packs", type=positive_int, default=4, help="a round; a multiple of --micro-batch, default 4")
    parser.add_argument("--rounds", type=positive_int, default=9, help="counted; the first of all is not, default 9")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--compile", action="store_true", help="with torch.compile")
    parser.add_argument("--threads", type=positive_int, help="default: as many as torch chooses")
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    args = parser.parse_args(argv)
    others = {"slots": args.slots, "ranks": args.ranks, "attention": args.attention != "auto", "compile": args.compile}
    refused = [f"--{name}" for name, given in others.items() if given]
    if args.lengths and refused:
        raise ValueError(f"--lengths compares two attentions in this process, uncompiled; leave {refused[0]} out")
    if args.packs % args.micro_batch:
        raise ValueError(f"--packs {args.packs} is not a multiple of --micro-batch {args.micro_batch}")
    for ranks in args.ranks or ():
        if args.packs % (ranks * args.micro_batch):
            raise ValueError(
                f"--packs {args.packs}: {ranks} ranks of --micro-batch {args.micro_batch} need a multiple of"
                f" {ranks * args.micro_batch}"
            )
    if not 0.0 <= args.dropout < 1.0:
        raise ValueError(f"--dropout {args.dropout}: must be at least 0 and below 1")
    if args.ranks and os.environ.get("WORLD_SIZE", "1") == "1":
        return in_ranks(args, list(sys.argv[1:] if argv is None else argv))
    with joined(command="a benchmark of the host") as processes:
        return measured(args, processes)


def in_ranks(args: argparse.Namespace, options: List[str]) -> int:
    """Each number of ranks after the other, by torchrun; one table, or one JSON object, of all."""
    found: List[Dict[str, Any]] = []
    for ranks in args.ranks:
        # Without these, torchrun says at length that it takes one.
        threads = args.threads or max(1, (os.cpu_count() or 1) // ranks)
        torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"] if ranks > 1 else []
        module = ["ipu_packed_bert", "benchmark", *options, "--ranks", HERE, "--json"]
        command = [sys.executable, "-m", *torchrun, *module]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        finished = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
        if finished.returncode:
            return finished.returncode
        found.append(json.loads(finished.stdout.splitlines()[-1]))
    whole = {**found[0], "measurements": [each for one in found for each in one["measurements"]]}
    report(whole, as_json=args.json)
    return 0


def measured(args: argparse.Namespace, processes: Processes) -> int:
    # torch loads from here on: a wrong option is refused without it.
    import torch

    from ipu_packed_bert.engine.host import pick_attention
    from ipu_packed_bert.engine.host.attention import dense_attention
    from ipu_packed_bert.engine.host.devices import computes_in, find_device
    from ipu_packed_bert.tasks.pretraining import Pretraining
    from ipu_packed_bert.throughput import Work, bfloat16_slowdown, draw_work, measure, stretched

    size, rounds = args.size, args.rounds

    histogram = histogram_from(args)
    packing = get_packer(args.packer)(histogram, max_sequences_per_pack=args.max_sequences_per_pack)
    hidden, layers, heads, intermediate = SIZES[size]
    precisions: Tuple[str, ...] = {"both": BOTH, "auto": BOTH}.get(args.precision, (args.precision,))
    if args.precision == "auto" and torch.cuda.is_available():
        precisions = tuple(each for each in BOTH if computes_in(each, torch.device("cuda")))
    elif args.precision == "auto":
        slowdown = processes.of_first(bfloat16_slowdown)  # each would measure another one, and wait for other batches
        if slowdown > 1.5:  # where bfloat16 is native it is faster
            precisions = ("float32",)
            print(
                f"bfloat16 is left out: this CPU takes {slowdown:.1f} times as long for it as for float32"
                " (--precision both measures it all the same)",
                file=sys.stderr,
            )
    if args.lengths:
        return compare_lengths(args, packing, size, rounds, precisions)
    cases: List[Tuple[Config, Work, Optional[str]]] = []  # the last: attention of the unpacked side, where another
    for slots in args.slots or [packing.max_sequence_length]:
        work = draw_work(
            stretched(packing, slots),
            packs=args.packs,
            micro_batch=args.micro_batch,
            vocabulary=args.vocabulary_size,
            max_predictions=default_predictions(slots),
            seed=args.seed,
            share=(processes.rank, processes.size),
        )
        depth = work.packed["next_sentence_positions"].shape[1]
        for precision in precisions:
            config = Config(
                data=DataConfig(max_sequence_length=slots, max_sequences_per_pack=depth),
                model=model_of(size, vocabulary=args.vocabulary_size, slots=slots, dropout=args.dropout),
                engine=EngineConfig(
                    kind="host",
                    precision=precision,
                    attention=args.attention,
                    compile=args.compile,
                    threads=args.threads,
                ),
                batch=BatchConfig(micro_batch=args.micro_batch),
            )
            device = find_device(config.engine)
            if pick_attention(config, Pretraining(config), device).kind == "varlen":
                # BERT without packs has a dense attention; one that skips padding can be had there too.
                cases.append((config, work, dense_attention(precision, device)))
            cases.append((config, work, None))
    with progress_bar(2 * (rounds + 1) * len(cases), "rounds", shown=None if processes.rank == 0 else False) as bar:
        measurements = [
            measure(config, work, rounds=rounds, bar=bar, unpacked_attention=attention, processes=processes)
            for config, work, attention in cases
        ]
    whole = {
        "size": size,
        "hidden_size": hidden,
        "layers": layers,
        "vocabulary_size": args.vocabulary_size,
        "histogram": histogram.name or args.histogram,
        "algorithm": packing.algorithm,
        "packs": args.packs,
        "sequences": work.sequences,
        "tokens": work.tokens,
        "micro_batch": args.micro_batch,
        "rounds": rounds,
        "measurements": [each.to_json() for each in measurements],
    }
    report(whole, as_json=args.json)
    return 0


def report(found: Dict[str, Any], *, as_json: bool) -> None:
    from ipu_packed_bert.throughput import table

    if as_json:
        print(json.dumps(found))
        return
    for description in dict.fromkeys(each["engine"] for each in found["measurements"]):
        print(description)
    print(
        f"model {found['size']}: hidden {found['hidden_size']}, {found['layers']} layers, vocabulary"
        f" {found['vocabulary_size']}; forward and backward pass\n"
        f"{found['sequences']} sequences of {found['histogram']} in {found['packs']} packs by {found['algorithm']},"
        f" micro-batches of {found['micro_batch']} rows, median of {found['rounds']} rounds\n"
    )
    print(table(found["measurements"]))
