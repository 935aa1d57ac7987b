"""Hugging Face folders: every form in circulation reads as the same weights; what is written reads back; bad ones in
one line."""

import json
import os
import shlex
import shutil
from dataclasses import replace

import pytest
import torch
import yaml

from ipu_packed_bert import __main__ as packed_bert
from ipu_packed_bert.commands import pretrain
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
from tests.pack_data.text.tokenizer_files import byte_level, wordpiece
from tests.pack_data.text_corpus import build_small, write_corpus
from tests.refusals import faults_of_refusals
from tests.tiny_runs import TINY

VOCABULARY = Vocabulary(SPECIAL_TOKENS + ("a", "b", "##b", "c", "hello", "world", "!"))
MODEL = replace(TINY, vocabulary_size=20, intermediate_size=24, max_position_embeddings=32, layer_norm_eps=1e-12)
TABLE = "bert.embeddings.word_embeddings.weight"
BIAS = "cls.predictions.bias"


def network(next_sentence=True, model=MODEL):
    torch.manual_seed(3)
    built = PackedBertForPreTraining(model, LossConfig(next_sentence=next_sentence))
    for parameter in built.parameters():  # no zero or one is left that a wrong tensor could equal
        torch.nn.init.normal_(parameter, std=0.3)
    return built


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
    actual = read_folder(folder)
    assert actual.model == MODEL
    assert actual.vocabulary.tokens == VOCABULARY.tokens
    assert actual.vocabulary.lower_case
    same(actual.weights, network().state_dict())


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
    actual = read_folder(folder).weights
    same(actual, weights)
    loaded = load_into(PackedBertForPreTraining(MODEL, LossConfig()), actual)
    assert loaded.unused == ()
    assert len(loaded.fresh) == 7
    assert all(name.startswith("cls.") for name in loaded.fresh)


def changed(folder, **settings):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


# (call, names in the message)
REFUSED = [
    ("read(without='config.json')", ["config.json", "no such file"]),
    ("read(config='{')", ["config.json", "not JSON"]),
    ("read(config='[' * 100_000)", ["config.json", "nested too deeply"]),
    ("read(model_type='roberta')", ["model_type", "'roberta'"]),
    ("read(hidden_act='gelu_new')", ["hidden_act", "'gelu_new'"]),
    ("read(hidden_size='16')", ["hidden_size", "'16'", "whole number"]),
    ("read(hidden_size=10**400)", ["config.json", "a number of 401 digits"]),
    ("read(num_hidden_layers=10**9)", ["num_hidden_layers", "1000000000"]),
    ("read(num_hidden_layers=4000)", ["2 layers", "4000"]),
    ("read(num_hidden_layers=1)", ["2 layers", "configuration 1"]),
    ("read(hidden_dropout_prob=1.0)", ["hidden_dropout_prob", "1.0"]),
    ("read(classifier_dropout=1.0)", ["classifier_dropout", "1.0"]),
    ("read(num_attention_heads=3)", ["num_attention_heads", "multiple"]),
    ("read(intermediate_size=25)", ["[24, 16]", "[25, 16]"]),
    *[(f"read(pipe='{name}')", [name, "a pipe"]) for name in ("config.json", "model.safetensors", "vocab.txt")],
    ("read(without='vocab.txt tokenizer.json')", ["vocab.txt", "no such file"]),
    ("read(vocabulary=VOCABULARY.text[:-5])", ["vocab.txt", "more tokens"]),
    ("read(without='model.safetensors')", ["no model.safetensors"]),
    ("read(weights=b'no')", ["model.safetensors", "cannot be read"]),
    ("read(decoder=torch.zeros(20, 16))", ["decoder.weight", TABLE]),
    ("load_into(network(), {TABLE: torch.zeros(21, 16)})", [r"\[21, 16\]", r"\[20, 16\]"]),
]


