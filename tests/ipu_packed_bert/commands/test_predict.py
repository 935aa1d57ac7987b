"""`packed-bert predict`: each record's answer is the one it has alone, in the file's order, or nothing is written."""

import io
import json
import shutil
import sys

import numpy as np
import pytest
import yaml

from ipu_packed_bert.commands import finetune, predict
from ipu_packed_bert.engine.host import HostEngine
from ipu_packed_bert.tasks.examples import Asked
from ipu_packed_bert.tasks.files import ExampleSource
from ipu_packed_bert.training import predictions
from ipu_packed_bert.training.examples import prepare
from ipu_packed_bert.training.export import import_folder
from pack_data.cli.command import run_main
from tests.fakes.machine import machine
from tests.fakes.sdk import installed
from tests.fine_tuning_files import KINDS, SLOTS, WORDS, tiny_checkpoint, tiny_config, tiny_fine_tuned, training_file

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
    own = OF_SQUAD if kind == "squad" else []
    task = [f"task.name={kind}"]
    return [*task, *own, f"data.max_sequence_length={SLOTS}", "engine.threads=1", *more]


def answered(model, file, kind, *more):
    """The lines of a model in float64."""
    trained = predictions.find_trained(model)
    prepared = predictions.prepare(trained, Asked(ExampleSource.of(file), labels=False), settings(kind, *more))
    engine = prepared.engine
    (engine.model if isinstance(engine, HostEngine) else engine._program).double()
    found = predictions.predict(prepared)
    return list(predictions.lines(found.answers)), prepared


def command(*arguments):
    return run_main(predict.main, [str(argument) for argument in arguments])


def run(model, file, kind, *more):
    chosen = [word for setting in settings(kind) for word in ("--set", setting)]
    return command(model, file, *chosen, *more)


def records_of(file, kind):
    if kind == "squad":
        content = json.loads(file.read_text())
        return [entry["id"] for article in content["data"] for each in article["paragraphs"] for entry in each["qas"]]
    if kind == "tokens":
        return [
            [line.split()[0] for line in block.split("\n")] for block in file.read_text().strip().split("\n\n") if block
        ]
    return file.read_text().strip().split("\n")[1:]


def test_the_attention_is_that_of_inference_whatever_dropout_the_checkpoint_had(models, tmp_path):
    """On a CPU attention dropout would take the eager one."""
    folder = tmp_path / "dropped"
    shutil.copytree(models["single_label"], folder)
    about = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**about, "attention_probs_dropout_prob": 0.1}))
    trained = predictions.find_trained(folder)
    assert trained.model.attention_dropout == 0.1
    file = training_file(tmp_path, "single_label")
    asked = Asked(ExampleSource.of(file), labels=False)
    engines = [predictions.prepare(trained, asked, settings("single_label")).engine]
    # Fine-tuning that only evaluates infers, too; what trains has the checkpoint's dropout.
    model = {"hidden_dropout": None, "attention_dropout": None}
    for training in (None, str(file)):
        data = {"training": training, "evaluation": str(file)}
        engines.append(prepare(tiny_config(folder, file, task="single_label", model=model, data=data)).engine)
    assert all(isinstance(engine, HostEngine) for engine in engines)
    assert [engine.attention.kind for engine in engines[:2]] == ["varlen", "varlen"]
    assert [engine.task.model.attention_dropout for engine in engines] == [0.0, 0.0, 0.1]
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_each_record_alone(models, tmp_path, kind):
    """In float64, over random files and packings: the same lines, to the last digit written, in the file's order."""
    rng = np.random.default_rng(7)
    for seed in range(3):
        size = {"squad": "questions", "tokens": "sentences"}.get(kind, "texts")
        file = training_file(tmp_path, kind, seed=seed + 5, **{size: int(rng.integers(5, 40))})
        alone, unpacked = answered(models[kind], file, kind, "data.packer=none")
        assert unpacked.task.packs.packing.packing_factor == 1.0
        for packer, depth in (("optimal", 3), ("spfhp", None), ("first_fit", int(rng.integers(2, 6)))):
            chosen = [f"data.packer={packer}", f"data.max_sequences_per_pack={'null' if depth is None else depth}"]
            micro_batch = f"batch.micro_batch={rng.integers(1, 6)}"
            packed, made = answered(models[kind], file, kind, *chosen, micro_batch)
            assert made.task.packs.packing.packs < unpacked.task.packs.packing.packs
            assert packed == alone
        found, wanted = [json.loads(line) for line in alone], records_of(file, kind)
        assert [each["record"] for each in found] == list(range(1, len(wanted) + 1))
        if kind in ("squad", "tokens"):
            assert [each["id" if kind == "squad" else "words"] for each in found] == wanted
        assert len({json.dumps({**each, "record": 0}) for each in found}) > 3


