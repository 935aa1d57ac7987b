"""The output of the 16 commands on tiny data: recorded in `tests/golden`, compared by `tests/test_transcripts.py`.

    make golden                                # record all again; review shows the difference
    python -m tests.transcripts --to DIRECTORY # write them somewhere else

Times, rates, losses, versions and paths become words such as `<seconds>`, so that every machine gives the same text.
"""

import argparse
import contextlib
import io
import os
import re
import shlex
import sys
import tempfile
from pathlib import Path
from unittest import mock

import yaml

from ipu_packed_bert.__main__ import main as packed_bert
from ipu_packed_bert.benchmarks import ipu_updates
from pack_data.cli.command import run_main
from pack_data.text.vocabulary import SPECIAL_TOKENS
from tests.fakes import pva
from tests.fakes.sdk import installed
from tests.fine_tuning_files import tiny_checkpoint, tiny_table
from tests.pack_data.text_corpus import write_corpus
from tests.tiny_runs import VOCABULARY, tiny_config, tiny_data, tiny_settings

GOLDEN = Path(__file__).resolve().parent / "golden"

_OPTIONS = "--max-sequence-length 64 --vocabulary-size 200 --held-out 0.2 --workers 1"
_TASK = "--set model.checkpoint=bert --set data.max_sequence_length=64 --set task.label_column=label"
_FILES = "--set data.training=train.csv --set data.evaluation=train.csv"
# Transcript -> the commands typed in one directory, which keeps the files of the transcripts above.
SESSIONS = {
    "pack": [
        "pack --histogram squad_1_1_384 --out recipe.json",
        "pack --packer spfhp --histogram squad_1_1_384 --max-sequences-per-pack unlimited",
    ],
    "build": [f"build --corpus texts --out set {_OPTIONS}"],
    "verify": ["verify set", "verify recipe.json"],
    "convert": ["convert tokens.jsonl tokens.parquet"],
    "look": ["look set", "look squad_1_1_384"],
    "compare": ["compare --histogram squad_1_1_384 --packers none,spfhp,optimal --depths 1,3"],
    "stream": ["stream --synthetic uniform:max=64,n=2000 --max-sequence-length 64"],
    "plan": ["plan --config tiny.yml", "plan --config ipu.yml"],
    "pretrain": ["pretrain --config tiny.yml --out run", "pretrain --resume run"],
    "finetune": [f"finetune --config finetune_banking77_packed {_TASK} {_FILES} --set run.epochs=1 --out tuned"],
    "predict": ["predict tuned train.csv --output answers.csv"],
    "export": ["export run hf --vocabulary vocab.txt"],
    "check-model": ["check-model hf"],
    "benchmark": ["benchmark --size tiny --histogram data --rounds 1 --packs 4 --vocabulary-size 200"],
    "report": ["report --config ipu.yml --histogram data --table breakdown", "report --table points"],
    "ipu-check": ["ipu-check --config ipu.yml --out check"],
}

