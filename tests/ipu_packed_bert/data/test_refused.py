"""Data sets that contradict a configuration, their states and packing factors: each is refused in one line."""

import argparse
from contextlib import closing
from functools import lru_cache
from pathlib import Path

import yaml

from ipu_packed_bert.commands.first_build import build_missing
from ipu_packed_bert.data import factors
from ipu_packed_bert.data.data_sets import described, open_evaluation, open_packs
from ipu_packed_bert.data.global_batches import GlobalBatches, StoredPacks
from ipu_packed_bert.settings.loading import config_from_tree, load_config
from pack_data.building.held_out import held_out_folder
from pack_data.store.data_set import PackStore
from tests.imports import CONFIGS
from tests.pack_data.text_corpus import build_small, write_corpus
from tests.pretraining import global_batches
from tests.refusals import faults_of_refusals
from tests.tiny_runs import tiny_config, tiny_data, tiny_settings


def given(factor):
    return factors.planned_factor(512, "spfhp", 3, given=factor)


def parsed(text):
    return factors.parse_factor(text)


def stated(*overrides, file="packed_host", data="tiny"):
    """The configuration of a file, completed by a data set that the user names."""
    return described(load_config(CONFIGS / f"{file}.yml", [f"data.directory={data}", *overrides]))


SIZES = ["data.max_sequence_length=64", "data.max_predictions_per_sequence=10", "model.vocabulary_size=128"]


def deep(file, *overrides):
    return stated(*SIZES, *overrides, file=file, data="deep")


def mixed(*overrides):
    tiny_config(Path("tiny.yml"), Path("tiny"))
    return described(load_config(Path("tiny.yml"), overrides))


def for_corpus(out, *overrides, corpus="corpus"):
    """packed_host.yml with another directory in the file."""
    tree = yaml.safe_load((CONFIGS / "packed_host.yml").read_text())
    tree["data"].update(corpus=corpus, directory=out, held_out=0.3, packer="spfhp")
    tree["data"].update(max_sequence_length=64, vocabulary_size=200)
    return config_from_tree(tree, "packed_host.yml", overrides)


@lru_cache(maxsize=None)
def built(out, **options):
    """Build a data set of the corpus once, with the vocabulary of the first unless a size is given."""
    if out != "first" and "vocabulary_size" not in options:
        options["vocabulary"] = Path("first") / "vocab.txt"
    build_small(Path("corpus"), Path(out), **options).close()
    return out


def evaluated(out, *, held_out=False, training="first", **options):
    """Train on one build and evaluate on another, or on its held-out side."""
    built(out, **options, **({"held_out": 0.3} if held_out else {}))
    other = held_out_folder(Path(out)) if held_out else out
    config, store = open_packs(for_corpus(training, f"data.evaluation_directory={other}"), build_missing)
    with store:
        return open_evaluation(config, store.manifest)


def without_held_out(data, config=None):
    with PackStore.open(Path(data)) as store:
        return open_evaluation(config or for_corpus(data), store.manifest)


def batches(*overrides, data="tiny"):
    store = PackStore.open(Path(data))
    return global_batches(store, config_from_tree(tiny_settings(), "tiny.yml", overrides), packing_factor=2.0)


def resumed(*overrides, data="tiny", **changes):
    """Load the state of a run into another, with changes; a change to None removes a value."""
    with closing(batches()) as saved, closing(batches(*overrides, data=data)) as loader:
        state = {**saved.state(), **changes}
        loader.load_state({name: value for name, value in state.items() if value is not None})


class NoPacks(StoredPacks):
    def __len__(self):
        return 0


def without_packs():
    with closing(batches()) as loader:
        return GlobalBatches(NoPacks(PackStore.open(Path("tiny"))), loader.layout)


