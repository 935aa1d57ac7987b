"""Documents of every form of corpus, in bounded memory; sentences of every script; copies."""

import bz2
import gzip
import io
import json
import lzma
import tracemalloc
import zipfile
from array import array
from pathlib import Path

import pytest

from pack_data.building.held_out import held_out_folder
from pack_data.reading.bad_records import BadRecords
from pack_data.store.data_set import read_manifest
from pack_data.text import corpus
from pack_data.text.copies import hashed, without_copies
from pack_data.text.corpus import Document, content_digest, documents, split_sentences
from pack_data.text.corpus_files import corpus_files
from tests.pack_data.text_corpus import build_small, write_corpus

ONE = "First.\nSecond.\n"
TEXTS = ["One. Two.\nThree.", "Four.", "", "\u00c4h \u2013 five."]


def lines_of(source, **options):
    return [document.lines for document in documents(source, **options)]


# ---- files -----------------------------------------------------------------------------------------------------------


def test_files_of_a_directory_in_order_of_their_paths(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "one.txt").write_text("Third.\n\n  And its second line. \n")
    (tmp_path / "a.jsonl").write_text('{"body": "First.\\nStill first."}\n\n{"body": "Second."}\n')
    (tmp_path / ".hidden").write_text("not me")
    expected = [["First.", "Still first."], ["Second."], ["Third.", "And its second line."]]
    assert lines_of(tmp_path, json_field="body") == expected


