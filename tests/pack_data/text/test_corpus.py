import gzip
import io
import json
import lzma
import tracemalloc
from pathlib import Path

import pytest

from pack_data.building.command import main
from pack_data.cli.bad_records import BadRecords
from pack_data.cli.command import run_main
from pack_data.text import corpus
from pack_data.text.corpus import Document, content_digest, documents, split_sentences
from tests.pack_data.text_corpus import build_small
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
    ("{broken\n", "not a JSON object"),
    ('{"text": 3}\n', "no text in field 'text'"),
    ('{"body": "ok"}\n', "there is: body"),
    ("[1]\n", "no text"),
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
    with pytest.raises(ValueError, match="no such file"):
        list(documents(tmp_path / "nothing"))
    with pytest.raises(ValueError, match="holds no files"):
        list(documents(tmp_path))
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="not UTF-8"):
        list(documents(tmp_path))


@pytest.mark.parametrize("name", ["a.txt", "a", "a.json.bak", "a.txt.gz"])
@pytest.mark.parametrize("separator", ["file", "blank-line"])
@pytest.mark.parametrize("lines", [1, 2, 5])
def test_lines_of_json_that_the_name_does_not_tell_are_refused(tmp_path, name, separator, lines):
    path = tmp_path / name
    text = "\n" + '{"text": "One.", "id": 1}\n\n' * lines
    with (gzip.open if name.endswith(".gz") else open)(path, "wt") as handle:
        handle.write(text)
    with pytest.raises(ValueError, match="lines are JSON objects.*jsonl") as raised:
        list(documents(path, separator=separator))
    assert str(path) in str(raised.value) and "\n" not in str(raised.value)
    path.rename(tmp_path / "a.jsonl.gz" if name.endswith(".gz") else tmp_path / "a.jsonl")
    assert [document.lines for document in documents(tmp_path)] == [["One."]] * lines


def test_a_text_without_blank_lines_is_not_read_whole(monkeypatch):
    monkeypatch.setattr(corpus, "LONGEST_DOCUMENT", 50)
    handle = io.StringIO("A line of text.\n" * 1000)
    first = next(corpus._text_documents(Path("a.txt"), handle, "blank-line", BadRecords()))
    assert (first.name, len(first.lines), first.continues) == ("a.txt:1", 4, False) and handle.tell() < 1000


@pytest.mark.parametrize("first", ["Text.", "{not JSON}", "[1, 2]", '"A word in quotes"', '{"a": ' * 9000 + "}"])
def test_a_text_may_hold_lines_of_json(tmp_path, first):
    (tmp_path / "a.txt").write_text(f'{first}\n{{"text": "One."}}\n')
    assert [document.lines for document in documents(tmp_path)] == [[first, '{"text": "One."}']]


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
