"""The configuration of a fine-tuning run: sections, defaults, rules between settings, and batch arithmetic.

The sections `engine` and `placement` and the reader are those of pre-training (`ipu_packed_bert.settings.pretraining`,
`ipu_packed_bert.settings.reader`).
Loads no torch.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional, Sequence, Type, TypeVar, Union

from ipu_packed_bert.settings.reader import FILE, ConfigError, SettingsReader, broken_rules, load_yaml, peek, setting
from ipu_packed_bert.settings.schema import (
    PRETRAINING,
    BatchSettings,
    Configuration,
    DataSettings,
    EngineConfig,
    ModelConfig,
    ModelSettings,
    OptimizerSettings,
    PlacementConfig,
    Rules,
    RunSettings,
    TaskSettings,
    check_on_ipus,
    shared_rules,
)
from ipu_packed_bert.settings.user_task import PATTERN, full_name, is_own, own_class
from pack_data.packers import PACKERS
from pack_data.reading.fields import said_of

SQUAD, SINGLE_LABEL, MULTI_LABEL, REGRESSION, TOKENS = "squad", "single_label", "multi_label", "regression", "tokens"
# The module and class of each task; loaded when it is asked for, as they need torch.
TASKS = {
    SQUAD: "questions.QuestionsTask",
    SINGLE_LABEL: "classification.ClassificationTask",
    MULTI_LABEL: "classification.ClassificationTask",
    REGRESSION: "classification.ClassificationTask",
    TOKENS: "tokens.TokensTask",
}

_T = TypeVar("_T")


def _name(default: str) -> Any:
    note = ", or FILE.py:CLASS, one of your own"
    return setting(default, "which task", choices=tuple(TASKS), pattern=PATTERN, note=note)


@dataclass(frozen=True)
class TaskConfig(TaskSettings):
    """What is learnt; each task adds its own settings."""

    name: str = _name(SQUAD)


@dataclass(frozen=True)
class SquadConfig(TaskConfig):
    """Questions and paragraphs, as BERT cuts them into windows and reads answers out of them."""

    name: str = _name(SQUAD)
    stride: int = setting(128, "tokens from one window's start to the next one's", minimum=1)
    max_answer_length: int = setting(30, "tokens", minimum=1)
    null_answers: bool = setting(False, "version 2: a question may have no answer")
    null_score_threshold: float = setting(0.0, "no answer where its score is better by more than this")
    drop_seen_paragraphs: bool = setting(False, "do not evaluate on paragraphs of the training file")


@dataclass(frozen=True)
class ClassificationConfig(TaskConfig):
    """Which columns of a CSV, TSV or JSONL file hold what."""

    name: str = _name(SINGLE_LABEL)
    text_column: str = setting("text", "of the text")
    second_text_column: Optional[str] = setting(None, "for pairs of texts")
    label_column: str = setting("label", "of the label, or of the labels")


@dataclass(frozen=True)
class TokensConfig(TaskConfig):
    """The columns of a JSONL file with a sentence's words and their labels; others have a word and a label a line."""

    name: str = _name(TOKENS)
    words_column: str = setting("words", "of the list of words")
    labels_column: str = setting("labels", "of the list of labels, one a word")


# The settings of each task, all of them in the section `task`.
SETTINGS_OF = {
    SQUAD: SquadConfig,
    SINGLE_LABEL: ClassificationConfig,
    MULTI_LABEL: ClassificationConfig,
    REGRESSION: ClassificationConfig,
    TOKENS: TokensConfig,
}


@dataclass(frozen=True)
class _FinetuneData(DataSettings):
    """What is learnt from what, and how it is packed.  Paths are looked for in --data-dir first, where one is given."""

    training: Optional[str] = setting(None, "null: no training, only evaluation")
    evaluation: Optional[str] = setting(None, "null: none")
    training_examples: Optional[int] = setting(None, "questions or texts drawn at random; null: all", minimum=1)
    evaluation_examples: Optional[int] = setting(None, "the same ones for every seed; null: all", minimum=1)
    max_sequence_length: int = setting(384, "slots per pack, S", minimum=8)
    packer: str = setting("optimal", "which sequences share a row; none: unpacked", choices=PACKERS)
    max_sequences_per_pack: Optional[int] = setting(None, "packing depth, D; null: unlimited", minimum=1)
    seed: int = setting(5, "of the training examples drawn", minimum=0, maximum=2**31 - 1)


