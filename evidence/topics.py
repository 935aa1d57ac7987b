"""A synthetic corpus of topics, which shows the cost of contamination between sequences in minutes with a small model.

A document has one of 20 topics, and each of its words is one of the 10 invented words of the topic.  So the words
around a masked word identify it, and they show if the second half of a sequence belongs to the first; a model that also
attends to other sequences of the pack is misled.
"""

from __future__ import annotations

from typing import Iterator, List

import numpy as np

TOPICS = 20
WORDS = 10  # of a topic
_CONSONANTS = list("bdfgklmnprst")
_VOWELS = list("aeiou")


def topic_words(random: np.random.Generator) -> np.ndarray:
    """Return the words of the topics, all different, [TOPICS, WORDS]: two or three syllables each."""
    words: List[str] = []
    while len(words) < TOPICS * WORDS:
        syllables = [random.choice(_CONSONANTS) + random.choice(_VOWELS) for _ in range(3)]
        number = random.integers(2, 4)
        word = "".join(syllables[:number])
        if word not in words:
            words.append(word)
    return np.array(words).reshape(TOPICS, WORDS)


def topic_documents(documents: int, *, seed: int = 0) -> Iterator[str]:
    """Iterate over documents: 4 to 14 sentences of 2 to 6 words of one topic, a sentence per line."""
    random = np.random.default_rng(seed)
    words = topic_words(random)
    for _ in range(documents):
        topic = words[random.integers(TOPICS)]
        number = random.integers(4, 15)
        lengths = random.integers(2, 7, size=number)
        sentences = [" ".join(random.choice(topic, length)) for length in lengths]
        yield "\n".join(sentences)
