"""A tokenizer.json of the `tokenizers` library in place of a WordPiece vocabulary.

The special tokens are the file's own: those of BERT ([CLS], [SEP], [MASK]) or those of RoBERTa (<s>, </s>, <mask>).
"""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Dict, Optional, Union

import numpy as np

from pack_data.reading.fields import Fields, one_line, parse_json
from pack_data.reading.files import read_regular
from pack_data.text.wordpiece import VOCABULARY, Encoder, Special, Vocabulary, load_vocabulary

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER = "tokenizer.json"  # its name in a data set
_MOST_BYTES = 1 << 28
_SPECIAL = (("[CLS]", "[SEP]", "[MASK]"), ("<s>", "</s>", "<mask>"))  # first, separator, mask


class TokenizerFile(Encoder):
    """Text to token ids as a tokenizer.json says; known by the sha256 of the file.

    ValueError where the file is none, or has no special tokens for the first place, between segments and for a mask.
    """

    file, lower_case = TOKENIZER, None  # the file says itself what becomes of capitals

    def __init__(self, content: bytes, name: str = TOKENIZER) -> None:
        # A build works in several processes; the library's threads would compete with them (and warn after a fork).
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        from tokenizers import Tokenizer

        way_out = "give the tokenizer.json that save_pretrained or the tokenizers library wrote"
        self._fields = Fields.of(parse_json(content, name, way_out), name, way_out)
        try:
            self.tokenizer: Tokenizer = Tokenizer.from_str(content.decode())
        except Exception as error:  # the library raises nothing more special
            raise ValueError(f"{name}: no tokenizer ({one_line(error)}); {way_out}") from None
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.text, self._name, self._tokenizer = content, name, self.tokenizer
        self._numbers = self.tokenizer.get_vocab(with_added_tokens=True)
        self.special = self._special_tokens()

    def _special_tokens(self) -> Special:
        for tokens in _SPECIAL:
            if all(token in self._numbers for token in tokens):
                return Special(*(self._numbers[token] for token in tokens))
        wanted = " or ".join(" ".join(tokens) for tokens in _SPECIAL)
        raise ValueError(
            f"{self._name}: has no special tokens for the beginning, the separator and the mask ({wanted}); add them "
            "to the tokenizer, or take one of a masked language model"
        )

    def __len__(self) -> int:
        """Ids are below this."""
        return max(self._numbers.values()) + 1

    @cached_property
    def names(self) -> Dict[int, str]:
        """Tokens by id, added ones too."""
        return {number: token for token, number in self._numbers.items()}

    @cached_property
    def padding(self) -> Optional[int]:
        """The token that stands for padding, where there is one."""
        return next((self._numbers[token] for token in ("[PAD]", "<pad>") if token in self._numbers), None)

    @cached_property
    def unknown(self) -> Optional[int]:
        """The token of what the others cannot spell, where there is one."""
        model = self._fields.object("model").tree
        found: Optional[int] = model.get("unk_id")
        return self._numbers.get(model.get("unk_token") or "") if found is None else found

    def as_packed(self) -> bytes:
        """The file with the special tokens around its text that packs are made with: first A separator B separator.

        The content as it is where the file says so already, and neither cuts nor pads.
        """
        from tokenizers import Tokenizer
        from tokenizers.processors import TemplateProcessing

        # One of its own: truncation and padding are as the file has them.
        tokenizer, (first, separator, _) = Tokenizer.from_str(self.text.decode()), self.special
        parts = [tokenizer.encode(text, add_special_tokens=False).ids for text in ("a", "b")]
        wanted = [first, *parts[0], separator], [*parts[1], separator]
        single, pair = tokenizer.encode("a"), tokenizer.encode("a", "b")
        if (
            (tokenizer.truncation, tokenizer.padding) == (None, None)
            and (single.ids, single.type_ids) == (wanted[0], [0] * len(wanted[0]))
            and (pair.ids, pair.type_ids) == (sum(wanted, []), [0] * len(wanted[0]) + [1] * len(wanted[1]))
        ):
            return self.text
        tokenizer.no_truncation()
        tokenizer.no_padding()
        begin, end = self.names[first], self.names[separator]
        tokenizer.post_processor = TemplateProcessing(
            single=[f"{begin}:0", "$A:0", f"{end}:0"],
            pair=[f"{begin}:0", "$A:0", f"{end}:0", "$B:1", f"{end}:1"],
            special_tokens=[(begin, first), (end, separator)],
        )
        return tokenizer.to_str(pretty=True).encode()

    @cached_property
    def continues(self) -> np.ndarray:
        """Whether a token goes on with the word before it, bool [ids].  ValueError where tokens do not say it."""
        model = self._fields.object("model").tree
        prefix = model.get("continuing_subword_prefix") if model.get("type") == "WordPiece" else None
        if not prefix:
            raise ValueError(
                f"{self._name}: a {model.get('type', 'tokenizer')} model does not mark the pieces that continue a "
                "word, so whole words cannot be masked; leave out --whole-word-masking"
            )
        found = np.zeros(len(self), bool)
        found[[number for token, number in self._numbers.items() if token.startswith(prefix)]] = True
        return found


AnyVocabulary = Union[Vocabulary, TokenizerFile]


def load_tokenizer(path: Union[str, Path]) -> TokenizerFile:
    """Reads a tokenizer.json."""
    if not os.path.exists(path):
        raise ValueError(f"{path}: no such tokenizer; give a tokenizer.json")
    content = read_regular(Path(path), way_out="give a tokenizer.json", most_bytes=_MOST_BYTES)
    return TokenizerFile(content, str(path))


def load_either(path: Union[str, Path], lower_case: bool = True) -> AnyVocabulary:
    """A tokenizer.json, or any other name: a vocab.txt."""
    return load_tokenizer(path) if Path(path).suffix == ".json" else load_vocabulary(path, lower_case)


def vocabulary_in(folder: Union[str, Path]) -> Path:
    """The file of a folder that holds its vocabulary; its vocab.txt where it has neither."""
    found = [Path(folder, name) for name in (VOCABULARY, TOKENIZER)]
    return next((path for path in found if path.exists()), found[0])
