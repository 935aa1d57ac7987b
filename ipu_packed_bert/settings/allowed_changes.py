"""What a run that is resumed may change: its configuration now, compared with the one in its checkpoint.

A setting that is in none of the classes below changes the updates to come: refused unless it is allowed by name.
Loads no torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any, Collection, List, Mapping, NamedTuple, Sequence, Tuple, TypeVar, get_type_hints

from ipu_packed_bert.settings.reader import (
    DEFAULT,
    FILE,
    ConfigError,
    parse_yaml,
    plain,
    problems_message,
    shown,
    suggestions,
    typed_value,
)
from ipu_packed_bert.settings.schema import Change, Configuration

# Change no update, or only what rounding does to it, or when a run ends: noted.
HARMLESS = frozenset(
    """
    run.evaluate_every run.checkpoint_every run.keep_checkpoints run.compare_unpacked
    run.track
    run.steps run.epochs optimizer.schedule_steps
    data.directory data.mixed_with data.corpus data.json_field data.vocabulary data.held_out data.evaluation_directory
    data.training data.evaluation data.evaluation_examples
    model.initializer_range model.vocabulary
    engine.kind engine.device engine.attention engine.compile engine.deterministic engine.threads
    engine.processes engine.mask
    engine.executable_cache engine.executable engine.ipu_model engine.offline_export engine.profile_directory
    engine.asynchronous_loading engine.log_cycles engine.recompute_layers
    placement.machine placement.ipus_per_replica placement.layers_per_ipu placement.available_memory_proportion
    placement.embedding_serialization_factor placement.optimizer_state_off_chip placement.replicated_tensor_sharding
    task.max_answer_length task.null_score_threshold task.drop_seen_paragraphs
    """.split()
)

# What decides the shapes of the weights, and how they are read.
SIZES = frozenset(
    """
    model.vocabulary_size model.hidden_size model.num_layers model.num_heads model.intermediate_size
    model.max_position_embeddings model.type_vocabulary_size loss.next_sentence
    """.split()
)

# Never change, and why.
NEVER: Mapping[str, str] = {
    **dict.fromkeys(SIZES, "a run goes on with the sizes it has"),
    **dict.fromkeys(
        """
        data.vocabulary_size data.max_sequence_length data.max_predictions_per_sequence data.packer
        data.max_sequences_per_pack data.duplication_factor data.whole_word_masking data.seed data.training_examples
        """.split(),
        "a run goes on with the data it has",
    ),
    "run.seed": "the order of the packs follows from it, and a run goes on in that order",
    "task.name": "a run goes on with the task it has",
}

_BATCH = ("batch.", "placement.replicas", "optimizer.packing_adjustment")


class Changes(NamedTuple):
    """What is different, none of it refused."""

    noted: Tuple[Change, ...] = ()
    allowed: Tuple[Change, ...] = ()

    @property
    def lines(self) -> List[str]:
        """What to print: a line each for what is noted and allowed."""
        parts = (("noted", _listed(self.noted)), ("allowed", _listed(self.allowed)))
        return [f"{label:<9} {text}" for label, text in parts if text]

    @property
    def other_batch(self) -> bool:
        """Whether an update may hold another number of packs."""
        return any(change.key.startswith(_BATCH) for change in self.allowed)


def _listed(changes: Sequence[Change]) -> str:
    return ", ".join(f"{change.key} {shown(change.before)} -> {shown(change.after)}" for change in changes)


def check_allowed(texts: Sequence[str], sections: Mapping[str, Any]) -> Tuple[str, ...]:
    """The settings of some texts `KEY` or `KEY,KEY`. Raises ConfigError for what is none, or can never change."""
    keys = tuple(key.strip() for text in texts for key in text.split(",") if key.strip())
    known = {f"{section}.{each.name}" for section, kind in sections.items() for each in dataclasses.fields(kind)}
    problems = []
    for key in keys:
        if key not in known:
            near = suggestions(key, {section: type(each) for section, each in sections.items()})
            problems.append(f"{key} is not a setting" + (f"; did you mean {' or '.join(near)}?" if near else ""))
        elif key in NEVER:
            problems.append(f"{key} cannot be changed: {NEVER[key]}")
    if problems:
        raise ConfigError(problems_message("--allow-change", problems))
    return keys


def compare(run: str, stored: str, config: Configuration, *, allowed: Collection[str] = ()) -> Changes:
    """How ``config`` differs from ``stored``, the YAML in the checkpoint of ``run``.

    allowed: settings whose change is wanted.
    Raises ConfigError, with every such difference, where one is neither harmless nor allowed.
    """
    then = stored_config(run, stored, config)
    noted, wanted, refused = [], [], []
    for change in _differences(then, config):
        key = change.key
        if key in NEVER:
            refused.append(f"{_stated(change, config)}; {NEVER[key]}")
        elif key in HARMLESS:
            noted.append(change)
        elif key in allowed:
            wanted.append(change)
        else:
            refused.append(f"{_stated(change, config)}; take it back, or allow it: --allow-change {key}")
    if refused:
        raise ConfigError(problems_message(run, refused))
    return Changes(tuple(noted), tuple(wanted))


_T = TypeVar("_T", bound=Configuration)


def stored_config(run: str, stored: str, config: _T) -> _T:
    """The configuration in the checkpoint of ``run``, of the same kind as ``config``.

    Settings of another task than ``config``'s are left out.  Raises ConfigError where it is no configuration.
    """
    try:
        tree = parse_yaml(stored, run)
    except ConfigError:
        tree = None
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{run}: the configuration in its checkpoint is no YAML of sections; it is damaged")
    sections = {}
    for section, now in config.sections.items():
        settings, types = tree.get(section), get_type_hints(type(now))
        values = {}
        for name, raw in settings.items() if isinstance(settings, Mapping) else ():
            with contextlib.suppress(KeyError, ValueError):
                values[name] = typed_value(plain(raw), types[name])
        sections[section] = type(now)(**values)
    return dataclasses.replace(config, **sections)


def _differences(then: Configuration, now: Configuration) -> List[Change]:
    """Settings whose values differ."""
    return [
        Change(f"{section}.{each.name}", plain(getattr(then.sections[section], each.name)), plain(value))
        for section, settings in now.sections.items()
        for each in dataclasses.fields(settings)
        for value in [getattr(settings, each.name)]
        if getattr(then.sections[section], each.name) != value
    ]


def _stated(change: Change, config: Configuration) -> str:
    """A difference, and who made it."""
    origin = config.origins.get(change.key, FILE)
    by = f"in {config.path}" if origin == FILE or origin.startswith(DEFAULT) else f"by {origin}"
    return f"{change.key} is {shown(change.before)} there, {shown(change.after)} {by}"


def stated_differences(run: str, stored: str, config: Configuration, keys: Sequence[str]) -> List[str]:
    """The differences of these settings between the checkpoint of ``run`` and ``config``, in words."""
    found = {change.key: change for change in _differences(stored_config(run, stored, config), config)}
    return [_stated(found[key], config) for key in keys if key in found]
