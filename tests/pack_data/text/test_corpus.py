import bz2
import gzip
import io
import json
import lzma
import shutil
import tracemalloc
import zipfile
from array import array
from pathlib import Path

import pytest

from pack_data.building import stages, work_folder
from pack_data.building.command import main
from pack_data.building.held_out import held_out_folder
from pack_data.cli.command import run_main
from pack_data.reading.bad_records import BadRecords
from pack_data.store.data_set import read_manifest
from pack_data.text import corpus
from pack_data.text.copies import hashed, without_copies
from pack_data.text.corpus import Document, content_digest, documents, split_sentences
from pack_data.text.corpus_files import corpus_files
from tests.pack_data.text_corpus import build_small, write_corpus
from tests.refusals import refused


def test_files_of_a_folder_in_order_of_their_paths(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "one.txt").write_text("Third.\n\n  And its second line. \n")
    (tmp_path / "a.jsonl").write_text('{"text": "First.\\nStill first."}\n\n{"text": "Second."}\n')
    (tmp_path / ".hidden").write_text("not me")
    assert [document.lines for document in documents(tmp_path)] == [
        ["First.", "Still first."],
        ["Second."],
        ["Third.", "And its second line."],
    ]


@pytest.mark.parametrize("suffix, opener", [("", open), (".gz", gzip.open), (".xz", lzma.open)])
def test_compressed_files_hold_the_same_documents(tmp_path, suffix, opener):
    for name, text in (("a.txt", "Eins zwei.\nDrei."), ("b.jsonl", json.dumps({"body": "Vier ö."}) + "\n")):
        with opener(tmp_path / (name + suffix), "wt", encoding="utf-8") as handle:
            handle.write(text)
    assert [document.lines for document in documents(tmp_path, json_field="body")] == [
        ["Eins zwei.", "Drei."],
        ["Vier ö."],
    ]


def test_blank_lines_separate_documents_on_request(tmp_path):
    (tmp_path / "a.txt").write_text("\nOne.\nTwo.\n\n\nThree.\n")
    assert [document.lines for document in documents(tmp_path / "a.txt", separator="blank-line")] == [
        ["One.", "Two."],
        ["Three."],
    ]
    assert [document.lines for document in documents(tmp_path / "a.txt")] == [["One.", "Two.", "Three."]]


GOOD = '{"text": "Good."}\n'
BAD_LINES = [
    ('{"text": "a \\ud800 b"}\n', r"the text holds \\ud800, half of a surrogate pair"),
    ("[" * 200_000 + "\n", "nested too deeply"),
    ('{"text": "' + "long " * 200 + '"}\n', "longer than 500 bytes; raise --max-record-bytes"),
    ('{"text": "' + "long " * 400 + '"}', "longer than 500 bytes; raise --max-record-bytes"),
    ('{"text": "\udcff"}\n', "byte 0xff"),
    ("{broken\n", "not JSON"),
    ('{"text": 3}\n', "text is 3"),
    ('{"body": "ok"}\n', "there is: body"),
    ("[1]\n", "no field 'text'"),
]


@pytest.mark.parametrize("line, said", BAD_LINES)
def test_a_bad_line_is_named_or_left_out(tmp_path, line, said):
    longest = 500 if "long" in line else 1 << 26
    (tmp_path / "a.jsonl").write_bytes(
        (GOOD + line + ("" if line.endswith("}") else GOOD)).encode("utf-8", "surrogateescape")
    )
    with refused(f"a.jsonl: line 2: .*{said}.*--skip-bad"):
        list(documents(tmp_path, bad=BadRecords(0, longest)))
    bad = BadRecords(1, longest)
    assert [document.lines for document in documents(tmp_path, bad=bad)] == [["Good."]] * (
        1 if line.endswith("}") else 2
    )
    assert bad.count == 1


@pytest.mark.parametrize("separator", ["file", "blank-line"])
def test_a_line_of_text_that_is_not_utf_8_is_named_or_left_out(tmp_path, separator):
    (tmp_path / "a.txt").write_bytes("Eins.\nZw\u00f6lf.\n".encode("latin-1") + "Zw\u00f6lf.\n\nDrei.\n".encode())
    with pytest.raises(ValueError, match="a.txt: line 2: not UTF-8 text .byte 0xf6.*--skip-bad"):
        list(documents(tmp_path, separator=separator))
    bad = BadRecords(1)
    lines = [line for document in documents(tmp_path, separator=separator, bad=bad) for line in document.lines]
    assert lines == ["Eins.", "Zwölf.", "Drei."] and bad.count == 1


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
    found = list(documents(tmp_path))
    assert len(found) >= least and max(len(line) for document in found for line in document.lines) < 200
    assert " ".join(line for document in found for line in document.lines).split() == WORDS


