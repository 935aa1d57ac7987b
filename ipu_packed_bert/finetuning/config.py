"""The configuration of a fine-tuning run, read and checked as that of a pre-training run: every problem in one message.

The rules of single settings, their types and the messages are those of `ipu_packed_bert.config`.  Loads no torch.
"""
from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Set, Union, get_type_hints

import yaml

from ipu_packed_bert.settings import ConfigError, problems_message, setting, typed_value
from pack_data.packers import PACKERS, packs_at_depth

SQUAD, SINGLE_LABEL, MULTI_LABEL, REGRESSION = "squad", "single_label", "multi_label", "regression"
TASKS = (SQUAD, SINGLE_LABEL, MULTI_LABEL, REGRESSION)


@dataclass(frozen=True)
class DataConfig:
    """What is learnt from what, and how it is packed.  Paths are looked for in --data-dir first, where one is given."""

    task: str = setting(SQUAD, choices=TASKS)
    training: Optional[str] = setting(None)                                # null: no training, only evaluation
    evaluation: Optional[str] = setting(None)                              # null: none
    training_examples: Optional[int] = setting(None, minimum=1)            # questions or texts drawn at random; null: all
    evaluation_examples: Optional[int] = setting(None, minimum=1)
    max_sequence_length: int = setting(384, minimum=8)                     # slots per pack, S
    packer: str = setting("optimal", choices=PACKERS)
    max_sequences_per_pack: Optional[int] = setting(None, minimum=1)       # packing depth, D; null: unlimited
    seed: int = setting(5, minimum=0, maximum=2 ** 31 - 1)                 # of the training examples drawn; those of evaluation are always the same


@dataclass(frozen=True)
class SquadConfig:
    """Questions and paragraphs, as BERT cuts them into windows and reads answers out of them."""

    max_query_length: int = setting(64, minimum=1)                         # tokens of a question; what is longer is cut
    stride: int = setting(128, minimum=1)                                  # tokens from one window's start to the next one's
    max_answer_length: int = setting(30, minimum=1)                        # tokens
    n_best: int = setting(20, minimum=1)                                   # answers kept for each question
    null_answers: bool = setting(False)                                    # version 2: a question may have no answer
    null_score_threshold: float = setting(0.0)                             # no answer where its score is better by more than this
    drop_seen_paragraphs: bool = setting(False)                            # do not evaluate on paragraphs of the training file


@dataclass(frozen=True)
class ClassificationConfig:
    """Which columns of a CSV, TSV or JSONL file hold what."""

    text_column: str = setting("text")
    second_text_column: Optional[str] = setting(None)                      # for pairs of texts
    label_column: str = setting("label")
    label_separator: str = setting("|")                                    # between the labels of one text, multi_label
    threshold: float = setting(0.5, above=0.0, below=1.0)                  # probability from which a label is given, multi_label


