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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Container, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

import yaml

from ipu_packed_bert.settings import (
    DEFAULT,
    FILE,
    OVERRIDE,
    ConfigError,
    SettingsReader,
    annotated,
    as_tree,
    broken_rules,
    keys_of,
    load_yaml,
    peek,
    plain,
    problems_message,
    setting,
)
from pack_data.building.sides import held_out_folder
from pack_data.decoding import named
from pack_data.packers import PACKERS, packs_at_depth
from pack_data.packs import default_predictions

PRETRAINING = "pretraining"
# How the learning rate goes on after its warm-up; `optim.scheduled_rate` has the formulas.
SCHEDULES = ("linear", "polynomial", "cosine", "constant")


@dataclass(frozen=True)
class PretrainingConfig:
    """What is learnt."""

    name: str = setting(PRETRAINING, "what is trained on packs", choices=(PRETRAINING,))


@dataclass(frozen=True)
class DataConfig:
    """The packed data set: where it lies, and how it is built if nothing lies there."""

    directory: str = setting("data/packed", "folder of the data set")
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


@dataclass(frozen=True)
class ModelConfig:
    """The sizes of a BERT; names as in the published configurations, spelled out."""

    vocabulary_size: int = setting(
        30522, "rows of the embedding table; left out: as the data set", minimum=8, maximum=1 << 24
    )
    # The maxima are beyond every network there is: a slip of the keyboard is told before anything is allocated.
    hidden_size: int = setting(768, "features of a token", minimum=1, maximum=1 << 16)
    num_layers: int = setting(12, "encoder layers", minimum=1, maximum=1 << 12)
    num_heads: int = setting(12, "attention heads of a layer", minimum=1, maximum=1 << 12)
    intermediate_size: int = setting(3072, "features inside a feed-forward block", minimum=1, maximum=1 << 20)
    max_position_embeddings: int = setting(
        512, "left out: at least data.max_sequence_length", minimum=8, maximum=1 << 20
    )
    type_vocabulary_size: int = setting(2, "segments", minimum=2, maximum=1 << 16)
    hidden_dropout: float = setting(0.1, "share of features set to 0", minimum=0.0, below=1.0)
    attention_dropout: float = setting(0.0, "share of attention weights set to 0", minimum=0.0, below=1.0)
    layer_norm_eps: float = setting(1.0e-3, "as published for IPUs; BERT's own is 1.0e-12", above=0.0)
    initializer_range: float = setting(0.02, "standard deviation of fresh weights", above=0.0)


