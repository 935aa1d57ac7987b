"""Printed advice changes the outcome: the table of refused commands, each with the command that its message advises.

A row is a command that is refused, `=>` the names in its message that say what to change, `=>` the command after the
change, which succeeds. The second test collects the advice from the sources: each piece has a row, or a reason in
WITHOUT_ROW.
"""

import ast
import contextlib
import io
import json
import re
import shlex
import shutil
from functools import lru_cache
from importlib.util import find_spec

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="most commands need torch")

from ipu_packed_bert.__main__ import main
from ipu_packed_bert.training import summary
from pack_data.cli.command import run_main
from pack_data.text.vocabulary import SPECIAL_TOKENS
from tests.command_files import command_files
from tests.imports import ROOT, SOURCES, tree_of
from tests.refusals import rows_of
from tests.source_texts import texts_of
from tests.tiny_runs import not_drawn

pytestmark = pytest.mark.skipif(
    find_spec("poptorch") is not None or torch.cuda.is_available(),
    reason="some rows are refused only where there is neither an SDK nor a GPU",
)
SHOW = "pretrain --show-config --config tiny.yml"
TRAIN = "pretrain --config tiny.yml --steps 1"
RESUME = "pretrain --resume trained"
BUILD = "build --max-sequence-length 64 --vocabulary-size 200 --workers 1"
SHARED = f"{BUILD} --from ids.jsonl --out shared"
DEAL = f"{SHARED} --stage"
PLAN_SQUAD = "plan --config finetune_squad_packed_pod16 --engine ipu --packing-factor 2"
PREDICT = "predict tuned train.csv --output answers.jsonl"
EXPORT = "export trained new --vocabulary full.txt"
SYNTHETIC = "build --synthetic squad_1_1_384 --sequences 50 --max-sequence-length 384 --workers 1"
LENGTHS = "--histogram l.csv --max-sequence-length 16"

