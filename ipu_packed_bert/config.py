"""The configuration of a run: one YAML file -> frozen dataclasses, checked once, with every problem in one message.

A setting's dataclass field states its type, its default and its range; what several settings must fulfil together
stands in :func:`cross_check`.  Everything that follows from the settings (accumulation, packs per update, betas,
pipeline stages) is a method of :class:`Config` and is never stored.  Loads neither torch nor poptorch.
"""
import dataclasses
import difflib
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import AbstractSet, Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple, Union, get_type_hints

import yaml

from pack_data.command import Problems
from pack_data.packers import PACKERS, packs_at_depth
from pack_data.packs import default_predictions


class ConfigError(Problems):
    """What is wrong with a configuration: every problem found, each with its key, its value and the rule."""


class Rule(NamedTuple):
    """The range of one setting; None leaves a side open."""

    minimum: Optional[float] = None       # value >= minimum
    above: Optional[float] = None         # value > above
    maximum: Optional[float] = None       # value <= maximum
    below: Optional[float] = None         # value < below
    choices: Tuple[str, ...] = ()         # value is one of these

    def broken_by(self, value: Any) -> Optional[str]:
        """The rule in words if ``value`` (a number, a string or a tuple of numbers) breaks it, else None."""
        if self.choices:
            return None if value in self.choices else "must be one of {}".format(", ".join(self.choices))
        bounds = [("at least", self.minimum, lambda v, b: v >= b), ("above", self.above, lambda v, b: v > b),
                  ("at most", self.maximum, lambda v, b: v <= b), ("below", self.below, lambda v, b: v < b)]
        stated = [(words, bound, holds) for words, bound, holds in bounds if bound is not None]
        values = value if isinstance(value, tuple) else (value,)
        if all(holds(v, bound) for v in values for _, bound, holds in stated):
            return None
        each = "each must be " if isinstance(value, tuple) else "must be "
        return each + " and ".join("{} {}".format(words, "{:g}".format(bound) if isinstance(bound, float) else bound) for words, bound, _ in stated)


def setting(default: Any, **rule: Any) -> Any:
    """A dataclass field with a default and a :class:`Rule`."""
    return field(default=default, metadata={"rule": Rule(**rule)})


@dataclass(frozen=True)
class DataConfig:
    """The packed data set: where it lies, and how it is built if nothing lies there."""

    directory: str = setting("data/packed")
    corpus: str = setting("embedded")                                      # embedded, a file or a folder
    json_field: str = setting("text")                                      # of a JSONL corpus
    vocabulary: Optional[str] = setting(None)                              # vocab.txt; null: train one on the corpus
    vocabulary_size: int = setting(8192, minimum=128, maximum=2 ** 31 - 1)  # rows when training one
    max_sequence_length: int = setting(512, minimum=8)                     # slots per pack, S
    max_predictions_per_sequence: Optional[int] = setting(None, minimum=1)  # null: 20, 56, 76 at 128, 384, 512; else 15 %
    packer: str = setting("nnlshp", choices=PACKERS)
    max_sequences_per_pack: Optional[int] = setting(3, minimum=1)          # packing depth, D; null: unlimited
    duplication_factor: int = setting(5, minimum=1)                        # passes over the corpus, masked anew in each
    seed: int = setting(5, minimum=0, maximum=2 ** 31 - 1)


@dataclass(frozen=True)
class ModelConfig:
    """The sizes of a BERT; names as in the published configurations, spelled out."""

    vocabulary_size: int = setting(30522, minimum=8)                       # rows of the embedding table
    hidden_size: int = setting(768, minimum=1)
    num_layers: int = setting(12, minimum=1)
    num_heads: int = setting(12, minimum=1)
    intermediate_size: int = setting(3072, minimum=1)
    max_position_embeddings: int = setting(512, minimum=8)
    type_vocabulary_size: int = setting(2, minimum=2)
    hidden_dropout: float = setting(0.1, minimum=0.0, below=1.0)
    attention_dropout: float = setting(0.0, minimum=0.0, below=1.0)
    layer_norm_eps: float = setting(1.0e-3, above=0.0)
    initializer_range: float = setting(0.02, above=0.0)


