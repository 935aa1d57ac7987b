"""Files that `torch.save` wrote, read without torch.load and without Python's pickle: nothing in them is ever run.

Such a file is an archive of a pickle, which is a program, and of the tensors' bytes.  The few instructions that
torch.save writes are carried out here, on texts, numbers, lists and dictionaries; the only names that they may give are
those that rebuild tensors.  TorchScript, the forms of before torch 1.6 and everything else is refused.
"""

from __future__ import annotations

import errno
import struct
import zipfile
from pathlib import Path
from typing import Any, Callable, Dict, List, Union

import torch

from pack_data.decoding import shown
from pack_data.files import open_regular

# Above all that a file of weights holds, and soon met by a small file that claims to be large.
MOST_INSTRUCTION_BYTES = 8 << 20
MOST_RECORDS = 100_000
MOST_VALUES = 100_000  # values, and characters of texts / 64, counted wherever they stand
MOST_LEVELS = 32
MOST_DIMENSIONS = 16
MOST_ELEMENTS = 1 << 40
SHARING = 4  # bytes of all tensors over those of the file: tensors may share memory, but not without end

_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
_WAY_OUT = "save the weights as safetensors, or their state_dict with torch.save"


def load_tensors(path: Union[str, Path], *, way_out: str = _WAY_OUT) -> Any:
    """What `torch.save` wrote, as tensors on the CPU, numbers, texts, lists, tuples and dictionaries.

    ValueError, in one line, for every other file.
    """
    path = Path(path)
    with open_regular(path, way_out=way_out) as file:
        try:
            # zipfile reads the whole table of contents first, at ten times its size in memory.
            if sum(block.count(b"PK\x01\x02") for block in iter(lambda: file.read(1 << 20), b"")) > MOST_RECORDS:
                raise ValueError(f"it has more than {MOST_RECORDS:,} records")
            with zipfile.ZipFile(file) as archive:
                records = _Records(archive)
                values = _Program(records).result()
            return _Plain(SHARING * path.stat().st_size).copied(values, 0)
        except zipfile.BadZipFile as error:
            reason = str(error)
            if "not a zip file" in reason:
                reason += ": damaged, or from before torch 1.6"
        except (ValueError, EOFError, RuntimeError, OverflowError, struct.error) as error:
            reason = str(error)
        except OSError as error:
            if error.errno != errno.EINVAL:  # a place before the beginning of the file
                raise
            reason = str(error.strerror)
    raise ValueError(f"{path}: cannot be read ({' '.join(reason.split())[:160]}); {way_out}")


class _Records:
    """The records of an archive: uncompressed, each name once, together no more than the file."""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        self._archive = archive
        self._sizes: Dict[str, int] = {}
        if any(name.split("/")[-1] == "constants.pkl" for name in archive.namelist()):
            raise ValueError("a TorchScript archive, a program")
        for entry in archive.infolist():
            if entry.filename in self._sizes:
                raise ValueError(f"two records are named {shown(entry.filename)}")
            encrypted = entry.flag_bits & 1
            if encrypted or entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
                raise ValueError(f"record {shown(entry.filename)} is compressed or encrypted")
            self._sizes[entry.filename] = entry.file_size
        assert archive.fp is not None
        if sum(self._sizes.values()) > archive.fp.seek(0, 2):
            raise ValueError("its records overlap")
        tops = [name[: -len("data.pkl")] for name in self._sizes if name.endswith("/data.pkl") and name.count("/") == 1]
        if len(tops) != 1:
            raise ValueError("no archive of torch.save: it lacks data.pkl")
        self._top = tops[0]
        self._read: Dict[str, bytearray] = {}
        if self._sizes.get(self._top + "byteorder") and bytes(self.record("byteorder")) != b"little":
            raise ValueError("its numbers are big-endian")

    def record(self, name: str) -> bytearray:
        """The bytes of a record; its checksum is compared."""
        if name not in self._read:
            full = self._top + name
            if full not in self._sizes:
                raise ValueError(f"record {shown(name)} is missing")
            data = bytearray(self._sizes[full])
            with self._archive.open(full) as file:
                view, place = memoryview(data), 0
                while place < len(data):
                    got = file.readinto(view[place:])  # type: ignore[attr-defined]
                    if not got:
                        raise ValueError(f"record {shown(name)} is cut short")
                    place += got
                file.read(1)  # the end, where the checksum is compared
            self._read[name] = data
        return self._read[name]

    def instructions(self) -> bytes:
        if self._sizes[self._top + "data.pkl"] > MOST_INSTRUCTION_BYTES:
            raise ValueError(f"data.pkl has more than {MOST_INSTRUCTION_BYTES:,} bytes")
        return bytes(self.record("data.pkl"))


class _Global:
    """A name that a pickle gives; it stands for what is done here, not for the object of that name."""

    def __init__(self, name: str) -> None:
        self.name = name


