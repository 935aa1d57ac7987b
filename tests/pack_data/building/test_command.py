"""Text, and synthetic sequences, to a packed data set: what is in it, and what decides its bytes."""

import numpy as np
import pytest

from pack_data.building import inputs, stages
from pack_data.building.command import BuildOptions, build
from pack_data.building.verify import verify
from pack_data.packing.packing import Packing
from pack_data.store.data_set import PackStore, read_manifest
from pack_data.store.packs import disassemble
from pack_data.text.vocabulary import load_vocabulary
from tests.pack_data.text_corpus import build_small, content, make_parts_small, write_corpus
from tests.refusals import refused

pytestmark = pytest.mark.usefixtures("small_parts")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def one(corpus, tmp_path_factory):
    """A data set of the corpus, built in parts of a few documents."""
    folder = tmp_path_factory.mktemp("one") / "data"
    with pytest.MonkeyPatch.context() as patch:
        make_parts_small(patch)
        build_small(corpus, folder).close()
    return folder


def examples_of(folder):
    with PackStore.open(folder) as store:
        records = store.records(np.arange(len(store)))
        return disassemble(store.schema, records).to_examples()


def shards_of(folder):
    return [entry.sha256 for entry in read_manifest(folder).shards]


def test_a_data_set_may_have_any_name_of_a_directory(corpus, one, tmp_path):
    build_small(corpus, tmp_path / "wiki:v2").close()
    assert shards_of(tmp_path / "wiki:v2") == shards_of(one)


def test_text_becomes_a_whole_data_set(one):
    manifest = verify(one).manifest
    schema = manifest.schema
    made_with = manifest.made_with
    assert len(manifest.shards) > 3
    assert made_with["parts"] > 3
    assert manifest.seed == 3
    assert manifest.algorithm == "spfhp"
    assert manifest.kind == "bert_pretraining"
    assert (schema.max_sequence_length, schema.max_sequences_per_pack) == (64, 3)
    assert schema.max_predictions_per_pack == 10 + 3
    assert manifest.max_predictions_per_sequence == 10
    vocabulary = load_vocabulary(one / "vocab.txt")
    assert (manifest.vocabulary_size, manifest.vocabulary_sha256) == (len(vocabulary), vocabulary.sha256)
    assert made_with["documents"] == 60
    assert len(made_with["sources"]) == 60
    assert made_with["sources"][0][0] == "000.txt"
    assert made_with["options"]["duplication_factor"] == 2
    assert "whole_word_masking" not in made_with["options"]
    # [CLS] is never masked.
    begins = {example.input_ids[0] for example in examples_of(one)}
    assert begins == {vocabulary.ids["[CLS]"]}
    assert Packing.load(one / "recipe.json").packs == manifest.packs
    assert [path.name for path in one.parent.iterdir()] == ["data"]


def test_the_bytes_do_not_depend_on_workers_or_place(one, tmp_path):
    corpus = write_corpus(tmp_path / "elsewhere")
    for workers in (1, 2):
        out = tmp_path / str(workers)
        build_small(corpus, out, workers=workers).close()
        assert content(out) == content(one)


DECIDING = [
    *(dict(seed=4), dict(duplication_factor=3), dict(packer="none"), dict(epoch=np.int64(1))),
    *(dict(whole_word_masking=True), dict(draw_documents="uniform")),
]


@pytest.mark.parametrize("change", DECIDING, ids=str)
def test_what_decides_the_bytes(corpus, one, tmp_path, change):
    """Another value is in the manifest and gives other packs; it replaces a data set on request only."""
    (name,) = change
    with build_small(corpus, tmp_path / "two", **change) as two:
        assert two.manifest.made_with["options"][name] == change[name]
        # Another epoch pairs the same sequences anew.
        assert (two.manifest.digest == read_manifest(one).digest) == (name in ("epoch", "packer"))
    assert shards_of(tmp_path / "two") != shards_of(one)
    verify(tmp_path / "two")
    if name != "epoch":
        with refused(tmp_path / "two", name, "--overwrite", unchanged=tmp_path):
            build_small(corpus, tmp_path / "two")