@dataclass(frozen=True)
class LossConfig:
    """How an update's loss is normalised (packedBERT, section 3.2.3), and what it is the sum of."""

    normalisation: str = setting("token", "mean over tokens, or over sequences", choices=("token", "sequence"))
    next_sentence: bool = setting(True, "train next-sentence prediction too")


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimiser as for unpacked data, and what packing changes of it (packedBERT, section 3.3)."""

    name: str = setting("lamb", "which optimiser", choices=("lamb", "adamw"))
    learning_rate: float = setting(2.828e-3, "the peak, reached after the warm-up", above=0.0)
    warmup_fraction: float = setting(0.128, "share of the schedule's updates", minimum=0.0, maximum=1.0)
    schedule: str = setting("linear", "after the warm-up, from the peak to 0; constant stays there", choices=SCHEDULES)
    schedule_power: float = setting(1.0, "polynomial: of the share of its updates that is left", above=0.0)
    schedule_steps: Optional[int] = setting(
        None, "its updates, those of the warm-up included; null: run.steps when the run starts", minimum=1
    )
    beta1: float = setting(0.9, "decay of the first moment, the mean gradient", minimum=0.0, below=1.0)
    beta2: float = setting(0.999, "decay of the second moment, the mean square", minimum=0.0, below=1.0)
    eps: float = setting(1.0e-6, "added to the root of the second moment", above=0.0)
    weight_decay: float = setting(0.01, "decoupled; not of biases and LayerNorms", minimum=0.0)
    bias_correction: bool = setting(True, "of the moments")
    max_weight_norm: float = setting(65500.0, "LAMB: bound of a tensor's norm in its trust ratio", minimum=0.0)
    max_gradient_norm: Optional[float] = setting(
        None, "bound of the whole update's; null: not clipped; on IPUs with adamw only", above=0.0
    )
    packing_adjustment: str = setting(
        "accumulation", "what the packing factor changes", choices=("accumulation", "betas", "none")
    )


@dataclass(frozen=True)
class BatchConfig:
    """The batch of the unpacked run; the packed one follows from it and the packing factor."""

    micro_batch: int = setting(2, "packs in one forward pass of one replica", minimum=1, maximum=1 << 20)
    gradient_accumulation: int = setting(
        2048, "micro-batches per update and replica, unpacked", minimum=1, maximum=1 << 24
    )
    device_iterations: int = setting(1, "must be 1 on IPUs", minimum=1)


@dataclass(frozen=True)
class EngineConfig:
    """What runs the steps.  The settings after ``processes`` are read by the IPU engine only, but for
    ``recompute_layers``, and checked always."""

    kind: str = setting(
        "auto", "auto: IPUs, the IPU Model, CUDA, the CPU, in this order", choices=("auto", "ipu", "host")
    )
    device: str = setting("auto", "host; auto: CUDA, else the CPU", choices=("auto", "cpu", "cuda"))
    precision: str = setting(
        "float32",
        "host, of products",
        choices=("float32", "tf32", "bfloat16"),
        note="; float16 would need a scaled loss, bfloat16 needs none",
    )
    attention: str = setting("auto", "host", choices=("auto", "eager", "sdpa", "varlen"))
    compile: bool = setting(False, "host: torch.compile")
    deterministic: bool = setting(False, "CUDA: the same bits in every run, slower; CPUs always give them")
    threads: Optional[int] = setting(None, "host; null: as many as torch chooses", minimum=1)
    processes: int = setting(1, "host: how many it is made for, by torchrun; any number may run it", minimum=1)
    mask: str = setting("product", "inside the score product, or added to the scores", choices=("product", "additive"))
    half_weights: bool = setting(True, "weights in float16")
    half_logits: bool = setting(
        False, "soft-max and loss of masked tokens in the weights' type: a third of the memory for logits"
    )
    half_partials: bool = setting(True, "partial sums of products in float16")
    stochastic_rounding: bool = setting(True, "of float16 results")
    loss_scaling: float = setting(8192.0, "keeps float16 gradients in range", above=0.0)
    automatic_loss_scaling: bool = setting(False, "the device adapts it")
    first_moment_type: str = setting("float32", "of the optimiser", choices=("float16", "float32"))
    gradient_accumulator_type: str = setting("float16", "sums of gradients", choices=("float16", "float32"))
    executable_cache: Optional[str] = setting(None, "folder of compiled programs")
    synthetic_data: bool = setting(False, "no batch leaves the host: to measure the device alone")
    ipu_model: bool = setting(False, "the simulated IPU instead of hardware")
    offline_export: Optional[str] = setting(None, "file: compile into it, run nothing")
    executable: Optional[str] = setting(None, "file of engine.offline_export: run it, compile no training program")
    profile_directory: Optional[str] = setting(None, "folder for PopVision's profile")
    asynchronous_loading: bool = setting(True, "the next batch is made while a step runs")
    log_cycles: bool = setting(False, "count the cycles of each step")
    recompute_layers: Optional[bool] = setting(
        None, "keep only each layer's input for the backward pass; null: on IPUs yes, on the host no"
    )

    def recomputes(self, *, ipus: bool) -> bool:
        """Whether the backward pass computes each layer again from its input."""
        return ipus if self.recompute_layers is None else self.recompute_layers


@dataclass(frozen=True)
class PlacementConfig:
    """Replicas, and what each IPU of a replica holds; embeddings and heads are always on the first."""

    machine: str = setting(
        "mk2", "its clock: mk2 1.33 GHz, bow 1.85 GHz; the program is the same", choices=("mk2", "bow")
    )
    replicas: int = setting(1, "copies of the model", minimum=1)
    ipus_per_replica: int = setting(1, "that a copy of the model is spread over", minimum=1)
    layers_per_ipu: Tuple[int, ...] = setting((12,), "left out with one IPU: model.num_layers", minimum=0)
    available_memory_proportion: Tuple[float, ...] = setting(
        (0.28,), "of products, for each IPU", above=0.0, maximum=1.0
    )
    embedding_serialization_factor: int = setting(1, "parts of the vocabulary projection", minimum=1)
    optimizer_state_off_chip: bool = setting(True, "in the memory beside the chip")
    replicated_tensor_sharding: bool = setting(False, "share optimiser state out among the replicas")


@dataclass(frozen=True)
class RunConfig:
    """How long, how often written down, and from which seed."""

    steps: int = setting(100, "weight updates", minimum=1)
    seed: int = setting(5, "weights, dropout, order of the packs", minimum=0, maximum=2**31 - 1)
    log_every: int = setting(1, "steps between points in TensorBoard; log.jsonl has every step", minimum=1)
    evaluate_every: int = setting(0, "steps; 0: never", minimum=0)
    checkpoint_every: int = setting(0, "steps; 0: only at the end", minimum=0)
    keep_checkpoints: int = setting(2, "the newest ones, and one known to be good", minimum=1)
    compare_unpacked: int = setting(
        0, "updates made again, unpacked, after the last checkpoint, for speed and equality; 0: none", minimum=0
    )
    on_nonfinite: str = setting(
        "stop", "an update whose loss or gradients are not finite; skip: leave it out, host", choices=("stop", "skip")
    )
    nonfinite_patience: int = setting(10, "skipped updates in a row that end the run", minimum=1)


def training_stages(layers_per_ipu: Sequence[int], *, heads_return: bool = True) -> int:
    """Stages of a training pipeline: 2 f - 1 with f forward stages.

    A forward stage is a run of blocks on one IPU. heads_return: the heads are on the first IPU, where the embedding
    table is, as in pre-training, so that four IPUs have 5 forward stages and 9 in training; otherwise 4 and 7.
    """
    later = sum(1 for layers in layers_per_ipu[1:] if layers)
    forward = 1 + later + bool(later and heads_return)
    return 2 * forward - 1


def mask_columns(model: ModelConfig, depth: int) -> int:
    """Columns that the product mask adds to query and key, for packs of up to ``depth`` sequences and padding.

    Two for each binary digit of a sequence's number (``model/products.py``), and as many more as make the inner
    dimension of the score product a multiple of 16, the channels that a pass of the IPU's matrix unit takes.
    """
    head = model.hidden_size // model.num_heads
    return -(-(head + 2 * depth.bit_length()) // 16) * 16 - head


class Change(NamedTuple):
    """One override applied to a configuration."""

    key: str
    before: Any
    after: Any


@dataclass(frozen=True)
class Config:
    """A whole, checked configuration."""

    task: PretrainingConfig = PretrainingConfig()
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    batch: BatchConfig = BatchConfig()
    engine: EngineConfig = EngineConfig()
    placement: PlacementConfig = PlacementConfig()
    run: RunConfig = RunConfig()
    without_ipus: Tuple[Tuple[str, Any], ...] = ()  # ("batch.micro_batch", 4), ...
    path: str = field(default="config", compare=False)  # where it came from, for messages
    origins: Mapping[str, str] = field(default_factory=dict, compare=False)  # "batch.micro_batch" -> "file"

    @property
    def name(self) -> str:
        """The file's name without its ending: names the run folder."""
        return Path(self.path).stem

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
        return " ".join(["python -m pack_data.build", *words] + ["--overwrite"] * overwrite)

    @property
    def ipus(self) -> int:
        """IPUs of all replicas."""
        return self.placement.replicas * self.placement.ipus_per_replica

    @property
    def pipeline_stages(self) -> int:
        """Stages of the training pipeline."""
        return training_stages(self.placement.layers_per_ipu)

    @property
    def schedule_steps(self) -> int:
        """Updates of the learning rate's schedule, after which it is 0, or stays where it is constant."""
        return self.optimizer.schedule_steps or self.run.steps

    def with_schedule(self) -> Config:
        """The same, with the length of the schedule stated, so that a run resumed with other steps keeps it."""
        stated = dataclasses.replace(self.optimizer, schedule_steps=self.schedule_steps)
        return dataclasses.replace(self, optimizer=stated)

    def accumulation(self, packing_factor: float) -> int:
        """Micro-batches per update and replica: the unpacked value divided by the packing factor, rounded up.

        Divided only where ``optimizer.packing_adjustment`` is "accumulation" (packedBERT, section 3.3).
        """
        if self.optimizer.packing_adjustment == "accumulation":
            return int(math.ceil(self.batch.gradient_accumulation / packing_factor))
        return self.batch.gradient_accumulation

    def micro_batches_per_update(self, packing_factor: float) -> int:
        """Micro-batches of all replicas in one update."""
        return self.accumulation(packing_factor) * self.placement.replicas

    def check_for_ipus(self, packing_factor: float) -> None:
        """Raise ConfigError for what IPUs do not have, and for an update that does not fill their pipeline."""
        check_on_ipus(self)
        check_accumulation(self, packing_factor)
        if self.batch.device_iterations != 1:
            raise ConfigError(
                f"{self.path}: batch.device_iterations is {self.batch.device_iterations}; must be 1 on IPUs, where a "
                "step is one call and one weight update"
            )

    def on_replicas(self, replicas: int) -> str:
        """The --set options for fewer replicas, with as many packs in an update."""
        accumulation = -(-self.batch.gradient_accumulation * self.placement.replicas // replicas)
        return replicas_options(replicas) + f" --set batch.gradient_accumulation={accumulation}"

    def packs_per_update(self, packing_factor: float) -> int:
        """Packs in one global batch, the rows of one ``Engine.step``."""
        return self.micro_batches_per_update(packing_factor) * self.batch.micro_batch

    def expected_sequences_per_update(self, packing_factor: float) -> float:
        """Mean sequences in one global batch."""
        return self.packs_per_update(packing_factor) * packing_factor

    def betas(self, packing_factor: float) -> Tuple[float, float]:
        """(beta1, beta2), each to the power of the packing factor where "betas" is the adjustment."""
        power = packing_factor if self.optimizer.packing_adjustment == "betas" else 1.0
        return self.optimizer.beta1**power, self.optimizer.beta2**power

    def mask_columns(self, depth: int) -> int:
        """As :func:`mask_columns`."""
        return mask_columns(self.model, depth)

    @property
    def sections(self) -> Dict[str, Any]:
        """The dataclass of each section."""
        return {name: getattr(self, name) for name in SECTIONS}

    def as_dict(self) -> Dict[str, Any]:
        """Nested plain values, ready for YAML; :func:`load_config` of them gives an equal Config."""
        tree: Dict[str, Any] = as_tree(self.sections)
        if self.without_ipus:
            tree["without_ipus"] = _nested(self.without_ipus)
        return tree

    def to_yaml(self) -> str:
        """All settings, as a file that `load_config` reads."""
        return yaml.safe_dump(self.as_dict(), sort_keys=False, default_flow_style=False)

    def annotated(self) -> str:
        """As :meth:`to_yaml`, with origin and meaning of each setting behind its value."""
        text = annotated(self.sections, self.origins)
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


SECTIONS = {
    "task": PretrainingConfig,
    "data": DataConfig,
    "model": ModelConfig,
    "loss": LossConfig,
    "optimizer": OptimizerConfig,
    "batch": BatchConfig,
    "engine": EngineConfig,
    "placement": PlacementConfig,
    "run": RunConfig,
}


def load_config(path: Union[str, Path], overrides: Sequence[str] = ()) -> Config:
    """Read, override and check a configuration file.

    Parameters
    ----------
    path : a YAML file with the sections of :class:`Config`; a setting that is left out has its default.
    overrides : ``"section.key=value"`` texts, the value in YAML; they win over the file and over its ``without_ipus``.

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
        if key in small.values and reader.origins.get(key) != OVERRIDE
    }
    sections = reader.sections()
    config = Config(
        without_ipus=tuple(kept.items()),
        path=path,
        origins=dict(reader.origins),
        **sections,
    )
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
    layers = small.value("model.num_layers") if small.stated("model.num_layers") else whole.value("model.num_layers")
    one = PlacementConfig(layers_per_ipu=(layers,))
    for name in (
        "replicas",
        "ipus_per_replica",
        "layers_per_ipu",
        "available_memory_proportion",
        "embedding_serialization_factor",
        "replicated_tensor_sharding",
    ):
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


def _rules(config: Config) -> List[Tuple[str, Any, str]]:
    """(settings a rule is about, whether it is broken, what is wrong)."""
    data, model, batch, engine, placement = config.data, config.model, config.batch, config.engine, config.placement
    depth = "null (unlimited)" if data.max_sequences_per_pack is None else data.max_sequences_per_pack
    slots, predictions = data.max_sequence_length, config.predictions_per_sequence
    layers, stages = placement.layers_per_ipu, config.pipeline_stages
    return [
        (
            "data.packer data.max_sequences_per_pack",
            data.packer == "none" and data.max_sequences_per_pack != 1,
            f"data.max_sequences_per_pack is {depth}; must be 1 where data.packer is none",
        ),
        (
            "data.packer data.max_sequences_per_pack",
            not packs_at_depth(data.packer, data.max_sequences_per_pack),
            f"data.max_sequences_per_pack is {depth}; too deep for data.packer {data.packer}",
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
            "model.hidden_size model.num_heads",
            model.hidden_size % model.num_heads != 0,
            f"model.hidden_size is {model.hidden_size}; must be a multiple of model.num_heads, {model.num_heads}",
        ),
        (
            "placement.layers_per_ipu model.num_layers",
            sum(layers) != model.num_layers,
            f"placement.layers_per_ipu places {sum(layers)} layers, model.num_layers is {model.num_layers}; "
            "change one of them",
        ),
        *engine_rules(engine, placement),
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
        *(rules_on_ipus(config) if engine.kind == "ipu" else ()),
    ]


def engine_rules(engine: EngineConfig, placement: PlacementConfig) -> List[Tuple[str, Any, str]]:
    """As :func:`_rules`, of these two sections alone, whatever is trained."""
    layers, proportions = len(placement.layers_per_ipu), len(placement.available_memory_proportion)
    each_ipu = f"must have one for each of the {placement.ipus_per_replica} IPUs of a replica"
    ipus = placement.replicas * placement.ipus_per_replica
    return [
        (
            "placement.layers_per_ipu placement.ipus_per_replica",
            layers != placement.ipus_per_replica,
            f"placement.layers_per_ipu has {layers} values; {each_ipu}",
        ),
        (
            "placement.available_memory_proportion placement.ipus_per_replica",
            proportions != placement.ipus_per_replica,
            f"placement.available_memory_proportion has {proportions} values; {each_ipu}",
        ),
        (
            "placement.replicas placement.ipus_per_replica",
            ipus & (ipus - 1) != 0,
            f"placement.replicas x placement.ipus_per_replica is {placement.replicas} x {placement.ipus_per_replica}"
            f" = {ipus}; must be a power of two",
        ),
        (
            "placement.replicated_tensor_sharding placement.replicas",
            placement.replicated_tensor_sharding and placement.replicas == 1,
            "placement.replicated_tensor_sharding is true; must be false with one replica",
        ),
        (
            "engine.ipu_model engine.offline_export",
            engine.ipu_model and engine.offline_export is not None,
            "engine.ipu_model is true; must be false where engine.offline_export compiles for real IPUs",
        ),
        (
            "engine.executable engine.offline_export engine.ipu_model engine.log_cycles",
            engine.executable is not None
            and (engine.offline_export is not None or engine.ipu_model or engine.log_cycles),
            "engine.executable names a program compiled without a device; engine.offline_export must be null, "
            "engine.ipu_model false, and engine.log_cycles false: such a program runs on IPUs and counts no cycles",
        ),
    ]


def rules_on_ipus(config: Any) -> List[Tuple[str, Any, str]]:
    """As :func:`_rules`, where IPUs make the updates; ``config`` is that of any task."""
    bound = config.optimizer.max_gradient_norm
    return [
        (
            "run.on_nonfinite engine.kind",
            config.run.on_nonfinite == "skip",
            "run.on_nonfinite is skip; must be stop on IPUs: a fused step cannot be taken back",
        ),
        (
            "optimizer.max_gradient_norm optimizer.name engine.kind",
            bound is not None and config.optimizer.name != "adamw",
            f"optimizer.max_gradient_norm is {bound}; must be null on IPUs with optimizer.name "
            f"{config.optimizer.name}: PopTorch clips for adamw only",
        ),
    ]


def check_on_ipus(config: Any) -> None:
    """Raise ConfigError, with every problem, for settings of any task that IPUs do not have."""
    problems = broken_rules(rules_on_ipus(config))
    if problems:
        raise ConfigError(problems_message(config.path, problems))


def replicas_options(replicas: int) -> str:
    """The --set options for so many replicas."""
    alone = " --set placement.replicated_tensor_sharding=false" if replicas == 1 else ""
    return f"--set placement.replicas={replicas}{alone}"


def schedule_too_short(setting: str, steps: int, schedule_steps: int) -> str:
    """What is wrong where a run makes more updates than its schedule has, and the way out."""
    return (
        f"{setting}; optimizer.schedule_steps is {schedule_steps}, where the learning rate reaches 0; "
        f"--set optimizer.schedule_steps={steps} makes the schedule longer, which changes the rates of the updates "
        "to come"
    )


def check_accumulation(config: Config, packing_factor: float) -> None:
    """Raise ConfigError if, packed, an update has fewer micro-batches than the pipeline has stages."""
    accumulation = config.accumulation(packing_factor)
    if accumulation < config.pipeline_stages:
        raise ConfigError(
            f"{config.path}: batch.gradient_accumulation is {config.batch.gradient_accumulation}, {accumulation} with "
            f"a packing factor of {packing_factor:.3f}; must be at least the {config.pipeline_stages} stages of the "
            "training pipeline"
        )
