# ruff: noqa: F401  (names of the calls)
"""Corpora, vocabularies and tokenizers that cannot be used: each is refused in one line."""

import bz2
import gzip
import itertools
import json
import zipfile

import numpy as np
import pytest

from pack_data.building.command import BuildOptions, build
from pack_data.reading.bad_records import BadRecords
from pack_data.text.corpus import Document, documents
from pack_data.text.corpus_files import corpus_files
from pack_data.text.examples import ExampleOptions, tokenise
from pack_data.text.vocabulary import (
    SPECIAL_TOKENS,
    TokenizerFile,
    Vocabulary,
    load_tokenizer,
    load_vocabulary,
    train_vocabulary,
)
from tests.pack_data.text import tokenizer_files as files
from tests.pack_data.text.tokenizer_files import BOTH, byte_level, roberta_processing, word_tokenizer
from tests.refusals import faults_of_refusals

ONE = "First.\nSecond.\n"
GOOD = '{"text": "Good."}\n'
TEXTS = ["One. Two.\nThree.", "Four.", "", "\u00c4h \u2013 five."]
DOCUMENTS = [Document("", ["The packer packs packed packs."] * 5)]
EXAMPLES = {"max_sequence_length": 128, "max_predictions_per_sequence": 20}
MISNAMED = (b'"id":"[SEP]","type', b'"id":"[X]","type')
STATED = "special_tokens_map.json"
SHARD = "train-0000{}-of-00003.jsonl"

CORPORA = [
    ("read('a.txt', ONE.encode('utf-16'))", ["a.txt", "UTF-16", "iconv"]),
    ("read('a.txt', ONE.encode('utf-16-be'))", ["UTF-16", "iconv"]),
    ("read('a.jsonl', json.dumps({'text': ONE}).encode('utf-16'))", ["UTF-16", "iconv"]),
    ("read('a.txt', ONE.encode('utf-32'))", ["UTF-32", "iconv"]),
    ("read('a.txt.gz', gzip.compress(ONE.encode('utf-16'), mtime=0))", ["UTF-16"]),
    ("read('a.txt', 'Eins.\\nGr\\u00f6\\u00dfe'.encode('latin-1') + b' zwei')", ["line 2", "0xf6", "offset 2"]),
    ("read('a.txt', 'Gr\\u00f6n.'.encode('latin-1'))", ["line 1", "0xf6", "offset 2", "Latin-1"]),
    ("read('a.txt', 'A \\u201cword\\u201d.'.encode('cp1252'))", ["0x93", "offset 2", "Windows-1252"]),
    ("read('a.txt', '\\u4f60\\u597d'.encode('gb18030'))", ["0xc4", "offset 0", "GB18030"]),
    ("read('a.csv', b'text,label\\nOne.,1\\n')", ["a.csv", "table", "JSONL"]),
    ("read('A.TSV.gz', gzip.compress(b'text\\tlabel\\n', mtime=0))", ["table", "JSONL"]),
    ("read('a.txt', b'a\\tb\\tc\\n' * 9)", ["table of 3 columns", "JSONL"]),
    ("read('a.html', b'<!DOCTYPE html>\\n<html><p>One.</p></html>')", ["HTML"]),
    ("read('a.txt', b'\\n<html><p>One.</p></html>')", ["HTML"]),
    ("read('a.pdf', b'%PDF-1.7\\n\\0\\1')", ["PDF"]),
    ("read('a.docx', b'PK\\3\\4\\x14')", ["ZIP"]),
    ("read('a.xml', b'<?xml version=\"1.0\"?>')", ["XML"]),
    ("read('enwiki', b'<mediawiki xml:lang=\"en\">')", ["XML"]),
    ("read('a.h5', b'\\x89HDF\\r\\n\\x1a\\n' + bytes(200))", ["hdf5", "--from"]),
    ("read('a.npy', b'\\x93NUMPY\\1\\0' + bytes(200))", ["NumPy"]),
    # Bad lines of JSONL.
    ('lines(\'{"text": "a \\\\ud800 b"}\')', ["a.jsonl: line 2", "ud800", "--skip-bad"]),
    ("lines('[' * 200_000)", ["line 2", "nested"]),
    ("lines('{\"text\": \"' + 'long ' * 200 + '\"}', 500)", ["line 2", "500 bytes", "--max-record-bytes"]),
    ('lines(\'{"text": "\\udcff"}\')', ["line 2", "0xff"]),
    ("lines('{broken')", ["line 2", "not JSON"]),
    ("lines('{\"text\": 3}')", ["line 2", "text is 3"]),
    ('lines(\'{"body": "ok"}\')', ["line 2", "text", "body"]),
    ("lines('[1]')", ["line 2", "text"]),
    # Directories.
    ("list(documents(folder() / 'nothing'))", ["nothing", "no such file"]),
    ("list(documents(folder()))", ["no text file"]),
    ("among('train.jsonl', 'test.jsonl')", ["train", "test", "--split"]),
    ("among(SHARD.format(0), SHARD.format(2))", [SHARD.format(1)]),
    ("among('a.jsonl', 'a.jsonl.gz')", ["a.jsonl and a.jsonl.gz"]),
    ("among('a.txt', 'a.txt.gz')", ["a.txt and a.txt.gz"]),
    ("among('a.txt', 'b.parquet')", ["b.parquet", "*.parquet"]),
    ("among('a.txt', split='train')", ["--split train"]),
    ("among('a.txt', columns=['text'])", ["a.txt", "--columns"]),
    ("among('manifest.json', 'a.txt')", ["--from"]),
    ("among('b.story', 'c.story', 'd.log')", [".story 2, .log 1"]),
    ("corpus_files(path('a.jsonl', GOOD.encode()), 'test')", ["a.jsonl", "--split test"]),
    ("archive({'a.txt': ONE, 'b.txt': ONE})", ["a.zip", "2 files", "unpack"]),
    ("archive({'b.csv': 'a,b\\n1,2\\n'})", ["b.csv", "JSONL"]),
    # Tables without one column of texts.
    ("table(title=TEXTS, body=TEXTS)", ["a.parquet", "title, body", "--columns"]),
    ("table(text=TEXTS, content=TEXTS)", ["text, content", "--columns"]),
    ("table(['body'], text=TEXTS)", ["body", "text", "--columns"]),
    ("table(['n'], text=TEXTS, n=[1, 2, 3, 4])", ["n", "text", "--columns"]),
    ("table(input_ids=[[1]] * 4)", ["none", "--from"]),
    ("table(text=['a', None, 'b', 'c'])", ["record 1", "text is None", "--skip-bad"]),
    ("table(input_ids=[[1]] * 4, url=TEXTS)", ["url", "--columns", "--from"]),
]