@pytest.mark.parametrize("kind", KINDS)
def test_on_ipus_they_are_the_hosts(models, tmp_path, kind):
    """On the stand-in, a pipeline of 2 and 2 replicas, in float64."""
    file = training_file(tmp_path, kind, seed=3)
    expected, _ = answered(models[kind], file, kind)
    pipeline = ["replicas=2", "ipus_per_replica=2", "layers_per_ipu=[1,1]", "available_memory_proportion=[0.2,0.2]"]
    on_ipus = ["engine.kind=ipu", "engine.half_weights=false", *(f"placement.{each}" for each in pipeline)]
    with installed(ipus=4):
        machine.float64 = True
        found, made = answered(models[kind], file, kind, *on_ipus, "batch.micro_batch=2")
        predictions.compile_program(made)  # it is compiled
        assert machine.compilations == ["inference"] and made.layout.packs_per_update % 4 == 0
    machine.reset()
    assert found == expected


@pytest.mark.parametrize("kind", KINDS)
def test_a_record_that_cannot_be_scored_is_predicted_in_its_place(models, tmp_path, capsys, kind):
    """The second of three records has a label that is invalid, or that the model does not have."""
    valid, invalid = {
        "squad": ([{"text": "river", "answer_start": 0}], [{"text": "stone", "answer_start": -1}]),
        "tokens": (["O", "O"], ["O"]),
        "multi_label": (["l0"], ["l0", "l0"]),
        "regression": (1.0, "much"),
    }.get(kind, ("0", "9"))
    lines = []
    for number, label in enumerate((valid, invalid, valid)):
        text = "river stone"
        record = {"text": text, "label": label}
        if kind == "squad":
            record = {"id": f"q{number}", "question": "where?", "context": text, "answers": label}
        if kind == "tokens":
            record = {"words": text.split(), "labels": label}
        lines.append(json.dumps(record) + "\n")
    (tmp_path / "r.jsonl").write_text("".join(lines))
    assert run(models[kind], tmp_path / "r.jsonl", kind, "--score", "--output", tmp_path / "out.jsonl") == 0
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [each["record"] for each in found] == [1, 2, 3]
    assert found[0]["prediction"] == found[1]["prediction"] == found[2]["prediction"]
    text = capsys.readouterr().out
    scores = json.loads(text.split("score     ")[1].splitlines()[0])
    assert scores["not_scored"] == 1 and "scores of 2 of 3 records" in text
    accounts = scores["accounts"]
    assert accounts["records"] == {"came_in": 3, "goes_out": 3, "left_out": {}}
    assert (accounts["scored"]["came_in"], accounts["scored"]["goes_out"]) == (3, 2)
    assert sum(accounts["scored"]["left_out"].values()) == 1
    assert scores.get("texts", scores.get("questions", 2)) == 2


