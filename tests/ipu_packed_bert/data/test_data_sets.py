"""Settings come from the data set if they are missing, and must agree with it otherwise."""

import json
from dataclasses import replace

import pytest
import yaml

from ipu_packed_bert.commands import pretrain
from ipu_packed_bert.commands.build import _parser as build_parser
from ipu_packed_bert.commands.build import main as build_main
from ipu_packed_bert.commands.first_build import build_missing
from ipu_packed_bert.data.data_sets import (
    _facts,
    built_otherwise,
    described,
    of_the_same_corpus,
    open_evaluation,
    open_packs,
)
from ipu_packed_bert.settings.config import ConfigError
from ipu_packed_bert.settings.loading import config_from_tree, load_config
from ipu_packed_bert.settings.reader import DEFAULT
from pack_data.building.command import BuildOptions
from pack_data.building.held_out import TRAINING_DIGEST, held_out_folder, overlap
from pack_data.cli.command import run_main
from pack_data.store.data_set import MANIFEST, read_manifest
from tests.imports import CONFIGS
from tests.pack_data.text_corpus import build_small, write_corpus
from tests.refusals import refusal_of, refused
from tests.tiny_runs import DEPTH, PREDICTIONS, SLOTS, VOCABULARY, tiny_data


def test_what_is_left_out_is_the_data_sets(tmp_path):
    config = load_config(CONFIGS / "packed_host.yml", [f"data.directory={tiny_data(tmp_path / 'mine')}"])
    completed, manifest = described(config)
    settings = completed.data
    assert (settings.max_sequence_length, settings.max_sequences_per_pack) == (SLOTS, DEPTH)
    assert settings.max_predictions_per_sequence == PREDICTIONS
    assert manifest.packs
    assert completed.model.vocabulary_size == VOCABULARY
    assert "mine" in completed.origins["data.max_sequence_length"]
    # What the file does state stays.
    assert settings.packer == "optimal"
    assert settings.vocabulary_size == 8192
    for key, origin in config.origins.items():
        # A data set that the user names has another depth than the one that the file describes.
        is_free = origin.startswith(DEFAULT) or key == "data.max_sequences_per_pack"
        assert is_free or completed.origins[key] == origin
    # A run folder's configuration has all of it, and is held against the data set when the run goes on.
    path = tmp_path / "config.yml"
    path.write_text(completed.to_yaml())
    assert described(load_config(path))[0] == completed


@pytest.mark.parametrize("overrides, rows", [([], 512), (["model.max_position_embeddings=64"], 64)])
def test_the_embedding_table_has_a_row_for_every_slot(tmp_path, overrides, rows):
    config = load_config(
        CONFIGS / "packed_host.yml",
        [f"data.directory={tiny_data(tmp_path / 'mine')}", *overrides],
    )
    completed, manifest = described(config)
    assert (
        completed.data.max_sequence_length,
        completed.model.max_position_embeddings,
    ) == (SLOTS, rows)
    longer = replace(manifest, schema=replace(manifest.schema, max_sequence_length=1024))
    assert _facts(config, longer)["model.max_position_embeddings"] == 1024


def test_a_configuration_takes_the_depth_of_the_data_set_that_the_user_names(tmp_path):
    """An engine is compiled for the depth of the packs."""
    sizes = [
        "data.max_sequence_length=64",
        "data.max_predictions_per_sequence=10",
        "model.vocabulary_size=128",
    ]
    named = [f"data.directory={tiny_data(tmp_path / 'mine', depth=7)}", *sizes]
    completed, _ = described(load_config(CONFIGS / "packed_phase2_gpu1.yml", named))
    assert (completed.data.max_sequences_per_pack, completed.data.packer) == (7, "spfhp")


def test_a_file_that_extends_another_and_names_its_data_set_takes_the_depth_of_that(tmp_path):
    path = tmp_path / "mine.yml"
    data = f"directory: {tiny_data(tmp_path / 'mine', depth=7)}"
    path.write_text(f"extends: packed_host\ndata: {{{data}}}\n")
    assert described(load_config(path))[0].data.max_sequences_per_pack == 7
    path.write_text(f"extends: packed_host\ndata: {{{data}, max_sequences_per_pack: 3}}\n")
    with pytest.raises(ConfigError, match="depth 7.*is 3"):
        described(load_config(path))


def test_a_note_names_what_was_built_otherwise_and_whether_another_build_would_change_it(corpus, tmp_path):
    with build_small(corpus, tmp_path / "data", duplication_factor=2) as store:
        manifest = store.manifest
    config = for_corpus(corpus, tmp_path / "data", "data.duplication_factor=1")
    (difference,) = [item for item in built_otherwise(config, manifest) if "duplication" in item]
    assert difference == "duplication_factor 2 (data.duplication_factor is 1)"
    assert built_otherwise(for_corpus(corpus, "other", f"data.directory={tmp_path / 'data'}"), manifest) == []
    assert of_the_same_corpus(config, manifest)
    for other in ("embedded", tmp_path / "gone", tmp_path / "data"):
        assert not of_the_same_corpus(for_corpus(other, tmp_path / "data"), manifest)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"), 20)


