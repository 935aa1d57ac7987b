"""The configuration of a run: its sections, their defaults, what they must fulfil together, and all batch arithmetic.

A setting states its type, its default, its range and its meaning; what several settings must fulfil together stands in
:func:`cross_check`, defaults that follow from other settings in :func:`_derive`.  Everything that follows from the
settings (accumulation, packs per update, betas, pipeline stages) is a method of :class:`Config` and is never stored.
Loads neither torch nor poptorch.
"""

from __future__ import annotations

import dataclasses
import math
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Container, Dict, List, Mapping, Optional, Sequence, Tuple, Union

import yaml

from ipu_packed_bert.settings.reader import (
    DEFAULT,
    FILE,
    OVERRIDE,
    ConfigError,
    SettingsReader,
    broken_rules,
    keys_of,
    load_yaml,
    peek,
    plain,
    problems_message,
    setting,
)
from ipu_packed_bert.settings.schema import (
    PRETRAINING,
    BatchSettings,
    Change,
    Configuration,
    DataSettings,
    EngineConfig,
    ModelConfig,
    OptimizerSettings,
    PlacementConfig,
    Rules,
    RunSettings,
    TaskSettings,
    check_on_ipus,
    schedule_too_short,
    shared_rules,
    shown_depth,
)
from pack_data.building.held_out import held_out_folder
from pack_data.packers import PACKERS
from pack_data.reading.fields import named
from pack_data.store.packs import default_predictions


@dataclass(frozen=True)
class _PretrainingConfig(TaskSettings):
    """What is learnt."""

    name: str = setting(PRETRAINING, "what is trained on packs", choices=(PRETRAINING,))


@dataclass(frozen=True)
class DataConfig(DataSettings):
    """The packed data set: where it lies, and how it is built if nothing lies there."""

    directory: str = setting("data/packed", "folder of the data set")
    mixed_with: Optional[Tuple[str, ...]] = setting(None, "further data sets, built alike; an epoch mixes all packs")
    shares: Optional[Tuple[float, ...]] = setting(
        None, "of each data set in an epoch, that of directory first; null: as many as its packs", above=0.0
    )
    corpus: str = setting("embedded", "embedded, a file or a folder")
    json_field: str = setting("text", "of a JSONL corpus")
    vocabulary: Optional[str] = setting(None, "vocab.txt; null: train one on the corpus")
    vocabulary_size: int = setting(
        30522, "tokens when training one; left out: as model.vocabulary_size", minimum=128, maximum=2**31 - 1
    )
    max_sequence_length: int = setting(512, "slots per pack, S", minimum=8)
    max_predictions_per_sequence: Optional[int] = setting(
        None, "masked tokens; null: 20, 56, 76 at 128, 384, 512, else 15 %", minimum=1
    )
    packer: str = setting("nnlshp", "which sequences share a pack", choices=PACKERS)
    max_sequences_per_pack: Optional[int] = setting(3, "packing depth, D; null: unlimited", minimum=1)
    duplication_factor: int = setting(5, "passes over the corpus, masked anew in each", minimum=1)
    whole_word_masking: bool = setting(False, "mask all pieces of a word or none")
    seed: int = setting(5, "segments, masking, order of the corpus", minimum=0, maximum=2**31 - 1)
    held_out: float = setting(
        0.0, "share of the documents that the build holds out, in DIRECTORY-held-out", minimum=0.0, below=1.0
    )
    evaluation_directory: Optional[str] = setting(None, "data set to evaluate on; null: the documents held out")

    @property
    def folders(self) -> Tuple[str, ...]:
        """Of the data sets to train on."""
        return (self.directory, *(self.mixed_with or ()))

    @property
    def named(self) -> str:
        """The folders in words, with their shares where these are stated."""
        shares = self.shares or ()
        return " + ".join([*(f"{share:g} x {each}" for share, each in zip(shares, self.folders))] or self.folders)


@dataclass(frozen=True)
class LossConfig:
    """How an update's loss is normalised (packedBERT, section 3.2.3), and what it is the sum of."""

    normalisation: str = setting("token", "mean over tokens, or over sequences", choices=("token", "sequence"))
    next_sentence: bool = setting(True, "train next-sentence prediction too")


