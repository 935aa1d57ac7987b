"""Files that torch.save wrote: plain weights come back, and nothing in a file is run, whatever is in it."""

import io
import pickle
import struct
import tarfile
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Tuple

import pytest
import torch

from ipu_packed_bert import torch_files
from ipu_packed_bert.commands import export
from ipu_packed_bert.torch_files import load_tensors
from pack_data.command import run_main

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")

# -- plain weights -----------------------------------------------------------------------------------------------------


def test_plain_weights_are_read(tmp_path):
    base = torch.arange(12.0)
    weights = {
        "turned": base.view(3, 4).t(),
        "part": base[2:9:3],
        "tied": base,
        "number": torch.tensor(3.5),
        "none": torch.zeros(0, 4),
        "parameter": torch.nn.Parameter(base * 2),
        **{str(dtype): torch.tensor([0, 1, 1]).to(dtype) for dtype in torch_files._STORAGES.values()},
    }
    torch.save(weights, tmp_path / "weights.bin")
    found = load_tensors(tmp_path / "weights.bin")
    assert set(found) == set(weights)
    for name, tensor in weights.items():
        assert torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape


def test_a_state_dict_with_its_metadata_is_read(tmp_path):
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    assert module.state_dict()._metadata
    torch.save(module.state_dict(), tmp_path / "weights.bin")
    found = load_tensors(tmp_path / "weights.bin")
    assert type(found) is dict and all(torch.equal(found[n], t) for n, t in module.state_dict().items())


def test_plain_values_are_read(tmp_path):
    values = {"a": [1, -2, 2**40, 3.25, None, True, "é\n"], "b": {"c": (1, (2,), ())}, "o": OrderedDict(x=[[]])}
    torch.save(values, tmp_path / "values.pt")
    assert load_tensors(tmp_path / "values.pt") == {**values, "o": {"x": [[]]}}


# -- programs ----------------------------------------------------------------------------------------------------------


class Trap(torch.nn.Module):
    """A module whose loading writes a file."""

    def __init__(self, path: str):
        super().__init__()
        self.path = path

    @torch.jit.export
    def __getstate__(self) -> Tuple[str, bool]:
        return self.path, self.training

    @torch.jit.export
    def __setstate__(self, state: Tuple[str, bool]):
        self.path = state[0]
        self.training = state[1]
        torch.ops.aten.save(torch.zeros(1), self.path)

    def forward(self, x):
        return x


@pytest.fixture
def written(tmp_path):
    return tmp_path / "written"


@pytest.fixture
def archive(tmp_path, written):
    """The bytes of a TorchScript archive; loading it writes a file."""
    torch.jit.save(torch.jit.script(Trap(str(written))), str(tmp_path / "trap.pt"))
    torch.jit.load(str(tmp_path / "trap.pt"))
    assert written.exists()  # the trap works
    written.unlink()
    return (tmp_path / "trap.pt").read_bytes()


