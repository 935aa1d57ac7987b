"""Differences between the configuration of a resumed run and that of its checkpoint, and the rules for them.

The declaration of a setting states its rule (`pack_data.reading.declare`).  Loads no torch.
"""

from __future__ import annotations

import contextlib
from typing import Collection, List, Mapping, NamedTuple, Sequence, Tuple

from ipu_packed_bert.settings.config import Change, Config, settings_of
from ipu_packed_bert.settings.declare import plain, shown
from ipu_packed_bert.settings.reader import CHECKPOINT, DEFAULT, FILE, problems_message, suggestions
from ipu_packed_bert.settings.schema import PRETRAIN, SAME_NETWORK
from ipu_packed_bert.settings.yaml_files import ConfigError, parse_yaml
from pack_data.reading.declare import ASK, FREE, typed_value

# The settings that determine the function of the network besides its weights: they are the same wherever weights are
# resumed or started from. A Hugging Face directory has them, and what this network fixes, in `model.hugging_face`.
NETWORK = frozenset(
    key for key, setting in settings_of(PRETRAIN).items() if setting.resume == SAME_NETWORK
)

# Prefixes of the settings that may change the number of packs of an update.
_BATCH = ("batch.", "placement.replicas", "optimizer.packing_adjustment")


class Changes(NamedTuple):
    """The differences of a resumed run that are not refused."""

    noted: Tuple[Change, ...] = ()
    allowed: Tuple[Change, ...] = ()

    @property
    def lines(self) -> List[str]:
        """One line for the noted differences and one for the allowed ones, if there are any."""
        lines = []
        for label, changes in (("noted", self.noted), ("allowed", self.allowed)):
            if changes:
                words = ", ".join(map(_arrow, changes))
                lines.append(f"{label:<9} {words}")
        return lines

    @property
    def other_batch(self) -> bool:
        """True if the number of packs of an update may change."""
        return any(change.key.startswith(_BATCH) for change in self.allowed)


def _arrow(change: Change) -> str:
    return f"{change.key} {shown(change.before)} -> {shown(change.after)}"


def check_allowed(texts: Sequence[str], config: Config) -> Tuple[str, ...]:
    """Return the settings of --allow-change.

    Args:
        texts: texts `KEY` or `KEY,KEY`.
        config: the configuration of the resumed run.

    Raises:
        ConfigError: a text is not a setting of the configuration, or the setting can never change.
    """
    names = [name.strip() for name in ",".join(texts).split(",")]
    keys = tuple(name for name in names if name)
    settings = config.settings
    problems = []
    for key in keys:
        if key not in settings:
            near = suggestions(key, list(settings))
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            problems.append(f"{key} is not a setting{hint}")
        elif settings[key].resume not in (ASK, FREE):
            problems.append(f"{key} cannot be changed: {settings[key].resume}")
    if problems:
        raise ConfigError(problems_message("--allow-change", problems))
    return keys


def compare(run: str, stored: str, config: Config, *, allowed: Collection[str] = ()) -> Changes:
    """Return the differences of ``config`` from ``stored``, the YAML in the checkpoint of ``run``.

    Args:
        run: the run's directory, for messages.
        stored: YAML text of all settings.
        config: the configuration of the resumed run.
        allowed: settings that may change.

    Raises:
        ConfigError: a difference is neither harmless nor allowed; the message lists all of them.
    """
    noted: List[Change] = []
    accepted: List[Change] = []
    refused: List[str] = []
    for change in _differences(stored_config(run, stored, config), config):
        rule = config.settings[change.key].resume
        if rule == FREE:
            noted.append(change)
        elif rule != ASK:
            refused.append(f"{_stated(change, config)}; {rule}")
        elif change.key in allowed:
            accepted.append(change)
        else:
            refused.append(
                f"{_stated(change, config)}; undo the change, or allow it with --allow-change {change.key}"
            )
    if refused:
        raise ConfigError(problems_message(run, refused))
    return Changes(tuple(noted), tuple(accepted))


def stored_config(run: str, stored: str, config: Config) -> Config:
    """Return the configuration in the checkpoint of ``run``, with the settings of ``config`` only.

    Args:
        run: the run's directory, for messages.
        stored: YAML text of all settings.
        config: the configuration that defines the settings.

    Raises:
        ConfigError: ``stored`` is not a configuration.
    """
    try:
        tree = parse_yaml(stored, run)
    except ConfigError:
        tree = None
    if not isinstance(tree, Mapping):
        raise ConfigError(
            f"{run}: the configuration in its checkpoint is damaged (not YAML with sections); resume another run"
        )
    values = {}
    for key, setting in config.settings.items():
        values[key] = setting.default
        section = tree.get(key.partition(".")[0])
        if isinstance(section, Mapping) and setting.name in section:
            raw = plain(section[setting.name])
            with contextlib.suppress(ValueError):
                values[key] = typed_value(raw, setting.kind)
    return config.with_settings(values, FILE)


def _differences(stored: Config, config: Config) -> List[Change]:
    """Return the settings of ``config`` with other values than in ``stored``."""
    changes = [
        Change(key, plain(stored.value(key)), plain(config.value(key))) for key in config.settings
    ]
    return [change for change in changes if change.before != change.after]


def _stated(change: Change, config: Config) -> str:
    """Return a difference with its source."""
    origin = config.origins.get(change.key, FILE)
    is_override = not origin.startswith((FILE, CHECKPOINT, DEFAULT))
    source = f"by {origin}" if is_override else f"in {config.path}"
    return f"{change.key} is {shown(change.before)} there, {shown(change.after)} {source}"


def stated_differences(run: str, stored: str, config: Config, keys: Collection[str]) -> List[str]:
    """Return the differences between a checkpoint and a configuration in some settings, for a message.

    Args:
        run: the run's directory, for messages.
        stored: YAML text of all settings in the checkpoint.
        config: the configuration.
        keys: full names of the settings.
    """
    differences = _differences(stored_config(run, stored, config), config)
    return [_stated(change, config) for change in differences if change.key in keys]
