"""Runs of elements are read by their places in a file of weights."""

import pytest
import torch
from safetensors.torch import save_file

from smp_strategy.checkpoint.storage.weight_file import FileRuns
from smp_strategy.errors import CheckpointError

TENSORS = {
    "a": torch.arange(60.0).view(6, 10),
    "half": torch.randn(7, 3).bfloat16(),
    "flags": torch.tensor([True, False, True]),
    "number": torch.tensor(3),
    "none": torch.empty(0, 4),
}


def assert_read(runs, places):
    for name, place in places.items():
        tensor = TENSORS[name]
        for start, stop in ((0, tensor.numel()), (tensor.numel() // 3, tensor.numel() // 2)):
            found = runs.read(place, tensor.dtype, start, stop)
            assert found.dtype == tensor.dtype
            assert torch.equal(found, tensor.reshape(-1)[start:stop])


def test_runs_of_a_safetensors_file(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    runs = FileRuns(tmp_path / "model.safetensors")
    places = runs.safetensors()
    assert {name: size for name, (_, size) in places.items()} == {name: each.nbytes for name, each in TENSORS.items()}
    assert_read(runs, {name: place for name, (place, _) in places.items()})


def test_runs_of_a_mapped_file(tmp_path):
    path, link = tmp_path / "of a blob.bin", tmp_path / "pytorch_model.bin"
    torch.save(TENSORS, path)
    link.symlink_to(path)
    mapped = torch.load(link, mmap=True)
    runs = FileRuns(link)
    places = {name: runs.mapped(tensor) for name, tensor in mapped.items() if tensor.numel()}
    assert_read(runs, places)
    assert runs.mapped(torch.ones(3)) is None


def test_a_file_that_has_become_shorter_is_an_error(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    runs = FileRuns(path)
    place, _ = runs.safetensors()["a"]
    path.write_bytes(path.read_bytes()[: place + 8])
    with pytest.raises(CheckpointError, match="should have more"):
        runs.read(place, torch.float32, 0, 60)
