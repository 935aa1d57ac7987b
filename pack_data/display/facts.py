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
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

from pack_data.display.lines import GAP, ShownColumn, plain, table_lines, wrapped
from pack_data.store.quantities import quantity_of

_INDENT = "  "  # of accounts and notes
_LONGEST_SYMBOL = 3  # letters of a unit in a heading, such as s, MiB or %; longer ones stand below
_MOST_PLAIN = 1e4  # numbers from here on are shown without decimals, never with an exponent


class Fact(NamedTuple):
    """A value with its name.

    name: heading of its column. unit: decides how the value is shown. source: where the value comes from: measured,
    computed, quoted. note: a remark on this value; it stands for a value that is None or a list. interval: the least
    and the most that the value may be.
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
    "%": ".2%",
    # Numbers that are percentages already.
    "percent": ",.2f",
    # Ratios.
    "sequences per pack": ",.3f",
    "times": ",.3f",
    # Means of counts.
    "tokens": ",.1f",
    "sequences": ",.0f",
    "packs": ",.0f",
    # Rates, times and sizes.
    "sequences/s": ",.1f",
    "tokens/s": ",.0f",
    "s": ",.3f",
    "bytes": ",.1f",
}
_SYMBOLS = {
    "bytes": "MiB",
    "percent": "%",
    "%": "",
}  # what stands beside a value in place of its unit
_SCALES = {"bytes": 2.0**20}  # divide a value


def number(value: Any, unit: str = "") -> str:
    """Return a number as it is shown everywhere, without its unit.

    Args:
        value: the number.
        unit: its unit; one without a rule of its own is shown with thousands separators and four digits.
    """
    if not math.isfinite(value):
        return "not finite"
    form = _FORMS.get(unit, ",.4g" if abs(value) < _MOST_PLAIN else ",.0f")
    if unit in _SCALES:
        value = value / _SCALES[unit]
    elif isinstance(value, Integral) and not form.endswith("%"):
        return f"{int(value):,}"
    return format(float(value), form)


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
    return [_values(row) for row in facts.rows]


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
    """Return the columns of a table; an account has three: what, value, note.

    Raises:
        ValueError: the facts of one key have different names or units.
    """
    if isinstance(facts.rows, Mapping):
        return _columns_of_account(facts.rows)
    columns = []
    for key, column in _by_key(facts).items():
        named = [fact for fact in column if fact is not None]
        if len({(fact.name, fact.unit) for fact in named}) > 1:
            raise ValueError(f"{facts.title}: {key}: two names or units; pass one for all rows")
        first = named[0]
        symbol = max(map(_unit_of, named))
        columns.append(
            ShownColumn(
                key,
                f"{first.name}, {symbol}" if 0 < len(symbol) <= _LONGEST_SYMBOL else first.name,
                ["-" if fact is None else _cell(fact) for fact in column],
                [None if fact is None else plain(fact.value) for fact in column],
                is_number=any(map(_is_number, named)),
                is_label=not (first.unit or first.source),
            )
        )
    return columns


def _by_key(facts: Facts) -> Dict[str, List[Optional[Fact]]]:
    rows = [facts.rows] if isinstance(facts.rows, Mapping) else facts.rows
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
    notes = [f"Source: {_legend(facts, lambda fact: fact.source)}."]
    if not isinstance(facts.rows, Mapping):
        notes.append(f"Units: {_legend(facts, _long_unit)}.")
    return [*(note for note in notes if not note.endswith(" .")), *facts.notes]


def _long_unit(fact: Fact) -> str:
    unit = _unit_of(fact)
    return unit if len(unit) > _LONGEST_SYMBOL else ""


def _legend(facts: Facts, text_of: Callable[[Fact], str]) -> str:
    """Return each text with the names of its facts: `packs, slots: computed; seconds: measured`."""
    names: Dict[str, Dict[str, None]] = {}
    for column in _by_key(facts).values():
        for fact in filter(None, column):
            names.setdefault(text_of(fact), {})[fact.name] = None
    names.pop("", None)
    return "; ".join(f"{', '.join(group)}: {text}" for text, group in names.items())


# ---- lines of text ---------------------------------------------------------------------------------------------------


def printed(facts: Facts) -> str:
    """Return the facts for a terminal: title, rows and notes, in lines of at most `WIDTH` characters."""
    lines = []
    if facts.title:
        lines += wrapped(facts.title)
        lines.append("-" * max(map(len, lines)))
    columns = columns_of(facts)
    if isinstance(facts.rows, Mapping):
        lines += _account(columns)
    else:
        lines += table_lines(columns)
    for note in notes_of(facts):
        lines += wrapped(note, _INDENT)
    return "\n".join(lines)


def _account(columns: Sequence[ShownColumn]) -> List[str]:
    """Return a line for each fact, without headings; the last column is wrapped: the notes, or else the values."""
    what, value, about = (column._replace(heading="") for column in columns)
    *others, last = [what, value, about] if any(about.cells) else [what, value]
    # Without a limit, because the last column begins where the longest of these ends.
    _, *heads = table_lines(others, width=sys.maxsize)
    width = max(map(len, heads), default=0)
    lines = []
    for head, words in zip(heads, last.cells):
        lines += wrapped(words, _INDENT + head.ljust(width) + GAP)
    return lines
