"""Documents to BERT pre-training examples, by the reference procedure (Devlin et al. 2019, and its published code).

Sentences of a document are collected up to a target length and cut in two at random. Half of the second parts are
replaced by text from another document (label 1); the replaced sentences go into the next example. Both parts are
trimmed to fit. 15 % of the tokens are masked: 80 % of these become [MASK], 10 % stay, 10 % become a random token. With
whole-word masking the pieces of a word are chosen together, or none of them. The loop over sentences works on integers;
everything that concerns tokens is vectorised.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import List, Sequence, Tuple

import numpy as np

from pack_data.store.sequences import Sequences, ragged_copy, ragged_index, starts_of
from pack_data.text.corpus import Document, split_sentences
from pack_data.text.vocabulary import AnyVocabulary

# Of the chosen tokens 80 % become [MASK], 10 % stay, and 10 % become random tokens (Devlin et al. 2019, section 3.1).
_MASKED = 0.8
_MASKED_OR_KEPT = 0.9
# Tokens whose masks are chosen at a time: they fit the processor's cache. All of a part at once take 1.9 times as long.
_BLOCK = 1 << 16


@dataclass(frozen=True)
class ExampleOptions:
    """The options of the examples; with the text and the vocabulary they decide every example."""

    max_sequence_length: int
    max_predictions_per_sequence: int
    duplication_factor: int = 5
    short_sequence_probability: float = 0.1
    masked_lm_probability: float = 0.15
    seed: int = 0
    whole_word_masking: bool = False

    def __post_init__(self) -> None:
        for name, least, why in (
            ("max_sequence_length", 5, "[CLS] a [SEP] b [SEP] needs at least 5"),
            ("max_predictions_per_sequence", 1, "at least 1 token is masked"),
            ("seed", 0, "a seed is at least 0"),
            ("duplication_factor", 1, "the corpus is read at least once"),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; {why}")
        for name in ("short_sequence_probability", "masked_lm_probability"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}; a probability is from 0 to 1")


@dataclass(frozen=True, eq=False)
class _TokenisedDocuments:
    """Documents as token ids; no sentence and no document is empty.

    ids: all tokens, flat, int32. sentence_ends: the token after each sentence. document_ends: the sentence after each
    document.
    """

    ids: np.ndarray
    sentence_ends: List[int]
    document_ends: List[int]


def tokenise(documents: Sequence[Document], vocabulary: AnyVocabulary) -> _TokenisedDocuments:
    """Cut documents into sentences and sentences into tokens; a sentence without tokens is left out."""
    sentences: List[str] = []
    counts: List[int] = []  # sentences of each document
    for document in documents:
        before = len(sentences)
        for line in document.lines:
            sentences.extend(split_sentences(line))
        counts.append(len(sentences) - before)

    ids, lengths = vocabulary.encode(sentences)
    has_tokens = lengths > 0
    document_of_sentence = np.repeat(np.arange(len(counts)), counts)[has_tokens]
    kept = np.bincount(document_of_sentence, minlength=len(counts))
    sentence_ends = np.cumsum(lengths[has_tokens])
    document_ends = np.cumsum(kept[kept > 0])
    return _TokenisedDocuments(ids, sentence_ends.tolist(), document_ends.tolist())


def masked_count(
    lengths: np.ndarray, max_predictions_per_sequence: int, masked_lm_probability: float
) -> np.ndarray:
    """Return the number of tokens that the reference masks in sequences of these lengths, int64."""
    wanted = np.rint(np.asarray(lengths) * masked_lm_probability).astype(np.int64)
    return np.minimum(np.maximum(wanted, 1), max_predictions_per_sequence)


def _segment_pairs(
    documents: _TokenisedDocuments, most: int, options: ExampleOptions, rng: random.Random
) -> np.ndarray:
    """Draw the examples of a pass, int64 [examples, 5]: start and length of A and of B (in ids), label.

    most: tokens of A and B together.
    """
    sentence_starts = [0] + documents.sentence_ends
    document_starts = [0] + documents.document_ends
    count = len(documents.document_ends)
    pairs: List[Tuple[int, int, int, int, int]] = []
    for number in range(count):
        last = document_starts[number + 1]
        target = most
        if rng.random() < options.short_sequence_probability:
            target = rng.randint(2, most)
        first = sentence = document_starts[number]
        while sentence < last:
            begin = sentence_starts[first]
            if sentence < last - 1 and sentence_starts[sentence + 1] - begin < target:
                sentence += 1
                continue
            # Sentences first..sentence are the collected chunk; A ends before sentence `cut`.
            cut = first + 1
            if sentence > first:
                cut = first + rng.randint(1, sentence - first)
            length = sentence_starts[cut] - begin
            if sentence == first or rng.random() < 0.5:
                # Ten tries to find another document, as in the reference; a single document is paired with itself.
                for _ in range(10):
                    other = rng.randint(0, count - 1)
                    if other != number:
                        break
                other_end = document_starts[other + 1]
                start = rng.randint(document_starts[other], other_end - 1)
                other_begin = sentence_starts[start]
                end = start + 1
                while end < other_end and sentence_starts[end] - other_begin < target - length:
                    end += 1
                pairs.append((begin, length, other_begin, sentence_starts[end] - other_begin, 1))
                first = sentence = cut
            else:
                second_begin = sentence_starts[cut]
                second_length = sentence_starts[sentence + 1] - second_begin
                pairs.append((begin, length, second_begin, second_length, 0))
                first = sentence = sentence + 1
    return np.array(pairs, dtype=np.int64).reshape(-1, 5)


def _trim(pairs: np.ndarray, most: int, rng: np.random.Generator) -> np.ndarray:
    """Cut the pairs A and B to `most` tokens together, one token at a time from a random end of the longer part."""
    a = pairs[:, 1].copy()
    b = pairs[:, 3].copy()
    excess = np.maximum(a + b - most, 0)
    # The longer part loses a token at a time (B where equal): first the difference, then both in turns, B first.
    from_longer = np.minimum(excess, np.abs(a - b))
    in_turns = excess - from_longer
    cut_a = np.where(a > b, from_longer, 0) + in_turns // 2
    cut_b = np.where(a > b, 0, from_longer) + (in_turns + 1) // 2
    trimmed = pairs.copy()
    trimmed[:, 0] += rng.binomial(cut_a, 0.5)
    trimmed[:, 1] -= cut_a
    trimmed[:, 2] += rng.binomial(cut_b, 0.5)
    trimmed[:, 3] -= cut_b
    return trimmed


def _mask(
    ids: np.ndarray,
    lengths: np.ndarray,
    special: np.ndarray,
    inside: np.ndarray,
    mask_id: int,
    vocabulary_size: int,
    options: ExampleOptions,
    rng: np.random.Generator,
) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mask `ids` (flat, in place); return counts [n], positions and original ids of the masked tokens (flat).

    special: places of [CLS] and [SEP], int64. inside: True for a token that continues the word of the token before it,
    bool [tokens]; these are masked with the word's first token, or not at all. Without any, every token is a word.
    """
    keys = rng.random(len(ids))
    keys += np.repeat(np.arange(len(lengths)), lengths)
    is_special = np.zeros(len(ids), bool)
    is_special[special] = True
    bounds = np.append(0, np.cumsum(lengths))
    rows = np.searchsorted(bounds, np.arange(_BLOCK, len(ids), _BLOCK))
    tokens = bounds[rows]
    columns_of_blocks = [np.split(values, tokens) for values in (keys, is_special, inside)]
    blocks = zip([0, *tokens], np.split(lengths, rows), *columns_of_blocks)
    chosen = np.concatenate([begin + _chosen(options, *block) for begin, *block in blocks])
    counts = np.diff(np.searchsorted(chosen, bounds))
    labels = ids[chosen].copy()

    draw = rng.random(len(chosen))
    random_ids = rng.integers(0, vocabulary_size, len(chosen))
    kept_or_random = np.where(draw < _MASKED_OR_KEPT, labels, random_ids)
    ids[chosen] = np.where(draw < _MASKED, mask_id, kept_or_random)
    return counts, chosen - np.repeat(bounds[:-1], counts), labels


