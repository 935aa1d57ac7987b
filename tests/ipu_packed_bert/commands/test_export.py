"""Hugging Face folders: every form in circulation reads as the same weights; what is written reads back; bad ones in
one line."""

import json
import os
import shlex
from dataclasses import replace

import pytest
import torch
import yaml

from ipu_packed_bert.commands import finetune, predict, pretrain
from ipu_packed_bert.commands.export import main
from ipu_packed_bert.model.hugging_face import load_into, read_folder, write_folder
from ipu_packed_bert.model.packed import PackedBertForPreTraining
from ipu_packed_bert.run_files.checkpoints import Checkpoint, load_checkpoint, newest_checkpoint, save_checkpoint
from ipu_packed_bert.run_files.safetensors_files import file_pieces
from ipu_packed_bert.run_files.vocabulary_identity import Identity
from ipu_packed_bert.settings.loading import config_from_tree, load_config
from ipu_packed_bert.settings.schema import LossConfig
from ipu_packed_bert.training.export import export_run, import_folder
from pack_data.cli.command import run_main
from pack_data.text.corpus import Document
from pack_data.text.vocabulary import (
    SPECIAL_TOKENS,
    TokenizerFile,
    Vocabulary,
    load_vocabulary,
    train_vocabulary,
)
from tests.fine_tuning_files import tiny_config, tiny_table
from tests.pack_data.text.tokenizer_files import byte_level, wordpiece
from tests.pack_data.text_corpus import build_small, write_corpus
from tests.tiny_runs import TINY

VOCABULARY = Vocabulary(SPECIAL_TOKENS + ("a", "b", "##b", "c", "hello", "world", "!"))
MODEL = replace(TINY, vocabulary_size=20, intermediate_size=24, max_position_embeddings=32, layer_norm_eps=1e-12)
TABLE, BIAS = "bert.embeddings.word_embeddings.weight", "cls.predictions.bias"


def network(next_sentence=True, model=MODEL):
    torch.manual_seed(3)
    made = PackedBertForPreTraining(model, LossConfig(next_sentence=next_sentence))
    for parameter in made.parameters():  # no zero or one is left that a wrong tensor could equal
        torch.nn.init.normal_(parameter, std=0.3)
    return made


@pytest.fixture
def folder(tmp_path):
    write_folder(tmp_path / "hf", MODEL, network().state_dict(), VOCABULARY, architecture="BertForPreTraining")
    return tmp_path / "hf"


def with_weights(folder, weights):
    """The folder with these weights instead of its own."""
    (folder / "model.safetensors").write_bytes(b"".join(file_pieces(weights)))


def same(found, expected):
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == torch.float32 and torch.equal(found[name], tensor), name


def test_what_is_written_reads_back(folder):
    found = read_folder(folder)
    assert found.model == MODEL
    assert found.vocabulary.tokens == VOCABULARY.tokens and found.vocabulary.lower_case
    same(found.weights, network().state_dict())