_NUMBER = r"\d[\d,]*(?:\.\d+)?"
# Pattern -> word. Spaces before a number go with it: they depend on its width.
_WORDS = {
    rf" *\b{_NUMBER} {{1,2}}(?:ms|s|min)\b": " <seconds>",
    rf" *\b{_NUMBER} (?:seq|tok|sequences|tokens)/s": " <rate>",
    r"Python 3[\d.]+, torch [\w.+]+": "<versions>",
    r"(?m)^.*: \d+ of \d+ \w+(?:,.*)?\n": "",  # progress
    r" +<seconds> left": "",
}
# Blanks depend on the width of measured numbers, and so do the places where a line is broken.
_WRAPPED = {r"\n {11,}": " ", r"(?m)^(  \S+(?: \S+)*)  +": r"\1  "}
# Transcript -> further patterns: measured columns of its tables, and numbers that another processor rounds otherwise.
_MEASURED = {
    "compare": {r"(?m) +\d\.\d{3} +\d+\.\d$": " <seconds> <MiB>"},
    "stream": {r"(?m) +[\d,]+\.\d$": " <rate>"},
    "pretrain": {**_WRAPPED, r" *\b\d+\.\d{3}\b(?: +\d+\.\d%)?": " <number>", r"(?<=  )\d[\d,]*\.\d\b%?": "<number>"},
    "finetune": {**_WRAPPED, r" *\b\d[\d,]*\.\d+\b%?": " <number>"},
    "predict": {r" *\b\d[\d,]*\.\d+\b%?": " <number>"},
    "ipu-check": {**_WRAPPED, r"  +": "  ", r" *\b\d[\d,]*[.,]\d+%?": " <number>"},
    "check-model": {r" *\b\d[\d.e-]*\b": " <number>"},
    "benchmark": {
        r" *\b\d[\d,]*\.\d+\b": " <number>",
        r"HF \d \w+": "HF <fastest>",
        r"(?m)^ +.* cores, .*$": "  <machine>",
        r"(?s)  On [^,]+,.*?model": "  On <machine>, <comparison>, model",
    },
}


def _write_files():
    """Write the files that the commands name into the current directory."""
    write_corpus(Path("texts"), 20)
    tiny_data(Path("data"))
    tiny_config(Path("tiny.yml"), Path("data"))
    tiny_checkpoint(Path("bert"))
    tiny_table(Path("train.csv"), "single_label")
    words = [f"word{number}" for number in range(VOCABULARY - len(SPECIAL_TOKENS))]
    Path("vocab.txt").write_text("\n".join([*SPECIAL_TOKENS, *words]))
    Path("tokens.jsonl").write_text('{"input_ids": [2, 7, 3]}\n{"input_ids": [2, 3]}\n')
    settings = tiny_settings(Path("data"))
    settings["engine"] = {"kind": "ipu", "half_weights": False}
    settings["placement"] = {
        "replicas": 2,
        "ipus_per_replica": 2,
        "layers_per_ipu": [1, 1],
        "available_memory_proportion": [0.2, 0.2],
        "replicated_tensor_sharding": True,
    }
    settings["batch"] = {"micro_batch": 1, "gradient_accumulation": 40}
    Path("ipu.yml").write_text(yaml.safe_dump(settings))


def _masked(text, name):
    text = text.replace(os.getcwd(), "<dir>").replace(sys.executable, "python")
    for pattern, word in {**_WORDS, **_MEASURED.get(name, {})}.items():
        text = re.sub(pattern, word, text)
    return text


def _transcript(name):
    """Run the commands of a transcript in this process; return what was typed, printed and returned."""
    parts = []
    for command in SESSIONS[name]:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            status = run_main(packed_bert, shlex.split(command))
        parts.append(f"$ packed-bert {command}\n{_masked(printed.getvalue(), name)}[exit status {status}]\n")
    return "\n".join(parts)


def _install_stand_ins(stack, folder):
    """Stand in for PopTorch and PopVision's library, and make two updates where ipu-check makes ten."""
    stack.enter_context(installed(ipus=4))
    stack.enter_context(mock.patch.dict(sys.modules, pva=pva))
    stack.enter_context(mock.patch.dict(os.environ, XDG_CACHE_HOME=str(folder / "cache")))
    stack.enter_context(mock.patch.object(ipu_updates, "UPDATES", 2))


def write(target):
    """Run all commands in a temporary directory, and write a file for each transcript."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.chdir(folder))
        _write_files()
        for name in SESSIONS:
            if name == "ipu-check":
                _install_stand_ins(stack, Path(folder))
            (target / f"{name}.txt").write_text(_transcript(name), encoding="utf-8")


def main():
    """Parse the command line and write the transcripts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--to", type=Path, default=GOLDEN, help="the directory to write to (default tests/golden)")
    write(parser.parse_args().to.resolve())


if __name__ == "__main__":
    main()
