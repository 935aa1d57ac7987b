"""Facts: the numbers and words of a result, printed, as JSON and as Markdown; `page` shows them in HTML.

A result has one function that returns its `Facts`. How a number is shown follows from its unit (`number`); no other
module formats the numbers of results.

    account = Facts("Packs", {"packs": quantity("packs", 12, "proven optimal")})    # a line for each fact
    table = Facts("Packers", [{"packer": Fact("packer", "spfhp"), "packs": quantity("packs", 12)}, ...])
"""

from __future__ import annotations

import json
import math
import sys
from numbers import Integral, Real
from typing import (
    Any,
    Callable,
    Dict,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Set,
    Tuple,
    Union,
)

from pack_data.display.lines import GAP, ShownColumn, plain, table_lines, wrapped
from pack_data.store.quantities import quantity_of

_INDENT = "  "  # of accounts and notes
_LONGEST_SYMBOL = 3  # letters of a unit in a heading, such as s, MiB or %; longer ones stand below
_MOST_HEADINGS = 2  # columns with a unit in the heading; a unit of more columns stands below
_MOST_PLAIN = 1e4  # numbers from here on are shown without decimals, never with an exponent
_LEAST_BYTES = 0.05 * 2.0**20  # smaller sizes would be shown as 0.0 MiB

# Sources of values.
HARDWARE = "hardware"
PROFILE = "profile"
PAPER = "paper"
MODEL = "predicted"
FITTED = "fitted"
COMPUTED = "computed"
PUBLISHED = "published"
_SOURCES = {
    HARDWARE: "cycles counted by the hardware",
    PROFILE: "cycles of a profile",
    MODEL: "predicted by the cycle model",
    FITTED: "the cycle model, fitted to the paper at depth 2",
    PAPER: "quoted",
    PUBLISHED: "measured and published by others",
}


class Fact(NamedTuple):
    """A value with its name.

    name: heading of its column. unit: decides how the value is shown. source: where the value comes from, one of the
    constants above; that of a label is empty. note: a remark on this value; it stands for a value that is None or a
    list. interval: the least and the most that the value may be.
    """

    name: str
    value: Any
    unit: str = ""
    source: str = ""
    note: str = ""
    interval: Optional[Tuple[float, float]] = None


_Row = Mapping[str, Fact]


class Facts(NamedTuple):
    """Facts about one subject, or a table of several.

    rows: facts by their keys in JSON. A mapping is an account of one subject, a line for each fact; a sequence is a
    table, a row for each subject, in which a fact that a row lacks is shown as `-`. notes: sentences below. name: in
    the JSON and the HTML of a page, where it is unique.
    """

    title: str
    rows: Union[_Row, Sequence[_Row]]
    notes: Sequence[str] = ()
    name: str = ""

    @property
    def subjects(self) -> Sequence[_Row]:
        """The rows of a table, or an account as the only row."""
        return [self.rows] if isinstance(self.rows, Mapping) else self.rows


def quantity(key: str, value: Any, note: str = "") -> Fact:
    """Return the fact of a quantity of `store.quantities`, with its name and unit."""
    named = quantity_of(key)
    return Fact(named.name, value, named.unit, note=note)


def quantities(result: Any, notes: Mapping[str, str]) -> Dict[str, Fact]:
    """Return a row of quantities of `store.quantities`.

    Args:
        result: has the quantities as attributes.
        notes: attribute of each quantity that is shown -> a note on it.
    """
    return {key: quantity(key, getattr(result, key), note) for key, note in notes.items()}


def depth_fact(limit: Optional[int]) -> Fact:
    """Return the fact of a packing depth; None is unlimited."""
    return Fact("depth", limit, note="unlimited" if limit is None else "")


# ---- numbers ---------------------------------------------------------------------------------------------------------

# Unit -> format specification of its numbers. Whole numbers are shown as they are unless it is a percentage.
_FORMS = {
    # Fractions, shown as percentages.
    "of the slots": ".3%",
    "of the bound": ".3%",
    "of all packs": ".2%",
    "of the padding of unpacked rows": ".2%",
    "of the padding avoided": ".1%",
    "share": ".1%",
    "%": ".2%",
    # Numbers that are percentages already.
    "percent": ",.2f",
    "percent of the cycles": ",.3f",
    "percent more": "+,.1f",
    # Ratios.
    "sequences per pack": ",.3f",
    "times": ",.3f",
    "ratio": ",.3f",
    "nats": ",.3f",
    "score": ",.2f",
    "relative": ".0e",
    # Means of counts.
    "tokens": ",.1f",
    "sequences": ",.0f",
    "packs": ",.0f",
    "epochs": ",.1f",
    "cycles": ",.0f",
    "million cycles": ",.3f",
    # Rates, times and sizes.
    "packs/s": ",.1f",
    "sequences/s": ",.1f",
    "per second": ",.2f",
    "tokens/s": ",.0f",
    "s": ",.3f",
    "ms": ",.1f",
    "days": ",.3f",
    "bytes": ",.1f",
    "GHz": ",.2f",
}
# What stands beside a value in place of its unit.
_SYMBOLS = {
    "bytes": "MiB",
    "percent": "%",
    "percent of the cycles": "%",
    "percent more": "%",
    "%": "",
    "ratio": "",
    "per second": "",
    "share": "",
    "score": "",
    "relative": "",
}
_SCALES = {"bytes": 2.0**20, "million cycles": 1e6, "GHz": 1e9}  # divide a value


