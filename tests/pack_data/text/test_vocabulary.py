"""Vocabularies, read and trained; and a tokenizer.json in their place, alone and in a build."""

import json
import pickle
import subprocess
import sys

import numpy as np
import pytest
from tokenizers import BertWordPieceTokenizer
from tokenizers import Tokenizer as Theirs

from pack_data.building.command import BuildOptions, build
from pack_data.building.verify import verify
from pack_data.text import vocabulary as vocabulary_module
from pack_data.text.corpus import Document
from pack_data.text.examples import ExampleOptions
from pack_data.text.vocabulary import (
    SPECIAL_TOKENS,
    TOKENIZER,
    TokenizerFile,
    Vocabulary,
    load_either,
    load_tokenizer,
    train_vocabulary,
)
from tests.pack_data.building.conftest import small_parts  # noqa: F401
from tests.pack_data.text.tokenizer_files import (
    BOTH,
    PIECES,
    ROBERTA,
    TEXTS,
    A,
    B,
    bert,
    byte_level,
    roberta,
    word_tokenizer,
    wordpiece,
)
from tests.pack_data.text_corpus import examples_of, write_corpus
from tests.refusals import refused

pytestmark = pytest.mark.usefixtures("small_parts")

STATED = "special_tokens_map.json"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"), 30)


def build_with(corpus, out, tokenizer, **options):
    small = dict(max_sequence_length=64, packer="spfhp", duplication_factor=1, workers=1)
    return build(BuildOptions(out, corpus=corpus, tokenizer=tokenizer, **small, **options))


# ---- tokenizer.json --------------------------------------------------------------------------------------------------


def test_text_becomes_whole_ids_without_special_tokens_truncation_or_padding():
    tokenizer = TokenizerFile(byte_level())
    assert tokenizer.special == (0, 2, 4)
    assert len(tokenizer) == 300
    ids, lengths = tokenizer.encode([*TEXTS, ""])
    assert lengths.sum() == len(ids)
    assert lengths[-1] == 0
    assert lengths[0] > 4
    assert ids.min() > 4


def test_a_wordpiece_file_and_its_vocabulary_cut_alike():
    file = TokenizerFile(wordpiece())
    vocabulary = Vocabulary(PIECES)
    assert file.special == vocabulary.special == (2, 3, 4)
    for known in (file, vocabulary):
        ids, lengths = known.encode(["A unpacked", "", "zebra á"])
        assert [PIECES[number] for number in ids] == ["a", "un", "##pack", "##ed", "[UNK]", "a"]
        assert lengths.tolist() == [4, 0, 2]
        assert known.continues.tolist() == [token.startswith("##") for token in PIECES]


def test_a_text_forges_no_special_token():
    """The spelling of a special token in a text is cut like other words.

    A tokenizer.json does so too, though Hugging Face takes it as one token from the same file, and another process.
    """
    plain = Vocabulary((*SPECIAL_TOKENS, "a", "[", "]", "mask", "sep"))
    forged = "a [MASK] [SEP]a"
    content = BertWordPieceTokenizer(plain.ids).to_str()
    assert Theirs.from_str(content).encode(forged, add_special_tokens=False).tokens == "a [MASK] [SEP] a".split()
    file = TokenizerFile(content.encode())
    pieces = [plain.ids[piece] for piece in "a [ mask ] [ sep ] a".split()]
    for known in (plain, file, pickle.loads(pickle.dumps(file))):
        assert known.encode([forged])[0].tolist() == pieces
        (encoding,) = known.cut([forged])
        assert encoding.offsets == [(0, 1), (2, 3), (3, 7), (7, 8), (9, 10), (10, 13), (13, 14), (14, 15)]
    bytes_of_text, _ = TokenizerFile(byte_level()).encode(["".join(ROBERTA)])
    assert len(bytes_of_text) > len(ROBERTA)
    assert bytes_of_text.min() >= len(ROBERTA)


def test_a_build_keeps_the_tokenizer_and_verify_and_rebuilding_compare_it(corpus, tmp_path):
    given = tmp_path / "given.json"
    given.write_bytes(byte_level())
    out = tmp_path / "data"
    with build_with(corpus, out, given) as store:
        manifest = store.manifest
        batch = store.batch(np.arange(len(store)))
    tokenizer = load_either(out / TOKENIZER)
    assert tokenizer.text == given.read_bytes()
    assert not (out / "vocab.txt").exists()
    assert (manifest.vocabulary_size, manifest.vocabulary_sha256) == (len(tokenizer), tokenizer.sha256)
    first = np.take_along_axis(batch["input_ids"], batch["next_sentence_positions"], axis=1)
    assert (first[batch["next_sentence_weights"] == 1] == tokenizer.special.first).all()
    assert (batch["input_ids"] == tokenizer.special.mask).any()
    assert verify(out).manifest == manifest == build_with(corpus, out, given).manifest
    other = tmp_path / "other.json"
    other.write_bytes(byte_level(size=320))
    with refused("vocabulary, tokenizer or recipe"):
        build_with(corpus, out, other)
    (out / TOKENIZER).write_bytes(other.read_bytes())
    with refused(TOKENIZER):
        verify(out)