ADVICE = rows_of(
    """
# what is typed
pretran --config tiny.yml => did you mean pretrain => {SHOW}
spfhp --histogram squad_1_1_384 => pack --packer spfhp => pack --packer spfhp --histogram squad_1_1_384
certificate data => verify => verify data
pretrain packed_host => --config packed_host => pretrain --config packed_host --show-config
pretrain --config packed_phase3 => packed_phase2_pod4 => plan --config packed_phase2_pod4
pretrain --config configs/packed_hots.yml => packed_host => plan --config packed_host
{SHOW} optimizer.beta1=0.8 => --set optimizer.beta1=0.8 => {SHOW} --set optimizer.beta1=0.8
{SHOW} --device cpu => --set engine.device= => {SHOW} --set engine.device=cpu
{SHOW} --lr 1e-3 => --set optimizer.learning_rate= => {SHOW} --set optimizer.learning_rate=1e-3
pretrain --show-config --confg tiny.yml => --config => {SHOW}
{SHOW} --set modle.num_heads=2 => did you mean model => {SHOW} --set model.num_heads=2
{SHOW} --set run.stepz=4 => did you mean run.steps => {SHOW} --set run.steps=4
{SHOW} --set run.steps= => write null => {SHOW} --set data.vocabulary=null
{SHOW} --set without_ipus=3 => to null => {SHOW} --set without_ipus=null
pretrain --config tiny.yml --pla => packed-bert plan => plan --config tiny.yml
plan --config tiny.yml --packing-factor 9 => raise the depth => plan --config tiny.yml --packing-factor 2
plan --config tiny.yml --packing-factor 0.5 => at least 1 => plan --config tiny.yml --packing-factor 1
pack l.csv --max-sequence-length 16 => --histogram l.csv => pack {LENGTHS}
# runs
pretrain --config trained => --resume trained => {RESUME} --show-config
pretrain --config data => --data data => {SHOW} --data data
pretrain --resume trained/checkpoints/step_00000001 => did you mean --resume trained => {RESUME}
pretrain --resume data => --config => {SHOW}
{RESUME} --out new => leave it out => {RESUME}
{RESUME} --whole => leave it out => {RESUME}
{RESUME} --start-from trained => leave it out => {RESUME}
{TRAIN} --resume-if-there => --out => pretrain --config tiny.yml --out trained --resume-if-there
{TRAIN} --allow-change run.seed => --resume => {RESUME} --allow-change optimizer.beta1
{RESUME} --allow-change optimizer.beta3 => optimizer.beta2 => {RESUME} --allow-change optimizer.beta2
{RESUME} --set optimizer.beta1=0.8 => --allow-change optimizer.beta1
    => {RESUME} --set optimizer.beta1=0.8 --allow-change optimizer.beta1
{TRAIN} --out trained => --resume trained => {RESUME}
{TRAIN} --out data => choose another directory => {TRAIN} --out new
{TRAIN} --out empty.txt => choose another name => {TRAIN} --out new
{TRAIN} --out killed => --resume-if-there => {TRAIN} --out killed --resume-if-there
{TRAIN} --out new --engine ipu => --engine host => {TRAIN} --out new --engine host
{TRAIN} --out new --set engine.device=cuda => engine.device=cpu => {TRAIN} --out new
{SHOW} --steps 9 --set optimizer.schedule_steps=5 => --set optimizer.schedule_steps=9
    => {SHOW} --steps 9 --set optimizer.schedule_steps=9
{SHOW} --set data.held_out=0 => data.held_out above 0 => {SHOW} --set data.held_out=0.1
{SHOW} --data other => with --set => {SHOW} --data other --set model.vocabulary_size=300
plan --config auto.yml => --engine host => plan --config auto.yml --engine host
plan --config auto.yml => --set batch.micro_batch=2 => plan --config auto.yml --set batch.micro_batch=2
{PLAN_SQUAD} --set batch.sequences_per_update=4 => --set batch.sequences_per_update=60
    => {PLAN_SQUAD} --set batch.sequences_per_update=60
export trained texts => choose another => {EXPORT}
export trained new => --vocabulary FILE => {EXPORT}
check-model trained => packed-bert export => {EXPORT}
export --import bert new --vocabulary vocab.txt => does not apply => export --import bert new
# fine-tuned models
predict trained train.csv => finetune --config ... --set model.checkpoint=trained
    => finetune --config finetune_banking77_packed --set model.checkpoint=trained --show-config
predict tuned train.csv --overwrite => --output => {PREDICT} --overwrite
{PREDICT} => --overwrite => {PREDICT} --overwrite
{PREDICT} --overwrite --set task.name=tokens => leave the option out => {PREDICT} --overwrite
{PREDICT} --overwrite --set run.seed=7 => leave it out => {PREDICT} --overwrite
{PREDICT} --overwrite --engine ipu => --engine host => {PREDICT} --overwrite --engine host
predict tuned table.csv => --set task.text_column=
    => predict tuned table.csv --set task.text_column=texts --output texts.jsonl
# builds
{BUILD} --corpus texts --out new --seq-len 9 => --max-sequence-length => {BUILD} --corpus texts --out new
{BUILD} --from broken_ids.jsonl --out new => --skip-bad N => {BUILD} --from broken_ids.jsonl --out new --skip-bad 1
{BUILD} --corpus data --out new => --from => {BUILD} --from data --out new
{BUILD} --corpus bodies.jsonl --columns body,text --out new => name one
    => {BUILD} --corpus bodies.jsonl --columns body --out new
{BUILD} --corpus book.txt --held-out 0.3 --out new => several => {BUILD} --corpus texts --held-out 0.3 --out new
{BUILD} --from data --held-out 0.1 --out new => files of their own => {BUILD} --from data --out new
{BUILD} --from lengths.npy --out new => pack_data.optimal --histogram lengths.npy
    => pack --histogram lengths.npy --max-sequence-length 16
{BUILD} --corpus bodies.jsonl --out new => --json-field => {BUILD} --corpus bodies.jsonl --json-field body --out new
{BUILD} --corpus texts --columns a --out new => leave --columns out => {BUILD} --corpus texts --out new
{BUILD} --corpus texts --split a --out new => leave --split a out => {BUILD} --corpus texts --out new
{BUILD} --corpus texts/000.txt --split a --out new => --split a => {BUILD} --corpus texts/000.txt --out new
{BUILD} --synthetic squad_1_1_384 --sequences 50 --out new => --max-sequence-length 384 => {SYNTHETIC} --out new
{SYNTHETIC} --tokenizer t.json --out new => leave one of them out => {SYNTHETIC} --out new
{BUILD} --from ids.jsonl --task 0/2 --out new => --stage count => {DEAL} count --task 1/2
{BUILD} --from ids.jsonl --out new --stage recipe => --stage count => {DEAL} count --task 1/2
{BUILD} --corpus texts --stage count --out new => --from => {DEAL} count --task 1/2
{DEAL} count --task 1/2 --overwrite => leave out --overwrite => {DEAL} count --task 1/2
{DEAL} recipe => --missing N => {SHARED} --missing 2
{DEAL} deal --task 0/2 => --stage recipe => {DEAL} count --task 0/2 && {DEAL} recipe && {DEAL} deal --task 0/2
{BUILD} --corpus texts --out empty.txt => another name => {BUILD} --corpus texts --out new
{BUILD} --from data --on 127.0.0.1 --out new => --workers => {BUILD} --from data --out new
verify empty => build --corpus TEXTS --out DIR => {BUILD} --corpus texts --out empty && verify empty
{BUILD} --from data --out other => --overwrite => {BUILD} --from data --out other --overwrite
# looking at lengths and data sets
verify ids.jsonl => look => look ids.jsonl
verify ids.jsonl => build | --from => {BUILD} --from ids.jsonl --out new && verify new
pack {LENGTHS} --out r.json && verify r.json --workers 1 => leave the option out => verify r.json
verify data --histogram l.csv => --histogram => verify data
look l.csv --packer best => spfhp => look l.csv --packer spfhp
look l.csv --packer nnlshp => --max-sequences-per-pack 3 => look l.csv --packer nnlshp --max-sequences-per-pack 3
look l.csv --pack 3 => leave the option out => look l.csv
look l.csv --columns a => leave --columns out => look l.csv
look l.csv --split a => leave --split a out => look l.csv
look data l.csv => one directory => look data
look data --pack 900 => packs 0 to => look data --pack 0
look data --max-sequence-length 64 => leave the option out => look data
pack --packer best => spfhp => pack --packer spfhp
pack --histogram l.csv => --max-sequence-length => pack {LENGTHS}
pack --histogram wikipedia => wikipedia_512 => pack --packer spfhp --histogram wikipedia_512
pack --packer nnlshp --max-sequences-per-pack 4 => spfhp => pack --packer spfhp --max-sequences-per-pack 4
pack --synthetic uniform:max=9 => n is missing => pack --synthetic uniform:max=9,n=9
pack --synthetic uniform:max=9,n=9 --columns a => leave them out => pack --synthetic uniform:max=9,n=9
stream --grid --synthetic uniform:max=9,n=9 => leave out --grid => stream --synthetic uniform:max=9,n=9
compare {LENGTHS} --packers best => spfhp => compare {LENGTHS} --packers spfhp --depths 2
convert ids.jsonl new => --to-format | jsonl => convert ids.jsonl new --to-format jsonl
""".format_map(globals())
)


