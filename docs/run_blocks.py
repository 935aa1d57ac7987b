"""Run the code blocks of README.md, CONTRIBUTING.md and docs/; CONTRIBUTING.md describes their marks.

    python docs/run_blocks.py [PAGE ...]

The blocks of a page run in order: Python blocks in one process, each `sh` block in its own shell, which ends at the
first line that fails. They run in a scratch directory with links to the files of the checkout, its own data/ and
runs/, and texts in my_texts/. Two pages run at a time.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

ROOT = Path(__file__).resolve().parents[1]
RUN = ("sh", "python")
SHOWN = ("text", "yaml", "json", "toml", "mermaid")
# Seconds until a page is stopped, because a block might wait for ever.
LONGEST_PAGE = 1200
# Directories that every page creates for itself.
OWN = ("build", "data", "runs")

_FENCE = re.compile(r"( *)(`{3,}|~{3,})\s*([^\s`]*)[^`]*$")
_COMMENT = re.compile(r"<!--(.*?)-->\s*$", re.S)
_LIST = re.compile(r" {0,3}([-*+]|\d+[.)]) ")


class Block(NamedTuple):
    """A block of a page, visible or in a comment."""

    page: str
    line: int  # first line of code, from 1
    language: str
    code: str
    not_run: Optional[str] = None  # the reason
    status: int = 0  # expected exit status
    hidden: bool = False  # in a comment

    @property
    def place(self) -> str:
        """Page and line of the block."""
        return f"{self.page}:{self.line}"


def blocks_of(text: str, page: str) -> List[Block]:
    """Return the blocks of a page in order; raise ValueError for an unknown language or mark."""
    blocks: List[Block] = []
    mark: Dict[str, Any] = {}
    mark_line = 0
    for line, kind, indent, language, code in _pieces(text, page):
        if kind == "text":
            if mark and code.strip():
                raise ValueError(
                    f"{page}:{mark_line}: this mark stands above text; put it right above its block"
                )
        elif kind == "comment":
            first = re.match(r"\s*first \((\w+)\):\n(.*)", code, re.S)
            new_mark = {} if first else _mark(code, f"{page}:{line}")
            if first:
                if first.group(1) not in RUN:
                    raise ValueError(
                        f"{page}:{line}: first ({first.group(1)}); must be one of {', '.join(RUN)}"
                    )
                blocks.append(Block(page, line + 1, first.group(1), first.group(2), hidden=True))
            elif new_mark:
                mark = new_mark
                mark_line = line
        else:
            if language in RUN:
                blocks.append(Block(page, line, language, _without_indent(code, indent), **mark))
            else:
                _check_shown(language, mark, f"{page}:{line}")
            mark = {}
    if mark:
        raise ValueError(f"{page}:{mark_line}: this mark stands above no block")
    return blocks


def _mark(comment: str, place: str) -> Dict[str, Any]:
    """Return the fields of Block that a comment sets; raise ValueError for a misspelt mark."""
    reason = re.match(r"\s*not run: *(\S.*?)\s*$", comment)
    if reason:
        return {"not_run": reason.group(1)}
    status = re.match(r"\s*ends with (\d+)\s*$", comment)
    if status:
        return {"status": int(status.group(1))}
    if re.match(r"\s*(not run|first|ends with)\b", comment):
        raise ValueError(
            f"{place}: no such mark; use `not run: REASON`, `ends with STATUS`, `first (sh):` or `first (python):`"
        )
    return {}


def _without_indent(code: str, indent: int) -> str:
    lines = [line if line[:indent].strip() else line[indent:] for line in code.splitlines()]
    return "\n".join(lines) + "\n"


def _check_shown(language: str, mark: Dict[str, Any], place: str) -> None:
    if not language.startswith("{") and language not in SHOWN:
        raise ValueError(
            f"{place}: a block of language {language!r}; must be fenced, with one of {', '.join(RUN)} (run) or "
            f"{', '.join(SHOWN)} (only shown)"
        )
    if mark:
        raise ValueError(f"{place}: a block of {language} is never run; remove its mark")


def _pieces(text: str, page: str) -> Iterator[Tuple[int, str, int, str, str]]:
    """Yield (first line, "text" | "comment" | "block", indentation, language, content) in the order of the page."""
    lines = text.splitlines()
    at = 0
    in_list = False
    blank = True
    while at < len(lines):
        line, start = lines[at], at
        fence = _FENCE.match(line)
        if fence:
            closing = re.compile(rf" *{fence.group(2)[0]}{{{len(fence.group(2))},}}\s*$")
            at += 1
            while at < len(lines) and not closing.match(lines[at]):
                at += 1
            if at == len(lines):
                raise ValueError(f"{page}:{start + 1}: this block has no end")
            yield (
                start + 2,
                "block",
                len(fence.group(1)),
                fence.group(3),
                "\n".join(lines[start + 1 : at]),
            )
        elif line.lstrip().startswith("<!--"):
            while at < len(lines) - 1 and "-->" not in lines[at]:
                at += 1
            comment = _COMMENT.match("\n".join(lines[start : at + 1]).strip())
            if not comment:
                raise ValueError(
                    f"{page}:{start + 1}: a comment must end with --> at the end of its line"
                )
            yield start + 1, "comment", 0, "", comment.group(1)
        elif line.startswith("    ") and blank and not in_list and line.strip():
            yield start + 1, "block", 4, "", line
        else:
            if line.strip() and not line.startswith("  "):
                in_list = bool(_LIST.match(line))
            yield start + 1, "text", 0, "", line
        blank = not lines[at].strip()
        at += 1


# ---------------------------------------------------------------------------------------------- one page, in a process


def run_page(blocks: Sequence[Block]) -> Iterator[Tuple[Block, float]]:
    """Run the blocks in this directory in order and yield each with its seconds; raise SystemExit if one fails."""
    names: Dict[str, Any] = {"__name__": "__main__"}
    for block in blocks:
        if block.not_run:
            continue
        started = time.perf_counter()
        print(f"--- {block.place}", flush=True)
        if block.language == "sh":
            done = subprocess.run(["bash", "-e", "-o", "pipefail", "-c", block.code])
            if done.returncode != block.status:
                raise SystemExit(
                    f"{block.place}: ended with {done.returncode}, not {block.status}:\n{block.code}"
                )
        else:
            try:
                # Empty lines before the code, so that a traceback names the line of the page.
                exec(compile("\n" * (block.line - 1) + block.code, block.page, "exec"), names)
            except BaseException:
                raise SystemExit(
                    f"{traceback.format_exc()}\n{block.place}: failed:\n{block.code}"
                ) from None
        sys.stdout.flush()
        yield block, time.perf_counter() - started


def run_one(page: str, results: str) -> None:
    """Run a page in this directory and write the seconds of its blocks; the main function of its process."""
    took: List[Tuple[str, int, float]] = []
    try:
        for block, seconds in run_page(blocks_of((ROOT / page).read_text(encoding="utf-8"), page)):
            took.append((block.place, block.hidden, seconds))
    finally:
        Path(results).write_text(json.dumps(took), encoding="utf-8")


# --------------------------------------------------------------------------------------------------------- all of them


class Page(NamedTuple):
    """The result of a page."""

    name: str
    failed: str  # the output, or "" if nothing failed
    seconds: float
    took: List[Tuple[str, bool, float]]  # of each block: place, hidden, seconds


def scratch_environment() -> Dict[str, str]:
    """Return an environment with this Python's commands first, the checkout's modules, one thread, and no network."""
    commands = [
        str(Path(sys.executable).parent),
        str(ROOT / ".venv" / "bin"),
        os.environ.get("PATH", os.defpath),
    ]
    return {
        **os.environ,
        "PATH": os.pathsep.join(commands),
        "PYTHONPATH": str(ROOT),
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
        "MPLBACKEND": "Agg",
        "HF_HUB_OFFLINE": "1",
    }


def write_texts(folder: Path) -> None:
    """Write 300 documents of an invented language with sentences, always the same."""
    folder.mkdir()
    draw = random.Random(0)
    words = [
        f"{first}{second}"
        for first in "ba ke li mo nu ra se ti vo zu".split()
        for second in "n r s t l".split()
    ]
    for number in range(300):
        sentences = [
            draw.choices(words, weights=range(len(words), 0, -1), k=draw.randint(3, 20))
            for _ in range(12)
        ]
        text = "\n".join(" ".join(sentence).capitalize() + "." for sentence in sentences)
        (folder / f"{number:03}.txt").write_text(text, encoding="utf-8")


def run_in_scratch(page: str) -> Page:
    """Run a page in its own directory and process."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="blocks-") as folder:
        scratch, results, output = (
            Path(folder, "page"),
            Path(folder, "took.json"),
            Path(folder, "output"),
        )
        scratch.mkdir()
        for entry in ROOT.iterdir():
            if entry.name not in OWN and (not entry.name.startswith(".") or entry.name == ".venv"):
                (scratch / entry.name).symlink_to(entry)
        write_texts(scratch / "my_texts")
        command = [sys.executable, "-u", str(Path(__file__).resolve()), "--one", str(results), page]
        with output.open("w") as file:
            process = subprocess.Popen(
                command,
                cwd=str(scratch),
                env={**scratch_environment(), "XDG_STATE_HOME": str(Path(folder, "state"))},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status = process.wait(timeout=LONGEST_PAGE)
            except BaseException as error:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                status = 124
        printed = output.read_text(errors="replace")
        took = json.loads(results.read_text()) if results.exists() else []
    failed = ""
    if status:
        failed = printed + (f"{page}: stopped after {LONGEST_PAGE} s\n" if status == 124 else "")
    return Page(page, failed, time.perf_counter() - started, took)


def all_pages() -> List[str]:
    """Return README.md, CONTRIBUTING.md and every page below docs/, relative to the root."""
    return ["README.md", "CONTRIBUTING.md"] + sorted(
        str(page.relative_to(ROOT)) for page in ROOT.glob("docs/**/*.md")
    )


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("pages", nargs="*", help="pages to run (default: all)")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--slowest", type=int, default=5, help="number of slowest blocks to print")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.one:
        run_one(options.pages[0], options.one)
        return 0
    pages = [
        os.path.relpath(os.path.abspath(page), str(ROOT)) for page in options.pages
    ] or all_pages()
    started = time.perf_counter()
    try:
        blocks = [
            block
            for page in pages
            for block in blocks_of((ROOT / page).read_text(encoding="utf-8"), page)
        ]
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    # The pages that have most to run first.
    work = Counter(block.page for block in blocks if not block.not_run)
    failed, took = [], []
    with ThreadPoolExecutor(options.processes) as pool:
        for done in pool.map(run_in_scratch, sorted(work, key=lambda page: -work[page])):
            took += done.took
            shown = sum(not hidden for _, hidden, _ in done.took)
            print(
                f"{done.name:<34} {shown:>3} blocks {done.seconds:>6.1f} s{'  FAILED' * bool(done.failed)}",
                flush=True,
            )
            if done.failed:
                failed.append(done.name)
                print(done.failed, file=sys.stderr, flush=True)
    shown = [place for place, hidden, _ in took if not hidden]
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(
        f"{len(shown)} blocks of {len(work)} pages run in {time.perf_counter() - started:.0f} s, "
        f"{used.ru_utime + used.ru_stime:.0f} s of processor time; not run:"
    )
    for reason, number in Counter(block.not_run for block in blocks if block.not_run).most_common():
        print(f"  {number:>3}  {reason}")
    slowest = sorted(took, key=lambda each: -each[2])[: options.slowest]
    print("slowest: " + ", ".join(f"{place} {seconds:.1f} s" for place, _, seconds in slowest))
    if failed:
        print(f"error: {', '.join(failed)}: a block failed", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
