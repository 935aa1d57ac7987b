"""Vocabularies, read and trained; and a tokenizer.json in their place, alone and in a build."""

import json
import pickle
import re
import subprocess
import sys

import numpy as np
import pytest

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
    load_vocabulary,
    train_vocabulary,
)
from tests.pack_data.text_corpus import examples_of, write_corpus
from tests.refusals import refused

pytestmark = pytest.mark.usefixtures("small_parts")

TEXTS = ["The packer packs packed packs.", "A packing of packs: unpacked, repacked!", "Ünïcode and 数字 too."] * 5
ROBERTA = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")


def byte_level(special=ROBERTA, size=300):
    """A byte-level BPE, as RoBERTa and GPT-2 have."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(special),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.enable_truncation(4)  # of the file, and not meant for packing
    tokenizer.enable_padding(length=8)
    return tokenizer.to_str().encode()


def wordpiece():
    """BERT's own, with one word that has pieces."""
    from tokenizers import BertWordPieceTokenizer

    vocabulary = {token: number for number, token in enumerate((*SPECIAL_TOKENS, "un", "##pack", "##ed", "a"))}
    return BertWordPieceTokenizer(vocabulary).to_str().encode()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def roberta(tmp_path):
    path = tmp_path / "given.json"
    path.write_bytes(byte_level())
    return path


def build_with(corpus, out, tokenizer, **options):
    return build(
        BuildOptions(
            out,
            corpus=corpus,
            tokenizer=tokenizer,
            max_sequence_length=64,
            packer="spfhp",
            duplication_factor=1,
            workers=1,
            **options,
        )
    )


def test_special_tokens_are_those_of_the_file():
    tokenizer = TokenizerFile(byte_level())
    assert tokenizer.special == (0, 2, 4) and len(tokenizer) == 300
    assert TokenizerFile(wordpiece()).special == Vocabulary((*SPECIAL_TOKENS, "a")).special == (2, 3, 4)


def test_text_becomes_whole_ids_without_special_tokens_truncation_or_padding():
    ids, lengths = TokenizerFile(byte_level()).encode([*TEXTS, ""])
    assert lengths.sum() == len(ids) and lengths[-1] == 0 and lengths[0] > 4
    assert ids.min() > 4
    known, same = TokenizerFile(wordpiece()), Vocabulary((*SPECIAL_TOKENS, "un", "##pack", "##ed", "a"))
    for ours, theirs in zip(known.encode(["A unpacked zebra"]), same.encode(["A unpacked zebra"])):
        assert ours.tolist() == theirs.tolist()
    assert known.continues.tolist() == same.continues.tolist()


def test_a_text_forges_no_special_token():
    """The spelling of a special token in a text is cut like other words.

    A tokenizer.json does so too, though Hugging Face takes it as one token from the same file, and another process.
    """
    from tokenizers import BertWordPieceTokenizer
    from tokenizers import Tokenizer as Theirs

    plain, forged = Vocabulary((*SPECIAL_TOKENS, "a", "[", "]", "mask", "sep")), "a [MASK] [SEP]a"
    content = BertWordPieceTokenizer(plain.ids).to_str()
    assert Theirs.from_str(content).encode(forged, add_special_tokens=False).tokens == "a [MASK] [SEP] a".split()
    known = TokenizerFile(content.encode())
    pieces = [plain.ids[piece] for piece in "a [ mask ] [ sep ] a".split()]
    for each in (plain, known, pickle.loads(pickle.dumps(known))):
        assert each.encode([forged])[0].tolist() == pieces
        (found,) = each.cut([forged])
        assert found.offsets == [(0, 1), (2, 3), (3, 7), (7, 8), (9, 10), (10, 13), (13, 14), (14, 15)]
    bytes_of_text, _ = TokenizerFile(byte_level()).encode(["".join(ROBERTA)])
    assert len(bytes_of_text) > len(ROBERTA) and bytes_of_text.min() >= len(ROBERTA)


def without(content, name):
    tree = json.loads(content)
    del tree[name]
    return json.dumps(tree).encode()


