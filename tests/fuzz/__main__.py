"""The fuzzer of all readers, for a night: python -m tests.fuzz --n 100000 [--seed S] [--reader NAME] [--minutes M]

Each case damages a valid sample in a way that its format knows and reads it as a command does. Allowed: an error of one
line that names the file; the same values as before; another valid value where the format holds it once. All else is a
failure: a traceback, a hang (above 5 s of processor time), more than 2 GB of memory, a silent change, words of several
lines.

    python -m tests.fuzz --n 100000                      # all readers, by their weights
    python -m tests.fuzz --reader recipe --case 17 -v    # one case again, with its files kept in --out

Failures go to the folder --out, a line each in failures.jsonl and the damaged files of the first ten of a kind. With
the same --out and --seed a run that was stopped goes on where it was. Exit status 1 if anything failed.
"""

import argparse
import collections
import json
import multiprocessing
import shutil
import sys
import time
from pathlib import Path

from pack_data.cli.command import ArgumentParser, positive_int, run_main
from pack_data.reading.durable import write_atomically
from tests.fuzz.cases import (
    FAILURES,
    HANG,
    OUTCOMES,
    TRACEBACK,
    WAITING,
    Result,
    load_readers,
    numbers_of,
    samples,
)

# How long a worker may be silent: a case that no alarm could end is in code that never comes back to Python.
PATIENCE = 3 * WAITING
KEPT = 10  # damaged files of one reader and outcome


class Worker:
    """A process that runs cases and is replaced where it does not answer."""

    def __init__(self, of, seed):
        self.samples = of
        self.seed = seed
        self._start()

    def _start(self):
        context = multiprocessing.get_context("fork")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=self._serve, args=(other,), daemon=True)
        self._process.start()

    def _serve(self, pipe):
        while True:
            place, number, by_command = pipe.recv()
            pipe.send(self.samples[place].run(self.seed, number, by_command=by_command, begun=pipe.send))

    def run(self, place, number, by_command):
        self._pipe.send((place, number, by_command))
        words = "?"
        try:
            while self._pipe.poll(PATIENCE):
                said = self._pipe.recv()
                if isinstance(said, Result):
                    return said
                words = said
            self._process.kill()
            outcome = HANG
            detail = f"killed after {PATIENCE:g} s"
        except EOFError:
            outcome = TRACEBACK
            detail = "the process ended"
        self._process.join()
        detail += f" (exit status {self._process.exitcode})"
        self._start()
        return Result(outcome, detail, words)

    def close(self):
        self._process.kill()
        self._process.join()


def table(counts):
    width = max(map(len, [*counts, "all readers"]))
    lines = ["  ".join([" " * width, *OUTCOMES, "cases"])]
    total = sum(counts.values(), collections.Counter())
    for name, outcomes in [*counts.items(), ("all readers", total)]:
        cells = [f"{outcomes[outcome]:>{len(outcome)},}" for outcome in OUTCOMES]
        lines.append("  ".join([f"{name:<{width}}", *cells, f"{sum(outcomes.values()):>5,}"]))
    return "\n".join(lines)


