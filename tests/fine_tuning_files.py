"""Tiny files to fine-tune on, made of random words, and a tiny checkpoint whose vocabulary knows them.

checkpoint = tiny_checkpoint(tmp_path / "bert")                 # a Hugging Face folder, hidden 16, 2 layers
config = tiny_config(checkpoint, squad=tiny_squad(path, questions=20))
"""

import csv
import json
from dataclasses import replace

import numpy as np
import torch

from ipu_packed_bert.model.bert import BertModel
from ipu_packed_bert.model.hugging_face import write_folder
from ipu_packed_bert.settings.loading import config_from_tree
from ipu_packed_bert.tasks import task_class
from ipu_packed_bert.tasks.examples import Asked
from ipu_packed_bert.tasks.files import ExampleSource
from ipu_packed_bert.tasks.inputs import Tokenizer
from pack_data.text.vocabulary import SPECIAL_TOKENS, Vocabulary
from tests.tiny_runs import TINY

_WORDS = "river stone castle bridge market winter garden letter silver engine north seven music doctor paper"
WORDS = tuple(_WORDS.split())
KINDS = (
    "squad",
    "single_label",
    "multi_label",
    "regression",
    "tokens",
)
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
VOCABULARY = Vocabulary(SPECIAL_TOKENS + WORDS + tuple(_LETTERS + ".?,'") + tuple("##" + c for c in _LETTERS))
MODEL = replace(TINY, vocabulary_size=len(VOCABULARY), max_position_embeddings=64, layer_norm_eps=1e-12)
SLOTS = 64
# A user's file with a task, and classes that are none.
OWN_TASKS = """
from dataclasses import dataclass
from ipu_packed_bert.settings.reader import setting
from ipu_packed_bert.tasks.classification import ClassificationTask
from ipu_packed_bert.tasks.examples import ExampleTask
from ipu_packed_bert.settings.finetuning import TaskConfig

@dataclass(frozen=True)
class Settings(TaskConfig):
    words: int = setting(3, "how many", minimum=1)

class Own(ClassificationTask):
    settings = Settings

class NoTask:
    pass

class Begun(ExampleTask):
    settings = Settings
"""
# For the two layers of this network.
PIPELINE = {
    "replicas": 2,
    "ipus_per_replica": 2,
    "layers_per_ipu": [1, 1],
    "available_memory_proportion": [0.2, 0.2],
    "replicated_tensor_sharding": True,
}


def tiny_checkpoint(folder, *, pooler=True, positions=64):
    """An encoder without heads; weights large enough that tokens see each other."""
    torch.manual_seed(11)
    model = replace(MODEL, max_position_embeddings=positions)
    network = BertModel(model, attention="eager", pooler=pooler)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    weights = {"bert." + name: value for name, value in network.state_dict().items()}
    write_folder(folder, model, weights, VOCABULARY, architecture="BertModel")
    return folder


def tiny_fine_tuned(folder, kind):
    """A Hugging Face folder of the task of this name with a random head, for files as `training_file` makes."""
    training = training_file(folder.parent, kind)
    config = tiny_config(None, training, task=kind)
    task = task_class(kind)(config, Tokenizer(VOCABULARY), MODEL)
    torch.manual_seed(13)
    network = task.network("eager")
    for name, parameter in network.named_parameters():
        torch.nn.init.normal_(parameter, std=1.0 if name.startswith(("classifier", "qa_outputs")) else 0.3)
    settings = {"architecture": task.architecture, **task.export_settings()}
    write_folder(folder, MODEL, network.state_dict(), VOCABULARY, **settings)
    return folder


