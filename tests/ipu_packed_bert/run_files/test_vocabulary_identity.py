"""Weights of one vocabulary never meet data of another: beginning, resuming, exporting, importing, fine-tuning."""

import json
import shutil
from itertools import product

import pytest
import yaml

from ipu_packed_bert.commands import export, pretrain
from ipu_packed_bert.run_files.checkpoints import load_newest, newest_checkpoint
from ipu_packed_bert.run_files.vocabulary_identity import UNKNOWN, Identity, agree
from ipu_packed_bert.tasks.starting_weights import find_start
from ipu_packed_bert.training.export import export_run, import_folder
from pack_data.cli.command import run_main
from pack_data.store.data_set import read_manifest
from pack_data.text.vocabulary import SPECIAL_TOKENS, Vocabulary, load_vocabulary
from tests.fine_tuning_files import tiny_config as fine_tuning_config
from tests.fine_tuning_files import tiny_table
from tests.pack_data.text_corpus import build_small, write_corpus
from tests.refusals import refused
from tests.tiny_runs import tiny_config, tiny_data, tiny_settings

SIZE = 512
WORDS = tuple(f"w{number}" for number in range(SIZE - len(SPECIAL_TOKENS)))
ONE = Vocabulary(SPECIAL_TOKENS + WORDS)
OTHER = Vocabulary(SPECIAL_TOKENS + WORDS[::-1])


def trained(folder, *arguments):
    config = tiny_config(folder / "tiny.yml", folder / "one")
    overrides = (f"model.vocabulary_size={SIZE}", "run.evaluate_every=0", "run.checkpoint_every=1")
    options = [word for override in overrides for word in ("--set", override)]
    return run_main(
        pretrain.main,
        ["--config", str(config), "--steps", "2", *options, *map(str, arguments)],
    )


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    """Both vocabularies; the same packs said to be of the one, of the other, and of neither; a run on the first."""
    folder = tmp_path_factory.mktemp("identity")
    for name, vocabulary in (("one", ONE), ("other", OTHER)):
        (folder / f"{name}.txt").write_bytes(vocabulary.text)
        tiny_data(folder / name, vocabulary_sha256=vocabulary.sha256)
        (folder / name / "vocab.txt").write_bytes(vocabulary.text)
    tiny_data(folder / "unknown")
    assert trained(folder, "--data", folder / "one", "--out", folder / "run") == 0
    export_run(folder / "run", folder / "hf")
    import_folder(folder / "hf", folder / "again")
    return folder


def newest(run):
    return load_newest(run / "checkpoints")


def test_weights_do_not_meet_data_of_another_vocabulary(house, tmp_path, capsys):
    """Beginning, resuming and exporting, and beginning with what was exported and imported again."""
    shutil.copytree(house / "run", tmp_path / "run")
    shutil.rmtree(str(newest_checkpoint(tmp_path / "run" / "checkpoints")))
    new = ("--data", house / "other", "--out", tmp_path / "new")
    statuses = [
        trained(house, "--start-from", house / "run", *new),
        trained(house, "--start-from", house / "again", *new),
        run_main(
            pretrain.main,
            ["--resume", str(tmp_path / "run"), "--data", str(house / "other")],
        ),
        run_main(
            export.main,
            [str(house / "run"), str(tmp_path / "new"), "--vocabulary", str(house / "other.txt")],
        ),
    ]
    messages = capsys.readouterr().err.splitlines()
    assert statuses == [2] * 4 == [2] * len(messages)
    assert not (tmp_path / "new").exists()
    for message in messages:
        assert ONE.sha256[:12] in message
        assert OTHER.sha256[:12] in message


def test_the_vocabulary_travels_with_the_weights(house, tmp_path, capsys):
    for run in ("run", "again"):
        assert newest(house / run).identity.sha256 == ONE.sha256
    assert load_vocabulary(house / "hf" / "vocab.txt").sha256 == ONE.sha256
    # Data that does not say is noted, and the weights keep theirs.
    assert (
        trained(
            house,
            "--start-from",
            house / "run",
            "--data",
            house / "unknown",
            "--out",
            tmp_path / "run",
        )
        == 0
    )
    (noted,) = [line for line in capsys.readouterr().out.splitlines() if "not compared" in line]
    assert str(house / "unknown") in noted
    assert str(house / "run") not in noted
    assert newest(tmp_path / "run").vocabulary == ONE.sha256


