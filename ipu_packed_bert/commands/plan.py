"""What a configuration would run and where, without a device; exit status 1 where it does not fit."""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import List, Optional, Sequence

from ipu_packed_bert.commands import finetune, pretrain
from ipu_packed_bert.cycles import calibration
from ipu_packed_bert.cycles.matmul import cache_folder
from ipu_packed_bert.cycles.target import TARGETS
from ipu_packed_bert.cycles.workload import Machine
from ipu_packed_bert.data.factors import PackingFactor, parse_factor, published_for
from ipu_packed_bert.planning.plan import FULLEST_THAT_RAN
from ipu_packed_bert.report.packings import factor_of
from ipu_packed_bert.report.search import DEPTHS, Found, Search, SearchOutcome, choice_of
from ipu_packed_bert.run_files.folder import CONFIG
from ipu_packed_bert.settings.pretraining import Config, load_config
from ipu_packed_bert.settings.reader import ConfigError, load_yaml, peek
from ipu_packed_bert.settings.schema import PRETRAINING
from ipu_packed_bert.settings.shipped import config_file
from pack_data.cli.command import ArgumentParser, check_output, positive_int, progress_bar, typed
from pack_data.display.table import text_table, wrapped
from pack_data.lengths.options import add_histogram_arguments, histogram_from
from pack_data.reading.files import write_atomically

_ABOUT = """What a configuration would run and where, without a device, and whether it fits. Without --search:
--config, and every option of pretrain or finetune. With --search, and the options here: the fastest plans for a pod
that fit.

packed-bert plan --search --config packed_phase2_pod16 --ipus 64

Micro-batch, IPUs of a replica, placement of the layers, room for products, parts of the vocabulary projection, mask,
packing depth and recomputation are varied; an update stays as large. Nothing is measured: memory is that of the plan,
cycles are those of the cycle model.

Exit status: 0 a plan fits; 1 none does; 2 the user's mistake.
"""
_SHOWN = 4  # plans


def main(argv: Optional[Sequence[str]] = None) -> int:
    """`pretrain --plan` or `finetune --plan`, as the configuration says, under a name of its own; or the search."""
    given = sys.argv[1:] if argv is None else argv
    if {"--search", "-h", "--help"} & {*given}:
        return _search(given)
    if "--help-all" in given:
        print(f"{_options().format_help_all()}\nand, without --search:\n")
    arguments = [*given, "--plan"]
    return finetune.main(arguments) if _of_fine_tuning(arguments) else pretrain.main(arguments)