class _Storage:
    """Numbers of one type, in a row."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values


_KNOWN = {
    name: _Global(name)
    for name in (
        "collections.OrderedDict",
        "torch._utils._rebuild_tensor_v2",
        "torch._utils._rebuild_parameter",
        *(f"torch.{storage}" for storage in _STORAGES),
    )
}


class _Mark:
    """Where the items of a list, tuple or dictionary begin on the stack."""


_MARK = _Mark()


class _Ordered(dict):
    """An OrderedDict of the pickle: the only object that may be given attributes, which are dropped."""


class _Program:
    """A pickle of protocol 2 and what it builds.

    Instructions, in the words of Python's pickletools, take their argument from the bytes that follow, and their
    operands from a stack.
    """

    def __init__(self, records: _Records) -> None:
        self._records = records
        self._code, self._place = records.instructions(), 0
        self._stack: List[Any] = []
        self._memo: Dict[int, Any] = {}

    def result(self) -> Any:
        if self._take(2) != b"\x80\x02":
            raise ValueError("data.pkl is not a pickle of protocol 2")
        while True:
            code = self._take(1)
            if code == b".":  # STOP
                return self._pop()
            instruction = _INSTRUCTIONS.get(code)
            if instruction is None:
                raise ValueError(f"data.pkl has the instruction {code!r}, which no weights need")
            instruction(self)

    # ---- arguments and operands --------------------------------------------------------------------------------------

    def _take(self, number: int) -> bytes:
        taken = self._code[self._place : self._place + number]
        if len(taken) != number:
            raise ValueError("data.pkl is cut short")
        self._place += number
        return taken

    def _unpacked(self, form: str) -> Any:
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def _line(self) -> str:
        end = self._code.find(b"\n", self._place, self._place + 1000)
        if end < 0:
            raise ValueError("data.pkl has a name without an end")
        text = self._take(end + 1 - self._place)[:-1]
        return text.decode("ascii")

    def _text(self) -> str:
        return self._take(self._unpacked("<I")).decode("utf-8")

    def _long(self) -> int:
        return int.from_bytes(self._take(self._unpacked("<B")), "little", signed=True)

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _pop(self, kind: Any = object) -> Any:
        if not self._stack or self._stack[-1] is _MARK or not isinstance(self._stack[-1], kind):
            raise ValueError("data.pkl is not what torch.save writes")
        return self._stack.pop()

    def _top(self, kind: Any = object) -> Any:
        found = self._pop(kind)
        self._push(found)
        return found

    def _items(self) -> List[Any]:
        """What was put on the stack since the last mark."""
        for place in range(len(self._stack) - 1, -1, -1):
            if self._stack[place] is _MARK:
                items = self._stack[place + 1 :]
                del self._stack[place:]
                return items
        raise ValueError("data.pkl is not what torch.save writes")

    # ---- instructions ------------------------------------------------------------------------------------------------

    def _remember(self, number: int) -> None:
        self._memo[number] = self._top()

    def _recall(self, number: int) -> None:
        if number not in self._memo:
            raise ValueError("data.pkl is not what torch.save writes")
        self._push(self._memo[number])

    def _tuple(self, number: int) -> None:
        self._push(tuple(reversed([self._pop() for _ in range(number)])))

    def _extend(self, items: List[Any]) -> None:
        self._top(list).extend(items)

    def _set(self, items: List[Any]) -> None:
        found = self._top(dict)
        if len(items) % 2:
            raise ValueError("data.pkl is not what torch.save writes")
        for key, value in zip(items[::2], items[1::2]):
            if not isinstance(key, str):
                raise ValueError(f"a dictionary has the key {shown(key)}, which is no text")
            found[key] = value

    def _append(self) -> None:
        self._extend([self._pop()])

    def _set_one(self) -> None:
        value = self._pop()
        self._set([self._pop(), value])

    def _global(self) -> None:
        name = f"{self._line()}.{self._line()}"
        if name not in _KNOWN:
            raise ValueError(f"it names {shown(name)}, which no weights need: reading it elsewhere could run a program")
        self._push(_KNOWN[name])

    def _build(self) -> None:
        self._pop(dict)  # a state_dict's _metadata
        self._top(_Ordered)

    def _call(self) -> None:
        arguments, function = self._pop(tuple), self._pop(_Global)
        name = function.name.split(".")[-1]
        if name == "OrderedDict" and not arguments:
            self._push(_Ordered())
        elif name == "_rebuild_tensor_v2" and 4 <= len(arguments) <= 7:
            self._push(_tensor(*arguments[:4]))
        elif name == "_rebuild_parameter" and len(arguments) == 3 and isinstance(arguments[0], torch.Tensor):
            self._push(arguments[0])
        else:
            raise ValueError(f"{function.name} is called as torch.save does not")

    def _storage(self) -> None:
        found = self._pop(tuple)
        if len(found) != 5 or found[0] != "storage":
            raise ValueError("data.pkl is not what torch.save writes")
        _, kind, key, _, elements = found
        dtype = _STORAGES.get(kind.name.split(".")[-1]) if isinstance(kind, _Global) else None
        if dtype is None or not isinstance(key, str) or type(elements) is not int:
            raise ValueError("data.pkl is not what torch.save writes")
        data = self._records.record("data/" + key)
        if not 0 <= elements <= len(data) // torch.empty(0, dtype=dtype).element_size():
            raise ValueError(f"record data/{shown(key)} has {len(data):,} bytes, {elements:,} {dtype} are more")
        self._push(
            _Storage(torch.frombuffer(data, dtype=dtype, count=elements) if elements else torch.empty(0, dtype=dtype))
        )


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any) -> torch.Tensor:
    """A view of a storage; ValueError where it would reach beyond it, or repeat its values."""
    ints = [offset, *shape, *strides] if isinstance(shape, tuple) and isinstance(strides, tuple) else [None]
    if (
        not isinstance(storage, _Storage)
        or not all(type(value) is int and 0 <= value <= MOST_ELEMENTS for value in ints)
        or len(shape) != len(strides)
        or len(shape) > MOST_DIMENSIONS
    ):
        raise ValueError(f"a tensor of shape {shown(shape)} and strides {shown(strides)} cannot be")
    elements, last, extent = 1, offset, 1
    for size, stride in zip(shape, strides):
        elements, last, extent = elements * size, last + (size - 1) * stride, extent * max(size, 1)
    there = len(storage.values)
    if extent > MOST_ELEMENTS or elements > there or (elements and last >= there):
        raise ValueError(f"a tensor of shape {list(shape)} reaches beyond its {there:,} values")
    return torch.as_strided(storage.values, shape, strides, offset) if elements else storage.values[:0].reshape(shape)


_INSTRUCTIONS: Dict[bytes, Callable[[_Program], None]] = {
    b"N": lambda run: run._push(None),  # NONE
    b"\x88": lambda run: run._push(True),  # NEWTRUE
    b"\x89": lambda run: run._push(False),  # NEWFALSE
    b"J": lambda run: run._push(run._unpacked("<i")),  # BININT
    b"K": lambda run: run._push(run._unpacked("<B")),  # BININT1
    b"M": lambda run: run._push(run._unpacked("<H")),  # BININT2
    b"\x8a": lambda run: run._push(run._long()),  # LONG1
    b"G": lambda run: run._push(run._unpacked(">d")),  # BINFLOAT
    b"X": lambda run: run._push(run._text()),  # BINUNICODE
    b"(": lambda run: run._push(_MARK),  # MARK
    b")": lambda run: run._push(()),  # EMPTY_TUPLE
    b"t": lambda run: run._push(tuple(run._items())),  # TUPLE
    b"\x85": lambda run: run._tuple(1),  # TUPLE1
    b"\x86": lambda run: run._tuple(2),  # TUPLE2
    b"\x87": lambda run: run._tuple(3),  # TUPLE3
    b"]": lambda run: run._push([]),  # EMPTY_LIST
    b"a": lambda run: run._append(),  # APPEND
    b"e": lambda run: run._extend(run._items()),  # APPENDS
    b"}": lambda run: run._push({}),  # EMPTY_DICT
    b"s": lambda run: run._set_one(),  # SETITEM
    b"u": lambda run: run._set(run._items()),  # SETITEMS
    b"q": lambda run: run._remember(run._unpacked("<B")),  # BINPUT
    b"r": lambda run: run._remember(run._unpacked("<I")),  # LONG_BINPUT
    b"h": lambda run: run._recall(run._unpacked("<B")),  # BINGET
    b"j": lambda run: run._recall(run._unpacked("<I")),  # LONG_BINGET
    b"c": lambda run: run._global(),  # GLOBAL
    b"R": lambda run: run._call(),  # REDUCE
    b"b": lambda run: run._build(),  # BUILD
    b"Q": lambda run: run._storage(),  # BINPERSID
}


class _Plain:
    """Copies values of the kinds that are handed out.

    A pickle can put one list into another many times, and into itself: what is small in the file would be without end.
    """

    def __init__(self, most_bytes: int) -> None:
        self._values, self._bytes = MOST_VALUES, most_bytes

    def copied(self, value: Any, level: int) -> Any:
        self._values -= 1
        texts = value if isinstance(value, dict) else [value] if isinstance(value, str) else ()
        self._values -= sum(len(text) // 64 for text in texts)
        if isinstance(value, torch.Tensor):
            self._bytes -= value.numel() * value.element_size()
        if self._values < 0 or self._bytes < 0 or level > MOST_LEVELS:
            raise ValueError("it holds more values, tensors or levels than its size explains")
        if isinstance(value, dict):
            return {key: self.copied(each, level + 1) for key, each in value.items()}
        if isinstance(value, list):
            return [self.copied(each, level + 1) for each in value]
        if isinstance(value, tuple):
            return tuple(self.copied(each, level + 1) for each in value)
        if value is None or isinstance(value, (bool, int, float, str, torch.Tensor)):
            return value
        raise ValueError("it holds something that is neither tensor, number, text, list nor dictionary")
