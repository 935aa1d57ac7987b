"""What the configuration of every run has: its sections, the rules between settings, what follows from them.

What pre-training adds stands in `ipu_packed_bert.settings.pretraining`, what tasks with files of examples add in
`ipu_packed_bert.settings.finetuning`.  Loads neither torch nor poptorch.
"""

from __future__ import annotations

import abc
import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple, TypeVar

import yaml

from ipu_packed_bert.settings.reader import ConfigError, annotated, as_tree, broken_rules, problems_message, setting
from pack_data.packers import packs_at_depth

PRETRAINING = "pretraining"
# How the learning rate goes on after its warm-up; `optim.scheduled_rate` has the formulas.
SCHEDULES = ("linear", "polynomial", "cosine", "constant")

Rules = List[Tuple[str, Any, str]]  # (settings a rule is about, whether it is broken, what is wrong)
_Same = TypeVar("_Same", bound="Configuration")


@dataclass(frozen=True)
class TaskSettings:
    """What is learnt; each task adds its own settings."""

    name: str = setting(PRETRAINING, "what is trained on packs")


class DataSettings:
    """What every section `data` has; the tasks have their own defaults."""

    max_sequence_length: int
    packer: str
    max_sequences_per_pack: Optional[int]


class ModelSettings:
    """What every section `model` has."""

    vocabulary_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int


@dataclass(frozen=True)
class ModelConfig(ModelSettings):
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
class OptimizerSettings:
    """The optimiser."""

    name: str = setting("adamw", "which optimiser", choices=("lamb", "adamw"))
    learning_rate: float = setting(5.0e-5, "the peak, reached after the warm-up", above=0.0)
    warmup_fraction: float = setting(0.1, "share of the schedule's updates", minimum=0.0, maximum=1.0)
    schedule: str = setting("linear", "after the warm-up, from the peak to 0; constant stays there", choices=SCHEDULES)
    schedule_power: float = setting(1.0, "polynomial: of the share of its updates that is left", above=0.0)
    schedule_steps: Optional[int] = setting(
        None, "its updates, those of the warm-up included; null: those of the run when it starts", minimum=1
    )
    beta1: float = setting(0.9, "decay of the first moment, the mean gradient", minimum=0.0, below=1.0)
    beta2: float = setting(0.999, "decay of the second moment, the mean square", minimum=0.0, below=1.0)
    eps: float = setting(1.0e-6, "added to the root of the second moment", above=0.0)
    weight_decay: float = setting(0.01, "decoupled; not of biases and LayerNorms", minimum=0.0)
    bias_correction: bool = setting(True, "of the moments")
    max_weight_norm: float = setting(65500.0, "LAMB: bound of a tensor's norm in its trust ratio", minimum=0.0)
    max_gradient_norm: Optional[float] = setting(
        1.0, "bound of the whole update's; null: not clipped; on IPUs with adamw only", above=0.0
    )