@dataclass(frozen=True)
class ModelConfig:
    """Where the weights come from; the sizes are read only where they come from nowhere."""

    checkpoint: Optional[str] = setting(None)                              # Hugging Face folder, a run of ours; null: from scratch
    vocabulary: Optional[str] = setting(None)                              # vocab.txt; null: the checkpoint's, or one trained on the texts
    hidden_dropout: Optional[float] = setting(None, minimum=0.0, below=1.0)     # null: the checkpoint's
    attention_dropout: Optional[float] = setting(None, minimum=0.0, below=1.0)
    vocabulary_size: int = setting(4096, minimum=128)                      # when training one
    hidden_size: int = setting(256, minimum=1)
    num_layers: int = setting(4, minimum=1)
    num_heads: int = setting(4, minimum=1)
    intermediate_size: int = setting(1024, minimum=1)


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimiser.  Packing changes nothing here: an update holds as many sequences packed as unpacked."""

    name: str = setting("adamw", choices=("lamb", "adamw"))
    learning_rate: float = setting(5.0e-5, above=0.0)                      # the peak, reached after the warm-up
    warmup_fraction: float = setting(0.1, minimum=0.0, maximum=1.0)
    schedule_steps: Optional[int] = setting(None, minimum=1)               # updates until the rate is 0; null: those of run.epochs
    beta1: float = setting(0.9, minimum=0.0, below=1.0)
    beta2: float = setting(0.999, minimum=0.0, below=1.0)
    eps: float = setting(1.0e-6, above=0.0)
    weight_decay: float = setting(0.01, minimum=0.0)
    bias_correction: bool = setting(True)
    max_weight_norm: float = setting(65500.0, minimum=0.0)                 # LAMB
    max_gradient_norm: Optional[float] = setting(1.0, above=0.0)           # of the whole update; null: not clipped


@dataclass(frozen=True)
class BatchConfig:
    """An update in sequences, which is what the learning depends on; a forward pass in rows, which is what memory depends on."""

    sequences_per_update: int = setting(32, minimum=1)                     # about: whole packs
    micro_batch: int = setting(4, minimum=1)                               # rows in one forward pass


@dataclass(frozen=True)
class EngineConfig:
    """Where the steps run: a CUDA device if there is one, else the CPU."""

    precision: str = setting("float32", choices=("float32", "bfloat16"))
    attention: str = setting("auto", choices=("auto", "eager", "sdpa"))
    threads: Optional[int] = setting(None, minimum=1)                      # null: as many as torch chooses


@dataclass(frozen=True)
class RunConfig:
    """How long, how often written down, and from which seed."""

    epochs: int = setting(2, minimum=1)
    seed: int = setting(5, minimum=0, maximum=2 ** 31 - 1)                 # new heads, dropout, order of the packs
    evaluate_every: int = setting(0, minimum=0)                            # updates; 0: only at the end
    checkpoint_every: int = setting(0, minimum=0)                          # updates; 0: only at the end
    keep_checkpoints: int = setting(1, minimum=1)
    export: bool = setting(True)                                           # write the model as a Hugging Face folder


SECTIONS = {
    "data": DataConfig, "squad": SquadConfig, "classification": ClassificationConfig, "model": ModelConfig,
    "optimizer": OptimizerConfig, "batch": BatchConfig, "engine": EngineConfig, "run": RunConfig,
}


@dataclass(frozen=True)
class FinetuneConfig:
    """A whole, checked configuration."""

    data: DataConfig = DataConfig()
    squad: SquadConfig = SquadConfig()
    classification: ClassificationConfig = ClassificationConfig()
    model: ModelConfig = ModelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    batch: BatchConfig = BatchConfig()
    engine: EngineConfig = EngineConfig()
    run: RunConfig = RunConfig()
    path: str = field(default="config", compare=False)                     # where it came from, for messages

    @property
    def name(self) -> str:
        """The file's name without its ending: names the run folder."""
        return Path(self.path).stem

    @property
    def packed(self) -> bool:
        return self.data.packer != "none" and self.data.max_sequences_per_pack != 1

    def as_dict(self) -> Dict[str, Any]:
        """Nested plain values; :func:`load_config` of them gives an equal configuration."""
        return {section: dataclasses.asdict(getattr(self, section)) for section in SECTIONS}

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.as_dict(), sort_keys=False, default_flow_style=False)


def load_config(path: Union[str, Path], overrides: Sequence[str] = ()) -> FinetuneConfig:
    """Read, override (`section.key=value`, the value in YAML) and check a file; ConfigError with every problem found."""
    try:
        tree = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError("{}: cannot be read ({})".format(path, error.strerror)) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError("{}: not valid YAML: {}".format(path, " ".join(str(error).split()))) from None
    return config_from_tree(tree, str(path), overrides)


