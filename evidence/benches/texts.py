"""Prompts and answers for causal models: GSM8K and GPTeacher, or lines of the embedded corpus."""

from __future__ import annotations

import json
import lzma
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import numpy as np

from pack_data.text.corpus import Document, documents
from pack_data.text.vocabulary import train_vocabulary

_Examples = List[Dict[str, np.ndarray]]
_Texts = List[Tuple[str, str]]  # prompt and answer


class TextSet(NamedTuple):
    """A data set as text, in the order in which it is used."""

    name: str
    training: _Texts
    held_out: _Texts


def text_sets(data_dir: Optional[Path], training: int, held_out: int) -> List[TextSet]:
    """Read at most so many examples of each data set; raise ValueError if a file is missing."""
    if data_dir is None:
        lines: _Texts = []
        for document in documents("embedded"):
            lines += [("", line) for line in document.lines if len(line) > 40]
        return [_split("embedded", lines, training, held_out)]

    parts = []
    for part, most in (("train", training), ("test", held_out)):
        records = _read(data_dir, f"gsm8k/{part}.jsonl.xz").splitlines()
        pairs = []
        for record in map(json.loads, records):
            pairs.append((record["question"], record["answer"]))
        shuffled = _shuffled(pairs)
        parts.append(shuffled[:most])

    texts = []
    for part in ("roleplay", "codegen"):
        text = _read(data_dir, f"gpteacher/{part}.json.xz")
        for record in json.loads(text):
            request = filter(None, (record["instruction"], record["input"]))
            prompt = "\n".join(request)
            texts.append((prompt, record["response"]))
    return [TextSet("GSM8K", *parts), _split("GPTeacher", texts, training, held_out)]


def _read(data_dir: Path, name: str) -> str:
    path = data_dir / name
    if not path.exists():
        raise ValueError(
            f"{path}: no such file; pass --data-dir DIR with gsm8k/ and gpteacher/, or no --data-dir for the embedded "
            "corpus"
        )
    with lzma.open(path, "rt", encoding="utf-8") as file:
        return file.read()


def _shuffled(texts: _Texts) -> _Texts:
    order = np.random.default_rng(5).permutation(len(texts))
    return [texts[index] for index in order]


def _split(name: str, texts: _Texts, training: int, held_out: int) -> TextSet:
    """Shuffle the texts and divide them: held-out ones first."""
    shuffled = _shuffled(texts)
    end = held_out + training
    return TextSet(name, shuffled[held_out:end], shuffled[:held_out])


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


def encode(
    data: TextSet, *, max_sequence_length: int, vocabulary_size: int, model: Optional[str] = None
) -> TokenSet:
    """Encode each example, cut to `max_sequence_length` tokens.

    model: a Hugging Face directory, whose tokenizer is used.  Without one, an example is [CLS] prompt [SEP] answer
    [SEP], in a vocabulary of `vocabulary_size` that is trained on the training texts.
    """
    if model:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model)
        size = len(tokenizer)
        parts = [_by_tokenizer(tokenizer, texts) for texts in (data.training, data.held_out)]
    else:
        document = Document(data.name, list(chain(*data.training)))
        vocabulary = train_vocabulary([document], vocabulary_size)
        size = len(vocabulary)
        parts = [_by_vocabulary(vocabulary, texts) for texts in (data.training, data.held_out)]
    training, held_out = map(partial(_examples, max_sequence_length), parts)
    return TokenSet(data.name, training, held_out, size)


def _examples(most: int, part: List[List[int]]) -> _Examples:
    return [{"input_ids": np.asarray(ids[:most], np.int64)} for ids in part]


def _by_tokenizer(tokenizer: Any, texts: _Texts) -> List[List[int]]:
    end = [tokenizer.eos_token_id]
    return [tokenizer(f"{prompt}\n{answer}")["input_ids"] + end for prompt, answer in texts]


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
