"""Text to token ids with the `tokenizers` library: a WordPiece vocabulary, read or trained, or a tokenizer.json.

The special tokens of a tokenizer.json are those that its post-processor adds (special_tokens.py).
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, takewhile
from pathlib import Path
from types import MappingProxyType
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Dict,
    Iterable,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
    Union,
)

import numpy as np

from pack_data.reading.durable import PathLike, write_atomically
from pack_data.reading.fields import Fields, one_line, parse_json, said_of
from pack_data.reading.files import read_regular
from pack_data.text.corpus import Document
from pack_data.text.special_tokens import (
    STATING_FILES,
    StatedToken,
    Template,
    read_stating_files,
    special_tokens_of,
    stated_tokens,
)
from pack_data.text.spelling import Spelling

if TYPE_CHECKING:
    from tokenizers import Tokenizer

VOCABULARY, TOKENIZER = "vocab.txt", "tokenizer.json"  # their names in a data set
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
# A vocabulary is trained on this number of characters at the beginning of the text.
_TRAINING_CHARACTERS = 32 << 20
# Its alphabet makes up this share of the text, and has this number of the most frequent characters if they have room.
_COVERAGE = 0.9995
_USUAL_ALPHABET = 1000
_LONGEST_WORD = 100  # characters; BERT makes longer ones [UNK]
_ZERO_WIDTH_SPACE = "\u200b"  # between words of Khmer, Thai and others
_VOWEL_SIGN = "\u0941"  # of Devanagari


class Special(NamedTuple):
    """Ids of the special tokens that examples are made with; None if the tokenizer adds no such token."""

    first: Optional[int]  # [CLS]
    separator: Optional[int]  # [SEP]
    mask: int  # [MASK]


class _Encoder:
    """The common base of a vocab.txt and a tokenizer.json."""

    text: bytes  # the content of the file
    unknown: Optional[int]  # [UNK], None if there is none
    single: Template  # special tokens around one text
    pair: Template  # and around two
    _tokenizer: Any

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text).hexdigest()

    def cut(self, texts: Sequence[str]) -> List[Any]:
        """Return the encodings of the texts; a text that contains "[SEP]" forges no special token."""
        return _encodings(self._tokenizer, texts)

    def encode(self, sentences: Sequence[str]) -> Tuple[np.ndarray, np.ndarray]:
        """Return the token ids of all sentences, flat int32, and their numbers, int64 [sentences].

        Special tokens are not added.
        """
        ids, lengths, _ = self.encode_and_count(sentences)
        return ids, lengths

    def encode_and_count(self, sentences: Sequence[str]) -> Tuple[np.ndarray, np.ndarray, Spelling]:
        """Return what `encode` returns, and the counts of the sentences' characters."""
        ids: List[np.ndarray] = [np.zeros(0, dtype=np.int32)]
        lengths: List[int] = []
        counts: List[Spelling] = []
        # In blocks: the library's result takes a hundred bytes for each token.
        for start in range(0, len(sentences), 4096):
            block = sentences[start : start + 4096]
            encodings = self.cut(block)
            counts.append(self.spelling(block, encodings))
            ids_of_sentences = [item.ids for item in encodings]
            lengths.extend(map(len, ids_of_sentences))
            ids.append(np.fromiter(chain.from_iterable(ids_of_sentences), np.int32))
        return np.concatenate(ids), np.array(lengths, dtype=np.int64), Spelling.total(counts)

    def spelling(self, texts: Sequence[str], encodings: Sequence[Any]) -> Spelling:
        """Return the counts of the characters of texts. encodings: what `cut` returned for them."""
        return Spelling.of(texts, encodings, self.unknown, self._strips_marks)

    @cached_property
    def _strips_marks(self) -> bool:
        """True if the tokenizer strips combining marks, as BERT's does in lower case."""
        normalizer = self._tokenizer.normalizer
        return normalizer is not None and _VOWEL_SIGN not in normalizer.normalize_str(
            f"\u0915{_VOWEL_SIGN}"
        )


