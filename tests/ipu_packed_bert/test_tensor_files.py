"""safetensors files: every type of the format comes back bit for bit, and the package reads what is written here."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ipu_packed_bert import tensor_files
from ipu_packed_bert.tensor_files import chunks, read_tensors, tensor_bytes

TYPES = sorted(tensor_files._TYPES, key=str)


def written(path, tensors):
    path.write_bytes(b"".join(chunks(tensors)))
    return path


def bits(tensor):
    return tensor.dtype, tuple(tensor.shape), tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def of_type(dtype, shape, seed):
    random = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=random).bool()
    # Any bits, those of values that are no numbers included.
    width = torch.empty(0, dtype=dtype).element_size()
    tensor = torch.randint(0, 256, (*shape, width), generator=random, dtype=torch.uint8)
    return tensor.reshape(-1).view(dtype).reshape(shape)


@settings(max_examples=60, deadline=None)
@given(
    made=st.dictionaries(
        st.text(max_size=5).filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from(TYPES), st.lists(st.integers(0, 3), max_size=3), st.integers(0, 99)),
        max_size=6,
    )
)
def test_every_tensor_comes_back_bit_for_bit(tmp_path_factory, made):
    tensors = {name: of_type(dtype, tuple(shape), seed) for name, (dtype, shape, seed) in made.items()}
    path = written(tmp_path_factory.mktemp("tensors") / "a.safetensors", tensors)
    found = read_tensors(path)
    assert {name: bits(tensor) for name, tensor in found.items()} == {n: bits(t) for n, t in tensors.items()}
    assert 0 <= path.stat().st_size - tensor_bytes(tensors) <= 200 + 200 * len(tensors)


def test_layouts_and_shared_memory_are_of_no_account(tmp_path):
    base = torch.arange(12.0).reshape(3, 4)
    tensors = {"turned": base.t(), "part": base[1:, ::2], "again": base, "tied": base, "wide": base[:1].expand(5, 4)}
    tensors["parameter"] = torch.nn.Parameter(base)
    found = read_tensors(written(tmp_path / "a.safetensors", tensors))
    assert {name: bits(tensor) for name, tensor in found.items()} == {n: bits(t.detach()) for n, t in tensors.items()}


def test_what_was_read_does_not_hang_on_the_file(tmp_path):
    path = written(tmp_path / "a.safetensors", {"a": torch.ones(1000)})
    found = read_tensors(path)["a"]
    path.write_bytes(b"\0" * path.stat().st_size)
    assert torch.equal(found, torch.ones(1000))


def test_a_type_that_the_format_lacks_is_refused():
    for tensor in (torch.zeros(2, dtype=torch.complex128), torch.zeros(2, 2).to_sparse()):
        with pytest.raises(ValueError, match="no such tensor"):
            list(chunks({"a": tensor}))


@pytest.mark.parametrize("data", [b"", b"12345678", b"\xff" * 64, b"\x02" + b"\0" * 7 + b"{}more"])
def test_other_bytes_are_one_line(tmp_path, data):
    (tmp_path / "a.safetensors").write_bytes(data)
    with pytest.raises(ValueError) as refused:
        read_tensors(tmp_path / "a.safetensors")
    assert "a.safetensors: cannot be read" in str(refused.value) and "\n" not in str(refused.value)