@dataclass(frozen=True)
class _StartConfig(ModelSettings):
    """Where the weights come from; the sizes apply only when training from scratch."""

    checkpoint: Optional[str] = setting(
        None, "Hugging Face folder, a run of ours, an installed package; null: from scratch"
    )
    vocabulary: Optional[str] = setting(None, "vocab.txt; null: the checkpoint's, or one trained on the texts")
    hidden_dropout: Optional[float] = setting(None, "null: the checkpoint's", minimum=0.0, below=1.0)
    attention_dropout: Optional[float] = setting(None, "null: the checkpoint's", minimum=0.0, below=1.0)
    vocabulary_size: int = setting(4096, "when training one", minimum=128)
    hidden_size: int = setting(256, "features of a token", minimum=1)
    num_layers: int = setting(4, "encoder layers", minimum=1)
    num_heads: int = setting(4, "attention heads of a layer", minimum=1)
    intermediate_size: int = setting(1024, "features inside a feed-forward block", minimum=1)

    def stated_sizes(self) -> ModelConfig:
        """Those of the configuration, where there is no checkpoint."""
        dropout = ModelConfig.attention_dropout if self.attention_dropout is None else self.attention_dropout
        return ModelConfig(
            vocabulary_size=self.vocabulary_size,
            hidden_size=self.hidden_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            intermediate_size=self.intermediate_size,
            attention_dropout=dropout,
        )


@dataclass(frozen=True)
class _FinetuneBatch(BatchSettings):
    """An update in sequences, on which learning depends; a forward pass in rows, on which memory depends."""

    sequences_per_update: int = setting(32, "about: whole packs", minimum=1)


@dataclass(frozen=True)
class _FinetuneRun(RunSettings):
    """How long, how often written down, and from which seed."""

    keep_checkpoints: int = setting(1, "the newest ones, and one known to be good", minimum=1)
    epochs: int = setting(2, "passes over the training examples", minimum=1)


SECTIONS = {
    "data": _FinetuneData,
    "model": _StartConfig,
    "optimizer": OptimizerSettings,
    "batch": _FinetuneBatch,
    "engine": EngineConfig,
    "placement": PlacementConfig,
    "run": _FinetuneRun,
}


