"""Files of tensors: every type comes back bit for bit, and nothing in a file is run, whatever is in it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from ipu_packed_bert.commands import export
from ipu_packed_bert.run_files.safetensors_files import file_pieces, read_tensors, tensor_bytes
from pack_data.cli.command import run_main
from tests.imports import SOURCES

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
NAMES = "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool float8_e4m3fn float8_e5m2"
TYPES = [getattr(torch, name) for name in NAMES.split() if hasattr(torch, name)]


def file_of(path, tensors):
    path.write_bytes(b"".join(file_pieces(tensors)))
    return path


def bits(tensor):
    return tensor.dtype, tuple(tensor.shape), tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def of_type(dtype, shape, seed):
    random = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=random).bool()
    # Any bits, those of values that are no numbers included.
    width = torch.empty(0, dtype=dtype).element_size()
    tensor = torch.randint(
        0,
        256,
        (*shape, width),
        generator=random,
        dtype=torch.uint8,
    )
    return tensor.reshape(-1).view(dtype).reshape(shape)


@settings(deadline=None)
@given(
    made=st.dictionaries(
        st.text(max_size=5).filter(lambda name: name != "__metadata__"),
        st.tuples(
            st.sampled_from(TYPES),
            st.lists(st.integers(0, 3), max_size=3),
            st.integers(0, 99),
        ),
        max_size=6,
    )
)
def test_every_tensor_comes_back_bit_for_bit(tmp_path_factory, made):
    tensors = {name: of_type(dtype, tuple(shape), seed) for name, (dtype, shape, seed) in made.items()}
    path = file_of(tmp_path_factory.mktemp("tensors") / "a.safetensors", tensors)
    actual = read_tensors(path)
    assert {name: bits(tensor) for name, tensor in actual.items()} == {n: bits(t) for n, t in tensors.items()}
    assert 0 <= path.stat().st_size - tensor_bytes(tensors) <= 200 + 200 * len(tensors)


def test_layouts_and_shared_memory_are_of_no_account(tmp_path):
    base = torch.arange(12.0).reshape(3, 4)
    tensors = {
        "turned": base.t(),
        "part": base[1:, ::2],
        "again": base,
        "tied": base,
        "wide": base[:1].expand(5, 4),
    }
    tensors["parameter"] = torch.nn.Parameter(base)
    actual = read_tensors(file_of(tmp_path / "a.safetensors", tensors))
    assert {name: bits(tensor) for name, tensor in actual.items()} == {n: bits(t.detach()) for n, t in tensors.items()}


def test_files_are_those_of_the_package_and_tensors_are_not_copied():
    tensors = {name: torch.rand(3, 5) for name in ("b", "a/ä", "c")}
    pieces = list(file_pieces(tensors))
    assert b"".join(pieces) == save(tensors)
    tensors["c"].zero_()
    assert bytes(pieces[-1]) == bytes(60)


def test_what_was_read_does_not_hang_on_the_file(tmp_path):
    path = file_of(tmp_path / "a.safetensors", {"a": torch.ones(1000)})
    actual = read_tensors(path)["a"]
    path.write_bytes(b"\0" * path.stat().st_size)
    assert torch.equal(actual, torch.ones(1000))


# -- files that would run code -----------------------------------------------------------------------------------------


def test_nothing_unpickles_a_file():
    unpickling = ("import pickle", "Unpickler")
    faults = []
    for path in SOURCES:
        text = path.read_text(encoding="utf-8")
        # What the processes of one run tell each other is in no file.
        words = ("torch.load(", "jit.load", *(() if path.name == "ranks.py" else unpickling))
        faults += [f"{path}: {word}" for word in words if word in text]
    assert not faults and len(SOURCES) > 100, "\n".join(faults)


@pytest.fixture
def archive(tmp_path, written):
    """The bytes of a TorchScript archive; loading it writes a file."""
    torch.jit.save(torch.jit.script(Trap(str(written))), str(tmp_path / "trap.pt"))
    torch.jit.load(str(tmp_path / "trap.pt"))
    assert written.exists()  # the trap works
    written.unlink()
    return (tmp_path / "trap.pt").read_bytes()


@pytest.fixture
def written(tmp_path):
    return tmp_path / "written"


class Trap(torch.nn.Module):
    """A module whose loading writes a file."""

    def __init__(self, path):
        super().__init__()
        self.path = path

    @torch.jit.export
    def __getstate__(self):
        return self.path, self.training

    @torch.jit.export
    def __setstate__(self, state):
        self.path = state[0]
        self.training = state[1]
        torch.ops.aten.save(torch.zeros(1), self.path)

    def forward(self, x):
        return x


def test_a_hugging_face_folder_runs_no_code(tmp_path, archive, written, capsys):
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "bert"}')
    (folder / "pytorch_model.bin").write_bytes(archive)
    assert run_main(export.main, ["--import", str(folder), str(tmp_path / "run")]) == 2
    message = capsys.readouterr().err
    assert "pytorch_model.bin" in message
    assert message.count("\n") == 1
    assert not written.exists()
    assert not (tmp_path / "run").exists()
