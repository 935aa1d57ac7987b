"""Hugging Face directories of BERT: config.json, model.safetensors, vocab.txt or tokenizer.json, and further files.

In this program a model has one form: names that begin with ``bert.`` or with a head, float32, no tensor twice. Reading
accepts the common forms: files of the encoder alone, without that prefix; with or without the tied decoder; with the
buffer ``position_ids`` of old versions; with the names ``gamma`` and ``beta`` of converted TensorFlow checkpoints.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Tuple, Union

import torch

from ipu_packed_bert.model.bert import BertModel
from ipu_packed_bert.run_files.safetensors_files import read_tensors
from ipu_packed_bert.settings.schema import ModelConfig
from pack_data.reading.declare import settings_in
from pack_data.reading.durable import check_new_folder, write_atomically
from pack_data.reading.fields import Fields, read_object, shown
from pack_data.reading.packages import load_package
from pack_data.text.vocabulary import (
    SPECIAL_TOKENS,
    AnyVocabulary,
    TokenizerFile,
    load_either,
    vocabulary_in,
)

Weights = Dict[str, torch.Tensor]

SAFETENSORS = "model.safetensors"
# Our name, Hugging Face's name, and the default of config.json.
_KEYS = (
    ("vocabulary_size", "vocab_size", 30522),
    ("hidden_size", "hidden_size", 768),
    ("num_layers", "num_hidden_layers", 12),
    ("num_heads", "num_attention_heads", 12),
    ("intermediate_size", "intermediate_size", 3072),
    ("max_position_embeddings", "max_position_embeddings", 512),
    ("type_vocabulary_size", "type_vocab_size", 2),
    ("hidden_dropout", "hidden_dropout_prob", 0.1),
    ("attention_dropout", "attention_probs_dropout_prob", 0.1),
    ("layer_norm_eps", "layer_norm_eps", 1e-12),
    ("initializer_range", "initializer_range", 0.02),
    ("classifier_dropout", "classifier_dropout", None),
)
# Keys of config.json with the only value that this network implements.
_FIXED = (
    ("model_type", "bert"),
    ("hidden_act", "gelu"),
    ("position_embedding_type", "absolute"),
    ("is_decoder", False),
    ("add_cross_attention", False),
)
_TABLE = "bert.embeddings.word_embeddings.weight"
_BIAS = "cls.predictions.bias"
_DECODER = (("cls.predictions.decoder.weight", _TABLE), ("cls.predictions.decoder.bias", _BIAS))


class _Pretrained(NamedTuple):
    """Content of a Hugging Face directory."""

    model: ModelConfig
    weights: Weights  # float32, by name; heads may be missing
    vocabulary: AnyVocabulary


class Loaded(NamedTuple):
    """Names that do not match when weights are loaded into a network."""

    fresh: Tuple[str, ...]  # parameters without weights, which keep their initial values
    unused: Tuple[str, ...]  # weights without a parameter


def read_folder(folder: Union[str, Path]) -> _Pretrained:
    """Read a Hugging Face directory.

    Raises:
        ValueError: a file is missing or damaged, or the network is not this BERT.
    """
    folder = Path(folder)
    model = _read_config(folder / "config.json")
    weights = _read_weights(folder, model)
    vocabulary = load_either(vocabulary_in(folder), _lower_case(folder))
    path = folder / "tokenizer.json"
    if path.exists():
        tokenizer = load_either(path)
        is_other = (tokenizer.special, tokenizer.pair) != (vocabulary.special, vocabulary.pair)
        if is_other or len(tokenizer) > len(vocabulary):
            raise ValueError(
                f"{path}: other special tokens or more tokens than in vocab.txt, which is read if both exist; "
                "remove vocab.txt"
            )
    return _Pretrained(model, weights, vocabulary)


def load_into(network: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> Loaded:
    """Copy weights into the parameters of the same names.

    Returns:
        The names that do not match.

    Raises:
        ValueError: a shape differs.
    """
    state, loaded = merged(network.state_dict(), weights)
    network.load_state_dict(state)
    return loaded


def merged(
    network: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor]
) -> Tuple[Weights, Loaded]:
    """Replace the weights of a network by new ones of the same names.

    Args:
        network: the weights of the network, by name.
        weights: the new weights, by name.

    Returns:
        All weights of the network, and the names that do not match.

    Raises:
        ValueError: a shape differs.
    """
    for name in sorted(set(network) & set(weights)):
        if network[name].shape != weights[name].shape:
            raise ValueError(
                f"weight {name} is {list(weights[name].shape)}, the network's is {list(network[name].shape)}; "
                "set the sizes of the network to those of the checkpoint"
            )
    fresh = sorted(set(network) - set(weights))
    unused = sorted(set(weights) - set(network))
    state = {name: weights.get(name, tensor) for name, tensor in network.items()}
    return state, Loaded(tuple(fresh), tuple(unused))


def write_folder(
    folder: Union[str, Path],
    model: ModelConfig,
    weights: Mapping[str, torch.Tensor],
    vocabulary: AnyVocabulary,
    *,
    architecture: str,
    trained_length: Optional[int] = None,
    **settings: Any,
) -> None:
    """Write a directory that ``transformers`` loads, without the tied decoder, like the files of Hugging Face.

    Args:
        folder: a directory that does not exist or is empty.
        model: sizes of the network.
        weights: the weights, by name.
        vocabulary: the vocabulary, to write as tokenizer files.
        architecture: class name in Hugging Face.
        trained_length: tokens of the longest rows trained on, which tokenizers truncate to; default: all positions.
        settings: further keys of config.json.

    Raises:
        ValueError: the directory is not empty, or a weight is missing that every BERT has.
    """
    save = load_package("safetensors.torch", "writing a Hugging Face folder").save
    folder = Path(folder)
    check_new_folder(folder)
    _check_encoder(weights, model, f"{folder}: not written")
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": [architecture],
        **dict(_FIXED),
        "pad_token_id": vocabulary.padding,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        **bert_settings(model),
        **settings,
    }
    longest = min(trained_length or model.max_position_embeddings, model.max_position_embeddings)
    _write_tokenizer(folder, longest, vocabulary)
    tensors = {}
    for name, tensor in weights.items():
        tensors[name] = tensor.detach().to("cpu", torch.float32).contiguous()
    write_atomically(folder / SAFETENSORS, save(tensors, metadata={"format": "pt"}))
    # Written last, so that an incomplete directory does not look like a model.
    write_atomically(folder / "config.json", _json(config))


def bert_settings(model: ModelConfig) -> Dict[str, Any]:
    """Return the sizes of a model by their names in config.json, which are those of transformers' BertConfig."""
    return {theirs: getattr(model, ours) for ours, theirs, _ in _KEYS}


