"""Folders of Hugging Face's BERT: config.json, model.safetensors, vocab.txt or tokenizer.json, and the other files of a
tokenizer.

Inside, a model has one form: names that begin with ``bert.`` or name a head, float32, and no tensor twice.  Reading
accepts the forms in circulation: files of the encoder alone, without that prefix; the tied decoder written out, or not;
the buffer ``position_ids`` of old versions; the names ``gamma`` and ``beta`` of converted TensorFlow checkpoints.
"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any, Dict, List, Mapping, NamedTuple, Tuple, Union

import torch

from ipu_packed_bert.model.bert import BertModel
from ipu_packed_bert.run_files.safetensors_files import read_tensors
from ipu_packed_bert.settings.schema import ModelConfig
from pack_data.reading.fields import Fields, read_object, shown
from pack_data.reading.files import write_atomically
from pack_data.reading.packages import load_package
from pack_data.text.vocabulary import SPECIAL_TOKENS, AnyVocabulary, TokenizerFile, load_either, vocabulary_in

Weights = Dict[str, torch.Tensor]

SAFETENSORS = "model.safetensors"
# Our names, theirs, and the value that a config.json which leaves the key out means.
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
)
# What this network computes in one way only: another value means another network.
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
    """What a folder holds."""

    model: ModelConfig
    weights: Weights  # float32, by name; heads may be absent
    vocabulary: AnyVocabulary


class Loaded(NamedTuple):
    """What came of loading weights into a network."""

    fresh: Tuple[str, ...]  # parameters that the weights don't have: as they were initialised
    unused: Tuple[str, ...]  # weights that the network doesn't have


def read_folder(folder: Union[str, Path]) -> _Pretrained:
    """Read a folder; ValueError in one line if a file is missing or damaged, or the network is not this BERT."""
    folder = Path(folder)
    model = _read_config(folder / "config.json")
    weights, path = _read_weights(folder, model), folder / "tokenizer.json"
    vocabulary = load_either(vocabulary_in(folder), _lower_case(folder))
    if path.exists() and len(load_either(path)) > len(vocabulary):
        raise ValueError(
            f"{path}: has more tokens than vocab.txt, which is read where both are there; remove vocab.txt"
        )
    return _Pretrained(model, weights, vocabulary)


def load_into(network: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> Loaded:
    """Copy the weights that the network has by name; ValueError where a shape differs."""
    found, loaded = merged(network.state_dict(), weights)
    network.load_state_dict(found)
    return loaded


def merged(own: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor]) -> Tuple[Weights, Loaded]:
    """A network's own weights, those that have the same name replaced; ValueError where a shape differs."""
    for name in sorted(set(own) & set(weights)):
        if own[name].shape != weights[name].shape:
            raise ValueError(
                f"weight {name} is {list(weights[name].shape)}, the network's is {list(own[name].shape)}; "
                "give the network the sizes of the checkpoint"
            )
    return {name: weights.get(name, tensor) for name, tensor in own.items()}, Loaded(
        tuple(sorted(set(own) - set(weights))), tuple(sorted(set(weights) - set(own)))
    )


def write_folder(
    folder: Union[str, Path],
    model: ModelConfig,
    weights: Mapping[str, torch.Tensor],
    vocabulary: AnyVocabulary,
    *,
    architecture: str,
    **settings: Any,
) -> None:
    """Write what ``transformers`` loads as ``architecture``; ``settings`` are further keys of config.json.

    The tied decoder is left out, as Hugging Face's own safetensors files do.  Raises ValueError if the folder holds
    anything already, or a weight is missing that every BERT has.
    """
    save = load_package("safetensors.torch", "writing a Hugging Face folder").save
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder}: exists and is not an empty folder; give another one")
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
    _write_tokenizer(folder, model, vocabulary)
    tensors = {name: tensor.detach().to("cpu", torch.float32).contiguous() for name, tensor in weights.items()}
    write_atomically(folder / SAFETENSORS, save(tensors, metadata={"format": "pt"}))
    # Last, so that a folder whose writing was cut short doesn't look like a model.
    write_atomically(folder / "config.json", _json(config))


def bert_settings(model: ModelConfig) -> Dict[str, Any]:
    """The sizes of a model by their names in config.json, which are those of transformers' BertConfig."""
    return {theirs: getattr(model, ours) for ours, theirs, _ in _KEYS}