REFUSED = [
    # Packing factors.
    ("given(3.1)", ["3.1", "at most 3", "max_sequences_per_pack"]),
    *(
        (call, ["--packing-factor|packing factor", number], kind)
        for number in ("0.99", "inf", "nan", "-3")
        for call, kind in (
            (f"given(float('{number}'))", ValueError),
            (f"parsed('{number}')", argparse.ArgumentTypeError),
        )
    ),
    ("parsed('two')", ["'two'", "at least 1"], argparse.ArgumentTypeError),
    # Where configuration and data set both have a value, they agree.
    ("stated('data.max_sequence_length=128')", ["tiny", "packs of 64", "data.max_sequence_length is 128"]),
    ("stated('data.max_sequences_per_pack=2')", ["tiny", "depth 3", "data.max_sequences_per_pack is 2"]),
    ("stated('data.max_predictions_per_sequence=20')", ["up to 10", "data.max_predictions_per_sequence is 20"]),
    ("stated('model.vocabulary_size=100', 'data.vocabulary_size=128')", ["128 tokens", "model.vocabulary_size is 100"]),
    ("stated('model.max_position_embeddings=32')", ["is 64", "model.max_position_embeddings, 32"]),
    ("deep('packed_phase2_gpu1', 'data.max_sequences_per_pack=3')", ["deep", "depth 7", "max_sequences_per_pack is 3"]),
    ("deep('unpacked_phase2_pod16')", ["deep", "depth 7", "max_sequences_per_pack is 1"]),
    ("stated('model.vocabulary_size=4000', data='none')", ["data.vocabulary_size is 8192", "4000"]),
    ("mixed('data.mixed_with=[spelt]')", ["data.mixed_with", "spelt", "another vocabulary"]),
    ("mixed('data.mixed_with=[deep]')", ["data.mixed_with", "deep", "another shape"]),
    ("mixed('data.shares=[1, 3]')", ["data.shares", "2 numbers", "1 data sets"]),
    ("open_packs(for_corpus('corpus', corpus='embedded'), build_missing)", ["corpus", "directory of its own"]),
    # Data to evaluate on.
    ("evaluated('same')", ["same", "documents of the training data in first"]),
    ("evaluated('short', max_sequence_length=32)", ["short", "32 slots", "64"]),
    (
        "evaluated('five', max_sequences_per_pack=5, packer='best_fit', held_out=True)",
        ["five-held-out", "up to 5 sequences", "room for 3"],
    ),
    ("evaluated('other', vocabulary_size=150, held_out=True)", ["other-held-out", "another vocabulary"]),
    (
        "without_held_out('same')",
        ["same-held-out", "--corpus corpus --out same --held-out 0.3", "--seed 3", "--vocabulary-size 200"],
    ),
    (
        "without_held_out('same', load_config(CONFIGS / 'packed_host.yml', ['data.directory=same']))",
        ["--corpus CORPUS", "--overwrite"],
    ),
    ("without_held_out('tiny', for_corpus('elsewhere'))", ["data.evaluation_directory"]),
    # States.
    ("next(batches().held_out())", ["no held-out data set"]),
    ("without_packs()", ["no packs"]),
    ("resumed('run.seed=6')", ["run.seed 5", "6 now"]),
    ("resumed('batch.micro_batch=1')", ["packs per update 4", "2 now"]),
    ("resumed(data='spelt')", ["data set of digest [0-9a-f]{16}, but it is [0-9a-f]{16} now"]),
    *(
        (f"resumed({name}={value!r})", [name, "whole number|missing|has no"])
        for name, value in (("epoch", -1), ("epoch", "1"), ("epoch", None), ("packs", 10**6), ("packs", 1.0))
    ),
]


def test_calls_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_corpus(Path("corpus"), 20)
    tiny_data(Path("tiny"))
    tiny_data(Path("deep"), depth=7)
    tiny_data(Path("spelt"), sequences=90, seed=1, vocabulary_sha256="ab" * 32)
    built("first", held_out=0.3)
    faults = faults_of_refusals(REFUSED, globals())
    assert not faults, "\n".join(faults)
