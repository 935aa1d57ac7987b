"""The examples run as they stand, in small: what they train is tiny, and so is what they read."""

import io
import json
import os
import random
import re
import runpy
import subprocess
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from pack_data.text import corpus
from pack_data.text.corpus import Document
from tests.imports import ROOT
from tests.pack_data.text_corpus import sentence, write_corpus

EXAMPLES = ROOT / "examples"
NEEDS = {"plain_loop": ["transformers"], "hf_trainer": ["accelerate", "datasets"], "trl_sft": ["trl"]}
LONG = ("tiny", "mean_task", "encoder_on_cpu")  # a page runs mean_task
NOTEBOOK = EXAMPLES / "paper_in_an_hour.ipynb"


def run_here(name, monkeypatch, *arguments, status=0):
    """Run an example as a script in this process, check its exit status, and return its output."""
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
    printed = io.StringIO()
    with redirect_stdout(printed), pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert ended.value.code == status
    return printed.getvalue()


def test_every_example_is_run_and_short():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {
        *NEEDS,
        "tiny",
        "own_text",
        "pod16_walkthrough",
        "mean_task",
        "encoder_on_cpu",
        "build_with_ray",  # tests/pack_data/building/test_engines.py
        "build_with_datatrove",
    }
    assert list(EXAMPLES.glob("*.ipynb")) == [NOTEBOOK]
    short = [path for path in EXAMPLES.glob("*.py") if path.stem not in LONG]
    assert all(len(path.read_text(encoding="utf-8").splitlines()) < 80 for path in short)


@pytest.mark.parametrize("name", NEEDS)
def test_a_missing_package_is_one_line(name):
    """In an environment that has the interpreter and NumPy, but not the packages that the example needs."""
    hidden = f"import sys; sys.path.insert(0, {os.fspath(EXAMPLES)!r}); sys.argv = ['{name}']; import tiny, {name}; "
    hidden += f"tiny.find_spec = lambda name: None; {name}.main()"
    finished = subprocess.run([sys.executable, "-c", hidden], cwd=ROOT, capture_output=True, text=True)
    assert finished.returncode == 2 and not finished.stdout
    assert finished.stderr.startswith("error: this example needs ") and finished.stderr.count("\n") == 1


@pytest.mark.parametrize("name", NEEDS)
def test_an_example_prints_the_speed_of_both_runs(name, tmp_path, monkeypatch):
    for package in NEEDS[name]:
        pytest.importorskip(package, reason=f"needs {package}; make test-trainers installs it")
    pytest.importorskip("transformers", minversion="4.57")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.chdir(tmp_path)
    printed = run_here(name, monkeypatch, "--examples", "40", "--row", "512")
    speeds = re.findall(r"^(unpacked|packed) +([\d,]+) tokens/s$", printed, re.MULTILINE)
    assert [name for name, _ in speeds] == ["unpacked", "packed"]
    assert all(int(speed.replace(",", "")) > 0 for _, speed in speeds)
    assert re.search(r"^packed is [\d.]+ times as fast as unpacked$", printed, re.MULTILINE)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("task", ["masked", "classes"])
def test_an_encoder_has_the_padded_update_on_a_cpu(task, monkeypatch):
    pytest.importorskip("transformers", minversion="4.57")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    # As if the standard library had a few modules: reading all of it takes most of the time.
    draw = random.Random(0)
    library = [Document(name, [sentence(draw) for _ in range(40)]) for name in ("asyncio", "email", "encodings.hz")]
    monkeypatch.setattr(corpus, "_embedded_documents", lambda: library)
    printed = run_here("encoder_on_cpu", monkeypatch, "--task", task, "--updates", "2", status=0)
    losses = re.findall(r"^(?:un)?packed +loss ([\d.]+) -> ([\d.]+)$", printed, re.MULTILINE)
    assert len(losses) == 2 and losses[0] == losses[1]
    (difference,) = re.findall(r"differ by (\S+) of their norm", printed)
    assert float(difference) < 1e-6


