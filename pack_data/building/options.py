"""What a build is told."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Dict, Mapping, Optional, Tuple, Union

from pack_data.cli.bad_records import MOST_RECORD_BYTES
from pack_data.cli.command import most_processes
from pack_data.reading.fields import packing_depth, whole_number
from pack_data.store.packs import default_predictions
from pack_data.store.sequences import check_multiple
from pack_data.text.corpus import EMBEDDED
from pack_data.text.examples import ExampleOptions

_FILES = ("vocabulary", "tokenizer", "recipe")
# Options that a manifest leaves out at these values: what is built without them has the bytes that it had before them.
_UNSAID = {"held_out": 0.0, "whole_word_masking": False, "multiple_of": 1}
# Options that say how one kind of input is read: field, option of the command, and that input.
_OF_INPUT = (
    ("json_field", "--json-field", "--corpus"),
    ("document_separator", "--document-separator", "--corpus"),
    ("source_format", "--format", "--from"),
    ("columns", "--columns", "--from"),
    ("sequences", "--sequences", "--synthetic"),
)


def stated(options: Mapping[str, Any]) -> Dict[str, Any]:
    """The options in a manifest (BuildOptions.deciding), with those that it leaves out."""
    return {**_UNSAID, **options}


@dataclass(frozen=True)
class BuildOptions:
    """One build. All but `out`, `overwrite`, `append`, `workers` and `on` decide the bytes of the data set."""

    out: Union[str, Path]
    corpus: Union[str, Path] = EMBEDDED
    vocabulary: Union[str, Path, None] = None  # vocab.txt; None: train one of vocabulary_size on the corpus
    tokenizer: Union[str, Path, None] = None  # tokenizer.json, instead of a vocabulary
    vocabulary_size: int = 8192
    lower_case: bool = True
    max_sequence_length: int = 512
    multiple_of: int = 1  # each sequence takes a multiple of it in slots
    max_predictions_per_sequence: Optional[int] = None
    packer: str = "optimal"
    max_sequences_per_pack: Optional[int] = 3  # None: unlimited
    recipe: Union[str, Path, None] = None  # a packing made before, instead of the packer
    duplication_factor: int = 5
    short_sequence_probability: float = 0.1
    masked_lm_probability: float = 0.15
    whole_word_masking: bool = False  # the pieces of a word together, or none of them
    seed: int = 0
    epoch: int = 0
    json_field: str = "text"
    document_separator: str = "file"
    synthetic: Optional[str] = None  # draw lengths from this histogram instead of reading a corpus
    sequences: int = 1_000_000  # how many, with `synthetic`
    # sequences made elsewhere, instead of a corpus: a path (pack_data.formats), or a datasets.Dataset
    source: Any = None
    source_format: str = "auto"
    columns: Tuple[str, ...] = ()  # Parquet, Arrow, JSONL: columns of the sequences; none: all of integers
    skip_bad: int = 0
    max_record_bytes: int = MOST_RECORD_BYTES  # a longer record, or line of JSON, is a bad one
    held_out: float = 0.0  # share of the documents in a second data set, OUT-held-out
    overwrite: bool = False  # replace a data set in `out` that was made otherwise
    append: bool = False  # add to the data set in `out`, with the options it was made with
    workers: Optional[int] = 1  # processes; None: one a core, for which a script needs `if __name__ == "__main__":`
    on: Optional[str] = None  # a cluster: dask:ADDRESS, or dask:local:N

    def __post_init__(self) -> None:
        for least, names in (
            (1, "max_record_bytes max_sequence_length multiple_of sequences"),
            (0, "skip_bad"),
            (None, "duplication_factor epoch max_predictions_per_sequence seed vocabulary_size"),
        ):
            for name in names.split():
                if name != "max_predictions_per_sequence" or getattr(self, name) is not None:
                    object.__setattr__(self, name, whole_number(name, getattr(self, name), least=least))
        if not self.append:  # then S is that of the rest
            check_multiple(self.max_sequence_length, self.multiple_of)
        if self.workers is not None:
            object.__setattr__(self, "workers", whole_number("workers", self.workers, least=1, most=most_processes()))
        object.__setattr__(self, "max_sequences_per_pack", packing_depth(self.max_sequences_per_pack))
        if self.append and self.overwrite:
            raise ValueError("--append adds to the data set that --overwrite replaces; leave one of them out")
        if not 0 <= self.held_out < 1:
            raise ValueError(f"held_out is {self.held_out}; the share of documents held out is from 0 to below 1")
        for name, option, read in _OF_INPUT:
            if getattr(self, name) != type(self).__dataclass_fields__[name].default and read != self._input():
                raise ValueError(f"{option} says how {read} is read, the input is {self._input()}; leave {option} out")
        if self.tokenizer is not None:
            for name, chosen in (("vocabulary", self.vocabulary is not None), ("keep-case", not self.lower_case)):
                if chosen and not self.append:
                    raise ValueError(f"--tokenizer and --{name}: a tokenizer.json says this itself; leave one out")
            if self.synthetic is not None:
                raise ValueError("--tokenizer cuts text into tokens; --synthetic has no text, leave one of them out")
        # What is appended is made as the rest was, where it is made from text.
        if self.whole_word_masking and not self.append and self._input() != "--corpus":
            raise ValueError(
                f"--whole-word-masking masks words of a text; {self._input()} has no text, leave one of them out"
            )

    def _input(self) -> str:
        """The option that names what goes in."""
        if self.synthetic is not None:
            return "--synthetic"
        return "--corpus" if self.source is None else "--from"

    def example_options(self) -> ExampleOptions:
        """The options of the examples. ValueError where one is out of range."""
        chosen = {field.name: getattr(self, field.name) for field in fields(ExampleOptions)}
        if self.max_predictions_per_sequence is None:
            S = self.max_sequence_length
            # Raises ValueError of a probability that is none, as nan is, before it is multiplied.
            ExampleOptions(**{**chosen, "max_predictions_per_sequence": 1})
            chosen["max_predictions_per_sequence"] = default_predictions(S, self.masked_lm_probability)
        return ExampleOptions(**chosen)

    def given_files(self) -> Dict[str, Path]:
        """The user's files that go into the data set, by option."""
        given = {"vocabulary": self.vocabulary, "tokenizer": self.tokenizer, "recipe": self.recipe}
        return {name: Path(path) for name, path in given.items() if path is not None}

    def deciding(self) -> Dict[str, Any]:
        """The options that decide the bytes, for the manifest, which has the sha256 of files instead of their names."""
        left_out = {"out", "overwrite", "append", "workers", "on", "corpus", "source", *_FILES}
        if self.synthetic is None:
            left_out |= {"synthetic", "sequences"}
        if self.source is None:
            left_out |= {"source_format", "columns"}
            if not self.skip_bad:
                left_out.add("skip_bad")
        if not self.skip_bad or self.max_record_bytes == MOST_RECORD_BYTES:
            left_out.add("max_record_bytes")
        left_out |= {name for name, default in _UNSAID.items() if getattr(self, name) == default}
        return {name: value for name, value in asdict(self).items() if name not in left_out}