VOCABULARIES = [
    ("load_vocabulary(path('vocab.txt', b'a\\nb\\n'))", ["vocab.txt", "[PAD], [UNK]"]),
    ("load_vocabulary(path('vocab.txt', b'[PAD]\\na\\na\\n'))", ["vocab.txt", "'a' twice"]),
    ("load_vocabulary(path('vocab.txt', b'\\xff\\xfe'))", ["vocab.txt", "not UTF-8"]),
    ("load_vocabulary(folder() / 'none.txt')", ["none.txt", "no such"]),
    ("train_vocabulary(DOCUMENTS, 20)", ["20", "no room", "at least"]),
    ("train_vocabulary([], 100)", ["no text"]),
    ("tokenizer(b'no json')", ["tokenizer.json", "not JSON"]),
    ("tokenizer(b'[1]')", ["tokenizer.json", "object"]),
    ('tokenizer(b\'{"version": "1.0"}\')', ["tokenizer.json", "no tokenizer"]),
    ("tokenizer(byte_level(special=('<|endoftext|>',)))", ["tokenizer.json", "special tokens", "[CLS]", "<s>"]),
    ("TokenizerFile(byte_level()).continues", ["BPE", "--whole-word-masking"]),
    ("tokenizer(word_tokenizer())", ["cls_token", "[CLS] or <s>", STATED]),
    ("tokenizer(word_tokenizer('[CLS] $A </s>'))", ["mask_token", "[MASK] or <mask>"]),
    ("tokenizer(word_tokenizer('$A', '$B [SEP] $A'))", ["post_processor", "type_ids"]),
    ("tokenizer(word_tokenizer('$A [SEP]:2'))", ["post_processor", "type_ids"]),
    (
        'tokenizer(word_tokenizer(\'$A [SEP]\').replace(b\'"id":"[SEP]","type\', b\'"id":"[X]","type\'))',
        ["post_processor"],
    ),
    ("tokenizer(word_tokenizer(post_processor=roberta_processing(7, 0)))", ["post_processor", "</s>", "vocabulary"]),
    ("tokenizer(word_tokenizer(post_processor=roberta_processing(2, 99)))", ["post_processor", "<s>", "vocabulary"]),
    ("tokenizer(word_tokenizer('<s> $A </s>'), cls_token='[CLS]')", [STATED, "cls_token", "tokenizer.json"]),
    ("tokenizer(word_tokenizer('$A </s> <s>'), cls_token='<s>')", [STATED, "cls_token", "tokenizer.json"]),
    ("tokenizer(word_tokenizer('$A </s>'), sep_token={'content': '[SEP]'})", [STATED, "sep_token"]),
    ("tokenizer(word_tokenizer('<s> $A </s>'), pad_token='<none>')", [STATED, "pad_token", "<none>"]),
    ("tokenizer(word_tokenizer('<s> $A </s>'), {'mask_token': '[MASK]'}, mask_token='<mask>')", ["mask_token", STATED]),
    ("BuildOptions('data', tokenizer='t.json', vocabulary='vocab.txt')", ["--tokenizer", "--vocabulary"]),
    ("BuildOptions('data', tokenizer='t.json', lower_case=False)", ["--tokenizer", "--keep-case"]),
    ("BuildOptions('data', tokenizer='t.json', synthetic='squad_1_1_384')", ["--tokenizer", "--synthetic"]),
    (
        "tokenise(DOCUMENTS, TokenizerFile(files.roberta()), ExampleOptions(5, 1))",
        ["5", "4 special tokens", "at least 6"],
    ),
    *(
        (
            f"ExampleOptions(**{{'max_sequence_length': 128, 'max_predictions_per_sequence': 20, '{name}': {value}}})",
            [name],
        )
        for name, value in (
            ("max_sequence_length", 4),
            ("max_predictions_per_sequence", 0),
            ("duplication_factor", 0),
            ("seed", -1),
            ("masked_lm_probability", 1.5),
            ("short_sequence_probability", -0.1),
            ("draw_documents", "'alike'"),
        )
    ),
]


