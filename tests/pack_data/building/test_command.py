import json
import re
import shutil

import numpy as np
import pytest

from pack_data.building import inputs, stages
from pack_data.building.command import BuildOptions, build
from pack_data.building.command import main as build_main
from pack_data.building.verify import verify
from pack_data.cli.command import run_main
from pack_data.inspection.verify_command import main as verify_main
from pack_data.packing.packing import Packing
from pack_data.store.data_set import PackStore
from pack_data.store.packs import disassemble
from pack_data.store.sequences import digest
from pack_data.text.vocabulary import load_vocabulary
from tests.pack_data.text_corpus import build_small, content, words_of, write_corpus
from tests.refusals import refusal_of, refused

pytestmark = pytest.mark.usefixtures("small_parts")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def test_text_becomes_a_whole_data_set(corpus, tmp_path):
    with build_small(corpus, tmp_path / "data") as store:
        manifest = store.manifest
        assert len(manifest.shards) > 3 and manifest.made_with["parts"] > 3
        assert manifest.seed == 3 and manifest.algorithm == "spfhp" and manifest.kind == "bert_pretraining"
        assert (store.schema.max_sequence_length, store.schema.max_sequences_per_pack) == (64, 3)
        assert store.schema.max_predictions_per_pack == 10 + 3 and manifest.max_predictions_per_sequence == 10
        vocabulary = load_vocabulary(tmp_path / "data" / "vocab.txt")
        assert (manifest.vocabulary_size, manifest.vocabulary_sha256) == (len(vocabulary), vocabulary.sha256)
        # Every sequence begins with [CLS] and ends with [SEP], unless these places were never maskable: they are not.
        batch = store.batch(np.arange(len(store)))
        cls = batch["input_ids"][np.arange(len(store))[:, None], batch["next_sentence_positions"]]
        assert (cls[batch["next_sentence_weights"] == 1] == vocabulary.ids["[CLS]"]).all()
    assert verify(tmp_path / "data").manifest == manifest
    assert Packing.load(tmp_path / "data" / "recipe.json").packs == manifest.packs
    assert not (tmp_path / "data.building").exists()


def test_the_bytes_do_not_depend_on_workers_or_place(corpus, tmp_path):
    build_small(corpus, tmp_path / "one")
    build_small(write_corpus(tmp_path / "elsewhere"), tmp_path / "two")
    assert content(tmp_path / "one") == content(tmp_path / "two")
    build_small(corpus, tmp_path / "three", workers=2)
    assert content(tmp_path / "one") == content(tmp_path / "three")


@pytest.mark.parametrize("change", [dict(seed=4), dict(epoch=1), dict(duplication_factor=3), dict(packer="none")])
def test_what_decides_the_bytes(corpus, tmp_path, change):
    build_small(corpus, tmp_path / "one")
    build_small(corpus, tmp_path / "two", **change)
    assert [entry.sha256 for entry in PackStore.open(tmp_path / "one").manifest.shards] != [
        entry.sha256 for entry in PackStore.open(tmp_path / "two").manifest.shards
    ]
    verify(tmp_path / "two")


def test_whole_word_masking_is_kept_with_the_data_set(corpus, tmp_path):
    """A manifest says it where it is so; else it is as it was before there was the option."""
    how = dict(vocabulary_size=90)  # words of several pieces
    with build_small(corpus, tmp_path / "pieces", **how) as pieces, build_small(
        corpus, tmp_path / "words", whole_word_masking=True, **how
    ) as words:
        assert words.manifest.made_with["options"]["whole_word_masking"] is True
        assert words.manifest.digest != pieces.manifest.digest
        assert words.manifest.histogram == pieces.manifest.histogram
    assert "whole_word_masking" not in (tmp_path / "pieces" / "manifest.json").read_text()
    for folder, wanted, before in (("pieces", True, False), ("words", False, True)):
        with refused(tmp_path / folder, f"whole_word_masking {before} (now {wanted})"):
            build_small(corpus, tmp_path / folder, whole_word_masking=wanted, **how)
        build_small(corpus, tmp_path / folder, whole_word_masking=before, **how).close()
    with PackStore.open(tmp_path / "words") as store:
        tokens, several = load_vocabulary(tmp_path / "words" / "vocab.txt").tokens, 0
        for example in disassemble(store.schema, store.records(np.arange(len(store)))).to_examples():
            masked = set(example.masked_lm_positions)
            for word in words_of(example, tokens):
                assert masked.issuperset(word) or masked.isdisjoint(word)
                several += len(word) > 1 and masked.issuperset(word)
        assert several > 50
    verify(tmp_path / "words")


def test_how_documents_are_drawn_is_kept_with_the_data_set(corpus, tmp_path):
    digests = {}
    for name, how in (("tokens", {}), ("uniform", dict(draw_documents="uniform"))):
        with build_small(corpus, tmp_path / name, **how) as store, build_small(corpus, tmp_path / "b", **how) as again:
            assert store.manifest.made_with["options"]["draw_documents"] == name
            assert [entry.sha256 for entry in store.manifest.shards] == [
                entry.sha256 for entry in again.manifest.shards
            ]
            digests[name] = store.manifest.digest
        shutil.rmtree(tmp_path / "b")
    assert digests["tokens"] != digests["uniform"]
    with refused(tmp_path / "uniform", "draw_documents uniform (now tokens)"):
        build_small(corpus, tmp_path / "uniform")
    with refused("draw_documents", "'alike'", "tokens, uniform"):
        build_small(corpus, tmp_path / "b", draw_documents="alike")