@dataclass(frozen=True)
class OptimizerConfig(OptimizerSettings):
    """The optimiser as for unpacked data, and what packing changes of it (packedBERT, section 3.3)."""

    name: str = setting("lamb", "which optimiser", choices=("lamb", "adamw"))
    learning_rate: float = setting(2.828e-3, "the peak, reached after the warm-up", above=0.0)
    warmup_fraction: float = setting(0.128, "share of the schedule's updates", minimum=0.0, maximum=1.0)
    max_gradient_norm: Optional[float] = setting(
        None, "bound of the whole update's; null: not clipped; on IPUs with adamw only", above=0.0
    )
    packing_adjustment: str = setting(
        "accumulation", "what the packing factor changes", choices=("accumulation", "betas", "none")
    )


@dataclass(frozen=True)
class BatchConfig(BatchSettings):
    """The batch of the unpacked run; the packed one follows from it and the packing factor."""

    micro_batch: int = setting(2, "packs in one forward pass of one replica", minimum=1, maximum=1 << 20)
    gradient_accumulation: int = setting(
        2048, "micro-batches per update and replica, unpacked", minimum=1, maximum=1 << 24
    )


@dataclass(frozen=True)
class RunConfig(RunSettings):
    """How long, how often written down, and from which seed."""

    steps: int = setting(100, "weight updates", minimum=1)


