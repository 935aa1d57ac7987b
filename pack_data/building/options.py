"""The options of a build: each is stated once, with its default, its option on the command line, and its help."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Dict, Optional, Tuple, Union

from pack_data.building.stated import OMITTED
from pack_data.cli.command import most_processes, parse_depth, positive_int, process_count
from pack_data.packers import PACKERS
from pack_data.packing.histogram import PUBLISHED
from pack_data.reading.bad_records import MOST_RECORD_BYTES
from pack_data.reading.fields import packing_depth, whole_number
from pack_data.store.packs import default_predictions
from pack_data.store.sequences import check_multiple
from pack_data.text import DRAW_BY_TOKENS, DRAWS
from pack_data.text.corpus_files import EMBEDDED, Corpus
from pack_data.text.examples import ExampleOptions

# The smallest packing depth that costs at most 1 % more packs.
AUTO = "auto"
_DEPTH_OF_PAPER = 3

# Options that name files: the manifest has the sha256 of each file instead of its path.
_FILES = ("vocabulary", "tokenizer", "recipe")
# Options that do not change the data set.
_NOT_DECIDING = ("out", "overwrite", "workers", "on", "corpus", "source", *_FILES)
# Options for some kinds of input: field, and the options that name these inputs.
_OF_INPUT = {
    "json_field": "--corpus",
    "document_separator": "--corpus",
    "drop_copies": "--corpus",
    "whole_word_masking": "--corpus",
    "draw_documents": "--corpus",
    "source_format": "--from",
    "columns": "--corpus or --from",
    "split": "--corpus or --from",
    "sequences": "--synthetic",
}


def _option(default: Any, text: str, *, rare: bool = False, flag: str = "", **argument: Any) -> Any:
    """Return a dataclass field that `packed-bert build` offers as an option.

    text: the help, in which {default} is the default. rare: listed by --help-all only. flag: the option, if it is not
    the name of the field. argument: further keywords of argparse's add_argument.
    """
    argument["help"] = text.format(default=default)
    return field(default=default, metadata={"argument": argument, "flag": flag, "rare": rare})


def _file(default: Any, text: str, **options: Any) -> Any:
    return _option(default, text, metavar="FILE", **options)


def _count(default: Optional[int], text: str, *, metavar: str = "N", **options: Any) -> Any:
    """Declare a whole number of at least 1."""
    return _option(default, text, type=positive_int, metavar=metavar, **options)


def _depth(text: str) -> Union[int, str, None]:
    return text if text == AUTO else parse_depth(text)


def _split_names(text: str) -> Tuple[str, ...]:
    return tuple(text.split(","))


@dataclass(frozen=True)
class BuildOptions:
    """One build. All but `out`, `overwrite`, `workers` and `on` decide the bytes of the data set."""

    out: Union[str, Path]
    corpus: Corpus = _option(
        EMBEDDED,
        "texts, JSONL, Parquet or Arrow, plain or compressed: files, directories or patterns; 'embedded': the "
        "documentation inside this Python",
        nargs="+",
        metavar="PATH",
    )
    vocabulary: Union[str, Path, None] = _file(
        None, "vocab.txt; without it one is trained on the corpus and kept with the data"
    )
    tokenizer: Union[str, Path, None] = _file(
        None,
        "tokenizer.json of the tokenizers library, instead of a vocabulary; its post_processor adds the special tokens",
        rare=True,
    )
    vocabulary_size: int = _count(8192, "when training one (default {default})", rare=True)
    lower_case: bool = _option(
        True,
        "tell capitals apart (default: lower case, accents stripped)",
        flag="--keep-case",
        action="store_false",
        rare=True,
    )
    max_sequence_length: int = _count(512, "slots in a pack (default {default})", metavar="S")
    multiple_of: int = _count(
        1,
        "each sequence begins at a multiple of M, as context parallelism or FP8 want it (default {default})",
        metavar="M",
        rare=True,
    )
    max_predictions_per_sequence: Optional[int] = _count(
        None, "masked tokens at most (default 20, 56, 76 at 128, 384, 512)", metavar="M", rare=True
    )
    packer: str = _option(
        "optimal",
        f"one of {', '.join(PACKERS)} (default {{default}})",
        choices=PACKERS,
        metavar="NAME",
    )
    # None: unlimited.
    max_sequences_per_pack: Union[int, str, None] = _option(
        AUTO,
        "packing depth (default: the least within 1 %% of unlimited packing)",
        type=_depth,
        metavar="D",
    )
    recipe: Union[str, Path, None] = _file(
        None,
        "a packing that a packer wrote with --out for exactly these lengths, instead of --packer",
        rare=True,
    )
    duplication_factor: int = _count(
        5, "passes over the corpus, each masked anew (default {default})", rare=True
    )
    short_sequence_probability: float = 0.1
    masked_lm_probability: float = _option(
        0.15, "share of tokens masked (default {default})", type=float, metavar="P", rare=True
    )
    whole_word_masking: bool = _option(
        False,
        "mask all pieces of a word or none (default: each piece for itself)",
        action="store_true",
        rare=True,
    )
    draw_documents: str = _option(
        DRAW_BY_TOKENS,
        "random second segments: documents are drawn by their tokens, or all alike as in BERT's published code "
        "(default {default})",
        choices=DRAWS,
        rare=True,
    )
    seed: int = _option(0, "of every random choice (default {default})", type=int, rare=True)
    epoch: int = _option(
        0,
        "another number pairs the same sequences differently (default {default})",
        type=int,
        metavar="E",
        rare=True,
    )
    json_field: str = _option(
        "text", "field of the text in JSONL (default {default})", metavar="NAME", rare=True
    )
    document_separator: str = _option(
        "file",
        "what a document is in a text file (default: the file)",
        choices=("file", "blank-line"),
        rare=True,
    )
    drop_copies: bool = _option(
        False,
        "leave out documents that are copies of others (by hash of their lines)",
        action="store_true",
        rare=True,
    )
    synthetic: Optional[str] = _option(
        None,
        f"draw lengths from a published histogram ({', '.join(PUBLISHED)}); random tokens; depth 3 by default",
        choices=PUBLISHED,
        metavar="NAME",
    )
    sequences: int = _count(
        1_000_000, "how many, with --synthetic (default {default:,})", rare=True
    )
    # A path (pack_data.formats), or a datasets.Dataset.
    source: Any = _option(
        None,
        "sequences in a file or a folder: TFRecord, HDF5, Parquet, Arrow, JSONL",
        flag="--from",
        metavar="PATH",
    )
    source_format: str = _option(
        "auto",
        "of --from (default: detected from the content; names: packed-bert convert --help-all)",
        flag="--format",
        metavar="NAME",
        rare=True,
    )
    # Empty: input_ids, or text.
    columns: Tuple[str, ...] = _option(
        (),
        "of Parquet, Arrow or JSONL: the column with the text (--corpus), or those with the tokens (--from)",
        type=_split_names,
        metavar="A,B",
        rare=True,
    )
    split: str = ""
    skip_bad: int = 0
    max_record_bytes: int = MOST_RECORD_BYTES
    held_out: float = _option(
        0.0,
        "share of the documents, as 0.01, for DIR-held-out, a data set to evaluate on",
        type=float,
        metavar="F",
    )
    overwrite: bool = _option(
        False,
        "replace what is in --out, made from something else or with other options",
        action="store_true",
    )
    # None: one per core, for which a script needs `if __name__ == "__main__":`.
    workers: Optional[int] = _option(
        1,
        "processes (default: one per core); the result does not depend on it",
        type=process_count,
        metavar="N",
    )
    on: Optional[str] = _option(
        None,
        "a Dask cluster whose workers see --out under the same path; dask:local:N: N workers here",
        metavar="dask:ADDRESS",
        rare=True,
    )

    def __post_init__(self) -> None:
        if not isinstance(self.corpus, (str, os.PathLike)) and len(self.corpus) == 1:
            object.__setattr__(self, "corpus", self.corpus[0])
        self._check_numbers()
        check_multiple(self.max_sequence_length, self.multiple_of)
        if not 0 <= self.held_out < 1:
            raise ValueError(
                f"held_out is {self.held_out}; the share of documents held out is from 0 to below 1"
            )
        for name, of_input in _OF_INPUT.items():
            is_given = getattr(self, name) != type(self).__dataclass_fields__[name].default
            if is_given and self._input() not in of_input:
                flag = flag_of(name)
                raise ValueError(
                    f"{flag} is an option of {of_input}, the input is {self._input()}; leave {flag} out"
                )
        if self.source is None and len(self.columns) > 1:
            raise ValueError(
                f"--columns {','.join(self.columns)}: the text of a --corpus is in one column; name one"
            )
        if self.tokenizer is not None:
            self._check_tokenizer()

    def _check_numbers(self) -> None:
        """Convert whole numbers, such as NumPy's, to int. ValueError if a number is out of range."""
        limits: Dict[str, Dict[str, Any]] = {
            "max_record_bytes": {"least": 1},
            "max_sequence_length": {"least": 1},
            "multiple_of": {"least": 1},
            "sequences": {"least": 1},
            "skip_bad": {"least": 0},
            "duplication_factor": {},
            "epoch": {"least": 0},
            "seed": {},
            "vocabulary_size": {},
            "max_predictions_per_sequence": {},
            "workers": {"least": 1, "most": most_processes()},
        }
        for name, limit in limits.items():
            value = getattr(self, name)
            if value is not None or name not in ("max_predictions_per_sequence", "workers"):
                object.__setattr__(self, name, whole_number(name, value, **limit))
        depth = self.max_sequences_per_pack
        if depth == AUTO and self.synthetic is not None:
            depth = _DEPTH_OF_PAPER
        if depth != AUTO:
            object.__setattr__(self, "max_sequences_per_pack", packing_depth(depth))

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
            # Checks the other options: a probability such as nan must be refused before it is multiplied.
            ExampleOptions(**{**values, "max_predictions_per_sequence": 1})
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


def flag_of(name: str) -> str:
    """Return the option on the command line of a field of BuildOptions, such as --max-sequence-length."""
    flag = BuildOptions.__dataclass_fields__[name].metadata.get("flag")
    return flag or "--" + name.replace("_", "-")
