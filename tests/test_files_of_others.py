"""Foreign files: no option executes one, waits for one or fills the memory.

The options are those of the commands' parsers, so that a new one is seen: READS or NO_FILE must have it.
"""

import argparse
import bz2
import contextlib
import gzip
import importlib
import itertools
import json
import lzma
import os
import pickle
import re
import shlex
import shutil
import signal
import sys
import time
import traceback
from functools import partial
from pathlib import Path
from random import Random
from typing import NamedTuple, Optional

import pytest
import yaml

pytest.importorskip("torch", reason="most of these commands need torch")

from ipu_packed_bert import __main__ as packed_bert
from pack_data.cli import command
from pack_data.cli.command import run_main
from pack_data.lengths import packer_command
from tests import fine_tuning_files, tiny_runs

COMMANDS = dict(packed_bert.COMMANDS)

# What a refusal takes at most: processor time, time on the clock, bytes above what the process had.
SECONDS, WAITING, MEMORY = 30, 120, 200 << 20

# Lines of each option that takes a file or a folder. FILE is one that somebody else made, DIR/NAME a file in a folder
# that is given. The words "data", "run", "bert", "tuned", "ok.yml", "tuned.yml" are valid ones.
RUN = ("DIR/config.yml", "DIR/log.jsonl")
LENGTHS = ("FILE.csv", "FILE.npy", "FILE.txt", "FILE.lengths.gz", "FILE.lengths.xz", "FILE.lengths.bz2")
SEQUENCES = ("FILE", "FILE.jsonl", "FILE.jsonl.gz", "FILE.parquet", "FILE.tfrecord", "FILE.h5", "DIR/manifest.json")
SETTINGS_FILE = ("FILE.yml", "FILE")
WEIGHTS = ("DIR/config.json", "BERT/pytorch_model.bin", "BERT/model.safetensors", "BERT/vocab.txt")
TABLES = ("FILE.csv", "FILE.tsv.gz", "FILE.csv.xz", "FILE.jsonl", "FILE.jsonl.xz", "FILE.json")
# One reader has all of these; what it takes is given to the command `look`.
HISTOGRAMS = ("compare --packers none", "stream --sequences 100", "benchmark")
READS = {
    **{
        (name, "--config"): [f"{name} --config {file}{more}" for file in SETTINGS_FILE for more in mores]
        for name, mores in {
            "pretrain": ("", " --plan", " --show-config"),
            "finetune": ("", " --plan", " --show-config"),
            "plan": ("",),
            "ipu-check": ("",),
            "report": ("",),
        }.items()
    },
    **{
        (name, "--resume"): [f"{name} --resume {file}{more}" for file in RUN for more in ("", " --show-config")]
        for name in ("pretrain", "finetune", "plan")
    },
    **{
        (line.split()[0], "--histogram"): [
            f"{line} --max-sequence-length 512 --histogram {file}" for file in ("FILE.csv", "FILE.txt.xz")
        ]
        for line in HISTOGRAMS
    },
    ("report", "--histogram"): ["report --max-sequence-length 512 --histogram FILE.csv"],
    ("pack", "--histogram"): ["pack --packer spfhp --max-sequence-length 512 --histogram FILE.csv"],
    ("look", "what"): [
        *(f"look {file}" for file in (*LENGTHS, *SEQUENCES)),
        *(f"look --json {file}" for file in ("FILE.csv", "FILE.jsonl", *RUN)),
    ],
    ("verify", "what"): ["verify FILE", "verify FILE.json", "verify DIR/manifest.json"],
    ("verify", "--histogram"): ["verify recipe.json --histogram FILE.csv"],
    ("convert", "source"): [f"convert {file} out.jsonl" for file in SEQUENCES],
    ("build", "--from"): [f"build --max-sequence-length 64 --out out --from {file}" for file in SEQUENCES],
    ("build", "--corpus"): [
        f"build --max-sequence-length 64 --out out --corpus {file}"
        for file in ("FILE.txt", "FILE.txt.gz", "FILE.txt.xz", "FILE.jsonl", "DIR/FILE.txt")
    ],
    ("build", "--vocabulary"): ["build --max-sequence-length 64 --out out --corpus my.txt --vocabulary FILE.txt"],
    ("build", "--tokenizer"): ["build --max-sequence-length 64 --out out --corpus my.txt --tokenizer FILE.json"],
    ("build", "--recipe"): ["build --max-sequence-length 64 --out out --corpus my.txt --recipe FILE.json"],
    ("pretrain", "--data"): ["pretrain --config ok.yml --data DIR/manifest.json"],
    ("plan", "--data"): ["plan --config ok.yml --data DIR/manifest.json"],
    ("pretrain", "--start-from"): [f"pretrain --config ok.yml --data data --start-from {file}" for file in (*RUN,)],
    ("finetune", "--data-dir"): [
        f"finetune --config tuned.yml --set data.training=FILE{end} --data-dir DIR/FILE{end}{more}"
        for end in (".csv", ".csv.xz")
        for more in ("", " --plan")
    ],
    ("plan", "--trust-task"): ["plan --config tuned.yml --trust-task FILE.py"],
    ("finetune", "--trust-task"): ["finetune --config tuned.yml --show-config --trust-task FILE.py"],
    ("predict", "--trust-task"): ["predict run new.csv --trust-task FILE.py"],
    ("finetune", "--set"): [
        *(
            f"finetune --config tuned.yml --set data.training={file}{more}"
            for file in TABLES
            for more in ("", " --plan")
        ),
        *(f"finetune --config tuned.yml --set model.checkpoint={file}" for file in (*WEIGHTS, "FILE")),
        "finetune --config tuned.yml --set model.vocabulary=FILE.txt",
    ],
    ("pretrain", "--set"): [
        "pretrain --config ok.yml --data data --set data.evaluation_directory=DIR/manifest.json",
        "pretrain --config ok.yml --data out --set data.corpus=FILE.txt",
    ],
    ("predict", "run"): [f"predict {file} new.csv" for file in (*RUN, *WEIGHTS)],
    ("predict", "file"): [f"predict tuned {file}" for file in TABLES],
    ("export", "source"): [
        *(f"export {file} out" for file in RUN),
        *(f"export --import {file} out" for file in WEIGHTS),
    ],
    ("export", "--vocabulary"): ["export run out --vocabulary FILE.txt"],
    ("report", "--measured"): [f"report --measured {file}" for file in ("FILE.json", "FILE.pop", *RUN)],
    ("check-model", "--batch"): ["check-model nowhere --batch FILE.jsonl"],
}
# Options with a value that is no file to be read here: settings, names, and what is written.
NO_FILE = {
    ("plan", "--start-from"),  # of the command that it prints
    ("plan", "--data-dir"),  # as in finetune
    *((name, "--set") for name in ("plan", "predict", "ipu-check", "report")),  # the files of others, above
    *((name, "--allow-change") for name in ("pretrain", "plan", "finetune")),
    *((name, "--out") for name in "pretrain plan finetune ipu-check build look pack".split()),
    *((name, "--plot") for name in ("look", "compare", "stream", "report")),
    *((name, "--html") for name in ("report", "look")),
    ("compare", "--packers"),
    *((name, "--split") for name in "build convert look benchmark report compare stream pack verify".split()),
    *((name, "--synthetic") for name in "benchmark report compare stream pack".split()),
    ("predict", "--output"),
    ("export", "target"),
    ("check-model", "model"),  # Transformers reads it, of safetensors alone
    ("check-model", "--attention"),
    ("check-model", "--collator"),
    ("build", "--format"),
    ("build", "--json-field"),
    ("build", "--on"),
    ("build", "--task"),
    ("convert", "destination"),
    ("compare", "--csv"),
}