@dataclass(frozen=True, eq=False)
class Vocabulary(_Encoder):
    """Tokens by id. Text is cleaned and split as BERT does; `lower_case` also strips accents."""

    tokens: Tuple[str, ...]
    lower_case: bool = True
    file: ClassVar[str] = VOCABULARY

    def __len__(self) -> int:
        return len(self.tokens)

    def __post_init__(self) -> None:
        repeated = [token for token, count in Counter(self.tokens).items() if count > 1]
        if repeated:
            raise ValueError(f"the vocabulary holds {repeated[0]!r} twice; a token has one id")
        missing = [token for token in SPECIAL_TOKENS if token not in set(self.tokens)]
        if missing:
            raise ValueError(
                f"the vocabulary lacks {', '.join(missing)}; BERT needs {' '.join(SPECIAL_TOKENS)}, one token a line"
            )

    @cached_property
    def ids(self) -> dict:
        return {token: number for number, token in enumerate(self.tokens)}

    @property
    def special(self) -> Special:
        return Special(*(self.ids[token] for token in ("[CLS]", "[SEP]", "[MASK]")))

    @cached_property
    def single(self) -> Template:  # type: ignore[override]
        return Template((self.ids["[CLS]"],), (), (self.ids["[SEP]"],))

    @cached_property
    def pair(self) -> Template:  # type: ignore[override]
        separator = (self.ids["[SEP]"],)
        return Template((self.ids["[CLS]"],), separator, separator, 2)

    @property
    def unknown(self) -> int:  # type: ignore[override]
        """[UNK]."""
        return self.ids["[UNK]"]

    @property
    def padding(self) -> int:
        """[PAD]."""
        return self.ids["[PAD]"]

    @cached_property
    def continues(self) -> np.ndarray:
        """True for tokens that continue the word before them ("##ing"), bool [tokens]."""
        return np.array([token.startswith("##") for token in self.tokens])

    @property
    def text(self) -> bytes:  # type: ignore[override]
        """The content of vocab.txt."""
        return ("\n".join(self.tokens) + "\n").encode()

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        from tokenizers import models

        model = models.WordPiece(
            self.ids, unk_token="[UNK]", max_input_chars_per_word=_LONGEST_WORD
        )
        return _untrained(model, self.lower_case)

    @cached_property
    def cuts_long_words(self) -> bool:
        """True if `train_vocabulary` made the vocabulary, as its first tokens show; BERT makes long words [UNK]."""
        others = self.tokens[len(SPECIAL_TOKENS) :]
        alphabet = sorted(takewhile(lambda token: len(token) == 1, others))
        written = _first_tokens(alphabet, self._tokenizer)
        return bool(alphabet) and [*self.tokens[: len(written)]] == written

    @cached_property
    def _cutting_tokenizer(self) -> Tokenizer:
        return _cutting_words(_untrained(self._tokenizer.model, self.lower_case))

    def cut(self, texts: Sequence[str]) -> List[Any]:
        """Return the encodings of the texts; a text that contains "[SEP]" forges no special token."""
        encodings = super().cut(texts)
        if self.cuts_long_words:
            # The tokenizer that cuts words takes 20 % longer.
            for number, encoding in enumerate(encodings):
                if self.unknown in encoding.ids or _ZERO_WIDTH_SPACE in texts[number]:
                    (encodings[number],) = _encodings(self._cutting_tokenizer, [texts[number]])
        return encodings

    def as_packed(self) -> bytes:
        """Return a tokenizer.json that cuts text as `cut` does and adds the special tokens of packs."""
        from tokenizers import BertWordPieceTokenizer, Tokenizer

        pieces = BertWordPieceTokenizer(dict(self.ids), lowercase=self.lower_case)
        tokenizer = Tokenizer.from_str(pieces.to_str())
        if self.cuts_long_words:
            _cutting_words(tokenizer)
        return tokenizer.to_str(pretty=True).encode()