def _json(values: Mapping[str, Any]) -> bytes:
    return (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode()


def _read_json(path: Path) -> Fields:
    if not path.exists():
        raise ValueError(
            f"{path}: no such file; a Hugging Face folder has config.json, vocab.txt or tokenizer.json, and "
            f"{SAFETENSORS}"
        )
    return read_object(path, way_out="get the file again")


def _read_config(path: Path) -> ModelConfig:
    found = _read_json(path)
    for key, only in _FIXED:
        if key in found and found.any(key) != only:
            raise ValueError(f"{path}: {key} is {shown(found.any(key))}; this network has {only!r} only")
    values: Dict[str, Any] = {}
    # Beyond every network there is: a number that a program cannot even begin with is told from a large one.
    largest = {each.name: each.metadata["rule"].maximum for each in dataclasses.fields(ModelConfig)}
    for ours, theirs, default in _KEYS:
        if theirs not in found:
            values[ours] = default
        elif isinstance(default, int):
            values[ours] = found.integer(theirs, least=1, most=largest[ours])
        else:
            values[ours] = found.number(theirs, least=0.0, most=1.0)
            if values[ours] == (1.0 if ours.endswith("dropout") else 0.0):
                raise found.error(theirs, "is of no network that can be trained")
    if values["hidden_size"] % values["num_heads"]:
        raise ValueError(
            f"{path}: hidden_size is {values['hidden_size']}; must be a multiple of num_attention_heads, "
            f"{values['num_heads']}"
        )
    return ModelConfig(**values)


def _lower_case(folder: Path) -> bool:
    path = folder / "tokenizer_config.json"
    return not path.exists() or _read_json(path).optional("do_lower_case", Fields.boolean) is not False


def _read_weights(folder: Path, model: ModelConfig) -> Weights:
    path = folder / SAFETENSORS
    if not path.exists():
        raise ValueError(
            f"{folder}: holds no {SAFETENSORS}; pytorch_model.bin, which could run code, and weights in several files "
            "are not read: load the model with transformers, and save_pretrained writes one"
        )
    weights = _canonical(read_tensors(path), str(path))
    _check_encoder(weights, model, str(path))
    return weights


def _canonical(found: Mapping[str, torch.Tensor], where: str) -> Weights:
    """Weights under any of the names in circulation -> the one form; ValueError for a decoder that isn't tied."""
    weights: Weights = {}
    headless = not any(name.startswith("bert.") for name in found)
    for name, tensor in found.items():
        if name.endswith("embeddings.position_ids"):
            continue
        name = name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
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
            raise ValueError(f"{where}: {name} differs from {tied}; this network has one tensor for both")
    return weights


def _check_encoder(weights: Mapping[str, torch.Tensor], model: ModelConfig, where: str) -> None:
    """Every BERT has these; only the pooler and the heads may be absent."""
    found = (re.match(r"bert\.encoder\.layer\.(\d{1,9})\.", name) for name in weights)
    layers = max((int(each.group(1)) + 1 for each in found if each), default=0)
    if model.num_layers > layers:  # asked first: to build a network of a million layers takes an hour
        raise ValueError(
            f"{where}: bert.encoder.layer.{layers} is missing, its configuration has {model.num_layers} layers; "
            "weights and configuration must be of one BERT"
        )
    with torch.device("meta"):  # shapes without memory
        expected = BertModel(model, attention="eager", pooler=False).state_dict()
    wrong: List[str] = []
    for name, tensor in expected.items():
        name = "bert." + name
        if name not in weights:
            wrong.append(f"{name} is missing")
        elif weights[name].shape != tensor.shape:
            wrong.append(f"{name} is {list(weights[name].shape)}, by its configuration {list(tensor.shape)}")
    if layers > model.num_layers:
        wrong.append(f"layer {layers - 1} is there, its configuration has {model.num_layers}")
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise ValueError(f"{where}: {wrong[0]}{more}; weights and configuration must be of one BERT")


def _write_tokenizer(folder: Path, model: ModelConfig, vocabulary: AnyVocabulary) -> None:
    from tokenizers import BertWordPieceTokenizer

    kinds = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    settings: Dict[str, Any] = {"model_max_length": model.max_position_embeddings}
    if isinstance(vocabulary, TokenizerFile):
        numbers = (vocabulary.padding, vocabulary.unknown, *vocabulary.special)
        special = {kind: vocabulary.names[number] for kind, number in zip(kinds, numbers) if number is not None}
        # Which names a tokenizer gives to its model unless told so has changed between the library's versions.
        names = ["input_ids", "token_type_ids", "attention_mask"]
        settings.update(tokenizer_class="PreTrainedTokenizerFast", model_input_names=names)
        tokenizer = vocabulary.as_packed()
    else:
        special = dict(zip(kinds, SPECIAL_TOKENS))
        settings.update(tokenizer_class="BertTokenizer", do_lower_case=vocabulary.lower_case, strip_accents=None)
        settings.update(tokenize_chinese_chars=True)
        pieces = BertWordPieceTokenizer(dict(vocabulary.ids), lowercase=vocabulary.lower_case)
        tokenizer = pieces.to_str(pretty=True).encode()
        write_atomically(folder / vocabulary.file, vocabulary.text)
    write_atomically(folder / "tokenizer.json", tokenizer)
    write_atomically(folder / "special_tokens_map.json", _json(special))
    write_atomically(folder / "tokenizer_config.json", _json({**settings, **special}))