@pytest.mark.parametrize(
    "given, names",
    [
        (dict(draw_documents="uniform", source="x.tfrecord"), ["--draw-documents", "--from"]),
        (dict(whole_word_masking=True, synthetic="squad_1_1_384"), ["--whole-word-masking", "--synthetic"]),
        (dict(whole_word_masking=True, source="x.tfrecord"), ["--whole-word-masking", "--from"]),
        (dict(sequences=5), ["--sequences", "--synthetic", "--corpus"]),
        (dict(columns=("a",), synthetic="squad_1_1_384"), ["--columns", "--synthetic"]),
        (dict(columns=("a", "b")), ["--columns a,b", "--corpus"]),
        (dict(source_format="jsonl"), ["--format", "--from", "--corpus"]),
        (dict(synthetic="squad_1_1_384", json_field="body"), ["--json-field", "--corpus", "--synthetic"]),
        (dict(source="x.jsonl", document_separator="blank-line"), ["--document-separator", "--corpus", "--from"]),
        (dict(tokenizer="t.json", vocabulary="vocab.txt"), ["--tokenizer", "--vocabulary"]),
        (dict(tokenizer="t.json", lower_case=False), ["--tokenizer", "--keep-case"]),
        (dict(tokenizer="t.json", synthetic="squad_1_1_384"), ["--tokenizer", "--synthetic"]),
        (dict(workers=0), ["workers", "0"]),
        (dict(workers=-1), ["workers", "-1"]),
        (dict(workers=10**6), ["workers", "1000000"]),
        (dict(workers=1.0), ["workers", "1.0"]),
    ],
)
def test_options_that_do_not_go_together_are_refused(tmp_path, given, names):
    with refused(*names):
        BuildOptions(out=tmp_path / "data", **given)


def test_a_build_takes_options_and_nothing_else(tmp_path):
    with refused("BuildOptions", "corpus=", kind=TypeError):
        build(str(tmp_path))


def test_another_epoch_pairs_the_same_sequences_anew(corpus, tmp_path):
    with build_small(corpus, tmp_path / "one") as one, build_small(corpus, tmp_path / "two", epoch=np.int64(1)) as two:
        assert one.manifest.digest == two.manifest.digest
        a, b = (disassemble(store.schema, store.records(np.arange(len(store)))) for store in (one, two))
        assert a.tokens["input_ids"].tolist() != b.tokens["input_ids"].tolist() and digest(a) == digest(b)


def test_packing_changes_no_sequence(corpus, tmp_path):
    """Depth 1 and depth 3 hold the same examples: the promise that packing trains on the same data."""
    with build_small(corpus, tmp_path / "one", packer="none") as unpacked, build_small(
        corpus, tmp_path / "two"
    ) as packed:
        assert unpacked.schema.max_sequences_per_pack == 1 and unpacked.manifest.packing_factor == 1
        assert packed.manifest.packing_factor > 1.05
        examples = [
            sorted(disassemble(store.schema, store.records(np.arange(len(store)))).to_examples())
            for store in (unpacked, packed)
        ]
        assert examples[0] == examples[1]


def test_a_given_vocabulary_and_a_given_recipe(corpus, tmp_path):
    build_small(corpus, tmp_path / "one")
    kept = {name: tmp_path / "one" / name for name in ("vocab.txt", "recipe.json")}
    with build_small(
        corpus, tmp_path / "two", vocabulary=kept["vocab.txt"], recipe=kept["recipe.json"], packer="none"
    ) as store:
        assert store.manifest.algorithm == "spfhp"
        assert store.manifest.shards == PackStore.open(tmp_path / "one").manifest.shards
    with refused("the histogram has"):
        build_small(corpus, tmp_path / "three", recipe=kept["recipe.json"], duplication_factor=3)


def test_a_depth_the_data_does_not_use_and_an_unlimited_one(corpus, tmp_path):
    with build_small(corpus, tmp_path / "one", max_sequences_per_pack=40, packer="best_fit") as store:
        assert store.schema.max_sequences_per_pack == 40 and verify(store.folder)
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
        assert store.manifest.sequences == 2000 and store.manifest.made_with["parts"] == 3
        assert abs(store.manifest.tokens / 2000 - 255.8) < 4 * 180 / 2000**0.5
        assert store.manifest.vocabulary_size == 8192 and verify(store.folder)


def test_the_commands_as_a_user_types_them(corpus, tmp_path, capsys):
    how = "--max-sequence-length 64 --packer spfhp --max-sequences-per-pack 2 --vocabulary-size 200 --workers 1".split()
    arguments = ["--corpus", str(corpus), "--out", str(tmp_path / "data"), *how]
    assert run_main(build_main, arguments) == 0
    said = capsys.readouterr().out
    assert "packing factor" in said and "bytes a pack" in said
    assert run_main(verify_main, [str(tmp_path / "data")]) == 0
    assert "each exactly once" in capsys.readouterr().out


