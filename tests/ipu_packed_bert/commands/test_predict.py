"""`packed-bert predict`: each record's answer is the one it has alone, in the file's order, or nothing is written."""

import io
import json
import re
import shutil
import sys

import numpy as np
import pytest

from ipu_packed_bert.commands import finetune, predict
from ipu_packed_bert.engine.host import HostEngine
from ipu_packed_bert.tasks.examples import Asked
from ipu_packed_bert.tasks.files import ExampleSource
from ipu_packed_bert.training import predictions
from pack_data.cli.command import run_main
from tests.fakes.machine import machine
from tests.fakes.sdk import installed
from tests.fine_tuning_files import KINDS, SLOTS, tiny_checkpoint, tiny_config, tiny_fine_tuned, training_file

pytest.importorskip("safetensors", reason="Hugging Face's files: pip install safetensors")

OF_SQUAD = ["task.stride=16", "task.max_answer_length=5", "task.null_answers=true"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A fine-tuned Hugging Face folder for each task."""
    folder = tmp_path_factory.mktemp("models")
    for kind in KINDS:
        (folder / kind).mkdir()
    return {kind: tiny_fine_tuned(folder / kind / "model", kind) for kind in KINDS}


def settings(kind, *more):
    of_task = OF_SQUAD if kind == "squad" else []
    return [
        f"task.name={kind}",
        *of_task,
        f"data.max_sequence_length={SLOTS}",
        "engine.threads=1",
        *more,
    ]


def answered(model, file, kind, *more):
    """The lines of a model in float64."""
    trained = predictions.find_trained(model)
    request = Asked(ExampleSource.of(file), labels=False)
    prepared = predictions.prepare(trained, request, settings(kind, *more))
    engine = prepared.engine
    network = engine.model if isinstance(engine, HostEngine) else engine._program
    network.double()
    answers = predictions.predict(prepared).answers
    return list(predictions.lines(answers)), prepared


def command(*arguments):
    return run_main(predict.main, [str(argument) for argument in arguments])


def run_of_kind(model, file, kind, *more):
    chosen = [word for setting in settings(kind) for word in ("--set", setting)]
    return command(model, file, *chosen, *more)


def records_of(file, kind):
    """The identity of each record of a file, in its order."""
    text = file.read_text().strip()
    if kind == "squad":
        paragraphs = json.loads(text)["data"][0]["paragraphs"]
        return [paragraph["qas"][0]["id"] for paragraph in paragraphs]
    if kind == "tokens":
        sentences = [sentence.split("\n") for sentence in text.split("\n\n")]
        return [[line.split()[0] for line in lines] for lines in sentences]
    return text.split("\n")[1:]


def test_the_attention_is_that_of_inference_whatever_dropout_the_checkpoint_had(models, tmp_path):
    """On a CPU attention dropout would take the eager one."""
    folder = tmp_path / "dropped"
    shutil.copytree(models["single_label"], folder)
    about = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**about, "attention_probs_dropout_prob": 0.1}))
    trained = predictions.find_trained(folder)
    assert trained.model.attention_dropout == 0.1
    file = training_file(tmp_path, "single_label")
    request = Asked(ExampleSource.of(file), labels=False)
    engine = predictions.prepare(trained, request, settings("single_label")).engine
    assert (engine.attention.kind, engine.task.model.attention_dropout) == ("varlen", 0.0)
    engine.close()


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_each_record_alone(models, tmp_path, kind):
    """In float64, over random files and packings: the same lines, to the last digit written, in the file's order."""
    rng = np.random.default_rng(7)
    for seed in (5, 6):
        size = {"squad": "questions", "tokens": "sentences"}.get(kind, "texts")
        file = training_file(
            tmp_path,
            kind,
            seed=seed,
            **{size: int(rng.integers(5, 40))},
        )
        alone, unpacked = answered(models[kind], file, kind, "data.packer=none")
        rows = unpacked.task.packs.packing.packs
        assert unpacked.task.packs.packing.packing_factor == 1.0
        for packer, depth in (
            ("optimal", 3),
            ("first_fit", int(rng.integers(2, 6))),
        ):
            packing = [f"data.packer={packer}", f"data.max_sequences_per_pack={depth}"]
            micro_batch = f"batch.micro_batch={rng.integers(1, 6)}"
            packed, prepared = answered(models[kind], file, kind, *packing, micro_batch)
            assert prepared.task.packs.packing.packs < rows
            assert packed == alone

        answers = [json.loads(line) for line in alone]
        if kind not in ("squad", "tokens"):
            assert any(re.search(r"\.\d{6}\b", line) for line in alone)  # six decimal places
        records = records_of(file, kind)
        assert [answer.pop("record") for answer in answers] == list(range(1, len(records) + 1))
        identity = {"squad": "id", "tokens": "words"}.get(kind)
        if identity:
            assert [answer[identity] for answer in answers] == records
        assert len(set(map(json.dumps, answers))) > 3


@pytest.mark.parametrize("kind", KINDS)
def test_on_ipus_they_are_the_hosts(models, tmp_path, kind):
    """On the stand-in, a pipeline of 2 and 2 replicas, in float64."""
    file = training_file(tmp_path, kind, seed=3)
    expected, _ = answered(models[kind], file, kind)
    pipeline = ["replicas=2", "ipus_per_replica=2", "layers_per_ipu=[1,1]", "available_memory_proportion=[0.2,0.2]"]
    on_ipus = ["engine.kind=ipu", "engine.half_weights=false", "batch.micro_batch=2"]
    on_ipus += [f"placement.{setting}" for setting in pipeline]
    with installed(ipus=4):
        machine.float64 = True
        lines, prepared = answered(models[kind], file, kind, *on_ipus)
        predictions.compile_program(prepared)  # it is compiled
        assert machine.compilations == ["inference"]
        assert prepared.layout.packs_per_update % 4 == 0
    machine.reset()
    assert lines == expected


def test_a_run_its_exported_model_and_its_own_evaluation_agree(tmp_path, capsys):
    start = tiny_checkpoint(tmp_path / "bert")
    file = training_file(tmp_path, "single_label")
    (tmp_path / "tiny.yml").write_text(tiny_config(start, file, task="single_label").to_yaml())
    assert (
        run_main(
            finetune.main,
            ["--config", str(tmp_path / "tiny.yml"), "--out", str(tmp_path / "run")],
        )
        == 0
    )
    run = tmp_path / "run"
    evaluation = json.loads((run / "evaluation.jsonl").read_text().split("\n")[-2])
    of_run = [answer["prediction"] for answer in json.loads((run / "predictions.json").read_text())]
    texts = []
    for model in (run, run / "model"):
        capsys.readouterr()
        assert command(model, file, "--score", "--set", f"data.max_sequence_length={SLOTS}") == 0
        printed = capsys.readouterr()
        texts.append(printed.out)
        assert [json.loads(line)["prediction"] for line in printed.out.splitlines()] == of_run
        score = json.loads(printed.err.split("score     ")[1].splitlines()[0])
        assert score["accuracy"] == evaluation["accuracy"]
        assert score["texts"] == 40
    assert texts[0] == texts[1]


def test_standard_input_and_questions_a_line(models, monkeypatch, tmp_path, capsys):
    """SQuAD's form and JSONL give the same answers; without an id a question goes by its line."""
    file = training_file(tmp_path, "squad", questions=6)
    lines = []
    for paragraph in json.loads(file.read_text())["data"][0]["paragraphs"]:
        question = paragraph["qas"][0]["question"]
        lines.append(json.dumps({"question": question, "context": paragraph["context"]}))
    monkeypatch.setattr(
        sys,
        "stdin",
        io.TextIOWrapper(io.BytesIO("\n".join(lines).encode())),
    )
    texts = []
    for source in (file, "-"):
        assert run_of_kind(models["squad"], source, "squad") == 0
        texts.append([json.loads(line) for line in capsys.readouterr().out.splitlines()])
    assert [answer.pop("id") for answer in texts[0]] == [f"q{number}" for number in range(6)]
    assert [answer.pop("id") for answer in texts[1]] == [str(number) for number in range(1, 7)]
    assert texts[0] == texts[1]


def test_answers_on_standard_output_are_utf_8(models, monkeypatch, tmp_path):
    """Whatever the terminal's encoding; what could not be written would be lost with all other answers."""
    file = tmp_path / "words.conll"
    output = io.BytesIO()
    file.write_text("r\u00edo\n\u5ddd\n", encoding="utf-8")
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", io.TextIOWrapper(output, encoding="ascii"))
        assert run_of_kind(models["tokens"], file, "tokens") == 0
        sys.stdout.flush()
        assert json.loads(output.getvalue().decode())["words"] == ["r\u00edo", "\u5ddd"]


def test_interrupted_it_leaves_what_was_there(models, tmp_path, capsys, monkeypatch):
    file = training_file(tmp_path, "regression")
    output = tmp_path / "answers.jsonl"
    output.write_text("former\n")
    before = sorted(tmp_path.iterdir())

    def interrupted(engine, batch):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(HostEngine, "predict", interrupted)
        assert run_of_kind(models["regression"], file, "regression", "--output", output, "--overwrite") == 130
    assert output.read_text() == "former\n"
    assert sorted(tmp_path.iterdir()) == before
    # Nor are answers written that are no numbers.
    monkeypatch.setattr(
        HostEngine,
        "predict",
        lambda engine, batch: np.full((4, SLOTS, 1), np.nan, np.float32),
    )
    assert run_of_kind(models["regression"], file, "regression", "--output", output, "--overwrite") == 3
    assert output.read_text() == "former\n"
    assert sorted(tmp_path.iterdir()) == before


def test_one_of_several_instances_is_refused(models, tmp_path, capsys, monkeypatch):
    """Each would have a part of the answers."""
    monkeypatch.setattr(HostEngine, "share", (0, 2))
    file = training_file(tmp_path, "regression")
    assert run_of_kind(models["regression"], file, "regression", "--output", tmp_path / "answers.jsonl") == 2
    assert "poprun started 2 instances" in capsys.readouterr().err
    assert not (tmp_path / "answers.jsonl").exists()
    ranks = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}
    for name, value in ranks.items():
        monkeypatch.setenv(name, str(value))
    assert run_of_kind(models["regression"], file, "regression") == 2
    assert "each process of torchrun would repeat the answers" in capsys.readouterr().err
