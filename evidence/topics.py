"""A corpus of made-up topics, on which contamination between sequences costs a small model something within minutes.

A document has one of 20 topics, and each of its words is one of the 10 made-up words of the topic. So a masked word is
told by the words around it, and so is whether the second half of a sequence belongs to the first; a model that
also sees its neighbours in the pack is misled.
"""

from __future__ import annotations

from typing import Iterator, List

import numpy as np

TOPICS, WORDS = 20, 10
_CONSONANTS, _VOWELS = "bdfgklmnprst", "aeiou"


def topic_words(random: np.random.Generator) -> np.ndarray:
    """The words of the topics, all different, [TOPICS, WORDS]: two or three syllables each."""
    words: List[str] = []
    while len(words) < TOPICS * WORDS:
        syllables = ["".join((random.choice(list(_CONSONANTS)), random.choice(list(_VOWELS)))) for _ in range(3)]
        word = "".join(syllables[: random.integers(2, 4)])
        if word not in words:
            words.append(word)
    return np.array(words).reshape(TOPICS, WORDS)


def topic_documents(documents: int, *, seed: int = 0) -> Iterator[str]:
    """So many documents: 4 to 14 sentences of 2 to 6 words of one topic, a sentence a line."""
    random = np.random.default_rng(seed)
    words = topic_words(random)
    for _ in range(documents):
        own = words[random.integers(TOPICS)]
        lengths = random.integers(2, 7, size=random.integers(4, 15))
        yield "\n".join(" ".join(random.choice(own, length)) for length in lengths)
