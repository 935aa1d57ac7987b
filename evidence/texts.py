"""Prompts and answers for causal models: GSM8K and GPTeacher."""

from __future__ import annotations

import json
import lzma
from itertools import chain
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Tuple

import numpy as np

from pack_data.text.corpus import Document
from pack_data.text.vocabulary import train_vocabulary

_Examples = List[Dict[str, np.ndarray]]
_Texts = List[Tuple[str, str]]  # prompt and answer


class TextSet(NamedTuple):
    """A data set as text, in the order in which it is used."""

    name: str
    training: _Texts
    held_out: _Texts


def text_sets(data_dir: Path, training: int, held_out: int) -> List[TextSet]:
    """Read at most so many examples of each data set; raise ValueError if a file is missing."""
    parts = []
    for part, most in (("train", training), ("test", held_out)):
        pairs = []
        for line in _read(data_dir, f"gsm8k/{part}.jsonl.xz").splitlines():
            record = json.loads(line)
            pairs.append((record["question"], record["answer"]))
        parts.append(_shuffled(pairs)[:most])

    texts = []
    for part in ("roleplay", "codegen"):
        for record in json.loads(_read(data_dir, f"gpteacher/{part}.json.xz")):
            request = filter(None, (record["instruction"], record["input"]))
            texts.append(("\n".join(request), record["response"]))
    shuffled = _shuffled(texts)
    end = held_out + training
    gpteacher = TextSet("GPTeacher", shuffled[held_out:end], shuffled[:held_out])
    return [TextSet("GSM8K", *parts), gpteacher]


def _read(data_dir: Path, name: str) -> str:
    path = data_dir / name
    if not path.exists():
        raise ValueError(f"{path}: no such file; pass --data-dir DIR with gsm8k/ and gpteacher/")
    with lzma.open(path, "rt", encoding="utf-8") as file:
        return file.read()


def _shuffled(texts: _Texts) -> _Texts:
    order = np.random.default_rng(5).permutation(len(texts))
    return [texts[index] for index in order]


class TokenSet(NamedTuple):
    """A data set as examples for collators, without labels: every token but an example's first is predicted."""

    name: str
    training: _Examples
    held_out: _Examples
    vocabulary_size: int

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each training example."""
        return np.array([len(example["input_ids"]) for example in self.training])


def encode(data: TextSet, *, max_sequence_length: int, vocabulary_size: int) -> TokenSet:
    """Encode each example as [CLS] prompt [SEP] answer [SEP], cut to `max_sequence_length` tokens.

    The vocabulary of `vocabulary_size` is trained on the training texts.
    """
    document = Document(data.name, list(chain(*data.training)))
    vocabulary = train_vocabulary([document], vocabulary_size)
    encoded = []
    for texts in (data.training, data.held_out):
        examples = []
        for ids in _by_vocabulary(vocabulary, texts):
            examples.append({"input_ids": np.asarray(ids[:max_sequence_length], np.int64)})
        encoded.append(examples)
    training, held_out = encoded
    return TokenSet(data.name, training, held_out, len(vocabulary))


def _by_vocabulary(vocabulary: Any, texts: _Texts) -> List[List[int]]:
    first = vocabulary.ids["[CLS]"]
    end = vocabulary.ids["[SEP]"]
    ids, lengths = vocabulary.encode(list(chain(*texts)))
    ends = np.cumsum(lengths)
    pieces = iter(np.split(ids, ends[:-1]))
    examples = []
    for prompt, answer in zip(pieces, pieces):
        begin = [first]
        if len(prompt):
            begin += [*prompt, end]
        examples.append([*begin, *answer, end])
    return examples
