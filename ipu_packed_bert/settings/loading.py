"""Reading, overriding and checking a configuration.  Loads neither torch nor poptorch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Dict, Iterable, List, Mapping, Optional, Tuple, Type, Union

from ipu_packed_bert.settings.config import BLOCK, PARTS, Config, settings_of
from ipu_packed_bert.settings.finetuning import TASKS
from ipu_packed_bert.settings.reader import (
    CHECKPOINT,
    DEFAULT,
    FILE,
    OVERRIDE,
    Override,
    SettingsReader,
    parse_override,
    peek,
    problems_message,
)
from ipu_packed_bert.settings.rules import cross_check
from ipu_packed_bert.settings.schema import (
    FINETUNE,
    FIXED,
    PRETRAIN,
    PRETRAINING,
    SQUAD,
    TaskConfig,
)
from ipu_packed_bert.settings.user_task import full_name, is_own, own_class
from ipu_packed_bert.settings.yaml_files import ConfigError, load_yaml, own_tree
from pack_data.cli.parser import runnable
from pack_data.reading.fields import named, said_of

_DEPTH = "data.max_sequences_per_pack"
# Settings of a block `without_ipus` with the values of one IPU unless it states them.
_ONE_IPU = (
    "placement.replicas",
    "placement.ipus_per_replica",
    "placement.available_memory_proportion",
    "placement.embedding_serialization_factor",
    "placement.replicated_tensor_sharding",
)


def load_config(
    path: Union[str, Path],
    overrides: Iterable[Union[str, Override]] = (),
    *,
    command: Optional[str] = None,
    stored: bool = False,
) -> Config:
    """Read, override and check a configuration file.

    Args:
        path: a YAML file with the sections of :class:`Config`; omitted settings have their defaults.
        overrides: ``"section.key=value"`` texts with values in YAML. They override the file and its block
            ``without_ipus``, except for the placement of that block.
        command: ``"pretrain"`` or ``"finetune"``, to refuse the configuration of the other command.
        stored: True if a run wrote the file, which must then name a task of the user by its full path.

    Returns:
        The configuration, checked.

    Raises:
        ConfigError: the file has problems; the message lists all of them.
    """
    tree = load_yaml(path)
    config = config_from_tree(tree, str(path), overrides, command=command, stored=stored)
    own = (own_tree(path) or {}).get("data") or {}
    is_inherited = "max_sequences_per_pack" not in own and config.origins.get(_DEPTH) == FILE
    if "directory" in own and is_inherited:
        # The depth is that of another data set, the one of the file that this one extends.
        config = replace(config, origins={**config.origins, _DEPTH: DEFAULT})
    return config


def config_from_tree(
    tree: Any,
    path: str,
    overrides: Iterable[Union[str, Override]] = (),
    *,
    command: Optional[str] = None,
    stored: bool = False,
) -> Config:
    """Check parsed YAML in the same way as :func:`load_config`; messages name ``path``."""
    stated = list(map(parse_override, overrides))
    origin = CHECKPOINT if stored else FILE
    name = task_name(tree, stated, command)
    of_task = PRETRAIN if name == PRETRAINING else FINETUNE
    if command not in (None, of_task):
        kind = "pre-training" if of_task == PRETRAIN else "fine-tuning"
        raise ConfigError(
            f"{path}: task.name is {named(name)}, a task of {kind}; use {runnable(of_task)}"
        )

    task: Any = _task_class(name, tree, path, stored=stored)
    reader = SettingsReader(settings_of(of_task, task), path, fixed=FIXED)
    if of_task == PRETRAIN:
        config, problems = _of_pretraining(reader, tree, origin, stated)
    else:
        reader.read(tree, origin)
        for override in stated:
            reader.override(override)
        reader.values["task.name"] = full_name(reader.value("task.name"))
        config = _built(reader, task)
        problems = cross_check(config, reader.broken)
    reader.problems += problems
    reader.refuse_problems()
    return config


def filled_in(config: Config, facts: Mapping[str, Any], origin: str) -> Config:
    """Return a copy in which ``facts`` replace the defaults of settings that nobody stated.

    Args:
        config: the configuration.
        facts: values by the full names of their settings.
        origin: the source of the values, for messages.

    Raises:
        ConfigError: these values break a rule.
    """
    values = {
        key: value
        for key, value in facts.items()
        if config.origins.get(key, FILE).startswith(DEFAULT)
    }
    filled = config.with_settings(values, origin)
    problems = cross_check(filled)
    if problems:
        raise ConfigError(problems_message(f"{config.path}, with the values of {origin}", problems))
    return filled


def _of_pretraining(
    reader: SettingsReader, tree: Any, origin: str, overrides: Iterable[Override]
) -> Tuple[Config, List[str]]:
    """Return a configuration of pre-training with its block `without_ipus`, and the problems between settings."""
    block = reader.block(BLOCK)
    if isinstance(tree, Mapping):
        block.read(tree.get(BLOCK), origin)
        tree = {section: values for section, values in tree.items() if section != BLOCK}
    reader.read(tree, origin)
    for override in overrides:
        _override(reader, block, override)

    _derive(reader)
    if block.values:
        _derive_block(block, reader)
    # A --set overrides the block, except for the placement: --set placement is that of the pod.
    kept = []
    for key in reader.settings:
        overridden = reader.origins.get(key) == OVERRIDE and not key.startswith("placement.")
        if key in block.values and not overridden:
            kept.append((key, block.values[key]))
    config = _built(reader, TaskConfig, tuple(kept))
    problems = cross_check(config, reader.broken)
    without_ipus, _ = config.applied_without_ipus()
    for problem in cross_check(without_ipus, reader.broken):
        if problem not in problems:
            problems.append(f"{BLOCK}: {problem}")
    return config, problems


def _override(reader: SettingsReader, block: SettingsReader, override: Override) -> None:
    """Read a --set of pre-training, which may name a setting of the block or remove the block."""
    key = override.key
    if key.startswith(f"{BLOCK}."):
        block.override(override._replace(key=key[len(BLOCK) + 1 :]))
    elif key != BLOCK or override.problem:
        reader.override(override)
    elif override.value is None:
        block.values.clear()
    else:
        reader.problems.append(
            f"--set {override.text}: set {BLOCK} to null to remove the block, or set one of its settings"
        )


def task_name(tree: Any, overrides: Iterable[Override], command: Optional[str] = None) -> Any:
    """Return the name of the task; files of pre-training and of SQuAD may omit it."""
    stated = peek("task.name", tree, overrides)
    if stated:
        return stated
    if command is None:
        files = [peek(f"data.{name}", tree, overrides) for name in ("training", "evaluation")]
        return PRETRAINING if files == [None, None] else SQUAD
    if command == FINETUNE and peek("data.directory", tree, ()) is None:
        return SQUAD
    return PRETRAINING


def _task_class(name: Any, tree: Any, path: str, *, stored: bool) -> Type[TaskConfig]:
    """Return the class of the section `task`; TaskConfig if the name is unknown, which the reader reports."""
    if is_own(name):
        # Runs write full paths. A relative path could name a file that was sent with the directory.
        if stored and full_name(name) != name and name == peek("task.name", tree, ()):
            raise ConfigError(
                f"{path}: task.name is {name}; must be the full path of the task's file in the configuration of a run"
            )
        with said_of(path):
            return own_class(name).settings
    if isinstance(name, str) and name in TASKS:
        return TASKS[name].settings
    return TaskConfig


def _built(
    reader: SettingsReader, task: Type[TaskConfig], block: Tuple[Tuple[str, Any], ...] = ()
) -> Config:
    """Return the configuration of the values that were read."""
    values: Dict[str, Dict[str, Any]] = {}
    origins = {}
    for key, setting in reader.settings.items():
        values.setdefault(setting.attribute, {})[setting.name] = reader.value(key)
        origins[key] = reader.origins.get(key, DEFAULT)

    parts: Dict[str, Any] = {"task": task(**values["task"])}
    for attribute, _, part in PARTS:
        if attribute in values:
            parts[attribute] = part(**values[attribute])
    return Config(without_ipus=block, path=reader.path, origins=origins, **parts)


def _derive(reader: SettingsReader) -> None:
    """Set defaults that follow from other settings."""
    # If the vocabulary is trained, one of both sizes is enough.
    if reader.value("data.vocabulary") is None:
        sizes = ("model.vocabulary_size", "data.vocabulary_size")
        for key, other in (sizes, sizes[::-1]):
            if reader.stated(other) and reader.value(other) >= 128:
                reader.derive(key, reader.value(other), other)

    slots = "data.max_sequence_length"
    positions = "model.max_position_embeddings"
    if reader.value(slots) > reader.value(positions):  # only the omitted one of both changes
        reader.derive(positions, reader.value(slots), slots)
        reader.derive(slots, reader.value(positions), positions)
    if reader.value("placement.ipus_per_replica") == 1:
        layers = reader.value("model.num_layers")
        reader.derive("placement.layers_per_ipu", (layers,), "model.num_layers")


def _derive_block(block: SettingsReader, whole: SettingsReader) -> None:
    """Set defaults of a `without_ipus` block: the model's vocabulary is that of the data, on one IPU."""
    if block.stated("data.vocabulary_size"):
        size = block.value("data.vocabulary_size")
        block.derive("model.vocabulary_size", size, "data.vocabulary_size")
    overridden = whole.origins.get("model.num_layers") == OVERRIDE
    source = block if block.stated("model.num_layers") and not overridden else whole
    block.derive("placement.layers_per_ipu", (source.value("model.num_layers"),), "one IPU")
    for key in _ONE_IPU:
        block.derive(key, block.settings[key].default, "one IPU")