@pytest.mark.parametrize(
    "hashes",
    [("a", "a"), ("a", ""), ("", "a"), ("", ""), ("a", "b")],
)
def test_sides_agree_unless_both_state_another_hash_or_casing(hashes):
    for weights_case, data_case in product((True, False, None), repeat=2):
        weights = Identity(hashes[0], weights_case)
        data = Identity(hashes[1], data_case)
        other_hash = "" not in hashes and hashes[0] != hashes[1]
        other_case = None not in (weights_case, data_case) and weights_case != data_case
        if other_hash or other_case:
            rule = "sha256" if other_hash else f"{'DATA' if weights_case else 'RUN'} keeps .*--keep-case"
            with refused("another vocabulary", "RUN", "DATA", rule):
                agree(weights, data, weights_of="RUN", data_of="DATA")
            continue
        actual = agree(weights, data, weights_of="RUN", data_of="DATA")
        casing = data_case if weights_case is None else weights_case
        assert actual.vocabulary == Identity(max(hashes), casing)
        unknown = [name for name, sha256 in zip(("RUN", "DATA"), hashes) if not sha256]
        assert [name for name in ("RUN", "DATA") if name in (actual.note or "")] == unknown
    assert UNKNOWN.lowers_case


@pytest.mark.parametrize("form", ["our run", "hugging face"])
def test_fine_tuning_begins_with_the_vocabulary_of_the_weights(house, tmp_path, form):
    start = house / "run"
    if form == "hugging face":
        start = tmp_path / "hf"
        export_run(house / "run", start)
    table = tiny_table(tmp_path / "train.csv", "single_label")
    configs = []
    for name in ("one", "other"):
        vocabulary = {"vocabulary": str(house / f"{name}.txt")}
        configs.append(fine_tuning_config(start, table, task="single_label", model=vocabulary))
    with refused("another vocabulary"):
        find_start(configs[1])
    beginning = find_start(configs[0])
    assert beginning.vocabulary.sha256 == ONE.sha256
    assert "not compared" not in beginning.description


@pytest.fixture(scope="module")
def cased(tmp_path_factory):
    """Data that keep capitals; the same text with the same vocabulary in lower case; a run on the first."""
    folder = tmp_path_factory.mktemp("cased")
    corpus = write_corpus(folder / "text", 30)
    build_small(corpus, folder / "kept", lower_case=False, vocabulary_size=300).close()
    build_small(corpus, folder / "lowered", vocabulary=folder / "kept" / "vocab.txt").close()
    assert trained_on(folder, "kept", "--out", folder / "run") == 0
    return folder


def trained_on(folder, data, *arguments):
    settings = tiny_settings(folder / data)
    settings["data"] = {"directory": str(folder / data)}
    settings["model"]["vocabulary_size"] = 300
    settings["run"] = {"steps": 1}
    (folder / "cased.yml").write_text(yaml.safe_dump(settings))
    return run_main(
        pretrain.main,
        ["--config", str(folder / "cased.yml"), *map(str, arguments)],
    )


def test_a_run_on_data_that_keep_capitals_says_so_wherever_it_goes(cased, tmp_path):
    run = cased / "run"
    assert newest(run).lower_case is False
    environment = json.loads((run / "environment.json").read_text())
    assert environment["data"]["lower_case"] is False
    kept = load_vocabulary(cased / "kept" / "vocab.txt", lower_case=False)
    word = next(token for token in kept.tokens if token[0].isupper() and len(token) > 1)

    export_run(run, tmp_path / "hf")
    tokenizer = json.loads((tmp_path / "hf" / "tokenizer_config.json").read_text())
    assert tokenizer["do_lower_case"] is False
    import_folder(tmp_path / "hf", tmp_path / "again")
    table = tiny_table(tmp_path / "train.csv", "single_label")
    for start in (run, tmp_path / "hf", tmp_path / "again"):
        config = fine_tuning_config(start, table, task="single_label", data={"max_sequence_length": 32})
        assert find_start(config).vocabulary.encode([word])[0].tolist() == [kept.ids[word]]


def test_the_same_tokens_in_another_case_are_another_vocabulary(cased, tmp_path, capsys):
    lowered = read_manifest(cased / "lowered")
    assert lowered.vocabulary_sha256 == newest(cased / "run").vocabulary
    new = ("--start-from", cased / "run", "--out", tmp_path / "run")
    assert trained_on(cased, "lowered", *new) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert "--keep-case" in message
    assert not (tmp_path / "run").exists()
    assert trained_on(cased, "kept", *new) == 0
    evaluated = ("--set", "run.evaluate_every=1", "--set", f"data.evaluation_directory={cased / 'lowered'}")
    assert trained_on(cased, "kept", "--out", tmp_path / "other", *evaluated) == 2
    assert "has lower-case text, unlike the training data" in capsys.readouterr().err
