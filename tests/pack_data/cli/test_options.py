"""Options of declared settings: what a declaration allows is typed, written and read again as the same value."""

from hypothesis import given, settings
from hypothesis import strategies as st

from ipu_packed_bert.commands.build import _parser
from pack_data.building.options import BuildOptions
from pack_data.reading.declare import AUTO, Rule, settings_in, words_of

OPTIONS = settings_in(BuildOptions)
NAMES = st.text("abcdefgh_.", min_size=1, max_size=8)
NUMBERS = st.integers(1, 40)
OF_INPUT = {"--from": {"source": "x"}, "--synthetic": {"synthetic": "wikipedia_512"}}
# The values of an option that is no whole number of at least 1, no choice and no file.
OF = {
    "corpus": st.lists(NAMES, min_size=2, max_size=3),
    "masked_lm_probability": st.floats(0, 1),
    "held_out": st.floats(0, 0.99),
    "max_sequences_per_pack": st.sampled_from([AUTO, None, 1, 7]),
    "columns": st.lists(st.sampled_from("abc"), min_size=1, max_size=3).map(tuple),
}


def values_of(option):
    """The values of an option."""
    if option.name in OF:
        return OF[option.name]
    if option.kind is bool:
        return st.just(not option.default)
    if option.rule.choices:
        return st.sampled_from(option.rule.choices)
    return NUMBERS if option.rule.minimum is not None else NAMES


@settings(max_examples=60)
@given(st.data())
def test_written_options_are_read_as_the_same_values(data):
    inputs = data.draw(st.sampled_from(["corpus", "synthetic", "source"]))
    others = sorted(set(OPTIONS) - {"out", "corpus", "synthetic", "source", "on"})
    names = ["out", inputs, *data.draw(st.lists(st.sampled_from(others), unique=True))]
    values = {name: data.draw(values_of(OPTIONS[name]), name) for name in names}
    assert vars(_parser().parse_args(words_of(OPTIONS, values))) == values


def test_an_option_and_an_argument_have_the_same_range():
    ranged = [option for option in OPTIONS.values() if option.rule != Rule()]
    assert len(ranged) > 12
    for option in ranged:
        for value in (-7, 0, 1, 10**9, "neither"):
            typed = ["--out", "new", "--from", "x", *words_of(OPTIONS, {option.name: value})]
            is_input = option.name == "synthetic"
            if value == 10**9 and option.rule.maximum is None or is_input:
                continue
            outcomes = [
                is_refused(BuildOptions, "new", **{option.name: value}, **OF_INPUT.get(option.of, {})),
                is_refused(_parser().parse_args, typed),
            ]
            assert outcomes in ([True, True], [False, False]), (option.name, value)


def is_refused(call, *arguments, **options):
    try:
        call(*arguments, **options)
    except ValueError:
        return True
    return False
