"""Weights of one vocabulary never meet data of another: beginning, resuming, exporting, importing, fine-tuning."""

import json
import shutil

import pytest
import yaml

from ipu_packed_bert.commands import export, pretrain
from ipu_packed_bert.run_files.checkpoints import load_checkpoint, load_newest, newest_checkpoint, save_checkpoint
from ipu_packed_bert.run_files.vocabulary_identity import UNKNOWN, Identity, agree
from ipu_packed_bert.tasks.starting_weights import find_start
from ipu_packed_bert.training.export import export_run, import_folder
from pack_data.cli.command import run_main
from pack_data.store.data_set import read_manifest
from pack_data.text.vocabulary import SPECIAL_TOKENS, Vocabulary, load_vocabulary
from tests.fine_tuning_files import tiny_config as fine_tuning_config
from tests.fine_tuning_files import tiny_table
from tests.pack_data.text_corpus import build_small, write_corpus
from tests.tiny_runs import tiny_config, tiny_data, tiny_settings

SIZE = 8192
WORDS = tuple(f"w{number}" for number in range(SIZE - len(SPECIAL_TOKENS)))
ONE, OTHER = Vocabulary(SPECIAL_TOKENS + WORDS), Vocabulary(SPECIAL_TOKENS + WORDS[::-1])


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
    return folder


def trained(folder, *arguments):
    config = tiny_config(folder / "tiny.yml", folder / "one")
    return run_main(
        pretrain.main,
        [
            "--config",
            str(config),
            "--steps",
            "2",
            "--set",
            f"model.vocabulary_size={SIZE}",
            "--set",
            "run.evaluate_every=0",
            "--set",
            "run.checkpoint_every=1",
            *map(str, arguments),
        ],
    )


def newest(run):
    return load_newest(run / "checkpoints")


def refused(status, capsys):
    message = capsys.readouterr().err
    assert status == 2 and message.startswith("error: ") and message.count("\n") == 1
    assert "another vocabulary" in message and ONE.sha256[:12] in message and OTHER.sha256[:12] in message


def test_the_hash_travels_with_the_weights(house):
    assert newest(house / "run").vocabulary == ONE.sha256 != OTHER.sha256


def test_a_run_does_not_begin_with_weights_of_another_vocabulary(house, tmp_path, capsys):
    status = trained(house, "--start-from", house / "run", "--data", house / "other", "--out", tmp_path / "run")
    refused(status, capsys)
    assert not (tmp_path / "run").exists()


def test_it_begins_with_those_of_its_own(house, tmp_path, capsys):
    assert trained(house, "--start-from", house / "run", "--data", house / "one", "--out", tmp_path / "run") == 0
    assert "vocabular" not in capsys.readouterr().out


def test_data_that_does_not_say_is_noted_and_the_weights_keep_theirs(house, tmp_path, capsys):
    assert trained(house, "--start-from", house / "run", "--data", house / "unknown", "--out", tmp_path / "run") == 0
    noted = [line for line in capsys.readouterr().out.splitlines() if "not compared" in line]
    assert len(noted) == 1 and str(house / "unknown") in noted[0] and str(house / "run") not in noted[0]
    assert newest(tmp_path / "run").vocabulary == ONE.sha256


def test_a_run_is_not_resumed_with_another_vocabulary(house, tmp_path, capsys):
    run = tmp_path / "run"
    assert trained(house, "--data", house / "one", "--out", run) == 0
    shutil.rmtree(str(newest_checkpoint(run / "checkpoints")))
    refused(run_main(pretrain.main, ["--resume", str(run), "--data", str(house / "other")]), capsys)
    assert run_main(pretrain.main, ["--resume", str(run)]) == 0


def test_export_writes_the_vocabulary_of_the_weights(house, tmp_path, capsys):
    run = str(house / "run")
    refused(run_main(export.main, [run, str(tmp_path / "hf"), "--vocabulary", str(house / "other.txt")]), capsys)
    assert not (tmp_path / "hf").exists()
    assert run_main(export.main, [run, str(tmp_path / "hf")]) == 0
    assert "not compared" not in capsys.readouterr().out
    assert load_vocabulary(tmp_path / "hf" / "vocab.txt").sha256 == ONE.sha256
    # What comes back is of that vocabulary too.
    assert run_main(export.main, ["--import", str(tmp_path / "hf"), str(tmp_path / "again")]) == 0
    assert newest(tmp_path / "again").vocabulary == ONE.sha256
    capsys.readouterr()
    refused(
        trained(house, "--start-from", tmp_path / "again", "--data", house / "other", "--out", tmp_path / "run"), capsys
    )


@pytest.mark.parametrize("form", ["our run", "hugging face"])
def test_fine_tuning_begins_with_the_vocabulary_of_the_weights(house, tmp_path, form):
    start = house / "run"
    if form == "hugging face":
        start = tmp_path / "hf"
        export_run(house / "run", start)
    table = tiny_table(tmp_path / "train.csv", "single_label")
    with pytest.raises(ValueError, match="another vocabulary"):
        find_start(
            fine_tuning_config(start, table, task="single_label", model={"vocabulary": str(house / "other.txt")})
        )
    found = find_start(
        fine_tuning_config(start, table, task="single_label", model={"vocabulary": str(house / "one.txt")})
    )
    assert found.vocabulary.sha256 == ONE.sha256 and "not compared" not in found.description