def test_what_is_not_there_or_no_text_is_an_error(tmp_path):
    with refused("nothing", "no such file"):
        list(documents(tmp_path / "nothing"))
    with refused(tmp_path, "no text file"):
        list(documents(tmp_path))


@pytest.mark.parametrize("name", ["a.txt", "a", "a.json.bak", "a.txt.gz"])
@pytest.mark.parametrize("separator", ["file", "blank-line"])
@pytest.mark.parametrize("lines", [1, 2, 5])
def test_lines_of_json_are_jsonl_under_any_name(tmp_path, name, separator, lines):
    text = "\n" + '{"text": "One.", "id": 1}\n\n' * lines
    with (gzip.open if name.endswith(".gz") else open)(tmp_path / name, "wt") as handle:
        handle.write(text)
    found = documents(tmp_path / name, separator=separator)
    assert [document.lines for document in found] == [["One."]] * lines


def test_a_text_without_blank_lines_is_not_read_whole(monkeypatch):
    monkeypatch.setattr(corpus, "LONGEST_DOCUMENT", 50)
    handle = io.StringIO("A line of text.\n" * 1000)
    lines = corpus._lines(handle)
    first = next(corpus._text_documents(Path("a.txt"), lines, "blank-line", BadRecords()))
    assert (first.name, len(first.lines), first.continues) == ("a.txt:1", 4, False) and handle.tell() < 1000


@pytest.mark.parametrize("first", ["Text.", "{not JSON}", "[1, 2]", '"A word in quotes"', '{"a": ' * 9000 + "}"])
def test_a_text_may_hold_lines_of_json(tmp_path, first):
    (tmp_path / "a.txt").write_text(f'{first}\n{{"text": "One."}}\n')
    assert [document.lines for document in documents(tmp_path)] == [[first, '{"text": "One."}']]


ONE = "First.\nSecond.\n"