def fuzz(readers, *, count, seed, minutes, out, commands):
    """Runs the cases that `out` does not have yet; the number of failures."""
    out.mkdir(parents=True, exist_ok=True)
    state_file = out / f"counts-{seed}.json"
    failures_file = out / "failures.jsonl"
    names = [reader.name for reader in readers]
    state = {"readers": names, "done": 0, "counts": {name: {} for name in names}}
    if state_file.exists():
        former = json.loads(state_file.read_text())
        if former["readers"] == names:
            state = former
            print(f"{out}: goes on after {state['done']:,} cases", flush=True)
    counts = {name: collections.Counter(state["counts"][name]) for name in names}
    began = said = time.monotonic()

    def save(done):
        write_atomically(state_file, json.dumps({"readers": names, "done": done, "counts": counts}).encode())

    with samples(readers) as made_samples:
        worker = Worker(made_samples, seed)
        done = int(state["done"])
        try:
            for place, number in numbers_of(readers, count)[done:]:
                by_command = bool(commands) and number % commands == commands - 1 and readers[place].command is not None
                result = worker.run(place, number, by_command)
                counts[names[place]][result.outcome] += 1
                done += 1
                if result.outcome in FAILURES:
                    kept = keep(made_samples[place], seed, number, result, out, counts[names[place]][result.outcome])
                    with open(failures_file, "a", encoding="utf-8") as file:
                        about = {
                            "reader": names[place],
                            "seed": seed,
                            "case": number,
                            "command": by_command,
                            "kept": kept,
                        }
                        file.write(json.dumps({**about, **result._asdict()}) + "\n")
                now = time.monotonic()
                if now - said > 30:
                    said = now
                    failed = sum(outcomes[outcome] for outcomes in counts.values() for outcome in FAILURES)
                    print(f"{done:,} of {count:,} cases, {failed} failures, {now - began:,.0f} s", flush=True)
                    save(done)
                if minutes is not None and now - began > 60 * minutes:
                    break
        finally:
            worker.close()
            save(done)
    print(table(counts))
    return sum(outcomes[outcome] for outcomes in counts.values() for outcome in FAILURES)


def keep(sample, seed, number, result, out, nth):
    """The files of a failure as the reader left them, for the first ones of a kind."""
    if nth > KEPT:
        return None
    folder = out / result.outcome.replace(" ", "-") / f"{sample.reader.name}-{seed}-{number}"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(sample.sample, folder, ignore=_not_plain)
    return str(folder)


def _not_plain(folder, names):
    """Pipes and links: the words of the case say what stood there."""
    paths = [Path(folder, name) for name in names]
    return [path.name for path in paths if path.is_symlink() or not (path.is_file() or path.is_dir())]


def summary_of(out):
    """Failures of one kind, a line each, most frequent first."""
    path = out / "failures.jsonl"
    if not path.exists():
        return []
    groups = collections.Counter()
    example = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        key = (record["outcome"], record["reader"], record["detail"].partition(": ")[0][:100])
        groups[key] += 1
        example.setdefault(key, record["case"])
    return [f"{times:>6}  {' | '.join(key)}  (case {example[key]})" for key, times in groups.most_common(60)]


def main(argv=None):
    parser = ArgumentParser(
        prog="python -m tests.fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--n", type=positive_int, default=1500, help="cases (default 1,500)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reader", action="append", default=[], metavar="NAME", help="only this one; may be repeated")
    parser.add_argument("--minutes", type=float, help="stop after so long")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/fuzz"), help="folder of the failures (default runs/fuzz)"
    )
    parser.add_argument(
        "--commands", type=int, default=10, metavar="N", help="every N-th case through the command line; 0: none"
    )
    parser.add_argument("--case", type=int, help="only this case, in this process, with its error in full")
    parser.add_argument("--list", action="store_true", help="name the readers")
    args = parser.parse_args(argv)
    import torch

    torch.set_num_threads(1)
    readers, skipped = load_readers(args.reader)
    for reader in skipped:
        print(f"skipped   {reader.name}: needs {', '.join(reader.missing)}")
    if args.list:
        print("\n".join(reader.name for reader in readers))
        return 0
    if args.case is not None:
        return one_case(readers, args.seed, args.case, args.out)
    failed = fuzz(readers, count=args.n, seed=args.seed, minutes=args.minutes, out=args.out, commands=args.commands)
    print("\n".join(summary_of(args.out)))
    return 1 if failed else 0


def one_case(readers, seed, number, out):
    with samples(readers) as made_samples:
        for sample in made_samples:
            for by_command in (False, True)[: 1 + (sample.reader.command is not None)]:
                result = sample.run(seed, number, by_command=by_command)
                how = " by command" if by_command else ""
                print(f"{sample.reader.name}{how}: {result.outcome}\n  {result.damage}\n  {result.detail}")
            sample.damage(seed, number)
            shutil.rmtree(out / "case", ignore_errors=True)
            shutil.copytree(sample.sample, out / "case", symlinks=True)
            print(f"  files in {out / 'case'}")
            try:
                sample.reader.read(sample.sample)
            except Exception:
                import traceback

                traceback.print_exc()
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
