"""Documents to BERT pre-training examples, by the reference procedure (Devlin et al. 2019, and its published code).

Sentences of a document are collected up to a target length and cut in two at random. Half of the second parts are
replaced by text from another document (label 1); the replaced sentences go into the next example. 15 % of the tokens
are masked: 80 % of these become [MASK], 10 % stay, 10 % become a random token. With whole-word masking the pieces of a
word are chosen together, or none of them. The loop over examples works on integers; everything that concerns tokens is
vectorised.

Three steps differ from the published code. What does not fit an example begins the next one (the published code throws
it away), and long sentences are cut into pieces between words, so that every pass uses every token of every document.
The document of a random second segment is drawn by its tokens, unless `draw_documents` is "uniform".
"""

from __future__ import annotations

import random
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import Any, List, NamedTuple, Sequence, Tuple

import numpy as np

from pack_data.store.sequences import Sequences, ragged_copy, ragged_index, starts_of
from pack_data.text import DRAW_UNIFORMLY
from pack_data.text.corpus import Document, split_sentences
from pack_data.text.options import ExampleOptions
from pack_data.text.spelling import Spelling
from pack_data.text.vocabulary import AnyVocabulary

# Of the chosen tokens 80 % become [MASK], 10 % stay, and 10 % become random tokens (Devlin et al. 2019, section 3.1).
_MASKED = 0.8
_MASKED_OR_KEPT = 0.9
# Tokens whose masks are chosen at a time: they fit the processor's cache. All of a part at once take 1.9 times as long.
_BLOCK = 1 << 16
# Long sentences that are tokenised again at a time, to cut them at words.
_LONG_SENTENCES = 64


@dataclass(frozen=True, eq=False)
class _TokenisedDocuments:
    """Documents as token ids; no sentence and no document is empty.

    ids: all tokens, flat, int32. sentence_ends: the token after each sentence, or piece of a long one. document_ends:
    the sentence after each document. spelling: the characters of the text.
    """

    ids: np.ndarray
    sentence_ends: List[int]
    document_ends: List[int]
    spelling: Spelling = Spelling()