def rebuilt(data, name=lambda name: name, more=()):
    """The archive with other names, and with more records behind its own."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as before, zipfile.ZipFile(out, "w") as after:
        for entry in before.namelist():
            after.writestr(name(entry), before.read(entry))
        for entry, content in more:
            after.writestr(entry, content)
    return out.getvalue()


def two_faced(data):
    """An archive with two tables of contents: Python's zipfile reads the second one, which names a text, torch the
    first."""
    plain = rebuilt(data)
    end = plain.rindex(b"PK\x05\x06")
    size = int.from_bytes(plain[end + 12 : end + 16], "little")
    other = io.BytesIO()
    with zipfile.ZipFile(other, "w") as zipped:
        entry = zipfile.ZipInfo("trap/readme")
        entry.comment = b"x" * (size - 46 - len("trap/readme"))
        zipped.writestr(entry, b"nothing")
    other = other.getvalue()
    tail = other.rindex(b"PK\x05\x06")
    return plain[:end] + other[tail - size : tail] + plain[end:]


FORMS = {
    "as saved": lambda data: data,
    "another top folder": lambda data: rebuilt(data, lambda name: "a folder/" + name.split("/", 1)[1]),
    "among many records": lambda data: rebuilt(
        data, more=[(f"trap/data/{number}", b"0" * 64) for number in range(200)]
    ),
    "two tables of contents": two_faced,
}


def refused(path):
    with pytest.raises(ValueError) as caught:
        load_tensors(path)
    text = str(caught.value)
    assert text.startswith(f"{path}: ") and "\n" not in text and len(text) < 600
    return text


@pytest.mark.parametrize("form", FORMS)
def test_torchscript_is_refused(tmp_path, archive, written, form):
    path = tmp_path / "weights.bin"
    path.write_bytes(FORMS[form](archive))
    assert "TorchScript" in refused(path) or form == "two tables of contents"
    assert not written.exists()


class Call:
    """Pickled as a call of a function."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def with_program(code, records=()):
    """An archive with this pickle, and with a storage of 16 bytes named 0."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("archive/data.pkl", code)
        archive.writestr("archive/data/0", bytes(range(16)))
        for name, content in records:
            archive.writestr(name, content)
    return out.getvalue()


def text(value):
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def number(value):
    size = value.bit_length() // 8 + 1
    return b"\x8a" + bytes([size]) + value.to_bytes(size, "little", signed=True)


def row(*values):
    return b"(" + b"".join(map(number, values)) + b"t"


def storage(kind="torch\nFloatStorage", key="0", elements=4):
    return b"(" + text("storage") + f"c{kind}\n".encode() + text(key) + text("cpu") + number(elements) + b"tQ"


REBUILD = b"ctorch._utils\n_rebuild_tensor_v2\n"


ZERO, SQUARE, STRIDES = number(0), row(2, 2), row(2, 1)


def tensor(offset=ZERO, shape=SQUARE, strides=STRIDES, of=None):
    arguments = (storage() if of is None else of) + offset + shape + strides + b"\x89" + b"}"
    return b"\x80\x02" + REBUILD + b"(" + arguments + b"tR."


def doubling(levels):
    """[[[..], [..]], [[..], [..]]]: two to the power of `levels` leaves."""
    code = b"K\x01"
    for level in range(levels):
        code = code + b"q" + bytes([level]) + b"h" + bytes([level]) + b"\x86"
    return b"\x80\x02" + code + b"."


def programs(trap):
    """Name -> data.pkl: what somebody could put into a file of weights."""

    def call(function, *arguments):
        return pickle.dumps({"a": Call(function, *arguments)}, protocol=2)

    huge = number(1 << 60)
    return {
        "a command": call(__import__("os").system, f"touch {trap}"),
        "a process": call(__import__("subprocess").call, ["touch", trap]),
        "eval": call(eval, f"open({trap!r}, 'w')"),
        "open": call(open, trap, "w"),
        "getattr": call(getattr, "a", "upper"),
        "torch.load": b"\x80\x02ctorch\nload\n" + text(trap) + b"\x85R.",
        "import of a package": b"\x80\x02ctorch.utils.model_zoo\nload_url\n.",
        "a dotted name": b"\x80\x02ccollections\nOrderedDict.fromkeys\n.",
        "a type is handed out": b"\x80\x02ccollections\nOrderedDict\n.",
        "a storage is handed out": b"\x80\x02" + storage() + b".",
        "attributes of a function": b"\x80\x02" + REBUILD + b"}" + text("__code__") + b"Nsb.",
        "attributes of a type": b"\x80\x02ccollections\nOrderedDict\n}" + text("keys") + b"Nsb.",
        "attributes of a tensor": tensor()[:-1] + b"}b.",
        "slots": b"\x80\x02ccollections\nOrderedDict\n)RN}" + text("keys") + b"Ns\x86b.",
        "a call of a text": b"\x80\x02" + text("a") + b")R.",
        "a call of what is not for that": b"\x80\x02ctorch\nFloatStorage\n)R.",
        "OrderedDict with items": b"\x80\x02ccollections\nOrderedDict\n](K\x01K\x02eR.",
        "NEWOBJ": b"\x80\x02ccollections\nOrderedDict\n)\x81.",
        "INST": b"\x80\x02(ios\nsystem\n.",
        "OBJ": b"\x80\x02(ccollections\nOrderedDict\no.",
        "an extension": b"\x80\x02\x82\x01.",
        "a text reference": b"\x80\x02Pos\n.",
        "protocol 4": pickle.dumps({"a": 1}, protocol=4),
        "protocol 0": pickle.dumps({"a": 1}, protocol=0),
        "no end": b"\x80\x02}",
        "nothing": b"",
        "an empty stack": b"\x80\x02.",
        "a mark for a value": b"\x80\x02(.",
        "no mark": b"\x80\x02K\x01t.",
        "odd items": b"\x80\x02}(K\x01u.",
        "a list for a key": b"\x80\x02}]Ns.",
        "a number for a key": b"\x80\x02}K\x01Ns.",
        "append to a number": b"\x80\x02K\x01K\x02a.",
        "an unknown memory": b"\x80\x02h\x05.",
        "a far memory": b"\x80\x02Nr\xff\xff\xff\xffj\xff\xff\xff\xfe.",
        "a long text": b"\x80\x02X\xff\xff\xff\xff.",
        "a text of 2**62 bytes": b"\x80\x02\x8d" + struct.pack("<Q", 1 << 62) + b".",
        "a number of 2 GB": b"\x80\x02\x8b\xff\xff\xff\x7f.",
        "a text that is no text": b"\x80\x02X\x02\0\0\0\xed\xa0.",
        "a name without an end": b"\x80\x02c" + b"a" * 5000,
        "a name that is no text": b"\x80\x02c\xff\xfe\n\xff\n.",
        "a list in itself": b"\x80\x02]q\x00h\x00a.",
        "a dictionary in itself": b"\x80\x02}q\x00" + text("a") + b"h\x00s.",
        "doubled 28 times": doubling(28),
        "deep lists": b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".",
        "deep tuples": b"\x80\x02N" + b"\x85" * 100_000 + b".",
        "a tensor beyond its storage": tensor(shape=row(5), strides=row(1)),
        "a tensor from beyond": tensor(offset=number(1)),
        "a negative offset": tensor(offset=number(-1), shape=row(1), strides=row(1)),
        "negative strides": tensor(strides=row(-2, 1)),
        "a negative size": tensor(shape=row(-1, 2)),
        "a huge size": tensor(shape=b"(" + huge + b"t", strides=row(0)),
        "a repeated value": tensor(shape=row(1 << 30), strides=row(0)),
        "sizes whose product overflows": tensor(shape=row(1 << 33, 1 << 33), strides=row(0, 0)),
        "huge sizes around nothing": tensor(shape=row(1 << 39, 0, 1 << 39), strides=row(1, 1, 1)),
        "many dimensions": tensor(shape=row(*[1] * 100), strides=row(*[1] * 100)),
        "fewer strides": tensor(strides=row(1)),
        "truth for a size": tensor(shape=b"\x88\x88\x86"),
        "a text for a size": tensor(shape=text("ab")),
        "a float for an offset": tensor(offset=b"G" + struct.pack(">d", 0.0)),
        "a list for a storage": tensor(of=b"]"),
        "a tensor for a storage": tensor(of=tensor()[2:-1]),
        "too few arguments": b"\x80\x02" + REBUILD + b")R.",
        "a storage longer than its record": tensor(of=storage(elements=5)),
        "a negative storage": tensor(of=storage(elements=-1)),
        "a storage of nothing": tensor(of=storage(key="1")),
        "a storage outside": tensor(of=storage(key="../../data.pkl")),
        "an unknown storage": tensor(of=storage(kind="torch\nUntypedStorage")),
        "a dictionary for a storage": tensor(of=storage(kind="collections\nOrderedDict")),
        "a parameter of nothing": b"\x80\x02ctorch._utils\n_rebuild_parameter\n(NN}tR.",
        "many tensors of one": b"\x80\x02" + tensor()[2:-1] + b"q\x00](" + b"h\x00" * 60_000 + b"e.",
    }


@pytest.mark.parametrize("name", programs("x"))
def test_a_hostile_pickle_is_one_line_and_runs_nothing(tmp_path, written, name):
    path = tmp_path / "weights.bin"
    path.write_bytes(with_program(programs(str(written))[name]))
    refused(path)
    assert not written.exists()


def test_the_parts_that_hostile_pickles_are_made_of_are_read(tmp_path):
    path = tmp_path / "weights.bin"
    for code in (tensor(), tensor(number(1), row(3), row(1)), tensor(shape=row(0, 7))):
        path.write_bytes(with_program(code))
        assert isinstance(load_tensors(path), torch.Tensor)
    path.write_bytes(with_program(doubling(5)))
    assert load_tensors(path)[0][1][0][1][1] == 1


ARCHIVES = {
    "empty": lambda data: b"",
    "text": lambda data: b"weights" * 99,
    "cut": lambda data: data[:-40],
    "cut in front": lambda data: data[40:],
    "one bit of a tensor": lambda data: data.replace(bytes(range(16)), bytes(range(15)) + b"\x1f", 1),
    "a record twice": lambda data: with_records(data, [("archive/data/0", b"other bytes")]),
    "two programs": lambda data: with_records(data, [("other/data.pkl", b"\x80\x02}.")]),
    "no program": lambda data: rebuilt(data, lambda name: name.replace("data.pkl", "data.txt")),
    "deeper": lambda data: rebuilt(data, lambda name: "a/" + name),
    "big-endian": lambda data: with_records(data, [("archive/byteorder", b"big")]),
    "a code record": lambda data: with_records(data, [("archive/constants.pkl", b"\x80\x02).")]),
    "encrypted": lambda data: flagged(data),
}


def with_records(data, more):
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # duplicate names
        return rebuilt(data, more=more)


def flagged(data):
    """Each entry of the table of contents says that its record is encrypted."""
    parts = data.split(b"PK\x01\x02")
    return b"PK\x01\x02".join([parts[0]] + [part[:4] + b"\x01\x00" + part[6:] for part in parts[1:]])


@pytest.mark.parametrize("name", ARCHIVES)
def test_another_archive_is_one_line(tmp_path, name):
    data = with_program(tensor())
    path = tmp_path / "weights.bin"
    path.write_bytes(data)
    assert load_tensors(path).tolist() is not None
    path.write_bytes(ARCHIVES[name](data))
    refused(path)


def test_a_compressed_record_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "weights.bin", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}." + b"\0" * 10_000_000)
    assert "compressed" in refused(tmp_path / "weights.bin")


def test_a_table_of_contents_without_end_is_refused_unread(tmp_path, monkeypatch):
    data = with_records(with_program(tensor()), [(f"archive/data/{number}", b"") for number in range(1, 99)])
    (tmp_path / "weights.bin").write_bytes(data)
    assert load_tensors(tmp_path / "weights.bin").shape == (2, 2)
    monkeypatch.setattr(torch_files, "MOST_RECORDS", 99)
    monkeypatch.setattr(zipfile, "ZipFile", lambda *_: pytest.fail("read"))
    assert "more than 99 records" in refused(tmp_path / "weights.bin")


def test_any_flipped_byte_is_one_line_or_harmless(tmp_path):
    """The checksums of an archive do not cover its table of contents."""
    torch.save({"a": torch.arange(6.0), "b": [1, "c"]}, tmp_path / "a.pt")
    data, path = (tmp_path / "a.pt").read_bytes(), tmp_path / "b.pt"
    seen = 0
    for place in range(0, len(data), 7):
        changed = bytearray(data)
        changed[place] ^= 1 << (place % 8)
        path.write_bytes(bytes(changed))
        try:
            found = load_tensors(path)
        except ValueError as error:
            assert "\n" not in str(error)
            seen += 1
        else:
            assert found["b"] == [1, "c"] and torch.equal(found["a"], torch.arange(6.0))
    assert seen > 20


def test_old_forms_are_refused(tmp_path):
    with tarfile.open(tmp_path / "weights.bin", "w") as tar:
        for name in ("storages", "tensors", "pickle"):
            tar.addfile(tarfile.TarInfo(name))
    refused(tmp_path / "weights.bin")
    torch.save({"a": torch.ones(1)}, tmp_path / "weights.bin", _use_new_zipfile_serialization=False)
    assert "from before torch 1.6" in refused(tmp_path / "weights.bin")


# -- where such files come in ------------------------------------------------------------------------------------------


def test_a_hugging_face_folder_runs_no_code(tmp_path, archive, written, capsys):
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "bert"}')
    (folder / "pytorch_model.bin").write_bytes(archive)
    assert run_main(export.main, ["--import", str(folder), str(tmp_path / "run")]) == 2
    message = capsys.readouterr().err
    assert "TorchScript" in message and message.count("\n") == 1
    assert not written.exists() and not (tmp_path / "run").exists()


def test_nothing_unpickles_a_file():
    root, files = Path(__file__).resolve().parents[2], 0
    for package in ("ipu_packed_bert", "pack_data", "profiling"):
        for path in (root / package).rglob("*.py"):
            text, files = path.read_text(encoding="utf-8"), files + 1
            words = ["torch.load(", "jit.load", "import pickle", "Unpickler"]
            if path.name == "processes.py":  # what the processes of one run tell each other is in no file
                words = words[:2]
            assert not any(word in text for word in words), path
    assert files > 100
