"""Files, labels, checkpoints and tasks of users that are refused, each in one line that names file, place and value."""

import json
import lzma
import shutil
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from unittest import mock

import pytest

from ipu_packed_bert.run_files.checkpoints import load_newest, save_checkpoint
from ipu_packed_bert.settings.loading import config_from_tree
from ipu_packed_bert.settings.user_task import _trust
from ipu_packed_bert.tasks import files, starting_weights
from ipu_packed_bert.tasks.starting_weights import find_start, labels_of, learnt
from ipu_packed_bert.training.examples import prepare
from ipu_packed_bert.training.export import import_folder
from tests.fakes.sdk import installed
from tests.fine_tuning_files import OWN_TASKS, PIPELINE, VOCABULARY, tiny_checkpoint, tiny_config, tiny_table, tiny_task
from tests.refusals import faults_of_refusals, refused, rows_of


def task(kind, content, name, *, evaluation=None, **settings):
    """Write the training file, and the evaluation file if there is one, and make the task."""
    Path(name).write_text(content)
    other = None
    if evaluation is not None:
        other = Path(f"other-{name}")
        other.write_text(evaluation)
    return tiny_task(kind, Path(name), other, **settings)


def table(content, kind="single_label", name="t.csv", **options):
    return task(kind, content, name, **options)


def words(content, name="a.txt", **options):
    return task("tokens", content, name, **options)


def squad(context="river stone", *, seen=False, times=1, settings=(), **changes):
    """A file with one question, several times if asked for; a change to None removes a field."""
    entry = {"id": "q", "question": "where?", "answers": [{"text": "river", "answer_start": 0}], **changes}
    entry = {name: value for name, value in entry.items() if value is not None}
    content = json.dumps({"data": [{"paragraphs": [{"context": context, "qas": [entry] * times}]}]})
    return task("squad", content, "q.json", evaluation=content if seen else None, **dict(settings))


def answer(text, start):
    return [{"text": text, "answer_start": start}]


def own(name, number=1):
    tree = {"task": {"name": name, "words": number}, "data": {"training": "a.csv"}}
    return config_from_tree(tree, "own.yml")


def start(checkpoint, slots=64):
    training = tiny_table(Path("w.csv"), "single_label", texts=4)
    data = {"max_sequence_length": slots}
    return find_start(tiny_config(checkpoint, training, task="single_label", data=data))


def with_longer_vocabulary(name):
    """Copy a checkpoint; give the copy a vocabulary with a token that has no embedding."""
    copy = Path(shutil.copytree(name, f"longer-{name}"))
    (copy / "vocab.txt").write_bytes(VOCABULARY.text + b"further\n")
    (copy / "tokenizer.json").unlink()
    return copy


def without_package():
    """Start from the package of weights where it is not installed."""
    with mock.patch("importlib.metadata.distribution", side_effect=PackageNotFoundError):
        return start(starting_weights.PACKAGE)


def learnt_from_fine_tuning():
    """Take the pre-trained weights of a run whose configuration is of another task."""
    imported = load_newest(Path("run/checkpoints"))
    save_checkpoint(Path("tuned-run/checkpoints"), imported._replace(config="task: {name: squad}\n"), keep=1)
    return learnt(Path("tuned-run"))


def labels(names):
    Path("config.json").write_text(json.dumps({"id2label": names}))
    return labels_of(Path("config.json"))


def evaluated_alone():
    return tiny_task("single_label", evaluation=tiny_table(Path("t.csv"), "single_label", texts=4))


def on_ipus(sequences=24, **placement):
    """A run on four IPUs, in a pipeline of two and two replicas unless `placement` says otherwise."""
    training = tiny_table(Path("t.csv"), "single_label")
    sections = {"engine": {"kind": "ipu"}, "batch": {"sequences_per_update": sequences, "micro_batch": 2}}
    sections["placement"] = {**PIPELINE, **placement}
    with installed(ipus=4):
        return prepare(tiny_config("bert", training, task="single_label", **sections))