def tiny_squad(path, *, questions=20, without_answer=0, seed=0):
    """Version 2 form; some paragraphs need several windows of SLOTS; the last questions have no answer."""
    rng = np.random.default_rng(seed)
    paragraphs = []
    for number in range(questions):
        words = rng.choice(WORDS, int(rng.integers(6, 25) if number % 5 else rng.integers(70, 110))).tolist()
        text = " ".join(words)
        first = int(rng.integers(0, len(words) - 2))
        start = len(" ".join(words[:first])) + (1 if first else 0)
        answer = " ".join(words[first : first + 2])
        impossible = number >= questions - without_answer
        paragraphs.append(
            {
                "context": text,
                "qas": [
                    {
                        "id": f"q{number}",
                        "question": f"{words[first]} after {words[first - 1]}?",
                        "is_impossible": impossible,
                        "answers": [] if impossible else [{"text": answer, "answer_start": start}],
                    }
                ],
            }
        )
    path.write_text(json.dumps({"version": "v2.0", "data": [{"title": "t", "paragraphs": paragraphs}]}))
    return path


def tiny_table(path, kind, *, texts=40, seed=0):
    """A CSV table with the columns text and label."""
    rng = np.random.default_rng(seed)
    with open(path, "w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["text", "label"])
        for _ in range(texts):
            words = rng.choice(WORDS, int(rng.integers(2, 20))).tolist()
            label = WORDS.index(words[0]) % 3
            if kind == "multi_label":
                label = "|".join(sorted({f"l{WORDS.index(word) % 4}" for word in words[:2]}))
            elif kind == "regression":
                label = round(float(rng.normal()), 3)
            out.writerow([" ".join(words), label])
    return path


def tiny_sentences(path, *, sentences=30, seed=0):
    """A word and its label a line: stones are things, rivers and the stones after them places of two words."""
    rng = np.random.default_rng(seed)
    lines = []
    for _ in range(sentences):
        previous = ""
        for word in rng.choice(WORDS[:6], int(rng.integers(2, 20))).tolist():
            after_stone = "I-PLACE" if previous == "river" else "B-THING"
            label = {"river": "B-PLACE", "stone": after_stone}.get(word, "O")
            lines.append(f"{word} {label}")
            previous = word
        lines.append("")
    path.write_text("\n".join(lines))
    return path


def training_file(folder, kind, **options):
    """A file for the task of this name, in the folder."""
    if kind == "squad":
        return tiny_squad(folder / "train.json", **options)
    if kind == "tokens":
        return tiny_sentences(folder / "train.txt", **options)
    return tiny_table(folder / "train.csv", kind, **options)


def json_lines(path, *records):
    """Write a file of JSONL."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def tiny_task(
    kind,
    training=None,
    evaluation=None,
    *,
    slots=32,
    vocabulary=VOCABULARY,
    labels=None,
    asked=None,
    **settings,
):
    """The task of this name on files, with a sequence a row; `asked` is a file that is predicted and scored."""
    data = {"max_sequence_length": slots, "packer": "none"}
    for name, path in (("training", training), ("evaluation", evaluation or asked)):
        if path is not None:
            data[name] = str(path)
    model = {} if training else {"checkpoint": "none"}
    config = config_from_tree({"task": {"name": kind, **settings}, "data": data, "model": model}, "tiny")
    predicted = None if asked is None else Asked(ExampleSource.of(asked), labels=True)
    return task_class(kind)(config, Tokenizer(vocabulary), MODEL, labels, predicted)


def tiny_config(
    checkpoint,
    training,
    *,
    task="squad",
    of_task=None,
    evaluation=None,
    **sections,
):
    """Any setting may be given by its section: tiny_config(..., batch={"micro_batch": 1})."""
    tree = {
        "data": {
            "training": str(training),
            "evaluation": str(evaluation or training),
            "max_sequence_length": SLOTS,
            "packer": "spfhp",
        },
        "task": {
            "name": task,
            **({"stride": 16, "max_answer_length": 5} if task == "squad" else {}),
            **(of_task or {}),
        },
        "model": {
            "checkpoint": None if checkpoint is None else str(checkpoint),
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
        },
        "optimizer": {"learning_rate": 1.0e-2},
        "batch": {"sequences_per_update": 8, "micro_batch": 3},
        "engine": {"threads": 1},
        "run": {"epochs": 2, "seed": 3},
    }
    for section, values in sections.items():
        tree.setdefault(section, {}).update(values)
    return config_from_tree(tree, "tiny")
