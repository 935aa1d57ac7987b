"""What a configuration would run and where, without a device; exit status 1 where it does not fit."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import textwrap
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

import yaml

from ipu_packed_bert.commands import finetune, pretrain
from ipu_packed_bert.cycles import calibration
from ipu_packed_bert.cycles.matmul import cache_folder
from ipu_packed_bert.cycles.target import TARGETS
from ipu_packed_bert.cycles.workload import Machine
from ipu_packed_bert.planning.plan import FULLEST_THAT_RAN, device_lines, memory_lines
from ipu_packed_bert.report.packings import packed_factor
from ipu_packed_bert.report.search import DEPTHS, Found, Progress, Search, SearchOutcome, choice_of
from ipu_packed_bert.run_files.folder import CONFIG
from ipu_packed_bert.settings.pretraining import Config, load_config
from ipu_packed_bert.settings.reader import ConfigError, as_tree, load_yaml, peek
from ipu_packed_bert.settings.schema import PRETRAINING
from ipu_packed_bert.settings.shipped import FOLDER, config_file
from pack_data.cli.command import ArgumentParser, check_output, positive_int, typed
from pack_data.display.table import WIDTH, text_table
from pack_data.histogram import LengthHistogram
from pack_data.lengths.factors import PackingFactor, parse_factor, planned_factor, published_for
from pack_data.lengths.options import add_histogram_arguments, histogram_from
from pack_data.reading.files import write_atomically

_SEARCH = """The fastest plans for a pod that fit: packed-bert plan --search --config packed_phase2_pod16 [--ipus 64]

Micro-batch, IPUs of a replica, placement of the layers, room for products, parts of the vocabulary projection, mask,
packing depth and recomputation are varied; an update stays as large. Nothing is measured: memory is that of the plan,
cycles are those of the cycle model.

Exit status: 0 a plan fits; 1 none does; 2 the user's mistake.
"""


def main(argv: Optional[Sequence[str]] = None) -> int:
    """`pretrain --plan` or `finetune --plan`, as the configuration says, under a name of its own; or the search."""
    given = sys.argv[1:] if argv is None else argv
    if "--search" in given:
        return _search(argv)
    if "-h" in given or "--help" in given:
        print(f"{_options().format_usage()}\nand, without --search:\n")
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
    parser = ArgumentParser(prog=typed("plan"), description=_SEARCH)
    parser.add_argument("--search", action="store_true", required=True)
    parser.add_argument("--config", metavar="FILE|NAME", required=True, help="a configuration of pre-training")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", dest="overrides")
    parser.add_argument("--ipus", type=positive_int, metavar="N", help="of the pod; default: the configuration's")
    parser.add_argument("--packing-factor", type=parse_factor, metavar="P", help="instead of the histogram's")
    parser.add_argument("--best", type=positive_int, default=4, metavar="N", help="plans to print; default %(default)s")
    parser.add_argument("--write", type=Path, metavar="FILE", help="the best as a configuration to run")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--no-cache", action="store_true", help="neither read nor write the cache of plans and traces")
    add_histogram_arguments(parser)
    parser.set_defaults(histogram=None)
    return parser


def parse(argv: Optional[Sequence[str]]) -> Any:
    parser = _options()
    args = parser.parse_args(argv)
    if args.ipus is not None and args.ipus & (args.ipus - 1):
        parser.error(f"--ipus {args.ipus}: must be a power of two, as pods are")
    return args


def _search(argv: Optional[Sequence[str]]) -> int:
    args = parse(argv)
    file = config_file(args.config)
    base = load_config(file, ["without_ipus=null", *args.overrides])
    if base.engine.kind == "host":
        raise ValueError(f"{file}: engine.kind is host; the search is of IPUs, `make gpu` measures a GPU")
    if args.write is not None:
        check_output("--write", args.write, reads=[file])
    folder = None if args.no_cache else cache_folder()
    machine = Machine(TARGETS[base.placement.machine], folder)
    factors = _Factors(args, base, folder)
    found = Search(
        base,
        machine,
        calibration.load(),
        factors,
        ipus=args.ipus or base.ipus,
        depths=DEPTHS if factors.of_histogram and base.packed else (),
        say=Progress(),
    ).run()
    machine.save()
    if args.json:
        print(json.dumps(_as_json(found, args.best), indent=1))
    else:
        print("\n".join(_page(base, found, factors, ipus=args.ipus or base.ipus, best=args.best)))
    if not found.best:
        return 1
    if args.write is not None:
        write(args.write, file, found.best[0], command=command_line(args))
        if not args.json:
            print(f"\nwrote {args.write}: packed-bert plan --config {shlex.quote(str(args.write))}")
    return 0


class _Factors:
    """Packing factors by packer and depth: given, of the histogram, or the paper's."""

    def __init__(self, args: Any, base: Config, folder: Optional[Path]):
        slots = base.data.max_sequence_length
        given = args.histogram is not None or args.synthetic is not None
        self.histogram = histogram_from(args) if given else published_for(slots)
        if self.histogram is not None and self.histogram.max_sequence_length != slots:
            raise ValueError(
                f"{base.path}: data.max_sequence_length is {slots}, the histogram {self.histogram.name} is of "
                f"{self.histogram.max_sequence_length}; give a matching one"
            )
        self.given, self.slots, self.folder, self.path = args.packing_factor, slots, folder, base.path
        self.known: Dict[Any, PackingFactor] = {}

    @property
    def of_histogram(self) -> bool:
        return self.given is None and self.histogram is not None

    def __call__(self, packer: str, depth: Optional[int]) -> PackingFactor:
        if depth == 1:
            return PackingFactor(1.0, "unpacked")
        if (packer, depth) not in self.known:

            def packed(histogram: LengthHistogram, packer: str, depth: Optional[int]) -> float:
                return packed_factor(histogram, self.folder, packer, depth)

            made = planned_factor(
                self.slots, packer, depth, given=self.given, histogram=self.histogram, factor_of=packed
            )
            if made is None:
                raise ValueError(
                    f"{self.path}: no histogram of length {self.slots} is known; give --histogram or --packing-factor"
                )
            self.known[packer, depth] = made
        return self.known[packer, depth]