@pytest.mark.parametrize(
    "name, content",
    [
        ("a.JSONL", json.dumps({"text": ONE}).encode()),
        ("a.JSON.GZ", gzip.compress(json.dumps({"text": ONE}).encode(), mtime=0)),
        ("a.jsonl", b"\xef\xbb\xbf" + json.dumps({"text": ONE}).encode()),
        ("a.txt", b"\xef\xbb\xbf" + ONE.encode()),
        ("a.json", json.dumps([{"text": ONE}], indent=1).encode()),
        ("a.txt.bz2", bz2.compress(ONE.encode())),
        ("wiki_00", json.dumps({"id": "7", "text": ONE}).encode()),
        ("part.0001", ONE.encode()),
        ("a.txt", "First.\u2028\u2029Second.".encode()),
        ("a.json", json.dumps({"text": "First.\x85 \fSecond.\r"}, ensure_ascii=False).encode()),
    ],
)
def test_names_in_capitals_marks_of_byte_order_and_numbered_names(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    assert [document.lines for document in documents(tmp_path)] == [["First.", "Second."]]


@pytest.mark.parametrize(
    "name, content, names",
    [
        ("a.txt", ONE.encode("utf-16"), ["UTF-16", "iconv"]),
        ("a.txt", ONE.encode("utf-16-be"), ["UTF-16", "iconv"]),
        ("a.jsonl", json.dumps({"text": ONE}).encode("utf-16"), ["UTF-16", "iconv"]),
        ("a.txt", ONE.encode("utf-32"), ["UTF-32", "iconv"]),
        ("a.txt.gz", gzip.compress(ONE.encode("utf-16"), mtime=0), ["UTF-16"]),
        ("a.txt", "Eins.\nGr\u00f6\u00dfe".encode("latin-1") + b" zwei", ["line 2", "0xf6", "offset 2"]),
        ("a.txt", "Gr\u00f6n.".encode("latin-1"), ["line 1", "0xf6", "offset 2", "Latin-1"]),
        ("a.txt", "F\u00fcr \u201cDich\u201d.".encode("cp1252"), ["0xfc", "offset 1", "Latin-1"]),
        ("a.txt", "A \u201cword\u201d.".encode("cp1252"), ["0x93", "offset 2", "Windows-1252"]),
        ("a.txt", "\u4f60\u597d".encode("gb18030"), ["0xc4", "offset 0", "GB18030"]),
        ("a.csv", b"text,label\nOne.,1\n", ["table", "JSONL"]),
        ("A.TSV.gz", gzip.compress(b"text\tlabel\n", mtime=0), ["table", "JSONL"]),
        ("a.html", b"<!DOCTYPE html>\n<html><p>One.</p></html>", ["HTML"]),
        ("a.txt", b"\n<html><p>One.</p></html>", ["HTML"]),
        ("a.pdf", b"%PDF-1.7\n\x00\x01", ["PDF"]),
        ("a.docx", b"PK\x03\x04\x14", ["ZIP"]),
        ("a.xml", b"<?xml version='1.0'?>", ["XML"]),
        ("enwiki", b'<mediawiki xml:lang="en">', ["XML"]),
        ("a.h5", b"\x89HDF\r\n\x1a\n" + bytes(200), ["hdf5", "--from"]),
        ("a.npy", b"\x93NUMPY\x01\x00" + bytes(200), ["NumPy"]),
    ],
)
def test_other_encodings_and_data_formats_among_texts_are_named(tmp_path, name, content, names):
    (tmp_path / "0.txt").write_text("Text.")
    (tmp_path / name).write_bytes(content)
    for source in (tmp_path, tmp_path / name):
        with refused(tmp_path / name, *names):
            list(documents(source))


def test_files_with_other_suffixes_are_left_out_unless_they_are_named(tmp_path):
    for name in ("a.txt", "b.story", "c.story"):
        (tmp_path / name).write_text(f"{name}.")
    (tmp_path / "d.log").write_bytes(bytes(100))  # anything that is no known format
    files = corpus_files(tmp_path)
    assert files.names == ["a.txt"] and files.left_out == [tmp_path / name for name in ("b.story", "c.story", "d.log")]
    (remark,) = files.remarks()
    assert "3 files" in remark and ".story 2, .log 1" in remark
    stories = corpus_files(str(tmp_path / "*.story"))
    assert stories.names == ["b.story", "c.story"] and not list(stories.remarks())
    assert corpus_files([tmp_path / "d.log", tmp_path / "a.txt"]).names == ["d.log", "a.txt"]
    (tmp_path / "a.txt").unlink()
    with refused(tmp_path, ".story 2, .log 1"):
        corpus_files(tmp_path)


TEXTS = ["One. Two.\nThree.", "Four.", "", "\u00c4h \u2013 five."]


def write_tables(folder, columns):
    """Write the same rows in every form that is read as a table; return the path and options of each."""
    pa = pytest.importorskip("pyarrow", reason="needs pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow")
    table = pa.table(columns)
    hub = folder / "hub"
    (hub / "data").mkdir(parents=True)
    (hub / "README.md").write_text("# About these data")
    (hub / "dataset_infos.json").write_text("{}")
    for number in range(2):
        path = hub / "data" / f"train-{number:05d}-of-00002.parquet"
        parquet.write_table(table.slice(2 * number, 2), path, row_group_size=1)
    parquet.write_table(table.slice(0, 1), hub / "data" / "test-00000-of-00001.parquet")
    fineweb = folder / "fineweb" / "data" / "CC-MAIN-2024-10"
    fineweb.mkdir(parents=True)
    parquet.write_table(table, fineweb / "000_00000.parquet", compression="zstd")
    for name, new in (("stream", pa.ipc.new_stream), ("file", pa.ipc.new_file)):
        with new(str(folder / f"{name}.arrow"), table.schema) as writer:
            writer.write_table(table)
    saved = folder / "saved"
    saved.mkdir()
    shutil.copy(folder / "stream.arrow", saved / "data-00000-of-00001.arrow")
    shutil.copy(folder / "stream.arrow", saved / "cache-1234567890abcdef.arrow")
    (saved / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    (saved / "dataset_info.json").write_text("{}")
    return [
        (hub, {"split": "train"}),
        (folder / "fineweb", {}),
        (fineweb / "000_00000.parquet", {}),
        (str(hub / "data" / "train-*.parquet"), {}),
        ([hub / "data" / f"train-{number:05d}-of-00002.parquet" for number in range(2)], {}),
        (folder / "stream.arrow", {}),
        (folder / "file.arrow", {}),
        (saved, {}),
    ]


@pytest.mark.parametrize(
    "columns",
    [
        {"id": ["1", "2", "3", "4"], "url": list("abcd"), "title": list("efgh"), "text": TEXTS},
        {"content": TEXTS, "size": [1, 2, 3, 4], "path": list("abcd")},
        {"body": TEXTS, "score": [0.5] * 4, "tokens": [[1]] * 4},
    ],
    ids=["Wikipedia", "The Stack", "one column of texts"],
)
def test_documents_of_tables(tmp_path, columns):
    for source, options in write_tables(tmp_path, columns):
        lines = [document.lines for document in documents(source, **options)]
        assert lines == [["One. Two.", "Three."], ["Four."], ["\u00c4h \u2013 five."]], source


def _keep_notes(monkeypatch):
    """Return a list that gets, of each build, the texts of its notes and of its vocabulary, by name."""
    kept = []

    def announce(work, targets):
        paths = [path for name in ("text.json", "vocab.txt", "examples-*.json") for path in work.rglob(name)]
        kept.append({path.relative_to(work).as_posix(): path.read_text() for path in sorted(paths)})
        work_folder.announce(work, targets)

    monkeypatch.setattr(stages, "announce", announce)
    return kept


def test_tables_build_the_same_packs_as_text_files(tmp_path, monkeypatch):
    notes = _keep_notes(monkeypatch)
    texts = write_corpus(tmp_path / "texts", 30)
    rows = [path.read_text() for path in sorted(texts.iterdir())]
    options = dict(held_out=0.3, whole_word_masking=True)
    build_small(texts, tmp_path / "from-texts", **options).close()
    pa = pytest.importorskip("pyarrow", reason="needs pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow")
    table = pa.table({"id": list(range(30)), "text": rows, "title": rows})
    parquet.write_table(table, tmp_path / "wiki.parquet", row_group_size=7)
    (tmp_path / "wiki.jsonl").write_text("".join(json.dumps({"title": row}) + "\n" for row in rows))
    for name, columns in (("wiki.parquet", ()), ("wiki.parquet", ("title",)), ("wiki.jsonl", ("title",))):
        out = tmp_path / "out"
        build_small(tmp_path / name, out, columns=columns, overwrite=True, **options).close()
        for side in (out, held_out_folder(out)):
            other = read_manifest(tmp_path / side.name.replace("out", "from-texts", 1))
            manifest = read_manifest(side)
            is_same = (manifest.shards, manifest.files, manifest.digest) == (other.shards, other.files, other.digest)
            # They differed once, which nothing explained.
            assert is_same, f"{side.name}, the builds of text files and of {name}: {notes[0]}\n{notes[-1]}"
    assert len(notes) == 4 and all({"text.json", "vocab.txt", "examples-00000.json"} <= {*note} for note in notes)


def _archive(path, members):
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


@pytest.mark.parametrize(
    "members, number",
    [
        ({"a.txt": ONE}, 1),
        ({"a.json": json.dumps([{"text": ONE}, {"text": ONE}])}, 2),
        ({"a.jsonl": json.dumps({"text": ONE}), "b.jsonl": json.dumps({"text": ONE})}, 2),
    ],
)
def test_the_files_in_an_archive_are_read_by_their_names(tmp_path, members, number):
    assert len(list(documents(_archive(tmp_path / "a.zip", members)))) == number


@pytest.mark.parametrize(
    "members, names",
    [({"a.txt": ONE, "b.txt": ONE}, ["2 files", "unpack"]), ({"b.csv": "a,b\n1,2\n"}, ["b.csv", "JSONL"])],
)
def test_archives_whose_files_would_run_together_are_refused(tmp_path, members, names):
    path = _archive(tmp_path / "a.zip", members)
    with refused("a.zip", *names):
        list(documents(path))


@pytest.mark.parametrize(
    "columns, options, names",
    [
        ({"title": TEXTS, "body": TEXTS}, {}, ["title, body", "--columns"]),
        ({"text": TEXTS, "content": TEXTS}, {}, ["text, content", "--columns"]),
        ({"text": TEXTS}, {"columns": ["body"]}, ["body", "text", "--columns"]),
        ({"text": TEXTS, "n": [1, 2, 3, 4]}, {"columns": ["n"]}, ["n", "text", "--columns"]),
        ({"text": TEXTS}, {"json_field": "body"}, ["body", "text", "--columns"]),
        ({"input_ids": [[1]] * 4}, {}, ["none", "--from"]),
        ({"text": ["a", None, "b", "c"]}, {}, ["record 1", "text is None", "--skip-bad"]),
        ({"input_ids": [[1]] * 4, "url": TEXTS}, {}, ["url", "--columns", "--from"]),
    ],
)
def test_tables_without_one_column_of_texts_are_refused(tmp_path, columns, options, names):
    pa = pytest.importorskip("pyarrow", reason="needs pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow")
    parquet.write_table(pa.table(columns), tmp_path / "a.parquet")
    with refused("a.parquet", *names):
        list(documents(tmp_path / "a.parquet", **options))


@pytest.mark.parametrize(
    "files, options, names",
    [
        (["train.jsonl", "test.jsonl"], {}, ["train", "test", "--split"]),
        (["train-00000-of-00003.jsonl", "train-00002-of-00003.jsonl"], {}, ["train-00001-of-00003.jsonl"]),
        (["a.jsonl", "a.jsonl.gz"], {}, ["a.jsonl", "a.jsonl.gz"]),
        (["a.txt", "a.txt.gz"], {}, ["a.txt", "a.txt.gz"]),
        (["a.txt", "b.parquet"], {}, ["b.parquet", "*.parquet"]),
        (["a.txt"], {"split": "train"}, ["--split train"]),
        (["a.txt"], {"columns": ["text"]}, ["a.txt", "--columns"]),
        (["manifest.json", "a.txt"], {}, ["--from"]),
    ],
)
def test_directories_that_contradict_themselves_are_refused(tmp_path, files, options, names):
    for name in files:
        opener = gzip.open if name.endswith(".gz") else open
        with opener(tmp_path / name, "wt") as file:
            file.write(GOOD if "json" in name else "One.")
    with refused(tmp_path, *names):
        list(documents(tmp_path, **options))


def test_a_split_and_texts_in_json_beside_jsonl(tmp_path):
    for name in ("train.jsonl", "test.jsonl", "notes.json", "dataset_info.json"):
        (tmp_path / name).write_text(json.dumps({"text": name}))
    files = corpus_files(tmp_path, "train")
    assert files.names == ["train.jsonl"] and [path.name for path in files.left_out] == ["notes.json"]
    with refused("train.jsonl", "--split test"):
        corpus_files(tmp_path / "train.jsonl", "test")


def test_a_build_says_which_column_is_read(tmp_path, capsys):
    rows = [{"id": str(number), "text": f"Words of row {number}. And more.", "n": 1} for number in range(9)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = f"--corpus {tmp_path / 'a.jsonl'} --workers 1 --max-sequence-length 64 --vocabulary-size 90"
    assert run_main(main, [*options.split(), "--out", str(tmp_path / "out")]) == 0
    assert f"text from {tmp_path / 'a.jsonl'}, column text; ignored: id, n; 9 documents" in capsys.readouterr().err


def test_copies_are_counted_and_dropped_on_request(tmp_path, capsys):
    texts = write_corpus(tmp_path / "texts", 10)
    build_small(texts, tmp_path / "once", drop_copies=True).close()
    for number in range(5):
        shutil.copy(texts / f"{number:03d}.txt", texts / f"{number}-copy.txt")
    options = f"--corpus {texts} --workers 1 --max-sequence-length 64 --vocabulary-size 200 --packer spfhp --seed 3"
    assert run_main(main, [*options.split(), "--out", str(tmp_path / "all")]) == 0
    assert "33 % of the documents are copies (by hash); use --drop-copies" in capsys.readouterr().err
    assert run_main(main, [*options.split(), "--out", str(tmp_path / "less"), "--drop-copies"]) == 0
    assert "5 dropped copies" in capsys.readouterr().out
    manifests = [read_manifest(tmp_path / name) for name in ("once", "all", "less")]
    assert [manifest.made_with["documents"] for manifest in manifests] == [10, 15, 10]
    assert "drop_copies" not in manifests[1].made_with["options"]


def test_long_documents_are_copies_only_if_all_their_parts_are():
    long = [Document("a", ["x"]), Document("a", ["y"], True)]
    other = [Document("b", ["x"]), Document("b", ["z"], True)]
    three = [*long, *other, *long]
    hashes = array("Q")
    assert list(hashed(three, hashes)) == three
    assert hashes[0] == hashes[2] != hashes[1] and len(hashes) == 3
    assert list(without_copies(three, hashes)) == [*long, *other]


def test_memory_does_not_grow_with_the_file(tmp_path):
    line = "A sentence of text that is repeated many times over. " * 20 + "\n"
    (tmp_path / "a.txt").write_text(line * 12_000)  # 12.7 MB
    tracemalloc.start()
    count = sum(1 for _ in documents(tmp_path))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count >= 12 and peak < 6e6


@pytest.mark.parametrize(
    "text, sentences",
    [
        ("One. Two! Three? Four", ["One.", "Two!", "Three?", "Four"]),
        ("Mr. Smith met J. Doe at 5 p.m. today. He left.", ["Mr. Smith met J. Doe at 5 p.m. today.", "He left."]),
        ('She said "No." Then "Why?" (He knew.) End', ['She said "No."', 'Then "Why?"', "(He knew.)", "End"]),
        ("version 3.11 of os.path, e.g. This one", ["version 3.11 of os.path, e.g. This one"]),
        ("你好。世界！", ["你好。", "世界！"]),
        ("Was ist? Änderung.", ["Was ist?", "Änderung."]),
        ("\u300c你好。\u300d他说！？", ["\u300c你好。\u300d", "他说！？"]),
        ("３．１４です\uff61はい", ["３．１４です\uff61", "はい"]),
        ("\u0915\u0964 \u0916\u0965\u0917", ["\u0915\u0964", "\u0916\u0965", "\u0917"]),
        ("\u0627\u061f \u0628\u06d4 \u062c", ["\u0627\u061f", "\u0628\u06d4", "\u062c"]),
        (
            "\u03c4\u03b9; \u03bd\u03b1\u03b9\u037e \u03cc\u03c7\u03b9",
            ["\u03c4\u03b9;", "\u03bd\u03b1\u03b9\u037e", "\u03cc\u03c7\u03b9"],
        ),
        ("\u1200\u1362 \u1201\u1367 \u1202", ["\u1200\u1362", "\u1201\u1367", "\u1202"]),
        ("He came; she left.", ["He came; she left."]),
        ("   ", []),
    ],
)
def test_sentences(text, sentences):
    assert split_sentences(text) == sentences


def test_the_embedded_corpus_is_english_of_about_two_megabytes():
    found = list(documents("embedded"))
    assert all(isinstance(document, Document) and document.lines for document in found)
    characters = sum(len(line) for document in found for line in document.lines)
    assert 400 < len(found) < 1500 and 1.2e6 < characters < 4e6
    assert any(document.name == "pydoc topic if" for document in found) and any(
        document.name == "argparse" for document in found
    )
    # Paragraphs are unwrapped: no line break stands inside a sentence.
    assert max(len(line) for document in found for line in document.lines) > 300


def test_content_digest_follows_content_and_not_the_place(tmp_path):
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text("same")
    assert content_digest(tmp_path / "x") == content_digest(tmp_path / "y")
    (tmp_path / "y" / "a.txt").write_text("other")
    assert content_digest(tmp_path / "x") != content_digest(tmp_path / "y")


def test_a_build_leaves_out_bad_lines_on_request_and_says_which(tmp_path, capsys):
    text = "Some words of a sentence that is here. And another one of them follows.\n"
    for name, bad in (("good", ""), ("bad", '{"text": "\\ud800"}\n{broken\n')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.jsonl").write_text(
            json.dumps({"text": text * 9}) + "\n" + bad + json.dumps({"text": text * 7}) + "\n"
        )
    with pytest.raises(ValueError, match="a.jsonl: line 2: "):
        build_small(tmp_path / "bad", tmp_path / "out", vocabulary_size=100)
    with build_small(tmp_path / "bad", tmp_path / "out", vocabulary_size=100, skip_bad=2) as store:
        skipped = store.manifest.made_with["skipped"]
    assert ["line 2" in skipped[0], "line 3" in skipped[1], len(skipped)] == [True, True, 2]
    with build_small(tmp_path / "good", tmp_path / "whole", vocabulary_size=100) as whole:
        assert whole.manifest.shards == store.manifest.shards and "skipped" not in whole.manifest.made_with
    options = "--skip-bad 2 --vocabulary-size 100 --workers 1 --max-sequence-length 64".split()
    run_main(main, ["--corpus", str(tmp_path / "bad"), "--out", str(tmp_path / "again"), *options])
    assert capsys.readouterr().err.count("skipped ") == 2
