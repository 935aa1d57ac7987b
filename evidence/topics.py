"""A synthetic corpus of topics, on which contamination between sequences costs a small model something within minutes.

A document has one of 20 topics, and each of its words is one of the 10 made-up words of the topic.  So the words around
a masked word identify it, and they show whether the second half of a sequence belongs to the first; a model that also
sees its neighbours in the pack is misled.
"""

from __future__ import annotations

from typing import Iterator, List

import numpy as np

TOPICS, WORDS = 20, 10
_CONSONANTS, _VOWELS = "bdfgklmnprst", "aeiou"


def _syllable(random: np.random.Generator) -> str:
    return str(random.choice(list(_CONSONANTS))) + str(random.choice(list(_VOWELS)))


def topic_words(random: np.random.Generator) -> np.ndarray:
    """Return the words of the topics, all different, [TOPICS, WORDS]: two or three syllables each."""
    words: List[str] = []
    while len(words) < TOPICS * WORDS:
        syllables = [_syllable(random) for _ in range(3)]
        most = random.integers(2, 4)
        word = "".join(syllables[:most])
        if word not in words:
            words.append(word)
    return np.array(words).reshape(TOPICS, WORDS)


def topic_documents(documents: int, *, seed: int = 0) -> Iterator[str]:
    """Iterate over documents: 4 to 14 sentences of 2 to 6 words of one topic, a sentence per line."""
    random = np.random.default_rng(seed)
    words = topic_words(random)
    for _ in range(documents):
        of_topic = words[random.integers(TOPICS)]
        sentences = random.integers(4, 15)
        lengths = random.integers(2, 7, size=sentences)
        yield "\n".join(" ".join(random.choice(of_topic, length)) for length in lengths)