def number(value: Any, unit: str = "") -> str:
    """Return a number as it is shown everywhere, without its unit.

    Args:
        value: the number.
        unit: its unit; one without a rule of its own is shown with thousands separators and four digits.
    """
    if not math.isfinite(value):
        return "not finite"
    form = _FORMS.get(unit, ",.4g" if abs(value) < _MOST_PLAIN else ",.0f")
    if unit == "bytes" and abs(value) < _LEAST_BYTES:
        form = ".1g"
    if unit in _SCALES:
        value = value / _SCALES[unit]
    elif isinstance(value, Integral) and not form.endswith("%"):
        return f"{int(value):,}"
    return format(float(value), form)


def with_unit(value: Any, unit: str) -> str:
    """Return a number with its unit, for a sentence: `1.999 sequences per pack`."""
    return f"{number(value, unit)} {_SYMBOLS.get(unit, unit)}".rstrip()


def quantity_with_unit(key: str, value: Any) -> str:
    """Return a quantity of `store.quantities` with its unit."""
    return with_unit(value, quantity_of(key).unit)


def _shown(fact: Fact) -> str:
    """Return the text of a value, without its unit.

    With an interval it is `1.1, 1.0 to 2.8`, or `1.1 exact` if the interval is the value.
    """
    value = fact.value
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    if not isinstance(value, Real):
        return fact.note or ("-" if value is None else json.dumps(plain(value)))
    text = number(value, fact.unit)
    if fact.interval is None:
        return text
    low, high = sorted(fact.interval)
    if low == value == high:
        return f"{text} exact"
    return f"{text}, {number(low, fact.unit)} to {number(high, fact.unit)}"


def _unit_of(fact: Fact) -> str:
    """Return the unit as it is shown beside a number; empty if the name states it."""
    if fact.unit == fact.name or not _is_number(fact):
        return ""
    return _SYMBOLS.get(fact.unit, fact.unit)


def _is_number(fact: Fact) -> bool:
    return isinstance(fact.value, Real) and not isinstance(fact.value, bool)


def _remark(fact: Fact) -> str:
    """Return the note of a fact unless it stands for the value."""
    return fact.note if isinstance(fact.value, (str, Real)) else ""


# ---- JSON ------------------------------------------------------------------------------------------------------------


def as_json(facts: Facts) -> Any:
    """Return the values by their keys: a dictionary for an account, a list of them for a table.

    The ends of an interval are KEY_lower and KEY_upper.
    """
    if isinstance(facts.rows, Mapping):
        return _values(facts.rows)
    return list(map(_values, facts.subjects))


def _values(row: _Row) -> Dict[str, Any]:
    values = {}
    for key, fact in row.items():
        values[key] = plain(fact.value)
        if fact.interval is not None:
            low, high = sorted(fact.interval)
            values[f"{key}_lower"] = plain(low)
            values[f"{key}_upper"] = plain(high)
    return values


# ---- columns ---------------------------------------------------------------------------------------------------------


def columns_of(facts: Facts) -> List[ShownColumn]:
    """Return the columns of a table; an account has three: what, value and, if there is one, note.

    Raises:
        ValueError: the facts of one key have different names or units.
    """
    if isinstance(facts.rows, Mapping):
        *columns, about = _columns_of_account(facts.rows)
        return [*columns, about] if any(about.cells) else columns
    columns = []
    short_units = _units_in_headings(facts)
    for key, column in _by_key(facts).items():
        named = [fact for fact in column if fact is not None]
        if len({(fact.name, fact.unit) for fact in named}) > 1:
            raise ValueError(f"{facts.title}: {key}: two names or units; pass one for all rows")
        first = named[0]
        symbol = max(map(_unit_of, named))
        columns.append(
            ShownColumn(
                key,
                f"{first.name}, {symbol}" if symbol in short_units else first.name,
                _cells(column),
                [None if fact is None else plain(fact.value) for fact in column],
                is_number=any(map(_is_number, named)),
                is_label=not (first.unit or first.source),
            )
        )
    return columns


def _units_in_headings(facts: Facts) -> Set[str]:
    """Return the units that are short and of few columns."""
    units = []
    for column in _by_key(facts).values():
        units.append(max(_unit_of(fact) for fact in column if fact is not None))
    return {
        unit
        for unit in units
        if 0 < len(unit) <= _LONGEST_SYMBOL and units.count(unit) <= _MOST_HEADINGS
    }


