"""Special tokens around the texts of an example, as the post-processor of a tokenizer adds them.

[CLS] a [SEP]                     before [CLS], after [SEP]
[CLS] a [SEP] b [SEP]             before [CLS], between [SEP], after [SEP]; segments 0 0 0 1 1
<s> a </s> </s> b </s>            before <s>, between </s> </s>, after </s>; segments 0 0 0 0 0 0
"""

from __future__ import annotations

from pathlib import Path
from typing import (
    Any,
    Dict,
    Iterable,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Set,
    Tuple,
    TypeVar,
    Union,
)

import numpy as np

from pack_data.reading.fields import Fields, one_line, parse_json, shown
from pack_data.reading.files import read_regular

_Numbers = TypeVar("_Numbers", int, np.ndarray)
_Ids = Union[Sequence[int], np.ndarray]
# Files beside a tokenizer.json that name its special tokens.
STATING_FILES = ("special_tokens_map.json", "tokenizer_config.json")
# The special tokens of BERT and those of RoBERTa.
_FAMILIES = (
    {"cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]", "pad_token": "[PAD]"},
    {"cls_token": "<s>", "sep_token": "</s>", "mask_token": "<mask>", "pad_token": "<pad>"},
)
# Kinds of tokens without which a tokenizer serves no masked language model.
_NEEDED = ("cls_token", "sep_token", "mask_token")


class Template(NamedTuple):
    """Ids of the special tokens around one text or two."""

    before: Tuple[int, ...]
    between: Tuple[int, ...]  # none for one text
    after: Tuple[int, ...]
    # Special tokens in segment 0. None: all tokens are in segment 0.
    in_first_segment: Optional[int] = None

    @property
    def tokens(self) -> Tuple[int, ...]:
        """All special tokens in order."""
        return self.before + self.between + self.after

    def first_segments(self, first: _Numbers, lengths: _Numbers) -> _Numbers:
        """Return the tokens in segment 0 of examples of these lengths, whose first texts have `first` tokens."""
        return lengths if self.in_first_segment is None else first + self.in_first_segment

    def joined(self, texts: Sequence[_Ids]) -> Tuple[np.ndarray, np.ndarray]:
        """Return input ids and segment ids, int32 [n], of one text or two with their special tokens."""
        pieces = [self.before, texts[0], self.between, *texts[1:], self.after]
        ids = np.concatenate([np.array(piece, np.int32) for piece in pieces])
        segments = np.zeros(len(ids), np.int32)
        segments[self.first_segments(len(texts[0]), len(ids)) :] = 1
        return ids, segments


class StatedToken(NamedTuple):
    """A special token that a file beside the tokenizer names."""

    text: str
    fields: Fields  # the file


def read_stating_files(tokenizer: Path) -> Tuple[Tuple[str, bytes], ...]:
    """Return name and content of the files beside a tokenizer.json that name its special tokens."""
    way_out = _way_out(tokenizer)
    paths = filter(Path.exists, map(tokenizer.with_name, STATING_FILES))
    return tuple((path.name, read_regular(path, way_out=way_out)) for path in paths)


def _way_out(tokenizer: Path) -> str:
    return f"correct it, or move it away from {tokenizer.name}"


def stated_tokens(tokenizer: str, files: Iterable[Tuple[str, bytes]]) -> Dict[str, StatedToken]:
    """Return the special tokens that files beside a tokenizer.json name, by kind, such as "cls_token".

    Args:
        tokenizer: the path of the tokenizer.json, for messages.
        files: what `read_stating_files` returned.

    Raises:
        ValueError: the files contradict each other.
    """
    way_out = _way_out(Path(tokenizer))
    stated: Dict[str, StatedToken] = {}
    for name, content in files:
        path = Path(tokenizer).with_name(name)
        fields = Fields.of(parse_json(content, path, way_out), path, way_out)
        for kind in _FAMILIES[0]:
            text = fields.optional(kind, _token_text)
            if text is None:
                continue
            known = stated.setdefault(kind, StatedToken(text, fields))
            if known.text != text:
                raise fields.error(kind, f"{known.fields.source} has {shown(known.text)}")
    return stated


def _token_text(fields: Fields, kind: str) -> str:
    if isinstance(fields.any(kind), dict):
        return fields.object(kind).text("content")
    return fields.text(kind)


class SpecialTokens(NamedTuple):
    """The special tokens of a tokenizer: ids, and their places around one text and around two."""

    single: Template
    pair: Template
    mask: int
    padding: Optional[int]
    is_in_file: bool  # whether the file itself adds the tokens of the templates