@lru_cache(None)
def advice_texts():
    """Return {text: file} of the texts in a `raise` or parser error that name what to type; a value is a NUL."""
    texts = {}
    typed = re.compile(r"(?<![\w-])--[a-z]|did you mean|packed-bert [a-z]+")
    for path in SOURCES:
        is_product = path.relative_to(ROOT).parts[0] not in ("evidence", "examples")
        if not is_product or not typed.search(path.read_text(encoding="utf-8")):
            continue
        for node in ast.walk(tree_of(path)):
            is_error = isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "error"
            if isinstance(node, ast.Raise) or is_error:
                for text in texts_of(node):
                    if typed.search(text):
                        texts[text] = path.relative_to(ROOT).as_posix()
    return texts


# Part of a file and its advice -> why no row follows it.
_LAUNCHERS = "needs torchrun, poprun, several hosts or a cluster: tests/ipu_packed_bert/engine, test_torchrun"
_GPU = "needs a GPU of a kind: tests/ipu_packed_bert/engine"
_IPUS = "needs IPUs: tests/ipu_packed_bert/engine, on the mock"
_SYSTEM = "needs a full disk, a killed process or another system"
_SECONDS = "takes seconds; the advised number is tested where it is computed"
_TRAINED = "needs a run of other data: tests/ipu_packed_bert/{tasks,training}, test_export, test_predict"
_FOREIGN = "needs foreign files; tests/pack_data/{formats,text} read them with the advised options"
_NOT_TYPED = "names what to write into a file, or what no longer exists"
WITHOUT_ROW = {
    "engine/ipu/": _IPUS,
    "engine/base.py: ": _IPUS,
    "engine/__init__.py: torchrun": _LAUNCHERS,
    "host/devices.py: LOCAL_RANK": _LAUNCHERS,
    "building/runner.py: --on": _LAUNCHERS,
    "engine.precision is": _GPU,
    "the GPU has too little memory": _GPU,
    "engine.compile is true": _SYSTEM,
    "free some space": _SYSTEM,
    "was killed": _SYSTEM,
    "cannot be started": _SYSTEM,
    "are free; make room": _SYSTEM,
    "the directory cannot be written": _SYSTEM,
    "needs a POSIX system": _SYSTEM,
    "commands/benchmark.py: --": _SECONDS,
    "benchmarks/work.py: ": _SECONDS,
    "ipu_profiling/report/": _SECONDS,
    "ipu_profiling/measured/": "needs measured files: tests/ipu_profiling/measured",
    "no record has a label": _TRAINED,
    "data.mixed_with: ": _TRAINED,
    "was trained with another vocabulary": _TRAINED,
    "which is not trusted": _TRAINED,
    "ipu_packed_bert/tasks/": _TRAINED,
    "training/predictions.py: \0: has no": _TRAINED,
    "does not determine a task": _TRAINED,
    "has imported weights": _TRAINED,
    "pack_data/formats/": _FOREIGN,
    "pack_data/text/": _FOREIGN,
    "of BERT; pack them with": "is no command",
    "--packing-factor \0: a pack holds at least one": "is no command",
    "numbers that need not be whole": _FOREIGN,
    "bad records, --skip-bad": "several tasks must skip records; test_stages",
    "was not made by a build": _NOT_TYPED,
    "every task reads the source anew": _NOT_TYPED,
    "a tokenizer.json says this itself": _FOREIGN,
    "contains no sequences": _NOT_TYPED,
    "--task \0: pass I/N for task": _LAUNCHERS,
    "--append is gone": _NOT_TYPED,
    "--longest \0: does not fit": _SECONDS,
}


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """Make the directory of `command_files`, with a run of one update and further files."""
    folder = command_files(tmp_path_factory.mktemp("here"))
    shutil.copytree(folder / "run", folder / "killed")
    (folder / "killed" / "log.jsonl").write_text("")
    (folder / "answers.jsonl").write_text("")
    settings = (folder / "tiny.yml").read_text().replace("micro_batch: 2", "micro_batch: auto")
    (folder / "auto.yml").write_text(settings.replace("kind: host", "kind: auto"))
    rows = [json.dumps({"input_ids": [2, *range(5, 5 + length), 3]}) for length in range(4, 40)]
    (folder / "ids.jsonl").write_text("\n".join(rows) + "\n")
    (folder / "broken_ids.jsonl").write_text("\n".join([*rows, '{"input_ids": [-1]}']) + "\n")
    (folder / "full.txt").write_text("\n".join([*SPECIAL_TOKENS, *(f"word{number}" for number in range(123))]) + "\n")
    np.save(folder / "lengths.npy", np.arange(3, 9))
    bodies = [json.dumps({"body": path.read_text()}) for path in sorted((folder / "texts").iterdir())]
    (folder / "bodies.jsonl").write_text("\n".join(bodies) + "\n")
    return folder


