"""Typed values of JSON files; a wrong value is a one-line error with file, field, rule and fix.

    fields = read_object(path, way_out="build the data set again")
    fields.integer("packs", least=0)
    fields.object("schema").one_of("kind", ("bert_pretraining", "tokens"))
    fields.list_of("shards", Fields.object)
    fields.optional("lower_bound", Fields.integer, least=0)     # None where it is missing or null

Programs write these files, so the first fault ends the reading. People write configurations, so
ipu_packed_bert/settings/reader.py reports all problems at once and accepts numbers in the forms that people use.
"""

from __future__ import annotations

import json
import math
import operator
import os
import re
import reprlib
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
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

from pack_data.reading.files import read_regular

_MOST_JSON_BYTES = 256 << 20
# More digits are in no number of ours. Python 3.11 refuses thousands of them, Python 3.8 takes minutes for millions.
MOST_DIGITS = 100

_Key = Union[str, int]
_T = TypeVar("_T")

_SHORT = reprlib.Repr()
(
    _SHORT.maxlevel,
    _SHORT.maxdict,
    _SHORT.maxlist,
    _SHORT.maxstring,
    _SHORT.maxother,
    _SHORT.maxlong,
) = 2, 3, 8, 60, 60, 40


def shown(value: Any) -> str:
    """Return a value for a message: short, printable and on one line, however large or deep it is."""
    # Python 3.11 refuses to write out the largest numbers.
    if type(value) is int and value.bit_length() > 256:
        return f"a number of about {int(value.bit_length() * 0.30103) + 1} digits"
    text = " ".join(_SHORT.repr(value).split())[:200]
    return text.encode("ascii", "backslashreplace").decode()


class _FieldError(ValueError):
    """What is wrong with a field; the message names the file."""


def named(name: Any) -> str:
    """Return a name that somebody wrote, for a message, unchanged if it is short and printable."""
    return (
        name if isinstance(name, str) and name.isprintable() and len(name) <= 200 else shown(name)
    )


def one_line(words: Any, most: int = 300) -> str:
    """Shorten text of a library or file to one printable line of at most `most` characters, for a message."""
    return (
        " ".join(str(words).split())[:most]
        .encode("ascii", "backslashreplace")
        .decode()
        .translate(_CONTROLS)
    )


_CONTROLS = {number: f"\\x{number:02x}" for number in (*range(32), 127)}


@contextmanager
def said_of(source: Union[str, os.PathLike]) -> Iterator[None]:
    """Name this file or directory in a ValueError of the block, unless the error does so already."""
    try:
        yield
    except ValueError as error:
        if str(source) in str(error):
            raise
        raise ValueError(f"{source}: {error}") from None


