"""The configuration of a run, one type for both commands, with the arithmetic of its batch.

Settings are declared in `ipu_packed_bert.settings.schema`, the rules between them in `ipu_packed_bert.settings.rules`;
`ipu_packed_bert.settings.loading` reads them.  Methods of :class:`Config` compute what follows from the settings
(accumulation, packs per update, betas, pipeline stages); it is never stored.  Loads neither torch nor poptorch.
"""

from __future__ import annotations

import dataclasses
import math
import shlex
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Tuple, Type, TypeVar

import yaml

from ipu_packed_bert.settings.declare import Chosen, declared, nested, plain
from ipu_packed_bert.settings.schema import (
    FINETUNE,
    PRETRAIN,
    PRETRAINING,
    BatchConfig,
    DataConfig,
    EngineConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    PlacementConfig,
    RunConfig,
    StartConfig,
    TaskConfig,
    training_stages,
)
from ipu_packed_bert.settings.yaml_files import ConfigError as ConfigError
from pack_data.building.declared import DataSettings
from pack_data.reading.declare import AUTO, Setting, settings_in, words_of
from pack_data.reading.words import counted
from pack_data.store.packs import default_predictions

# (attribute of Config, section of a file, class), without the task, whose class depends on its name.
PARTS = (
    ("data", "data", DataConfig),
    ("start", "model", StartConfig),
    ("model", "model", ModelConfig),
    ("loss", "loss", LossConfig),
    ("optimizer", "optimizer", OptimizerConfig),
    ("batch", "batch", BatchConfig),
    ("engine", "engine", EngineConfig),
    ("placement", "placement", PlacementConfig),
    ("run", "run", RunConfig),
)
# Slots of a host's forward pass. Measured with BERT of hidden size 256, 512 slots, one thread: 4 rows take 0.93
# (float32) and 0.83 (bfloat16) of the time of 2 rows on an AMD EPYC with AMX, and 0.99 (float32) on one with AVX2,
# where more rows gain up to 3 %. It is a constant, so that a run does not depend on a clock.
_SLOTS_AT_ONCE = 2048
BLOCK = "without_ipus"  # a block of settings for a machine without IPUs; pre-training only
_Task = TypeVar("_Task", bound=TaskConfig)


@lru_cache(None)
def settings_of(command: str, task: type = TaskConfig) -> Dict[str, Setting]:
    """Return the settings of a command by full name, section.name, in the order in which they are written.

    Args:
        command: ``"pretrain"`` or ``"finetune"``.
        task: the class of the section `task`.
    """
    return declared([("task", "task", task), *PARTS], command)