def special_tokens_of(
    tokenizer: Any, name: str, numbers: Mapping[str, int], stated: Mapping[str, StatedToken]
) -> SpecialTokens:
    """Return the special tokens that a tokenizer adds to texts; those of BERT or RoBERTa if it adds none.

    Args:
        tokenizer: a `tokenizers.Tokenizer` that neither truncates nor pads.
        name: the file, for messages.
        numbers: all tokens with their ids.
        stated: the tokens that files beside it name.

    Raises:
        ValueError: the tokens do not stand around the texts, are unclear, or contradict `stated`.
    """
    try:
        text = _text_with_tokens(tokenizer, name, numbers)
        single, pair = (_template_of(tokenizer, name, numbers, [text] * count) for count in (1, 2))
    except BaseException as error:
        # The library panics, which is no Exception, at a template with a token or a text that it lacks.
        if type(error).__name__ != "PanicException":
            raise
        problem = f"{name}: post_processor cannot be applied ({one_line(error)}); correct it"
        raise ValueError(problem) from None
    of_file = single, pair
    # The library's default for a pair adds nothing.
    if not pair.tokens:
        in_first_segment = len(single.before + single.after)
        pair = Template(single.before, single.after, single.after, in_first_segment)
    _check_stated(pair, numbers, stated, name)

    names = {number: token for token, number in numbers.items()}
    used = {token.text for token in stated.values()}
    used.update(names[number] for number in pair.tokens)
    ids = {kind: numbers[token.text] for kind, token in stated.items()}
    for kind in _FAMILIES[0]:
        # If the post-processor adds no [CLS] or no [SEP], the model has none.
        is_settled = kind in ids or (pair.tokens and kind in ("cls_token", "sep_token"))
        candidates = [] if is_settled else _candidates(kind, used, numbers)
        if len(candidates) > 1:
            raise ValueError(
                f"{name}: its {kind} could be {' or '.join(candidates)}; name it in {STATING_FILES[0]} beside it, "
                "or add the post_processor of the model"
            )
        if candidates:
            ids[kind] = numbers[candidates[0]]
    if "mask_token" not in ids or not (pair.tokens or {*_NEEDED} <= {*ids}):
        wanted = " or ".join(" ".join(map(family.__getitem__, _NEEDED)) for family in _FAMILIES)
        raise ValueError(
            f"{name}: has no special tokens for the beginning, the separator and the mask ({wanted}); add them "
            "to the tokenizer, or take one of a masked language model"
        )

    if not pair.tokens:
        first = (ids["cls_token"],)
        separator = (ids["sep_token"],)
        single = Template(first, (), separator)
        pair = Template(first, separator, separator, 2)
    is_in_file = (single, pair) == of_file
    return SpecialTokens(single, pair, ids["mask_token"], ids.get("pad_token"), is_in_file)


def _text_with_tokens(tokenizer: Any, name: str, numbers: Mapping[str, int]) -> str:
    """Return a text that has tokens: a letter may be none of the tokenizer's."""
    for text in ("a", *numbers):
        if tokenizer.encode(text, add_special_tokens=False).ids:
            return text
    raise ValueError(f"{name}: no text has a token; pass the tokenizer.json of a trained tokenizer")


def _template_of(
    tokenizer: Any, name: str, numbers: Mapping[str, int], texts: Sequence[str]
) -> Template:
    """Return the special tokens that a tokenizer adds to one text or two; ValueError for what packs cannot hold."""
    plain = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    encoding = tokenizer.encode(*texts)
    ids = encoding.ids
    segments = encoding.type_ids
    text_numbers = encoding.sequence_ids  # None for a special token
    if {*range(len(texts))} <= {*text_numbers}:
        first = text_numbers.index(0)
        last = text_numbers.index(len(texts) - 1)
        between = ids[first + len(plain[0]) : last]
        after = ids[last + len(plain[-1]) :]
        in_first_segment = None
        if segments[first] < segments[last]:
            in_first_segment = segments.count(0) - len(plain[0])
        template = Template(tuple(ids[:first]), tuple(between), tuple(after), in_first_segment)
        added = [token for token, text in zip(encoding.tokens, text_numbers) if text is None]
        has_their_ids = [numbers.get(token) for token in added] == [*template.tokens]
        joined_ids, joined_segments = template.joined(plain)
        if has_their_ids and (joined_ids.tolist(), joined_segments.tolist()) == (ids, segments):
            return template
    raise ValueError(
        f"{name}: post_processor gives {shown(encoding.tokens)} with type_ids {shown(segments)} for "
        f"{' and '.join(map(shown, texts))}; must keep the texts in order, with type_ids 0, then 1, and ids of the "
        "vocabulary; correct it"
    )


def _candidates(kind: str, used: Set[str], numbers: Mapping[str, int]) -> List[str]:
    """Return the tokens that may be the tokenizer's token of a kind: those of the families in use come first."""
    families = []
    for family in _FAMILIES:
        is_whole = all(family[needed] in numbers for needed in _NEEDED)
        if used.intersection(family.values()) or (not used and is_whole):
            families.append(family)
    for some in (families, _FAMILIES):
        candidates = [family[kind] for family in some if family[kind] in numbers]
        if candidates:
            return candidates
    return []


def _check_stated(
    pair: Template, numbers: Mapping[str, int], stated: Mapping[str, StatedToken], name: str
) -> None:
    """Raise ValueError if files beside a tokenizer name other special tokens than it has or adds."""
    ends = pair.between + pair.after
    for kind, token in stated.items():
        if token.text not in numbers:
            raise token.fields.error(kind, f"{name} has no such token")
        number = numbers[token.text]
        is_wrong = False
        if kind == "cls_token":
            is_wrong = pair.before[0] != number if pair.before else number in ends
        elif kind == "sep_token":
            is_wrong = bool(ends) and number not in ends
        if is_wrong:
            raise token.fields.error(kind, f"the post_processor of {name} adds other tokens")