@dataclass(frozen=True)
class BatchSettings:
    """A forward pass in rows, on which memory depends."""

    micro_batch: int = setting(4, "rows in one forward pass of one replica, at most", minimum=1, maximum=1 << 20)


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
        "CPU and GPU only: the number type of matrix products",
        choices=("float32", "tf32", "bfloat16"),
        note="; float16 would need a scaled loss, bfloat16 needs none",
    )
    attention: str = setting(
        "auto", "CPU and GPU only: the attention kernel", choices=("auto", "eager", "sdpa", "varlen")
    )
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
class RunSettings:
    """How often a run is written down, and from which seed."""

    seed: int = setting(5, "weights, dropout, order of the packs", minimum=0, maximum=2**31 - 1)
    evaluate_every: int = setting(0, "updates; 0: never, or where a task has scores only at the end", minimum=0)
    checkpoint_every: int = setting(0, "updates; 0: only at the end", minimum=0)
    keep_checkpoints: int = setting(2, "the newest ones, and one known to be good", minimum=1)
    compare_unpacked: int = setting(
        0, "updates made again, unpacked, after the last checkpoint, for speed and equality; 0: none", minimum=0
    )
    track: Optional[str] = setting(None, "a service that shows the curves, too", choices=("wandb", "mlflow"))


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
class Configuration(abc.ABC):
    """A whole, checked configuration of any run; `sections_of` names the classes of its sections."""

    task: TaskSettings = TaskSettings()
    data: DataSettings = DataSettings()
    model: ModelSettings = ModelSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    batch: BatchSettings = BatchSettings()
    engine: EngineConfig = EngineConfig()
    placement: PlacementConfig = PlacementConfig()
    run: RunSettings = RunSettings()
    path: str = field(default="config", compare=False)  # where it came from, for messages
    origins: Mapping[str, str] = field(default_factory=dict, compare=False)  # "batch.micro_batch" -> "file"

    section_names: ClassVar[Tuple[str, ...]] = ()
    command: ClassVar[str]  # that makes such a run
    heads_return: ClassVar[bool] = True  # the heads are on the first IPU, as in pre-training

    @property
    def name(self) -> str:
        """The file's name without its ending: names the run folder."""
        return Path(self.path).stem

    @property
    @abc.abstractmethod
    def packed(self) -> bool:
        """Whether a pack may hold more than one sequence."""

    @property
    def ipus(self) -> int:
        """IPUs of all replicas."""
        return self.placement.replicas * self.placement.ipus_per_replica

    @property
    def pipeline_stages(self) -> int:
        """Stages of the training pipeline."""
        return training_stages(self.placement.layers_per_ipu, heads_return=self.heads_return)

    @property
    @abc.abstractmethod
    def schedule_steps(self) -> int:
        """Updates of the learning rate's schedule, after which it is 0, or stays where it is constant."""

    @abc.abstractmethod
    def accumulation(self, packing_factor: float) -> int:
        """Micro-batches of an update for each replica."""

    def micro_batches_per_update(self, packing_factor: float) -> int:
        """Micro-batches of all replicas in one update."""
        return self.accumulation(packing_factor) * self.placement.replicas

    def packs_per_update(self, packing_factor: float) -> int:
        """Packs in one global batch, the rows of one ``Engine.step``."""
        return self.micro_batches_per_update(packing_factor) * self.batch.micro_batch

    def betas(self, packing_factor: float) -> Tuple[float, float]:
        """(beta1, beta2) of the optimiser at this packing factor."""
        return self.optimizer.beta1, self.optimizer.beta2

    @abc.abstractmethod
    def check_for_ipus(self, packing_factor: float) -> None:
        """Raise ConfigError for what IPUs do not have, and for an update that does not fill their pipeline."""

    def on_replicas(self, replicas: int) -> str:
        """The --set options for fewer replicas, with as many sequences in an update."""
        alone = " --set placement.replicated_tensor_sharding=false" if replicas == 1 else ""
        return f"--set placement.replicas={replicas}{alone}"

    def on_micro_batch(self, rows: int) -> str:
        """How a smaller micro-batch that fits is asked for, with as many sequences in an update."""
        return f"--set batch.micro_batch={rows} fits; an update stays as large"

    @property
    def sections(self) -> Dict[str, Any]:
        """The dataclass of each section."""
        return {name: getattr(self, name) for name in self.section_names}

    def as_dict(self) -> Dict[str, Any]:
        """Nested plain values, ready for YAML; reading them gives an equal configuration."""
        return as_tree(self.sections)

    def to_yaml(self) -> str:
        """All settings, as a file that can be read again."""
        return yaml.safe_dump(self.as_dict(), sort_keys=False, default_flow_style=False)

    def annotated(self) -> str:
        """As :meth:`to_yaml`, with origin and meaning of each setting behind its value."""
        return annotated(self.sections, self.origins)

    def on_engine(self: _Same, kind: str) -> _Same:
        """As it runs on this kind of engine (host, ipu, ipu_model), which is written down: a resumed run keeps it."""
        engine = dataclasses.replace(
            self.engine, kind="host" if kind == "host" else "ipu", ipu_model=kind == "ipu_model"
        )
        return dataclasses.replace(self, engine=engine)

    def with_schedule(self: _Same, steps: Optional[int] = None) -> _Same:
        """The same, with the length of the schedule stated, so that a run resumed with other steps keeps it."""
        steps = self.schedule_steps if steps is None else steps
        return dataclasses.replace(self, optimizer=dataclasses.replace(self.optimizer, schedule_steps=steps))


def shown_depth(data: DataSettings) -> str:
    """The packing depth of a section `data`, in a message."""
    return "null (unlimited)" if data.max_sequences_per_pack is None else str(data.max_sequences_per_pack)


def shared_rules(config: Configuration) -> Rules:
    """What the settings of every run must fulfil together."""
    data, model = config.data, config.model
    return [
        (
            "data.packer data.max_sequences_per_pack",
            not packs_at_depth(data.packer, data.max_sequences_per_pack),
            f"data.max_sequences_per_pack is {shown_depth(data)}; too deep for data.packer {data.packer}",
        ),
        (
            "model.hidden_size model.num_heads",
            model.hidden_size % model.num_heads != 0,
            f"model.hidden_size is {model.hidden_size}; must be a multiple of model.num_heads, {model.num_heads}",
        ),
        *_engine_rules(config.engine, config.placement),
        *(_rules_on_ipus(config) if config.engine.kind == "ipu" else ()),
    ]


def _engine_rules(engine: EngineConfig, placement: PlacementConfig) -> Rules:
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


def _rules_on_ipus(config: Configuration) -> Rules:
    """What the settings must fulfil together where IPUs make the updates."""
    bound = config.optimizer.max_gradient_norm
    return [
        (
            "optimizer.max_gradient_norm optimizer.name engine.kind",
            bound is not None and config.optimizer.name != "adamw",
            f"optimizer.max_gradient_norm is {bound}; must be null on IPUs with optimizer.name "
            f"{config.optimizer.name}: PopTorch clips for adamw only",
        ),
    ]


def check_on_ipus(config: Configuration) -> None:
    """Raise ConfigError, with every problem, for settings of any task that IPUs do not have."""
    problems = broken_rules(_rules_on_ipus(config))
    if problems:
        raise ConfigError(problems_message(config.path, problems))


def schedule_too_short(setting: str, steps: int, schedule_steps: int) -> str:
    """What is wrong where a run makes more updates than its schedule has, and the way out."""
    return (
        f"{setting}; optimizer.schedule_steps is {schedule_steps}, where the learning rate reaches 0; "
        f"--set optimizer.schedule_steps={steps} makes the schedule longer, which changes the rates of the updates "
        "to come"
    )