def _chosen(
    options: ExampleOptions,
    lengths: np.ndarray,
    keys: np.ndarray,
    is_special: np.ndarray,
    inside: np.ndarray,
) -> np.ndarray:
    """Return the places of the tokens to mask in some sequences, ascending.

    keys: a number of each token, random within its sequence and ascending between sequences. is_special, inside: as in
    `_mask`, bool [tokens].
    """
    wanted = masked_count(
        lengths, options.max_predictions_per_sequence, options.masked_lm_probability
    )
    rows = np.repeat(np.arange(len(lengths)), lengths)
    most = np.minimum(wanted, np.bincount(rows[~is_special], minlength=len(lengths)))

    # Tokens of each word: up to the next token that does not continue it.
    begin = np.flatnonzero(~inside)
    all_sizes = np.diff(np.append(begin, len(keys)))
    is_word = ~is_special[begin]
    first = begin[is_word]
    sizes = all_sizes[is_word]

    order = np.argsort(keys[first], kind="stable")
    words = order[_fitting(sizes[order], rows[first[order]], most)]
    return np.sort(ragged_index(first[words], sizes[words]))


def _fitting(sizes: np.ndarray, rows: np.ndarray, most: np.ndarray) -> np.ndarray:
    """Return the indices of the words that rows take if each goes through its words in order and takes what fits.

    sizes int64 [words]: tokens of each; rows int64 [words]: the row of each, ascending; most int64 [rows]: tokens that
    a row takes at most.
    """
    room = most
    taken = []
    waiting = np.arange(len(sizes))
    while len(waiting):
        # All up to the first that does not fit are taken. Behind it, only those that fit what is left then can follow.
        size = sizes[waiting]
        row = rows[waiting]
        total = np.cumsum(size)
        first_of_row = np.searchsorted(row, np.arange(len(room)))
        before = np.concatenate([[0], total])[first_of_row]
        fits = total <= (before + room)[row]
        taken.append(waiting[fits])
        used = np.bincount(row[fits], weights=size[fits], minlength=len(room))
        room = room - used.astype(np.int64)
        waiting = waiting[~fits & (size <= room[row])]
    return np.concatenate(taken) if taken else waiting