def _of_fine_tuning(arguments: Sequence[str]) -> bool:
    """Whether the options name a configuration of fine-tuning; other mistakes are left to the command's own parser."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", nargs="?")
    parser.add_argument("--resume", nargs="?")
    parser.add_argument("--set", action="append", nargs="?", default=[])
    named, _ = parser.parse_known_args(arguments)
    path = Path(named.resume, CONFIG) if named.resume else config_file(named.config) if named.config else None
    if path is None:
        return False
    try:
        tree, overrides = load_yaml(path), [each for each in named.set if each]
    except ConfigError:
        return False
    task = peek("task.name", tree, overrides)
    if task is None:  # only fine-tuning has these; its first task need not be named
        return any(peek(f"data.{name}", tree, overrides) is not None for name in ("training", "evaluation"))
    return task != PRETRAINING


def _options() -> ArgumentParser:
    parser = ArgumentParser(prog=typed("plan"), description=_ABOUT)
    parser.add_argument("--search", action="store_true", help="instead of the plan that is written")
    parser.add_argument("--config", metavar="FILE|NAME", required=True, help="a configuration of pre-training")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", dest="overrides")
    parser.add_argument("--ipus", type=positive_int, metavar="N", help="of the pod; default: the configuration's")
    parser.add_argument("--packing-factor", type=parse_factor, metavar="P", help="instead of the histogram's")
    parser.add_argument("--write", type=Path, metavar="FILE", help="the best as a configuration to run")
    add_histogram_arguments(parser)
    parser.set_defaults(histogram=None)
    parser.rare("--synthetic", "--max-sequence-length", "--packing-factor")
    return parser


def _search(argv: Optional[Sequence[str]]) -> int:
    parser = _options()
    args = parser.parse_args(argv)
    if args.ipus is not None and args.ipus & (args.ipus - 1):
        parser.error(f"--ipus {args.ipus}: must be a power of two, as pods are")
    file = config_file(args.config)
    base = load_config(file, ["without_ipus=null", *args.overrides])
    if base.engine.kind == "host":
        raise ValueError(f"{file}: engine.kind is host; the search is of IPUs, `make gpu` measures a GPU")
    if args.write is not None:
        check_output("--write", args.write, reads=[file])
    slots = base.data.max_sequence_length
    given = args.histogram is not None or args.synthetic is not None
    histogram = histogram_from(args) if given else published_for(slots)
    if histogram is not None and histogram.max_sequence_length != slots:
        raise ValueError(
            f"{base.path}: data.max_sequence_length is {slots}, the histogram {histogram.name} is of "
            f"{histogram.max_sequence_length}; give a matching one"
        )

    @lru_cache(None)
    def factor(packer: str, depth: Optional[int]) -> PackingFactor:
        return factor_of(base, packer, depth, given=args.packing_factor, histogram=histogram, folder=cache_folder())

    machine = Machine(TARGETS[base.placement.machine], cache_folder())
    varied = args.packing_factor is None and histogram is not None and base.packed
    ipus = args.ipus or base.ipus
    depths = DEPTHS if varied else ()
    with progress_bar(None, "plans that fit", unit=" plans") as bar:
        search = Search(base, machine, calibration.load(), factor, ipus=ipus, depths=depths, after_each=bar.update)
        found = search.run()
    machine.save()
    print("\n".join(_page(base, found, ipus)))
    if not found.best:
        return 1
    best = found.best[0]
    update, data = best.made.update, best.config.data
    assert update is not None
    source = factor(data.packer, data.max_sequences_per_pack).source
    said = f"Plan 1: an update of {update.packs:,} packs at {update.factor.value:.3f} sequences a pack ({source})"
    said += "; --write FILE makes it a configuration" if args.write is None else "; written as a configuration:"
    print("\n" + "\n".join(wrapped(said)))
    if args.write is not None:
        _write(args.write, file, best)
        print(f"  packed-bert plan --config {shlex.quote(str(args.write))}")
    return 0


def _page(base: Config, found: SearchOutcome, ipus: int) -> List[str]:
    """At most `WIDTH` columns."""
    machine = TARGETS[base.placement.machine]
    fit = found.tried - sum(found.failures.values())
    text = [
        f"{base.name} on {ipus} IPUs ({machine.name}, {machine.clock_hz / 1e9:.2f} GHz): the fastest plans that fit",
        f"{found.tried:,} plans, {fit:,} fit" + ("; the others:" if found.failures else ""),
        *(f"  {number:5,}  {why}" for why, number in sorted(found.failures.items(), key=lambda item: -item[1])),
        "",
    ]
    if not found.best:
        return text + ["no plan fits: more IPUs, a shorter data.max_sequence_length or a smaller model"]
    shown = [("as written", found.base)] if found.base else []
    shown += [(str(number), each) for number, each in enumerate(found.best[:_SHOWN], start=1)]
    rows = [["plan", "IPUs", "layers", "packs", "room %", "mask", "depth", "recompute", "parts", "tile %"]]
    text += text_table(rows + [[name, *_settings(each)] for name, each in shown], left={0, 1, 2, 4, 5})
    for note in (
        "packs: in a micro-batch. room: what a product may take of an IPU. parts: of the vocabulary projection. "
        "tile: the fullest one's counted memory. Code and exchange come on top: a plan fits up to "
        f"{FULLEST_THAT_RAN:.0%}, as much as a published run counts.",
        "Predicted by the cycle model, nothing is measured; plans that differ by less than its error are equal.",
    ):
        text += wrapped(note, "  ")
    rows = [["plan", "sequences/s", "days", "ratio"]]
    for name, each in shown:
        rate = f"{each.rate:,.0f}, {each.rate_lower:,.0f} to {each.rate_upper:,.0f}"
        rows.append([name, rate, f"{each.days:.3f}", f"{each.rate / shown[0][1].rate:.3f}"])
    return [*text, "", *text_table(rows)]


def _settings(found: Found) -> List[str]:
    choice, placement = choice_of(found.config), found.config.placement
    return [
        f"{placement.replicas} x {placement.ipus_per_replica}",
        _runs(placement.layers_per_ipu),
        str(choice.micro_batch),
        _runs([round(100 * room) for room in placement.available_memory_proportion]),
        choice.mask,
        "any" if choice.depth is None else str(choice.depth),
        "yes" if choice.recompute else "no",
        str(choice.parts),
        f"{100 * found.made.fullest:.0f}",
    ]


def _runs(numbers: Sequence[int]) -> str:
    """3,7,7,7; of many IPUs the first, and the least and most of the others."""
    if len(numbers) <= 4:
        return ",".join(map(str, numbers))
    least, most = min(numbers[1:]), max(numbers[1:])
    return f"{numbers[0]},{least}" + ("" if least == most else f"-{most}") + f" x{len(numbers) - 1}"


def _write(path: Path, base: Path, found: Found) -> None:
    """The configuration of a plan as a file, with its base's block for machines without IPUs."""
    config = replace(found.config, without_ipus=load_config(base).without_ipus)
    lines = [
        f"# Found by packed-bert plan --search from {base.name}",
        f"# Computed, not measured: {found.rate:,.0f} sequences/s ({found.rate_lower:,.0f} to {found.rate_upper:,.0f}),"
        f" {found.days:.2f} days; {found.made.fullest:.0%} of the fullest tile is counted.",
        "",
    ]
    write_atomically(path, ("\n".join(lines) + config.to_yaml()).encode())
