"""Files of others in a folder: any changed byte of them is found, and named."""

import random

import pytest
import torch
from safetensors.torch import save_file

from smp_strategy.checkpoint.storage.manifest import FILE_NAME, Manifest
from smp_strategy.checkpoint.storage.verified_reads import describe, verify
from smp_strategy.errors import CheckpointError


@pytest.fixture
def folder(tmp_path):
    tensors = {name: torch.randn(size) for name, size in (("first", 50), ("second", 70), ("empty", 0), ("third", 3))}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    torch.save({"lr": [0.1]}, tmp_path / "scheduler.bin")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "inner").mkdir()
    describe(tmp_path, {"step": 3})
    return tmp_path


def test_what_is_unchanged_is_verified(folder):
    verify(folder)
    found = Manifest.from_bytes((folder / FILE_NAME).read_bytes())
    assert found.note == {"step": 3}
    assert sorted(found.files) == ["empty.txt", "model.safetensors", "scheduler.bin"]
    assert {"first", "second", "third"} <= {region.name for region in found.files["model.safetensors"]}
    (folder / "mine.txt").write_text("of the user")
    (folder / "scheduler.bin").unlink()
    verify(folder)


def test_every_flipped_bit_is_found(folder):
    draw = random.Random(0)
    for _ in range(200):
        path = folder / draw.choice(["model.safetensors", "scheduler.bin", FILE_NAME])
        data = bytearray(before := path.read_bytes())
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match="damaged"):
            verify(folder)
        path.write_bytes(before)
    verify(folder)


def test_the_tensor_is_named(folder):
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    last = Manifest.from_bytes((folder / FILE_NAME).read_bytes()).files[path.name][-1].name
    with pytest.raises(CheckpointError, match=rf"model.safetensors is damaged: `{last}`.*delete .*{FILE_NAME}"):
        verify(folder)
    verify(folder, ["scheduler.bin"])
    path.write_bytes(data[:-1])
    with pytest.raises(CheckpointError, match="when it was written"):
        verify(folder)


def test_a_folder_without_a_manifest_is_read_as_it_is(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"anything")
    verify(tmp_path)
    for content in (b"", b"\xff" * 20, b"\x02" + b"\0" * 7 + b"[]", b"\x02" + b"\0" * 7 + b"{]"):
        (tmp_path / "model.safetensors").write_bytes(content)
        describe(tmp_path, {})
        verify(tmp_path)
