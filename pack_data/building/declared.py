"""The options of a build that the section `data` of a configuration has too: one declaration, one default."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Optional, Sequence, Union

from pack_data.packers import PACKERS
from pack_data.reading.declare import AUTO, REQUIRED, setting, setting_of
from pack_data.text import EMBEDDED
from pack_data.text.options import ExampleOptions

OF_TEXT = "--corpus"  # the input that has an option


@dataclass(frozen=True)
class DataSettings:
    """The text, the packing and the seed of a data set."""

    out: Union[str, Path] = setting(
        REQUIRED,
        "directory of the data set; an old one stays until the new one is done",
        metavar="DIR",
    )
    corpus: Union[str, Path, Sequence[Union[str, Path]]] = setting(
        EMBEDDED,
        "texts, JSONL, Parquet or Arrow, plain or compressed: files, directories or patterns; 'embedded': the "
        "documentation inside this Python",
        several="+",
        metavar="PATH",
    )
    vocabulary: Union[str, Path, None] = setting(
        None,
        "vocab.txt; without it one is trained on the corpus and kept with the data",
        metavar="FILE",
    )
    vocabulary_size: int = setting(8192, "size of a trained vocabulary", minimum=1, rare=True)
    max_sequence_length: int = setting(512, "slots in a pack", minimum=1, metavar="S")
    max_predictions_per_sequence: Optional[int] = setting(
        None,
        "masked tokens at most (default 20, 56, 76 at 128, 384, 512, else 15 %)",
        minimum=1,
        metavar="M",
        rare=True,
    )
    packer: str = setting("optimal", "packing algorithm (none: unpacked)", choices=PACKERS)
    # None: unlimited.
    max_sequences_per_pack: Union[int, str, None] = setting(
        AUTO,
        "packing depth; auto: the least within 1 % of unlimited packing",
        minimum=1,
        choices=(AUTO,),
        note=", a whole number, or unlimited (null in a configuration)",
        read="depth",
        metavar="D",
    )
    duplication_factor: int = setting_of(ExampleOptions, "duplication_factor")
    whole_word_masking: bool = setting_of(ExampleOptions, "whole_word_masking", of=OF_TEXT)
    draw_documents: str = setting_of(ExampleOptions, "draw_documents", of=OF_TEXT)
    seed: int = setting_of(ExampleOptions, "seed")
    json_field: str = setting("text", "field of the text in JSONL", of=OF_TEXT, rare=True)
    held_out: float = setting(
        0.0,
        "share of the documents, as 0.01, for DIR-held-out, a data set to evaluate on",
        minimum=0.0,
        below=1.0,
        metavar="F",
    )