def test_a_run_its_exported_model_and_its_own_evaluation_agree(tmp_path, capsys):
    start = tiny_checkpoint(tmp_path / "bert")
    file = training_file(tmp_path, "single_label")
    (tmp_path / "tiny.yml").write_text(tiny_config(start, file, task="single_label").to_yaml())
    assert run_main(finetune.main, ["--config", str(tmp_path / "tiny.yml"), "--out", str(tmp_path / "run")]) == 0
    evaluation = json.loads((tmp_path / "run" / "evaluation.jsonl").read_text().split("\n")[-2])
    own = json.loads((tmp_path / "run" / "predictions.json").read_text())
    texts = []
    for model in (tmp_path / "run", tmp_path / "run" / "model"):
        capsys.readouterr()
        assert command(model, file, "--score", "--set", f"data.max_sequence_length={SLOTS}") == 0
        answers, said = capsys.readouterr()
        texts.append(answers)
        found = [json.loads(line) for line in answers.splitlines()]
        assert [each["prediction"] for each in found] == [each["prediction"] for each in own]
        score = json.loads(said.split("score     ")[1].splitlines()[0])
        assert score["accuracy"] == evaluation["accuracy"] and score["texts"] == 40
        assert "packs/s" in said and "sequences/s" in said and "rows saved" in said
    assert texts[0] == texts[1]
    # A run of pre-training, and an encoder alone, have nothing to answer with.
    import_folder(start, tmp_path / "pretrained")
    (tmp_path / "nameless").mkdir()
    (tmp_path / "nameless" / "config.yml").write_text("task: {name: [squad]}\n")
    for model, message in (
        (tmp_path / "nameless", "has no head for a task"),
        (tmp_path / "pretrained", "a pre-training run, whose model has no head for a task; fine-tune it first"),
        (start, "BertModel does not determine a task"),
        (tmp_path / "nothing", "nothing: no such directory; pass the directory of a fine-tuning run"),
    ):
        assert command(model, file) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and message in error and error.count("\n") == 1


def test_labels_are_read_to_score_alone(models, tmp_path, capsys):
    file = tmp_path / "new.csv"
    file.write_text("text,label\nriver stone,never seen\ncastle,\n")
    output = tmp_path / "answers.jsonl"
    assert run(models["single_label"], file, "single_label", "--output", output) == 0
    assert len(output.read_text().splitlines()) == 2
    capsys.readouterr()
    assert run(models["single_label"], file, "single_label", "--output", output, "--overwrite", "--score") == 2
    assert "line 3: label is ''; must be one label" in capsys.readouterr().err
    file.write_text("text\nriver stone\ncastle\n")
    assert run(models["single_label"], file, "single_label", "--score") == 2
    assert "no record has a label" in capsys.readouterr().err
    # What an unanswerable question is, without --score, is the model's to say.
    questions = training_file(tmp_path, "squad", questions=5, without_answer=2)
    assert run(models["squad"], questions, "squad", "--set", "task.null_answers=false") == 0
    assert len(capsys.readouterr().out.splitlines()) == 5


@pytest.mark.parametrize(
    "kind, name, text, messages",
    [
        (
            "single_label",
            "bad.jsonl",
            '{"text": "river"}\n{"text": 3}\nnothing\n{"label": "x"}\n',
            ["line 2: text is 3; must be a text", "line 3: not JSON", "line 4: no column 'text'"],
        ),
        ("regression", "bad.csv", "text,other\nriver\nstone,1,2\n", ["line 2: 1 columns", "line 3: 3 columns"]),
        ("tokens", "bad.jsonl", '{"words": []}\n{"words": ["a", 1]}\n', ["line 1: words is []", "line 2: words is"]),
        (
            "squad",
            "bad.jsonl",
            '{"question": "river?", "context": "a"}\n{"question": 1, "context": "a"}\n{"question": "b"}\n',
            ["line 2: question is 1; must be a text", "line 3: context is missing"],
        ),
    ],
)
def test_damaged_records_are_a_line_each(models, tmp_path, capsys, kind, name, text, messages):
    (tmp_path / name).write_text(text)
    output = tmp_path / "answers.jsonl"
    assert run(models[kind], tmp_path / name, kind, "--output", output) == 2
    error = capsys.readouterr().err
    first, *lines = error.rstrip("\n").split("\n")
    assert first == f"error: {tmp_path / name}: {len(messages)} records cannot be used"
    assert len(lines) == len(messages)
    assert all(f"{tmp_path / name} {message}" in line or message in line for message, line in zip(messages, lines))
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_what_is_too_long_is_cut_as_in_training_and_said(models, tmp_path, capsys):
    file = tmp_path / "long.conll"
    file.write_text("river\n" * 70 + "\nstone\n")
    assert run(models["tokens"], file, "tokens") == 0
    out, said = capsys.readouterr()
    assert "not 8 beyond 64 slots" in said
    found = [json.loads(line)["prediction"] for line in out.splitlines()]
    assert [label is None for label in found[0]] == [False] * 62 + [True] * 8 and len(found[1]) == 1


