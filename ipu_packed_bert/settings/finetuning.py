"""The tasks of fine-tuning: the settings of each in the section `task`, and its class.  Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Mapping, NamedTuple, Optional, Sequence, Type

from ipu_packed_bert.settings.schema import MULTI_LABEL, REGRESSION, SINGLE_LABEL, SQUAD, TOKENS
from ipu_packed_bert.settings.schema import TaskConfig as TaskConfig  # users' tasks import it
from pack_data.reading.declare import FREE, setting


@dataclass(frozen=True)
class SquadConfig(TaskConfig):
    """Questions and paragraphs, which are cut into windows as in BERT's own code."""

    stride: int = setting(
        128,
        "tokens from the start of one window to the start of the next; fewer if windows would overlap by less than "
        "`max_answer_length` - 1 tokens, or half a window if that is less",
        minimum=1,
    )
    max_answer_length: int = setting(30, "tokens of an answer at most", minimum=1, resume=FREE)
    null_answers: bool = setting(False, "version 2: a question may have no answer")
    null_score_threshold: float = setting(
        0.0, "no answer is given if its score is better by more than this", resume=FREE
    )
    drop_seen_paragraphs: bool = setting(
        False, "do not evaluate on paragraphs of the training file", resume=FREE
    )


@dataclass(frozen=True)
class ClassificationConfig(TaskConfig):
    """The columns of a CSV, TSV or JSONL file."""

    text_column: str = setting("text", "column of the text")
    second_text_column: Optional[str] = setting(
        None, "column of the second text, for pairs of texts"
    )
    label_column: str = setting("label", "column of the label, or of the labels")


@dataclass(frozen=True)
class TokensConfig(TaskConfig):
    """The columns of a JSONL file with the words of a sentence and their labels.

    Other files have one word and its label per line; in CoNLL-U, `labels_column` is one of its ten columns.
    """

    words_column: str = setting("words", "column of the list of words")
    labels_column: str = setting(
        "labels", "column of the list of labels, one per word; of CoNLL-U, for example upos"
    )


class _Task(NamedTuple):
    """A task of the program."""

    settings: Type[TaskConfig]
    implementation: str  # module.class in ipu_packed_bert.tasks, loaded late because it needs torch


TASKS = {
    SQUAD: _Task(SquadConfig, "questions.QuestionsTask"),
    SINGLE_LABEL: _Task(ClassificationConfig, "classification.ClassificationTask"),
    MULTI_LABEL: _Task(ClassificationConfig, "classification.ClassificationTask"),
    REGRESSION: _Task(ClassificationConfig, "classification.ClassificationTask"),
    TOKENS: _Task(TokensConfig, "tokens.TokensTask"),
}


# Section of a configuration -> its settings that affect predictions (None: all); the others affect training only.
OF_PREDICTIONS: Mapping[str, Optional[Sequence[str]]] = {
    "task": None,
    "engine": None,
    "placement": None,
    "batch": ("micro_batch",),
    "data": ("max_sequence_length", "packer", "max_sequences_per_pack"),
}


def affects_predictions(setting: str) -> bool:
    """Return True if the setting, such as `data.packer`, affects predictions."""
    section, _, key = setting.partition(".")
    return section in OF_PREDICTIONS and key in (OF_PREDICTIONS[section] or (key,))