@pytest.mark.parametrize(
    "name, content",
    [
        ("a.txt", ONE.encode()),
        ("a.txt", b"\xef\xbb\xbf" + ONE.encode()),
        ("a.txt", "First.\u2028\u2029Second.".encode()),
        ("a.txt.gz", gzip.compress(ONE.encode(), mtime=0)),
        ("a.txt.xz", lzma.compress(ONE.encode())),
        ("a.txt.bz2", bz2.compress(ONE.encode())),
        ("part.0001", ONE.encode()),
        ("a.JSONL", json.dumps({"text": ONE}).encode()),
        ("a.JSON.GZ", gzip.compress(json.dumps({"text": ONE}).encode(), mtime=0)),
        ("a.jsonl", b"\xef\xbb\xbf" + json.dumps({"text": ONE}).encode()),
        ("a.json", json.dumps([{"text": ONE}], indent=1).encode()),
        ("a.json", json.dumps({"text": "First.\x85 \fSecond.\r"}, ensure_ascii=False).encode()),
        ("wiki_00", json.dumps({"id": "7", "text": ONE}).encode()),
    ],
)
def test_a_document_under_any_name_and_in_any_form(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    assert lines_of(tmp_path) == [["First.", "Second."]]


@pytest.mark.parametrize("name", ["a.txt", "a", "a.json.bak", "a.txt.gz"])
def test_lines_of_json_are_jsonl_under_any_name(tmp_path, name):
    for lines in (1, 2, 5):
        text = ("\n" + '{"text": "One.", "id": 1}\n\n' * lines).encode()
        (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
        for separator in ("file", "blank-line"):
            assert lines_of(tmp_path / name, separator=separator) == [["One."]] * lines


@pytest.mark.parametrize("first", ["Text.", "{not JSON}", "[1, 2]", '"A word in quotes"', '{"a": ' * 9000 + "}"])
def test_a_text_may_hold_lines_of_json(tmp_path, first):
    (tmp_path / "a.txt").write_text(f'{first}\n{{"text": "One."}}\n')
    assert lines_of(tmp_path) == [[first, '{"text": "One."}']]


def test_a_separator_divides_a_text(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("\nOne.\nTwo.\n\n\nThree.\n")
    assert lines_of(path) == [["One.", "Two.", "Three."]]
    assert lines_of(path, separator="blank-line") == [["One.", "Two."], ["Three."]]
    assert lines_of(path, separator="line") == [["One."], ["Two."], ["Three."]]


@pytest.mark.parametrize("separator", ["file", "blank-line"])
def test_a_line_of_text_that_is_not_utf_8_is_named_or_left_out(tmp_path, separator):
    (tmp_path / "a.txt").write_bytes("Eins.\nZw\u00f6lf.\n".encode("latin-1") + "Zw\u00f6lf.\n\nDrei.\n".encode())
    with pytest.raises(ValueError, match="a.txt: line 2: not UTF-8 text .byte 0xf6.*--skip-bad"):
        lines_of(tmp_path, separator=separator)
    bad = BadRecords(1)
    assert sum(lines_of(tmp_path, separator=separator, bad=bad), []) == ["Eins.", "Zwölf.", "Drei."]
    assert bad.count == bad.lines == 1


def test_files_with_other_suffixes_are_left_out_unless_they_are_named(tmp_path):
    for name in ("a.txt", "b.story", "c.story"):
        (tmp_path / name).write_text(f"{name}.")
    (tmp_path / "d.log").write_bytes(bytes(100))  # anything that is no known format
    files = corpus_files(tmp_path)
    assert files.names == ["a.txt"]
    assert [path.name for path in files.left_out] == ["b.story", "c.story", "d.log"]
    (remark,) = files.remarks()
    assert "3 files" in remark
    assert ".story 2, .log 1" in remark
    stories = corpus_files(str(tmp_path / "*.story"))
    assert stories.names == ["b.story", "c.story"]
    assert not list(stories.remarks())
    assert corpus_files([tmp_path / "d.log", tmp_path / "a.txt"]).names == ["d.log", "a.txt"]


def test_a_split_and_texts_in_json_beside_jsonl(tmp_path):
    for name in ("train.jsonl", "test.jsonl", "notes.json", "dataset_info.json"):
        (tmp_path / name).write_text(json.dumps({"text": name}))
    files = corpus_files(tmp_path, "train")
    assert files.names == ["train.jsonl"]
    assert [path.name for path in files.left_out] == ["notes.json"]


def test_the_files_in_an_archive_are_read_by_their_names(tmp_path):
    row = json.dumps({"text": ONE})
    for members, number in (
        ({"a.txt": ONE}, 1),
        ({"a.json": f"[{row}, {row}]"}, 2),
        ({"a.jsonl": row, "b.jsonl": row}, 2),
    ):
        with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
            for name, content in members.items():
                archive.writestr(name, content)
        assert lines_of(tmp_path / "a.zip") == [["First.", "Second."]] * number


# ---- tables ----------------------------------------------------------------------------------------------------------


def write_tables(folder, columns):
    """Write the same rows in every form that is read as a table; return the path and options of each."""
    pa = pytest.importorskip("pyarrow", reason="needs pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow")
    table = pa.table(columns)
    data = folder / "hub" / "data"
    crawl = folder / "fineweb" / "data" / "CC-MAIN-2024-10"
    for directory in (data, crawl):
        directory.mkdir(parents=True)
    (folder / "hub" / "README.md").write_text("# About these data")
    shards = [data / f"train-{number:05d}-of-00002.parquet" for number in range(2)]
    for number, path in enumerate(shards):
        parquet.write_table(table.slice(2 * number, 2), path, row_group_size=1)
    parquet.write_table(table.slice(0, 1), data / "test-00000-of-00001.parquet")
    parquet.write_table(table, crawl / "000_00000.parquet", compression="zstd")
    with pa.ipc.new_stream(str(folder / "a.arrow"), table.schema) as writer:
        writer.write_table(table)
    plain = [folder / "fineweb", folder / "a.arrow", str(data / "train-*.parquet"), shards]
    return [(folder / "hub", {"split": "train"}), *((source, {}) for source in plain)]


@pytest.mark.parametrize(
    "columns",
    [
        {"id": list("1234"), "url": list("abcd"), "title": list("efgh"), "text": TEXTS},
        {"content": TEXTS, "size": [1, 2, 3, 4], "path": list("abcd")},
        {"body": TEXTS, "score": [0.5] * 4, "tokens": [[1]] * 4},
    ],
    ids=["Wikipedia", "The Stack", "one column of texts"],
)
def test_documents_of_tables(tmp_path, columns):
    for source, options in write_tables(tmp_path, columns):
        lines = lines_of(source, **options)
        assert lines == [["One. Two.", "Three."], ["Four."], ["\u00c4h \u2013 five."]], source


def test_tables_build_the_same_packs_as_text_files(tmp_path):
    texts = write_corpus(tmp_path / "texts", 20)
    rows = [path.read_text() for path in sorted(texts.iterdir())]
    options = dict(held_out=0.3, whole_word_masking=True)
    build_small(texts, tmp_path / "from-texts", **options).close()
    pa = pytest.importorskip("pyarrow", reason="needs pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow")
    table = pa.table({"id": list(range(20)), "text": rows, "title": rows})
    parquet.write_table(table, tmp_path / "wiki.parquet", row_group_size=7)
    (tmp_path / "wiki.jsonl").write_text("".join(json.dumps({"title": row}) + "\n" for row in rows))
    for name, columns in (("wiki.parquet", ()), ("wiki.jsonl", ("title",))):
        out = tmp_path / "out"
        build_small(tmp_path / name, out, columns=columns, overwrite=True, **options).close()
        for side in (out, held_out_folder(out)):
            other = read_manifest(tmp_path / side.name.replace("out", "from-texts", 1))
            manifest = read_manifest(side)
            assert (manifest.shards, manifest.files) == (other.shards, other.files)
            assert manifest.digest == other.digest


# ---- memory ----------------------------------------------------------------------------------------------------------

WORDS = [f"word{number}" for number in range(500)]


@pytest.mark.parametrize(
    "name, content, least",
    [
        ("a.txt", " ".join(WORDS[:300]) + "\n" + "\n".join(WORDS[300:]), 21),
        ("a.jsonl", json.dumps({"text": " ".join(WORDS)}), 1),
    ],
)
def test_a_long_document_continues_as_the_next_and_loses_nothing(tmp_path, monkeypatch, name, content, least):
    monkeypatch.setattr(corpus, "LONGEST_DOCUMENT", 100)
    (tmp_path / name).write_text(content)
    parts = lines_of(tmp_path)
    lines = sum(parts, [])
    assert len(parts) >= least
    assert max(map(len, lines)) < 200
    assert " ".join(lines).split() == WORDS


def test_a_text_without_blank_lines_is_not_read_whole(monkeypatch):
    monkeypatch.setattr(corpus, "LONGEST_DOCUMENT", 50)
    handle = io.StringIO("A line of text.\n" * 1000)
    first = next(corpus._text_documents(Path("a.txt"), corpus._lines(handle), "blank-line", BadRecords()))
    assert (first.name, len(first.lines), first.continues) == ("a.txt:1", 4, False)
    assert handle.tell() < 1000


def test_memory_does_not_grow_with_the_file(tmp_path):
    line = "A sentence of text that is repeated many times over. " * 20 + "\n"
    (tmp_path / "a.txt").write_text(line * 12_000)  # 12.7 MB
    tracemalloc.start()
    count = sum(1 for _ in documents(tmp_path))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count >= 12
    assert peak < 6e6


# ---- copies, sentences, the embedded corpus --------------------------------------------------------------------------


def test_long_documents_are_copies_only_if_all_their_parts_are():
    long = [Document("a", ["x"]), Document("a", ["y"], True)]
    other = [Document("b", ["x"]), Document("b", ["z"], True)]
    three = [*long, *other, *long]
    hashes = array("Q")
    assert list(hashed(three, hashes)) == three
    assert hashes[0] == hashes[2] != hashes[1]
    assert len(hashes) == 3
    assert list(without_copies(three, hashes)) == [*long, *other]


# The sentences of each text are divided by bars.
SENTENCES = [
    "One.| Two!| Three?| Four",
    "Mr. Smith met J. Doe at 5 p.m. today.| He left.",
    'She said "No."| Then "Why?"| (He knew.)| End',
    "version 3.11 of os.path, e.g. This one",
    "你好。|世界！",
    "Was ist?| Änderung.",
    "\u300c你好。\u300d|他说！？",
    "３．１４です\uff61|はい",
    "\u0915\u0964| \u0916\u0965|\u0917",
    "\u0627\u061f| \u0628\u06d4| \u062c",
    "\u03c4\u03b9;| \u03bd\u03b1\u03b9\u037e| \u03cc\u03c7\u03b9",
    "\u1200\u1362| \u1201\u1367| \u1202",
    "He came; she left.",
]


def test_sentences_end_at_the_stops_of_their_script():
    for text in SENTENCES:
        assert split_sentences(text.replace("|", "")) == [part.strip() for part in text.split("|")]
    assert split_sentences("   ") == []


def test_the_embedded_corpus_is_the_docstrings_of_the_library_in_order(tmp_path, monkeypatch):
    module = '"""Module.\n\nIts\ntext.\n"""\nclass One:\n    """Class."""\n    def two(self):\n        """Method."""\n'
    for name, source in (("b.py", module), ("a/c.py", "not Python"), ("test/d.py", module), ("a/e.py", "")):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(source)
    monkeypatch.setattr(corpus.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    first, *topics = corpus._embedded_documents.__wrapped__()
    assert first == Document("b", ["Module.", "Its text.", "Class.", "Method."])
    assert topics
    assert all(document.name.startswith("pydoc topic ") for document in topics)


@pytest.mark.slow
def test_the_embedded_corpus_is_english_of_about_two_megabytes():
    embedded = list(documents("embedded"))
    lines = [line for document in embedded for line in document.lines]
    assert all(document.lines for document in embedded)
    assert 400 < len(embedded) < 1500
    assert 1.2e6 < sum(map(len, lines)) < 4e6
    assert {"pydoc topic if", "argparse"} <= {document.name for document in embedded}
    # Paragraphs are unwrapped: no line break stands inside a sentence.
    assert max(map(len, lines)) > 300


def test_content_digest_follows_content_and_not_the_place(tmp_path):
    for name in "xy":
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text("same")
    assert content_digest(tmp_path / "x") == content_digest(tmp_path / "y")
    (tmp_path / "y" / "a.txt").write_text("other")
    assert content_digest(tmp_path / "x") != content_digest(tmp_path / "y")