@dataclass(frozen=True)
class FinetuneConfig(Configuration):
    """A whole, checked configuration; the class of `task` is that of its name."""

    task: TaskConfig = SquadConfig()
    data: _FinetuneData = _FinetuneData()
    model: _StartConfig = _StartConfig()
    batch: _FinetuneBatch = _FinetuneBatch()
    run: _FinetuneRun = _FinetuneRun()

    command = "finetune"
    section_names = ("task", *SECTIONS)
    heads_return = False

    def of_task(self, kind: Type[_T]) -> _T:
        """The settings of the task, which are of this class."""
        assert isinstance(self.task, kind)
        return self.task

    @property
    def packed(self) -> bool:
        """Whether a pack may hold more than one sequence."""
        return self.data.packer != "none" and self.data.max_sequences_per_pack != 1

    def for_model(self, model: ModelConfig, *, ipus: bool) -> FinetuneConfig:
        """The same for a network of these sizes, which the checkpoint decides: one IPU has all its layers.

        ipus: they make the updates. Raises ConfigError where the placement is that of another number of layers.
        """
        placement = self.placement
        if placement.ipus_per_replica == 1:
            placement = dataclasses.replace(placement, layers_per_ipu=(model.num_layers,))
        if ipus and sum(placement.layers_per_ipu) != model.num_layers:
            raise ConfigError(
                f"{self.path}: placement.layers_per_ipu places {sum(placement.layers_per_ipu)} layers, the network has "
                f"{model.num_layers}; change placement.layers_per_ipu"
            )
        return dataclasses.replace(self, placement=placement)

    def _rows_of_replica(self, packing_factor: float) -> int:
        """Packs that one replica has of an update."""
        wanted = max(1, round(self.batch.sequences_per_update / packing_factor))
        return math.ceil(wanted / self.placement.replicas)

    def with_micro_batch(self, packing_factor: float) -> FinetuneConfig:
        """The same with the micro-batch that divides an update evenly: as many rows as were given, or fewer.

        The packs that hold `batch.sequences_per_update` sequences on average are shared among as few micro-batches as
        they need, so that an update holds hardly more packs than wanted; in a pipeline there are as many micro-batches
        as it has stages, or more.
        """
        rows = self._rows_of_replica(packing_factor)
        micro_batch = math.ceil(rows / math.ceil(rows / self.batch.micro_batch))
        micro_batch = max(1, min(micro_batch, rows // self.pipeline_stages))
        return dataclasses.replace(self, batch=dataclasses.replace(self.batch, micro_batch=micro_batch))

    def accumulation(self, packing_factor: float) -> int:
        """Micro-batches of an update for each replica."""
        return math.ceil(self._rows_of_replica(packing_factor) / self.batch.micro_batch)

    def check_for_ipus(self, packing_factor: float) -> None:
        """Raise ConfigError for what IPUs do not have, and for an update that does not fill their pipeline."""
        check_on_ipus(self)
        found, stages, replicas = self.accumulation(packing_factor), self.pipeline_stages, self.placement.replicas
        if found < stages:
            fewer = f", or fewer than {replicas} replicas" if replicas > 1 else ""
            raise ConfigError(
                f"{self.path}: batch.sequences_per_update is {self.batch.sequences_per_update}, which with a packing "
                f"factor of {packing_factor:.3f} makes {self._rows_of_replica(packing_factor)} rows for each replica; "
                f"the training pipeline needs a row for each of its {stages} stages: --set "
                f"batch.sequences_per_update={math.ceil(stages * replicas * packing_factor)}{fewer}"
            )

    @property
    def schedule_steps(self) -> int:
        """Updates of the learning rate's schedule; stated once the data are known (`training.examples`)."""
        return self.optimizer.schedule_steps or 1


def load_config(path: Union[str, Path], overrides: Sequence[str] = (), *, stored: bool = False) -> FinetuneConfig:
    """Read, override (`section.key=value`, in YAML) and check a file; ConfigError with every problem found.

    stored: the file was written by a run, so that it must name an own task by its full path.
    """
    return config_from_tree(load_yaml(path), str(path), overrides, stored=stored)


def config_from_tree(tree: Any, path: str, overrides: Sequence[str] = (), *, stored: bool = False) -> FinetuneConfig:
    """As :func:`load_config`, from what YAML read."""
    # Only pre-training has a data set that it builds; its files need not name their task.
    unnamed = SQUAD if peek("data.directory", tree, ()) is None else PRETRAINING
    name = peek("task.name", tree, overrides) or unnamed
    if name == PRETRAINING:
        raise ConfigError(f"{path}: task.name is {name}; this is a configuration of pre-training: run_pretraining.py")
    # An unknown name is refused by the rule of the setting; its other settings are then those of no task.
    task = SETTINGS_OF.get(name, TaskConfig) if isinstance(name, str) else TaskConfig
    if is_own(name):
        # Runs write full paths. Another one could name a file that came with the folder, from wherever one is.
        if stored and full_name(name) != name and name == peek("task.name", tree, ()):
            raise ConfigError(f"{path}: task.name is {name}; a run keeps the full path of a task's file: write that")
        with said_of(path):
            task = own_class(name).settings
    reader = SettingsReader({"task": task, **SECTIONS}, path)
    reader.read(tree, FILE)
    for override in overrides:
        reader.override(override)
    sections = reader.sections()
    sections["task"] = dataclasses.replace(sections["task"], name=full_name(sections["task"].name))
    config = FinetuneConfig(path=path, origins=dict(reader.origins), **sections)
    reader.problems += broken_rules(_rules(config), reader.broken)
    reader.refuse_problems()
    return config


def _rules(config: FinetuneConfig) -> Rules:
    """What settings must fulfil together: (those it is about, whether it is broken, what is wrong)."""
    data, model = config.data, config.model
    squad = config.task if isinstance(config.task, SquadConfig) else None
    return [
        (
            "data.training data.evaluation",
            data.training is None and data.evaluation is None,
            "data.training and data.evaluation are null; name a file in at least one of them",
        ),
        (
            "data.training model.checkpoint",
            data.training is None and model.checkpoint is None,
            "data.training is null; needs model.checkpoint, else there is nothing to evaluate",
        ),
        (
            "data.training run.evaluate_every data.evaluation",
            bool(config.run.evaluate_every) and data.evaluation is None,
            f"run.evaluate_every is {config.run.evaluate_every}; needs data.evaluation",
        ),
        (
            "data.evaluation task.drop_seen_paragraphs data.training",
            squad is not None and squad.drop_seen_paragraphs and data.training is None,
            "task.drop_seen_paragraphs is true; needs data.training, whose paragraphs they are",
        ),
        *shared_rules(config),
        (
            "engine.offline_export data.training",
            config.engine.offline_export is not None and data.training is None,
            "engine.offline_export compiles a training program; data.training must not be null",
        ),
    ]