def make_examples(
    documents: _TokenisedDocuments,
    vocabulary: AnyVocabulary,
    options: ExampleOptions,
    part: int = 0,
) -> Sequences:
    """Make the examples of these documents: duplication_factor passes, each with new segments and a new masking.

    part: the number of this block of documents in the corpus; with the seed it decides every random choice.
    """
    special = len(vocabulary.pair.tokens)
    most = options.max_sequence_length - special
    if most < 2:
        raise ValueError(
            f"max_sequence_length is {options.max_sequence_length}; the tokenizer adds {special} special tokens to a "
            f"pair of texts, so it must be at least {special + 2}"
        )
    passes = []
    for repetition in range(options.duplication_factor):
        if not documents.document_ends:
            break
        rng = np.random.default_rng([options.seed, part, repetition])
        draws = random.Random(f"{options.seed} {part} {repetition}")
        pairs = _segment_pairs(documents, most, options, draws)
        trimmed = _trim(pairs, most, rng)
        passes.append(_with_masks(documents, trimmed, vocabulary, options, rng))
    return Sequences.concatenate(passes) if passes else Sequences.from_examples([])


def _with_masks(
    documents: _TokenisedDocuments,
    pairs: np.ndarray,
    vocabulary: AnyVocabulary,
    options: ExampleOptions,
    rng: np.random.Generator,
) -> Sequences:
    a_start, a_length, b_start, b_length, label = pairs.T
    template = vocabulary.pair
    lengths = a_length + b_length + len(template.tokens)
    starts = starts_of(lengths)
    a_begin = starts + len(template.before)
    a_end = a_begin + a_length
    b_begin = a_end + len(template.between)
    ids = np.empty(int(lengths.sum()), dtype=np.int32)
    ragged_copy(ids, a_begin, documents.ids, a_start, a_length)
    ragged_copy(ids, b_begin, documents.ids, b_start, b_length)
    special = []
    for begin, tokens in (
        (starts, template.before),
        (a_end, template.between),
        (b_begin + b_length, template.after),
    ):
        for offset, token in enumerate(tokens):
            ids[begin + offset] = token
            special.append(begin + offset)
    inside = np.zeros(len(ids), dtype=bool)
    if options.whole_word_masking:
        # The rest of a word that trimming left at the beginning of a part is a word of its own.
        inside = vocabulary.continues[ids]
        inside[a_begin] = inside[b_begin] = False
    places = np.concatenate(special)
    mask = vocabulary.special.mask
    counts, positions, labels = _mask(
        ids, lengths, places, inside, mask, len(vocabulary), options, rng
    )
    first_segments = template.first_segments(a_length, lengths)
    return Sequences(
        lengths,
        {"input_ids": ids},
        counts,
        {"masked_lm_positions": positions, "masked_lm_ids": labels},
        {"first_segment_lengths": first_segments, "next_sentence_labels": label},
    )
