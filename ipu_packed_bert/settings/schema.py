"""The sections of a configuration: each setting with its default, range, meaning, and rule for resumed runs.

The rules between settings are in `ipu_packed_bert.settings.rules`, the values that follow from them in
`ipu_packed_bert.settings.config`, the sections `task` of fine-tuning in `ipu_packed_bert.settings.finetuning`.
Loads neither torch nor poptorch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Dict, Mapping, Optional, Sequence, Tuple, Union

from pack_data.building.declared import DataSettings
from pack_data.reading.declare import AUTO, FREE, setting, setting_of, settings_in

# The commands, which differ in settings and defaults.
PRETRAIN = "pretrain"
FINETUNE = "finetune"
PRETRAINING = "pretraining"  # the task of PRETRAIN
# The tasks of FINETUNE.
SQUAD = "squad"
SINGLE_LABEL = "single_label"
MULTI_LABEL = "multi_label"
REGRESSION = "regression"
TOKENS = "tokens"
TASK_NAMES = (
    PRETRAINING,
    SQUAD,
    SINGLE_LABEL,
    MULTI_LABEL,
    REGRESSION,
    TOKENS,
)
OWN_TASK = r"(.+\.py):(\w+)"  # a task's name that is a class in a file of the user, see `settings.user_task`
# The learning rate after its warm-up; `optimizer.learning_rate` computes it.
SCHEDULES = ("linear", "polynomial", "cosine", "constant")

# Reasons why a resumed run never changes a setting.
SAME_NETWORK = "a resumed run keeps its network"
_DATA = "a resumed run keeps its data"
_ORDER = "it determines the order of the packs, which a resumed run keeps"
_TASK = "a resumed run keeps its task"

_MAX_SEED = 2**31 - 1
# LAMB and AdamW, as published for BERT.
EPSILON = 1.0e-6  # added to the root of the second moment
# LAMB: bound of a tensor's norm in its trust ratio, almost the largest number of float16.
MAX_WEIGHT_NORM = 65500.0
# Settings of version 1.0 that are constants now. A file may still state them with these values.
FIXED: Mapping[str, Any] = {
    "optimizer.eps": EPSILON,
    "optimizer.max_weight_norm": MAX_WEIGHT_NORM,
    "run.on_nonfinite": "stop",
}


@dataclass(frozen=True)
class TaskConfig:
    """The task; each task of fine-tuning adds settings."""

    name: str = setting(
        PRETRAINING,
        "the task",
        default_of={FINETUNE: SQUAD},
        choices=TASK_NAMES,
        pattern=OWN_TASK,
        note=", or FILE.py:CLASS, a task of your own",
        resume=_TASK,
    )


def _of_build(name: str, **changes: Any) -> Any:
    """Declare a setting of pre-training that is an option of the build of its data set."""
    return setting_of(DataSettings, name, **{"of": PRETRAIN, "resume": _DATA, **changes})


@dataclass(frozen=True)
class DataConfig:
    """The data and their packing.

    Pre-training: the packed data set, and the options of the build if its directory is empty. Fine-tuning: files of
    examples, which are first looked up in --data-dir.
    """

    directory: str = setting(
        "data/packed",
        "directory of the data set",
        flag="--data",
        metavar="DIR",
        of=PRETRAIN,
        resume=FREE,
    )
    mixed_with: Optional[Tuple[str, ...]] = setting(
        None,
        "further data sets of the same build options; an epoch mixes all packs",
        of=PRETRAIN,
        resume=FREE,
    )
    shares: Optional[Tuple[float, ...]] = setting(
        None,
        "weight of each data set in an epoch, that of directory first; null: its number of packs",
        of=PRETRAIN,
        above=0.0,
    )
    corpus: str = _of_build("corpus", resume=FREE)
    json_field: str = _of_build("json_field", resume=FREE)
    vocabulary: Optional[str] = _of_build("vocabulary", resume=FREE)
    vocabulary_size: int = _of_build("vocabulary_size")
    training: Optional[str] = setting(
        None, "file to train on; null: only evaluate", of=FINETUNE, resume=FREE
    )
    evaluation: Optional[str] = setting(
        None, "file to evaluate on; null: none", of=FINETUNE, resume=FREE
    )
    training_examples: Optional[int] = setting(
        None, "questions or texts drawn at random; null: all", of=FINETUNE, minimum=1, resume=_DATA
    )
    evaluation_examples: Optional[int] = setting(
        None,
        "questions or texts drawn at random, the same for every seed; null: all",
        of=FINETUNE,
        minimum=1,
        resume=FREE,
    )
    max_sequence_length: int = _of_build("max_sequence_length", of="", default_of={FINETUNE: 384})
    max_predictions_per_sequence: Optional[int] = _of_build("max_predictions_per_sequence")
    packer: str = _of_build("packer", of="")
    max_sequences_per_pack: Union[int, str, None] = _of_build(
        "max_sequences_per_pack", of="", default_of={FINETUNE: None}
    )
    duplication_factor: int = _of_build("duplication_factor")
    whole_word_masking: bool = _of_build("whole_word_masking")
    draw_documents: str = _of_build("draw_documents", resume=FREE)
    seed: int = _of_build(
        "seed",
        of="",
        default_of={FINETUNE: 5},
        meaning="pre-training: segments, masks and packs; fine-tuning: choice of examples",
    )
    held_out: float = _of_build("held_out", resume=FREE)
    evaluation_directory: Optional[str] = setting(
        None, "data set to evaluate on; null: the held-out documents", of=PRETRAIN, resume=FREE
    )

    @property
    def depth(self) -> Optional[int]:
        """The packing depth, None if it is unlimited or the build chooses it."""
        depth = self.max_sequences_per_pack
        return None if isinstance(depth, str) else depth

    @property
    def build_options(self) -> Dict[str, Any]:
        """The options of the build of the data set, but for its directory."""
        names = settings_in(DataSettings)
        return {name: value for name, value in vars(self).items() if name in names}

    @property
    def folders(self) -> Tuple[str, ...]:
        """Directories of the data sets to train on."""
        return (self.directory, *(self.mixed_with or ()))

    @property
    def named(self) -> str:
        """The directories for a message, with their shares if these are stated."""
        if self.shares is None:
            return " + ".join(self.folders)
        terms = [f"{share:g} x {folder}" for share, folder in zip(self.shares, self.folders)]
        return " + ".join(terms)


@dataclass(frozen=True)
class StartConfig:
    """The initial weights of fine-tuning; the sizes apply only to a model that is trained from scratch."""

    checkpoint: Optional[str] = setting(
        None,
        "Hugging Face directory, a run, or an installed package of weights; null: from scratch",
        of=FINETUNE,
    )
    vocabulary: Optional[str] = setting(
        None,
        "vocab.txt; null: the checkpoint's, or a new one of the texts",
        of=FINETUNE,
        resume=FREE,
    )
    hidden_dropout: Optional[float] = setting(
        None,
        "dropout rate of features; null: the checkpoint's",
        of=FINETUNE,
        minimum=0.0,
        below=1.0,
    )
    attention_dropout: Optional[float] = setting(
        None,
        "dropout rate of attention weights; null: the checkpoint's",
        of=FINETUNE,
        minimum=0.0,
        below=1.0,
    )


@dataclass(frozen=True)
class ModelConfig:
    """The sizes of a BERT; names as in the published configurations, spelled out."""

    # The maxima exceed those of all existing networks, so that a typing error is reported before anything is allocated.
    vocabulary_size: int = setting(
        30522,
        "rows of the embedding table; default in pre-training: the data set's vocabulary; fine-tuning: size of a "
        "trained vocabulary",
        default_of={FINETUNE: 4096},
        minimum=8,
        maximum=1 << 24,
        resume=SAME_NETWORK,
    )
    hidden_size: int = setting(
        768,
        "features of a token",
        default_of={FINETUNE: 256},
        minimum=1,
        maximum=1 << 16,
        resume=SAME_NETWORK,
    )
    num_layers: int = setting(
        12,
        "encoder layers",
        default_of={FINETUNE: 4},
        minimum=1,
        maximum=1 << 12,
        resume=SAME_NETWORK,
    )
    num_heads: int = setting(
        12,
        "attention heads per layer",
        default_of={FINETUNE: 4},
        minimum=1,
        maximum=1 << 12,
        resume=SAME_NETWORK,
    )
    intermediate_size: int = setting(
        3072,
        "features inside a feed-forward block",
        default_of={FINETUNE: 1024},
        minimum=1,
        maximum=1 << 20,
        resume=SAME_NETWORK,
    )
    max_position_embeddings: int = setting(
        512,
        "positions; default: at least data.max_sequence_length",
        of=PRETRAIN,
        minimum=8,
        maximum=1 << 20,
        resume=SAME_NETWORK,
    )
    type_vocabulary_size: int = setting(
        2, "number of segments", of=PRETRAIN, minimum=2, maximum=1 << 16, resume=SAME_NETWORK
    )
    hidden_dropout: float = setting(
        0.1, "dropout rate of features", of=PRETRAIN, minimum=0.0, below=1.0
    )
    attention_dropout: float = setting(
        0.0, "dropout rate of attention weights", of=PRETRAIN, minimum=0.0, below=1.0
    )
    layer_norm_eps: float = setting(
        1.0e-3,
        "as published for IPUs; the original BERT has 1.0e-12",
        of=PRETRAIN,
        above=0.0,
        resume=SAME_NETWORK,
    )
    # Not used in pre-training: kept for the export of an imported checkpoint, and for its fine-tuning.
    classifier_dropout: Optional[float] = setting(
        None,
        "dropout rate before a classifier in fine-tuning; null: hidden_dropout",
        of=PRETRAIN,
        minimum=0.0,
        below=1.0,
        resume=FREE,
    )
    initializer_range: float = setting(
        0.02, "standard deviation of initial weights", of=PRETRAIN, above=0.0, resume=FREE
    )

    @property
    def head_dropout(self) -> float:
        """Dropout rate before a classifier."""
        if self.classifier_dropout is None:
            return self.hidden_dropout
        return self.classifier_dropout


@dataclass(frozen=True)
class LossConfig:
    """The terms of an update's loss, and its normalisation (packedBERT, section 3.2.3)."""

    normalisation: str = setting(
        "token", "mean over tokens, or over sequences", of=PRETRAIN, choices=("token", "sequence")
    )
    next_sentence: bool = setting(
        True, "also train next-sentence prediction", of=PRETRAIN, resume=SAME_NETWORK
    )


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimiser; pre-training states that of unpacked data and the adjustment to packing (packedBERT, 3.3)."""

    name: str = setting(
        "lamb", "the optimiser", default_of={FINETUNE: "adamw"}, choices=("lamb", "adamw")
    )
    learning_rate: float = setting(
        2.828e-3, "the peak, reached after the warm-up", default_of={FINETUNE: 5.0e-5}, above=0.0
    )
    warmup_fraction: float = setting(
        0.128,
        "fraction of the schedule's updates",
        default_of={FINETUNE: 0.1},
        minimum=0.0,
        maximum=1.0,
    )
    schedule: str = setting(
        "linear", "after the warm-up, from the peak to 0; constant: no decay", choices=SCHEDULES
    )
    schedule_power: float = setting(
        1.0, "polynomial: exponent of the remaining fraction of updates", above=0.0
    )
    schedule_steps: Optional[int] = setting(
        None,
        "updates of the schedule, warm-up included; null: those of the run when it starts",
        minimum=1,
        resume=FREE,
    )
    beta1: float = setting(
        0.9, "decay of the first moment, the mean gradient", minimum=0.0, below=1.0
    )
    beta2: float = setting(
        0.999, "decay of the second moment, the mean square", minimum=0.0, below=1.0
    )
    weight_decay: float = setting(
        0.01, "decoupled; not applied to biases and LayerNorms", minimum=0.0
    )
    bias_correction: bool = setting(True, "correct the moments for their start at 0")
    max_gradient_norm: Optional[float] = setting(
        None,
        "clip the norm of the whole update's gradient; null: no clipping; on IPUs with adamw only",
        default_of={FINETUNE: 1.0},
        above=0.0,
    )
    packing_adjustment: str = setting(
        "accumulation",
        "the quantity that the packing factor changes",
        of=PRETRAIN,
        choices=("accumulation", "betas", "none"),
    )


# `Config.with_micro_batch` replaces "auto" by a number before anything is computed.
if TYPE_CHECKING:
    Rows = int
else:
    Rows = Union[int, str]


@dataclass(frozen=True)
class BatchConfig:
    """The size of an update, and that of its forward passes, which determines memory.

    Pre-training states the batch of the unpacked run; that of the packed run follows from the packing factor.
    """

    micro_batch: Rows = setting(
        2,
        "packs in one forward pass of one replica, in fine-tuning the most; auto: chosen for the host",
        default_of={FINETUNE: 4},
        choices=(AUTO,),
        note=" or a whole number",
        minimum=1,
        maximum=1 << 20,
    )
    sequences_per_update: int = setting(
        32, "approximate: an update has whole packs", of=FINETUNE, minimum=1
    )
    gradient_accumulation: int = setting(
        2048,
        "micro-batches per update and replica, unpacked; packs if micro_batch is auto",
        of=PRETRAIN,
        minimum=1,
        maximum=1 << 24,
    )


@dataclass(frozen=True)
class EngineConfig:
    """The device of the updates.

    Only the IPU engine uses the settings after ``processes``, except ``recompute_layers``; they are always checked.
    """

    kind: str = setting(
        "auto",
        "where to run; auto: IPUs, the IPU Model, CUDA, the CPU, in this order",
        flag="--engine",
        metavar="KIND",
        choices=("auto", "ipu", "host"),
        resume=FREE,
    )
    device: str = setting(
        "auto", "host; auto: CUDA, else the CPU", choices=("auto", "cpu", "cuda"), resume=FREE
    )
    precision: str = setting(
        "float32",
        "CPU and GPU only: the number type of matrix products",
        choices=("float32", "tf32", "bfloat16"),
        note="; float16 would need a scaled loss, bfloat16 needs none",
    )
    attention: str = setting(
        "auto",
        "CPU and GPU only: the attention kernel",
        choices=("auto", "eager", "sdpa", "varlen"),
        resume=FREE,
    )
    compile: bool = setting(False, "host: use torch.compile", resume=FREE)
    deterministic: bool = setting(
        False, "CUDA: the same bits in every run, slower; always so on CPUs", resume=FREE
    )
    threads: Optional[int] = setting(
        None, "host: threads; null: torch's number", minimum=1, resume=FREE
    )
    processes: int = setting(
        1,
        "host: the number of torchrun processes that the settings are tuned for; any number works",
        minimum=1,
        resume=FREE,
    )
    mask: str = setting(
        "product",
        "mask inside the score product, or added to the scores",
        choices=("product", "additive"),
        resume=FREE,
    )
    half_weights: bool = setting(True, "weights in float16")
    half_logits: bool = setting(
        False,
        "soft-max and loss of masked tokens in the weights' type: a third of the memory for logits",
    )
    half_partials: bool = setting(True, "partial sums of products in float16")
    stochastic_rounding: bool = setting(True, "round float16 results at random, without bias")
    loss_scaling: float = setting(8192.0, "keeps float16 gradients in range", above=0.0)
    automatic_loss_scaling: bool = setting(False, "the device adapts loss_scaling")
    first_moment_type: str = setting(
        "float32", "number type of the optimiser's first moment", choices=("float16", "float32")
    )
    gradient_accumulator_type: str = setting(
        "float16", "number type of the summed gradients", choices=("float16", "float32")
    )
    executable_cache: Optional[str] = setting(None, "directory of compiled programs", resume=FREE)
    synthetic_data: bool = setting(False, "keep batches on the host, to measure the device alone")
    ipu_model: bool = setting(False, "the simulated IPU instead of hardware", resume=FREE)
    offline_export: Optional[str] = setting(
        None, "file: compile into it without running", resume=FREE
    )
    executable: Optional[str] = setting(
        None,
        "file of engine.offline_export: run it without compiling a training program",
        resume=FREE,
    )
    profile_directory: Optional[str] = setting(
        None, "directory for PopVision's profile", resume=FREE
    )
    asynchronous_loading: bool = setting(True, "prepare the next batch during a step", resume=FREE)
    log_cycles: bool = setting(False, "count the cycles of each step", resume=FREE)
    recompute_layers: Optional[bool] = setting(
        None,
        "keep only each layer's input for the backward pass; null: on IPUs yes, on the host no",
        resume=FREE,
    )

    def recomputes(self, *, ipus: bool) -> bool:
        """Return True if the backward pass recomputes each layer from its input."""
        return ipus if self.recompute_layers is None else self.recompute_layers


@dataclass(frozen=True)
class PlacementConfig:
    """Replicas, and the layers of each IPU of a replica; embeddings and heads are always on the first."""

    machine: str = setting(
        "mk2",
        "IPU by its clock: mk2 1.33 GHz, bow 1.85 GHz; the program is the same",
        choices=("mk2", "bow"),
        resume=FREE,
    )
    replicas: int = setting(1, "copies of the model", minimum=1)
    ipus_per_replica: int = setting(1, "IPUs of one copy of the model", minimum=1, resume=FREE)
    layers_per_ipu: Tuple[int, ...] = setting(
        (12,),
        "encoder layers of each IPU; default with one IPU: model.num_layers",
        minimum=0,
        resume=FREE,
    )
    available_memory_proportion: Tuple[float, ...] = setting(
        (0.28,), "memory for products, for each IPU", above=0.0, maximum=1.0, resume=FREE
    )
    embedding_serialization_factor: int = setting(
        1, "parts of the vocabulary projection", minimum=1, resume=FREE
    )
    optimizer_state_off_chip: bool = setting(
        True, "optimiser state in streaming memory", resume=FREE
    )
    replicated_tensor_sharding: bool = setting(
        False, "divide the optimiser state among the replicas", resume=FREE
    )


@dataclass(frozen=True)
class RunConfig:
    """The length of a run, the intervals of checkpoints and evaluations, and its seed."""

    seed: int = setting(
        5,
        "initial weights, dropout, order of the packs",
        minimum=0,
        maximum=_MAX_SEED,
        resume=_ORDER,
    )
    evaluate_every: int = setting(
        0,
        "updates between evaluations; 0: never, or only at the end for tasks with scores",
        minimum=0,
        resume=FREE,
    )
    checkpoint_every: int = setting(
        0, "updates between checkpoints; 0: only at the end", minimum=0, resume=FREE
    )
    keep_checkpoints: int = setting(
        2,
        "newest checkpoints to keep, in addition to one that is known to be good",
        default_of={FINETUNE: 1},
        minimum=1,
        resume=FREE,
    )
    compare_unpacked: int = setting(
        0,
        "updates repeated unpacked after the last checkpoint, to compare speed and results; 0: none",
        metavar="N",
        rare=True,
        minimum=0,
        resume=FREE,
    )
    track: Optional[str] = setting(
        None,
        "service that also shows the curves: wandb or mlflow",
        metavar="NAME",
        rare=True,
        choices=("wandb", "mlflow"),
        resume=FREE,
    )
    steps: int = setting(
        100, "weight updates of the whole run", metavar="N", of=PRETRAIN, minimum=1, resume=FREE
    )
    epochs: int = setting(
        2, "passes over the training examples", of=FINETUNE, minimum=1, resume=FREE
    )


def training_stages(layers_per_ipu: Sequence[int], *, heads_return: bool = True) -> int:
    """Return the stages of a training pipeline: 2 f - 1 with f forward stages.

    A forward stage is a run of blocks on one IPU.

    Args:
        layers_per_ipu: encoder layers of each IPU.
        heads_return: the heads are on the first IPU with the embedding table, as in pre-training: four IPUs then have
            5 forward stages and 9 stages in training, otherwise 4 and 7.
    """
    later = sum(layers > 0 for layers in layers_per_ipu[1:])
    forward = 1 + later
    if later and heads_return:
        forward += 1
    return 2 * forward - 1


def mask_columns(model: ModelConfig, depth: int) -> int:
    """Return the columns that the product mask adds to query and key.

    There are two for each binary digit of a sequence's number (``model/products.py``), and more until the inner
    dimension of the score product is a multiple of 16, the channels of a pass of the IPU's matrix unit.

    Args:
        model: sizes of the network.
        depth: most sequences of a pack.
    """
    channels = 16
    head = model.hidden_size // model.num_heads
    width = head + 2 * depth.bit_length()
    return -(-width // channels) * channels - head