def test_what_cannot_be_read_is_one_line(folder, tmp_path):
    def read(without="", pipe="", config=None, vocabulary=None, weights=None, decoder=None, **settings):
        """Read a copy of the directory with these changes."""
        copy = shutil.copytree(folder, tmp_path / "copy")
        changed(copy, **settings)
        contents = {"config.json": config and config.encode(), "vocab.txt": vocabulary, "model.safetensors": weights}
        for name, content in contents.items():
            if content is not None:
                (copy / name).write_bytes(content)
        if decoder is not None:
            with_weights(copy, {**network().state_dict(), "cls.predictions.decoder.weight": decoder})
        for name in [*without.split(), *pipe.split()]:
            (copy / name).unlink()
        if pipe:
            os.mkfifo(copy / pipe)
        try:
            read_folder(copy)
        finally:
            shutil.rmtree(copy)

    names = {"read": read, "load_into": load_into, "network": network, "torch": torch}
    faults = faults_of_refusals(REFUSED, {**names, "TABLE": TABLE, "VOCABULARY": VOCABULARY})
    assert not faults, "\n".join(faults)


def a_run(tmp_path, next_sentence=True, vocabulary=VOCABULARY, slots=32):
    """A run folder with one checkpoint; its vocabulary lies beside its data."""
    data = tmp_path / "data"
    data.mkdir()
    (data / vocabulary.file).write_bytes(vocabulary.text)
    sizes = replace(MODEL, vocabulary_size=max(MODEL.vocabulary_size, len(vocabulary)))
    tree = {
        "data": {"directory": str(data), "vocabulary_size": 128, "max_sequence_length": slots},
        "model": vars(sizes),
        "loss": {"next_sentence": next_sentence},
        "placement": {"layers_per_ipu": [2]},
    }
    tree["data"]["max_predictions_per_sequence"] = 5
    config = config_from_tree(tree, "tiny.yml")
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
    assert set(loaded.fresh) == fresh
    assert len(fresh) == (0 if next_sentence else 4)
    assert load_config(tmp_path / "again" / "config.yml").model == MODEL


