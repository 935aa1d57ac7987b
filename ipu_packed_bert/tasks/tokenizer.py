"""Text to tokens with their places in the text: the `tokenizers` library, and a vocabulary of `pack_data.text`."""

from __future__ import annotations

import os
from typing import Any, Callable, List, NamedTuple, Sequence, Tuple

import numpy as np

from pack_data.text.vocabulary import AnyVocabulary, TokenizerFile


class Tokens(NamedTuple):
    """The tokens of one text."""

    ids: np.ndarray  # int32 [n]
    spans: np.ndarray  # int64 [n, 2]: first character, and the one after the last


class Tokenizer:
    """No special tokens are added. read: told of texts, as many as were cut into tokens since its last call."""

    def __init__(self, vocabulary: AnyVocabulary, *, read: Callable[[int], Any] = int):
        self._read = read
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        from tokenizers import BertWordPieceTokenizer

        self.vocabulary = vocabulary
        self.first, self.separator, _ = vocabulary.special
        if isinstance(vocabulary, TokenizerFile):
            self._tokenizer = vocabulary.tokenizer
        else:
            self._tokenizer = BertWordPieceTokenizer(dict(vocabulary.ids), lowercase=vocabulary.lower_case)

    def encode(self, texts: Sequence[str]) -> List[Tokens]:
        found: List[Tokens] = []
        for start in range(0, len(texts), 1024):  # what the library returns is large
            part = list(texts[start : start + 1024])
            for each in self._tokenizer.encode_batch(part, add_special_tokens=False):
                found.append(Tokens(np.array(each.ids, np.int32), np.array(each.offsets, np.int64).reshape(-1, 2)))
            self._read(len(part))
        return found

    def joined(self, parts: Sequence[np.ndarray]) -> Tuple[np.ndarray, np.ndarray]:
        """[CLS] first [SEP] second [SEP]: input ids and segment ids."""
        ids = [np.array([self.first], np.int32)]
        segments = [np.zeros(1, np.int32)]
        for number, part in enumerate(parts):
            ids += [part, np.array([self.separator], np.int32)]
            segments.append(np.full(len(part) + 1, number, np.int32))
        return np.concatenate(ids), np.concatenate(segments)