def fast_micro_batch(rows: int, slots: int, *, ranks: int = 1) -> int:
    """Return the packs of a forward pass that a host computes fastest: about `_SLOTS_AT_ONCE` slots.

    Args:
        rows: packs of an update.
        slots: slots of a pack.
        ranks: processes that share the update.

    Returns:
        At most the share of a process; of similar sizes the one with the fewest empty packs in all processes.
    """
    wanted = max(1, _SLOTS_AT_ONCE // slots)

    def drawbacks(size: int) -> Tuple[int, float]:
        passes = math.ceil(rows / size)
        slots_of_ranks = math.ceil(passes / ranks) * ranks * size
        return slots_of_ranks, abs(math.log(size / wanted))

    rows_of_rank = math.ceil(rows / ranks)
    sizes = range(max(1, wanted // 2), 2 * wanted + 1)
    return min([size for size in sizes if size <= rows_of_rank] or [rows_of_rank], key=drawbacks)


class Change(NamedTuple):
    """One setting of a configuration that was changed."""

    key: str
    before: Any
    after: Any


@dataclass(frozen=True)
class Config:
    """A complete, checked configuration of pre-training or fine-tuning, depending on ``task.name``.

    Settings of the other command have their defaults and are not written.
    """

    task: TaskConfig = TaskConfig()
    data: DataConfig = DataConfig()
    start: StartConfig = StartConfig()  # in the section `model` of fine-tuning
    model: ModelConfig = ModelConfig()
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    batch: BatchConfig = BatchConfig()
    engine: EngineConfig = EngineConfig()
    placement: PlacementConfig = PlacementConfig()
    run: RunConfig = RunConfig()
    without_ipus: Tuple[Tuple[str, Any], ...] = ()  # ("batch.micro_batch", 4), ...
    path: str = field(default="config", compare=False)  # the file, for messages
    # "batch.micro_batch" -> "file"
    origins: Mapping[str, str] = field(default_factory=dict, compare=False)

    @property
    def command(self) -> str:
        """The command that starts the run."""
        return PRETRAIN if self.task.name == PRETRAINING else FINETUNE

    @property
    def name(self) -> str:
        """The file's name without its suffix, which names the run directory."""
        return Path(self.path).stem

    # ---------------------------------------------------------------------------------------------- values as settings

    @property
    def settings(self) -> Dict[str, Setting]:
        """The settings of this configuration's command and task, by full name."""
        task: Any = type(self.task)
        return settings_of(self.command, task)

    def value(self, key: str) -> Any:
        """Return the value of a setting by its full name."""
        setting = self.settings[key]
        return getattr(getattr(self, setting.attribute), setting.name)

    def of_task(self, kind: Type[_Task]) -> _Task:
        """Return the section `task` as an object of its class ``kind``."""
        assert isinstance(self.task, kind)
        return self.task

    def as_dict(self) -> Dict[str, Any]:
        """Return nested plain values, ready for YAML; reading them gives an equal configuration."""
        tree: Dict[str, Any] = nested({key: self.value(key) for key in self.settings})
        if self.without_ipus:
            tree[BLOCK] = nested(dict(self.without_ipus))
        return tree

    def to_yaml(self) -> str:
        """Return all settings as a file that can be read again."""
        return _yaml(self.as_dict())

    def annotated(self) -> str:
        """Return all settings as YAML, each value followed by its origin and meaning."""
        lines: List[str] = []
        last_section = None
        for key, setting in self.settings.items():
            section = key.partition(".")[0]
            if section != last_section:
                lines += ["", f"{section}:"]
                last_section = section
            value = yaml.safe_dump(plain(self.value(key)), default_flow_style=True, width=10**6)
            value = value.replace("\n...", "").strip()  # without YAML's end marker
            stated = f"  {setting.name}: {value}"
            comment = "; ".join(filter(None, [self.origins.get(key, ""), setting.meaning]))
            lines.append(f"{stated:<44} # {comment}".rstrip(" #"))
        text = "\n".join(lines[1:]) + "\n"
        if self.without_ipus:
            text += "\n" + _yaml({BLOCK: nested(dict(self.without_ipus))})
        return text

    def with_settings(self, values: Mapping[str, Any], origin: str) -> Config:
        """Return an unchecked copy with other values of some settings, by full name, and their origin."""
        changed: Dict[str, Dict[str, Any]] = {}
        for key, value in values.items():
            setting = self.settings[key]
            changed.setdefault(setting.attribute, {})[setting.name] = value
        config = self
        for attribute, part in changed.items():
            config = config.changed(attribute, **part)
        origins = self.origins
        if origins:
            origins = {**origins, **dict.fromkeys(values, origin)}
        return dataclasses.replace(config, origins=origins)

    def changed(self, part: str, **values: Any) -> Config:
        """Return an unchecked copy with other settings in one part, such as ``batch``."""
        return dataclasses.replace(
            self, **{part: dataclasses.replace(getattr(self, part), **values)}
        )

    def applied_without_ipus(self) -> Tuple[Config, Tuple[Change, ...]]:
        """Return the configuration for a machine without IPUs, and its changes."""
        changes = []
        for key, value in self.without_ipus:
            before = self.value(key)
            if before != value:
                changes.append(Change(key, before, value))
        applied = self.with_settings(dict(self.without_ipus), BLOCK)
        return dataclasses.replace(applied, without_ipus=()), tuple(changes)

    # -------------------------------------------------------------------------------------------- data and its command

    @property
    def packed(self) -> bool:
        """True if a pack may hold more than one sequence."""
        return self.data.packer != "none" and self.data.depth != 1

    @property
    def predictions_per_sequence(self) -> int:
        """The maximum number of masked tokens of a sequence."""
        stated = self.data.max_predictions_per_sequence
        return stated or default_predictions(self.data.max_sequence_length)

    @property
    def evaluation_directory(self) -> Optional[str]:
        """Directory of the data set to evaluate on: the stated one, that of the held-out documents, or None."""
        if self.data.evaluation_directory is None and self.data.held_out:
            from pack_data.building.held_out import held_out_folder

            return str(held_out_folder(self.data.directory))
        return self.data.evaluation_directory

    def build_line(self, *, overwrite: bool = False) -> str:
        """Return the command that builds the data set, with held-out documents."""
        values = {
            **dict.fromkeys(("corpus", "out", "held_out")),
            **self.data.build_options,
            "out": self.data.directory,
            "held_out": self.data.held_out or 0.01,
        }
        if self.data.vocabulary is not None:
            del values["vocabulary_size"]
        options = settings_in(DataSettings)
        stated = {
            name: value
            for name, value in values.items()
            if value != options[name].default or name == "corpus"
        }
        words = ["packed-bert", "build", *words_of(options, stated)]
        if overwrite:
            words.append("--overwrite")
        return shlex.join(words)

    # ----------------------------------------------------------------------------------------------------- an update

    @property
    def ipus(self) -> int:
        """IPUs of all replicas."""
        return self.placement.replicas * self.placement.ipus_per_replica

    @property
    def pipeline_stages(self) -> int:
        """Stages of the training pipeline."""
        return training_stages(self.placement.layers_per_ipu, heads_return=self.command == PRETRAIN)

    @property
    def schedule_steps(self) -> int:
        """Updates of the learning rate's schedule; fine-tuning states them once the data are known."""
        updates = self.run.steps if self.command == PRETRAIN else 1
        return self.optimizer.schedule_steps or updates

    def packs_per_update(self, packing_factor: float) -> int:
        """Return the packs of data in one update, the same for any number of ranks.

        In fine-tuning they hold `batch.sequences_per_update` sequences on average, for any micro-batch and any number
        of replicas. In pre-training they are counted by `batch.gradient_accumulation`: in micro-batches as stated, or
        in packs if the micro-batch is `auto`. That number is unpacked; it is divided by the packing factor and rounded
        up if ``optimizer.packing_adjustment`` is "accumulation" (packedBERT, section 3.3).
        """
        batch = self.batch
        if self.command == FINETUNE:
            return max(1, round(batch.sequences_per_update / packing_factor))
        packs_of_a_unit = 1 if self._is_automatic else batch.micro_batch
        return self._units(packing_factor) * packs_of_a_unit * self.placement.replicas

    def _units(self, packing_factor: float) -> int:
        """Return what `batch.gradient_accumulation` counts in a packed update of pre-training."""
        units = self.batch.gradient_accumulation
        if self.optimizer.packing_adjustment == "accumulation":
            units = math.ceil(units / packing_factor)
        return units

    @property
    def _is_automatic(self) -> bool:
        """True if `batch.micro_batch` is `auto`, also after the run has chosen a number."""
        return isinstance(self.batch.micro_batch, (str, Chosen))

    def packs_of_replica(self, packing_factor: float) -> int:
        """Return the packs of data of one replica in an update; the last replica may have fewer."""
        return math.ceil(self.packs_per_update(packing_factor) / self.placement.replicas)

    def accumulation(self, packing_factor: float) -> int:
        """Return the micro-batches per update and replica, the last of which may have empty packs."""
        return math.ceil(self.packs_of_replica(packing_factor) / self.batch.micro_batch)

    def micro_batches_per_update(self, packing_factor: float) -> int:
        """Return the micro-batches of all replicas in one update."""
        return self.accumulation(packing_factor) * self.placement.replicas

    def expected_sequences_per_update(self, packing_factor: float) -> float:
        """Return the mean number of sequences in one update."""
        return self.packs_per_update(packing_factor) * packing_factor

    def update_words(self, packing_factor: float, row: str = "pack") -> str:
        """Describe an update: its packs and sequences, and the micro-batches that hold them.

        Args:
            packing_factor: sequences per pack.
            row: the word for a pack.
        """
        packs = self.packs_per_update(packing_factor)
        sequences = self.expected_sequences_per_update(packing_factor)
        accumulation = self.accumulation(packing_factor)
        replicas = self.placement.replicas
        micro_batch = self.batch.micro_batch

        packs_words = counted(packs, row)
        micro_batch_words = str(micro_batch)
        accumulation_words = f"{accumulation:,}"
        stated = self.batch.gradient_accumulation
        if self.command == PRETRAIN and self._units(packing_factor) != stated:
            divided = f" ({stated:,} / {packing_factor:.3f}, rounded up)"
            if self._is_automatic:
                packs_words += divided
            else:
                accumulation_words += divided
        if self._is_automatic:
            micro_batch_words += " (auto)"

        text = (
            f"{packs_words}, about {sequences:,.0f} sequences = micro-batch {micro_batch_words}"
            f" x accumulation {accumulation_words} x replicas {replicas}"
        )
        empty = accumulation * replicas * micro_batch - packs
        return f"{text}, with {counted(empty, f'empty {row}')}" if empty else text

    def betas(self, packing_factor: float) -> Tuple[float, float]:
        """Return beta1 and beta2, raised to the power of the packing factor if ``packing_adjustment`` is "betas"."""
        optimizer = self.optimizer
        power = packing_factor if optimizer.packing_adjustment == "betas" else 1.0
        return optimizer.beta1**power, optimizer.beta2**power

    # ------------------------------------------------------------------------------------- the same on another machine

    def on_replicas(self, replicas: int) -> str:
        """Return the --set options for fewer replicas with the same number of sequences per update."""
        options = [f"--set placement.replicas={replicas}"]
        if replicas == 1:
            options.append("--set placement.replicated_tensor_sharding=false")
        if self.command == PRETRAIN:
            micro_batches = self.batch.gradient_accumulation * self.placement.replicas
            accumulation = -(-micro_batches // replicas)
            options.append(f"--set batch.gradient_accumulation={accumulation}")
        return " ".join(options)

    def on_micro_batch(self, rows: int, packing_factor: float) -> str:
        """Return the --set options for the largest micro-batch of at most ``rows`` packs with updates of the same size.

        Args:
            rows: packs of a micro-batch that fit.
            packing_factor: sequences per pack.
        """
        if self.command == FINETUNE:
            return f"--set batch.micro_batch={rows}"
        packs = self.packs_of_replica(packing_factor)
        while packs % rows:
            rows -= 1
        # The same unpacked update, unless the number of micro-batches is rounded up otherwise.
        accumulation = self.batch.micro_batch * self.batch.gradient_accumulation // rows
        smaller = self.changed("batch", micro_batch=rows, gradient_accumulation=accumulation)
        if smaller.packs_of_replica(packing_factor) != packs:
            smaller = smaller._with_accumulation(packs // rows, packing_factor)
        accumulation = smaller.batch.gradient_accumulation
        return f"--set batch.micro_batch={rows} --set batch.gradient_accumulation={accumulation}"

    def on_engine(self, kind: str) -> Config:
        """Return a copy for an engine (host, ipu, ipu_model), which a resumed run keeps."""
        settings_kind = "host" if kind == "host" else "ipu"
        return self.changed("engine", kind=settings_kind, ipu_model=kind == "ipu_model")

    def with_schedule(self, steps: Optional[int] = None) -> Config:
        """Return a copy that states the length of the schedule, so that a run resumed with other steps keeps it."""
        steps = self.schedule_steps if steps is None else steps
        return self.changed("optimizer", schedule_steps=steps)

    def with_micro_batch(self, packing_factor: float, *, ranks: int = 1) -> Config:
        """Return a copy whose micro-batch is a number that divides an update with few empty packs.

        In fine-tuning, the packs of an update are divided among the fewest possible micro-batches; a pipeline gets at
        least one for each of its stages. In pre-training only the micro-batch `auto` changes, to that of
        `fast_micro_batch`.

        Args:
            packing_factor: sequences per pack.
            ranks: processes that share an update.
        """
        if self.command == PRETRAIN and self.batch.micro_batch != AUTO:
            return self
        packs = self.packs_of_replica(packing_factor)
        micro_batch = self.rows_at_once(packs, ranks=ranks)
        micro_batch = math.ceil(packs / math.ceil(packs / micro_batch))
        micro_batch = max(1, min(micro_batch, packs // self.pipeline_stages))
        kind = Chosen if self._is_automatic else int
        return self.changed("batch", micro_batch=kind(micro_batch))

    def rows_at_once(self, rows: int, *, ranks: int = 1) -> int:
        """Return the stated micro-batch or, if it is `auto`, that of `fast_micro_batch`.

        Raises:
            ConfigError: it is `auto`, and the engine may be an IPU, whose memory determines it.
        """
        if self.batch.micro_batch != AUTO:
            return self.batch.micro_batch
        if self.engine.kind != "host":
            raise ConfigError(
                f"{self.path}: batch.micro_batch is auto, which needs the host engine; use --engine host, or state the "
                "packs of a forward pass on an IPU, for example --set batch.micro_batch=2"
            )
        return fast_micro_batch(rows, self.data.max_sequence_length, ranks=ranks)

    def _with_accumulation(self, micro_batches: int, packing_factor: float) -> Config:
        """Return a copy of pre-training with this number of micro-batches in a packed update."""
        unpacked = micro_batches
        if self.optimizer.packing_adjustment == "accumulation":
            # The largest unpacked value that, divided by the packing factor, is at most this number.
            unpacked = math.floor(micro_batches * packing_factor)
            # Rounding: 154 / (847 / 297) is a little more than 54.
            if math.ceil(unpacked / packing_factor) > micro_batches:
                unpacked -= 1
        return self.changed("batch", gradient_accumulation=unpacked)

    def for_model(self, model: ModelConfig, *, ipus: bool) -> Config:
        """Return a copy for a network of the sizes of a checkpoint; a single IPU gets all its layers.

        Args:
            model: sizes of the network.
            ipus: True if IPUs compute the updates.

        Raises:
            ConfigError: the placement is for another number of layers.
        """
        config = self
        if self.placement.ipus_per_replica == 1:
            config = self.changed("placement", layers_per_ipu=(model.num_layers,))
        layers = sum(config.placement.layers_per_ipu)
        if ipus and layers != model.num_layers:
            raise ConfigError(
                f"{self.path}: placement.layers_per_ipu places {layers} layers, the network has {model.num_layers}; "
                "change placement.layers_per_ipu"
            )
        return config

    def for_simulation(self, packing_factor: float) -> Config:
        """Return a copy for a simulated device: one replica, and the fewest micro-batches that fill its pipeline."""
        config = self._with_accumulation(self.pipeline_stages, packing_factor)
        return config.changed("placement", replicas=1, replicated_tensor_sharding=False)


def _yaml(tree: Any) -> str:
    return yaml.safe_dump(tree, sort_keys=False, default_flow_style=False)