def for_corpus(corpus, out, *overrides):
    """packed_host.yml with another directory in the file."""
    tree = yaml.safe_load((CONFIGS / "packed_host.yml").read_text())
    tree["data"].update(corpus=str(corpus), directory=str(out), held_out=0.3, packer="spfhp")
    tree["data"].update(max_sequence_length=64, vocabulary_size=200)
    return config_from_tree(tree, "packed_host.yml", overrides)


def test_a_data_set_built_by_hand_with_defaults_is_the_one_that_a_configuration_builds(tmp_path):
    config = config_from_tree({}, "a.yml", ["data.directory=" + str(tmp_path)])
    assert BuildOptions(tmp_path, **config.data.build_options) == BuildOptions(tmp_path)
    assert len(config.data.build_options) > 12
    by_hand = build_parser().parse_args(["--out", str(tmp_path), "--corpus", "embedded"])
    assert BuildOptions(**{**vars(by_hand), "corpus": "embedded"}) == BuildOptions(str(tmp_path))


def test_words_and_documents_are_masked_and_drawn_as_the_configuration_or_the_data_set_states(corpus, tmp_path):
    config = for_corpus(
        corpus,
        tmp_path / "data",
        "data.whole_word_masking=true",
        "data.draw_documents=uniform",
    )
    assert "--whole-word-masking" in config.build_line()
    config, store = open_packs(config, build_missing)
    with store:
        assert store.manifest.made_with["options"]["whole_word_masking"] is True
        data = described(for_corpus(corpus, tmp_path / "data"))[0].data
        assert (data.whole_word_masking, data.draw_documents) == (True, "uniform")
        assert built_otherwise(config, store.manifest) == []
        pieces = for_corpus(corpus, tmp_path / "data", "data.whole_word_masking=false")
        assert built_otherwise(pieces, store.manifest) == [
            "whole_word_masking True (data.whole_word_masking is False)",
            "draw_documents uniform (data.draw_documents is tokens)",
        ]


def test_a_missing_data_set_is_built_with_its_held_out_side(corpus, tmp_path):
    config, store = open_packs(for_corpus(corpus, tmp_path / "data"), build_missing)
    evaluation = open_evaluation(config, store.manifest)
    assert evaluation.folder == held_out_folder(store.folder)
    assert not overlap(store.manifest.made_with, evaluation.manifest.made_with)
    assert store.manifest.made_with["documents"] + evaluation.manifest.made_with["documents"] == 20
    assert open_evaluation(config.changed("run", evaluate_every=0), store.manifest) is None
    # The line to type that a refusal prints builds exactly this.
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert (
        run_main(
            build_main,
            config.build_line().partition(" build ")[2].split() + ["--workers", "1"],
        )
        == 0
    )
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def test_a_data_set_that_the_user_names_is_not_built(corpus, tmp_path, capsys):
    """A mistyped directory, and a directory of texts: one line, and nothing is written."""
    none = tmp_path / "none"
    cases = [
        (["--data", none], none, "packed-bert build --corpus TEXTS"),
        (["--set", f"data.directory={none}"], none, f"--out {none}"),
        (["--data", corpus], corpus, f"--corpus {corpus} --out DIR"),
    ]
    for option, *names in cases:
        words = ["--config", "packed_host", *option, "--out", tmp_path / "run"]
        refusal_of(pretrain.main, words, capsys, *names, unchanged=corpus)
        assert not any(tmp_path.iterdir())


def test_sides_of_two_builds_are_no_pair(corpus, tmp_path):
    """A run that starts between the two renames of a build; a data set named by the user may be of any build."""
    build_small(corpus, tmp_path / "data", held_out=0.3).close()
    build_small(
        corpus,
        tmp_path / "other",
        held_out=0.3,
        seed=4,
        vocabulary=tmp_path / "data" / "vocab.txt",
    ).close()
    theirs = held_out_folder(tmp_path / "other")
    named = for_corpus(corpus, tmp_path / "data", f"data.evaluation_directory={theirs}")
    config, store = open_packs(for_corpus(corpus, tmp_path / "data"), build_missing)
    open_evaluation(named, store.manifest).close()
    held_out = held_out_folder(tmp_path / "data")
    held_out.rename(tmp_path / "before")
    theirs.rename(held_out)
    with refused("was not built with the training data in", "start again", kind=ConfigError):
        open_evaluation(config, store.manifest)
    # One that was converted does not say with what it was built.
    manifest = read_manifest(held_out)
    made_with = {name: value for name, value in manifest.made_with.items() if name != TRAINING_DIGEST}
    changed = replace(manifest, made_with=made_with)
    (held_out / MANIFEST).write_text(json.dumps(changed.to_json()))
    open_evaluation(config, store.manifest).close()


def test_a_smaller_share_held_out_elsewhere_can_be_evaluated_on(corpus, tmp_path):
    """A smaller held-out share of another build contains no training documents of a larger share."""
    build_small(corpus, tmp_path / "data", held_out=0.5).close()
    build_small(corpus, tmp_path / "other", held_out=0.3, vocabulary=tmp_path / "data" / "vocab.txt").close()
    for training, evaluation, fits in (("data", "other", True), ("other", "data", False)):
        directory = f"data.evaluation_directory={tmp_path / evaluation}-held-out"
        config, store = open_packs(for_corpus(corpus, tmp_path / training, directory), build_missing)
        if fits:
            open_evaluation(config, store.manifest).close()
        else:
            with refused("documents of the training data", kind=ConfigError):
                open_evaluation(config, store.manifest)