CONLLU = "1\triver\triver\tNOUN\tNN\t_\t0\troot\t_\t_\n"
REFUSED = [
    *rows_of(
        r"""
# Questions.
squad(answers=answer('river', 1)) => q.json | question q | character 1
squad(times=2) => q.json | q | twice
squad(question='\ud800') => q.json | question | text
squad(id=['q9']) => q.json | id | text
squad(answers='a') => q.json | answers | list
squad(answers={'text': ['a'], 'answer_start': []}) => answers.text | answer_start | 0 entries
squad(answers=answer('river', 1e300)) => answer_start | whole number
squad(answers=answer('x' * 10_000, 0)) => question q | xxx | ^.{,600}$
squad(is_impossible='no') => q.json | is_impossible | 'no'
squad(question=None) => q.json | qas\[0\].question
squad(times=0) => q.json | no question
squad(answers=[], is_impossible=True) => q.json | task.null_answers
squad(answers=answer('sea', -1)) => q.json | answer_start -1
squad(answers=None, settings={'null_answers': True}) => q.json | 1 of 1 | is_impossible
squad(seen=True, settings={'drop_seen_paragraphs': True}) => other-q.json | q.json
squad('a \u200b b', answers=answer('\u200b', 2)) => q.json | question q | token
task('squad', '{', 'q.json') => q.json | not JSON
task('squad', '[]', 'q.json') => q.json | a SQuAD file has
# Tables.
table('text,label\na\n') => t.csv line 2 | 1 columns | header has 2
table('words,label\na,x\n') => t.csv line 2 | 'text' | words, label | task.text_column
table('text,label\na,\n') => t.csv line 2 | label | 1,000 characters
table('text,label\n"a\nb",x\nq,\n') => t.csv line 4 | label
table('text,label\na,x\nb,"y\nc,x\n') => t.csv line 3 | quote
table('text,label\na,much\n', 'regression') => t.csv | 'much' | number
table('text,label\na,1e300\n', 'regression') => t.csv | label | number
table('text,label\n') => t.csv | no text
table('text,label\na,' + 'x' * 70_000) => t.csv | label | ^.{,600}$
table('x' * 70_000 + ',b\na,c\n') => t.csv | 'text' | ^.{,600}$
table('text,label\na,x\nb,x\n') => t.csv | 1 different labels | label | two
table('text\na\n') => t.csv | no labels | task.label_column
table('', name='t.xlsx') => t.xlsx | .csv, .tsv, .jsonl | .parquet
table('text,label\na,9\nb,10\n', evaluation='text,label\na,11\n') => other-t.csv line 2 | '11' | 9, 10
table('{"text": 1, "label": 1}', name='t.jsonl') => t.jsonl line 1 | text | 1
table('[1]', name='t.jsonl') => t.jsonl line 1 | object
table('{"text": "a", "label": []}', 'regression', 't.jsonl') => t.jsonl line 1 | label | number
# Words.
words('\n\n') => a.txt | no sentences
words('river\nstone\n') => a.txt | no labels | task.labels_column
words('river O\n\nstone\n') => a.txt line 3 | some have none
words('word,label\nriver,O\n', 'a.csv') => a.csv | CoNLL or JSONL
words('{"words": "river", "labels": ["O"]}', 'a.jsonl') => a.jsonl line 1 | words | 'river'
words('{"words": ["river", "x"], "labels": ["O"]}', 'a.jsonl') => a.jsonl line 1 | labels | 2 labels
words('river O\nx X\n', evaluation='river Y\n') => other-a.txt line 1 | 'Y' | O, X
words(CONLLU, 'a.conll') => a.conll line 1 | column labels | upos | task.labels_column
words(CONLLU.replace('\t', ' '), 'a.conllu', labels_column='upos') => a.conllu line 1 | 10 columns | tabs
words('a ' * 11, 'a.conll', labels_column='upos') => a.conll | 11 columns | CoNLL-U
words('x' + CONLLU, 'a.conllu', labels_column='upos') => a.conllu line 1 | number
words('a b c d e O\n') => a.txt line 1 | 6 columns | at most 5
# Files, checkpoints, devices.
files.located(config_from_tree({'data': {'training': 'no.json'}}, 'a.yml'), Path('.')) => no.json | --data-dir
files.located(config_from_tree({'data': {'training': 'a'}}, 'a.yml'), Path('gone')) => --data-dir | gone
start('q.json') => q.json | model.checkpoint
start('bert', slots=128) => tiny | data.max_sequence_length is 128 | 64 positions
start('no-such-model') => no-such-model | model.checkpoint | null
start(with_longer_vocabulary('bert')) => longer-bert | tokens | embeddings | model.vocabulary
without_package() => not installed | pip install | model.checkpoint
learnt_from_fine_tuning() => tuned-run | fine-tuning run | model
learnt(Path('run'), vocabulary=Path('no.txt')) => no.txt | --vocabulary FILE
learnt(Path('run'), vocabulary=Path('long/vocab.txt')) => long/vocab.txt | embeddings | --vocabulary FILE
labels({'1': 'a'}) => config.json | id2label | 0 to 0
labels({'0': 'a', '2': 'b'}) => config.json | id2label | 0 to 1
evaluated_alone() => none | id2label
on_ipus(layers_per_ipu=[1, 2]) => placement.layers_per_ipu | 3 layers | 2
on_ipus(layers_per_ipu=[1]) => placement.layers_per_ipu | 1 values | 2
on_ipus(replicas=3) => placement.replicas | 3 x 2 = 6 | power of
on_ipus(replicas=8) => 4 IPUs | --set placement.replicas=2
on_ipus(sequences=5) => 3 stages | --set batch.sequences_per_update=
# Tasks of users.
own('own_task.py:Own', number=0) => own.yml | task.words is 0 | at least 1
own('own_task.py:NoTask') => own.yml | own_task.py | NoTask | ExampleTask
own('own_task.py:Begun') => own.yml | own_task.py | does not define
own('own_task.py:Missing') => own.yml | own_task.py | Missing
own('missing.py:Own') => own.yml | missing.py:Own | no file
"""
    ),
    *(
        (f"""table('{{"text": "a", "label": {label}}}', 'multi_label', 't.jsonl')""", ["t.jsonl line 1", "each once"])
        for label in ("null", "[0, 1, 0]", '["x", "x"]', '{"x": 1}')
    ),
]