ONE_FAMILY = [token for token in BOTH if not token.startswith("<")]


@pytest.mark.parametrize(
    "content, single, pair, segments, mask, padding",
    [
        (roberta, [0, A, 2], [0, A, 2, 2, B, 2], [0] * 6, 11, 1),  # all-mpnet-base-v2
        (bert, [6, A, 7], [6, A, 7, B, 7], [0, 0, 0, 1, 1], 8, 4),
        (lambda: word_tokenizer("$A [SEP]"), [A, 7], [A, 7, B, 7], [0, 0, 1, 1], 8, 4),
        (
            lambda: word_tokenizer("<s> $A </s> </s>", "<s> $A </s> </s> $B:1 </s>:1"),
            [0, A, 2, 2],
            [0, A, 2, 2, B, 2],
            [0, 0, 0, 0, 1, 1],
            11,
            1,
        ),
        (lambda: word_tokenizer("[CLS] $A", "[CLS] $A [CLS]:1 $B:1"), [6, A], [6, A, 6, B], [0, 0, 1, 1], 8, 4),
        (lambda: word_tokenizer(tokens=ONE_FAMILY), [2, 5, 3], [2, 5, 3, 6, 3], [0, 0, 0, 1, 1], 4, 0),
    ],
)
def test_special_tokens_are_those_that_the_post_processor_adds(content, single, pair, segments, mask, padding):
    """Texts, pairs, an exported file and the file itself agree, and so do the sequences of a build."""
    tokenizer = TokenizerFile(content())
    a, b = (tokenizer.encode([text])[0] for text in "ab")
    assert [part.tolist() for part in tokenizer.single.joined([a])] == [single, [0] * len(single)]
    assert [part.tolist() for part in tokenizer.pair.joined([a, b])] == [pair, segments]
    assert (tokenizer.special.mask, tokenizer.padding) == (mask, padding)
    exported = Theirs.from_str(tokenizer.as_packed().decode())
    encoding = exported.encode("a", "b")
    assert exported.encode("a").ids == single
    assert (encoding.ids, encoding.type_ids) == (pair, segments)
    assert TokenizerFile(tokenizer.as_packed()).pair == tokenizer.pair

    texts = [Document("", ["a a a", "b b", "a"]), Document("", ["b b b b", "a b"])]
    examples = examples_of(texts, tokenizer, ExampleOptions(24, 1, duplication_factor=20)).to_examples()
    assert len(examples) > 40
    for example in examples:
        ids = np.array(example.input_ids)
        ids[list(example.masked_lm_positions)] = example.masked_lm_ids
        plain = ids[np.isin(ids, [a, b])]
        # A cut of its text gives the special tokens of the file, and this example.
        possible = []
        for cut in range(1, len(plain)):
            joined, of_segments = tokenizer.pair.joined([plain[:cut], plain[cut:]])
            possible.append([joined.tolist(), int((of_segments == 0).sum())])
        assert [ids.tolist(), example.first_segment_length] in possible


def test_files_beside_a_tokenizer_name_its_tokens_and_go_with_it_into_the_data_set(corpus, tmp_path):
    """Without a post-processor, and for a mask of another name, nothing else can."""
    given = tmp_path / "given"
    given.mkdir()
    tokens = [*BOTH, "<|hidden|>"]
    (given / TOKENIZER).write_bytes(word_tokenizer(tokens=tokens))
    stated = {"cls_token": "<s>", "sep_token": {"content": "</s>"}, "mask_token": "<|hidden|>", "bos_token": "a"}
    (given / STATED).write_text(json.dumps(stated))
    (given / "tokenizer_config.json").write_text(json.dumps({"pad_token": None, "cls_token": "<s>"}))
    out = tmp_path / "data"
    with build_with(corpus, out, given / TOKENIZER, held_out=0.4) as store:
        batch = store.batch(np.arange(len(store)))
    first = np.take_along_axis(batch["input_ids"], batch["next_sentence_positions"], axis=1)
    assert (first[batch["next_sentence_weights"] == 1] == 0).all()
    assert (batch["input_ids"] == tokens.index("<|hidden|>")).any()
    assert load_tokenizer(out / TOKENIZER).special == (0, 2, tokens.index("<|hidden|>"))
    verify(out)
    # Files of the user in place of those are not overwritten, unless they are the ones given.
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / STATED).write_text("{}")
    with refused(STATED, mine, unchanged=mine):
        build_with(corpus, mine, given / TOKENIZER)
    with build_with(corpus, given, given / TOKENIZER):
        assert json.loads((given / STATED).read_text()) == stated


# ---- trained vocabularies --------------------------------------------------------------------------------------------


def test_training_is_the_same_in_every_process():
    script = (
        "from pack_data.text.vocabulary import train_vocabulary; from pack_data.text.corpus import Document\n"
        "words = ['abc'[i % 3] * (i % 5 + 1) + 'defgh'[i % 5] + 'xyz'[i % 3] for i in range(400)]\n"
        "print(train_vocabulary([Document('', [' '.join(words)])], 60).sha256)"
    )
    command = [sys.executable, "-c", script]
    runs = {subprocess.run(command, check=True, capture_output=True, text=True).stdout for _ in range(2)}
    assert len(runs) == 1