def _cells(column: Sequence[Optional[Fact]]) -> List[str]:
    """Return the texts of a column; quoted numbers have the decimals of the most precise of them."""
    quoted = []
    for fact in column:
        if fact is not None and fact.source == PAPER and _is_number(fact):
            quoted.append(len(str(fact.value).partition(".")[2]))
    decimals = max(quoted, default=0)
    cells = []
    for fact in column:
        if fact is None:
            cells.append("-")
        elif quoted and _is_number(fact):
            cells.append(f"{fact.value:,.{decimals}f}")
        else:
            cells.append(_cell(fact))
    return cells


def _by_key(facts: Facts) -> Dict[str, List[Optional[Fact]]]:
    rows = facts.subjects
    keys = dict.fromkeys(key for row in rows for key in row)
    return {key: [row.get(key) for row in rows] for key in keys}


def _cell(fact: Fact) -> str:
    """Return the text of a cell of a table: the value and its note."""
    note = _remark(fact)
    return f"{_shown(fact)} ({note})" if note else _shown(fact)


def _columns_of_account(row: _Row) -> List[ShownColumn]:
    facts = list(row.values())
    abouts = [", ".join(filter(None, (_unit_of(fact), _remark(fact)))) for fact in facts]
    return [
        ShownColumn("what", "what", [fact.name for fact in facts], list(row)),
        ShownColumn(
            "value",
            "value",
            list(map(_shown, facts)),
            [plain(fact.value) for fact in facts],
            is_number=all(map(_is_number, facts)),
        ),
        ShownColumn("about", "note", abouts, list(map(_remark, facts))),
    ]


def notes_of(facts: Facts) -> List[str]:
    """Return the notes below the facts; those on sources and, below a table, on long units come first."""
    notes = [f"Source: {_legend(facts, _source_in_words)}."]
    if not isinstance(facts.rows, Mapping):
        short_units = _units_in_headings(facts)

        def long_unit(fact: Fact) -> Optional[str]:
            unit = _unit_of(fact)
            if not (unit or _is_number(fact)):
                return None
            return "" if unit in short_units else unit

        notes.append(f"Units: {_legend(facts, long_unit)}.")
    return [*(note for note in notes if not note.endswith(" .")), *facts.notes]


def _source_in_words(fact: Fact) -> Optional[str]:
    if not (fact.source or fact.unit):
        return None
    return _SOURCES.get(fact.source, fact.source)


def _legend(facts: Facts, text_of: Callable[[Fact], Optional[str]]) -> str:
    """Return each text with the names of its facts: `packs, slots: computed; seconds: measured`.

    Args:
        facts: an account or a table.
        text_of: text of a fact, which may be empty; None: the fact needs no text. A text of all facts stands alone.
    """
    names: Dict[str, Dict[str, None]] = {}
    for column in _by_key(facts).values():
        for fact in filter(None, column):
            text = text_of(fact)
            if text is not None:
                names.setdefault(text, {})[fact.name] = None
    if len(names) == 1:
        return "".join(names)
    return "; ".join(f"{', '.join(group)}: {text}" for text, group in names.items() if text)


# ---- lines of text ---------------------------------------------------------------------------------------------------


def printed(facts: Facts) -> str:
    """Return the facts for a terminal: title, rows and notes, in lines of at most `WIDTH` characters."""
    lines = []
    if facts.title:
        lines += wrapped(facts.title)
        lines.append("-" * max(map(len, lines)))
    if isinstance(facts.rows, Mapping):
        lines += _account(facts.rows)
    else:
        lines += table_lines(columns_of(facts))
    for note in notes_of(facts):
        lines += wrapped(note, _INDENT)
    return "\n".join(lines)


def _account(row: _Row) -> List[str]:
    """Return a line for each fact, without headings; the last column is wrapped: the notes, or else the values.

    Words beside numbers stand with the notes.
    """
    what, value, about = (column._replace(heading="") for column in _columns_of_account(row))
    numbers = list(map(_is_number, row.values()))
    if any(numbers):
        values = []
        notes = []
        for is_number, text, note in zip(numbers, value.cells, about.cells):
            values.append(text if is_number else "")
            notes.append(note if is_number else ", ".join(filter(None, (text, note))))
        value = value._replace(cells=values, is_number=True)
        about = about._replace(cells=notes)
    *others, last = [what, value, about] if any(about.cells) else [what, value]
    # Without a limit, because the last column begins where the longest of these ends.
    _, *heads = table_lines(others, width=sys.maxsize)
    width = max(map(len, heads), default=0)
    lines = []
    for head, words in zip(heads, last.cells):
        lines += wrapped(words, _INDENT + head.ljust(width) + GAP)
    return lines