FORMS = {
    "as it is": lambda weights: weights,
    "decoder written out": lambda weights: {
        **weights,
        "cls.predictions.decoder.weight": weights[TABLE],
        "cls.predictions.decoder.bias": weights[BIAS],
    },
    "bias in the decoder only": lambda weights: {
        **{name: value for name, value in weights.items() if name != BIAS},
        "cls.predictions.decoder.bias": weights[BIAS],
    },
    "old buffer": lambda weights: {**weights, "bert.embeddings.position_ids": torch.arange(32).view(1, 32)},
    "converted from TensorFlow": lambda weights: {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
        for name, value in weights.items()
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_reads_as_the_same_weights(folder, form):
    weights = dict(network().state_dict())
    with_weights(folder, FORMS[form](weights))
    same(read_folder(folder).weights, weights)


def test_a_file_of_the_encoder_alone(folder):
    weights = {name: value for name, value in network().state_dict().items() if name.startswith("bert.")}
    bare = {name[len("bert.") :]: value for name, value in weights.items()}
    with_weights(folder, {**bare, "embeddings.position_ids": torch.arange(32).view(1, 32)})
    found = read_folder(folder).weights
    same(found, weights)
    loaded = load_into(PackedBertForPreTraining(MODEL, LossConfig()), found)
    assert loaded.unused == () and len(loaded.fresh) == 7 and all(name.startswith("cls.") for name in loaded.fresh)


def test_half_precision_is_widened(folder):
    with_weights(folder, {name: value.to(torch.float16) for name, value in network().state_dict().items()})
    same(read_folder(folder).weights, {name: value.half().float() for name, value in network().state_dict().items()})


def changed(folder, **settings):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


def pipe(path):
    path.unlink()
    os.mkfifo(path)


def without_vocabulary(folder):
    (folder / "vocab.txt").unlink()
    (folder / "tokenizer.json").unlink()


@pytest.mark.parametrize(
    "damage, says",
    [
        (lambda folder: (folder / "config.json").unlink(), "config.json: no such file"),
        (lambda folder: (folder / "config.json").write_text("{"), "not JSON"),
        (lambda folder: changed(folder, model_type="roberta"), "model_type is 'roberta'"),
        (lambda folder: changed(folder, hidden_act="gelu_new"), "hidden_act is 'gelu_new'"),
        (lambda folder: changed(folder, hidden_size="16"), "hidden_size is '16'; must be a whole number"),
        (lambda folder: changed(folder, num_hidden_layers=10**9), "num_hidden_layers is 1000000000"),
        (lambda folder: changed(folder, num_hidden_layers=4000), "has 2 layers, its configuration 4000"),
        (lambda folder: changed(folder, hidden_size=10**400), "a number of 401 digits"),
        (lambda folder: changed(folder, hidden_dropout_prob=1.0), "hidden_dropout_prob is 1.0"),
        (lambda folder: (folder / "config.json").write_text("[" * 100_000), "nested too deeply"),
        (lambda folder: pipe(folder / "config.json"), "a pipe, not an ordinary file"),
        (lambda folder: pipe(folder / "model.safetensors"), "a pipe, not an ordinary file"),
        (lambda folder: pipe(folder / "vocab.txt"), "a pipe, not an ordinary file"),
        (lambda folder: changed(folder, num_attention_heads=3), "must be a multiple of num_attention_heads"),
        (lambda folder: changed(folder, num_hidden_layers=3), "has 2 layers, its configuration 3"),
        (lambda folder: changed(folder, num_hidden_layers=1), "has 2 layers, its configuration 1"),
        (lambda folder: changed(folder, intermediate_size=25), "its configuration has [25, 16]"),
        (without_vocabulary, "vocab.txt: no such file"),
        (lambda folder: (folder / "vocab.txt").write_bytes(VOCABULARY.text[:-5]), "more tokens than in vocab.txt"),
        (lambda folder: (folder / "model.safetensors").unlink(), "no model.safetensors"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"no"), "cannot be read"),
        (
            lambda folder: with_weights(
                folder, {**network().state_dict(), "cls.predictions.decoder.weight": torch.zeros(20, 16)}
            ),
            "differs from bert.embeddings.word_embeddings.weight",
        ),
    ],
)
def test_what_cannot_be_read_is_said_in_one_line(folder, damage, says):
    damage(folder)
    with pytest.raises(ValueError) as error:
        read_folder(folder)
    assert says in str(error.value) and "\n" not in str(error.value)


def test_another_size_is_refused():
    weights = {TABLE: torch.zeros(21, 16)}
    with pytest.raises(ValueError, match=r"is \[21, 16\], the network's is \[20, 16\]"):
        load_into(network(), weights)


def a_run(tmp_path, next_sentence=True, vocabulary=VOCABULARY, slots=32):
    """A run folder with one checkpoint; its vocabulary lies beside its data."""
    data = tmp_path / "data"
    data.mkdir()
    (data / vocabulary.file).write_bytes(vocabulary.text)
    sizes = replace(MODEL, vocabulary_size=max(MODEL.vocabulary_size, len(vocabulary)))
    path = tmp_path / "tiny.yml"
    model = "\n".join(
        f"  {name}: {value:.13f}" if isinstance(value, float) else f"  {name}: {value}"
        for name, value in vars(sizes).items()
        if value is not None
    )
    path.write_text(
        f"data:\n  directory: {data}\n  vocabulary_size: 128\n  max_sequence_length: {slots}\n  "
        f"max_predictions_per_sequence: 5\n"
        f"model:\n{model}\nloss:\n  next_sentence: {str(next_sentence).lower()}\n"
        "placement:\n  layers_per_ipu: [2]\n"
    )
    config = load_config(path)
    weights = {"model": network(next_sentence, sizes).state_dict()}
    checkpoint = Checkpoint(7, weights, {}, config.to_yaml(), *Identity.of(vocabulary))
    save_checkpoint(tmp_path / "run" / "checkpoints", checkpoint, keep=1)
    return tmp_path / "run"


@pytest.mark.parametrize("next_sentence", [True, False])
def test_a_run_goes_out_and_comes_back(tmp_path, next_sentence):
    run = a_run(tmp_path, next_sentence)
    assert export_run(run, tmp_path / "hf").step == 7
    loaded = import_folder(tmp_path / "hf", tmp_path / "again")
    back = load_checkpoint(newest_checkpoint(tmp_path / "again" / "checkpoints"))
    expected = network(next_sentence).state_dict()
    for name, tensor in expected.items():
        assert torch.equal(back.engine["model"][name], tensor), name
    # Without next sentence prediction the run had no pooler and no classifier: those, and only those, are new.
    fresh = set(back.engine["model"]) - set(expected)
    assert set(loaded.fresh) == fresh and len(fresh) == (0 if next_sentence else 4)
    assert load_config(tmp_path / "again" / "config.yml").model == MODEL


def test_transformers_scores_the_same(tmp_path):
    transformers = pytest.importorskip("transformers", reason="the outside reference: pip install transformers")
    run = a_run(tmp_path)
    export_run(run, tmp_path / "hf")
    theirs, notes = transformers.BertForPreTraining.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not notes["missing_keys"] and not notes["unexpected_keys"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    encoded = tokenizer("Hello wOrld!", "ab c", return_tensors="pt")
    ids = [VOCABULARY.ids[token] for token in ("[CLS]", "hello", "world", "!", "[SEP]", "a", "##b", "c", "[SEP]")]
    assert encoded["input_ids"].tolist() == [ids]
    assert encoded["token_type_ids"].tolist() == [[0] * 5 + [1] * 4]

    slots = torch.arange(len(ids)).view(1, -1)
    with torch.no_grad():
        expected = theirs.eval()(**encoded)
        fields = (encoded["input_ids"], torch.ones_like(slots), encoded["token_type_ids"], slots, slots, slots[:, :1])
        found = network().eval().logits(*fields)
    assert torch.allclose(found.mlm_BPV, expected.prediction_logits, rtol=1e-5, atol=1e-5)
    assert torch.allclose(found.nsp_BD2[:, 0], expected.seq_relationship_logits, rtol=1e-5, atol=1e-5)
    assert float(expected.prediction_logits.std()) > 0.1


def test_the_way_from_transformers(tmp_path):
    """Weights saved by transformers are read unchanged."""
    transformers = pytest.importorskip("transformers", reason="the outside reference: pip install transformers")
    run = a_run(tmp_path)
    export_run(run, tmp_path / "hf")
    transformers.BertForPreTraining.from_pretrained(tmp_path / "hf").save_pretrained(tmp_path / "theirs")
    (tmp_path / "theirs" / "vocab.txt").write_bytes(VOCABULARY.text)
    found = read_folder(tmp_path / "theirs")
    assert found.model == MODEL
    same(found.weights, network().state_dict())


RECORDED = {
    "steps": 7,
    "sequences": 1234,
    "tokens": 56789,
    "packing_factor": 1.7674,
    "sequences_per_second": 33.33,
    "held_out": {
        "step": 7,
        "mlm_accuracy": 0.138,
        "mlm_loss": 5.4321,
        "nsp_accuracy": 0.53,
        "most_frequent_token_accuracy": 0.046,
        "unigram_loss": 6.1,
        "most_frequent_next_sentence_accuracy": None,
    },
    "compare_unpacked": {"packed_sequences_per_second": 40.25, "unpacked_sequences_per_second": 20.75},
}


def card_of(tmp_path, run, name="hf"):
    """Front matter, the values of the table by name, and the configuration of a card that `export` writes."""
    assert run_main(main, [str(run), str(tmp_path / name)]) == 0
    _, front, text = (tmp_path / name / "README.md").read_text().split("---\n", 2)
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ") and "---" not in line]
    table = {row[0]: row[1] for row in rows if len(row) == 2}
    return yaml.safe_load(front), table, yaml.safe_load(text.split("```")[1][5:])


def test_the_card_states_what_the_run_has_recorded_and_nothing_else(tmp_path):
    run = a_run(tmp_path)
    front, facts, settings = card_of(tmp_path, run)
    assert front["library_name"] == "transformers" and front["pipeline_tag"] == "fill-mask"
    assert "license" not in front and "language" not in front
    assert facts == {"row": "32 slots, packed by `nnlshp`", "updates": "7"}
    assert config_from_tree(settings, "card").model.hidden_size == MODEL.hidden_size
    # The data set may have been built by another command, from another corpus.
    assert "max_sequence_length" in settings["data"] and not {"corpus", "held_out"} & set(settings["data"])

    (run / "summary.json").write_text(json.dumps(RECORDED))
    (run / "environment.json").write_text(json.dumps({"data": {"sequences": 5207, "packs": 2946}}))
    _, more, _ = card_of(tmp_path, run, "more")
    assert more == {
        **facts,
        "data set": "5,207 sequences in 2,946 rows",
        "sequences trained on": "1,234",
        "tokens trained on": "56,789",
        "packing factor": "1.767 sequences per pack",
        "held out: masked tokens, right": "13.8% (always the most frequent token: 4.6%)",
        "held out: masked tokens, loss": "5.432 (always the frequencies of the tokens: 6.100)",
        "held out: next sentence, right": "53.0%",
        "speed of training": "33.3 sequences/s",
        "comparison of the same updates": "40.2 sequences/s packed, 20.8 unpacked",
    }
    # Figures of another state of the run are not those of these weights.
    (run / "summary.json").write_text(json.dumps({**RECORDED, "held_out": {**RECORDED["held_out"], "step": 6}}))
    assert not any(name.startswith("held out") for name in card_of(tmp_path, run, "older")[1])
    (run / "summary.json").write_text(json.dumps({**RECORDED, "steps": 8}))
    assert card_of(tmp_path, run, "other")[1] == {**facts, "data set": "5,207 sequences in 2,946 rows"}


def test_a_card_is_titled_by_its_directory_and_states_the_positions_trained_on(tmp_path):
    run = a_run(tmp_path)
    card_of(tmp_path, run, "mine")
    assert "\n# mine\n" in (tmp_path / "mine" / "README.md").read_text()
    longest = json.loads((tmp_path / "mine" / "tokenizer_config.json").read_text())["model_max_length"]
    assert longest == MODEL.max_position_embeddings == 32


def test_a_model_of_shorter_rows_has_a_tokenizer_of_their_length(tmp_path):
    """Its embeddings of later positions were never trained; transformers needs their number in config.json."""
    _, facts, _ = card_of(tmp_path, a_run(tmp_path, slots=24))
    assert facts["positions"].startswith("0 to 23; 24 to 31 ")
    written = tmp_path / "hf"
    assert json.loads((written / "tokenizer_config.json").read_text())["model_max_length"] == 24
    assert json.loads((written / "config.json").read_text())["max_position_embeddings"] == 32


def test_the_dropout_of_a_classifier_is_read_used_and_kept(folder, tmp_path):
    changed(folder, classifier_dropout=0.25)
    model = read_folder(folder).model
    assert (model.classifier_dropout, model.head_dropout) == (0.25, 0.25)
    assert replace(model, classifier_dropout=None).head_dropout == MODEL.hidden_dropout
    import_folder(folder, tmp_path / "run")
    export_run(tmp_path / "run", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["classifier_dropout"] == 0.25
    changed(folder, classifier_dropout=1.0)
    with pytest.raises(ValueError, match="classifier_dropout"):
        read_folder(folder)


def test_no_card_is_overwritten_and_a_damaged_record_is_one_line(tmp_path, capsys):
    run, there = a_run(tmp_path), tmp_path / "hf" / "README.md"
    there.parent.mkdir()
    there.write_text("mine")
    assert run_main(main, [str(run), str(there.parent)]) == 2 and there.read_text() == "mine"
    (run / "summary.json").write_text(json.dumps({**RECORDED, "tokens": "many"}))
    assert run_main(main, [str(run), str(tmp_path / "new")]) == 2 and not (tmp_path / "new").exists()
    error = capsys.readouterr().err.splitlines()[-1]
    assert "summary.json: tokens is 'many'" in error and "remove it" in error


@pytest.fixture
def roberta_run(tmp_path):
    """A run on data made with a tokenizer.json that cuts, pads, and puts no special tokens around a text."""
    a_run(tmp_path, vocabulary=TokenizerFile(byte_level()))
    return tmp_path / "run"


def test_a_tokenizer_file_goes_out_as_the_packs_were_made_and_comes_back(tmp_path, roberta_run, monkeypatch):
    from tokenizers import Tokenizer

    assert export_run(roberta_run, tmp_path / "hf").step == 7
    given, written = TokenizerFile(byte_level()), Tokenizer.from_file(str(tmp_path / "hf" / "tokenizer.json"))
    text = "The packer packs packed packs."
    plain, (first, separator, _) = given.encode([text])[0].tolist(), given.special
    pair = written.encode(text, text)
    assert len(plain) > 4 and pair.ids == [first, *plain, separator, *plain, separator]
    assert pair.type_ids == [0] * (len(plain) + 2) + [1] * (len(plain) + 1)
    assert written.encode(text).ids == [first, *plain, separator]
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["pad_token_id"] == given.padding == 1
    import_folder(tmp_path / "hf", tmp_path / "again")
    again = read_folder(tmp_path / "hf").vocabulary
    assert (tmp_path / "again" / "tokenizer.json").read_bytes() == again.text
    # A file that says so already stays the same, bit for bit, so that weights and data know each other.
    assert export_run(tmp_path / "again", tmp_path / "hf2").note is None
    assert (tmp_path / "hf2" / "tokenizer.json").read_bytes() == again.text
    assert TokenizerFile(wordpiece()).as_packed() == wordpiece()


def test_transformers_fills_a_mask_with_a_tokenizer_file(tmp_path, roberta_run):
    transformers = pytest.importorskip("transformers", reason="the outside reference: pip install transformers")
    export_run(roberta_run, tmp_path / "hf")
    given = TokenizerFile(byte_level())
    encoded = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")("A packing of packs", "<mask>")
    first, separator, mask = given.special
    plain = given.encode(["A packing of packs"])[0].tolist()
    assert encoded["input_ids"] == [first, *plain, separator, mask, separator]
    assert encoded["token_type_ids"] == [0] * (len(plain) + 2) + [1] * 2
    answers = transformers.pipeline("fill-mask", model=str(tmp_path / "hf"))("The <mask> packs")
    assert len(answers) == 5 and all(0 < answer["score"] < 1 for answer in answers)


def test_a_run_on_a_tokenizer_file_is_fine_tuned_and_predicts(tmp_path, roberta_run, capsys):
    """The run's tokenizer cuts the texts of the task, and goes on into the exported model."""
    file = tiny_table(tmp_path / "train.csv", "single_label", texts=12)
    config = tiny_config(roberta_run, file, task="single_label", data={"max_sequence_length": 32}, run={"epochs": 1})
    (tmp_path / "tiny.yml").write_text(config.to_yaml())
    assert run_main(finetune.main, ["--config", str(tmp_path / "tiny.yml"), "--out", str(tmp_path / "tuned")]) == 0
    again = read_folder(tmp_path / "tuned" / "model").vocabulary
    expected = TokenizerFile(byte_level()).encode(["The packer packs"])[0].tolist()
    assert again.encode(["The packer packs"])[0].tolist() == expected
    assert run_main(main, [str(tmp_path / "tuned"), str(tmp_path / "hf")]) == 2
    assert f"a fine-tuning run; pass {tmp_path / 'tuned' / 'model'}" in capsys.readouterr().err
    answers = []
    for model in (tmp_path / "tuned", tmp_path / "tuned" / "model"):
        capsys.readouterr()
        assert run_main(predict.main, [str(model), str(file), "--set", "data.max_sequence_length=32"]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1] and answers[0].count("\n") == 12


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["missing", "out"], "missing: no such directory; pass the directory of a run"),
        (["run", "full"], "error: full: exists and is not an empty directory"),
        (["run", "out", "--vocabulary", "nowhere.txt"], "--vocabulary FILE"),
        (["--import", "full", "out"], "config.json: no such file"),
    ],
)
def test_mistakes_are_one_line(tmp_path, capsys, monkeypatch, arguments, says):
    a_run(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "something").write_text("")
    monkeypatch.chdir(tmp_path)
    assert run_main(main, arguments) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and message.count("\n") == 1 and says in message
    assert not (tmp_path / "out").exists()