def test_standard_input_and_questions_a_line(models, monkeypatch, tmp_path, capsys):
    """SQuAD's form and JSONL give the same answers; without an id a question goes by its line."""
    nested = json.loads(training_file(tmp_path, "squad", questions=6).read_text())
    flat = [
        {"question": entry["question"], "context": each["context"]}
        for article in nested["data"]
        for each in article["paragraphs"]
        for entry in each["qas"]
    ]
    (tmp_path / "nested.json").write_text(json.dumps(nested))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("\n".join(map(json.dumps, flat)).encode())))
    texts = []
    for file in (tmp_path / "nested.json", "-"):
        assert run(models["squad"], file, "squad") == 0
        texts.append([json.loads(line) for line in capsys.readouterr().out.splitlines()])
    assert [each.pop("id") for each in texts[0]] == [f"q{number}" for number in range(6)]
    assert [each.pop("id") for each in texts[1]] == [str(number) for number in range(1, 7)]
    assert texts[0] == texts[1]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"{}\n")))
    assert run(models["single_label"], "-", "single_label") == 2
    assert "error: standard input line 1: no column 'text'" in capsys.readouterr().err


def test_answers_on_standard_output_are_utf_8(models, monkeypatch, tmp_path):
    """Whatever the terminal's encoding; what could not be written would be lost with all other answers."""
    file, output = tmp_path / "words.conll", io.BytesIO()
    file.write_text("r\u00edo\n\u5ddd\n", encoding="utf-8")
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", io.TextIOWrapper(output, encoding="ascii"))
        assert run(models["tokens"], file, "tokens") == 0
        sys.stdout.flush()
        assert json.loads(output.getvalue().decode())["words"] == ["r\u00edo", "\u5ddd"]


def test_interrupted_it_leaves_what_was_there(models, tmp_path, capsys, monkeypatch):
    file, output = training_file(tmp_path, "regression"), tmp_path / "answers.jsonl"
    output.write_text("former\n")
    before = sorted(tmp_path.iterdir())

    def interrupted(engine, batch):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(HostEngine, "predict", interrupted)
        assert run(models["regression"], file, "regression", "--output", output, "--overwrite") == 130
    assert output.read_text() == "former\n" and sorted(tmp_path.iterdir()) == before
    assert run(models["regression"], file, "regression", "--output", output) == 2
    assert "exists; choose another file, or add --overwrite" in capsys.readouterr().err
    assert run(models["regression"], file, "regression", "--output", file, "--overwrite") == 2
    assert "reads this file" in capsys.readouterr().err
    # Nor are answers written that are no numbers.
    monkeypatch.setattr(HostEngine, "predict", lambda engine, batch: np.full((4, SLOTS, 1), np.nan, np.float32))
    assert run(models["regression"], file, "regression", "--output", output, "--overwrite") == 3
    assert output.read_text() == "former\n" and sorted(tmp_path.iterdir()) == before


def test_a_folder_that_names_no_task_is_told_it(models, tmp_path, capsys):
    folder = tmp_path / "model"
    folder.mkdir()
    for path in models["regression"].iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    about = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({k: v for k, v in about.items() if k != "architectures"}))
    file = tmp_path / "texts.csv"
    file.write_text("text\n" + " ".join(WORDS[:5]) + "\n")
    assert command(folder, file) == 2
    assert "its list of architectures does not determine a task" in capsys.readouterr().err
    assert run(folder, file, "regression") == 0
    assert yaml.safe_load(capsys.readouterr().out).keys() == {"record", "prediction"}


def test_one_of_several_instances_is_refused(models, tmp_path, capsys, monkeypatch):
    """Each would have a part of the answers."""
    monkeypatch.setattr(HostEngine, "share", (0, 2))
    file = training_file(tmp_path, "regression")
    assert run(models["regression"], file, "regression", "--output", tmp_path / "answers.jsonl") == 2
    assert "poprun started 2 instances" in capsys.readouterr().err and not (tmp_path / "answers.jsonl").exists()
    ranks = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}
    for name, value in ranks.items():
        monkeypatch.setenv(name, str(value))
    assert run(models["regression"], file, "regression") == 2
    assert "each process of torchrun would repeat the answers" in capsys.readouterr().err