def test_a_trained_vocabulary_spells_its_text_and_keeps_its_size():
    texts = [Document("", TEXTS), Document("", ["Numbers 12 and 345."] * 3)]
    vocabulary = train_vocabulary(texts, 120)
    assert vocabulary.tokens[:5] == SPECIAL_TOKENS
    assert len(vocabulary) <= 120
    ids, lengths = vocabulary.encode([line for document in texts for line in document.lines])
    assert vocabulary.unknown not in ids
    assert lengths.sum() == len(ids)
    assert {"pack", "packs"}.intersection(vocabulary.tokens)


def test_characters_beyond_the_alphabet_become_blanks(monkeypatch):
    monkeypatch.setattr(vocabulary_module, "_USUAL_ALPHABET", 3)
    monkeypatch.setattr(vocabulary_module, "_COVERAGE", 0.9)
    vocabulary = train_vocabulary([Document("", ["aaa bbb\tabc aab " * 9 + "cba zab azb"])], 200)
    pieces = [token.replace("##", "") for token in vocabulary.tokens[len(SPECIAL_TOKENS) :]]
    assert set("".join(pieces)) == set("abc")
    assert max(map(len, pieces)) > 1


LATIN = "The quick brown fox jumps over the lazy dog, café and naïve déjà vu; Ελλάδα ἄειδε, Ёлка й."


@pytest.mark.parametrize(
    "text, unknown, removed",
    [
        (LATIN, 0, 0),  # accents of Latin, Greek and Cyrillic are accents
        ("abc \u4e00\u4e01 abc", 2, 0),
        ("abc " + "b" * 101 + " abc", 101, 0),  # one token, 94 % of the characters
        ("\u0915\u0941 \u0e17\u0e35\u0e48", 0, 3),  # Devanagari, Thai
        ("\u304b \u304c \ufe0f", 0, 1),  # Japanese with a voiced sound mark, a variation selector
        ("\u0915\u0941 " + "abc " * 99, 0, 1),  # 0.3 % of the characters, about which nothing is printed
    ],
)
def test_unknown_and_removed_text_is_counted_in_characters(text, unknown, removed):
    known = Vocabulary((*SPECIAL_TOKENS, *sorted({*"abc.,;", *"\u0915\u0e17", "\u304b"}), "##a", "##b", "##c"))
    if text is LATIN:
        known = train_vocabulary([Document("", [text])], 200)
    spelling = known.spelling([text, ""], known.cut([text, ""]))
    assert spelling == (sum(map(len, text.split())), unknown, removed)
    has_remarks = [unknown > 0.05 * spelling.characters, removed > 0.01 * spelling.characters]
    assert len(list(spelling.remarks())) == sum(has_remarks)
    cased = Vocabulary(known.tokens, lower_case=False)
    assert cased.spelling([text], cased.cut([text])).removed == 0


@pytest.mark.parametrize(
    "first, kinds, size",
    [(0x4E00, 2500, 30_000), (0x4E00, 2500, 3000), (0x1200, 300, 700)],
    ids=["", "tight", "letters"],
)
def test_the_alphabet_of_a_trained_vocabulary_covers_the_text_within_the_size_asked_for(first, kinds, size):
    """2,005 of 30,000 tokens were made for Chinese, and a tenth of the text was [UNK]."""
    weights = 1 / np.arange(3, kinds + 3)
    characters = [chr(first + kind) for kind in range(kinds)]
    drawn = np.random.default_rng(0).choice(characters, 60_000, p=weights / weights.sum())
    text = ["".join(line) for line in drawn.reshape(-1, 200)]
    vocabulary = train_vocabulary([Document("", text)], size)
    spelling = vocabulary.spelling(text, vocabulary.cut(text))
    assert len(vocabulary) <= size
    assert spelling.unknown <= 0.0005 * spelling.characters


def test_long_words_and_zero_width_spaces_are_cut_in_a_trained_vocabulary_alone():
    """The tokenizer.json of an export cuts the same."""
    words = ["ab" * 130 + " x\u200by", "x y [SEP]"]
    trained = train_vocabulary([Document("", ["ab abab ba x y [SEP] " * 20])], 60)
    cut = trained.cut(words)
    assert trained.spelling(words, cut).unknown == 0
    pieces = [words[0][begin:end] for begin, end in cut[0].offsets]
    assert pieces[-2:] == ["x", "y"]
    assert trained.special.separator not in cut[1].ids
    # A published vocabulary has its tokens in another order, and tokenises as BERT does.
    published = Vocabulary((*trained.tokens[5:], *SPECIAL_TOKENS))
    assert published.spelling(words, published.cut(words)).unknown == 260
    for known in (trained, published):
        exported = Theirs.from_str(known.as_packed().decode())
        ids, _ = known.encode(words[:1])
        with_special, _ = known.single.joined([ids])
        assert exported.encode(words[0]).ids == with_special.tolist()