@pytest.mark.parametrize("name", NEEDS)
def test_a_model_that_is_refused_is_one_line(name, tmp_path, monkeypatch, capsys):
    """ALiBi's bias is no product of Transformers' attention interface."""
    for package in NEEDS[name]:
        pytest.importorskip(package, reason=f"needs {package}; make test-trainers installs it")
    transformers = pytest.importorskip("transformers", minversion="4.57")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    config = transformers.BloomConfig(vocab_size=203, hidden_size=16, n_layer=1, n_head=2)
    transformers.BloomForCausalLM(config).save_pretrained(tmp_path / "bloom")
    runpy.run_path(str(EXAMPLES / "tiny.py"))["tokenizer"]().save_pretrained(tmp_path / "bloom")
    capsys.readouterr()
    run_here(name, monkeypatch, "--model", tmp_path / "bloom", "--examples", "20", status=2)
    errors = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert len(errors) == 1 and errors[0].startswith("error: ") and "Bloom" in errors[0]


def test_own_text_is_trained_in_two_parts_and_fills_in_a_word(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    texts = write_corpus(tmp_path / "texts", 20)
    sizes = ("--slots", "32", "--words", "200", "--steps", "4")
    printed = run_here("own_text", monkeypatch, "--text", texts, *sizes, "--sentence", "a [MASK] of the model")
    log = [json.loads(line) for line in Path("own_text/run/log.jsonl").read_text().splitlines()]
    assert [record["step"] for record in log] == [1, 2, 3, 4]
    answers = re.findall(r"^ *([\d.]+)%  (.+)$", printed, re.MULTILINE)
    assert len(answers) == 5 and all(text.endswith("of the model") for _, text in answers)


@pytest.mark.parametrize(
    "name, mistake, named",
    [
        ("own_text", ["--text", "missing"], "missing"),
        ("own_text", ["--steps", "1"], "--steps 1"),
        ("own_text", ["--sentence", "a word of it"], "[MASK]"),
        ("own_text", ["--slots", "many"], "--slots"),
        ("pod16_walkthrough", ["--config", "none.yml"], "none.yml"),
    ],
)
def test_a_mistake_is_one_line(name, mistake, named, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run_here(name, monkeypatch, *mistake, status=2)
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and named in error


SMALL_IPUS = """
data: {directory: data, max_sequence_length: 512, max_predictions_per_sequence: 76, max_sequences_per_pack: 3}
model: {vocabulary_size: 30522, hidden_size: 16, num_layers: 2, num_heads: 2, intermediate_size: 32}
batch: {micro_batch: 2, gradient_accumulation: 8}
engine: {half_weights: false}
placement: {replicas: 2, ipus_per_replica: 2, layers_per_ipu: [1, 1], available_memory_proportion: [0.2, 0.2]}
"""


@pytest.mark.parametrize("sdk", [False, True])
def test_the_walk_through_a_pod_plans_and_compiles_as_far_as_it_can(sdk, tmp_path, monkeypatch):
    """The Poplar SDK's stand-in compiles the program; without it the example says that it is not compiled, and why."""
    from tests.fakes.sdk import installed

    monkeypatch.chdir(tmp_path)
    Path("small.yml").write_text(SMALL_IPUS)
    arguments = ("--config", "small.yml", "--sequences", "60")
    if sdk:
        with installed(ipus=0):
            printed = run_here("pod16_walkthrough", monkeypatch, *arguments)
    else:
        printed = run_here("pod16_walkthrough", monkeypatch, *arguments)
    assert "verdict  fits" in printed and "predicted by the cycle model" in printed
    assert Path("pod16/program.poptorch").is_file() is sdk
    assert bool(re.search("^compiled  pod16/program.poptorch", printed, re.MULTILINE)) is sdk
    assert bool(re.search("^not compiled: .*Poplar SDK", printed, re.MULTILINE)) is not sdk


def code_of(notebook):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def test_the_notebook_runs(tmp_path, monkeypatch):
    """Every code cell in order, in one namespace; its own assertions hold."""
    monkeypatch.setenv("QUICK", "1")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # its folder stays behind
    space = {"__name__": "__main__"}
    with redirect_stdout(io.StringIO()):
        for cell in code_of(json.loads(NOTEBOOK.read_text(encoding="utf-8"))):
            exec(compile("".join(cell["source"]), f"{NOTEBOOK.name} {cell['id']}", "exec"), space)
    assert space["difference"](space["packed_gradient"], space["unpacked_gradient"]) < 1e-12
    assert space["comparison"].packing_factor > 1.5


def test_the_notebook_was_saved_after_a_run_from_top_to_bottom():
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    cells = code_of(notebook)
    assert (notebook["nbformat"], [cell["execution_count"] for cell in cells]) == (4, list(range(1, len(cells) + 1)))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert outputs and all(output["output_type"] == "stream" and output["name"] == "stdout" for output in outputs)
