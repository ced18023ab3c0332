import json

import pytest
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from smp_strategy.checkpoint.convert.contents import LazyTensor
from smp_strategy.checkpoint.convert.safetensors import INDEX, open_safetensors, shards, write_safetensors
from smp_strategy.errors import CheckpointError


@pytest.fixture
def tensors():
    return {
        "a.weight": torch.randn(4, 3),
        "b.weight": torch.randn(3, 4).t(),
        "c": torch.arange(5),
        "d": torch.randn(2, dtype=torch.bfloat16),
        "e": torch.tensor(True),
        "f": torch.empty(0, 3),
    }


def lazy(tensors):
    return {name: LazyTensor.of(tensor) for name, tensor in tensors.items()}


def test_the_picture_of_files_is_right():
    assert shards({"a": 4, "b": 2, "c": 2, "d": 9, "e": 1}, 5) == [["a"], ["b", "c"], ["d"], ["e"]]


@given(st.lists(st.integers(1, 12), max_size=12), st.integers(1, 10))
def test_files_are_full_and_none_is_too_full(sizes, most):
    named = {str(number): size for number, size in enumerate(sizes)}
    found = shards(named, most)
    assert [name for part in found for name in part] == list(named)
    totals = [sum(named[name] for name in part) for part in found]
    assert all(total <= most or len(part) == 1 for total, part in zip(totals, found, strict=True))
    assert all(min(total, most) + named[part[0]] > most for total, part in zip(totals, found[1:], strict=False))


@pytest.mark.parametrize("most", [10**9, 50, 1])
def test_what_is_written_is_read_by_the_library_and_by_us(tensors, most, tmp_path):
    files = write_safetensors(tmp_path, lazy(tensors), max_bytes=most)
    assert sorted(files) == sorted(tmp_path.iterdir())
    loaded = {}
    for file in tmp_path.glob("*.safetensors"):
        loaded |= load_file(file)
    found = open_safetensors(tmp_path)
    for name, tensor in tensors.items():
        assert loaded[name].equal(tensor)
        assert found.weights[name].read().equal(tensor)
        assert (found.weights[name].shape, found.weights[name].dtype) == (tuple(tensor.shape), tensor.dtype)
    assert loaded.keys() == found.weights.keys() == tensors.keys()


def test_names_and_index_are_those_of_hugging_face(tensors, tmp_path):
    del tensors["e"], tensors["f"]
    write_safetensors(tmp_path, lazy(tensors), max_bytes=50)
    index = json.loads((tmp_path / INDEX).read_text())
    theirs = split_torch_state_dict_into_shards(tensors, max_shard_size=50)
    assert index["metadata"]["total_size"] == theirs.metadata["total_size"]
    assert index["weight_map"] == theirs.tensor_to_filename


def test_one_file_is_enough(tensors, tmp_path):
    save_file({"x": tensors["a.weight"]}, tmp_path / "weights.safetensors")
    assert open_safetensors(tmp_path / "weights.safetensors").weights["x"].read().equal(tensors["a.weight"])


def test_damaged_files_are_refused(tensors, tmp_path):
    write_safetensors(tmp_path, lazy(tensors), max_bytes=50)
    first, second, *_ = sorted(tmp_path.glob("*.safetensors"))
    first.write_bytes(first.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="model-00001.*damaged"):
        open_safetensors(tmp_path)
    first.unlink()
    with pytest.raises(CheckpointError, match="model-00001"):
        open_safetensors(tmp_path)
    index = json.loads((tmp_path / INDEX).read_text())
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"x": "../other.safetensors"}}))
    with pytest.raises(CheckpointError, match="outside of the directory"):
        open_safetensors(tmp_path)
    for text in ["{", "[]", '{"weight_map": 3}', '{"weight_map": {"x": 3}}']:
        (tmp_path / INDEX).write_text(text)
        with pytest.raises(CheckpointError, match="no index"):
            open_safetensors(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"nowhere": second.name}}))
    with pytest.raises(CheckpointError, match="nowhere"):
        open_safetensors(tmp_path)
    assert index


def test_several_sets_of_weights_are_not_guessed_from(tensors, tmp_path):
    for name in ("one", "two"):
        save_file({"x": tensors["a.weight"]}, tmp_path / f"{name}.safetensors")
    with pytest.raises(CheckpointError, match="one.safetensors, two.safetensors. Give one"):
        open_safetensors(tmp_path)