class _Seen(BaseException):
    pass


def parsers_of(name, monkeypatch):
    """The parsers of a command, as it makes them."""
    found = []

    def see(parser, *_):
        found.append(parser)
        raise _Seen

    with monkeypatch.context() as patched:
        patched.setattr(command.ArgumentParser, "parse_known_args", see)
        with pytest.raises(_Seen):
            if name == "pack":  # has the options of its packer
                packer_command.main("spfhp", [])
            importlib.import_module(COMMANDS[name].module).main([])
    return found


def takes_text(action):
    """Return True if an option keeps the name of any file."""
    if action.nargs == 0 or action.choices is not None:
        return False
    if isinstance(action, (argparse._HelpAction, argparse._VersionAction)):
        return False
    # --set and the options that are short for it have types of their own.
    if action.metavar in ("DIR", "FILE") or "--set" in action.option_strings:
        return True
    with contextlib.suppress(argparse.ArgumentTypeError, ValueError):
        return str((action.type or str)("FILE.txt")) == "FILE.txt"
    return False


def test_every_option_that_takes_a_file_is_here(monkeypatch):
    found = {
        (name, action.option_strings[-1] if action.option_strings else action.dest)
        for name in sorted(set(COMMANDS) - {"experiments"})  # those of evidence, on folders that they wrote
        for parser in parsers_of(name, monkeypatch)
        for action in parser._actions
        if takes_text(action)
    }
    assert len(found) > 60 and found - {*READS, *NO_FILE} == set()
    assert {*READS, *NO_FILE} - found == set()