def test_manifest_says_what_went_in(corpus, tmp_path):
    build_small(corpus, tmp_path / "data")
    made = json.loads((tmp_path / "data" / "manifest.json").read_text())["made_with"]
    assert made["documents"] == 60 and len(made["sources"]) == 60 and made["sources"][0][0] == "000.txt"
    assert made["options"]["duplication_factor"] == 2 and str(corpus) not in json.dumps(made)


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
        vocabulary = load_vocabulary(tmp_path / "data" / "vocab.txt")
        other = np.array([any("\u0430" <= letter <= "\u044f" for letter in token) for token in vocabulary.tokens])
        examples = disassemble(store.schema, store.records(np.arange(len(store)))).to_examples()
        assert store.manifest.made_with["parts"] > 3
    kinds = [
        (
            other[e.input_ids[1 : e.first_segment_length - 1]].mean() > 0.3,
            other[e.input_ids[e.first_segment_length : -1]].mean() > 0.3,
        )
        for e in examples
        if e.next_sentence_label
    ]
    # Were the parts runs of files, nearly none would mix; independent choices of a third mix in 4 of 9.
    assert len(kinds) > 100 and 0.25 < np.mean([a != b for a, b in kinds]) < 0.6


def test_a_build_says_what_its_vocabulary_cannot_spell(corpus, tmp_path, capsys):
    command = ["--workers", "1", "--max-sequence-length", "64", "--duplication-factor", "1"]
    assert run_main(build_main, ["--corpus", str(corpus), "--out", str(tmp_path / "one"), *command]) == 0
    assert "[UNK]" not in capsys.readouterr().err
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "greek.txt").write_text("μῆνιν ἄειδε θεὰ Πηληϊάδεω Ἀχιλῆος the the the. " * 40, encoding="utf-8")
    given = ["--vocabulary", str(tmp_path / "one" / "vocab.txt")]
    assert run_main(build_main, ["--corpus", str(foreign), "--out", str(tmp_path / "two"), *command, *given]) == 0
    (said,) = [line for line in capsys.readouterr().err.splitlines() if "[UNK]" in line]
    assert 30 < int(said.split("%")[0]) < 90 and "--vocabulary" in said


def test_a_build_says_what_a_limit_on_depth_costs(tmp_path, capsys):
    # A mean of 15.5 tokens in rows of 128 slots.
    (tmp_path / "short.jsonl").write_text("".join(f'{{"input_ids": {[1] * (i % 30 + 1)}}}\n' for i in range(3000)))
    command = ["--from", str(tmp_path / "short.jsonl"), "--max-sequence-length", "128", "--workers", "1"]
    for depth in ("unlimited", "12"):
        way_out = ["--max-sequences-per-pack", depth, "--out", str(tmp_path / depth)]
        assert run_main(build_main, [*command, *way_out]) == 0 and "depth" not in capsys.readouterr().err
    assert run_main(build_main, [*command, "--max-sequences-per-pack", "3", "--out", str(tmp_path / "three")]) == 0
    said = capsys.readouterr().err
    with PackStore.open(tmp_path / "three") as three, PackStore.open(tmp_path / "unlimited") as unlimited:
        times = len(three) / len(unlimited)
    assert times > 2 and "3 sequences per pack" in said and "--max-sequences-per-pack unlimited" in said

    assert run_main(build_main, [*command, "--out", str(tmp_path / "default")]) == 0
    with PackStore.open(tmp_path / "default") as chosen:
        depth = chosen.schema.max_sequences_per_pack
        assert len(chosen) <= 1.01 * len(unlimited) and 3 < depth <= 12
    assert re.search(rf"depth {depth}: .*at most 1% more packs.*\b[01]\.\d%", capsys.readouterr().err)


def test_the_depth_of_a_bundled_histogram_is_that_of_the_paper(tmp_path):
    assert BuildOptions(tmp_path, synthetic="wikipedia_512").max_sequences_per_pack == 3
    with pytest.raises(ValueError, match="max_sequences_per_pack"):
        BuildOptions(tmp_path, corpus="x", max_sequences_per_pack="deep")


@pytest.mark.parametrize("array", [np.array([5, 3]), np.array([[5, 7], [9]], object)], ids=["lengths", "ragged"])
def test_a_numpy_array_is_refused_with_what_to_do(array, tmp_path, capsys):
    np.save(tmp_path / "x.npy", array, allow_pickle=True)
    options = ["--from", str(tmp_path / "x.npy"), "--out", str(tmp_path / "out"), "--max-sequence-length", "8"]
    told = refusal_of(build_main, options, capsys)
    assert "pack_data.pack(" in told and "JSONL" in told
    # As told: lists of tokens, one a line.
    (tmp_path / "x.jsonl").write_text("[5, 7, 9]\n[5]\n")
    assert run_main(build_main, [option.replace("x.npy", "x.jsonl") for option in options]) == 0
