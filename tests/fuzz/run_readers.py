"""The readers of ipu_packed_bert: settings, run folders, checkpoints, Hugging Face folders, files of tasks, report."""

import contextlib
import hashlib
import json
import shutil
from functools import partial
from pathlib import Path

import torch
import yaml

from ipu_packed_bert.commands import export, finetune, pretrain
from ipu_packed_bert.run_files.checkpoints import load_newest
from ipu_packed_bert.run_files.folder import CHECKPOINTS, EVALUATIONS, LOG, read_log
from ipu_packed_bert.settings.allowed_changes import NETWORK
from ipu_packed_bert.settings.loading import load_config
from ipu_packed_bert.tasks import task_class
from ipu_packed_bert.tasks.inputs import Tokenizer
from ipu_packed_bert.tasks.starting_weights import find_start
from ipu_packed_bert.training.export import export_run
from ipu_packed_bert.training.prepared import Beginning
from ipu_packed_bert.training.pretraining import _refuse_other_network
from ipu_profiling.measured.runs import read as read_measured
from ipu_profiling.planning import command as plan_command
from ipu_profiling.planning.plan import plan
from ipu_profiling.report import command as report_command
from pack_data.reading.fields import said_of
from pack_data.text.vocabulary import load_vocabulary
from tests import fine_tuning_files, tiny_runs
from tests.fuzz.cases import Found, Reader, Target, typed
from tests.fuzz.mutators import (
    FOREIGN_PLACES,
    JSON,
    JSON_LINES,
    PLACES,
    SAFETENSORS,
    TEXT,
    YAML,
    bound,
    compressed,
    free,
    sealed_by,
    streams,
)
from tests.pack_data.text_corpus import build_small, write_corpus
from tests.pretraining import host_engine

_TORCH = ("torch",)


def _make_settings(folder):
    (folder / "run.yml").write_text(load_config(tiny_runs.tiny_config(folder / "tiny.yml", folder / "data")).to_yaml())
    (folder / "tiny.yml").unlink()


def _settings(folder):
    config = load_config(folder / "run.yml")
    typed(config)
    planned = plan(config, packing_factor=1.5)
    return Found([], (config.as_dict(), config.to_yaml(), repr(planned.fits)))


def _make_finetune_settings(folder):
    (folder / "task.yml").write_text(fine_tuning_files.tiny_config(None, folder / "train.json").to_yaml())


def _finetune_settings(folder):
    config = load_config(folder / "task.yml")
    typed(config)
    return Found([], (config.as_dict(), config.to_yaml()))


def _make_overrides(folder):
    _make_settings(folder)
    (folder / "overrides").write_text("optimizer.learning_rate: 0.01\nrun.steps: 12\nplacement.layers_per_ipu: [2]\n")


def _overrides(folder):
    """Texts of --set; one that is no text cannot be typed."""
    try:
        lines = (folder / "overrides").read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError:
        raise ValueError(f"{folder}: cannot be typed") from None
    config = load_config(folder / "run.yml", [line.replace(": ", "=", 1) for line in lines if line])
    return Found([], config.as_dict())


SETTINGS = (
    Reader(
        "settings",
        _make_settings,
        _settings,
        (Target("run.yml", free((*YAML, *PLACES))),),
        command=lambda folder: (plan_command.main, ["--config", str(folder / "run.yml"), "--plan"]),
        weight=3.0,
    ),
    Reader(
        "settings-of-tasks",
        _make_finetune_settings,
        _finetune_settings,
        (Target("task.yml", free((*YAML, *PLACES))),),
        command=lambda folder: (finetune.main, ["--config", str(folder / "task.yml"), "--show-config"]),
        weight=1.5,
    ),
    Reader("settings-by-set", _make_overrides, _overrides, (Target("overrides", free(YAML)),), weight=1.0),
)


def _make_run(folder, checkpoints=2):
    """Four updates of a network of 8 wide, on a data set with its vocabulary."""
    build_small(write_corpus(folder / "corpus", documents=8), folder / "data", held_out=0.3).close()
    shutil.rmtree(folder / "corpus")
    settings = tiny_runs.tiny_settings(folder / "data")
    settings["data"] = {"directory": str(folder / "data"), "held_out": 0.3}
    settings["model"].update(hidden_size=8, num_layers=1, intermediate_size=8)
    del settings["model"]["vocabulary_size"]
    settings["placement"]["layers_per_ipu"] = [1]
    settings["run"].update(steps=4, evaluate_every=3, keep_checkpoints=checkpoints)
    (folder / "tiny.yml").write_text(yaml.safe_dump(settings))
    assert pretrain.main(["--config", str(folder / "tiny.yml"), "--out", str(folder / "run")]) == 0
    for path in (folder / "run").glob("events.out.*"):
        path.unlink()


