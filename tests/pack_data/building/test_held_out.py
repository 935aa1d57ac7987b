"""Documents held out: whole ones, with their copies, never in the training data; both data sets appear together."""

import re
import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pack_data.building.held_out import (
    HELD_OUT,
    TRAINING,
    TRAINING_DIGEST,
    held_out_folder,
    overlap,
    position,
    split,
)
from pack_data.building.stages import _split_overfull
from pack_data.building.verify import verify
from pack_data.building.work_folder import COMMIT, check_not_half_replaced
from pack_data.packing.histogram import LengthHistogram
from pack_data.packing.packing import Packing
from pack_data.store.data_set import PackStore, read_manifest
from pack_data.store.packs import disassemble
from pack_data.text.corpus import Document, documents
from pack_data.text.vocabulary import load_vocabulary
from tests.pack_data.text_corpus import (
    Stopped,
    build_small,
    content,
    stop_before_rename,
    write_corpus,
)
from tests.refusals import refused

pytestmark = pytest.mark.usefixtures("small_parts")

SHARE = 0.3
HOW = dict(held_out=SHARE, duplication_factor=5, packer="optimal")
QUICK = dict(held_out=SHARE, duplication_factor=1, packer="spfhp")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Thirty documents, five of them twice."""
    folder = write_corpus(tmp_path_factory.mktemp("corpus"), 30)
    for number in range(5):
        shutil.copy(folder / f"{number:03d}.txt", folder / f"copy{number}.txt")
    return folder


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("few"), 8)


def names_its_training_side(training, held_out):
    stated = held_out.made_with[TRAINING_DIGEST]
    return stated == f"{training.digest:016x}" and TRAINING_DIGEST not in training.made_with


def word_sequences(folder):
    """The words of every segment, masked tokens put back, words cut at its ends left out."""
    tokens = load_vocabulary(folder / "vocab.txt").tokens
    with PackStore.open(folder) as store:
        examples = disassemble(store.schema, store.records(np.arange(len(store)))).to_examples()
    for example in examples:
        ids = np.array(example.input_ids)
        ids[list(example.masked_lm_positions)] = example.masked_lm_ids
        for segment in (
            ids[1 : example.first_segment_length - 1],
            ids[example.first_segment_length : -1],
        ):
            text = " ".join(tokens[token] for token in segment)
            begun = text.startswith("##")
            yield text.replace(" ##", "").split()[1 if begun else 0 : -1]


def eight_grams(sequences):
    return {tuple(words[start : start + 8]) for words in sequences for start in range(len(words) - 7)}


def both(out):
    return content(out), content(held_out_folder(out))


def seed_of(folder):
    """Read every pack of a data set, and return its seed; None if there is none."""
    if not (folder / "manifest.json").exists():
        return None
    with PackStore.open(folder) as store:
        assert len(store.records(np.arange(len(store)))) == store.manifest.packs
        return store.manifest.seed


def test_no_text_is_on_both_sides_and_nothing_is_lost(corpus, tmp_path):
    out = tmp_path / "data"
    with build_small(corpus, out, **HOW) as store:
        training = store.manifest
        held_out = read_manifest(held_out_folder(out))
    grams = eight_grams(word_sequences(out)), eight_grams(word_sequences(held_out_folder(out)))
    assert len(grams[0]) > 1000
    assert len(grams[1]) > 300
    assert not grams[0] & grams[1]
    expected = [held for _, held in split(documents(corpus), SHARE)]
    assert (training.made_with["documents"], held_out.made_with["documents"]) == (
        expected.count(False),
        expected.count(True),
    )
    assert (training.made_with["side"], held_out.made_with["side"]) == (TRAINING, HELD_OUT)
    assert training.made_with["options"]["held_out"] == held_out.made_with["options"]["held_out"] == SHARE
    assert training.schema == held_out.schema
    assert training.vocabulary_sha256 == held_out.vocabulary_sha256
    verify(out), verify(held_out_folder(out))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "data-held-out"]
    assert names_its_training_side(training, held_out)
    # What was said of manifests: these two share no document, two builds without a split share all of them.
    assert not overlap(training.made_with, held_out.made_with)
    assert overlap(training.made_with, training.made_with)
    with build_small(corpus, tmp_path / "whole", duplication_factor=5) as whole:
        assert overlap(whole.manifest.made_with, held_out.made_with)


@given(st.floats(0, 1), st.floats(0, 1), st.lists(st.text(max_size=5), min_size=1, max_size=20))
def test_two_shares_are_apart_where_the_manifests_say_so(share, other, texts):
    def made_with(fraction, side):
        return {
            "sources": [["a", "1"]],
            "options": {"held_out": fraction} if fraction else {},
            "side": side if fraction else None,
        }

    texts_as_documents = [Document("", [text]) for text in texts]
    training = {document.lines[0] for document, held in split(texts_as_documents, share) if not held}
    evaluation = {document.lines[0] for document, held in split(texts_as_documents, other) if held}
    held_out = {document.lines[0] for document, held in split(texts_as_documents, share) if held}
    assert len(training) + len(held_out) == len(set(texts))
    if other and not overlap(made_with(share, TRAINING), made_with(other, HELD_OUT)):
        assert not training & evaluation


def test_a_document_that_was_cut_stays_together(monkeypatch, tmp_path):
    monkeypatch.setattr("pack_data.text.corpus.LONGEST_DOCUMENT", 300)
    folder = write_corpus(tmp_path, 40)
    held = {}
    for path in sorted(folder.iterdir()):
        parts = [held_out for _, held_out in split(documents(path), 0.5)]
        assert len(set(parts)) == 1
        held[path.name] = (parts[0], len(parts))
    assert {side for side, count in held.values() if count > 1} == {False, True}


def test_held_out_packs_are_no_deeper_than_those_of_training_and_proven_so(tmp_path):
    long = [text for text in (f"{n} " + "word " * 300 + "." for n in range(40)) if position([text]) >= SHARE][:5]
    short = [text for text in (f"{n} words." for n in range(99)) if position([text]) < SHARE][:15]
    texts = tmp_path / "texts"
    out = tmp_path / "out"
    texts.mkdir()
    for number, text in enumerate(long + short):
        (texts / f"{number}.txt").write_text(text)
    build_small(texts, out, **{**QUICK, "packer": "optimal", "max_sequences_per_pack": None}).close()
    assert verify(out)
    assert verify(held_out_folder(out))
    depth = read_manifest(out).schema.max_sequences_per_pack
    packing = Packing.load(held_out_folder(out) / "recipe.json")
    assert packing.max_sequences_per_pack == depth < 64 // int(min(packing.placed().nonzero()[0]))  # deeper ones fit


@pytest.mark.parametrize("former", [False, True], ids=["nothing there", "over a former build"])
def test_stopped_between_any_two_files_both_are_old_or_both_new(few, tmp_path, monkeypatch, former):
    build_small(few, tmp_path / "calm", **QUICK).close()
    expected = both(tmp_path / "calm")
    if former:
        build_small(few, tmp_path / "former", seed=9, **QUICK).close()
    with monkeypatch.context() as patch:
        done = stop_before_rename(patch, 0)
        build_small(few, tmp_path / "counted", **QUICK).close()
    out = tmp_path / "x" / "data"
    total = done[0]
    states = set()
    for count in [*range(3, total - 14, 11), *range(total - 14, total + 1, 2), total]:
        shutil.rmtree(out.parent, ignore_errors=True)
        out.parent.mkdir()
        if former:
            for folder in (out, held_out_folder(out)):
                shutil.copytree(tmp_path / folder.name.replace("data", "former"), folder)
        with monkeypatch.context() as patch:
            stop_before_rename(patch, count)
            with pytest.raises(Stopped):
                build_small(few, out, overwrite=True, **QUICK)
        seeds = []
        for folder in (out, held_out_folder(out)):
            seeds.append(seed_of(folder))
        states.add(tuple(seeds))
        if seeds[0] != seeds[1]:
            # Between two renames: what the next build does first is written down.
            assert seeds[1] == 3
            with refused(out, "same build command", COMMIT):
                check_not_half_replaced(out)
        build_small(few, out, overwrite=True, **QUICK).close()
        assert both(out) == expected
        assert len(list(out.parent.iterdir())) == 2
    before = 9 if former else None
    assert states == {(before, before), (before, 3)}


def test_a_change_that_was_begun_is_completed_by_any_build(few, tmp_path, monkeypatch):
    """Also by one with other options, before it says that it would replace a data set."""
    out = tmp_path / "data"
    with monkeypatch.context() as patch:
        done = stop_before_rename(patch, 0)
        build_small(few, tmp_path / "calm", **QUICK).close()
    with monkeypatch.context() as patch:
        stop_before_rename(patch, done[0])
        with pytest.raises(Stopped):
            build_small(few, out, **QUICK)
    assert not (out / "manifest.json").exists()
    assert (held_out_folder(out) / "manifest.json").exists()
    with refused(out, "seed", "--overwrite"):
        build_small(few, out, **{**QUICK, "seed": 8})
    assert both(out) == both(tmp_path / "calm")


def test_a_pack_with_too_many_masked_tokens_is_split_and_nothing_is_lost():
    lengths = np.array([9] * 10 + [4] * 10 + [2] * 10)
    packing = Packing.of("x", LengthHistogram.from_lengths(lengths, 16), 3, [((9, 4, 2), 10)])
    masked = np.zeros(17, int)
    masked[[9, 4, 2]] = 3, 2, 1
    assert _split_overfull(packing, masked, 6) == packing
    for most, packs in ((5, {(9, 4): 10, (2,): 10}), (3, {(9,): 10, (4, 2): 10})):
        parts = _split_overfull(packing, masked, most)
        assert dict(zip(parts.strategies, parts.repeats)) == packs


@pytest.mark.parametrize("share, side", [(0.001, HELD_OUT), (0.999, TRAINING)])
def test_a_share_that_leaves_a_side_empty_is_refused_with_the_nearest_that_works(few, tmp_path, share, side):
    with refused("--held-out", side) as refusal:
        build_small(few, tmp_path / "data", **{**QUICK, "held_out": share})
    advised = float(re.search(r"pass at (?:least|most) ([0-9.]+)", str(refusal.value)).group(1))
    build_small(few, tmp_path / "data", **{**QUICK, "held_out": advised}).close()
    beyond = advised - 0.002 if side == HELD_OUT else advised + 0.002
    positions = [position(document.lines) for document in documents(few)]
    kept = [at < beyond for at in positions]
    assert not any(kept) if side == HELD_OUT else all(kept)