def test_the_line_that_import_prints_runs_on_any_data_set_of_its_vocabulary(tmp_path, capsys, monkeypatch):
    """Slots, depth and predictions are the data set's; the sizes, the vocabulary's rows among them, the weights'."""
    limits = {"max_sequence_length": 48, "max_sequences_per_pack": 2}
    build_small(write_corpus(tmp_path / "text", 30), tmp_path / "sets", **limits).close()
    vocabulary = load_vocabulary(tmp_path / "sets" / "vocab.txt")
    model = replace(MODEL, vocabulary_size=len(vocabulary) + 3, max_position_embeddings=64)
    torch.manual_seed(3)
    weights = PackedBertForPreTraining(model, LossConfig()).state_dict()
    write_folder(tmp_path / "hf", model, weights, vocabulary, architecture="BertForPreTraining")
    monkeypatch.chdir(tmp_path)
    assert run_main(main, ["--import", "hf", "imported"]) == 0
    printed = next(line for line in capsys.readouterr().out.splitlines() if "--start-from" in line)
    words = shlex.split(printed.partition("to train it, use ")[2].replace("DATA", "sets"))
    arguments = words[words.index("--config") :]
    few = ["run.seed=1", "optimizer.learning_rate=1.0e-12"]
    arguments += [*(word for setting in few for word in ("--set", setting)), "--steps", "1", "--engine", "host"]
    assert run_main(pretrain.main, [*arguments, "--out", "run"]) == 0, capsys.readouterr().err
    ran = load_config(tmp_path / "run" / "config.yml")
    assert ran.batch.gradient_accumulation <= 16  # that of IPUs is thousands
    assert ran.model == model and ran.data.max_sequence_length == 48 and ran.data.max_sequences_per_pack == 2
    checkpoint = load_checkpoint(newest_checkpoint(tmp_path / "run" / "checkpoints"))
    for name, tensor in weights.items():
        assert torch.allclose(checkpoint.engine["model"][name], tensor, atol=1e-6), name