def _make_counted_run(folder):
    """A run whose updates IPUs counted."""
    _make_run(folder)
    log = folder / "run" / LOG
    log.write_text(log.read_text().replace('"cycles": null', '"cycles": 1000'))


def _logs(folder):
    records = []
    for name in (LOG, EVALUATIONS):
        # A log has no checksum: what is asked is that the records are records.
        found = read_log(folder / "run" / name, note=lambda text: None)
        assert all(isinstance(record, dict) and type(record["step"]) is int for record in found)
        records.append(found)
    return Found([], records)


def _report(folder):
    measured = typed(read_measured(folder / "run"))
    return Found([], measured)


def _resumed(folder):
    """Run the checks of --resume before the first update."""
    run = folder / "run"
    config = load_config(run / "config.yml")
    begin = Beginning(str(run), load_newest(run / CHECKPOINTS))
    _refuse_other_network(begin, config, NETWORK)
    assert begin.checkpoint is not None
    identity = begin.checkpoint.identity
    with contextlib.closing(host_engine(config)) as engine, said_of(run):
        engine.load_state(begin.checkpoint.engine)
        state = engine.state()
    return Found([(begin.step, state, begin.checkpoint.batches)], (config.as_dict(), identity))


def _exported(folder):
    out = folder / "out"
    done = export_run(folder / "run", out)
    return Found([done.step], [path.read_bytes() for path in sorted(out.iterdir())])


