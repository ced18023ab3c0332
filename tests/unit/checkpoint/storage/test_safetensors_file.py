"""A safetensors file that is written in pieces is the one that the library writes at once."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from smp_strategy.checkpoint.storage.weight_file import SafetensorsFile, header_of
from smp_strategy.checkpoint.storage.write_plan import LocalTensorInfo
from smp_strategy.errors import UnsupportedError

DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.float8_e5m2, torch.float8_e4m3fn, torch.int16, torch.uint16),
    *(torch.float16, torch.bfloat16, torch.int32, torch.uint32, torch.float32, torch.complex64, torch.float64),
    *(torch.int64, torch.uint64),
)
SHAPES = st.lists(st.integers(0, 3), max_size=3).map(tuple)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=6).filter(lambda name: name != "__metadata__")


def values(shape, dtype):
    bits = torch.arange(math.prod(shape) * dtype.itemsize, dtype=torch.int64).remainder(
        2 if dtype == torch.bool else 97
    )
    return bits.to(torch.uint8).view(dtype).reshape(shape)


@settings(deadline=None)
@given(
    st.dictionaries(NAMES, st.tuples(SHAPES, st.sampled_from(DTYPES)), max_size=8),
    st.sampled_from([None, {"format": "pt"}, {'a"': "é"}]),
    st.randoms(use_true_random=False),
)
def test_a_file_is_that_of_the_library_in_whatever_order_tensors_come(tmp_path_factory, described, metadata, random):
    tensors = {name: values(shape, dtype) for name, (shape, dtype) in described.items()}
    path = tmp_path_factory.mktemp("files") / "model.safetensors"
    order = random.sample(list(tensors), len(tensors))  # drawn while no file is open
    infos = {name: LocalTensorInfo(*each) for name, each in described.items()}
    file = SafetensorsFile(path, infos, metadata)
    for name in order:
        file.write(name, tensors[name])
    file.close()
    assert path.read_bytes() == save(tensors, metadata=metadata)


def test_a_tensor_that_is_a_view_is_written_as_it_is_seen(tmp_path):
    value = torch.arange(12.0).reshape(3, 4).t()
    file = SafetensorsFile(tmp_path / "x", {"a": LocalTensorInfo((4, 3), torch.float32)})
    file.write("a", value)
    file.close()
    assert (tmp_path / "x").read_bytes() == save({"a": value.contiguous()})


def test_the_memory_of_a_tensor_may_be_resized_afterwards(tmp_path):
    value = torch.ones(3)
    file = SafetensorsFile(tmp_path / "x", {"a": LocalTensorInfo((3,), torch.float32)})
    file.write("a", value)
    file.close()
    value.untyped_storage().resize_(0)  # which sharded data parallelism does


def test_what_the_format_does_not_have_is_refused_by_name():
    with pytest.raises(UnsupportedError, match="`a` has the dtype torch.complex128"):
        header_of({"a": LocalTensorInfo((1,), torch.complex128)}, None)
