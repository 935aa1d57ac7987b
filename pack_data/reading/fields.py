"""Typed values of JSON files; a wrong value is a one-line error with file, field, rule and fix.

    fields = read_object(path, way_out="build the data set again")
    fields.integer("packs", least=0)
    fields.object("schema").one_of("kind", ("bert_pretraining", "tokens"))
    fields.list_of("shards", Fields.object)
    fields.optional("lower_bound", Fields.integer, least=0)     # None if it is missing or null

Programs write these files, so the first fault ends the reading. People write configurations, so
ipu_packed_bert/settings/reader.py reports all problems at once and accepts numbers in the forms that people use.
"""

from __future__ import annotations

import json
import math
import operator
import re
import reprlib
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from typing import (
    Any,
    Callable,
    Dict,
    Iterator,
    List,
    Mapping,
    Optional,
    Sequence,
    Tuple,
    TypeVar,
    Union,
)

from pack_data.reading.durable import PathLike
from pack_data.reading.files import read_regular

# Digits of a number. Ours have fewer; Python 3.11 refuses thousands of digits, Python 3.8 takes minutes for millions.
MOST_DIGITS = 100

_Key = Union[str, int]
_T = TypeVar("_T")

# Values in messages: levels of nesting, items, characters.
_SHORT = reprlib.Repr()
_SHORT.maxlevel = 2
_SHORT.maxdict = 3
_SHORT.maxlist = 8
_SHORT.maxstring = 60
_SHORT.maxother = 60
_SHORT.maxlong = 40


def shown(value: Any) -> str:
    """Return a value for a message: short, printable and on one line, even if it is large or deeply nested."""
    # Python 3.11 refuses to write out the largest numbers.
    if type(value) is int and value.bit_length() > 256:
        digits = int(value.bit_length() * math.log10(2)) + 1
        return f"a number of about {digits} digits"
    text = " ".join(_SHORT.repr(value).split())[:200]
    return text.encode("ascii", "backslashreplace").decode()


class _FieldError(ValueError):
    """A field breaks a rule; the message names the file."""


def named(name: Any) -> str:
    """Return a name for a message, unchanged if it is short and printable."""
    if isinstance(name, str) and name.isprintable() and len(name) <= 200:
        return name
    return shown(name)


def one_line(words: Any, most: int = 300) -> str:
    """Shorten text of a library or file to one printable line of at most `most` characters, for a message."""
    text = " ".join(str(words).split())[:most]
    return text.encode("ascii", "backslashreplace").decode().translate(_CONTROLS)


_CONTROLS = {number: f"\\x{number:02x}" for number in (*range(32), 127)}


def printable(line: str) -> str:
    """Escape what is not printable in a line with foreign names: it could control a terminal."""
    return re.sub(
        r"[^ -~]", lambda found: found[0] if found[0].isprintable() else ascii(found[0])[1:-1], line
    )


@contextmanager
def said_of(source: PathLike) -> Iterator[None]:
    """Prefix a ValueError of the block with this file or directory, unless the message names it."""
    try:
        yield
    except ValueError as error:
        if str(source) in str(error):
            raise
        raise ValueError(f"{source}: {error}") from None


