"""Metadata of PyTorch's distributed checkpoints: read without running anything, hostile or not."""

import os
import pickle
from pathlib import Path, PosixPath

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from smp_strategy.checkpoint.storage.dcp_metadata import Chunk, DirectoryContents, ItemLocation, from_bytes, to_bytes
from smp_strategy.checkpoint.storage.write_plan import LocalTensorInfo
from smp_strategy.errors import CheckpointError
from smp_strategy.model.shard_layout import Rectangle

CONTENTS = DirectoryContents(
    tensors={
        "a.w": (
            LocalTensorInfo((4, 2), torch.bfloat16),
            (
                Chunk(Rectangle((0, 0), (3, 2)), ItemLocation("__0_0.distcp", 0, 500)),
                Chunk(Rectangle((3, 0), (1, 2)), ItemLocation("__1_0.distcp", 7, 500)),
            ),
        ),
        "a.s": (LocalTensorInfo((), torch.int64), (Chunk(Rectangle((), ()), ItemLocation("__0_0.distcp", 500, 8)),)),
    },
    objects={"b.0.c": ItemLocation("__0_0.distcp", 508, 9)},
    paths={"a.w": ("a", "w"), "a.s": ("a", "s"), "b.0.c": ("b", 0, "c")},
    has_manifest=True,
)


def test_contents_are_read_as_they_were_written():
    assert from_bytes(to_bytes(CONTENTS)) == CONTENTS
    theirs = pickle.loads(to_bytes(CONTENTS))
    assert theirs.state_dict_metadata["a.w"].size == torch.Size([4, 2])
    assert theirs.storage_data[MetadataIndex("a.w", [3, 0])].relative_path == "__1_0.distcp"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_torch_writes_is_read(tmp_path):
    state = {"a": {"w": torch.ones(4, 2, dtype=torch.float16).to(memory_format=torch.contiguous_format), "n": 3}}
    state |= {"l": [torch.zeros(()), {"x": "y"}], "c": torch.ones(1, 2, 3, 4).to(memory_format=torch.channels_last)}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    found = from_bytes((tmp_path / ".metadata").read_bytes())
    assert set(found.tensors) == {"a.w", "l.0", "c"}
    assert set(found.objects) == {"a.n", "l.1.x"}
    assert found.paths["l.1.x"] == ("l", 1, "x")
    assert not found.has_manifest


class Bomb:
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def metadata(**changes):
    properties = TensorProperties(dtype=torch.float32)
    chunk = ChunkStorageMetadata(torch.Size([0]), torch.Size([3]))
    fields = {
        "state_dict_metadata": {"w": TensorStorageMetadata(properties, torch.Size([3]), [chunk])},
        "storage_data": {MetadataIndex("w", [0]): _StorageInfo("f", 0, 100)},
    }
    return Metadata(**(fields | changes))


def stored_as(*place, **more):
    return {"storage_data": {MetadataIndex("w", [0]): _StorageInfo(*place, **more)}}


def of_shape(shape, offsets, sizes, dtype=torch.float32):
    chunk = ChunkStorageMetadata(offsets, sizes)
    return {"state_dict_metadata": {"w": TensorStorageMetadata(TensorProperties(dtype=dtype), shape, [chunk])}}


def test_plain_metadata_is_read():
    found = from_bytes(pickle.dumps(metadata(storage_meta=StorageMeta(checkpoint_id=Path("/a"), modules=["b"]))))
    assert found.tensors["w"][0] == LocalTensorInfo((3,), torch.float32)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("where", ["planner_data", "version", "storage_meta", "storage_data"])
def test_nothing_is_executed(tmp_path, where, protocol):
    bomb = Bomb(tmp_path / "made")
    with pytest.raises(CheckpointError, match="may run code"):
        from_bytes(pickle.dumps(metadata(**{where: {"x": bomb}}), protocol=protocol))
    assert not (tmp_path / "made").exists()


class Getter:
    def __reduce__(self):
        return getattr, (torch.Size, "count")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (stored_as("../f", 0, 100), "not a file in the directory"),
        (stored_as("/etc/passwd", 0, 100), "not a file in the directory"),
        (stored_as(PosixPath("f"), 0, 100), "not a file in the directory"),
        (stored_as("f", -1, 100), "sizes"),
        (stored_as("f", 0, 1.5), "sizes"),
        (stored_as("f", 0, 11), "in 11 bytes"),
        (stored_as("f", 0, 100, transform_descriptors=["zstd"]), "another form"),
        ({"storage_data": {MetadataIndex("w", [0]): BytesStorageMetadata()}}, "stored as a BytesStorageMetadata"),
        ({"storage_data": {}}, "KeyError"),
        ({"storage_data": None}, "KeyError"),
        ({"storage_data": 3}, "AttributeError"),
        ({"state_dict_metadata": {"w": 3}}, "`w` is a int"),
        ({"state_dict_metadata": {3: BytesStorageMetadata()}}, "the name 3"),
        ({"state_dict_metadata": None}, "AttributeError"),
        (of_shape(torch.Size([3]), torch.Size([1]), torch.Size([3])), "has a part at"),
        (of_shape(torch.Size([3]), torch.Size([0, 0]), torch.Size([3])), "has a part at"),
        (of_shape((3,), (0,), (True,)), "sizes"),
        (of_shape(("3",), (0,), (3,)), "sizes"),
        (of_shape((3,), (0,), (3,), dtype="float32"), "dtype"),
        ({"planner_data": Getter()}, "getattr"),
    ],
)
def test_what_cannot_be_is_refused(changes, message):
    with pytest.raises(CheckpointError, match=message):
        from_bytes(pickle.dumps(metadata(**changes)))


@pytest.mark.parametrize(
    "data", [b"", b"nothing", pickle.dumps({"a": 1}), pickle.dumps(metadata())[:-20], b"\x80\x04Q."]
)
def test_what_is_no_metadata_is_refused(data):
    with pytest.raises(CheckpointError, match=r"\.metadata"):
        from_bytes(data)
