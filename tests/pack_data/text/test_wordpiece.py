import subprocess
import sys

import pytest

from pack_data.text.corpus import Document
from pack_data.text.wordpiece import SPECIAL_TOKENS, Vocabulary, load_vocabulary, train_vocabulary

TEXTS = [
    Document("a", ["The packer packs packed packs.", "A packing of packs: unpacked, repacked!"] * 5),
    Document("b", ["Ünïcode and 数字 too.", "Numbers 12 and 345."] * 3),
]


def test_training_is_the_same_in_every_process():
    script = (
        "from pack_data.text.wordpiece import train_vocabulary; from pack_data.text.corpus import Document\n"
        "words = ['abc'[i % 3] * (i % 5 + 1) + 'defgh'[i % 5] + 'xyz'[i % 3] for i in range(400)]\n"
        "print(train_vocabulary([Document('', [' '.join(words)])], 60).sha256)"
    )
    runs = {
        subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
        for _ in range(2)
    }
    assert len(runs) == 1


def test_a_trained_vocabulary_knows_its_text_and_keeps_its_size():
    vocabulary = train_vocabulary(TEXTS, 120)
    assert vocabulary.tokens[:5] == SPECIAL_TOKENS and len(vocabulary) <= 120
    ids, lengths = vocabulary.encode([line for document in TEXTS for line in document.lines])
    assert vocabulary.ids["[UNK]"] not in ids and lengths.sum() == len(ids)
    assert "pack" in vocabulary.tokens or "packs" in vocabulary.tokens


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
        train_vocabulary(TEXTS, 20)
    with pytest.raises(ValueError, match="no text"):
        train_vocabulary([], 100)