# ------------------------------------------------------------------------------------------------------------ printing


def _page(base: Config, found: SearchOutcome, factors: _Factors, *, ipus: int, best: int) -> List[str]:
    """At most `WIDTH` columns."""
    machine = TARGETS[base.placement.machine]
    failed = f"{found.tried:,} plans in {found.seconds:.1f} s, {found.tried - sum(found.failures.values()):,} fit"
    text = [
        f"{base.name} on {ipus} IPUs ({machine.name}, {machine.clock_hz / 1e9:.2f} GHz): the fastest plans that fit",
        failed + ("; the others:" if found.failures else ""),
        *(f"  {number:5,}  {why}" for why, number in sorted(found.failures.items(), key=lambda item: -item[1])),
        "",
    ]
    shown = ([("as written", found.base)] if found.base else []) + [
        (str(number), each) for number, each in enumerate(found.best[:best], start=1)
    ]
    if not shown:
        return text + ["no plan fits: more IPUs, a shorter data.max_sequence_length or a smaller model"]
    rows = [["plan", "IPUs", "layers", "packs", "room %", "mask", "depth", "recompute", "parts", "tile %"]]
    text += text_table(rows + [[name, *_settings(each)] for name, each in shown], left={0, 1, 2, 4, 5})
    rows = [["plan", "sequences/s", "days", "ratio"]]
    for name, each in shown:
        rate = f"{each.rate:,.0f}, {each.rate_lower:,.0f} to {each.rate_upper:,.0f}"
        rows.append([name, rate, f"{each.days:.3f}", f"{each.rate / shown[0][1].rate:.3f}"])
    text += ["", *text_table(rows)]
    top = found.best[0]
    factor = factors(top.config.data.packer, top.config.data.max_sequences_per_pack)
    lines = [
        "  packs: in a micro-batch. room: what a product may take of an IPU. parts: of the vocabulary projection.",
        "  tile: the fullest one's counted memory. Code and exchange come on top: a plan fits up to "
        f"{FULLEST_THAT_RAN:.0%}, as much as a published run counts.",
        "  Predicted by the cycle model, nothing is measured; plans that differ by less than its error are equal.",
        "",
        *_hand_tuned(found),
        f"Plan 1: an update of {top.made.update.packs:,} packs"  # type: ignore[union-attr]
        f" at {factor.value:.3f} sequences a pack ({factor.source})",
        *device_lines(top.made),
        "",
        *memory_lines(top.made, narrow=True),
    ]
    return text + [part for line in lines for part in _folded(line)]


