"""Accounts of builds and conversions: in = out + said, for texts, tokens, packs and held-out stretches."""

import importlib.util
import itertools
import json
import random
import re
import shutil

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ipu_packed_bert.commands.build import main
from pack_data.building import tasks
from pack_data.building.convert import main as convert
from pack_data.building.held_out import held_out_folder, overlap
from pack_data.building.stretches import runs
from pack_data.cli.command import run_main
from pack_data.formats.records import RowWidths
from pack_data.formats.source import Source, open_source
from pack_data.store.data_set import read_manifest
from pack_data.text.corpus import Document
from pack_data.text.examples import make_examples
from pack_data.text.vocabulary import load_vocabulary
from tests.format_samples import example, frame, pack_from_examples, records, write_packed, write_store
from tests.pack_data.text_corpus import build_small, document, write_corpus
from tests.refusals import refusal_of

TEXTS = [
    "",
    "  \n ",
    "a b c",
    "word " * 300,
    "One. Two!\u2028Three\x85four",
    "\u0936\u092c\u0926\u0964 " * 40,
]


def account_of(folder):
    return read_manifest(folder).made_with["account"]


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.sampled_from(TEXTS), max_size=12),
    st.integers(0, 3),
    st.booleans(),
    st.sampled_from([0.0, 0.4]),
)
def test_what_goes_in_is_what_comes_out_and_what_is_said(tmp_path, drawn, bad, drop_copies, held_out):
    texts = [*drawn, "one two three four", "five six seven", "word other", "a b"]
    corpus = tmp_path / "a.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts) + "{broken\n" * bad)
    out = tmp_path / "out"
    options = dict(held_out=held_out, drop_copies=drop_copies, skip_bad=bad, overwrite=True)
    build_small(corpus, out, **options).close()
    sides = [out, held_out_folder(out)] if held_out else [out]
    accounts = [account_of(side) for side in sides]
    account = accounts[0]
    words = [text for text in texts if text.strip()]
    kept = list(dict.fromkeys(map(str.strip, words))) if drop_copies else words
    assert (account["files"], account["records"], account["unreadable"]) == (1, len(texts), bad)
    assert account["empty_records"] == len(texts) - len(words)
    assert (account["documents"], account["copies"]) == (
        len(kept),
        len(words) - len(set(map(str.strip, words))),
    )
    vocabulary = load_vocabulary(out / "vocab.txt")
    tokens = len(vocabulary.encode([" ".join(text.split()) for text in kept])[0])
    for name in ("tokens", "tokens_in_sequences"):
        assert sum(account[name] for account in accounts) == tokens


def test_bad_lines_of_a_text_are_lines_not_records(tmp_path, capsys):
    corpus = tmp_path / "texts"
    corpus.mkdir()
    (corpus / "a.txt").write_bytes(b"One two. Three four.\n\xff\nFive six.\n\xfe\n")
    (corpus / "b.txt").write_text("Seven eight. Nine ten.")
    how = f"--corpus {corpus} --workers 1 --max-sequence-length 64 --vocabulary-size 200 --out {tmp_path / 'out'}"
    assert run_main(main, [*how.split(), "--skip-bad", "1"]) == 2
    assert "2 bad lines, --skip-bad 1" in capsys.readouterr().err
    assert run_main(main, [*how.split(), "--skip-bad", "2"]) == 0
    account = account_of(tmp_path / "out")
    assert (account["records"], account["unreadable"], account["unreadable_lines"]) == (2, 0, 2)


def test_the_account_of_sequences_of_tokens(tmp_path):
    source = tmp_path / "a.jsonl"
    source.write_text("".join(json.dumps({"input_ids": [1] * length}) + "\n" for length in range(1, 20)) + "{bad\n")
    build_small("embedded", tmp_path / "out", source=source, skip_bad=1).close()
    tokens = sum(range(1, 20))
    expected = {
        "files": 1,
        "unreadable": 1,
        "tokens": tokens,
        "sequences": 19,
        "tokens_in_sequences": tokens,
    }
    assert account_of(tmp_path / "out") == expected


def test_tokens_that_are_in_no_sequence_are_refused(tmp_path, monkeypatch):
    corpus = write_corpus(tmp_path / "corpus", 5)
    monkeypatch.setattr(tasks, "make_examples", lambda *given: (make_examples(*given)[0], 7))
    with pytest.raises(ValueError, match="7 of .* tokens read are in sequences"):
        build_small(corpus, tmp_path / "out")


@given(st.integers(2, 20_000), st.floats(0.001, 0.999))
def test_stretches_are_long_and_nothing_is_lost(count, share):
    paragraphs = [Document("", [str(place)]) for place in range(count)]
    stretches = list(runs(paragraphs, count, share))
    places = [[int(line) for line in run.lines] for run, _ in stretches]
    # Every run is consecutive, sides alternate, and all together are the text.
    assert [place for run in places for place in run] == list(range(count))
    assert len(stretches) > 1
    assert all(before[1] != other[1] for before, other in zip(stretches, stretches[1:]))
    least = 20 if count >= 400 else count // 20
    assert all(least <= len(run) for run in places)
    held_out = held_out_places(stretches)
    assert abs(len(held_out) - share * count) <= 2 * max(least, count // 100, 1) + 1
    assert held_out_places(runs(paragraphs, count, share / 2)) <= held_out


def held_out_places(found):
    return {line for run, is_held_out in found if is_held_out for line in run.lines}


def test_a_book_keeps_its_context(tmp_path):
    """Every paragraph became a document: the mean sequence fell from 489 to 81 tokens."""
    rng = random.Random(0)
    book = tmp_path / "book.txt"
    paragraphs = [document(rng).replace("\n", " ") for _ in range(420)]
    book.write_text("\n\n".join(paragraphs))
    how = dict(max_sequence_length=128, short_sequence_probability=0.0)
    with build_small(book, tmp_path / "whole", **how) as whole:
        mean = whole.manifest.tokens / whole.manifest.sequences
    with build_small(book, tmp_path / "split", held_out=0.05, **how) as training:
        manifests = [training.manifest, read_manifest(held_out_folder(tmp_path / "split"))]
    accounts = [manifest.made_with["account"] for manifest in manifests]
    assert all(manifest.tokens / manifest.sequences > 0.95 * mean for manifest in manifests)
    assert sum(account["characters"] for account in accounts) == sum(map(len, paragraphs))
    assert 0.03 < accounts[1]["characters"] / sum(map(len, paragraphs)) < 0.07
    assert accounts[0]["documents"] <= 5
    assert accounts[0]["records"] == 1
    assert not overlap(manifests[0].made_with, manifests[1].made_with)
    assert overlap(whole.manifest.made_with, manifests[1].made_with)


BAD_LINES = ["{broken", '{"input_ids": []}', '{"input_ids": "text"}']
# Lengths of the sequences in a row; the slots of padding after them.
ROWS = st.tuples(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(0, 2))


def line_of(lengths, padding):
    positions = [position for length in lengths for position in range(length)]
    mask = [1] * len(positions) + [0] * padding
    row = {
        "input_ids": [7] * len(mask),
        "attention_mask": mask,
        "position_ids": positions + [0] * padding,
    }
    return json.dumps(row)


def account_of_conversion(capsys, *arguments):
    """The units of the first line that `convert` prints: (what goes out, what came in) of each."""
    assert run_main(convert, [str(argument) for argument in arguments]) == 0
    line = capsys.readouterr().out.splitlines()[0]
    amounts = re.findall(r"(?:(\d+) of )?(\d+) (record|token)", line)
    return {unit: (int(out or came_in), int(came_in)) for out, came_in, unit in amounts}


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.sampled_from(["", *BAD_LINES]) | ROWS, max_size=8),
    ROWS,
    st.sampled_from(["jsonl", "parquet", "arrow"] if importlib.util.find_spec("pyarrow") else ["jsonl"]),
)
def test_a_conversion_of_tokens_says_what_does_not_come_out(tmp_path, capsys, lines, row, suffix):
    source = tmp_path / "a.jsonl"
    target = tmp_path / f"b.{suffix}"
    lines = [row, *lines]
    rows = [line for line in lines if isinstance(line, tuple)]
    bad = sum(line in BAD_LINES for line in lines)
    source.write_text("".join(f"{line if isinstance(line, str) else line_of(*line)}\n" for line in lines))
    account = account_of_conversion(capsys, source, target, "--skip-bad", bad)
    written = [len(record.value["input_ids"]) for record in open_source(target).read()]
    assert written == [length for lengths, _ in rows for length in lengths]
    assert account == {
        "record": (len(rows), len(rows) + bad),
        "token": (sum(written), sum(written)),
    }


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=5),
    st.integers(0, 2),
    st.sampled_from(
        [
            "out.tfrecord",
            "out.tfrecord --unpack",
            "out/a.tfrecord --unpack",
        ]
    ),
)
def test_a_conversion_of_packs_says_what_does_not_come_out(tmp_path, capsys, depths, bad, how):
    """The last way takes a data set apart, which has no bad records."""
    pytest.importorskip("google_crc32c", reason="needs the formats extra (google-crc32c)")
    name, *options = how.split()
    source = tmp_path / "a.tfrecord"
    target = tmp_path / name
    examples = [example(seed=seed) for seed in range(sum(depths))]
    ends = list(itertools.accumulate(depths))
    packs = [pack_from_examples(examples[end - depth : end], RowWidths(32, 12, 3)) for end, depth in zip(ends, depths)]
    write_packed(str(source), records(packs), RowWidths())
    source.write_bytes(source.read_bytes() + frame(b"junk") * bad)
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
    if "/" in name:
        in_packs = [examples[end - depth : end] for end, depth in zip(ends, depths)]
        write_store(tmp_path / "out", in_packs, RowWidths(32, 12, 3))
        source = tmp_path / "out"
        bad = 0
        target = tmp_path / "b.tfrecord"
    account = account_of_conversion(capsys, source, target, *options, "--skip-bad", bad)
    tokens = sum(len(an_example.input_ids) for an_example in examples)
    assert [record.value for record in open_source(target).examples()] == examples
    assert account == {"record": (len(packs), len(packs) + bad), "token": (tokens, tokens)}


def test_tokens_that_a_conversion_loses_are_an_error(tmp_path, capsys, monkeypatch):
    (tmp_path / "a.jsonl").write_text("[1, 2]\n[3]\n")
    read = Source.read
    monkeypatch.setattr(Source, "read", lambda self: iter(list(read(self))[:1]))
    refusal_of(convert, [tmp_path / "a.jsonl", tmp_path / "b.jsonl"], capsys, "a.jsonl", "add up")
    assert not (tmp_path / "b.jsonl").exists()
