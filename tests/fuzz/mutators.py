"""Damage with a structure: changes of a file that get past its first check, so that the code behind it is reached.

A mutator changes a file in place, from a given random stream. `remade`: it makes checksums and lengths again, or the
format has none; then what is read may be another valid value. After any other change a reader must refuse the file or
read what it read before.
"""

from __future__ import annotations

import ast
import bz2
import gzip
import json
import lzma
import os
import random
import struct
from pathlib import Path
from typing import Callable, NamedTuple

import yaml

STRUCTURE = "structure"  # the name of changes that a library makes, of a file that is whole


class Mutator(NamedTuple):
    name: str
    apply: Callable[[random.Random, Path], None]
    remade: bool = False


def on_bytes(name, change, remade=False):
    """Make a mutator of a function from a random stream and bytes to bytes."""

    def apply(rng, path):
        data = change(rng, path.read_bytes())
        # Never in place: the sample may be mapped by a reader that a former case left behind.
        path.unlink()
        path.write_bytes(data)

    return Mutator(name, apply, remade)


def free(mutators):
    """The same for a format without any redundancy: what is read may be another valid value."""
    return tuple(mutator._replace(remade=True) for mutator in mutators)


def bound(mutators):
    """The same for a file whose checksum stands in another one: what is read must be what was written."""
    return tuple(mutator._replace(remade=False) for mutator in mutators)


def sealed_by(seal, mutators, *, remade):
    """The same changes, after which `seal` makes the checksums again, so that the code behind them is reached."""

    def of(mutator):
        def apply(rng, path):
            mutator.apply(rng, path)
            if path.is_file():
                seal(path)

        return Mutator(mutator.name + ", sealed", apply, remade)

    return tuple(map(of, mutators))


BOUNDARIES = sorted(
    {max(0, 2**bits + add) for bits in (0, 7, 8, 15, 16, 31, 32, 62, 63, 64) for add in (-1, 0)} - {2**64}
)


def flip_bits(rng, data):
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        if changed:
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def flip_early_bits(rng, data):
    return flip_bits(rng, data[:128]) + data[128:]


def cut(rng, data):
    return data[: rng.randrange(len(data))] if data else data


def cut_a_little(rng, data):
    return data[: -rng.randint(1, 16)]


def extend(rng, data):
    return data + rng.choice(
        (
            b"\0",
            b"\n",
            b"\xff" * 7,
            bytes(4096),
            data[:64],
            bytes(rng.randrange(256) for _ in range(9)),
        )
    )


