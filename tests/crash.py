"""Power cuts: every state that one may leave of a piece of work, and the same command again.

    python -m tests.crash build --states 400 [--seed S]        # also: train, convert, all
    python -m tests.crash all --first 5000                      # 5,000 states of each, after those of an earlier run

The work of `tests.kills` runs once in this process. Before each call that syncs, renames or removes something, the
program takes a picture of the directory. A power cut at that moment leaves

  names     of a directory as they were at its last sync, or at any later moment ("strict": each directory by itself,
            as POSIX allows; "ordered": all directories of the same moment, and a file's sync also keeps its own name,
            as ext4, xfs and btrfs do)
  contents  of a file as they were at its last sync, or whole, cut in half, or zeros

Each state is put in place of the work, which is then done again: the result must be the undisturbed one, or the work
is refused with an instruction, and following it leads to that result. The number of a state and the seed name it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import shutil
import sys
import time
from pathlib import Path
from typing import Dict, List, NamedTuple
from unittest import mock

from pack_data.cli.command import ArgumentParser, positive_int, run_main
from tests.kills import DRIVES, differences, in_child, load_all, memory_folder, wait

HOOKED = ("fsync", "replace", "rename", "unlink", "rmdir")
MODELS = ("ordered", "strict")
# What the program tells its user to do.
REMOVE = re.compile(r"remove (?:the directory )?(/\S+?)[\s;,)]")


class Moment(NamedTuple):
    """The disk at a moment: what each inode holds, what of that is synced, and the moments of the last syncs."""

    listings: Dict[int, Dict[str, int]]  # directory -> name -> inode
    contents: Dict[int, bytes]
    synced: Dict[int, bytes]
    synced_listings: Dict[int, int]  # directory -> the moment of its last sync, or else of its first appearance
    last_sync: int  # the moment of the last sync of anything


class Recorder:
    """Every moment of a piece of work in a directory."""

    def __init__(self, root):
        self._root = root
        self.inode = root.stat().st_ino
        self.moments = []
        self._synced = {}
        self._synced_listings = {}
        self._last_sync = 0
        self._known = {}
        self.picture()
        # What is there before the work is synced.
        self._synced.update(self.moments.pop().contents)
        self.picture()

    def picture(self):
        """Add the present moment."""
        listings = {}
        contents = {}
        for folder, folders, files in os.walk(self._root):
            inodes = {name: os.stat(os.path.join(folder, name)) for name in folders + files}
            listings[os.stat(folder).st_ino] = {name: status.st_ino for name, status in inodes.items()}
            for name in files:
                status = inodes[name]
                key = (status.st_ino, status.st_mtime_ns, status.st_size)
                if key not in self._known:
                    self._known[key] = Path(folder, name).read_bytes()
                contents[status.st_ino] = self._known[key]
        now = len(self.moments)
        self._synced = {inode: content for inode, content in self._synced.items() if inode in contents}
        before = self.moments[-1].listings if self.moments else {}
        self._synced_listings.update({inode: now for inode in listings if inode not in before})
        self.moments.append(
            Moment(listings, contents, dict(self._synced), dict(self._synced_listings), self._last_sync)
        )

    @contextlib.contextmanager
    def recording(self):
        """Take a picture before each call in the block that changes what a power cut leaves."""
        with contextlib.ExitStack() as patches:
            for name in HOOKED:
                original = getattr(os, name)

                def hooked(*args, _original=original, _name=name, **kwargs):
                    self.picture()
                    result = _original(*args, **kwargs)
                    if _name == "fsync":
                        self._sync(args[0])
                    else:  # the number of a removed file may be that of the next one
                        self.picture()
                    return result

                patches.enter_context(mock.patch.object(os, name, hooked))
            yield
        self.picture()

    def _sync(self, descriptor):
        path = Path(os.path.realpath(f"/proc/self/fd/{descriptor}"))
        if path != self._root and self._root not in path.parents:
            return
        self._last_sync = len(self.moments)
        if path.is_dir():
            self._synced_listings[path.stat().st_ino] = len(self.moments)
        else:
            self._synced[path.stat().st_ino] = path.read_bytes()


def state(recorder, seed):
    """Draw what a power cut leaves: each path with the bytes of a file, or None of a directory."""
    rng = random.Random(seed)
    moments = recorder.moments
    now = rng.randrange(len(moments))
    at = moments[now]
    model = rng.choice(MODELS)
    seen = rng.randint(min(at.last_sync, now), now)
    # Most power cuts lose all that is not synced, or nothing of it.
    share_of_now = rng.choice((0.0, 0.5, 1.0))
    left = {"": None}
    waiting = [("", recorder.inode)]
    while waiting:
        folder, number = waiting.pop()
        if model == "strict":
            last_sync = min(at.synced_listings[number], now)
            existing = [moment for moment in range(last_sync, now + 1) if number in moments[moment].listings]
            seen = existing[-1] if rng.random() < share_of_now else rng.choice(existing)
        for name, inode in moments[seen].listings[number].items():
            path = f"{folder}/{name}".lstrip("/")
            if inode in moments[seen].listings:
                left[path] = None
                waiting.append((path, inode))
            else:
                # A file that was removed since is as it was.
                disk = at if inode in at.contents else moments[seen]
                left[path] = content_left(disk.contents[inode], disk.synced.get(inode, b""), rng)
    return left


def content_left(content, synced, rng):
    """Draw what a power cut leaves of a file."""
    # What was appended cannot take the synced bytes before it away.
    kept = synced if content.startswith(synced) else b""
    tail = content[len(kept) :]
    return rng.choice((synced, content, kept + tail[: len(tail) // 2], kept + bytes(len(tail))))


def put(left, root):
    """Make the directory what is left."""
    shutil.rmtree(root)
    root.mkdir()
    for path, content in sorted(left.items()):
        if content is None:
            (root / path).mkdir(exist_ok=True)
        else:
            (root / path).write_bytes(content)


class Tried(NamedTuple):
    """Result of the states of a piece of work."""

    moments: int
    states: int
    refused: int  # with an instruction that leads to the result
    wrong: List[str]


def again(one, root, output):
    """Do the work in a child; return its exit status and what it printed."""

    def work():
        file = open(output, "w", buffering=1)  # noqa: SIM115 (until the child ends)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        sys.stdout = sys.stderr = file  # pytest has put others there
        return one.work(root)

    status = wait(in_child(work), None)
    assert status is not None
    return status, output.read_text(errors="replace")


def try_states(name, folder, *, states, seed, first=0):
    """Yield the result after each state, from number `first` on."""
    drive = DRIVES[name]
    root = folder / "work"
    root.mkdir(parents=True)
    drive.prepare(root)
    recorder = Recorder(root)
    with contextlib.ExitStack() as stack:
        silent = stack.enter_context(open(os.devnull, "w"))
        stack.enter_context(contextlib.redirect_stdout(silent))
        stack.enter_context(contextlib.redirect_stderr(silent))
        stack.enter_context(recorder.recording())
        assert drive.work(root) in (0, None), "the undisturbed work fails"
    calm = drive.result(root)
    refused = 0
    wrong = []
    for number in range(first, first + states):
        left = state(recorder, f"{seed} {name} {number}")
        put(left, root)
        story = f"{name}, seed {seed}, state {number}"
        try:
            drive.holds(root)
            status, text = again(drive, root, folder / "output")
            steps = 0
            while status == 2 and steps < 3:
                refused += not steps
                steps += 1
                advised = REMOVE.search(text)
                assert advised, f"refused without an instruction: {text[-300:]}"
                path = Path(advised.group(1))
                assert path.exists(), f"{path} is to be removed, which is not there: {text[-300:]}"
                shutil.rmtree(path) if path.is_dir() else path.unlink()
                status, text = again(drive, root, folder / "output")
            assert status == 0, f"exit status {status}: {text[-300:]}"
            result = drive.result(root)
            assert result == calm, f"another result: {differences(calm, result)}"
        except (AssertionError, ValueError, OSError) as error:
            wrong.append(f"{story}: {type(error).__name__}: {' '.join(str(error).split())[:400]}")
        yield Tried(len(recorder.moments), number + 1 - first, refused, wrong)


def main(argv=None):
    parser = ArgumentParser(
        prog="python -m tests.crash", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=(*DRIVES, "all"))
    parser.add_argument("--states", type=positive_int, default=5000, help="of each piece of work (default 5,000)")
    parser.add_argument("--first", type=int, default=0, help="the number of the first state (default 0)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    load_all()
    failed = False
    for name in DRIVES if args.what == "all" else [args.what]:
        spoken = time.monotonic()
        tried = Tried(0, 0, 0, [])
        reported = 0
        with memory_folder(f"crash-{name}-") as folder:
            for tried in try_states(name, folder, states=args.states, seed=args.seed, first=args.first):
                for line in tried.wrong[reported:]:
                    print(f"wrong: {line}", flush=True)
                reported = len(tried.wrong)
                if time.monotonic() - spoken > 30:
                    spoken = time.monotonic()
                    print(f"{name:<9} {tried.states:,} states, {reported} wrong", flush=True)
        print(
            f"{name:<9} {tried.states:,} states of {tried.moments:,} moments, {tried.refused:,} refused with an "
            f"instruction that helps, {len(tried.wrong)} wrong",
            flush=True,
        )
        failed |= bool(tried.wrong)
    return int(failed)


if __name__ == "__main__":
    sys.exit(run_main(main))