def test_imported_weights_are_begun_from_not_resumed(tmp_path, capsys, monkeypatch):
    a_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    export_run(tmp_path / "run", tmp_path / "hf")
    import_folder(tmp_path / "hf", tmp_path / "again")
    assert run_main(pretrain.main, ["--resume", "again", "--steps", "9"]) == 2
    message = capsys.readouterr().err
    assert "--start-from again" in message and message.count("\n") == 1


def test_an_exported_trained_vocabulary_cuts_words_as_the_build_does(tmp_path):
    """A word of more than 100 characters was [UNK] after the export, and words around U+200B were joined."""
    transformers = pytest.importorskip("transformers", reason="the outside reference: pip install transformers")
    trained = train_vocabulary([Document("", ["ab abab ba x y [SEP] " * 20])], 60)
    model = replace(MODEL, vocabulary_size=len(trained))
    write_folder(tmp_path, model, network(model=model).state_dict(), trained, architecture="BertForPreTraining")
    exported = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in ("ab" * 130 + " x\u200by", "x Y ab\u200b" + "ba" * 60, "ab q"):
        ids, _ = trained.encode([text])
        assert exported(text)["input_ids"] == [trained.ids["[CLS]"], *ids.tolist(), trained.ids["[SEP]"]]
    assert read_folder(tmp_path).vocabulary.tokens == trained.tokens
