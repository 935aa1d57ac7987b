"""The options of a build: each is declared once, with its default, its range, its option and its meaning."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Dict, Optional, Tuple, Union

from pack_data.building.declared import OF_TEXT, DataSettings
from pack_data.building.stated import OMITTED
from pack_data.packing import PUBLISHED
from pack_data.reading.bad_records import MOST_RECORD_BYTES
from pack_data.reading.cores import PROCESSES
from pack_data.reading.declare import (
    AUTO,
    check_fields,
    setting,
    setting_of,
    settings_in,
)
from pack_data.store.packs import default_predictions
from pack_data.store.sequences import check_multiple
from pack_data.text.options import ExampleOptions

_DEPTH_OF_PAPER = 3
STAGES = ("count", "recipe", "deal")  # of a build, each by many processes

# Options that name files: the manifest has the sha256 of each file instead of its path.
_FILES = ("vocabulary", "tokenizer", "recipe")
# Options that do not change the data set.
_NOT_DECIDING = ("out", "overwrite", "workers", "on", "corpus", "source", *_FILES)
# Inputs that have an option: `of` in its declaration.
_OF_SEQUENCES = "--from"
_OF_BOTH = "--corpus or --from"
_OF_LENGTHS = "--synthetic"


@dataclass(frozen=True)
class BuildOptions(DataSettings):
    """One build. All but `out`, `overwrite`, `workers` and `on` decide the bytes of the data set."""

    tokenizer: Union[str, Path, None] = setting(
        None,
        "tokenizer.json of the tokenizers library, instead of a vocabulary; its post_processor adds the special tokens",
        metavar="FILE",
        rare=True,
    )
    lower_case: bool = setting(
        True,
        "tell capitals apart (default: lower case, accents stripped)",
        flag="--keep-case",
        rare=True,
    )
    multiple_of: int = setting(
        1,
        "each sequence begins at a multiple of M, as context parallelism or FP8 want it",
        minimum=1,
        metavar="M",
        rare=True,
    )
    recipe: Union[str, Path, None] = setting(
        None,
        "a packing that a packer wrote with --out for exactly these lengths, instead of --packer",
        metavar="FILE",
        rare=True,
    )
    short_sequence_probability: float = ExampleOptions.short_sequence_probability
    masked_lm_probability: float = setting_of(ExampleOptions, "masked_lm_probability")
    epoch: int = setting(
        0,
        "another number pairs the same sequences differently",
        minimum=0,
        metavar="E",
        rare=True,
    )
    document_separator: str = setting(
        "file",
        "what a document is in a text file",
        choices=("file", "blank-line"),
        of=OF_TEXT,
        rare=True,
    )
    drop_copies: bool = setting(
        False,
        "leave out documents that are copies of others (by hash of their lines)",
        of=OF_TEXT,
        rare=True,
    )
    synthetic: Optional[str] = setting(
        None,
        "draw lengths from a published histogram; random tokens; depth 3 by default",
        choices=PUBLISHED,
    )
    sequences: int = setting(
        1_000_000, "how many, with --synthetic", minimum=1, of=_OF_LENGTHS, rare=True
    )
    # A path (pack_data.formats), or a datasets.Dataset.
    source: Any = setting(
        None,
        "sequences in a file or a folder: TFRecord, HDF5, Parquet, Arrow, JSONL",
        flag="--from",
        metavar="PATH",
    )
    source_format: str = setting(
        "auto",
        "of --from; auto: detected from the content (names: packed-bert convert --help-all)",
        flag="--format",
        of=_OF_SEQUENCES,
        rare=True,
    )
    # Empty: input_ids, or text.
    columns: Tuple[str, ...] = setting(
        (),
        "of Parquet, Arrow or JSONL: the column with the text (--corpus), or those with the tokens (--from)",
        read="names",
        metavar="A,B",
        of=_OF_BOTH,
        rare=True,
    )
    split: str = setting(
        "",
        "which of several splits of a directory to read, such as train",
        of=_OF_BOTH,
        rare=True,
    )
    skip_bad: int = setting(
        0,
        "skip up to N bad records or lines of text; with 0 the first is an error",
        minimum=0,
        rare=True,
    )
    max_record_bytes: int = setting(
        MOST_RECORD_BYTES,
        "the largest record or line of JSON, unpacked, such as 1GiB; a larger one is a bad record",
        minimum=1,
        read="bytes",
        rare=True,
    )
    overwrite: bool = setting(
        False, "replace what is in --out, made from something else or with other options"
    )
    # None: one per core, for which a script needs `if __name__ == "__main__":`.
    workers: Optional[int] = setting(
        1,
        "processes; the result does not depend on it",
        **PROCESSES,
    )
    on: Optional[str] = setting(
        None,
        "a Dask cluster whose workers see --out under the same path; dask:local:N: N workers here",
        metavar="dask:ADDRESS",
        rare=True,
    )

    def __post_init__(self) -> None:
        if not isinstance(self.corpus, (str, os.PathLike)) and len(self.corpus) == 1:
            object.__setattr__(self, "corpus", self.corpus[0])
        check_fields(self)
        if self.max_sequences_per_pack == AUTO and self.synthetic is not None:
            object.__setattr__(self, "max_sequences_per_pack", _DEPTH_OF_PAPER)
        check_multiple(self.max_sequence_length, self.multiple_of)
        for name, option in settings_in(BuildOptions).items():
            is_given = getattr(self, name) != option.default
            if option.of and is_given and self._input() not in option.of:
                raise ValueError(
                    f"{option.flag} is an option of {option.of}, the input is {self._input()}; "
                    f"leave {option.flag} out"
                )
        if self.source is None and len(self.columns) > 1:
            raise ValueError(
                f"--columns {','.join(self.columns)}: the text of a --corpus is in one column; name one"
            )
        if self.tokenizer is not None:
            self._check_tokenizer()

    def _check_tokenizer(self) -> None:
        for name, chosen in (
            ("vocabulary", self.vocabulary is not None),
            ("keep-case", not self.lower_case),
        ):
            if chosen:
                raise ValueError(
                    f"--tokenizer and --{name}: a tokenizer.json says this itself; leave one out"
                )
        if self.synthetic is not None:
            raise ValueError(
                "--tokenizer cuts text into tokens; --synthetic has no text, leave one of them out"
            )

    def _input(self) -> str:
        """Return the option that names the input."""
        if self.synthetic is not None:
            return "--synthetic"
        return "--corpus" if self.source is None else "--from"

    def example_options(self) -> ExampleOptions:
        """Return the options of the examples. ValueError if one is out of range."""
        values = {item.name: getattr(self, item.name) for item in fields(ExampleOptions)}
        if self.max_predictions_per_sequence is None:
            predictions = default_predictions(self.max_sequence_length, self.masked_lm_probability)
            values["max_predictions_per_sequence"] = predictions
        return ExampleOptions(**values)

    def given_files(self) -> Dict[str, Path]:
        """Return the user's files that go into the data set, by option."""
        paths = {name: getattr(self, name) for name in _FILES}
        return {name: Path(path) for name, path in paths.items() if path is not None}

    def deciding(self) -> Dict[str, Any]:
        """Return the options that decide the bytes, for the manifest."""
        omitted = {*_NOT_DECIDING}
        if self.synthetic is None:
            omitted |= {"synthetic", "sequences"}
        if self._input() != "--corpus":
            omitted.add("draw_documents")
        if self.source is None:
            omitted.add("source_format")
            omitted |= {name for name in ("columns", "skip_bad") if not getattr(self, name)}
        if not self.skip_bad or self.max_record_bytes == MOST_RECORD_BYTES:
            omitted.add("max_record_bytes")
        omitted |= {name for name, default in OMITTED.items() if getattr(self, name) == default}
        return {name: value for name, value in asdict(self).items() if name not in omitted}
