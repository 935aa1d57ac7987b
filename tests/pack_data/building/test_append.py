"""Adding to a data set: nothing is packed twice, nothing lost, and the proof holds for the whole."""

import shutil

import numpy as np
import pytest

from pack_data.building import inputs
from pack_data.building.command import BuildOptions, build
from pack_data.building.command import main as build_main
from pack_data.building.existing_data_set import split_overfull
from pack_data.building.verify import verify
from pack_data.cli.command import run_main
from pack_data.packing.histogram import LengthHistogram
from pack_data.packing.packing import Packing, prove
from pack_data.store.data_set import PackStore
from pack_data.store.packs import disassemble
from tests.pack_data.text_corpus import Stopped, build_small, content, stop_before_rename, write_corpus
from tests.refusals import refusal_of

pytestmark = pytest.mark.usefixtures("small_parts")


@pytest.fixture
def grown(tmp_path):
    """A corpus of which 30 files are packed, and 15 more have come since."""
    corpus = write_corpus(tmp_path / "corpus", 30)
    build_small(corpus, tmp_path / "data", packer="optimal").close()
    write_corpus(tmp_path / "more", 15, seed=1)
    for path in (tmp_path / "more").iterdir():
        path.rename(corpus / ("new" + path.name))
    return corpus, tmp_path / "data"


def sequences_of(folder):
    with PackStore.open(folder) as store:
        return disassemble(store.schema, store.records(np.arange(len(store))))


def test_only_what_is_new_is_packed_and_the_proof_is_for_all(grown):
    corpus, data = grown
    before, examples = PackStore.open(data).manifest, sequences_of(data).to_examples()
    known = {path.name for path in corpus.iterdir() if not path.name.startswith("new")}
    assert inputs._characters(corpus, known) == sum(path.stat().st_size for path in corpus.glob("new*"))
    with build_small(corpus, data, append=True, packer="optimal") as store:
        after = store.manifest
    assert after.shards[: len(before.shards)] == before.shards and len(after.shards) > len(before.shards)
    assert after.made_with["documents"] == 45 and len(after.made_with["sources"]) == 45
    assert after.vocabulary_sha256 == before.vocabulary_sha256 and after.schema == before.schema
    assert sequences_of(data).to_examples()[: len(examples)] == examples
    verify(data)
    packing = Packing.load(data / "recipe.json")
    assert packing.placed().tolist() == list(after.histogram) and packing.packs == after.packs
    assert prove(packing).lower_bound == after.lower_bound and packing.gap <= 4


def test_a_second_time_there_is_nothing_new(grown):
    corpus, data = grown
    build_small(corpus, data, append=True, packer="optimal").close()
    files = content(data)
    build_small(corpus, data, append=True, packer="optimal").close()
    assert files == content(data)
    assert not data.with_name("data.building").exists()


def test_stopped_while_appending(grown, monkeypatch):
    corpus, data = grown
    shutil.copytree(data, data.with_name("copy"))
    with monkeypatch.context() as patch:  # how many renames an undisturbed run makes
        made = stop_before_rename(patch, 0)
        build_small(corpus, data.with_name("copy"), append=True, packer="optimal").close()
    for last in (5, 3, 2, 1, 0):  # stopped that many renames before the end: recipe, vocabulary, lengths, manifest
        fresh = data.with_name(f"stopped{last}")
        shutil.copytree(data, fresh)
        with monkeypatch.context() as patch:
            stop_before_rename(patch, made[0] - last)
            with pytest.raises(Stopped):
                build_small(corpus, fresh, append=True, packer="optimal")
        build_small(corpus, fresh, append=True, packer="optimal").close()
        assert content(fresh) == content(data.with_name("copy"))


def test_a_pack_with_too_many_masked_tokens_is_split_and_nothing_is_lost():
    packing = Packing.of(
        "x", LengthHistogram.from_lengths(np.array([9] * 10 + [4] * 10 + [2] * 10), 16), 3, [((9, 4, 2), 10)]
    )
    masked = np.zeros(17, int)
    masked[[9, 4, 2]] = 3, 2, 1
    assert split_overfull(packing, masked, 6) == packing
    for most, packs in ((5, {(9, 4): 10, (2,): 10}), (3, {(9,): 10, (4, 2): 10})):
        split = split_overfull(packing, masked, most)
        assert dict(zip(split.strategies, split.repeats)) == packs
    with pytest.raises(ValueError, match="3 masked tokens"):
        split_overfull(packing, masked, 2)


def test_appending_to_nothing_is_one_line(tmp_path, capsys):
    corpus = write_corpus(tmp_path / "corpus", 2)
    assert run_main(build_main, ["--corpus", str(corpus), "--append", "--out", str(tmp_path / "data")]) == 2
    assert "not a packed data set" in capsys.readouterr().err
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("given", [{}, {"vocabulary": "vocab.txt"}])
def test_texts_are_not_appended_where_no_vocabulary_is_kept(tmp_path, given):
    """One learnt from them, or another one, would give the same numbers to other tokens."""
    build(BuildOptions(tmp_path / "data", synthetic="squad_1_1_384", sequences=9, max_sequence_length=384)).close()
    corpus = write_corpus(tmp_path / "corpus", 2)
    with pytest.raises(ValueError, match="data: keeps no vocabulary, so --corpus cannot be cut into tokens as"):
        build(BuildOptions(tmp_path / "data", corpus=corpus, append=True, **given))
    assert not (tmp_path / "data.building").exists()


@pytest.mark.parametrize(
    "given",
    [
        ["--max-sequence-length", "512"],  # the default, but not that of the data set
        ["--packer", "spfhp"],
        ["--max-sequences-per-pack", "unlimited"],
        ["--keep-case"],
        ["--seed", "0"],
        ["--vocabulary", "another.txt"],
        ["--vocabulary", "broken.txt"],
        ["--recipe", "data/recipe.json"],
        ["--overwrite"],
    ],
)
def test_an_option_that_would_not_be_obeyed_is_refused(grown, tmp_path, monkeypatch, capsys, given):
    corpus, data = grown
    monkeypatch.chdir(tmp_path)
    lines = (data / "vocab.txt").read_text().splitlines()
    (tmp_path / "another.txt").write_text("\n".join(lines[:-1]) + "\n")
    (tmp_path / "broken.txt").write_text("no vocabulary")
    before = content(data)
    command = ["--corpus", str(corpus), "--out", str(data), "--append", "--workers", "1"]
    said = refusal_of(build_main, command + given, capsys)
    assert given[0] in said or given[1] in said
    assert content(data) == before


def test_options_that_agree_with_the_data_set_may_be_given(grown, tmp_path):
    corpus, data = grown
    command = ["--corpus", str(corpus), "--out", str(data), "--append", "--workers", "1", "--packer", "optimal"]
    command += ["--max-sequence-length", "64", "--max-predictions-per-sequence", "10", "--seed", "3"]
    assert run_main(build_main, command + ["--vocabulary", str(data / "vocab.txt"), "--vocabulary-size", "200"]) == 0