@dataclass(frozen=True)
class Config(Configuration):
    """A whole, checked configuration."""

    task: _PretrainingConfig = _PretrainingConfig()
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    batch: BatchConfig = BatchConfig()
    engine: EngineConfig = EngineConfig()
    placement: PlacementConfig = PlacementConfig()
    run: RunConfig = RunConfig()
    without_ipus: Tuple[Tuple[str, Any], ...] = ()  # ("batch.micro_batch", 4), ...

    command = "pretrain"
    section_names = ("task", "data", "model", "loss", "optimizer", "batch", "engine", "placement", "run")

    @property
    def packed(self) -> bool:
        """Whether a pack may hold more than one sequence."""
        return self.data.max_sequences_per_pack != 1

    @property
    def predictions_per_sequence(self) -> int:
        """Masked tokens that a sequence has at most."""
        given = self.data.max_predictions_per_sequence
        return default_predictions(self.data.max_sequence_length) if given is None else given

    @property
    def evaluation_directory(self) -> Optional[str]:
        """The folder of the data set to evaluate on: the one given, else that of the documents held out, else None."""
        if self.data.evaluation_directory is not None:
            return self.data.evaluation_directory
        return str(held_out_folder(self.data.directory)) if self.data.held_out else None

    def build_line(self, *, overwrite: bool = False) -> str:
        """The command that builds the data set, with documents held out."""
        data = self.data
        options = [
            ("corpus", data.corpus),
            ("out", data.directory),
            ("held-out", data.held_out or 0.01),
            ("max-sequence-length", data.max_sequence_length),
            ("max-predictions-per-sequence", data.max_predictions_per_sequence),
            ("packer", data.packer),
            ("max-sequences-per-pack", data.max_sequences_per_pack or "unlimited"),
            ("duplication-factor", data.duplication_factor),
            ("seed", data.seed),
            ("vocabulary", data.vocabulary),
            ("vocabulary-size", None if data.vocabulary else data.vocabulary_size),
            ("json-field", None if data.json_field == "text" else data.json_field),
        ]
        words = [f"--{name} {shlex.quote(str(value))}" for name, value in options if value is not None]
        words += ["--whole-word-masking"] * data.whole_word_masking
        return " ".join(["packed-bert build", *words] + ["--overwrite"] * overwrite)

    @property
    def schedule_steps(self) -> int:
        """Updates of the learning rate's schedule, after which it is 0, or stays where it is constant."""
        return self.optimizer.schedule_steps or self.run.steps

    def accumulation(self, packing_factor: float) -> int:
        """Micro-batches per update and replica: the unpacked value divided by the packing factor, rounded up.

        Divided only where ``optimizer.packing_adjustment`` is "accumulation" (packedBERT, section 3.3).
        """
        if self.optimizer.packing_adjustment == "accumulation":
            return int(math.ceil(self.batch.gradient_accumulation / packing_factor))
        return self.batch.gradient_accumulation

    def check_for_ipus(self, packing_factor: float) -> None:
        """Raise ConfigError for what IPUs do not have, and for an update that does not fill their pipeline."""
        check_on_ipus(self)
        check_accumulation(self, packing_factor)

    def on_replicas(self, replicas: int) -> str:
        accumulation = -(-self.batch.gradient_accumulation * self.placement.replicas // replicas)
        return super().on_replicas(replicas) + f" --set batch.gradient_accumulation={accumulation}"

    def on_micro_batch(self, rows: int) -> str:
        accumulation = -(-self.batch.micro_batch * self.batch.gradient_accumulation // rows)
        return (
            f"--set batch.micro_batch={rows} fits; with --set batch.gradient_accumulation={accumulation} "
            "an update stays as large"
        )

    def expected_sequences_per_update(self, packing_factor: float) -> float:
        """Mean sequences in one global batch."""
        return self.packs_per_update(packing_factor) * packing_factor

    def betas(self, packing_factor: float) -> Tuple[float, float]:
        """(beta1, beta2), each to the power of the packing factor where "betas" is the adjustment."""
        power = packing_factor if self.optimizer.packing_adjustment == "betas" else 1.0
        return self.optimizer.beta1**power, self.optimizer.beta2**power

    def as_dict(self) -> Dict[str, Any]:
        """Nested plain values, ready for YAML; :func:`load_config` of them gives an equal Config."""
        tree = super().as_dict()
        if self.without_ipus:
            tree["without_ipus"] = _nested(self.without_ipus)
        return tree

    def annotated(self) -> str:
        """As :meth:`to_yaml`, with origin and meaning of each setting behind its value."""
        text = super().annotated()
        if self.without_ipus:
            block = {"without_ipus": _nested(self.without_ipus)}
            text += "\n" + yaml.safe_dump(block, sort_keys=False, default_flow_style=False)
        return text

    def with_settings(self, values: Mapping[str, Any], origin: str) -> Config:
        """Some settings replaced, by full name; nothing is checked."""
        sections: Dict[str, Dict[str, Any]] = {}
        for key, value in values.items():
            section, name = key.split(".")
            sections.setdefault(section, {})[name] = value
        replaced = {section: dataclasses.replace(getattr(self, section), **each) for section, each in sections.items()}
        origins = {**self.origins, **dict.fromkeys(values, origin)} if self.origins else self.origins
        return dataclasses.replace(self, origins=origins, **replaced)

    def filled_in(self, facts: Mapping[str, Any], origin: str) -> Config:
        """What nobody stated takes the values of ``facts``; ConfigError where these break a rule."""
        values = {key: value for key, value in facts.items() if self.origins.get(key, FILE).startswith(DEFAULT)}
        filled = self.with_settings(values, origin)
        problems = cross_check(filled)
        if problems:
            raise ConfigError(problems_message(f"{self.path}, with what {origin} says", problems))
        return filled

    def applied_without_ipus(self) -> Tuple[Config, Tuple[Change, ...]]:
        """The configuration for a machine without IPUs, and what that changed."""
        changes = []
        for key, value in self.without_ipus:
            section, name = key.split(".")
            before = getattr(getattr(self, section), name)
            if before != value:
                changes.append(Change(key, before, value))
        applied = self.with_settings(dict(self.without_ipus), "without_ipus")
        return dataclasses.replace(applied, without_ipus=()), tuple(changes)

    def for_simulation(self, packing_factor: float) -> Config:
        """For a simulated device: one replica, and the fewest micro-batches that fill its pipeline."""
        # floor(stages x p) is the largest unpacked value that the packing factor p >= 1 divides to no more than stages.
        divided = self.optimizer.packing_adjustment == "accumulation"
        accumulation = int(self.pipeline_stages * (packing_factor if divided else 1.0))
        return dataclasses.replace(
            self,
            batch=dataclasses.replace(self.batch, gradient_accumulation=accumulation),
            placement=dataclasses.replace(self.placement, replicas=1, replicated_tensor_sharding=False),
        )


SECTIONS = {name: type(section) for name, section in Config().sections.items()}


def load_config(path: Union[str, Path], overrides: Sequence[str] = ()) -> Config:
    """Read, override and check a configuration file.

    Parameters
    ----------
    path : a YAML file with the sections of :class:`Config`; a setting that is left out has its default.
    overrides : ``"section.key=value"`` texts, the value in YAML; they win over the file, and over its ``without_ipus``
        but for the placement, of which the block has its own.

    Raises
    ------
    ConfigError : with every problem found.
    """
    return config_from_tree(load_yaml(path), str(path), overrides)


def config_from_tree(tree: Any, path: str, overrides: Sequence[str] = ()) -> Config:
    """As :func:`load_config`, from what YAML read."""
    name = peek("task.name", tree, overrides) or PRETRAINING
    if name != PRETRAINING:
        raise ConfigError(
            f"{path}: task.name is {named(name)}; this is a configuration of fine-tuning: packed-bert finetune"
        )
    reader = SettingsReader(SECTIONS, path)
    small = reader.block("without_ipus")
    if isinstance(tree, Mapping):
        small.read(tree.get("without_ipus"), FILE)
        tree = {section: settings for section, settings in tree.items() if section != "without_ipus"}
    reader.read(tree, FILE)
    for override in overrides:
        section, _, rest = override.strip().partition(".")
        if section == "without_ipus":
            small.override(rest)
        elif override.partition("=")[0].strip() != "without_ipus":
            reader.override(override)
        elif reader.split(override) == ("without_ipus", None):
            small.values.clear()
        else:
            reader.problems.append(f"--set {override}: the block as a whole can only be switched off, with null")
    _derive(reader)
    if small.values:
        _derive_small(small, reader)
    kept = {
        key: small.values[key]
        for key in keys_of(SECTIONS)
        # A --set wins over the block, but for a placement: that is the pod's, and the block has one of its own.
        if key in small.values and (reader.origins.get(key) != OVERRIDE or key.startswith("placement."))
    }
    sections = reader.sections()
    config = Config(without_ipus=tuple(kept.items()), path=path, origins=dict(reader.origins), **sections)
    crossed = cross_check(config, reader.broken)
    reader.problems += crossed
    if kept:
        applied, _ = config.applied_without_ipus()
        further = [each for each in cross_check(applied, reader.broken) if each not in crossed]
        reader.problems += [f"without_ipus: {each}" for each in further]
    reader.refuse_problems()
    return config


def _derive(reader: SettingsReader) -> None:
    """Defaults that follow from other settings."""
    if reader.value("data.vocabulary") is None:  # one is trained: its size is stated once
        sizes = ("model.vocabulary_size", "data.vocabulary_size")
        for key, other in (sizes, sizes[::-1]):
            if reader.stated(other) and reader.value(other) >= 128:
                reader.derive(key, reader.value(other), other)
    slots, positions = "data.max_sequence_length", "model.max_position_embeddings"
    if reader.value(slots) > reader.value(positions):  # whichever was left out fits the other
        reader.derive(positions, reader.value(slots), slots)
        reader.derive(slots, reader.value(positions), positions)
    if reader.value("placement.ipus_per_replica") == 1:
        reader.derive("placement.layers_per_ipu", (reader.value("model.num_layers"),), "model.num_layers")


def _derive_small(small: SettingsReader, whole: SettingsReader) -> None:
    """Defaults of a `without_ipus` block: as many rows as its vocabulary has tokens, and one replica of one IPU."""
    if small.stated("data.vocabulary_size"):
        small.derive("model.vocabulary_size", small.value("data.vocabulary_size"), "data.vocabulary_size")
    overridden = whole.origins.get("model.num_layers") == OVERRIDE
    source = small if small.stated("model.num_layers") and not overridden else whole
    layers = source.value("model.num_layers")
    one = PlacementConfig(layers_per_ipu=(layers,))
    for name in (
        "replicas ipus_per_replica layers_per_ipu available_memory_proportion embedding_serialization_factor "
        "replicated_tensor_sharding"
    ).split():
        small.derive(f"placement.{name}", getattr(one, name), "one IPU")


def _nested(settings: Sequence[Tuple[str, Any]]) -> Dict[str, Dict[str, Any]]:
    """("batch.micro_batch", 4), ... -> {"batch": {"micro_batch": 4}}, in plain values."""
    tree: Dict[str, Dict[str, Any]] = {}
    for key, value in settings:
        section, name = key.split(".")
        tree.setdefault(section, {})[name] = plain(value)
    return tree


def cross_check(config: Config, broken: Container[str] = frozenset()) -> List[str]:
    """What is wrong between settings that are each in range; one line a problem.

    ``broken`` names settings known to be wrong: what follows from them is not reported again.
    """
    return broken_rules(_rules(config), broken)


def _rules(config: Config) -> Rules:
    data, model, batch, placement = config.data, config.model, config.batch, config.placement
    slots, predictions = data.max_sequence_length, config.predictions_per_sequence
    layers, stages = placement.layers_per_ipu, config.pipeline_stages
    return [
        (
            "data.packer data.max_sequences_per_pack",
            data.packer == "none" and data.max_sequences_per_pack != 1,
            f"data.max_sequences_per_pack is {shown_depth(data)}; must be 1 where data.packer is none",
        ),
        (
            "data.shares data.mixed_with",
            data.shares is not None and len(data.shares) != len(data.folders),
            f"data.shares has {len(data.shares or ())} numbers; must have one for each of the {len(data.folders)} data "
            "sets of data.directory and data.mixed_with",
        ),
        (
            "data.max_predictions_per_sequence data.max_sequence_length",
            predictions >= slots,
            f"data.max_predictions_per_sequence is {predictions}; must be below data.max_sequence_length, {slots}",
        ),
        (
            "data.max_sequence_length model.max_position_embeddings",
            slots > model.max_position_embeddings,
            f"data.max_sequence_length is {slots}; must be at most model.max_position_embeddings, "
            f"{model.max_position_embeddings}",
        ),
        (
            "placement.layers_per_ipu model.num_layers",
            sum(layers) != model.num_layers,
            f"placement.layers_per_ipu places {sum(layers)} layers, model.num_layers is {model.num_layers}; "
            "change one of them",
        ),
        *shared_rules(config),
        (
            "placement.embedding_serialization_factor model.vocabulary_size",
            model.vocabulary_size % placement.embedding_serialization_factor != 0,
            f"placement.embedding_serialization_factor is {placement.embedding_serialization_factor}; must divide "
            f"model.vocabulary_size, {model.vocabulary_size}",
        ),
        (
            "batch.gradient_accumulation placement.layers_per_ipu",
            batch.gradient_accumulation < stages,
            f"batch.gradient_accumulation is {batch.gradient_accumulation}; must be at least the {stages} stages of "
            "the training pipeline",
        ),
        (
            "run.steps optimizer.schedule_steps",
            config.run.steps > config.schedule_steps and config.optimizer.schedule != "constant",
            schedule_too_short(f"run.steps is {config.run.steps}", config.run.steps, config.schedule_steps),
        ),
        (
            "run.evaluate_every data.held_out data.evaluation_directory",
            config.run.evaluate_every and config.evaluation_directory is None,
            f"run.evaluate_every is {config.run.evaluate_every}; needs held-out data: set data.held_out above 0 and "
            f"build with `{config.build_line()}`, or name a data set in data.evaluation_directory",
        ),
    ]


def check_accumulation(config: Config, packing_factor: float) -> None:
    """Raise ConfigError if, packed, an update has fewer micro-batches than the pipeline has stages."""
    accumulation = config.accumulation(packing_factor)
    if accumulation < config.pipeline_stages:
        raise ConfigError(
            f"{config.path}: batch.gradient_accumulation is {config.batch.gradient_accumulation}, {accumulation} with "
            f"a packing factor of {packing_factor:.3f}; must be at least the {config.pipeline_stages} stages of the "
            "training pipeline"
        )