def outcome(commands):
    """Run commands that are joined by `&&` in this process; return the last exit status and what all print."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        for command in commands.split(" && "):
            status = run_main(main, shlex.split(command))
    return status, printed.getvalue()


@pytest.fixture(scope="module")
def refusals(here):
    """Run all rows in order; return the faults and the messages of the refusals."""
    faults = []
    messages = []
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(here)
        patched.setattr(summary, "draw_curves", not_drawn)
        assert outcome(f"{TRAIN} --out trained")[0] == 0
        for refused, names, followed in ADVICE:
            status, message = outcome(refused)
            messages.append(message)
            missing = [name for name in names if name not in message]
            if status != 2 or missing:
                faults.append(f"{refused}: status {status}, {missing} not in {message}")
            status, message = outcome(followed)
            if status != 0:
                faults.append(f"{followed}: advised, but status {status}: {message}")
            shutil.rmtree(here / "new", ignore_errors=True)
    return faults, messages


def test_an_advice_that_is_followed_changes_the_outcome(refusals):
    faults, _ = refusals
    assert not faults, "\n".join(faults)


def test_each_advice_in_the_sources_has_a_row_or_a_reason(refusals):
    _, messages = refusals
    printed = "\n".join(messages)
    faults = []
    reasons_used = set()
    for text, where in advice_texts().items():
        pattern = ".*?".join(map(re.escape, text.split("\0")))
        if re.search(pattern, printed):
            continue
        parts = {part for part in WITHOUT_ROW if part in f"{where}: {text}"}
        reasons_used |= parts
        if not parts:
            faults.append(f"{where}: {text!r}: no row of ADVICE has it")
    faults += [f"{part}: a reason without an advice" for part in WITHOUT_ROW if part not in reasons_used]
    assert not faults, "\n".join(faults)