@pytest.mark.parametrize(
    "content, said",
    [
        (b"no json", "not JSON"),
        (b"[1]", "must hold an object"),
        (b'{"version": "1.0"}', "no tokenizer"),
        (without(byte_level(), "model"), "no tokenizer"),
        (byte_level(special=("<|endoftext|>",)), "no special tokens"),
    ],
)
def test_what_is_no_tokenizer_for_bert_is_one_line(tmp_path, content, said):
    path = tmp_path / "given.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=said) as caught:
        load_tokenizer(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_build_keeps_the_tokenizer_and_verify_and_rebuilding_know_it(corpus, tmp_path, roberta):
    out = tmp_path / "data"
    with build_with(corpus, out, roberta) as store:
        manifest = store.manifest
        tokenizer = load_either(out / TOKENIZER)
        assert (out / TOKENIZER).read_bytes() == roberta.read_bytes() and not (out / "vocab.txt").exists()
        assert (manifest.vocabulary_size, manifest.vocabulary_sha256) == (len(tokenizer), tokenizer.sha256)
        batch = store.batch(np.arange(len(store)))
        first = batch["input_ids"][np.arange(len(store))[:, None], batch["next_sentence_positions"]]
        assert (first[batch["next_sentence_weights"] == 1] == tokenizer.special.first).all()
        assert (batch["input_ids"] == tokenizer.special.mask).any()
    assert verify(out).manifest == manifest
    assert build_with(corpus, out, roberta).manifest == manifest
    other = tmp_path / "other.json"
    other.write_bytes(byte_level(size=320))
    with pytest.raises(ValueError, match="vocabulary, tokenizer or recipe"):
        build_with(corpus, out, other)
    (out / TOKENIZER).write_bytes(other.read_bytes())
    with pytest.raises(ValueError):
        verify(out)


@pytest.mark.parametrize(
    "options, said",
    [
        ({"vocabulary": "vocab.txt"}, "--tokenizer and --vocabulary"),
        ({"lower_case": False}, "--tokenizer and --keep-case"),
        ({"synthetic": "squad_1_1_384"}, "--synthetic has no text"),
    ],
)
def test_options_that_contradict_a_tokenizer_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        BuildOptions("data", tokenizer="tokenizer.json", **options)


def test_whole_words_need_a_tokenizer_that_marks_them(corpus, tmp_path, roberta):
    with pytest.raises(ValueError, match="whole words cannot be masked"):
        build_with(corpus, tmp_path / "data", roberta, whole_word_masking=True)


# ---- special tokens -------------------------------------------------------------------------------------------------

# The vocabulary of all-mpnet-base-v2's kind: RoBERTa's special tokens beside BERT's.
BOTH = "<s> <pad> </s> <unk> [PAD] [UNK] [CLS] [SEP] [MASK] a b <mask>".split()
A, B = BOTH.index("a"), BOTH.index("b")


def word_tokenizer(single=None, pair="$A $B:1", tokens=BOTH, post_processor=None):
    """A tokenizer.json of whole words, with a post-processor of these templates."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    numbers = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if single:
        special = [(token, numbers[token]) for token in BOTH if token in f"{single} {pair}" and len(token) > 1]
        post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=special)
    if post_processor:
        tokenizer.post_processor = post_processor
    return tokenizer.to_str().encode()


def roberta_processing(separator=2, first=0):
    from tokenizers import processors

    return processors.RobertaProcessing(("</s>", separator), ("<s>", first))


def bert_processing():
    from tokenizers import processors

    return processors.BertProcessing(("[SEP]", 7), ("[CLS]", 6))


ONE_FAMILY = [token for token in BOTH if not token.startswith("<")]


@pytest.mark.parametrize(
    "content, single, pair, segments, mask, padding",
    [
        # all-mpnet-base-v2
        (lambda: word_tokenizer(post_processor=roberta_processing()), [0, A, 2], [0, A, 2, 2, B, 2], [0] * 6, 11, 1),
        (lambda: word_tokenizer(post_processor=bert_processing()), [6, A, 7], [6, A, 7, B, 7], [0, 0, 0, 1, 1], 8, 4),
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
    from tokenizers import Tokenizer as Theirs

    tokenizer = TokenizerFile(content())
    a, b = (tokenizer.encode([text])[0] for text in "ab")
    assert [part.tolist() for part in tokenizer.single.joined([a])] == [single, [0] * len(single)]
    assert [part.tolist() for part in tokenizer.pair.joined([a, b])] == [pair, segments]
    assert (tokenizer.special.mask, tokenizer.padding) == (mask, padding)
    exported = Theirs.from_str(tokenizer.as_packed().decode())
    assert exported.encode("a").ids == single
    assert (exported.encode("a", "b").ids, exported.encode("a", "b").type_ids) == (pair, segments)
    assert TokenizerFile(tokenizer.as_packed()).pair == tokenizer.pair

    texts = [Document("", ["a a a", "b b", "a"]), Document("", ["b b b b", "a b"])]
    made = examples_of(texts, tokenizer, ExampleOptions(24, 1, duplication_factor=20))
    examples = made.to_examples()
    assert len(examples) > 40
    for example in examples:
        ids = np.array(example.input_ids)
        ids[list(example.masked_lm_positions)] = example.masked_lm_ids
        plain = ids[np.isin(ids, [a, b])]
        # Every cut of its text gives the special tokens of the file, and one of them this example.
        joined = [tokenizer.pair.joined([plain[:cut], plain[cut:]]) for cut in range(1, len(plain))]
        assert [ids.tolist(), example.first_segment_length] in [
            [those.tolist(), int((segments == 0).sum())] for those, segments in joined
        ]


STATED = "special_tokens_map.json"


@pytest.mark.parametrize(
    "content, beside, names",
    [
        (lambda: word_tokenizer(), {}, ["cls_token", "[CLS] or <s>", STATED]),
        (lambda: word_tokenizer("[CLS] $A </s>"), {}, ["mask_token", "[MASK] or <mask>"]),
        (lambda: word_tokenizer("$A", "$B [SEP] $A"), {}, ["post_processor", "type_ids"]),
        (lambda: word_tokenizer("$A [SEP]:2"), {}, ["post_processor", "type_ids"]),
        (
            lambda: word_tokenizer("$A [SEP]").replace(b'"id":"[SEP]","type', b'"id":"[XXX]","type'),
            {},
            ["post_processor"],
        ),
        (lambda: word_tokenizer(post_processor=roberta_processing(7, 0)), {}, ["post_processor", "</s>", "vocabulary"]),
        (lambda: word_tokenizer(post_processor=roberta_processing(2, 99)), {}, ["post_processor", "<s>", "vocabulary"]),
        (
            lambda: word_tokenizer("<s> $A </s>"),
            {STATED: {"cls_token": "[CLS]"}},
            [STATED, "cls_token", "tokenizer.json"],
        ),
        (
            lambda: word_tokenizer("$A </s> <s>"),
            {STATED: {"cls_token": "<s>"}},
            [STATED, "cls_token", "tokenizer.json"],
        ),
        (lambda: word_tokenizer("$A </s>"), {STATED: {"sep_token": {"content": "[SEP]"}}}, [STATED, "sep_token"]),
        (lambda: word_tokenizer("<s> $A </s>"), {STATED: {"pad_token": "<none>"}}, [STATED, "pad_token", "<none>"]),
        (
            lambda: word_tokenizer("<s> $A </s>"),
            {STATED: {"mask_token": "<mask>"}, "tokenizer_config.json": {"mask_token": "[MASK]"}},
            ["tokenizer_config.json", "mask_token", STATED],
        ),
    ],
)
def test_unclear_and_contradictory_special_tokens_are_refused(tmp_path, content, beside, names):
    (tmp_path / TOKENIZER).write_bytes(content())
    for name, stated in beside.items():
        (tmp_path / name).write_text(json.dumps(stated))
    with refused(str(tmp_path), *map(re.escape, names)):
        load_tokenizer(tmp_path / TOKENIZER)


def test_files_beside_a_tokenizer_name_its_tokens_and_go_with_it_into_the_data_set(corpus, tmp_path):
    """Without a post-processor, and for a mask of another name, nothing else can."""
    (tmp_path / "given").mkdir()
    tokens = [*BOTH, "<|hidden|>"]
    (tmp_path / "given" / TOKENIZER).write_bytes(word_tokenizer(tokens=tokens))
    stated = {"cls_token": "<s>", "sep_token": {"content": "</s>"}, "mask_token": "<|hidden|>", "bos_token": "a"}
    (tmp_path / "given" / STATED).write_text(json.dumps(stated))
    (tmp_path / "given" / "tokenizer_config.json").write_text(json.dumps({"pad_token": None, "cls_token": "<s>"}))
    for option in ({}, {"held_out": 0.4}):
        out = tmp_path / f"data{len(option)}"
        with build_with(corpus, out, tmp_path / "given" / TOKENIZER, **option) as store:
            batch = store.batch(np.arange(len(store)))
        first = np.take_along_axis(batch["input_ids"], batch["next_sentence_positions"], axis=1)
        assert (first[batch["next_sentence_weights"] == 1] == 0).all()
        assert (batch["input_ids"] == tokens.index("<|hidden|>")).any()
        assert load_tokenizer(out / TOKENIZER).special == (0, 2, tokens.index("<|hidden|>"))
        verify(out)
    # Files of the user in place of those are not overwritten, unless they are the ones given.
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / STATED).write_text("{}")
    with refused(STATED, tmp_path / "mine", unchanged=tmp_path / "mine"):
        build_with(corpus, tmp_path / "mine", tmp_path / "given" / TOKENIZER)
    with build_with(corpus, tmp_path / "given", tmp_path / "given" / TOKENIZER):
        assert json.loads((tmp_path / "given" / STATED).read_text()) == stated


def test_a_row_that_holds_no_pair_with_its_special_tokens_is_refused(corpus, tmp_path):
    (tmp_path / TOKENIZER).write_bytes(word_tokenizer(post_processor=roberta_processing()))
    options = BuildOptions(tmp_path / "data", corpus=corpus, tokenizer=tmp_path / TOKENIZER, max_sequence_length=5)
    with refused("max_sequence_length is 5", "4 special tokens", "at least 6"):
        build(options)


# ---- WordPiece ------------------------------------------------------------------------------------------------------

DOCUMENTS = [
    Document("a", ["The packer packs packed packs.", "A packing of packs: unpacked, repacked!"] * 5),
    Document("b", ["Ünïcode and 数字 too.", "Numbers 12 and 345."] * 3),
]


def test_training_is_the_same_in_every_process():
    script = (
        "from pack_data.text.vocabulary import train_vocabulary; from pack_data.text.corpus import Document\n"
        "words = ['abc'[i % 3] * (i % 5 + 1) + 'defgh'[i % 5] + 'xyz'[i % 3] for i in range(400)]\n"
        "print(train_vocabulary([Document('', [' '.join(words)])], 60).sha256)"
    )
    runs = {
        subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
        for _ in range(2)
    }
    assert len(runs) == 1


def test_a_trained_vocabulary_knows_its_text_and_keeps_its_size():
    vocabulary = train_vocabulary(DOCUMENTS, 120)
    assert vocabulary.tokens[:5] == SPECIAL_TOKENS and len(vocabulary) <= 120
    ids, lengths = vocabulary.encode([line for document in DOCUMENTS for line in document.lines])
    assert vocabulary.ids["[UNK]"] not in ids and lengths.sum() == len(ids)
    assert "pack" in vocabulary.tokens or "packs" in vocabulary.tokens


def test_characters_beyond_the_alphabet_become_blanks(monkeypatch):
    monkeypatch.setattr(vocabulary_module, "_USUAL_ALPHABET", 3)
    monkeypatch.setattr(vocabulary_module, "_COVERAGE", 0.9)
    vocabulary = train_vocabulary([Document("", ["aaa bbb\tabc aab " * 9 + "cba zab azb"])], 200)
    letters = set("".join(vocabulary.tokens[len(SPECIAL_TOKENS) :])) - {"#"}
    assert letters == set("abc")
    assert any(len(token.replace("##", "")) > 1 for token in vocabulary.tokens[len(SPECIAL_TOKENS) :])


def test_words_come_back():
    vocabulary = Vocabulary((*SPECIAL_TOKENS, "un", "##pack", "##ed", "a"))
    ids, lengths = vocabulary.encode(["A unpacked", "", "zebra á"])
    assert [vocabulary.tokens[i] for i in ids] == ["a", "un", "##pack", "##ed", "[UNK]", "a"] and lengths.tolist() == [
        4,
        0,
        2,
    ]


@pytest.mark.parametrize(
    "content, said",
    [(b"a\nb\n", "lacks \\[PAD\\], \\[UNK\\]"), (b"[PAD]\na\na\n", "'a' twice"), (b"\xff\xfe", "not UTF-8")],
)
def test_a_vocabulary_that_cannot_be(tmp_path, content, said):
    (tmp_path / "vocab.txt").write_bytes(content)
    with pytest.raises(ValueError, match=said):
        load_vocabulary(tmp_path / "vocab.txt")


def test_too_small_or_no_text():
    with pytest.raises(ValueError, match="no room"):
        train_vocabulary(DOCUMENTS, 20)
    with pytest.raises(ValueError, match="no text"):
        train_vocabulary([], 100)


_LATIN = "The quick brown fox jumps over the lazy dog, café and naïve déjà vu; Ελλάδα ἄειδε, Ёлка й."


@pytest.mark.parametrize(
    "text, unknown, removed",
    [
        (_LATIN, 0, 0),  # accents of Latin, Greek and Cyrillic are accents
        ("abc \u4e00\u4e01 abc", 2, 0),
        ("abc " + "b" * 101 + " abc", 101, 0),  # one token, 94 % of the characters
        ("\u0915\u0941 \u0e17\u0e35\u0e48", 0, 3),  # Devanagari, Thai
        ("\u304b \u304c \ufe0f", 0, 1),  # Japanese with a voiced sound mark, a variation selector
    ],
)
def test_unknown_and_removed_text_is_counted_in_characters(text, unknown, removed):
    known = Vocabulary((*SPECIAL_TOKENS, *sorted({*"abc.,;", *"\u0915\u0e17", "\u304b"}), "##a", "##b", "##c"))
    if text is _LATIN:
        known = train_vocabulary([Document("", [text])], 200)
    spelling = known.spelling([text, ""], known.cut([text, ""]))
    assert (spelling.characters, spelling.unknown, spelling.removed) == (sum(map(len, text.split())), unknown, removed)
    assert len(list(spelling.remarks())) == (unknown > 0.05 * spelling.characters) + (removed > 0)
    cased = Vocabulary(known.tokens, lower_case=False)
    assert cased.spelling([text], cased.cut([text])).removed == 0


def _zipf_text(characters, rng):
    weights = 1 / np.arange(3, len(characters) + 3)
    drawn = rng.choice(characters, 200_000, p=weights / weights.sum())
    return ["".join(line) for line in drawn.reshape(-1, 200)]


@pytest.mark.parametrize("first, size", [(0x4E00, 30_000), (0x4E00, 3000), (0x1200, 700)], ids=["", "tight", "letters"])
def test_the_alphabet_of_a_trained_vocabulary_covers_the_text_within_the_size_asked_for(first, size):
    """2,005 of 30,000 tokens were made for Chinese, and a tenth of the text was [UNK]."""
    kinds = 2500 if first == 0x4E00 else 300
    text = _zipf_text([*map(chr, range(first, first + kinds))], np.random.default_rng(0))
    vocabulary = train_vocabulary([Document("", text)], size)
    spelling = vocabulary.spelling(text, vocabulary.cut(text))
    assert len(vocabulary) <= size and spelling.unknown <= 0.0005 * spelling.characters


def test_long_words_and_zero_width_spaces_are_cut_in_a_trained_vocabulary_alone():
    words = ["ab" * 130 + " x\u200by", "x y [SEP]"]
    trained = train_vocabulary([Document("", ["ab abab ba x y [SEP] " * 20])], 60)
    cut = trained.cut(words)
    assert trained.spelling(words, cut).unknown == 0
    assert [words[0][begin:end] for begin, end in cut[0].offsets][-2:] == ["x", "y"]
    assert trained.special.separator not in cut[1].ids
    # A published vocabulary has its tokens in another order, and tokenises as BERT does.
    published = Vocabulary((*trained.tokens[5:], *SPECIAL_TOKENS))
    assert published.spelling(words, published.cut(words)).unknown == 260