def _json(values: Mapping[str, Any]) -> bytes:
    return (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode()


def _read_json(path: Path) -> Fields:
    way_out = "download or save it again: a Hugging Face directory has config.json, vocab.txt or tokenizer.json, and "
    return read_object(path, way_out=way_out + SAFETENSORS)


def _read_config(path: Path) -> ModelConfig:
    """Read the sizes of a network; raise ValueError if it is not this BERT."""
    fields = _read_json(path)
    for key, only in _FIXED:
        if key in fields and fields.any(key) != only:
            raise ValueError(
                f"{path}: {key} is {shown(fields.any(key))}; this network supports {only!r} only"
            )

    values: Dict[str, Any] = {}
    settings = settings_in(ModelConfig)
    for ours, theirs, default in _KEYS:
        values[ours] = default
        if theirs in fields and (default is not None or fields.any(theirs) is not None):
            try:
                values[ours] = settings[ours].checked(fields.any(theirs))
            except ValueError as wrong:
                raise fields.error(theirs, str(wrong)) from None
    if values["hidden_size"] % values["num_heads"]:
        raise ValueError(
            f"{path}: hidden_size is {values['hidden_size']}; must be a multiple of num_attention_heads, "
            f"{values['num_heads']}"
        )
    return ModelConfig(**values)


def _lower_case(folder: Path) -> bool:
    path = folder / "tokenizer_config.json"
    if not path.exists():
        return True
    return _read_json(path).optional("do_lower_case", Fields.boolean) is not False


def _read_weights(folder: Path, model: ModelConfig) -> Weights:
    path = folder / SAFETENSORS
    if not path.exists():
        raise ValueError(
            f"{folder}: no {SAFETENSORS}; pytorch_model.bin, which could execute code, and weights in several files "
            "are not read: load the model with transformers and save it with save_pretrained"
        )
    weights = _canonical(read_tensors(path), str(path))
    _check_encoder(weights, model, str(path))
    return weights


def _canonical(stored: Mapping[str, torch.Tensor], where: str) -> Weights:
    """Rename weights to the form of this program; raise ValueError for a decoder that is not tied."""
    weights: Weights = {}
    headless = not any(name.startswith("bert.") for name in stored)
    for name, tensor in stored.items():
        if name.endswith("embeddings.position_ids"):
            continue
        name = name.replace("LayerNorm.gamma", "LayerNorm.weight")
        name = name.replace("LayerNorm.beta", "LayerNorm.bias")
        if headless and name.split(".")[0] in ("embeddings", "encoder", "pooler"):
            name = "bert." + name
        weights[name] = tensor.to(torch.float32)
    for name, tied in _DECODER:
        if name not in weights:
            continue
        tensor = weights.pop(name)
        if tied == _BIAS:
            weights.setdefault(_BIAS, tensor)
        if tied in weights and not torch.equal(weights[tied], tensor):
            raise ValueError(
                f"{where}: {name} differs from {tied}; pass a model that uses one tensor for both, as this network does"
            )
    return weights


def _check_encoder(weights: Mapping[str, torch.Tensor], model: ModelConfig, where: str) -> None:
    """Raise ValueError if weights of the encoder are missing; pooler and heads may be missing."""
    matches = (re.match(r"bert\.encoder\.layer\.(\d{1,9})\.", name) for name in weights)
    layers = max((int(match.group(1)) + 1 for match in matches if match), default=0)
    # Checked first, because building a network of a million layers takes an hour.
    if model.num_layers != layers:
        raise ValueError(
            f"{where}: bert.encoder.layer has {layers} layers, its configuration {model.num_layers}; weights and "
            "configuration must be of one BERT"
        )
    with torch.device("meta"):  # shapes without memory
        expected = BertModel(model, attention="eager", pooler=False).state_dict()
    wrong: List[str] = []
    for name, tensor in expected.items():
        name = "bert." + name
        shape = list(weights[name].shape) if name in weights else "missing"
        if shape != list(tensor.shape):
            wrong.append(f"{name} is {shape}, its configuration has {list(tensor.shape)}")
    if wrong:
        rest = len(wrong) - 1
        more = f" (and {rest} more)" if rest else ""
        raise ValueError(
            f"{where}: {wrong[0]}{more}; weights and configuration must be of one BERT"
        )


def _write_tokenizer(folder: Path, longest: int, vocabulary: AnyVocabulary) -> None:
    """Write the files of a tokenizer of at most ``longest`` tokens."""
    kinds = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    settings: Dict[str, Any] = {"model_max_length": longest}
    if isinstance(vocabulary, TokenizerFile):
        numbers = (vocabulary.padding, vocabulary.unknown, *vocabulary.special)
        special = {}
        for kind, number in zip(kinds, numbers):
            if number is not None:
                special[kind] = vocabulary.names[number]
    else:
        special = dict(zip(kinds, SPECIAL_TOKENS))
        settings.update(
            tokenizer_class="BertTokenizer", do_lower_case=vocabulary.lower_case, strip_accents=None
        )
        settings.update(tokenize_chinese_chars=True)
        write_atomically(folder / vocabulary.file, vocabulary.text)
    if isinstance(vocabulary, TokenizerFile) or vocabulary.cuts_long_words:
        # Transformers' BertTokenizer ignores how the file cuts words.
        names = ["input_ids", "token_type_ids", "attention_mask"]
        # Stated, because the default differs between versions of the library.
        settings.update(tokenizer_class="PreTrainedTokenizerFast", model_input_names=names)
    tokenizer = vocabulary.as_packed()
    write_atomically(folder / "tokenizer.json", tokenizer)
    write_atomically(folder / "special_tokens_map.json", _json(special))
    write_atomically(folder / "tokenizer_config.json", _json({**settings, **special}))