def tokenise(
    documents: Sequence[Document], vocabulary: AnyVocabulary, options: ExampleOptions
) -> _TokenisedDocuments:
    """Cut documents into sentences, and sentences into tokens.

    A sentence without tokens is left out; a sentence of more than half an example's tokens is cut into pieces.
    """
    most = _most_tokens(vocabulary, options)
    sentences: List[str] = []
    counts: List[int] = []  # sentences of each document
    for document in documents:
        before = len(sentences)
        for line in document.lines:
            sentences.extend(split_sentences(line))
        counts.append(len(sentences) - before)

    ids, lengths, spelling = vocabulary.encode_and_count(sentences)
    pieces = (lengths > 0).astype(np.int64)
    ends = np.cumsum(lengths)
    all_ends = [ends[pieces > 0]]
    long = np.flatnonzero(lengths > most // 2)
    # In blocks, as in `encode_and_count`.
    for block in np.split(long, range(_LONG_SENTENCES, len(long), _LONG_SENTENCES)):
        encodings = vocabulary.cut([sentences[number] for number in block])
        for number, encoding in zip(block, encodings):
            inner_ends = _inner_ends(encoding, max(1, most // 4))
            pieces[number] += len(inner_ends)
            all_ends.append(ends[number] - lengths[number] + inner_ends)
    sentence_ends = np.sort(np.concatenate(all_ends))
    document_of_sentence = np.repeat(np.arange(len(counts)), counts)
    kept = np.bincount(document_of_sentence, weights=pieces, minlength=len(counts))
    document_ends = np.cumsum(kept[kept > 0].astype(np.int64))
    return _TokenisedDocuments(ids, sentence_ends.tolist(), document_ends.tolist(), spelling)


def _most_tokens(vocabulary: AnyVocabulary, options: ExampleOptions) -> int:
    """Return the most tokens of A and B together. ValueError if they have no room."""
    special = len(vocabulary.pair.tokens)
    most = options.max_sequence_length - special
    if most < 2:
        raise ValueError(
            f"max_sequence_length is {options.max_sequence_length}; the tokenizer adds {special} special tokens to a "
            f"pair of texts, so it must be at least {special + 2}"
        )
    return most


def _inner_ends(encoding: Any, length: int) -> np.ndarray:
    """Return the ends of all pieces of a sentence but the last, int64.

    The pieces are about `length` tokens long, less than twice that, and end between words unless a word is longer.
    """
    words = np.array(encoding.word_ids)
    number = -(-len(words) // length)
    even_ends = np.arange(1, number) * len(words) // number
    word_starts = np.append(0, np.flatnonzero(words[1:] != words[:-1]) + 1)
    last_starts = word_starts[np.searchsorted(word_starts, even_ends, side="right") - 1]
    begins_in_piece = last_starts > np.append(0, even_ends)[:-1]
    return np.where(begins_in_piece, last_starts, even_ends)


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

    most: tokens of A and B together. All A and all B of label 0 together are the text, each token once.
    """
    starts = [0] + documents.sentence_ends
    document_starts = [0] + documents.document_ends
    others = _OtherDocuments.of(documents, options.draw_documents)
    pairs: List[Tuple[int, int, int, int, int]] = []
    for number, last in enumerate(documents.document_ends):
        target = most
        if rng.random() < options.short_sequence_probability:
            target = rng.randint(2, most)
        first = document_starts[number]
        begin = starts[first]
        while first < last:
            # The text from `begin`, in sentence `first`, to the end of the sentence that reaches the target.
            chunk_end = min(bisect_left(starts, begin + target, first + 1), last)
            second = first + 1
            if chunk_end > second:
                second = first + rng.randint(1, chunk_end - first - 1)
            cut = starts[second]
            length = cut - begin
            if chunk_end == first + 1 or rng.random() < 0.5:
                sentence, last_of_other = others.draw(number, rng)
                other_begin = starts[sentence]
                end = bisect_left(starts, other_begin + target - length, sentence + 1)
                other_length = starts[min(end, last_of_other)] - other_begin
                pairs.append((begin, length, other_begin, min(other_length, most - length), 1))
                first = second
                begin = cut
                continue
            end = min(starts[chunk_end], begin + most)
            pairs.append((begin, length, cut, end - cut, 0))
            # What does not fit begins the next example.
            first = chunk_end if end == starts[chunk_end] else chunk_end - 1
            begin = end
    return np.array(pairs, dtype=np.int64).reshape(-1, 5)


class _OtherDocuments(NamedTuple):
    """The documents from which random second segments are drawn."""

    sentences: List[int]  # the first of each document, and the number of all
    tickets: List[int]  # the first of each document, and the number of all; each is drawn alike

    @classmethod
    def of(cls, documents: _TokenisedDocuments, draw_documents: str) -> _OtherDocuments:
        """Return all documents of a part; a document has a ticket for each token, or one if drawn uniformly."""
        sentences = [0] + documents.document_ends
        if draw_documents == DRAW_UNIFORMLY:
            return cls(sentences, list(range(len(sentences))))
        ends = [0] + documents.sentence_ends
        return cls(sentences, [ends[sentence] for sentence in sentences])

    def draw(self, number: int, rng: random.Random) -> Tuple[int, int]:
        """Draw a sentence of another document than `number`; return it, and the end of its document.

        Drawn by their tokens, long and short documents keep their proportions. A single document is paired with itself.
        """
        own_begin, own_end = self.tickets[number : number + 2]
        of_others = self.tickets[-1] - (own_end - own_begin)
        other = number
        if of_others:
            ticket = rng.randrange(of_others)
            if ticket >= own_begin:
                ticket += own_end - own_begin
            other = bisect_right(self.tickets, ticket) - 1
        end = self.sentences[other + 1]
        return rng.randint(self.sentences[other], end - 1), end


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
    # Without whole words every window begins at the first word: one number less to draw.
    shifts = rng.random(len(lengths)) if options.whole_word_masking else np.zeros(len(lengths))
    bounds = np.append(0, np.cumsum(lengths))
    rows = np.searchsorted(bounds, np.arange(_BLOCK, len(ids), _BLOCK))
    tokens = bounds[rows]
    rows_of_blocks = [np.split(values, rows) for values in (lengths, shifts)]
    columns_of_blocks = [np.split(values, tokens) for values in (keys, is_special, inside)]
    blocks = zip([0, *tokens], *rows_of_blocks, *columns_of_blocks)
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
    shifts: np.ndarray,
    keys: np.ndarray,
    is_special: np.ndarray,
    inside: np.ndarray,
) -> np.ndarray:
    """Return the places of the tokens to mask in some sequences, ascending.

    shifts: as in `_in_window`. keys: a number of each token, random within its sequence and ascending between
    sequences. is_special, inside: as in `_mask`, bool [tokens].
    """
    limit = options.max_predictions_per_sequence
    wanted = masked_count(lengths, limit, options.masked_lm_probability)
    rows = np.repeat(np.arange(len(lengths)), lengths)
    most = np.minimum(wanted, np.bincount(rows[~is_special], minlength=len(lengths)))

    # Tokens of each word: up to the next token that does not continue it.
    begin = np.flatnonzero(~inside)
    all_sizes = np.diff(np.append(begin, len(keys)))
    is_word = ~is_special[begin]
    first = begin[is_word]
    sizes = all_sizes[is_word]

    order = np.argsort(keys[first], kind="stable")
    words = order[_in_window(sizes[order], rows[first[order]], most, shifts, limit)]
    return np.sort(ragged_index(first[words], sizes[words]))


def _in_window(
    sizes: np.ndarray, rows: np.ndarray, most: np.ndarray, shifts: np.ndarray, limit: int
) -> np.ndarray:
    """Return True for the words to mask, bool [words].

    The words of a row, in random order, lie on a circle of the row's tokens. A word is masked if its first token is in
    a window of `most` tokens: with the same probability for words of any number of pieces. The last word may reach
    beyond the window; if more than `limit` tokens would be masked, the first words of the window are left out.

    Args:
        sizes: tokens of each word, int64 [words].
        rows: the row of each word, ascending, int64 [words].
        most: tokens of each row's window, at most the row's, int64 [rows].
        shifts: where each row's window begins, as a fraction of its tokens, [rows].
        limit: the most masked tokens of a row.
    """
    tokens = np.bincount(rows, weights=sizes, minlength=len(most)).astype(np.int64)
    window_starts = np.cumsum(tokens) - tokens + (shifts * tokens).astype(np.int64)
    places = np.cumsum(sizes) - sizes - window_starts[rows]
    places = np.where(places < 0, places + tokens[rows], places)
    in_window = places < most[rows]
    if sizes.max(initial=1) > 1:
        ends = np.zeros_like(tokens)
        np.maximum.at(ends, rows[in_window], (places + sizes)[in_window])
        in_window &= places >= (ends - limit)[rows]
    return in_window


def make_examples(
    documents: _TokenisedDocuments,
    vocabulary: AnyVocabulary,
    options: ExampleOptions,
    part: int,
) -> Tuple[Sequences, int]:
    """Make the examples of these documents: duplication_factor passes, each with new segments and a new masking.

    Args:
        documents: a block of the corpus.
        vocabulary: the vocabulary that the documents were tokenised with.
        options: the options of the examples.
        part: the number of the block in the corpus; with the seed it decides every random choice.

    Returns:
        The examples, and the number of tokens of the documents that are in at least one of them.

    Raises:
        ValueError: an example has no room for two tokens.
    """
    most = _most_tokens(vocabulary, options)
    passes = []
    # Segments that begin at each token, less those that end before it.
    edges = np.zeros(len(documents.ids) + 1, np.int64)
    for repetition in range(options.duplication_factor):
        rng = np.random.default_rng([options.seed, part, repetition])
        draws = random.Random(f"{options.seed} {part} {repetition}")
        pairs = _segment_pairs(documents, most, options, draws)
        starts = pairs[:, [0, 2]]
        np.add.at(edges, starts, 1)
        np.add.at(edges, starts + pairs[:, [1, 3]], -1)
        passes.append(_with_masks(documents, pairs, vocabulary, options, rng))
    return Sequences.concatenate(passes), int(np.count_nonzero(np.cumsum(edges)))


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
        # At the beginning of a part, the rest of a word that another example begins is a word of its own.
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
