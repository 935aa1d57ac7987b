"""Builds and tasks that are refused: each call in one line that names the option, the file and the value."""

# ruff: noqa: F401  names that the table uses

import numpy as np
import pytest

from pack_data.building.assignment import assign
from pack_data.building.command import BuildOptions, build
from pack_data.building.runner import check_not_in_a_starting_worker, open_runner
from pack_data.building.shares import run_task
from pack_data.packers import get_packer
from pack_data.packing.histogram import LengthHistogram
from pack_data.store.data_set import StoreWriter
from pack_data.store.packs import SLOT, PackSchema, StoredColumn
from pack_data.text.vocabulary import SPECIAL_TOKENS
from tests.pack_data.text_corpus import build_small, write_corpus
from tests.refusals import faults_of_refusals, refused, rows_of

PUBLISHED = "squad_1_1_384"


def options(**given):
    return BuildOptions(**{"out": "data", **given})


def packing(lengths, slots):
    histogram = LengthHistogram.from_lengths(np.array(lengths), slots)
    return get_packer("spfhp")(histogram, max_sequences_per_pack=3)


REFUSED = [
    *rows_of(
        """
# options that do not go together
options(draw_documents='uniform', source='x.tfrecord') => --draw-documents | --from
options(draw_documents='alike').example_options() => draw_documents | 'alike' | tokens, uniform
options(whole_word_masking=True, synthetic=PUBLISHED) => --whole-word-masking | --synthetic
options(whole_word_masking=True, source='x.tfrecord') => --whole-word-masking | --from
options(sequences=5) => --sequences | --synthetic | --corpus
options(columns=('a',), synthetic=PUBLISHED) => --columns | --synthetic
options(columns=('a', 'b')) => --columns a,b | --corpus
options(source_format='jsonl') => --format | --from | --corpus
options(synthetic=PUBLISHED, json_field='body') => --json-field | --corpus | --synthetic
options(source='x.jsonl', document_separator='blank-line') => --document-separator | --corpus | --from
options(tokenizer='t.json', vocabulary='vocab.txt') => --tokenizer | --vocabulary
options(tokenizer='t.json', lower_case=False) => --tokenizer | --keep-case
options(tokenizer='t.json', synthetic=PUBLISHED) => --tokenizer | --synthetic
options(workers=0) => workers | 0
options(workers=-1) => workers | -1
options(workers=10**6) => workers | 1000000
options(workers=1.0) => workers | 1.0
options(max_sequences_per_pack='deep') => max_sequences_per_pack | deep
build('data') => BuildOptions | corpus= => TypeError
# sources
build(options(out=here / 'out', source=here / 'x.npy')) => x.npy | pack_data.pack | JSONL
build(options(out=here / 'out', source=here / 'none', max_sequence_length=8)) => none | no record
build_small(corpus, '/proc/x') => --out /proc/x
build_small(corpus, here / 'file') => --out | file | is a file
build_small(corpus, here / 'file' / 'below') => --out | file
# tasks
run_task(options(corpus=corpus), 'count') => --stage | --corpus | --workers
run_task(options(source=object()), 'count') => --stage | files
run_task(options(source='x.jsonl', overwrite=True), 'count') => --stage | --overwrite
run_task(options(source='x.jsonl'), 'pack') => stage 'pack' | count, recipe, deal
run_task(options(source='x.jsonl'), 'count', 3, 3) => task 3 of 3 | 0 to 2
# a packing of other lengths
assign(np.array([3, 3]), packing([3, 1], 4), 0) => 0 sequences of length 1 | places 1
assign(np.array([5, 3]), packing([3, 1], 4), 0) => from 3 to 5 | from 1 to 4
assign(np.array([0, 3]), packing([3, 1], 4), 0) => from 0 to 3 | from 1 to 4
"""
    ),
    *(
        (f"build_small(corpus, here / 'out', on='{on}')", ["--on", "dask:local:N"])
        for on in ("dask:", "tcp://10.0.0.1:8786", "ray:auto")
    ),
]


def test_calls_are_refused(tmp_path):
    corpus = write_corpus(tmp_path / "corpus", 2)
    np.save(tmp_path / "x.npy", np.array([5, 3]))
    (tmp_path / "file").write_text("")
    schema = PackSchema.of_tokens(8, 1, [StoredColumn("input_ids", SLOT, "|u1")])
    StoreWriter(tmp_path / "none", schema).finish(algorithm="none").close()
    faults = faults_of_refusals(REFUSED, {**globals(), "corpus": corpus, "here": tmp_path}, unchanged=tmp_path)
    assert not faults, "\n".join(faults)


def test_a_token_beyond_the_vocabulary_is_refused(tmp_path):
    source = tmp_path / "a.jsonl"
    source.write_text('{"input_ids": [1, 500]}\n')
    vocabulary = tmp_path / "vocab.txt"
    vocabulary.write_text("\n".join(SPECIAL_TOKENS))
    with refused("a.jsonl", "500", "vocabulary of 5"):
        build(options(out=tmp_path / "out", source=source, vocabulary=vocabulary))


def test_a_task_of_another_build_is_refused(tmp_path):
    source = tmp_path / "a.jsonl"
    source.write_text('{"input_ids": [1, 2]}\n')
    settings = dict(out=tmp_path / "data", source=source, max_sequence_length=8)
    rows = [("run_task(options(**given), 'deal')", ["data.building", "--stage count"])]
    faults = faults_of_refusals(rows, {**globals(), "given": settings})
    run_task(options(**settings), "count", 0, 2)
    rows = [("run_task(options(**given, seed=5), 'count', 1, 2)", ["data.building", "another build"])]
    faults += faults_of_refusals(rows, {**globals(), "given": settings}, unchanged=tmp_path)
    source.write_text('{"input_ids": [1, 3]}\n')
    rows = [("run_task(options(**given), 'count', 1, 2)", ["data.building", "another build"])]
    faults += faults_of_refusals(rows, {**globals(), "given": settings})
    assert not faults, "\n".join(faults)


def test_workers_that_start_the_script_again_end_without_a_word(monkeypatch):
    monkeypatch.setattr("multiprocessing.current_process", lambda: type("Starting", (), {"_inheriting": True}))
    with pytest.raises(SystemExit):
        check_not_in_a_starting_worker()
