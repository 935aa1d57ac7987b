"""The options of BERT's pre-training examples."""

from __future__ import annotations

from dataclasses import dataclass

from pack_data.reading.declare import REQUIRED, check_fields, setting
from pack_data.text import DRAW_BY_TOKENS, DRAWS


@dataclass(frozen=True)
class ExampleOptions:
    """The options of the examples; with the text and the vocabulary they decide every example."""

    # [CLS] a [SEP] b [SEP]
    max_sequence_length: int = setting(REQUIRED, "slots in a pack", minimum=5)
    max_predictions_per_sequence: int = setting(REQUIRED, "masked tokens at most", minimum=1)
    duplication_factor: int = setting(
        5, "passes over the corpus, each with new masks", minimum=1, rare=True
    )
    short_sequence_probability: float = setting(
        0.1, "share of sequences that are cut short", minimum=0.0, maximum=1.0
    )
    masked_lm_probability: float = setting(
        0.15, "share of tokens masked", minimum=0.0, maximum=1.0, rare=True
    )
    seed: int = setting(0, "seed of segments, masks and packs", minimum=0, rare=True)
    whole_word_masking: bool = setting(
        False, "mask all pieces of a word or none (default: each piece for itself)", rare=True
    )
    draw_documents: str = setting(
        DRAW_BY_TOKENS,
        "random second segments: documents are drawn by their tokens, or all alike as in BERT's published code",
        choices=DRAWS,
        rare=True,
    )

    def __post_init__(self) -> None:
        check_fields(self)