@dataclass(frozen=True)
class Fields:
    """An object or a list of a file, whose values are read by type.

    The methods take the name of a field, or the index of an item, and raise ValueError if it is missing or breaks the
    rule.
    """

    source: str  # the file, for messages
    values: Union[Mapping[str, Any], Sequence[Any]]
    way_out: str  # the end of messages: what the user can do
    where: str = ""  # path of this object in the file, such as shards[3]

    @classmethod
    def of(cls, value: Any, source: PathLike, way_out: str) -> Fields:
        """Return the fields of an object as JSON or YAML files hold it; return `Fields` unchanged."""
        if isinstance(value, Fields):
            return value
        if not isinstance(value, dict):
            raise _FieldError(
                f"{source}: holds {shown(value)}; must hold an object with named fields; {way_out}"
            )
        return cls(str(source), value, way_out)

    # ---- messages ----------------------------------------------------------------------------------------------------

    def _path(self, key: _Key) -> str:
        """Return the path of a field from the top of the file, such as `shards[3].sha256`."""
        if isinstance(key, int):
            return f"{self.where}[{key}]"
        name = key if re.fullmatch(r"[\w-]{1,80}", key, re.ASCII) else shown(key)
        return f"{self.where}.{name}" if self.where else name

    def error(self, key: _Key, rule: str) -> _FieldError:
        """Return the error for a field that breaks a rule."""
        return _FieldError(
            f"{self.source}: {self._path(key)} is {shown(self.any(key))}; {rule}; {self.way_out}"
        )

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Name this file and object in a ValueError that a constructor raises in the block."""
        try:
            yield
        except _FieldError:
            raise
        except (ValueError, RecursionError) as error:
            where = f"{self.where}: " if self.where else ""
            problem = error if isinstance(error, ValueError) else "nested too deeply"
            raise _FieldError(f"{self.source}: {where}{problem}; {self.way_out}") from None

    # ---- values ------------------------------------------------------------------------------------------------------

    def names(self) -> List[str]:
        return [*map(str, self.values)]

    def only(self, *known: str) -> None:
        """Raise ValueError if there is a field of another name."""
        for name in self.names():
            if name not in known:
                raise self.error(name, f"unknown field; the fields are {', '.join(known)}")

    @property
    def tree(self) -> Dict[str, Any]:
        """The object as a dictionary of plain values."""
        assert isinstance(self.values, dict)
        return self.values

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def any(self, key: _Key) -> Any:
        """Return a value of any type."""
        if isinstance(self.values, Mapping):
            if key not in self.values:
                raise _FieldError(f"{self.source}: {self._path(key)} is missing; {self.way_out}")
            return self.values[key]  # type: ignore[index]
        return self.values[int(key)]

    def integer(self, key: _Key, *, least: Optional[int] = None, most: Optional[int] = None) -> int:
        value = self.any(key)
        if type(value) is not int or not _within(value, least, most):
            raise self.error(key, f"must be a whole number{_range_in_words(least, most)}")
        return value

    def number(
        self, key: _Key, *, least: Optional[float] = None, most: Optional[float] = None
    ) -> float:
        """Return a finite number."""
        value = self.any(key)
        if (
            type(value) not in (int, float)
            or not abs(value) < 2.0**1023
            or not _within(value, least, most)
        ):
            raise self.error(key, f"must be a finite number{_range_in_words(least, most)}")
        return float(value)

    def boolean(self, key: _Key) -> bool:
        value = self.any(key)
        if type(value) is not bool:
            raise self.error(key, "must be true or false")
        return value

    def text(
        self, key: _Key, *, most: int = 1 << 16, empty: bool = True, printable: bool = True
    ) -> str:
        """Return a text, of characters that can be printed on one line unless `printable` is False."""
        value = self.any(key)
        if type(value) is not str or len(value) > most or not (value or empty):
            raise self.error(key, f"must be a text of {'0' if empty else '1'} to {most} characters")
        if printable and not value.isprintable():
            raise self.error(key, "must be a text of printable characters, in one line")
        return value

    def one_of(self, key: _Key, choices: Sequence[_T]) -> _T:
        value = self.any(key)
        for choice in choices:
            if type(value) is type(choice) and value == choice:
                return choice
        raise self.error(key, f"must be {' or '.join(map(shown, choices))}")

    def hex_digest(self, key: _Key, digits: int) -> str:
        """Return a checksum as text."""
        value = self.any(key)
        if type(value) is not str or len(value) != digits or not re.fullmatch("[0-9a-f]*", value):
            raise self.error(key, f"must be {digits} hexadecimal digits, 0-9 and a-f")
        return value

    def plain_name(self, key: _Key) -> str:
        """Return the name of a file in the directory of this one; refuse a path that leads out of it."""
        value = self.any(key)
        if type(value) is not str or not is_plain_name(value):
            raise self.error(
                key, "must be the plain name of a file in the same directory, without a path"
            )
        return value

    # ---- objects and lists -------------------------------------------------------------------------------------------

    def object(self, key: _Key) -> Fields:
        value = self.any(key)
        if not isinstance(value, dict):
            raise self.error(key, "must be an object with named fields")
        return Fields(self.source, value, self.way_out, self._path(key))

    def list_of(
        self,
        key: _Key,
        take: Callable[..., _T],
        *inner: Any,
        length: Optional[int] = None,
        longest: int = 1 << 24,
        **rule: Any,
    ) -> List[_T]:
        """Return a list whose items `take`, a method of this class, reads: `list_of("prices", Fields.integer)`."""
        value = self.any(key)
        if not isinstance(value, list):
            raise self.error(key, "must be a list")
        if length is not None and len(value) != length:
            raise self.error(key, f"must have {length} items")
        if len(value) > longest:
            raise self.error(key, f"must have at most {longest} items")
        items = Fields(self.source, value, self.way_out, self._path(key))
        return [take(items, number, *inner, **rule) for number in range(len(value))]

    def integers(
        self,
        key: _Key,
        length: Optional[int] = None,
        *,
        least: Optional[int] = None,
        most: Optional[int] = None,
    ) -> List[int]:
        value = self.any(key)
        # A list may be long, so a call for each number is made only to find the wrong one.
        plain = type(value) is list and length is None and set(map(type, value)) == {int}
        if plain and _within(min(value), least, most) and _within(max(value), least, most):
            return list(value)
        return self.list_of(key, Fields.integer, length=length, least=least, most=most)

    def texts(self, key: _Key, length: Optional[int] = None) -> List[str]:
        return self.list_of(key, Fields.text, length=length, most=1 << 30, printable=False)

    def values_of(
        self, key: _Key, take: Callable[..., _T], *inner: Any, **rule: Any
    ) -> Dict[str, _T]:
        """Return an object of any names whose values `take` reads."""
        entries = self.object(key)
        return {name: take(entries, name, *inner, **rule) for name in entries.names()}

    def optional(
        self, key: _Key, take: Callable[..., _T], *inner: Any, **rule: Any
    ) -> Optional[_T]:
        """Return the value that `take` reads, or None if the field is missing or null.

        `optional("names", Fields.list_of, Fields.text)`
        """
        missing = isinstance(self.values, Mapping) and key not in self.values
        if missing or self.any(key) is None:
            return None
        return take(self, key, *inner, **rule)


def _within(value: Any, least: Optional[float], most: Optional[float]) -> bool:
    return (least is None or value >= least) and (most is None or value <= most)


def _range_in_words(least: Optional[float], most: Optional[float]) -> str:
    if least is not None and most is not None:
        return f" from {least} to {most}"
    if least is not None:
        return f" of at least {least}"
    return "" if most is None else f" of at most {most}"


def is_plain_name(name: str) -> bool:
    """Return True if a text names a file in a directory, on any system, and no path out of it."""
    return (
        name not in ("", ".", "..")
        and not re.search(r'[/\\:*?"<>|]', name)
        and name.isprintable()
        and len(name.encode()) <= 255
    )


def whole_number(
    name: str, value: Any, *, least: Optional[int] = None, most: Optional[int] = None
) -> int:
    """Return an argument as int; raise ValueError unless it is an integer of Python or NumPy within these limits.

    Floats are refused, even whole ones: they come from a division or from a file that was read without its types, and
    the next value may not be whole. Truth values and texts are refused, too.
    """
    # NumPy's truth values pass `operator.index`.
    refused = type(value).__name__ in ("bool_", "bool")
    try:
        number = None if refused else operator.index(value)
    except TypeError:
        number = None
    if number is None or not _within(number, least, most):
        raise ValueError(
            f"{name} = {shown(value)}; must be a whole number{_range_in_words(least, most)}"
        )
    return number


def packing_depth(value: Any) -> Optional[int]:
    """Return the argument `max_sequences_per_pack`: a whole number of at least 1, or None for unlimited."""
    return None if value is None else whole_number("max_sequences_per_pack", value, least=1)


# ---- files -----------------------------------------------------------------------------------------------------------


def read_object(path: PathLike, *, way_out: str) -> Fields:
    """Read the fields of a JSON file that holds an object; raise ValueError, one line, for everything else."""
    return Fields.of(read_json(path, way_out=way_out), path, way_out)


def read_json(path: PathLike, *, way_out: str) -> Any:
    """Read a JSON file; raise ValueError, one line, if it cannot be read, is too large, or is not JSON."""
    return parse_json(read_regular(path, way_out=way_out), path, way_out)


def parse_json(text: Union[str, bytes], source: Any, way_out: str) -> Any:
    """Parse a JSON text; `source` and `way_out` are for the message of the ValueError.

    The rules are stricter than Python's: no NaN, no Infinity, no number beyond the range of a float or of more than
    MOST_DIGITS digits, no repeated name in one object.
    """
    try:
        text = text if isinstance(text, str) else text.decode()
        if text.startswith("\ufeff"):
            raise ValueError("it begins with a byte order mark")
        return _DECODER.decode(text)
    except UnicodeDecodeError as error:
        problem = f"not UTF-8 text (byte {error.object[error.start]:#04x} at {error.start})"
    except RecursionError:
        problem = "JSON that is nested too deeply"
    except ValueError as error:
        problem = f"not JSON ({error})"
    raise ValueError(f"{source}: {problem}; {way_out}")


def _integer(text: str) -> int:
    if len(text) > MOST_DIGITS:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"a number beyond the range of numbers, {text[:20]}")
    return value


def _constant(text: str) -> Any:
    raise ValueError(f"{text} is not a number")


def _without_repeats(pairs: List[Tuple[str, Any]]) -> Dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        most_common = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the name {shown(most_common)} is repeated")
    return values


_DECODER = json.JSONDecoder(
    parse_int=_integer,
    parse_float=_float,
    parse_constant=_constant,
    object_pairs_hook=_without_repeats,
)