def test_packing_changes_no_sequence(corpus, one, tmp_path):
    """Depth 1 and depth 3 hold the same examples: the promise that packing trains on the same data."""
    with build_small(corpus, tmp_path / "unpacked", packer="none") as unpacked:
        assert unpacked.schema.max_sequences_per_pack == 1
        assert unpacked.manifest.packing_factor == 1
    assert read_manifest(one).packing_factor > 1.05
    assert sorted(examples_of(tmp_path / "unpacked")) == sorted(examples_of(one))


def test_a_given_vocabulary_and_a_given_recipe(corpus, one, tmp_path):
    options = dict(vocabulary=one / "vocab.txt", recipe=one / "recipe.json", packer="none")
    with build_small(corpus, tmp_path / "two", **options) as store:
        assert store.manifest.algorithm == "spfhp"
        assert store.manifest.shards == read_manifest(one).shards
    with refused("the histogram has"):
        build_small(corpus, tmp_path / "three", recipe=one / "recipe.json", duplication_factor=3)


def test_a_depth_the_data_does_not_use_and_an_unlimited_one(corpus, tmp_path):
    with build_small(corpus, tmp_path / "one", max_sequences_per_pack=40, packer="best_fit") as store:
        assert store.schema.max_sequences_per_pack == 40
        assert verify(store.folder)
    with build_small(corpus, tmp_path / "two", max_sequences_per_pack=None, packer="best_fit") as store:
        assert store.schema.max_sequences_per_pack == Packing.load(tmp_path / "two" / "recipe.json").largest_depth


def test_few_predictions_widen_the_pack_by_what_the_data_needs(corpus, tmp_path):
    """M = 3 is below 0.15 S - 1, so a pack may hold more than M + D masked tokens: P comes from the packs."""
    with build_small(
        corpus, tmp_path / "data", max_predictions_per_sequence=3, max_sequences_per_pack=8, packer="best_fit"
    ) as store:
        masked = store.lengths()["prediction_counts"].sum(axis=1)
        assert store.schema.max_predictions_per_pack >= max(3 + 8, masked.max())
    verify(tmp_path / "data")


def test_synthetic_sequences_take_the_same_way(tmp_path, monkeypatch):
    monkeypatch.setattr(inputs, "SYNTHETIC_PART", 700)
    monkeypatch.setattr(stages, "SLOTS_PER_SHARD", 512 * 400)
    options = dict(synthetic="wikipedia_512", sequences=2000, packer="spfhp", workers=1)
    with build(BuildOptions(out=tmp_path / "data", **options)) as store:
        assert store.manifest.sequences == 2000
        assert store.manifest.made_with["parts"] == 3
        assert store.schema.max_sequences_per_pack == 3  # that of the paper
        assert abs(store.manifest.tokens / 2000 - 255.8) < 4 * 180 / 2000**0.5
        assert store.manifest.vocabulary_size == 8192
        assert verify(store.folder)


def test_second_segments_come_from_the_whole_corpus(tmp_path):
    """A corpus sorted by kind: a third of its files in words of their own. Random second segments mix the kinds."""
    corpus = write_corpus(tmp_path / "corpus", 60)
    for number in range(20):
        path = corpus / f"{number:03d}.txt"
        path.write_text(
            path.read_text()
            .upper()
            .translate(str.maketrans("ABCDEFGHIJKLMNOPQRSTUVWXYZ", "абвгдежзийклмнопрстуфхцчшщ"))
        )
    with build_small(corpus, tmp_path / "data") as store:
        assert store.manifest.made_with["parts"] > 3
    tokens = load_vocabulary(tmp_path / "data" / "vocab.txt").tokens
    is_other = np.array([any("\u0430" <= letter <= "\u044f" for letter in token) for token in tokens])
    mixed = []
    for example in examples_of(tmp_path / "data"):
        if example.next_sentence_label:
            first = is_other[example.input_ids[1 : example.first_segment_length - 1]].mean() > 0.3
            second = is_other[example.input_ids[example.first_segment_length : -1]].mean() > 0.3
            mixed.append(first != second)
    # Were the parts runs of files, nearly none would mix; independent choices of a third mix in 4 of 9.
    assert len(mixed) > 100
    assert 0.25 < np.mean(mixed) < 0.6