@pytest.mark.parametrize("rows", [CORPORA, VOCABULARIES], ids=["corpora", "vocabularies"])
def test_texts_and_vocabularies_are_refused(tmp_path, rows):
    pytest.importorskip("pyarrow", reason="needs pyarrow")
    fresh = itertools.count()

    def folder():
        made = tmp_path / str(next(fresh))
        made.mkdir()
        return made

    def path(name, content):
        file = folder() / name
        file.write_bytes(content)
        return file

    def read(name, content):
        """Read a file alone; if it is refused, its directory must be refused as well."""
        file = path(name, content)
        (file.parent / "0.txt").write_text("Text.")
        try:
            list(documents(file))
        except ValueError as error:
            with pytest.raises(ValueError, match=name.replace("+", ".")):
                list(documents(file.parent))
            assert str(file) in str(error)
            raise

    def lines(line, longest=1 << 26):
        content = (GOOD + line + "\n" + GOOD).encode("utf-8", "surrogateescape")
        file = path("a.jsonl", content)
        bad = BadRecords(1, longest)
        assert [document.lines for document in documents(file, bad=bad)] == [["Good."]] * 2
        assert bad.count == 1
        return list(documents(file, bad=BadRecords(0, longest)))

    def among(*names, **options):
        directory = folder()
        for name in names:
            content = GOOD.encode() if "json" in name else b"One."
            (directory / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
        return list(documents(directory, **options))

    def archive(members):
        file = folder() / "a.zip"
        with zipfile.ZipFile(file, "w") as opened:
            for name, content in members.items():
                opened.writestr(name, content)
        return list(documents(file))

    def table(chosen=(), **columns):
        from pyarrow import parquet
        from pyarrow import table as arrow_table

        file = folder() / "a.parquet"
        parquet.write_table(arrow_table(columns), file)
        return list(documents(file, columns=chosen))

    def tokenizer(content, config=None, **stated):
        file = path("tokenizer.json", content)
        for name, values in ((STATED, stated), ("tokenizer_config.json", config)):
            if values:
                (file.parent / name).write_text(json.dumps(values))
        return load_tokenizer(file)

    faults = faults_of_refusals(rows, {**globals(), **locals()})
    assert not faults, "\n".join(faults)
