"""Reading, overriding and checking a configuration.  Loads neither torch nor poptorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Type, Union

from ipu_packed_bert.settings.config import BLOCK, PARTS, Config, settings_of
from ipu_packed_bert.settings.finetuning import TASKS
from ipu_packed_bert.settings.reader import (
    DEFAULT,
    FILE,
    OVERRIDE,
    SettingsReader,
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
from ipu_packed_bert.settings.yaml_files import ConfigError, load_yaml
from pack_data.cli.command import typed
from pack_data.reading.fields import named, said_of

# Settings of the block that are those of one IPU unless it states them.
_ONE_IPU = (
    "placement.replicas",
    "placement.ipus_per_replica",
    "placement.available_memory_proportion",
    "placement.embedding_serialization_factor",
    "placement.replicated_tensor_sharding",
)


def load_config(
    path: Union[str, Path],
    overrides: Sequence[str] = (),
    *,
    command: Optional[str] = None,
    stored: bool = False,
) -> Config:
    """Read, override and check a configuration file.

    Args:
        path: a YAML file with the sections of :class:`Config`; a setting that is left out has its default.
        overrides: ``"section.key=value"`` texts, the value in YAML; they win over the file, and over its
            ``without_ipus`` except for the placement, which the block has its own of.
        command: ``"pretrain"`` or ``"finetune"``: refuse the configuration of the other one.
        stored: True if a run wrote the file, which must then name a task of the user's by its full path.

    Returns:
        The configuration, checked.

    Raises:
        ConfigError: with every problem of the file.
    """
    return config_from_tree(load_yaml(path), str(path), overrides, command=command, stored=stored)


def config_from_tree(
    tree: Any,
    path: str,
    overrides: Sequence[str] = (),
    *,
    command: Optional[str] = None,
    stored: bool = False,
) -> Config:
    """Check parsed YAML as :func:`load_config` does a file; ``path`` is for messages."""
    name = _task_name(tree, overrides, command)
    of_task = PRETRAIN if name == PRETRAINING else FINETUNE
    if command not in (None, of_task):
        kind = "pre-training" if of_task == PRETRAIN else "fine-tuning"
        raise ConfigError(
            f"{path}: task.name is {named(name)}, a task of {kind}; use {typed(of_task)}"
        )

    task: Any = _task_class(name, tree, path, stored=stored)
    reader = SettingsReader(settings_of(of_task, task), path, fixed=FIXED)
    if of_task == PRETRAIN:
        config, problems = _of_pretraining(reader, tree, overrides)
    else:
        reader.read(tree, FILE)
        for override in overrides:
            reader.override(override)
        reader.values["task.name"] = full_name(reader.value("task.name"))
        config = _built(reader, task)
        problems = cross_check(config, reader.broken)
    reader.problems += problems
    reader.refuse_problems()
    return config


def filled_in(config: Config, facts: Mapping[str, Any], origin: str) -> Config:
    """Return a copy in which settings that nobody stated have the values of ``facts``, by full name.

    Raises:
        ConfigError: if these values break a rule.
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
    reader: SettingsReader, tree: Any, overrides: Sequence[str]
) -> Tuple[Config, List[str]]:
    """Return a configuration of pre-training with its block `without_ipus`, and the broken rules between settings."""
    block = reader.block(BLOCK)
    if isinstance(tree, Mapping):
        block.read(tree.get(BLOCK), FILE)
        tree = {section: values for section, values in tree.items() if section != BLOCK}
    reader.read(tree, FILE)
    for override in overrides:
        key = override.partition("=")[0].strip()
        if key.startswith(f"{BLOCK}."):
            block.override(override.strip()[len(BLOCK) + 1 :])
        elif key != BLOCK:
            reader.override(override)
        elif reader.split(override) == (BLOCK, None):
            block.values.clear()
        else:
            reader.problems.append(
                f"--set {override}: the block as a whole can only be switched off, with null"
            )

    _derive(reader)
    if block.values:
        _derive_block(block, reader)
    # A --set wins over the block, except for a placement: that is the pod's, and the block has one of its own.
    kept = tuple(
        (key, block.values[key])
        for key in reader.settings
        if key in block.values
        and (reader.origins.get(key) != OVERRIDE or key.startswith("placement."))
    )
    config = _built(reader, TaskConfig, kept)
    problems = cross_check(config, reader.broken)
    applied = cross_check(config.applied_without_ipus()[0], reader.broken)
    return config, problems + [
        f"{BLOCK}: {problem}" for problem in applied if problem not in problems
    ]