def _first_tokens(alphabet: Sequence[str], tokenizer: Tokenizer) -> List[str]:
    """Return the first tokens of a trained vocabulary: special tokens, the alphabet, the alphabet as continuations."""
    continuing = []
    for character in alphabet:
        # An ideograph is a word of its own, and continues none.
        if " " not in tokenizer.normalizer.normalize_str(character):
            continuing.append("##" + character)
    return [*SPECIAL_TOKENS, *alphabet, *continuing]


def _encodings(tokenizer: Tokenizer, texts: Sequence[str]) -> List[Any]:
    tokenizer.encode_special_tokens = True
    return tokenizer.encode_batch(list(texts), add_special_tokens=False)


def _cutting_words(tokenizer: Tokenizer) -> Tokenizer:
    """Let a tokenizer cut words at zero-width spaces, and those that are too long for WordPiece; return it."""
    from tokenizers import Regex, normalizers, pre_tokenizers

    space = normalizers.Replace(_ZERO_WIDTH_SPACE, " ")
    tokenizer.normalizer = normalizers.Sequence([space, tokenizer.normalizer])
    long = pre_tokenizers.Split(Regex(f"(?m).{{{_LONGEST_WORD}}}"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([tokenizer.pre_tokenizer, long])
    return tokenizer


def _use_one_thread() -> None:
    """Switch the library's threads off: they compete with the processes of a build, and warn after a fork."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def _untrained(model: Any, lower_case: bool) -> Tokenizer:
    _use_one_thread()
    from tokenizers import Tokenizer, normalizers, pre_tokenizers

    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=True, strip_accents=None, lowercase=lower_case
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def train_vocabulary(
    documents: Iterable[Document], size: int, lower_case: bool = True
) -> Vocabulary:
    """Train a WordPiece vocabulary of at most `size` tokens; it has fewer if the text has no more.

    The same text gives the same vocabulary. The library's trainer alone does not ensure this: it numbers the characters
    in the order of a randomly seeded hash map, and these numbers decide between equal counts. So the alphabet, plain
    and as continuation ("##e"), is counted here and passed to the trainer in a fixed order.
    """
    from tokenizers import models, trainers

    tokenizer = _cutting_words(_untrained(models.WordPiece(unk_token="[UNK]"), lower_case))
    texts = _beginnings(documents, tokenizer)
    characters: Counter = Counter()
    for text in texts:
        characters.update(text)
    for space in filter(str.isspace, [*characters]):
        del characters[space]
    if not characters:
        raise ValueError("no text to train a vocabulary on; pass a corpus with text in it")
    fixed = _alphabet_tokens(characters, size, tokenizer)
    rare = {ord(character): " " for character in {*characters}.difference(fixed)}
    trainer = trainers.WordPieceTrainer(
        vocab_size=size, min_frequency=2, special_tokens=fixed, show_progress=False
    )
    tokenizer.train_from_iterator(
        (text.translate(rare) if rare else text for text in texts), trainer
    )
    numbers = tokenizer.get_vocab()
    return Vocabulary(tuple(sorted(numbers, key=numbers.__getitem__)), lower_case)


def _beginnings(documents: Iterable[Document], tokenizer: Tokenizer) -> List[str]:
    """Return the texts to train on, normalised: up to a number of characters."""
    texts = []
    room = _TRAINING_CHARACTERS
    for document in documents:
        text = tokenizer.normalizer.normalize_str("\n".join(document.lines)[:room])
        texts.append(text)
        room -= len(text)
        if room <= 0:
            break
    return texts


def _alphabet_tokens(characters: Counter, size: int, tokenizer: Tokenizer) -> List[str]:
    """Return the first tokens of a vocabulary for a text with these counts; ValueError if they have no room."""
    by_frequency = sorted(characters, key=lambda character: (-characters[character], character))
    covered = np.cumsum([characters[character] for character in by_frequency])
    needed = int(np.searchsorted(covered, _COVERAGE * covered[-1])) + 1
    for letters in (max(needed, _USUAL_ALPHABET), needed):
        tokens = _first_tokens(sorted(by_frequency[:letters]), tokenizer)
        if len(tokens) <= size:
            return tokens
    raise ValueError(
        f"a vocabulary of {size} tokens has no room for the {needed} characters of this corpus; "
        f"take at least {len(tokens)}"
    )


class TokenizerFile(_Encoder):
    """A tokenizer.json, identified by the sha256 of the file.

    Args:
        content: the file.
        name: its name, for messages.
        stated: the special tokens that files beside it name (`stated_tokens`).

    Raises:
        ValueError: it is no tokenizer, or its special tokens are missing, unclear or not those of `stated`.
    """

    file = TOKENIZER
    lower_case = None  # the file itself states the treatment of capitals

    def __init__(
        self,
        content: bytes,
        name: str = TOKENIZER,
        stated: Mapping[str, StatedToken] = MappingProxyType({}),
    ) -> None:
        _use_one_thread()
        from tokenizers import Tokenizer

        way_out = "pass the tokenizer.json that save_pretrained or the tokenizers library wrote"
        fields = Fields.of(parse_json(content, name, way_out), name, way_out)
        try:
            self._tokenizer: Tokenizer = Tokenizer.from_str(content.decode())
        except Exception as error:  # the library raises nothing more special
            raise ValueError(f"{name}: no tokenizer ({one_line(error)}); {way_out}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._model = fields.object("model").tree
        self.text = content
        self._name = name
        self._numbers = self._tokenizer.get_vocab(with_added_tokens=True)
        special = special_tokens_of(self._tokenizer, name, self._numbers, stated)
        self.single = special.single
        self.pair = special.pair
        self.padding = special.padding
        self._adds_special_tokens = special.is_in_file
        first = next(iter(self.pair.before), None)
        separator = next(iter(self.pair.between + self.pair.after), None)
        self.special = Special(first, separator, special.mask)

    def __len__(self) -> int:
        """Ids are below this."""
        return max(self._numbers.values()) + 1

    @cached_property
    def names(self) -> Dict[int, str]:
        """Tokens by id, added ones too."""
        return {number: token for token, number in self._numbers.items()}

    @cached_property
    def unknown(self) -> Optional[int]:  # type: ignore[override]
        """The token for text that no other token spells, None if there is none."""
        number: Optional[int] = self._model.get("unk_id")
        return self._numbers.get(self._model.get("unk_token") or "") if number is None else number

    def as_packed(self) -> bytes:
        """Return the file with the special tokens of packs around its text, without truncation and padding.

        The content stays as it is if nothing differs.
        """
        from tokenizers import Tokenizer
        from tokenizers.processors import TemplateProcessing

        # Another tokenizer, because the truncation and padding of the file matter here.
        tokenizer = Tokenizer.from_str(self.text.decode())
        if self._adds_special_tokens and tokenizer.truncation is tokenizer.padding is None:
            return self.text
        tokenizer.no_truncation()
        tokenizer.no_padding()
        if not self._adds_special_tokens:
            before, between, after = (
                [self.names[number] for number in numbers] for numbers in self.pair[:3]
            )
            single_after = [self.names[number] for number in self.single.after]
            tokenizer.post_processor = TemplateProcessing(
                single=[*before, "$A", *single_after],
                pair=[*before, "$A", *between, "$B:1", *(f"{token}:1" for token in after)],
                special_tokens=[(self.names[number], number) for number in {*self.pair.tokens}],
            )
        return tokenizer.to_str(pretty=True).encode()

    @cached_property
    def continues(self) -> np.ndarray:
        """True for tokens that continue the word before them, bool [ids]. ValueError if tokens are not marked."""
        type = self._model.get("type", "tokenizer")
        prefix = self._model.get("continuing_subword_prefix")
        if type != "WordPiece" or not prefix:
            raise ValueError(
                f"{self._name}: a {type} model does not mark the pieces that continue a word, so whole words cannot "
                "be masked; leave out --whole-word-masking"
            )
        continuing = [number for token, number in self._numbers.items() if token.startswith(prefix)]
        continues = np.zeros(len(self), bool)
        continues[continuing] = True
        return continues


AnyVocabulary = Union[Vocabulary, TokenizerFile]


def load_vocabulary(path: PathLike, lower_case: bool = True) -> Vocabulary:
    """Read vocab.txt: one token per line, the id is the line's number from 0."""
    return VocabularyFiles.read(path)._as_vocabulary(lower_case)


def load_tokenizer(path: PathLike) -> TokenizerFile:
    """Read a tokenizer.json, and the names of its special tokens in files beside it."""
    return VocabularyFiles.read(path)._as_tokenizer()


def load_either(path: PathLike, lower_case: bool = True) -> AnyVocabulary:
    """Read a tokenizer.json, or a vocab.txt under any other name."""
    return VocabularyFiles.read(path).parse(lower_case)


def vocabulary_in(folder: PathLike) -> Path:
    """Return the file of a directory that holds its vocabulary: its vocab.txt if it has neither."""
    paths = [Path(folder, name) for name in (VOCABULARY, TOKENIZER)]
    return next((path for path in paths if path.exists()), paths[0])


def vocabulary_files(path: Path) -> List[Path]:
    """Return the file of a vocabulary, after the files beside a tokenizer.json that name its special tokens."""
    beside = map(path.with_name, STATING_FILES if path.suffix == ".json" else ())
    return [*filter(Path.exists, beside), path]


class VocabularyFiles(NamedTuple):
    """The content of a vocabulary, read once, so that what is checked, parsed and copied are the same bytes.

    path: of its file, for messages. content: of that file. beside: name and content of the files that name the special
    tokens of a tokenizer.json.
    """

    path: str
    content: bytes
    beside: Tuple[Tuple[str, bytes], ...] = ()

    @classmethod
    def read(cls, path: PathLike) -> VocabularyFiles:
        """Read the files. ValueError if one of them cannot be read."""
        path = Path(path)
        content = read_regular(path, way_out=f"pass a vocabulary, {VOCABULARY} or {TOKENIZER}")
        beside = read_stating_files(path) if path.suffix == ".json" else ()
        return cls(str(path), content, beside)

    @property
    def sha256(self) -> str:
        """The digest of all files."""
        digests = hashlib.sha256(self.content).hexdigest()
        for name, content in self.beside:
            digests += f" {name} {hashlib.sha256(content).hexdigest()}"
        return hashlib.sha256(digests.encode()).hexdigest()

    def parse(self, lower_case: bool) -> AnyVocabulary:
        """Return the vocabulary. ValueError if it is none."""
        is_tokenizer = Path(self.path).suffix == ".json"
        return self._as_tokenizer() if is_tokenizer else self._as_vocabulary(lower_case)

    def _as_tokenizer(self) -> TokenizerFile:
        """Return the tokenizer of a tokenizer.json under any name. ValueError if it is none."""
        return TokenizerFile(self.content, self.path, stated_tokens(self.path, self.beside))

    def _as_vocabulary(self, lower_case: bool) -> Vocabulary:
        """Return the vocabulary of a vocab.txt under any name. ValueError if it is none."""
        try:
            text = self.content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{self.path}: not UTF-8 text ({error.reason}); a {VOCABULARY} has one token a line"
            ) from None
        lines = text[:-1] if text.endswith("\n") else text
        tokens = [line.rstrip("\r") for line in lines.split("\n")]
        with said_of(self.path):
            return Vocabulary(tuple(tokens), lower_case)

    def write(self, path: Path) -> None:
        """Write the files to `path` and beside it, the vocabulary last."""
        for name, content in self.beside:
            write_atomically(path.with_name(name), content)
        write_atomically(path, self.content)