def _seal(path):
    """Writes the size and sha256 of a checkpoint's file into the manifest beside it."""
    manifest = path.parent / "manifest.json"
    tree = json.loads(manifest.read_text())
    data = path.read_bytes()
    tree["files"][path.name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    manifest.write_text(json.dumps(tree))


_NEWEST = "run/checkpoints/step_00000004"
# Every file has its sha256 in the manifest, so that no change of one of them is another valid value.
_CHECKPOINTS = (
    Target("run/checkpoints/*/*.json", (*JSON, *FOREIGN_PLACES), 1.0),
    Target("run/checkpoints/*/*.safetensors", (*bound(SAFETENSORS), *FOREIGN_PLACES), 1.0),
    Target("run/checkpoints/*/state.json", sealed_by(_seal, JSON, remade=True), 1.0),
    Target("run/checkpoints/*/*.safetensors", sealed_by(_seal, SAFETENSORS, remade=True), 1.0),
)
_RUN = (
    Target("run/config.yml", free((*YAML, *PLACES))),
    Target("run/environment.json", free((*JSON, *PLACES)), 0.5),
    Target("run/log.jsonl", free((*JSON_LINES, *PLACES))),
)


RUNS = (
    Reader("run-logs", _make_run, _logs, (Target("run/*.jsonl", free((*JSON_LINES, *PLACES))),), needs=_TORCH),
    Reader(
        "run-report",
        _make_counted_run,
        _report,
        (Target("run/log.jsonl", free((*JSON_LINES, *PLACES))), Target("run/config.yml", free((*YAML, *PLACES)))),
        command=lambda folder: (report_command.main, ["--measured", str(folder / "run")]),
        needs=_TORCH,
    ),
    Reader(
        "run-resume",
        _make_run,
        _resumed,
        (*_RUN, *_CHECKPOINTS),
        command=lambda folder: (pretrain.main, ["--resume", str(folder / "run")]),
        needs=_TORCH,
        or_without=_NEWEST,
        weight=1.5,
    ),
    Reader(
        "run-export",
        partial(_make_run, checkpoints=1),  # so that there is no older one to take
        _exported,
        (*_RUN[:2], *_CHECKPOINTS),
        command=lambda folder: (export.main, [str(folder / "run"), str(folder / "out")]),
        needs=("torch", "safetensors"),
        weight=0.4,
    ),
)


def _make_hugging_face(folder):
    from dataclasses import replace

    from ipu_packed_bert.model.bert import BertModel
    from ipu_packed_bert.model.hugging_face import write_folder

    torch.manual_seed(11)
    model = replace(fine_tuning_files.MODEL, hidden_size=8, num_layers=1, intermediate_size=8)
    weights = {
        f"bert.{name}": value for name, value in BertModel(model, attention="eager", pooler=True).state_dict().items()
    }
    weights["classifier.weight"] = torch.zeros(3, 8)
    weights["classifier.bias"] = torch.zeros(3)
    labels = {"0": "a", "1": "b", "2": "c"}
    bert = folder / "bert"
    write_folder(
        bert,
        model,
        weights,
        fine_tuning_files.VOCABULARY,
        architecture="BertForSequenceClassification",
        id2label=labels,
        label2id={label: int(number) for number, label in labels.items()},
    )


def _started(folder):
    config = fine_tuning_files.tiny_config(folder / "bert", folder / "none", task="single_label")
    start = typed(find_start(config))
    return Found([], (start.model, start.weights, start.vocabulary.text, start.vocabulary.lower_case, start.labels))


def _hugging_face():
    return Reader(
        "hugging-face",
        _make_hugging_face,
        _started,
        (
            # Neither the file nor the folder has a checksum of the weights.
            Target("bert/model.safetensors", (*SAFETENSORS, *FOREIGN_PLACES), 2.0),
            Target("bert/config.json", free((*JSON, *FOREIGN_PLACES)), 2.0),
            Target("bert/tokenizer_config.json", free((*JSON, *FOREIGN_PLACES)), 0.5),
            Target("bert/vocab.txt", free((*TEXT, *FOREIGN_PLACES)), 0.5),
        ),
        command=lambda folder: (export.main, ["--import", str(folder / "bert"), str(folder / "run")]),
        needs=("torch", "safetensors"),
        weight=1.5,
    )


def _task(name, kind, suffix):
    """Files of a task from their bytes to the packs of an epoch."""
    file = f"train{suffix}"

    def make(folder):
        (folder / "vocab.txt").write_bytes(fine_tuning_files.VOCABULARY.text)
        if kind == "squad":
            made = fine_tuning_files.tiny_squad(folder / "made", questions=6, without_answer=1)
        elif kind == "tokens":
            made = _sentences(folder, suffix)
        else:
            made = _table(folder, kind, suffix)
        path = folder / file
        made.rename(path)
        if path.suffix in (".gz", ".xz"):
            compressed(path)

    def config_of(folder):
        return fine_tuning_files.tiny_config(None, folder / file, task=kind)

    def read(folder):
        config = config_of(folder)
        model = fine_tuning_files.MODEL
        task = task_class(kind)(config, Tokenizer(load_vocabulary(folder / "vocab.txt")), model)
        packs = task.training_packs
        return Found([packs.batch(packs.order(0), 0)], list(task.notes))

    plain = JSON if kind == "squad" else JSON_LINES if ".jsonl" in suffix else TEXT
    packed = Path(file).suffix in (".gz", ".xz")
    return Reader(
        name,
        make,
        read,
        (Target(file, (*(streams(plain) if packed else free(plain)), *PLACES)),),
        needs=_TORCH,
        weight=0.7,
    )


def _table(folder, kind, suffix):
    table = fine_tuning_files.tiny_table(folder / "made", kind, texts=12)
    if suffix.startswith(".jsonl"):
        rows = [line.rpartition(",") for line in table.read_text().splitlines()[1:]]
        table.write_text("".join(json.dumps({"text": text, "label": label}) + "\n" for text, _, label in rows))
    elif suffix.startswith(".tsv"):
        table.write_text(
            "\n".join("\t".join(line.rpartition(",")[::2]) for line in table.read_text().splitlines()) + "\n"
        )
    return table


def _sentences(folder, suffix):
    sentences = fine_tuning_files.tiny_sentences(folder / "made", sentences=6)
    if suffix.startswith(".jsonl"):
        blocks = [[line.split() for line in block.split("\n") if line] for block in sentences.read_text().split("\n\n")]
        sentences.write_text(
            "".join(
                json.dumps({"words": [cells[0] for cells in block], "labels": [cells[1] for cells in block]}) + "\n"
                for block in blocks
                if block
            )
        )
    return sentences


TASKS = (
    _task("squad", "squad", ".json"),
    _task("squad-gz", "squad", ".json.gz"),
    _task("table-csv", "single_label", ".csv"),
    _task("table-tsv", "multi_label", ".tsv"),
    _task("table-jsonl", "regression", ".jsonl"),
    _task("table-csv-xz", "single_label", ".csv.xz"),
    _task("words", "tokens", ".txt"),
    _task("words-jsonl-gz", "tokens", ".jsonl.gz"),
)


READERS = (*SETTINGS, *RUNS, _hugging_face(), *TASKS)