@dataclass(frozen=True)
class Fields:
    """An object of a file (or a list of it, with numbers for names), whose values are taken by type.

    Every method takes the name of a field and raises ValueError where it is missing or breaks the rule. `where`: the
    names that lead to this object; `way_out`: what the reader of the message can do.
    """

    source: str
    values: Union[Mapping[str, Any], Sequence[Any]]
    way_out: str
    where: str = ""

    @classmethod
    def of(cls, value: Any, source: Union[str, os.PathLike], way_out: str) -> Fields:
        """Return the fields of a whole file (JSON or YAML) as Python values; fields stay what they are."""
        if isinstance(value, Fields):
            return value
        if not isinstance(value, dict):
            raise _FieldError(
                f"{source}: holds {shown(value)}; must hold an object with named fields; {way_out}"
            )
        return cls(str(source), value, way_out)

    # ---- messages ----------------------------------------------------------------------------------------------------

    def _path(self, key: _Key) -> str:
        """Return the name of a field from the top of the file: `shards[3].sha256`."""
        if isinstance(key, int):
            return f"{self.where}[{key}]"
        name = key if re.fullmatch(r"[\w-]{1,80}", key, re.ASCII) else shown(key)
        return f"{self.where}.{name}" if self.where else name

    def error(self, key: _Key, rule: str) -> _FieldError:
        """To be raised where a field breaks a rule."""
        return _FieldError(
            f"{self.source}: {self._path(key)} is {shown(self.any(key))}; {rule}; {self.way_out}"
        )

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Attribute to this file what a constructor refuses in the block, after the types are right."""
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
        return [str(name) for name in self.values] if isinstance(self.values, Mapping) else []

    def only(self, *known: str) -> None:
        """No field but these."""
        for name in self.names():
            if name not in known:
                raise self.error(name, f"no field is called so; there are {', '.join(known)}")

    @property
    def tree(self) -> Dict[str, Any]:
        """The object as plain values."""
        assert isinstance(self.values, dict)
        return self.values

    def __contains__(self, key: str) -> bool:
        return isinstance(self.values, Mapping) and key in self.values

    def any(self, key: _Key) -> Any:
        """Return the value, whatever it is."""
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
                key, "must be the plain name of a file in the same folder, without a path"
            )
        return value

    # ---- what holds others -------------------------------------------------------------------------------------------

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
        if len(value) > longest or (length is not None and len(value) != length):
            raise self.error(
                key, f"must have {f'at most {longest}' if length is None else length} items"
            )
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
        # A long list without a call for each number.
        plain = type(value) is list and length is None and set(map(type, value)) == {int}
        if plain and _within(min(value), least, most) and _within(max(value), least, most):
            return list(value)
        return self.list_of(key, Fields.integer, length=length, least=least, most=most)

    def texts(
        self, key: _Key, length: Optional[int] = None, *, printable: bool = False
    ) -> List[str]:
        return self.list_of(key, Fields.text, length=length, most=1 << 30, printable=printable)

    def values_of(
        self, key: _Key, take: Callable[..., _T], *inner: Any, **rule: Any
    ) -> Dict[str, _T]:
        """Return an object with any names whose values `take` reads."""
        given = self.object(key)
        return {name: take(given, name, *inner, **rule) for name in given.names()}

    def optional(
        self, key: _Key, take: Callable[..., _T], *inner: Any, **rule: Any
    ) -> Optional[_T]:
        """Return what `take` reads, with `inner` and `rule`, or None if the field is missing or null.

        `optional("names", Fields.list_of, Fields.text)`
        """
        missing = isinstance(self.values, Mapping) and key not in self.values
        return None if missing or self.any(key) is None else take(self, key, *inner, **rule)


def _within(value: Any, least: Optional[float], most: Optional[float]) -> bool:
    return (least is None or value >= least) and (most is None or value <= most)


def _range_in_words(least: Optional[float], most: Optional[float]) -> str:
    if least is not None and most is not None:
        return f" from {least} to {most}"
    return (
        f" of at least {least}"
        if least is not None
        else f" of at most {most}"
        if most is not None
        else ""
    )


def is_plain_name(name: str) -> bool:
    """Whether a text names a file in a folder and nothing outside it, on any system."""
    return (
        name not in ("", ".", "..")
        and not re.search(r'[/\\:*?"<>|]', name)
        and name.isprintable()
        and len(name.encode()) <= 255
    )


def whole_number(
    name: str, value: Any, *, least: Optional[int] = None, most: Optional[int] = None
) -> int:
    """Return an argument that counts something, as int: Python's and NumPy's integers.

    A float is refused even where it is whole: it comes from a division or from a file that was read without its types,
    and the next value would not be whole. So are truth values and texts.
    """
    # NumPy's truth values pass `operator.index`.
    refused = isinstance(value, bool) or type(value).__name__ in ("bool_", "bool")
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
    """Return the argument `max_sequences_per_pack`: None, which is unlimited, or a whole number of at least 1."""
    return None if value is None else whole_number("max_sequences_per_pack", value, least=1)


# ---- files -----------------------------------------------------------------------------------------------------------


def read_object(
    path: Union[str, os.PathLike], *, way_out: str, most_bytes: int = _MOST_JSON_BYTES
) -> Fields:
    """Read the fields of a JSON file that holds an object; raise ValueError, one line, for everything else."""
    return Fields.of(read_json(path, way_out=way_out, most_bytes=most_bytes), path, way_out)


def read_json(
    path: Union[str, os.PathLike], *, way_out: str, most_bytes: int = _MOST_JSON_BYTES
) -> Any:
    """Read a JSON file; raise ValueError, one line, if it cannot be read, is too large, or is not JSON."""
    return parse_json(
        read_regular(Path(path), way_out=way_out, most_bytes=most_bytes), path, way_out
    )


def parse_json(text: Union[str, bytes], source: Any, way_out: str) -> Any:
    """Parse a JSON text; `source` and `way_out` are for the message of the ValueError.

    Stricter than Python: no NaN and no Infinity, no number beyond a float's range or of more than MOST_DIGITS digits,
    and no name twice in one object.
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
    raise ValueError(f"{text} is no number")


def _once(pairs: List[Tuple[str, Any]]) -> Dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        most_common = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the name {shown(most_common)} stands twice")
    return found


_DECODER = json.JSONDecoder(
    parse_int=_integer, parse_float=_float, parse_constant=_constant, object_pairs_hook=_once
)