def test_a_checkpoint_knows_the_vocabulary_of_its_weights(house, tmp_path):
    found = load_newest(house / "run" / "checkpoints")
    assert found.identity.sha256 == ONE.sha256
    unknown = load_checkpoint(save_checkpoint(tmp_path, found._replace(vocabulary="", lower_case=None), keep=1))
    assert unknown.identity == UNKNOWN and UNKNOWN.lowers_case


@pytest.mark.parametrize(
    "weights, data, known, noted",
    [("a", "a", "a", ()), ("a", "", "a", ("DATA",)), ("", "a", "a", ("RUN",)), ("", "", "", ("DATA", "RUN"))],
)
def test_what_both_sides_say(weights, data, known, noted):
    found = agree(Identity(weights), Identity(data), weights_of="RUN", data_of="DATA")
    assert found.vocabulary == Identity(known)
    assert [name for name in ("DATA", "RUN") if found.note and name in found.note] == list(noted)


@pytest.mark.parametrize("weights", [True, False, None])
@pytest.mark.parametrize("data", [True, False, None])
def test_the_rule_for_capitals_is_part_of_a_vocabulary(weights, data):
    """Whoever states it decides; two that state it otherwise do not go together."""
    sides = Identity("a", weights), Identity("a", data)
    if None not in (weights, data) and weights != data:
        with pytest.raises(ValueError, match="another vocabulary .* keeps capitals.* --keep-case") as error:
            agree(*sides, weights_of="RUN", data_of="DATA")
        assert f"{'DATA' if weights else 'RUN'} keeps" in str(error.value) and "\n" not in str(error.value)
    else:
        found = agree(*sides, weights_of="RUN", data_of="DATA")
        assert found == (Identity("a", data if weights is None else weights), None)


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
    settings = {**tiny_settings(folder / data), "data": {"directory": str(folder / data)}}
    settings["model"] = {**settings["model"], "vocabulary_size": 300}
    settings["run"] = {"steps": 1}
    (folder / "cased.yml").write_text(yaml.safe_dump(settings))
    return run_main(pretrain.main, ["--config", str(folder / "cased.yml"), *map(str, arguments)])


def test_a_run_on_data_that_keep_capitals_says_so_wherever_it_goes(cased, tmp_path):
    run = cased / "run"
    assert newest(run).lower_case is False
    assert json.loads((run / "environment.json").read_text())["data"]["lower_case"] is False
    kept = load_vocabulary(cased / "kept" / "vocab.txt", lower_case=False)
    word = next(token for token in kept.tokens if token[0].isupper() and len(token) > 1)
    table = tiny_table(tmp_path / "train.csv", "single_label")
    export_run(run, tmp_path / "hf")
    assert json.loads((tmp_path / "hf" / "tokenizer_config.json").read_text())["do_lower_case"] is False
    import_folder(tmp_path / "hf", tmp_path / "again")
    for start in (run, tmp_path / "hf", tmp_path / "again"):
        found = find_start(
            fine_tuning_config(start, table, task="single_label", data={"max_sequence_length": 32})
        ).vocabulary
        assert found.encode([word])[0].tolist() == [kept.ids[word]]


def test_the_same_tokens_in_another_case_are_another_vocabulary(cased, tmp_path, capsys):
    lowered = read_manifest(cased / "lowered")
    assert lowered.vocabulary_sha256 == newest(cased / "run").vocabulary
    new = ("--start-from", cased / "run", "--out", tmp_path / "run")
    assert trained_on(cased, "lowered", *new) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and "--keep-case" in message and not (tmp_path / "run").exists()
    assert trained_on(cased, "kept", *new) == 0
    evaluated = ("--set", "run.evaluate_every=1", "--set", f"data.evaluation_directory={cased / 'lowered'}")
    assert trained_on(cased, "kept", "--out", tmp_path / "other", *evaluated) == 2
    assert "has lower-case text, unlike the training data" in capsys.readouterr().err


def test_one_vocabulary_has_one_identity_however_its_lines_end(tmp_path):
    corpus = write_corpus(tmp_path / "text", 8)
    content = (build_small(corpus, tmp_path / "first").folder / "vocab.txt").read_bytes()
    (tmp_path / "dos.txt").write_bytes(content.replace(b"\n", b"\r\n"))
    (tmp_path / "cut.txt").write_bytes(content.rstrip(b"\n"))
    identity = load_vocabulary(tmp_path / "dos.txt").sha256
    for name in ("dos", "cut"):
        build_small(corpus, tmp_path / name, vocabulary=tmp_path / f"{name}.txt")
        assert (
            read_manifest(tmp_path / name).vocabulary_sha256
            == identity
            == read_manifest(tmp_path / "first").vocabulary_sha256
        )