def _folded(line: str) -> List[str]:
    """A line of at most `WIDTH` columns as it is, a longer one of words on several."""
    if len(line) <= WIDTH:
        return [line]
    indent = line[: len(line) - len(line.lstrip())]
    return textwrap.wrap(line, WIDTH, subsequent_indent=indent + "  " * bool(indent))


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


def _hand_tuned(found: SearchOutcome) -> List[str]:
    """Why the configuration as written is as fast as it is."""
    if found.base is None:
        return [
            "The configuration as written is for another pod, or does not surely fit: nothing is set beside it.",
            "",
        ]
    best, base = found.best[0], found.base
    if best is base or best.rate <= base.rate:
        return ["No plan is faster than the configuration as written.", ""]
    same = [each for each in found.best if choice_of(each.config)[:4] == choice_of(base.config)[:4]]
    text = f"As written {base.made.fullest:.0%} of a tile is counted, in plan 1 {best.made.fullest:.0%}."
    if same and same[0] is not base:
        text += f" With its own placement, and all the room there is for products: {same[0].rate:,.0f} sequences/s."
    return [text, ""]


def _as_json(found: SearchOutcome, best: int) -> Dict[str, Any]:
    def one(each: Found) -> Dict[str, Any]:
        placement = each.config.placement
        return {
            **choice_of(each.config)._asdict(),
            "replicas": placement.replicas,
            "available_memory_proportion": list(placement.available_memory_proportion),
            "gradient_accumulation": each.config.batch.gradient_accumulation,
            "fullest_tile": each.made.fullest,
            "memory_bytes": [memory.together for memory in each.made.memory],
            "sequences_per_second": [each.rate_lower, each.rate, each.rate_upper],
            "days": each.days,
        }

    return {
        "as_written": None if found.base is None else one(found.base),
        "best": [one(each) for each in found.best[:best]],
        "tried": found.tried,
        "failures": found.failures,
    }


# ------------------------------------------------------------------------------------------------------------- writing


def command_line(args: Any) -> str:
    """The command that finds the plan again: every option that decides it."""
    words = ["packed-bert", "plan", "--search", "--config", Path(args.config).name]
    words += [word for each in args.overrides for word in ("--set", each)]
    for option, value in (
        ("--ipus", args.ipus),
        ("--packing-factor", args.packing_factor),
        ("--histogram", args.histogram),
        ("--synthetic", args.synthetic),
        ("--max-sequence-length", args.max_sequence_length),
    ):
        words += [] if value is None else [option, str(value)]
    return " ".join(map(shlex.quote, words))


def write(path: Path, base_file: Path, found: Found, *, command: str) -> None:
    """The configuration of a plan as a file: what differs from its base, or all of it where the base is elsewhere."""
    raw = load_config(base_file)
    beside = base_file.suffix == ".yml" and base_file.parent.resolve() in (path.parent.resolve(), FOLDER.resolve())
    if beside and base_file.resolve() != path.resolve():
        before, after = as_tree(raw.sections), as_tree(found.config.sections)
        tree: Dict[str, Any] = {"extends": base_file.stem}
        for section, settings in after.items():
            changed = {key: value for key, value in settings.items() if before[section][key] != value}
            if changed:
                tree[section] = changed
    else:
        tree = {**as_tree(found.config.sections), "without_ipus": raw.as_dict().get("without_ipus")}
    lines = [
        f"# Found by {command}",
        f"# Computed, not measured: {found.rate:,.0f} sequences/s ({found.rate_lower:,.0f} to {found.rate_upper:,.0f}),"
        f" {found.days:.2f} days; {found.made.fullest:.0%} of the fullest tile is counted.",
        "",
    ]
    text = "\n".join(lines) + yaml.safe_dump(tree, sort_keys=False, default_flow_style=None, width=120)
    former = path.read_bytes() if path.is_file() else None
    write_atomically(path, text.encode())
    try:
        written = load_config(path, ["without_ipus=null"])
        if written.sections != found.config.sections:
            raise ConfigError(f"{path}: does not say what was found")
    except ConfigError:
        if former is None:
            path.unlink()
        else:
            write_atomically(path, former)
        raise
