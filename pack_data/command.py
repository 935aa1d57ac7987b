"""What every command line of this package shares: errors in one line, the histogram's options, the packers' main."""
from __future__ import annotations

import argparse
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any, Callable, Dict, Mapping, NoReturn, Optional, Sequence

from pack_data.histogram import PUBLISHED, LengthHistogram
from pack_data.packages import package_of
from pack_data.synthetic import HELP, synthetic_histogram


class Problems(ValueError):
    """Several problems in one error, a line each: `run_main` keeps the lines, and makes one line of any other error."""


class NotFinite(ArithmeticError):
    """A training run has a loss or weights that are infinite or no numbers: exit status 3."""


class ArgumentParser(argparse.ArgumentParser):
    """An argument parser whose complaints are ValueErrors, so that `run_main` prints them like every other error."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": argparse.RawDescriptionHelpFormatter, **options})

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (try {self.prog} --help)")


def run_main(main: Callable[[Optional[Sequence[str]]], Optional[int]], argv: Optional[Sequence[str]] = None) -> int:
    """Runs a command and returns its exit status; what ends it early is one line on stderr (`Problems`: a line each).

    0 done, 1 a verdict (the command's own), 2 the user's mistake, 3 training that is no longer finite, 128 + n ended by signal n.
    """
    try:
        status = main(argv) or 0
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader (`| head`) has gone; Python would complain once more while it shuts down
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, OSError) as error:
        lines = str(error).splitlines()
        print("error: " + ("\n" if isinstance(error, Problems) else " ").join(lines), file=sys.stderr)
        return 2
    except NotFinite as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    except ModuleNotFoundError as error:  # torch, where only the packers' packages are installed
        package = package_of(error.name)
        if package is None:
            raise
        print(f"error: this command needs the package {package}: pip install {package}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def list_commands(package: str, commands: Mapping[str, str], argv: Optional[Sequence[str]] = None, more: Sequence[str] = ()) -> int:
    """The main of `python -m PACKAGE`: prints the package's commands, a line each, and then the lines of `more`."""
    width = max(map(len, commands))
    lines = [f"python -m {package}.NAME --help says more about each:", ""]
    lines += [f"  {command:<{width}}  {summary}" for command, summary in commands.items()]
    lines += ["", *more] if more else []
    given = ArgumentParser(prog=f"python -m {package}", description="\n".join(lines)).parse_known_args(argv)[1]
    if given:
        way_out = f"type python -m {package}.{' '.join(given)}" if given[0] in commands else f"the commands are {', '.join(commands)}"
        raise ValueError(f"{given[0]}: python -m {package} only lists its commands; {way_out}")
    print("\n".join(lines))
    return 0


def positive_int(text: str) -> int:
    """An argparse type: a whole number of at least 1; `1_000` and `1,000` are read as well."""
    try:
        value = int(text.replace(",", ""))
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value


def parse_depth(text: str) -> Optional[int]:
    """An argparse type for a packing depth: a number of at least 1, or `unlimited` (None)."""
    if text == "unlimited":
        return None
    try:
        return positive_int(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{text!r} is no packing depth: give a number of at least 1, or 'unlimited'") from None


def depth_text(max_sequences_per_pack: Optional[int]) -> str:
    return "unlimited" if max_sequences_per_pack is None else str(max_sequences_per_pack)


def progress_bar(total: Optional[int], description: str, *, shown: Optional[bool] = None, unit: str = "it"):
    """A tqdm bar on stderr; `shown` None means: only where stderr is a terminal."""
    from tqdm import tqdm

    # The default lock is a semaphore between processes; multiprocessing would warn at exit that nobody freed it.
    tqdm.set_lock(threading.RLock())
    disable = not sys.stderr.isatty() if shown is None else not shown
    return tqdm(total=total, desc=description, unit=unit, file=sys.stderr, disable=disable, leave=False)


def add_histogram_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds `--histogram`, `--synthetic` and `--max-sequence-length`; `histogram_from` reads them."""
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--histogram", metavar="NAME|CSV", default=PUBLISHED[0],
        help=f"a shipped histogram ({', '.join(PUBLISHED)}) or a CSV file 'length,count'; default {PUBLISHED[0]}")
    where.add_argument(
        "--synthetic", metavar="SPEC",
        help="made-up lengths instead, e.g. sample:wikipedia_512,n=1000000; kinds below")
    parser.epilog = HELP
    parser.add_argument(
        "--max-sequence-length", type=positive_int, metavar="S",
        help="slots in a pack; required with a CSV file, else the histogram's own")


def histogram_from(args: argparse.Namespace) -> LengthHistogram:
    """The histogram that the options of `add_histogram_arguments` name."""
    histogram = _named_histogram(args)
    if not histogram.sequences:
        raise ValueError(f"--histogram {args.histogram}: holds no sequence; a CSV file has a line `length,count` for each length that occurs")
    return histogram


def _named_histogram(args: argparse.Namespace) -> LengthHistogram:
    if args.synthetic is not None:
        histogram = synthetic_histogram(args.synthetic)
    elif args.histogram in PUBLISHED:
        histogram = LengthHistogram.published(args.histogram)
    elif not Path(args.histogram).exists():
        raise ValueError(f"--histogram {args.histogram}: neither a file nor a shipped name; shipped are {', '.join(PUBLISHED)}")
    elif args.max_sequence_length is None:
        raise ValueError(f"--histogram {args.histogram}: a CSV file does not say how long a pack is; add --max-sequence-length")
    else:
        return LengthHistogram.from_csv(args.histogram, args.max_sequence_length)
    if args.max_sequence_length is None:
        return histogram
    return histogram.with_max_sequence_length(args.max_sequence_length)


def run_packer(
    argv: Optional[Sequence[str]], pack: Callable, *, name: str, description: str,
    add_options: Callable[[argparse.ArgumentParser], None] = lambda parser: None,
    options: Callable[[argparse.Namespace], Dict[str, Any]] = lambda args: {},
    default_depth: Optional[int] = 3,
) -> int:
    """The main of a packer's module: parse, pack, save the recipe, print the table or the JSON object.

    add_options adds the packer's own options to the parser; options turns them into keywords of `pack`.
    """
    parser = ArgumentParser(prog=f"python -m pack_data.{name}", description=description)
    add_histogram_arguments(parser)
    parser.add_argument(
        "--max-sequences-per-pack", type=parse_depth, default=default_depth, metavar="D",
        help=f"packing depth, a number or 'unlimited'; default {depth_text(default_depth)}")
    add_options(parser)
    parser.add_argument("--out", metavar="FILE", help="write the recipe (strategies and repeats) as JSON")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    args = parser.parse_args(argv)
    if args.out and not Path(args.out).parent.is_dir():  # said before the packing is solved, not after
        raise ValueError(f"--out {args.out}: there is no folder {Path(args.out).parent}; make it first")

    histogram = histogram_from(args)
    packing = pack(histogram, max_sequences_per_pack=args.max_sequences_per_pack, **options(args))
    packing.check(histogram)
    if args.out:
        packing.save(args.out)
    if args.json:
        print(json.dumps(packing.to_json()))
    else:
        print(packing.table(histogram.name))
        if args.out:
            print(f"\nrecipe written to {args.out}")
    return 0