def test_transformers_scores_the_same(tmp_path):
    transformers = pytest.importorskip("transformers", reason="the outside reference: pip install transformers")
    run = a_run(tmp_path)
    export_run(run, tmp_path / "hf")
    theirs, notes = transformers.BertForPreTraining.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not notes["missing_keys"]
    assert not notes["unexpected_keys"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    encoded = tokenizer("Hello wOrld!", "ab c", return_tensors="pt")
    ids = [VOCABULARY.ids[token] for token in ("[CLS]", "hello", "world", "!", "[SEP]", "a", "##b", "c", "[SEP]")]
    assert encoded["input_ids"].tolist() == [ids]
    assert encoded["token_type_ids"].tolist() == [[0] * 5 + [1] * 4]

    slots = torch.arange(len(ids)).view(1, -1)
    with torch.no_grad():
        expected = theirs.eval()(**encoded)
        fields = (encoded["input_ids"], torch.ones_like(slots), encoded["token_type_ids"], slots, slots, slots[:, :1])
        actual = network().eval().logits(*fields)
    assert torch.allclose(actual.mlm_BPV, expected.prediction_logits, rtol=1e-5, atol=1e-5)
    assert torch.allclose(actual.nsp_BD2[:, 0], expected.seq_relationship_logits, rtol=1e-5, atol=1e-5)
    assert float(expected.prediction_logits.std()) > 0.1


def test_the_way_from_transformers(tmp_path):
    """Weights saved by transformers are read unchanged."""
    transformers = pytest.importorskip("transformers", reason="the outside reference: pip install transformers")
    run = a_run(tmp_path)
    export_run(run, tmp_path / "hf")
    transformers.BertForPreTraining.from_pretrained(tmp_path / "hf").save_pretrained(tmp_path / "theirs")
    (tmp_path / "theirs" / "vocab.txt").write_bytes(VOCABULARY.text)
    actual = read_folder(tmp_path / "theirs")
    assert actual.model == MODEL
    same(actual.weights, network().state_dict())


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
    assert front["library_name"] == "transformers"
    assert front["pipeline_tag"] == "fill-mask"
    assert "license" not in front
    assert "language" not in front
    assert facts == {"row": "32 slots, packed by `optimal`", "updates": "7"}
    assert config_from_tree(settings, "card").model.hidden_size == MODEL.hidden_size
    # The data set may have been built by another command, from another corpus.
    assert "max_sequence_length" in settings["data"]
    assert not {"corpus", "held_out"} & set(settings["data"])

    (run / "summary.json").write_text(json.dumps(RECORDED))
    (run / "environment.json").write_text(json.dumps({"data": {"sequences": 5207, "packs": 2946}}))
    _, more, _ = card_of(tmp_path, run, "more")
    assert more.items() > facts.items()
    assert len(more) == 11
    assert "13.8%" in more["held out: masked tokens, right"]
    assert "33.3" in more["speed of training"]
    # Figures of another state of the run are not those of these weights.
    (run / "summary.json").write_text(json.dumps({**RECORDED, "steps": 8}))
    assert card_of(tmp_path, run, "other")[1] == {**facts, "data set": "5,207 sequences in 2,946 rows"}


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


@pytest.fixture
def roberta_run(tmp_path):
    """A run on data made with a tokenizer.json that cuts, pads, and puts no special tokens around a text."""
    a_run(tmp_path, vocabulary=TokenizerFile(byte_level()))
    return tmp_path / "run"


def test_a_tokenizer_file_goes_out_as_the_packs_were_made_and_comes_back(tmp_path, roberta_run, monkeypatch):
    from tokenizers import Tokenizer

    assert export_run(roberta_run, tmp_path / "hf").step == 7
    tokenizer_file = TokenizerFile(byte_level())
    written = Tokenizer.from_file(str(tmp_path / "hf" / "tokenizer.json"))
    text = "The packer packs packed packs."
    plain, (first, separator, _) = tokenizer_file.encode([text])[0].tolist(), tokenizer_file.special
    pair = written.encode(text, text)
    assert len(plain) > 4
    assert pair.ids == [first, *plain, separator, *plain, separator]
    assert pair.type_ids == [0] * (len(plain) + 2) + [1] * (len(plain) + 1)
    assert written.encode(text).ids == [first, *plain, separator]
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["pad_token_id"] == tokenizer_file.padding == 1
    import_folder(tmp_path / "hf", tmp_path / "again")
    again = read_folder(tmp_path / "hf").vocabulary
    assert (tmp_path / "again" / "tokenizer.json").read_bytes() == again.text
    # A file that says so already stays the same, bit for bit, so that weights and data know each other.
    assert export_run(tmp_path / "again", tmp_path / "hf2").note is None
    assert (tmp_path / "hf2" / "tokenizer.json").read_bytes() == again.text
    assert TokenizerFile(wordpiece()).as_packed() == wordpiece()


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
    assert ran.model == model
    assert ran.data.max_sequence_length == 48
    assert ran.data.max_sequences_per_pack == 2
    checkpoint = load_checkpoint(newest_checkpoint(tmp_path / "run" / "checkpoints"))
    for name, tensor in weights.items():
        assert torch.allclose(checkpoint.engine["model"][name], tensor, atol=1e-6), name


def test_imported_weights_are_begun_from_not_resumed(tmp_path, capsys, monkeypatch):
    a_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    export_run(tmp_path / "run", tmp_path / "hf")
    import_folder(tmp_path / "hf", tmp_path / "again")
    assert run_main(packed_bert.main, ["pretrain", "--resume", "again", "--steps", "9"]) == 2
    message = capsys.readouterr().err
    assert "--start-from again" in message
    assert message.count("\n") == 1


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