class Ended(NamedTuple):
    status: Optional[int]  # None: stopped beyond a limit
    said: str  # on stderr
    seconds: float
    added: int  # bytes beyond what the process had


def watched(line, folder):
    """Runs a command line in a process that is forked off here, so that it begins with all modules loaded."""
    out = folder / "said"
    pid = os.fork()
    if not pid:
        status = 99
        try:
            os.chdir(folder)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.dup2(os.open(str(out), os.O_CREAT | os.O_TRUNC | os.O_WRONLY), 2)
            sys.stdin, sys.stdout, sys.stderr = (os.fdopen(number, mode) for number, mode in enumerate("rww"))
            Path("/proc/self/clear_refs").write_text("5")  # the highest memory is that of from now on
            status = run_main(packed_bert.main, shlex.split(line))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    started, begun, added, ended = time.monotonic(), None, 0, None
    while ended is None and added <= MEMORY and time.monotonic() - started <= WAITING:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        if sum(map(int, fields[11:13])) > SECONDS * os.sysconf("SC_CLK_TCK"):
            break
        sizes = dict(re.findall(r"(VmHWM|VmRSS):\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text()))
        if sizes:
            begun = begun or 1024 * int(sizes["VmRSS"])
            added = max(added, 1024 * int(sizes["VmHWM"]) - begun)
        done, raw = os.waitpid(pid, os.WNOHANG)
        if done:
            ended = os.WEXITSTATUS(raw) if os.WIFEXITED(raw) else -os.WTERMSIG(raw)
        time.sleep(0.005)
    if ended is None:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return Ended(ended, out.read_text(errors="replace"), time.monotonic() - started, added)


def with_files(line, folder, put):
    """The line with the places of the files that are given; None where `put` has none for them.

    put(path, word): makes the file of a word of READS at a path, and returns whether there is one.
    """
    given, words = folder / "given", []
    shutil.rmtree(given, ignore_errors=True)
    given.mkdir()
    shutil.rmtree(folder / "out", ignore_errors=True)
    for word in line.split():
        before, equals, value = word.rpartition("=")
        if value.startswith(("FILE", "DIR/", "BERT/")):
            top, _, inner = value.partition("/")
            path = given / top / inner if inner else given / top
            path.parent.mkdir(parents=True, exist_ok=True)
            if top == "BERT":
                shutil.copytree(folder / "bert", path.parent, dirs_exist_ok=True)
                for name in {inner, "model.safetensors" if inner == "pytorch_model.bin" else inner}:
                    (path.parent / name).unlink(missing_ok=True)
            if not path.exists() and not path.is_symlink() and not put(path, value):
                return None
            value = str(given / top)
        words.append(before + equals + value)
    return " ".join(words)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    """A folder with valid files, in which the commands run; their modules are loaded."""
    folder = tmp_path_factory.mktemp("scratch")
    for each in COMMANDS.values():
        importlib.import_module(each.module)
    import ipu_packed_bert.training.examples
    import ipu_packed_bert.training.predictions
    import ipu_packed_bert.training.pretraining  # noqa: F401

    tiny_runs.tiny_config(folder / "ok.yml", tiny_runs.tiny_data(folder / "data"))
    bert = fine_tuning_files.tiny_checkpoint(folder / "bert")
    table = fine_tuning_files.tiny_table(folder / "train.csv", "single_label", texts=16)
    config = fine_tuning_files.tiny_config(bert, table, task="single_label", run={"epochs": 1})
    (folder / "tuned.yml").write_text(config.to_yaml())
    fine_tuning_files.tiny_fine_tuned(folder / "tuned", "single_label")
    (folder / "new.csv").write_text("text\nriver stone\n")
    (folder / "my.txt").write_text("The river is here. The stone is there.\n\nA castle.\n" * 40)
    for line in (
        "pretrain --config ok.yml --out run --set run.steps=2",
        "pack --packer optimal --histogram squad_1_1_384 --out recipe.json",
    ):
        assert watched(line, folder).status == 0
    return folder


OPENERS = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
# A text may have lines of any length; it is cut, and read to its end.
READ_TO_THE_END = [
    (f"build --max-sequence-length 64 --out out --corpus {name}", "line") for name in ("FILE.txt", "DIR/FILE.txt")
]


@pytest.fixture(scope="module")
def endless(tmp_path_factory):
    """put(kind) for `with_files`: a pipe, a device, a line of 1 GB, or more than MEMORY in a few kB."""
    folder = tmp_path_factory.mktemp("endless")
    with open(folder / "line", "wb") as file:
        file.write(b"7,")
        file.truncate(1 << 30)
    block = {"FILE.lengths": b"7\n" * 500_000, "FILE": (b"river stone " * 80 + b",1\n") * 1_000}
    for (name, rows), (ending, opened) in itertools.product(block.items(), OPENERS.items()):
        with opened(folder / f"{name}{ending}", "wb") as file:
            file.write(rows)
        once = (folder / f"{name}{ending}").read_bytes()
        with open(folder / f"{name}{ending}", "wb") as file:
            file.writelines([once] * (MEMORY // len(rows) + 20))

    def of_kind(kind):
        def put(path, word):
            if kind == "pipe":
                os.mkfifo(path)
            elif kind == "device":
                path.symlink_to("/dev/zero")
            elif (kind == "bomb") == (path.suffix in OPENERS):
                name = "FILE.lengths" if ".lengths" in word else "FILE"
                os.link(folder / (name + path.suffix if kind == "bomb" else "line"), path)
            return path.is_symlink() or path.exists()

        return put

    return of_kind


def options_and_lines():
    """Return each option with one of its lines, drawn, and, for the slow tier, with all the others."""
    random = Random(0)
    cases = []
    for option, lines in READS.items():
        drawn = random.choice(lines)
        cases.append(pytest.param(option, [drawn], id=" ".join(option)))
        others = [line for line in lines if line != drawn]
        if others:
            cases.append(pytest.param(option, others, marks=pytest.mark.slow, id=" ".join([*option, "others"])))
    return pytest.mark.parametrize("option, lines", cases)


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="needs Linux")
@options_and_lines()
def test_no_file_is_waited_for_or_fills_the_memory(scratch, endless, option, lines):
    tried = 0
    for template, kind in itertools.product(lines, ("pipe", "device", "line", "bomb")):
        line = with_files(template, scratch, endless(kind))
        if line is None or (template, kind) in READ_TO_THE_END:
            continue
        ended = watched(line, scratch)
        tried += 1
        *_, last = ended.said.splitlines() or [""]
        if "--plan" in line and ended.status in (0, 1):  # files of data need not be there
            continue
        assert ended.status == 2 and ended.said.count("error: ") == 1, (kind, line, ended)
        assert last.startswith("error: ") and str(scratch / "given") in last, (kind, line, ended)
    assert tried >= 2


OWN = """
from pathlib import Path
Path(MARKER).write_text("a file was run")
from ipu_packed_bert.settings.finetuning import TokensConfig
from ipu_packed_bert.tasks.tokens import TokensTask

class X(TokensTask):
    settings = TokensConfig
"""


class Runs:
    """An object whose pickle runs a command."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {shlex.quote(str(self.marker))}",)


@pytest.fixture(scope="module")
def evil(scratch):
    """put(task) for `with_files`: a file of each kind that leaves a marker where something runs it, or what it names.

    task: how it names the file of Python, which lies in the folder of the commands and in that of the file.
    """
    import numpy as np
    import torch

    marker = scratch / "marker"
    (scratch / "e.py").write_text(OWN.replace("MARKER", repr(str(marker))))
    words = fine_tuning_files.training_file(scratch, "tokens")
    (scratch / "new.conll").write_bytes(words.read_bytes())
    training = {"task": "tokens", "run": {"epochs": 1}}
    tuned = yaml.safe_load(fine_tuning_files.tiny_config(scratch / "bert", words, **training).to_yaml())
    with pytest.MonkeyPatch.context() as patched:  # a run of somebody who trusts the file
        patched.setenv("XDG_STATE_HOME", str(scratch / "another"))
        tuned["task"]["name"] = f"{scratch / 'e.py'}:X"
        (scratch / "own.yml").write_text(yaml.safe_dump(tuned))
        ended = watched("finetune --config own.yml --out own --trust-task e.py", scratch)
        assert ended.status == 0 and marker.exists(), ended
    marker.unlink()
    pickled = pickle.dumps(Runs(marker))

    def put(path, word, task):
        (path.parent / "e.py").write_bytes((scratch / "e.py").read_bytes())
        named = {**tuned, "task": {**tuned["task"], "name": task}}
        top, _, inner = word.partition("/")
        if top == "DIR":
            shutil.copytree(scratch / "own", path.parent, dirs_exist_ok=True)
            (path.parent / "config.yml").write_text(yaml.safe_dump(named))
        if path.suffix in ("", ".yml"):
            path.write_text(yaml.safe_dump(named))
        elif path.suffix == ".npy":
            np.save(path, np.array([Runs(marker)], object), allow_pickle=True)
        elif path.suffix == ".pt":
            torch.save({"model": Runs(marker)}, path)
        elif path.suffix == ".bin":
            torch.save({"bert.embeddings": Runs(marker)}, path)
        elif path.suffix == ".json":
            classes = {"AutoConfig": "e.X", "AutoModel": "e.X", "AutoTokenizer": "e.X"}
            about = {"model_type": "own", "architectures": ["X"], "auto_map": classes, "settings": named}
            path.write_text(json.dumps({**about, "update_cycles": 1e6}))
        elif path.suffix == ".csv":
            path.write_text(f"# task.name: {task}\nipu,class,cycles\n,,1000000\n")
        elif path.suffix == ".py":
            path.write_text("raise SystemExit('only named, and not run')")
        else:
            path.write_bytes(pickled)
        return True

    return marker, put


@options_and_lines()
def test_no_file_is_run_that_the_user_did_not_name(scratch, evil, option, lines):
    marker, put = evil
    for template, task in itertools.product(lines, (f"{scratch / 'e.py'}:X", "e.py:X")):
        line = with_files(template, scratch, partial(put, task=task))
        ended = watched(line, scratch)
        assert ended.status is not None and not marker.exists(), (line, ended)
    for code in ("!!python/object/apply:os.system ['touch marker']", "!!python/name:e.X"):
        (scratch / "code.yml").write_text(f"task: {code}")
        if option[1] == "--config":
            assert watched(f"{option[0]} --config code.yml", scratch).status == 2 and not marker.exists()


def test_the_refusal_says_how_to_trust_and_what_is_trusted_runs_until_it_is_changed(scratch, evil):
    marker, _ = evil
    (scratch / "e2.py").write_text((scratch / "e.py").read_text() + "# another\n")
    (scratch / "own2.yml").write_text((scratch / "own.yml").read_text().replace("e.py:X", "e2.py:X"))
    lines = [
        *(f"{name} --config own2.yml{more}" for name, more in (("plan", ""), ("finetune", " --show-config"))),
        "predict own new.conll",
        "finetune --resume own --show-config",
    ]
    for line, file in zip(lines, ("e2.py", "e2.py", "e.py", "e.py")):
        ended = watched(line, scratch)
        assert (ended.status, ended.said.count("error: "), marker.exists()) == (2, 1, False), ended
        assert f"add --trust-task {scratch / file}" in ended.said
    try:
        for line in (
            "plan --config own2.yml --trust-task e2.py",
            lines[0],  # as it was trusted before
            f"predict own new.conll --set task.name={scratch / 'e.py'}:X",
            "finetune --resume own --show-config",
        ):
            assert watched(line, scratch).status == 0 and marker.exists(), line
            marker.unlink()
        (scratch / "e2.py").write_text((scratch / "e2.py").read_text() + "# changed\n")
        ended = watched(lines[0], scratch)
        assert ended.status == 2 and "changed since" in ended.said and not marker.exists()
    finally:
        shutil.rmtree(os.environ["XDG_STATE_HOME"])