def config_from_tree(tree: Any, path: str, overrides: Sequence[str] = ()) -> FinetuneConfig:
    """As :func:`load_config`, from what YAML read."""
    problems: List[str] = []
    broken: Set[str] = set()
    if tree is None:
        tree = {}
    if not isinstance(tree, Mapping):
        raise ConfigError("{}: holds {}, not sections of settings such as `data:`".format(path, type(tree).__name__))
    values: Dict[str, Dict[str, Any]] = {section: {} for section in SECTIONS}

    def read(section: Any, settings: Any, origin: str) -> None:
        if section not in SECTIONS:
            problems.append("{}{} is not a setting{}".format(origin, section, _near(str(section), list(SECTIONS))))
        elif not isinstance(settings, Mapping):
            problems.append("{}{} is {!r}; must hold settings, one `key: value` a line".format(origin, section, settings))
        else:
            for name, raw in settings.items():
                _read_setting(section, str(name), raw, origin, values, problems, broken)

    for section, settings in tree.items():
        read(section, settings, "")
    for override in overrides:
        key, equals, text = override.partition("=")
        section, dot, name = key.strip().partition(".")
        if not equals or not dot:
            problems.append("--set {}: must read section.key=value".format(override))
            continue
        try:
            read(section, {name: yaml.safe_load(text)}, "--set ")
        except yaml.YAMLError:
            problems.append("--set {}: the value is not valid YAML".format(override))
    config = FinetuneConfig(path=path, **{section: kind(**values[section]) for section, kind in SECTIONS.items()})
    problems += cross_check(config, broken)
    if problems:
        raise ConfigError(problems_message(path, problems))
    return config


def _read_setting(section: str, name: str, raw: Any, origin: str, values: Dict[str, Dict[str, Any]], problems: List[str],
                  broken: Set[str]) -> None:
    key = "{}.{}".format(section, name)
    types = get_type_hints(SECTIONS[section])
    if name not in types:
        known = ["{}.{}".format(each, other) for each, kind in SECTIONS.items() for other in get_type_hints(kind)]
        problems.append("{}{} is not a setting{}".format(origin, key, _near(key, known)))
        return
    rule = next(each for each in dataclasses.fields(SECTIONS[section]) if each.name == name).metadata["rule"]
    try:
        value = typed_value(raw, types[name])
        wrong = rule.broken_by(value) if value is not None else None
    except ValueError as error:
        wrong = str(error)
    if wrong:
        problems.append("{}{} is {!r}; {}".format(origin, key, raw, wrong))
        broken.add(key)
    else:
        values[section][name] = value
        broken.discard(key)


def _near(key: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    return "; did you mean {}?".format(near[0]) if near else ""


def cross_check(config: FinetuneConfig, broken: Set[str]) -> List[str]:
    """What is wrong between settings that are each in range; what follows from a broken one is not reported again."""
    data, squad, model = config.data, config.squad, config.model
    depth = "null (unlimited)" if data.max_sequences_per_pack is None else data.max_sequences_per_pack
    checks = [
        ("data.packer data.max_sequences_per_pack", not packs_at_depth(data.packer, data.max_sequences_per_pack),
         "data.max_sequences_per_pack is {}; too deep for data.packer {}".format(depth, data.packer)),
        ("data.training data.evaluation", data.training is None and data.evaluation is None,
         "data.training and data.evaluation are null; name a file in at least one of them"),
        ("data.training model.checkpoint", data.training is None and model.checkpoint is None,
         "data.training is null; needs model.checkpoint, else there is nothing to evaluate"),
        ("data.training run.evaluate_every data.evaluation", bool(config.run.evaluate_every) and data.evaluation is None,
         "run.evaluate_every is {}; needs data.evaluation".format(config.run.evaluate_every)),
        ("data.task squad.max_query_length data.max_sequence_length",
         data.task == SQUAD and squad.max_query_length + 4 > data.max_sequence_length,
         "squad.max_query_length is {}; must be at most data.max_sequence_length, {}, minus 4: three special tokens and one "
         "of the paragraph".format(squad.max_query_length, data.max_sequence_length)),
        ("data.evaluation squad.drop_seen_paragraphs data.training", squad.drop_seen_paragraphs and data.training is None,
         "squad.drop_seen_paragraphs is true; needs data.training, whose paragraphs they are"),
        ("model.hidden_size model.num_heads", model.hidden_size % model.num_heads != 0,
         "model.hidden_size is {}; must be a multiple of model.num_heads, {}".format(model.hidden_size, model.num_heads)),
    ]
    return [text for keys, wrong, text in checks if wrong and not broken.intersection(keys.split())]