@dataclass(frozen=True)
class LossConfig:
    """How an update's loss is normalised (packedBERT, section 3.2.3) and whether next-sentence prediction is part of it."""

    normalisation: str = setting("token", choices=("token", "sequence"))
    next_sentence: bool = setting(True)


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimiser as for unpacked data; ``packing_adjustment`` says what packing changes (packedBERT, section 3.3)."""

    name: str = setting("lamb", choices=("lamb", "adamw"))
    learning_rate: float = setting(2.828e-3, above=0.0)                    # the peak, reached after the warm-up
    warmup_fraction: float = setting(0.128, minimum=0.0, maximum=1.0)      # share of the schedule's updates
    schedule_steps: Optional[int] = setting(None, minimum=1)               # updates until the rate is 0; null: run.steps when the run starts
    beta1: float = setting(0.9, minimum=0.0, below=1.0)
    beta2: float = setting(0.999, minimum=0.0, below=1.0)
    eps: float = setting(1.0e-6, above=0.0)
    weight_decay: float = setting(0.01, minimum=0.0)
    bias_correction: bool = setting(True)
    max_weight_norm: float = setting(65500.0, minimum=0.0)                 # LAMB: bound of a tensor's norm in its trust ratio
    packing_adjustment: str = setting("accumulation", choices=("accumulation", "betas", "none"))


@dataclass(frozen=True)
class BatchConfig:
    """The batch of the unpacked run; the packed one follows from it and the packing factor."""

    micro_batch: int = setting(2, minimum=1)                               # packs in one forward pass of one replica
    gradient_accumulation: int = setting(2048, minimum=1)                  # micro-batches per update and replica, unpacked
    device_iterations: int = setting(1, minimum=1)


@dataclass(frozen=True)
class EngineConfig:
    """What runs the steps.  The settings after ``threads`` are read by the IPU engine only, and checked always."""

    kind: str = setting("auto", choices=("auto", "ipu", "host"))
    precision: str = setting("float32", choices=("float32", "bfloat16"))   # host
    attention: str = setting("auto", choices=("auto", "eager", "sdpa", "varlen"))  # host
    compile: bool = setting(False)                                         # host: torch.compile
    threads: Optional[int] = setting(None, minimum=1)                      # host; null: as many as torch chooses
    mask: str = setting("product", choices=("product", "additive"))        # inside the score product, or added to the scores
    half_weights: bool = setting(True)
    half_partials: bool = setting(True)
    stochastic_rounding: bool = setting(True)
    loss_scaling: float = setting(8192.0, above=0.0)
    automatic_loss_scaling: bool = setting(False)
    first_moment_type: str = setting("float32", choices=("float16", "float32"))
    gradient_accumulator_type: str = setting("float16", choices=("float16", "float32"))
    executable_cache: Optional[str] = setting(None)                        # folder
    synthetic_data: bool = setting(False)
    ipu_model: bool = setting(False)                                       # the simulated IPU instead of hardware
    offline_export: Optional[str] = setting(None)                          # file: compile for it, run nothing
    profile_directory: Optional[str] = setting(None)
    asynchronous_loading: bool = setting(True)
    log_cycles: bool = setting(False)
    recompute_layers: bool = setting(True)


@dataclass(frozen=True)
class PlacementConfig:
    """Replicas, and what each IPU of a replica holds; embeddings and heads are always on the first."""

    replicas: int = setting(1, minimum=1)
    ipus_per_replica: int = setting(1, minimum=1)
    layers_per_ipu: Tuple[int, ...] = setting((12,), minimum=0)
    available_memory_proportion: Tuple[float, ...] = setting((0.28,), above=0.0, maximum=1.0)
    embedding_serialization_factor: int = setting(1, minimum=1)
    optimizer_state_off_chip: bool = setting(True)
    replicated_tensor_sharding: bool = setting(False)


@dataclass(frozen=True)
class RunConfig:
    """How long, how often written down, and from which seed."""

    steps: int = setting(100, minimum=1)                                   # weight updates
    seed: int = setting(5, minimum=0, maximum=2 ** 31 - 1)                 # weights, dropout, order of the packs, held-out packs
    log_every: int = setting(1, minimum=1)                                 # steps between points in TensorBoard; log.jsonl has every step
    evaluate_every: int = setting(0, minimum=0)                            # steps; 0: never
    evaluation_fraction: float = setting(0.0, minimum=0.0, maximum=0.5)    # share of the packs held out of training
    checkpoint_every: int = setting(0, minimum=0)                          # steps; 0: only at the end
    keep_checkpoints: int = setting(2, minimum=1)


class Change(NamedTuple):
    """One override applied to a configuration."""

    key: str
    before: Any
    after: Any


@dataclass(frozen=True)
class Config:
    """A whole, checked configuration."""

    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    batch: BatchConfig = BatchConfig()
    engine: EngineConfig = EngineConfig()
    placement: PlacementConfig = PlacementConfig()
    run: RunConfig = RunConfig()
    without_ipus: Tuple[Tuple[str, Any], ...] = ()                         # ("batch.micro_batch", 4), ...
    path: str = field(default="config", compare=False)                     # where it came from, for messages

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
    def ipus(self) -> int:
        """IPUs of all replicas."""
        return self.placement.replicas * self.placement.ipus_per_replica

    @property
    def pipeline_stages(self) -> int:
        """Stages of the training pipeline: 2 f - 1 with f forward stages.

        A forward stage is a run of blocks on one IPU; the heads return to the first IPU, where the embedding table is,
        so four IPUs have 5 forward stages and 9 in training.
        """
        later = sum(1 for layers in self.placement.layers_per_ipu[1:] if layers)
        forward = later + 2 if later else 1
        return 2 * forward - 1

    @property
    def schedule_steps(self) -> int:
        """Updates until the learning rate has fallen to 0."""
        return self.optimizer.schedule_steps or self.run.steps

    def with_schedule(self) -> "Config":
        """The same, with the length of the schedule stated, so that a run resumed with other steps keeps it."""
        return dataclasses.replace(self, optimizer=dataclasses.replace(self.optimizer, schedule_steps=self.schedule_steps))

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

    def packs_per_update(self, packing_factor: float) -> int:
        """Packs in one global batch, the rows of one ``Engine.step``."""
        return self.micro_batches_per_update(packing_factor) * self.batch.micro_batch

    def expected_sequences_per_update(self, packing_factor: float) -> float:
        """Mean sequences in one global batch."""
        return self.packs_per_update(packing_factor) * packing_factor

    def betas(self, packing_factor: float) -> Tuple[float, float]:
        """(beta1, beta2); each to the power of the packing factor where the adjustment is "betas" (packedBERT, section 3.3)."""
        power = packing_factor if self.optimizer.packing_adjustment == "betas" else 1.0
        return self.optimizer.beta1 ** power, self.optimizer.beta2 ** power

    def mask_columns(self, depth: int) -> int:
        """Columns that the product mask adds to query and key, for packs of up to ``depth`` sequences and padding.

        Two for each binary digit of a sequence's number (``model/products.py``), and as many more as make the inner
        dimension of the score product a multiple of 16, the channels that a pass of the IPU's matrix unit takes.
        """
        head = self.model.hidden_size // self.model.num_heads
        return -(-(head + 2 * depth.bit_length()) // 16) * 16 - head

    def as_dict(self) -> Dict[str, Any]:
        """Nested plain values, ready for YAML; :func:`load_config` of them gives an equal Config."""
        plain: Dict[str, Any] = {
            section: {name: list(value) if isinstance(value, tuple) else value
                      for name, value in dataclasses.asdict(getattr(self, section)).items()}
            for section in SECTIONS}
        if self.without_ipus:
            nested: Dict[str, Dict[str, Any]] = {}
            for key, value in self.without_ipus:
                section, name = key.split(".")
                nested.setdefault(section, {})[name] = list(value) if isinstance(value, tuple) else value
            plain["without_ipus"] = nested
        return plain

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.as_dict(), sort_keys=False, default_flow_style=False)

    def applied_without_ipus(self) -> Tuple["Config", Tuple[Change, ...]]:
        """The configuration for a machine without IPUs, and what that changed."""
        changes = []
        sections: Dict[str, Dict[str, Any]] = {}
        for key, value in self.without_ipus:
            section, name = key.split(".")
            before = getattr(getattr(self, section), name)
            if before != value:
                changes.append(Change(key, before, value))
                sections.setdefault(section, {})[name] = value
        replaced = {section: dataclasses.replace(getattr(self, section), **values) for section, values in sections.items()}
        return dataclasses.replace(self, without_ipus=(), **replaced), tuple(changes)

    def for_simulation(self, packing_factor: float) -> "Config":
        """For a simulated device: one replica, and the fewest micro-batches that fill its pipeline."""
        # floor(stages x p) is the largest unpacked value that the packing factor p >= 1 divides to no more than stages.
        divided = self.optimizer.packing_adjustment == "accumulation"
        accumulation = int(self.pipeline_stages * (packing_factor if divided else 1.0))
        return dataclasses.replace(
            self, batch=dataclasses.replace(self.batch, gradient_accumulation=accumulation),
            placement=dataclasses.replace(self.placement, replicas=1, replicated_tensor_sharding=False))


SECTIONS = {
    "data": DataConfig, "model": ModelConfig, "loss": LossConfig, "optimizer": OptimizerConfig,
    "batch": BatchConfig, "engine": EngineConfig, "placement": PlacementConfig, "run": RunConfig,
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
    try:
        tree = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError("{}: cannot be read ({})".format(path, error.strerror)) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError("{}: not valid YAML: {}".format(path, " ".join(str(error).split()))) from None
    return config_from_tree(tree, str(path), overrides)


def config_from_tree(tree: Any, path: str, overrides: Sequence[str] = ()) -> Config:
    """As :func:`load_config`, from what YAML read."""
    found = _Problems()
    if tree is None:
        tree = {}
    if not isinstance(tree, Mapping):
        raise ConfigError("{}: holds {}, not sections of settings such as `model:`".format(path, type(tree).__name__))
    for key in tree:
        if key not in SECTIONS and key != "without_ipus":
            found.unknown("", str(key), list(SECTIONS) + ["without_ipus"])

    values = _flatten({key: tree[key] for key in tree if key in SECTIONS}, "", found)
    block = tree.get("without_ipus")
    if block is not None and not isinstance(block, Mapping):
        found.add("without_ipus is {!r}; must hold sections of settings, as the file itself does".format(block))
        block = None
    without_ipus = _flatten(block or {}, "without_ipus.", found)

    given: Dict[str, Any] = {}
    for override in overrides:
        key, equals, value_text = override.partition("=")
        key = key.strip()
        if not equals:
            found.add("--set {}: must read section.key=value".format(override))
            continue
        try:
            value = yaml.safe_load(value_text)
        except yaml.YAMLError:
            found.add("--set {}: the value is not valid YAML".format(override))
            continue
        if key == "without_ipus":
            if value is not None:
                found.add("--set {}: the block as a whole can only be switched off, with null".format(override))
            without_ipus = {}
        elif key.startswith("without_ipus."):
            without_ipus.update(_flatten(_nested(key[len("without_ipus."):], value), "--set without_ipus.", found))
        else:
            given.update(_flatten(_nested(key, value), "--set ", found))
    values.update(given)

    sections = {
        section: kind(**{name: values[key] for key, name in _keys(section) if key in values})
        for section, kind in SECTIONS.items()}
    kept = tuple((key, value) for key, value in without_ipus.items() if key not in given)
    config = Config(without_ipus=kept, path=path, **sections)
    crossed = cross_check(config, found.broken)
    for problem in crossed:
        found.add(problem)
    if kept:
        applied, _ = config.applied_without_ipus()
        for problem in cross_check(applied, found.broken):
            if problem not in crossed:
                found.add("without_ipus: " + problem)
    if found.lines:
        raise ConfigError(problems_message(path, found.lines))
    return config


def cross_check(config: Config, broken: AbstractSet[str] = frozenset()) -> List[str]:
    """What is wrong between settings that are each in range; one line a problem.

    ``broken`` names settings known to be wrong: what follows from them is not reported again.
    """
    data, model, batch, engine, placement = config.data, config.model, config.batch, config.engine, config.placement
    ipus = "placement.replicas placement.ipus_per_replica"
    depth = "null (unlimited)" if data.max_sequences_per_pack is None else data.max_sequences_per_pack
    checks = [
        ("data.packer data.max_sequences_per_pack", data.packer == "none" and data.max_sequences_per_pack != 1,
         "data.max_sequences_per_pack is {}; must be 1 where data.packer is none".format(depth)),
        ("data.packer data.max_sequences_per_pack", not packs_at_depth(data.packer, data.max_sequences_per_pack),
         "data.max_sequences_per_pack is {}; too deep for data.packer {}".format(depth, data.packer)),
        ("data.max_predictions_per_sequence data.max_sequence_length",
         (data.max_predictions_per_sequence or 0) >= data.max_sequence_length,
         "data.max_predictions_per_sequence is {}; must be below data.max_sequence_length, {}".format(
             data.max_predictions_per_sequence, data.max_sequence_length)),
        ("data.max_sequence_length model.max_position_embeddings",
         data.max_sequence_length > model.max_position_embeddings,
         "data.max_sequence_length is {}; must be at most model.max_position_embeddings, {}".format(
             data.max_sequence_length, model.max_position_embeddings)),
        ("data.vocabulary data.vocabulary_size model.vocabulary_size",
         data.vocabulary is None and data.vocabulary_size > model.vocabulary_size,
         "data.vocabulary_size is {}; must be at most model.vocabulary_size, {}".format(
             data.vocabulary_size, model.vocabulary_size)),
        ("model.hidden_size model.num_heads", model.hidden_size % model.num_heads != 0,
         "model.hidden_size is {}; must be a multiple of model.num_heads, {}".format(
             model.hidden_size, model.num_heads)),
        ("placement.layers_per_ipu model.num_layers", sum(placement.layers_per_ipu) != model.num_layers,
         "placement.layers_per_ipu places {} layers, model.num_layers is {}; change one of them".format(
             sum(placement.layers_per_ipu), model.num_layers)),
        ("placement.layers_per_ipu placement.ipus_per_replica",
         len(placement.layers_per_ipu) != placement.ipus_per_replica,
         "placement.layers_per_ipu has {} values; must have one for each of the {} IPUs of a replica".format(
             len(placement.layers_per_ipu), placement.ipus_per_replica)),
        ("placement.available_memory_proportion placement.ipus_per_replica",
         len(placement.available_memory_proportion) != placement.ipus_per_replica,
         "placement.available_memory_proportion has {} values; must have one for each of the {} IPUs of a replica".format(
             len(placement.available_memory_proportion), placement.ipus_per_replica)),
        (ipus, config.ipus & (config.ipus - 1) != 0,
         "placement.replicas x placement.ipus_per_replica is {} x {} = {}; must be a power of two".format(
             placement.replicas, placement.ipus_per_replica, config.ipus)),
        (ipus, config.ipus > 64,
         "placement.replicas x placement.ipus_per_replica is {} x {} = {}; must be at most 64 in one program".format(
             placement.replicas, placement.ipus_per_replica, config.ipus)),
        ("placement.embedding_serialization_factor model.vocabulary_size",
         model.vocabulary_size % placement.embedding_serialization_factor != 0,
         "placement.embedding_serialization_factor is {}; must divide model.vocabulary_size, {}".format(
             placement.embedding_serialization_factor, model.vocabulary_size)),
        ("placement.replicated_tensor_sharding placement.replicas",
         placement.replicated_tensor_sharding and placement.replicas == 1,
         "placement.replicated_tensor_sharding is true; must be false with one replica, there is nothing to share between"),
        ("batch.gradient_accumulation placement.layers_per_ipu",
         batch.gradient_accumulation < config.pipeline_stages,
         "batch.gradient_accumulation is {}; must be at least the {} stages of the training pipeline".format(
             batch.gradient_accumulation, config.pipeline_stages)),
        ("engine.ipu_model engine.offline_export", engine.ipu_model and engine.offline_export is not None,
         "engine.ipu_model is true; must be false where engine.offline_export compiles for real IPUs"),
        ("run.steps optimizer.schedule_steps", config.run.steps > config.schedule_steps, schedule_too_short(
            "run.steps is {}".format(config.run.steps), config.run.steps, config.schedule_steps)),
        ("run.evaluate_every run.evaluation_fraction", config.run.evaluate_every and not config.run.evaluation_fraction,
         "run.evaluate_every is {}; needs run.evaluation_fraction above 0, else nothing is held out to evaluate".format(
             config.run.evaluate_every)),
    ]
    return [text for keys, wrong, text in checks if wrong and not broken.intersection(keys.split())]


def schedule_too_short(setting: str, steps: int, schedule_steps: int) -> str:
    return ("{}; optimizer.schedule_steps is {}, where the learning rate reaches 0; --set optimizer.schedule_steps={} "
            "makes the schedule longer, which changes the rates of the updates to come".format(setting, schedule_steps, steps))


def check_accumulation(config: Config, packing_factor: float) -> None:
    """Raise ConfigError if, packed, an update has fewer micro-batches than the pipeline has stages."""
    accumulation = config.accumulation(packing_factor)
    if accumulation < config.pipeline_stages:
        raise ConfigError(
            "{}: batch.gradient_accumulation is {}, {} with a packing factor of {:.3f}; must be at least the {} stages "
            "of the training pipeline".format(config.path, config.batch.gradient_accumulation, accumulation,
                                              packing_factor, config.pipeline_stages))


def _keys(section: str) -> List[Tuple[str, str]]:
    return [(section + "." + each.name, each.name) for each in dataclasses.fields(SECTIONS[section])]


def _nested(key: str, value: Any) -> Dict[str, Any]:
    section, dot, name = key.partition(".")
    return {section: {name: value}} if dot else {section: value}


class _Problems:
    """Problems in the order found, and the settings they are about."""

    def __init__(self) -> None:
        self.lines: List[str] = []
        self.broken: Set[str] = set()

    def add(self, line: str, key: str = "") -> None:
        self.lines.append(line)
        self.broken.add(key)

    def unknown(self, origin: str, key: str, known: Sequence[str]) -> None:
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
        self.add("{}{} is not a setting{}".format(origin, key, "; did you mean {}?".format(near[0]) if near else ""),
                 near[0] if near else "")
        if near and near[0] in SECTIONS:
            self.broken.update(each for each, _ in _keys(near[0]))


def _flatten(tree: Mapping, origin: str, found: _Problems) -> Dict[str, Any]:
    """{"batch": {"micro_batch": 2}} -> {"batch.micro_batch": 2}, typed and in range; what is not goes into ``found``."""
    values: Dict[str, Any] = {}
    for section, settings in tree.items():
        if section not in SECTIONS:
            found.unknown(origin, str(section), list(SECTIONS))
            continue
        if not isinstance(settings, Mapping):
            found.add("{}{} is {!r}; must hold settings, one `key: value` a line".format(origin, section, settings))
            found.broken.update(each for each, _ in _keys(section))
            continue
        types = get_type_hints(SECTIONS[section])
        rules = {each.name: each.metadata["rule"] for each in dataclasses.fields(SECTIONS[section])}
        for name, raw in settings.items():
            key = "{}.{}".format(section, name)
            if name not in types:
                known = ["{}.{}".format(each, other) for each, kind in SECTIONS.items()
                         for other in get_type_hints(kind)]
                found.unknown(origin, key, known)
                continue
            try:
                value = typed_value(raw, types[name])
            except ValueError as error:
                found.add("{}{} is {!r}; {}".format(origin, key, raw, error), key)
                continue
            broken = rules[name].broken_by(value) if value is not None else None
            if broken:
                found.add("{}{} is {!r}; {}".format(origin, key, raw, broken), key)
            else:
                values[key] = value
    return values


# YAML 1.1 wants a point before the exponent and a sign in it: PyYAML reads 6e-3 and 1.0e5 as texts.
_EXPONENT = re.compile(r"([-+]?\d+)(\.\d*)?[eE]([-+]?\d+)")
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


def typed_value(raw: Any, kind: Any) -> Any:
    """``raw`` as the type ``kind``; ValueError with the rule if it is of another."""
    arguments = getattr(kind, "__args__", ())
    if type(None) in arguments:
        return None if raw is None else typed_value(raw, arguments[0])
    if arguments:                                                          # Tuple[int, ...]
        if not isinstance(raw, (list, tuple)) or not raw:
            raise ValueError("must be a list such as [{}]".format("3, 7" if arguments[0] is int else "0.1, 0.15"))
        return tuple(typed_value(each, arguments[0]) for each in raw)
    if kind is float and isinstance(raw, str) and _EXPONENT.fullmatch(raw):
        whole, rest, exponent = _EXPONENT.fullmatch(raw).groups()
        raise ValueError("YAML reads that as a text; write {}{}e{}".format(
            whole, rest or ".0", exponent if exponent[0] in "+-" else "+" + exponent))
    if kind is float and isinstance(raw, (int, float)) and not isinstance(raw, bool):
        if not math.isfinite(raw):
            raise ValueError("must be finite")
        return float(raw)
    if isinstance(raw, kind) and (kind is bool or not isinstance(raw, bool)):
        return raw
    raise ValueError("must be {}".format(_WORDS[kind]))


def problems_message(path: str, problems: Sequence[str]) -> str:
    if len(problems) == 1:
        return "{}: {}".format(path, problems[0])
    return "\n  ".join(["{}: {} problems".format(path, len(problems))] + list(problems))