def test_calls_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("own_task.py").write_text(OWN_TASKS)
    _trust("own_task.py")
    tiny_checkpoint(Path("bert"))
    import_folder(Path("bert"), Path("run"))
    Path("long").mkdir()
    Path("long/vocab.txt").write_bytes(VOCABULARY.text + b"further\n")
    faults = faults_of_refusals(REFUSED, globals())
    assert not faults, "\n".join(faults)


def test_files_that_are_cut_or_too_large_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    content = lzma.compress(b"{}" * 500)[:40]
    Path("q.json.xz").write_bytes(content)
    with refused("q.json.xz", "cut or damaged"):
        files.ExampleSource.of("q.json.xz").json()
    Path("t.csv").write_bytes(b"text,label\n\xff,x\n")
    with refused("t.csv", "UTF-8"):
        list(files.ExampleSource.of("t.csv").lines())
    monkeypatch.setattr(files, "_LONGEST_LINE", 12)
    with refused("t.csv line 2", 12):
        table("text,label\n" + "a" * 12 + ",x\n")
    monkeypatch.setattr(files, "_MOST_CHARACTERS", 20)
    with refused("q.json", 20):
        squad()


def test_many_records_that_cannot_be_used_are_named_in_one_message(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError) as caught:
        table("text,label\n" + "a,\n" * 30)
    first, *lines = str(caught.value).splitlines()
    assert "t.csv: 30 records" in first
    assert len(lines) == 21
    assert "t.csv line 2:" in lines[0]
    assert "10 more" in lines[-1]


def test_a_changed_package_of_weights_is_refused(tmp_path, monkeypatch):
    from importlib import metadata

    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(b"changed")

    class Distribution:
        def locate_file(self, name):
            return tmp_path

    monkeypatch.setattr(metadata, "distribution", lambda name: Distribution())
    with refused("model.safetensors", starting_weights.PACKAGE, "pip install"):
        starting_weights.folder_of(starting_weights.PACKAGE)
