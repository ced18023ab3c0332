"""A disk without room: one sentence with the path, what was there before is still there, and nothing else is."""

import resource
from contextlib import contextmanager

import pytest
import torch

from smp_strategy.checkpoint.convert.contents import CheckpointContents, LazyTensor
from smp_strategy.checkpoint.convert.writers import export_safetensors, save_full, save_sharded
from smp_strategy.checkpoint.storage.async_save import BackgroundSave
from smp_strategy.checkpoint.storage.atomic_commit import saving
from smp_strategy.checkpoint.storage.full_file import read_full, write_full
from smp_strategy.checkpoint.storage.reader import CheckpointReader
from smp_strategy.checkpoint.storage.writer import ShardedWriter
from smp_strategy.engine.saving.saved_models import state_folders as folders
from smp_strategy.errors import CheckpointError

MOST = 100_000  # bytes
LARGE = torch.zeros(MOST)


@contextmanager
def little_room():
    """No file may have more; the system says so as it says that a disk is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MOST, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def sharded(path, weights, rest=""):
    ShardedWriter().prepare({"state_dict": {"w": weights}}).write(path, rest={"n": rest})


def safetensors(path, weights):
    export_safetensors({"w": LazyTensor.of(weights)}, path, max_bytes=10**9)


def read_from_elsewhere(weights):
    """A tensor that has to go to the disk before it is written."""
    return CheckpointContents(kind="", weights={"w": LazyTensor(tuple(weights.shape), weights.dtype, lambda: weights)})


WRITERS = {
    "file": lambda path, weights: write_full(path, {"w": weights}),
    "file, much beside tensors": lambda path, weights: write_full(path, {"w": "x" * weights.nbytes}),
    "folder": sharded,
    "folder, much beside tensors": lambda path, weights: sharded(path, torch.ones(1), "x" * weights.nbytes),
    "safetensors": safetensors,
    "made a file": lambda path, weights: save_full(read_from_elsewhere(weights), path),
    "made a folder": lambda path, weights: save_sharded(read_from_elsewhere(weights), path),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_what_was_there_stays_and_nothing_else_is_left(tmp_path, writer):
    path = tmp_path / "x.ckpt"
    WRITERS[writer](path, torch.ones(3))
    before = {each: each.read_bytes() for each in tmp_path.rglob("*") if each.is_file()}
    with little_room(), pytest.raises(CheckpointError) as raised:
        WRITERS[writer](path, LARGE)
    said = str(raised.value)
    assert said.startswith(f"{path} was not saved")
    assert "larger than the system allows" in said
    assert "heckpoints that were there before are untouched" in said
    assert {each: each.read_bytes() for each in tmp_path.rglob("*") if each.is_file()} == before
    WRITERS[writer](path, torch.ones(4))  # as soon as there is room


def test_in_the_background_it_is_told_where_the_run_comes_by_next(tmp_path):
    background, path = BackgroundSave(), tmp_path / "x.ckpt"
    with little_room():
        background.start(lambda: write_full(path, {"w": LARGE}), str(path))
        with pytest.raises(CheckpointError) as raised:
            background.wait()
    assert str(raised.value).count("was not saved") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_files_of_others_is_written_as_a_whole_or_not(tmp_path):
    target = tmp_path / "state"
    staging = folders.begin(target)
    with little_room(), pytest.raises(CheckpointError, match=f"{target} was not saved"), saving(target):
        torch.save({"w": LARGE}, staging / "optimizer.bin")
    folders.remove(staging)
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_error_of_the_disk_stays_what_it_is(tmp_path):
    for error in (FileNotFoundError(2, "gone"), RuntimeError("of a hook"), KeyError("x")):
        with pytest.raises(type(error)), saving(tmp_path / "x"):
            raise error


def test_what_was_written_before_can_be_read(tmp_path):
    write_full(tmp_path / "a.ckpt", {"w": torch.ones(2)})
    sharded(tmp_path / "b.ckpt", torch.ones(2))
    with little_room():
        for name, write in (("a", WRITERS["file"]), ("b", sharded)):
            with pytest.raises(CheckpointError):
                write(tmp_path / f"{name}.ckpt", LARGE)
    assert read_full(tmp_path / "a.ckpt")["w"].equal(torch.ones(2))
    assert CheckpointReader.open(tmp_path / "b.ckpt").read("state_dict.w").equal(torch.ones(2))
