"""A configuration that is written and read again is the same, for any values that its declarations allow."""

import sys

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from ipu_packed_bert.settings.config import Config, ConfigError, settings_of
from ipu_packed_bert.settings.declare import nested, plain
from ipu_packed_bert.settings.finetuning import TASKS
from ipu_packed_bert.settings.loading import config_from_tree
from ipu_packed_bert.settings.reader import problems_message
from ipu_packed_bert.settings.rules import cross_check
from ipu_packed_bert.settings.schema import FINETUNE, PRETRAIN, PRETRAINING, TaskConfig

CLASSES = {PRETRAINING: TaskConfig, **{name: task.settings for name, task in TASKS.items()}}
TEXTS = st.text(max_size=12).filter(lambda text: text.isprintable() and "/" not in text)


def values_of(kind, rule):
    """Draw values of a type within a range."""
    arguments = getattr(kind, "__args__", ())
    if type(None) in arguments:
        return st.none() | values_of(arguments[0], rule)
    if arguments == (int, str):
        return values_of(int, rule) | st.sampled_from(rule.choices)
    if arguments:
        return st.lists(values_of(arguments[0], rule), min_size=1, max_size=4).map(tuple)
    if kind is bool:
        return st.booleans()
    if kind is str:
        return st.sampled_from(rule.choices) if rule.choices else TEXTS
    if kind is int:
        least = -(2**63) + 1 if rule.minimum is None else rule.minimum
        return st.integers(least, rule.maximum or 2**63 - 1)
    lower = rule.minimum if rule.above is None else rule.above
    upper = rule.maximum if rule.below is None else rule.below
    return st.floats(
        -sys.float_info.max if lower is None else lower,
        sys.float_info.max if upper is None else upper,
        exclude_min=rule.above is not None,
        exclude_max=rule.below is not None,
    )


@st.composite
def configurations(draw, *, names=tuple(CLASSES), most=None):
    """Draw a configuration of a task in which at most `most` settings, or all, differ from their defaults."""
    name = draw(st.sampled_from(names))
    task = CLASSES[name]
    declared = settings_of(PRETRAIN if name == PRETRAINING else FINETUNE, task)
    values = {key: setting.default for key, setting in declared.items()}
    if name != PRETRAINING:
        values["data.training"] = "a.csv"
    changed = draw(st.sets(st.sampled_from(list(declared)), max_size=most)) if most else declared
    for key in changed:
        values[key] = draw(values_of(declared[key].kind, declared[key].rule))
    values["task.name"] = name
    return Config(task=task(name=name)).with_settings(values, "drawn")


def outcome(tree, *overrides, command):
    """Return the configuration of a tree, or the message that refuses it."""
    try:
        return config_from_tree(tree, "a.yml", overrides, command=command)
    except ConfigError as error:
        return str(error)


def law_of_writing(config):
    """Check that reading the text gives the configuration, or refuses its broken rules; return True if it is valid."""
    problems = cross_check(config)
    expected = problems_message("a.yml", problems) if problems else config
    assert outcome(yaml.safe_load(config.to_yaml()), command=config.command) == expected
    return not problems


@settings(max_examples=25)
@given(configurations())
def test_any_values_are_read_back_or_refused_for_the_rules_between_them(config):
    law_of_writing(config)


def test_a_valid_configuration_is_read_back_from_a_file_and_from_options():
    valid = 0

    @settings(max_examples=30)
    @given(configurations(most=4))
    def law(config):
        nonlocal valid
        valid += law_of_writing(config)
        defaults = config.settings
        changed = {key: config.value(key) for key in defaults if config.value(key) != defaults[key].default}
        overrides = [f"{key}={yaml.safe_dump(plain(value), width=10**6)}" for key, value in changed.items()]
        of_file = outcome(nested(changed), command=config.command)
        assert outcome({}, *overrides, command=config.command) == of_file

    law()
    assert valid >= 10


@settings(max_examples=25)
@given(configurations(names=(PRETRAINING,), most=4), configurations(names=(PRETRAINING,), most=4))
def test_a_block_for_machines_without_ipus_is_read_back(config, other):
    """The block has the values of `other` that differ; what follows from them is written as well."""
    keys = [key for key in config.settings if config.value(key) != other.value(key)]
    tree = {**config.as_dict(), "without_ipus": nested({key: other.value(key) for key in keys})}
    first = outcome(tree, command=PRETRAIN)
    if isinstance(first, Config):
        assert first == outcome(yaml.safe_load(first.annotated()), command=PRETRAIN)
        assert {key for key, _ in first.without_ipus} >= set(keys)