def splice(rng, data):
    """A piece of the file over another place of it."""
    if len(data) < 2:
        return data
    size = rng.randint(1, max(1, min(256, len(data) // 2)))
    source = rng.randrange(len(data))
    target = rng.randrange(len(data))
    piece = data[source : source + size]
    return data[:target] + piece + data[target + len(piece) :]


def insert_or_remove(rng, data):
    at = rng.randrange(len(data) + 1)
    size = rng.randint(1, 8)
    return data[:at] + (
        data[at + size :] if rng.random() < 0.5 else bytes(rng.randrange(256) for _ in range(size)) + data[at:]
    )


def blank(rng, data):
    """A run of zeros, as a disk that lost a block gives it."""
    at = rng.randrange(len(data) + 1)
    size = rng.choice((1, 8, 64, 512, 4096))
    return data[:at] + bytes(min(size, len(data) - at)) + data[at + size :]


def boundary_number(rng, data):
    size = rng.choice((1, 2, 4, 8))
    order = rng.choice("<>")
    number = struct.pack(order + "Q", rng.choice(BOUNDARIES))
    number = number[:size] if order == "<" else number[-size:]
    at = rng.randrange(min(len(data), rng.choice((16, 64, len(data) or 1))) or 1)
    return data[:at] + number + data[at + size :]


def nothing(rng, data):
    return b""


def one_character(rng, data):
    return rng.choice((b"\0", b"\n", b"{", b"[", b'"', b" ", b"0", b"\xef\xbb\xbf", b"\xff"))


def noise(rng, data):
    return bytes(rng.randrange(256) for _ in range(rng.choice((1, 16, 200))))


_OF_BYTES = (
    flip_bits,
    flip_early_bits,
    cut,
    cut_a_little,
    extend,
    splice,
    insert_or_remove,
    blank,
    boundary_number,
)
BYTES = tuple(on_bytes(change.__name__, change) for change in (*_OF_BYTES, nothing, one_character, noise))


def _instead(name, put):
    """Something else in the place of the file."""

    def apply(rng, path):
        path.unlink()
        put(path)

    return Mutator(name, apply)


# What may stand in the place of any file.
PLACES = (
    _instead("missing", lambda path: None),
    _instead("a folder", Path.mkdir),
    _instead("a link to itself", lambda path: path.symlink_to(path.name)),
)
# And of one in a folder that came from somewhere else; a file that a user names may be a pipe.
FOREIGN_PLACES = (
    *PLACES,
    _instead("a pipe", os.mkfifo),
    _instead("a link to /dev/zero", lambda path: path.symlink_to("/dev/zero")),
)


def deep(levels, keyed=False):
    value = 1
    for _ in range(levels):
        value = {"a": value} if keyed else [value]
    return value


NUMBERS = (
    *(-1, 2, 3, 10**9, 10**12, 2**53 + 1, -(2**63) - 1, 10**30, -(10**30), 10**400, *BOUNDARIES),
    *map(float, "0.5 -0.0 1.0 1e-320 1e18 1e300 nan inf -inf".split()),
)
TEXTS = (
    *"0 1 -1 1e3 nan true null a é 😀 ../outside.npy /dev/zero /etc/passwd . .. a/b C:\\x ~ manifest.json %s%n".split(),
    *"{0} <i4 |O ffffffffffffffff -0x1".split(),
    *("", " ", "\u2028", "\x00", "\x1b[31m", "a\nb", "\ud800", "x" * 300, "y" * 70000, "1" * 5000),
)


def _trees():
    """New ones each time: a later change may be in them."""
    return (
        *(
            [],
            {},
            [[]],
            [{}],
            [None],
            {"": 0},
            {"a": [1]},
            [1, 2],
            ["a"],
            [1.5],
            [0] * 3000,
            [2**70],
            {"\ud800": 1},
        ),
        *(deep(20), deep(20, True), deep(600)),
    )


def any_value(rng):
    return rng.choice(rng.choice((NUMBERS, NUMBERS, TEXTS, TEXTS, _trees(), (None, True, False))))


def _other_type(rng, value):
    """The same value as another type would hold it."""
    others = [[value], {"a": value}, str(value), None, bool(value)]
    if isinstance(value, (int, float)) and value == value and abs(value) < 2**60:
        others += [
            float(value),
            value + 0.5,
            -value,
            value + 1,
            value - 1,
            value * 2,
            value * 10**6,
        ]
    if isinstance(value, str):
        others += [value + "x", value[:-1], value.upper(), value * 50, value.encode().hex()]
    if isinstance(value, list):
        others += [
            value[:-1],
            value + value,
            value[::-1],
            {str(n): item for n, item in enumerate(value)},
            len(value),
        ]
    if isinstance(value, dict):
        others += [list(value), list(value.values()), len(value)]
    return rng.choice(others)


def places(tree):
    """List every (container, key or index) in a tree of dictionaries and lists; at most some of a long list's."""
    steps = []
    waiting = [tree]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            items = list(value.items())
        elif isinstance(value, list):
            items = list(enumerate(value[:40]))
        else:
            continue
        for key, child in items:
            steps.append((value, key))
            waiting.append(child)
    return steps


def change_tree(rng, tree):
    """One change somewhere in the tree, which is changed in place where it is no scalar."""
    steps = places(tree)
    if not steps or rng.random() < 0.02:
        return any_value(rng)
    # A long list has most places: half of the changes are in dictionaries.
    of_dictionaries = [step for step in steps if isinstance(step[0], dict)]
    container, key = rng.choice(of_dictionaries if of_dictionaries and rng.random() < 0.5 else steps)
    what = rng.randrange(8)
    if what < 2:
        container[key] = any_value(rng)
    elif what < 4:
        container[key] = _other_type(rng, container[key])
    elif what == 4:
        del container[key]
    elif what == 5 and isinstance(container, list):
        container.insert(key, container[key])
    elif what == 5:
        container[rng.choice((str(key) + "x", "", str(key).upper(), "a", "__class__", "1"))] = container.pop(key)
    elif what == 6:
        other, place = rng.choice(steps)
        if place in other if isinstance(other, dict) else place < len(other):
            # A deep copy, so that no tree contains itself.
            container[key] = json.loads(json.dumps(other[place], default=str))
    elif isinstance(container, dict):
        container[rng.choice(("a", "", "version", "format", "x" * 300))] = any_value(rng)
    else:
        container.append(any_value(rng))
    return tree


def json_text(tree):
    return json.dumps(tree).encode("utf-8", "surrogatepass")


def _json_tree(rng, data):
    tree = json.loads(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        tree = change_tree(rng, tree)
    return json_text(tree)


def _raw_text(rng, data):
    """Changes of the text of a JSON document that no tree shows."""
    what = rng.randrange(9)
    at = rng.randrange(len(data) + 1)
    if what == 0:
        depth = rng.choice((900, 5000, 100000))
        bracket = rng.choice((b"[", b'{"a":'))
        return bracket * depth + (b"1" + b"]" * depth if bracket == b"[" else b"")
    if what == 1:  # a key that stands twice
        brace = data.find(b"{", at) if data.find(b"{", at) >= 0 else data.find(b"{")
        quote = data.find(b'"', brace)
        name = data[quote : data.find(b":", quote)]
        return data[: brace + 1] + name + b": 1, " + data[brace + 1 :] if brace >= 0 and quote >= 0 else data
    if what == 2:
        return data.decode("utf-8", "replace").encode(rng.choice(("utf-16", "utf-32", "utf-8-sig")))
    if what == 3:
        return data[:at] + rng.choice((b"\xff", b"\xc3", b"\xed\xa0\x80", b"\0", b"\\", b"\\u12", b"\r")) + data[at:]
    if what == 4:
        return data + rng.choice((b"{}", b"x", b",", b"]", b"\0", data))
    if what == 5:  # a number in other digits
        digits = [place for place in range(len(data)) if data[place : place + 1].isdigit()]
        if not digits:
            return data
        at = rng.choice(digits)
        return (
            data[:at]
            + rng.choice((b"NaN", b"1e999", b"-", b"00", b"1" * 5000, b"1.", b"1e", b"1_0", "१".encode()))
            + data[at + 1 :]
        )
    if what == 6:
        return data[at:]
    if what == 7:
        return data.replace(b'"', b"'")
    return data[:at] + b"1" * 100000 + data[at:]


_OF_JSON = "flip_bits cut splice blank nothing one_character noise".split()
JSON = (
    *[on_bytes("tree", _json_tree)] * 2,
    on_bytes("text", _raw_text),
    *(mutator for mutator in BYTES if mutator.name in _OF_JSON),
)


def _json_lines(rng, data):
    lines = data.split(b"\n")
    if len(lines) < 2:
        return _raw_text(rng, data)
    at = rng.randrange(len(lines) - 1)
    what = rng.randrange(9)
    if what < 3 and lines[at].strip():
        lines[at] = json_text(change_tree(rng, json.loads(lines[at])))
    elif what == 3:
        lines[at] = _raw_text(rng, lines[at])
    elif what == 4:
        del lines[at]
    elif what == 5:
        lines.insert(rng.randrange(len(lines)), lines[at])
    elif what == 6:
        lines[at] = rng.choice((b"", b" ", b"\xe2\x80\xa8", b"null", b"[]", b"{}", b'"a"', b"1", b"{}{}"))
    elif what == 7:
        lines[at] = lines[at] + rng.choice((b"\r", b"\x0b", b" ", b"\x1c"))
    else:
        lines[at], lines[0] = lines[0], lines[at]
    return b"\n".join(lines)


JSON_LINES = (*[on_bytes("lines", _json_lines)] * 2, *BYTES)


class _Plain(yaml.SafeDumper):
    """No aliases for values that occur twice."""

    def ignore_aliases(self, data):
        return True


def _yaml_tree(rng, data):
    tree = yaml.safe_load(data)
    for _ in range(rng.choice((1, 1, 2, 3))):
        tree = change_tree(rng, tree)
    if b"\\ud800" in json_text(tree) or len(str(tree)) > 200000 or str(tree).count("[[[[[[[[[[[[[[[[[[[[["):
        return json_text(tree)  # JSON is YAML; its dumper has other limits
    return yaml.dump(tree, Dumper=_Plain, sort_keys=False).encode("utf-8", "surrogatepass")


BOMB = b"a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + b"".join(
    b"a%d: &a%d [%s]\n" % (n, n, b", ".join([b"*a%d" % (n - 1)] * 9)) for n in range(1, 12)
)
SCALARS = (
    *b"!!binary !!timestamp 2001-01-01 2001-13-45 1:30:00 0x1F 0o17 017 1_000 .inf -.inf .nan ~ yes Off".split(),
    *b'*x | \' " [ { @a `a` %a !!python/name:os.system "\\x41\\u2028" "\\ud800"'.split(),
    *(
        b"!!python/object/apply:os.system ['true']",
        b"!unknown 1",
        b"!!binary aGk=",
        b"!!binary x",
        b"!!set {a, b}",
    ),
    *(
        b"!!omap [a: 1]",
        b"&x 1",
        b"&x [*x]",
        b"{<<: {a: 1}}",
        b"{<<: 1}",
        b"{[1]: 2}",
        b"{1: 1, 1: 2}",
        b"{{a: 1}: 2}",
    ),
    *(
        b"> \n  text",
        b"1" * 5000,
        b"9" * 100000,
        b"[" * 2000,
        b"-" * 50,
        b"\t1",
        b"? a",
        b": b",
        b"# c",
        b"a: b: c",
    ),
    *(
        b"!!int '1'",
        b"!!int 'a'",
        b"!!float 'a'",
        b"!!bool 'a'",
        b"!!null 'x'",
        b"!!map []",
        b"!!seq {}",
    ),
)


def _yaml_text(rng, data):
    lines = data.split(b"\n")
    valued = [n for n, line in enumerate(lines) if b": " in line] or [0]
    at = rng.choice(valued)
    what = rng.randrange(9)
    if what < 4:
        lines[at] = lines[at].partition(b": ")[0] + b": " + rng.choice(SCALARS)
    elif what == 4:
        lines.insert(at, lines[rng.choice(valued)])
    elif what == 5:
        lines[at] = rng.choice((b" ", b"   ", b"\t")) + lines[at]
    elif what == 6:
        lines.insert(
            rng.randrange(len(lines)),
            rng.choice((b"---", b"...", b"%YAML 9.9", b"- a", b"a", BOMB, b"? ", b"{" * 3000)),
        )
    elif what == 7:
        del lines[at]
    else:
        return _raw_text(rng, data)
    return b"\n".join(lines)


YAML = (on_bytes("tree", _yaml_tree), *[on_bytes("YAML text", _yaml_text)] * 2, *BYTES)


def _text_lines(rng, data):
    lines = data.split(b"\n")
    at = rng.randrange(len(lines))
    what = rng.randrange(8)
    if what == 0:
        del lines[at]
    elif what == 1:
        lines.insert(at, lines[rng.randrange(len(lines))])
    elif what == 2:
        lines[at] = rng.choice(
            (
                b"",
                b" ",
                b"\t",
                b"\0",
                b"\xff\xfe",
                b"\xe2\x80\xa8",
                b"a" * 200000,
                b'"',
                b",,,,",
                b"-",
                b"\xef\xbb\xbf",
            )
        )
    elif what == 3:
        lines[at] += rng.choice((b"\r", b" ", b",", b"\t", b'"', b"\x0c", b"\xc2\x85"))
    elif what == 4:
        fields = lines[at].split(b",")
        fields[rng.randrange(len(fields))] = str(rng.choice((*NUMBERS, *TEXTS))).encode("utf-8", "surrogatepass")
        lines[at] = b",".join(fields)
    elif what == 5:
        lines[at] = str(rng.choice((*NUMBERS, *TEXTS))).encode("utf-8", "surrogatepass")
    elif what == 6:
        return data.replace(b"\n", rng.choice((b"\r\n", b"\r", b"\n\n", b"\0")))
    else:
        return data.decode("utf-8", "replace").encode(rng.choice(("utf-16", "utf-8-sig", "utf-32")))
    return b"\n".join(lines)


TEXT = (*[on_bytes("lines", _text_lines)] * 2, *BYTES)


_COMPRESSORS = {
    ".gz": (lambda data: gzip.compress(data, mtime=0, compresslevel=1), gzip.decompress),
    ".xz": (lambda data: lzma.compress(data, preset=0), lzma.decompress),
    ".bz2": (lambda data: bz2.compress(data, 1), bz2.decompress),
}


def compressed(path):
    """The file of that name is compressed as its suffix says."""
    path.write_bytes(_COMPRESSORS[path.suffix][0](path.read_bytes()))


def _within(mutators):
    """Changes the content and compresses it again: a stream that is whole."""

    def apply(rng, path):
        path.write_bytes(_COMPRESSORS[path.suffix][1](path.read_bytes()))
        rng.choice(mutators).apply(rng, path)
        compressed(path)

    return Mutator("content, compressed again", apply, True)


def _bomb(rng, path):
    """One line of 100 MB in a few hundred kB, compressed as one member of the stream many times over."""
    piece = _COMPRESSORS[path.suffix][0](b"0" * (1 << 22))
    path.write_bytes(piece * 25)


def streams(mutators):
    """For a compressed file of content that these mutators know. Its checksum finds other damage."""
    seldom = Mutator("a line of 100 MB", lambda rng, path: _bomb(rng, path) if rng.random() < 0.1 else None, True)
    return (*BYTES, _within(mutators), _within(mutators), _within(mutators), seldom)


_DESCRIPTIONS = (
    *"<i4 >i4 <i8 <u8 <f8 <f2 |b1 |i1 |O O |V8 <U4 |S3 <M8[s] <c16 <i3 <i400 i4,f4 nonsense <U100000000 |V0".split(),
    *(
        [],
        "",
        [["a", "<i4"]],
        [["a", "<i4"]] * 2,
        [["a", "<i4", [2**40]]],
        [["a", "<i4", [-1]]],
        [["", "<i4"]],
    ),
    *([["a", "|O"]], None, 4, {"a": 1}, ("<i4", (2,))),
)
_SHAPES = (
    *(
        (size,)
        for size in (
            0,
            1,
            -1,
            1 << 20,
            1 << 40,
            1 << 62,
            1 << 63,
            1 << 64,
            10**30,
            "a",
            1.5,
            None,
            True,
            (1,),
        )
    ),
    *((), (2, 2), (1,) * 40, (0, 1 << 62), (1 << 32, 1 << 32), [1], 1, None, "1", {1: 1}),
)
_HEADERS = (
    *"{} [] { } 1 None __import__('os').getpid() {**{}} é".split(),
    *(
        "",
        "{1: 2}",
        "\0",
        "x" * 9000,
        "(" * 300,
        "{'a':" * 300,
        "-" * 3000 + "1",
        "[" * 5000 + "]" * 5000,
        "1" * 5000,
    ),
    *("{'descr': '<i4'}", "{'descr': '<i4', 'fortran_order': False, 'shape': (3,)} 1"),
    "{'descr': '<i4', 'fortran_order': False, 'shape': (3L,)}",
)


def _npy(rng, data):
    major = data[6] if len(data) > 8 else 0
    if not data.startswith(b"\x93NUMPY") or major not in (1, 2, 3):
        return flip_bits(rng, data)
    start = 10 if major == 1 else 12
    size = int.from_bytes(data[8:start], "little")
    header = data[start : start + size]
    rest = data[start + size :]
    try:
        values = dict(ast.literal_eval(header.decode("latin1")))
    except (ValueError, SyntaxError):
        return flip_bits(rng, data)
    version = (data[6], data[7])
    what = rng.randrange(10)
    text = None
    if what < 3:
        values["descr"] = rng.choice(_DESCRIPTIONS)
    elif what < 5:
        values["shape"] = rng.choice((*_SHAPES, *(tuple(side + add for side in values["shape"]) for add in (1, -1, 7))))
    elif what == 5:
        values["fortran_order"] = rng.choice((True, None, 0, "False", []))
    elif what == 6:
        rng.choice(
            (
                lambda: values.pop(rng.choice(sorted(values))),
                lambda: values.update(more=1),
                values.clear,
            )
        )()
    elif what == 7:
        version = rng.choice(((1, 0), (2, 0), (3, 0), (0, 0), (1, 1), (9, 9), (255, 255)))
    elif what == 8:
        text = rng.choice(_HEADERS).encode()
    else:
        rest = rng.choice((flip_bits, cut, extend, splice, blank, nothing))(rng, rest)
    text = repr(values).encode() + b"\n" if text is None else text
    length = (
        len(text) if rng.random() < 0.9 else rng.choice((0, 1, len(text) - 1, len(text) + 1, 65535, 2**31, 2**32 - 1))
    )
    width = 2 if version[0] == 1 else 4
    return b"\x93NUMPY" + bytes(version) + (length % 256**width).to_bytes(width, "little") + text + rest


NPY = (*[on_bytes("header", _npy)] * 3, *BYTES)


def _safetensors(rng, data):
    size = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + size]
    rest = data[8 + size :]
    what = rng.randrange(6)
    if what == 0:
        length = rng.choice((0, 1, size - 1, size + 1, len(data), len(data) - 8, 100_000_001, *BOUNDARIES))
        return struct.pack("<Q", length % 2**64) + data[8:]
    if what == 1:
        header = _raw_text(rng, header)
    elif what == 2:
        rest = rng.choice((flip_bits, cut, extend, splice, blank, nothing))(rng, rest)
    else:
        try:
            tree = json.loads(header)
        except ValueError:
            return flip_bits(rng, data)
        names = [name for name in tree if isinstance(tree[name], dict) and "data_offsets" in tree[name]]
        if what == 3 and names:
            entry = tree[rng.choice(names)]
            first, last = entry["data_offsets"]
            wrong = (
                [last, first],
                [first, last + 4],
                [first + 4, last + 4],
                [-4, last],
                [0, 0],
                [first],
                [first, 2**64],
            )
            entry["data_offsets"] = rng.choice((*wrong, ["a", last]))
        elif what == 4 and names:
            entry = tree[rng.choice(names)]
            shapes = (
                [],
                [0],
                [-1],
                [2**62, 4],
                [2**40],
                [1] * 70,
                ["a"],
                [entry["shape"]],
                entry["shape"][::-1],
                None,
            )
            dtypes = (*"F16 BF16 F64 I64 I32 BOOL U8 F8_E4M3 X".split(), "", None, 1)
            key, values = rng.choice((("dtype", dtypes), ("shape", shapes)))
            entry[key] = rng.choice(values)
        else:
            tree = change_tree(rng, tree)
        header = json_text(tree)
    return struct.pack("<Q", len(header)) + header + rest


SAFETENSORS = (*[on_bytes("header", _safetensors, True)] * 2, *free(BYTES))


def _frames(frame, unframe):
    def change(rng, data):
        try:
            messages = unframe(data)
        except (struct.error, IndexError):
            return flip_bits(rng, data)
        if not messages:
            return data
        at = rng.randrange(len(messages))
        what = rng.randrange(8)
        if what < 5:
            kinds = (
                flip_bits,
                flip_early_bits,
                cut,
                extend,
                splice,
                insert_or_remove,
                boundary_number,
                blank,
                nothing,
            )
            messages[at] = rng.choice(kinds)(rng, messages[at])
        elif what == 5:
            del messages[at]
        elif what == 6:
            messages.insert(
                at,
                rng.choice((b"", b"\n", b"\x0a\xff\xff\xff\xff\x7f", bytes(40), messages[at] * 2)),
            )
        else:
            messages[at] = messages[rng.randrange(len(messages))]
        return b"".join(frame(message) for message in messages)

    return change


def frame_lengths(rng, data):
    """Another length of the first record."""
    return struct.pack("<Q", rng.choice(BOUNDARIES)) + data[8:]


def tfrecord(frame, unframe):
    """frame, unframe: of tests/format_samples.py, which needs google-crc32c."""
    return (
        *[on_bytes("payload", _frames(frame, unframe), True)] * 2,
        on_bytes("length", frame_lengths),
        *BYTES,
    )