def _task_name(tree: Any, overrides: Sequence[str], command: Optional[str]) -> Any:
    """Return the name of the task; a file of pre-training, and one of questions, need not state it."""
    stated = peek("task.name", tree, overrides)
    if stated:
        return stated
    if command is None:
        files = (peek(f"data.{name}", tree, overrides) for name in ("training", "evaluation"))
        return PRETRAINING if all(file is None for file in files) else SQUAD
    if command == FINETUNE and peek("data.directory", tree, ()) is None:
        return SQUAD
    return PRETRAINING


def _task_class(name: Any, tree: Any, path: str, *, stored: bool) -> Type[TaskConfig]:
    """Return the class of the section `task`, that of no task if the name, which the reader reports, is unknown."""
    if is_own(name):
        # Runs write full paths. Another path could name a file that came with the directory.
        if stored and full_name(name) != name and name == peek("task.name", tree, ()):
            raise ConfigError(
                f"{path}: task.name is {name}; a run keeps the full path of a task's file: use that"
            )
        with said_of(path):
            return own_class(name).settings
    return TASKS[name].settings if isinstance(name, str) and name in TASKS else TaskConfig


def _built(
    reader: SettingsReader, task: Type[TaskConfig], block: Tuple[Tuple[str, Any], ...] = ()
) -> Config:
    """Return the configuration of the values that were read."""
    values: Dict[str, Dict[str, Any]] = {}
    for key, setting in reader.settings.items():
        values.setdefault(setting.attribute, {})[setting.name] = reader.value(key)
    classes = {"task": task, **{attribute: part for attribute, _, part in PARTS}}
    parts: Dict[str, Any] = {
        attribute: classes[attribute](**part) for attribute, part in values.items()
    }
    return Config(without_ipus=block, path=reader.path, origins=reader.all_origins(), **parts)


def _derive(reader: SettingsReader) -> None:
    """Set defaults that follow from other settings."""
    if reader.value("data.vocabulary") is None:  # one is trained: its size is stated once
        sizes = ("model.vocabulary_size", "data.vocabulary_size")
        for key, other in (sizes, sizes[::-1]):
            if reader.stated(other) and reader.value(other) >= 128:
                reader.derive(key, reader.value(other), other)
    slots, positions = "data.max_sequence_length", "model.max_position_embeddings"
    if reader.value(slots) > reader.value(positions):  # the one that was left out fits the other
        reader.derive(positions, reader.value(slots), slots)
        reader.derive(slots, reader.value(positions), positions)
    if reader.value("placement.ipus_per_replica") == 1:
        reader.derive(
            "placement.layers_per_ipu", (reader.value("model.num_layers"),), "model.num_layers"
        )


def _derive_block(block: SettingsReader, whole: SettingsReader) -> None:
    """Set defaults of a `without_ipus` block: as many rows as its vocabulary has tokens, and one replica of one IPU."""
    if block.stated("data.vocabulary_size"):
        block.derive(
            "model.vocabulary_size", block.value("data.vocabulary_size"), "data.vocabulary_size"
        )
    overridden = whole.origins.get("model.num_layers") == OVERRIDE
    source = block if block.stated("model.num_layers") and not overridden else whole
    block.derive("placement.layers_per_ipu", (source.value("model.num_layers"),), "one IPU")
    for key in _ONE_IPU:
        block.derive(key, block.settings[key].default, "one IPU")
