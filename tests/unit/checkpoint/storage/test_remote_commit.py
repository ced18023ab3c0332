import os
import sys
from itertools import count

import pytest
import torch
import torch.distributed.checkpoint as dcp
from fsspec.implementations.memory import MemoryFileSystem
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

from smp_strategy.checkpoint.storage import atomic_commit as commits
from smp_strategy.checkpoint.storage import remote_commit
from smp_strategy.checkpoint.storage.full_file import write_full
from smp_strategy.checkpoint.storage.reader import CheckpointReader, is_sharded
from smp_strategy.checkpoint.storage.remote_path import RemotePath, any_path
from smp_strategy.checkpoint.storage.verify import problems_of
from smp_strategy.checkpoint.storage.writer import ShardedWriter
from smp_strategy.cli import main
from smp_strategy.errors import CheckpointError

OTHER_MACHINE = "00000000-1-1-1"
DEAD = remote_commit.mark().replace(f"-{os.getpid()}-", "-4194305-") + "-1"  # no process has such a number


@pytest.fixture
def folder(tmp_path):
    """Files as a file system of fsspec that is not this machine's: other processes see them, too."""
    return any_path(f"local://{tmp_path}/folder")


@pytest.fixture
def memory():
    yield any_path("memory://run")
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def write(target, number):
    state = {"state_dict": {"a": torch.full((40, 7), float(number)), "b": torch.arange(3)}}
    ShardedWriter().prepare(state, copy=False).write(target, rest={"number": number}, note={"global_step": number})


def read(target):
    found = CheckpointReader.open(target)
    number = found.rest()["number"]
    assert found.read("state_dict.a").eq(number).all()
    assert not problems_of(target)
    return number


def saves(folder):
    return {each.parent for each in (folder / remote_commit.FOLDER).rglob("*")}


NEVER = -1
CHANGES = ("open", "put", "unlink", "delete_all")


def killed(work, at):
    """Do ``work`` in a process that ends before its change number ``at``; whether it did."""
    if not (child := os.fork()):
        number = count()
        for name in CHANGES:
            setattr(RemotePath, name, _counted(name, getattr(RemotePath, name), number, at))
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 9)
    return status == 9


def _counted(name, change, number, at):
    def wrapper(self, *args):
        if (name != "open" or args == ("wb",)) and next(number) == at:
            os._exit(9)
        return change(self, *args)

    return wrapper


def test_a_kill_at_any_time_leaves_the_old_checkpoint_or_the_new_one_and_the_next_save_deletes_the_rest(folder):
    target, found = folder / "x.ckpt", []
    write(folder / "other.ckpt", 0)
    for at in count():
        assert not killed(lambda: write(target, 1), NEVER)
        is_killed = killed(lambda: write(target, 2), at)
        found.append(read(target))
        write(folder / "third.ckpt", 3)
        assert len(saves(folder)) == 3
        assert read(folder / "other.ckpt") == 0
        assert read(target) == found[-1]
        if not is_killed:
            break
    # Four files and the commit object, and then the old folder.
    assert found == [1] * 5 + [2] * 2


def test_a_kill_while_the_first_one_is_written_leaves_none(folder):
    target = folder / "x.ckpt"
    for at in range(5):
        assert killed(lambda: write(target, 1), at)
        assert not target.exists()
        assert not is_sharded(target)
    write(target, 2)
    assert len(saves(folder)) == 1


def test_a_kill_while_one_is_deleted_leaves_it_whole_or_not_at_all(folder):
    target, found = folder / "x.ckpt", []
    for at in range(3):
        assert not killed(lambda: write(target, 1), NEVER)
        killed(lambda: commits.remove(target), at)
        found.append(target.exists())
        assert not found[-1] or read(target) == 1
    assert found == [True, False, False]
    assert not saves(folder)


def test_what_others_may_still_write_is_spared(memory, monkeypatch):
    for name in (OTHER_MACHINE, DEAD, f"{remote_commit.mark()}-1", "notes"):
        (memory / remote_commit.FOLDER / "x.ckpt" / name / "file").put(b"1")
    write(memory / "x.ckpt", 1)
    named = remote_commit.data_of(memory / "x.ckpt").name
    assert {each.name for each in saves(memory)} == {OTHER_MACHINE, f"{remote_commit.mark()}-1", "notes", named}
    monkeypatch.setattr(remote_commit, "GIVEN_UP_SECONDS", -1.0)
    write(memory / "y.ckpt", 1)
    assert OTHER_MACHINE not in {each.name for each in saves(memory)}


def test_a_copy_of_a_commit_object_keeps_its_files(memory):
    write(memory / "x.ckpt", 1)
    (memory / "best.ckpt").put((memory / "x.ckpt").read_bytes())
    write(memory / "x.ckpt", 2)
    commits.remove(memory / "x.ckpt")
    assert read(memory / "best.ckpt") == 1
    commits.remove(memory / "best.ckpt")
    assert not saves(memory)


def test_a_damaged_commit_object_is_told_and_nothing_is_deleted(memory):
    for name in ("x.ckpt", "y.ckpt"):
        write(memory / name, 1)
    (memory / "x.ckpt").put((memory / "x.ckpt").read_bytes().replace(b"x.ckpt", b"z.ckpt"))
    with pytest.raises(CheckpointError, match=r"memory://run/x.ckpt, the commit object .* is damaged"):
        CheckpointReader.open(memory / "x.ckpt")
    assert main(["verify", f"{memory}/x.ckpt"]) == 1
    commits.remove(memory / "y.ckpt")
    write(memory / "w.ckpt", 1)
    assert len(saves(memory)) == 3


@pytest.mark.parametrize("length", [0, 5, 100])
def test_a_torn_commit_object_is_no_checkpoint_and_both_versions_stay_until_it_is_deleted(memory, length, monkeypatch):
    monkeypatch.setattr(remote_commit, "is_known_alive", lambda match: False)  # as after a kill
    write(memory / "x.ckpt", 1)
    (memory / "x.ckpt").put((memory / "x.ckpt").read_bytes()[:length])
    with pytest.raises(CheckpointError, match=r"memory://run/x.ckpt"):
        CheckpointReader.open(memory / "x.ckpt")
    write(memory / "y.ckpt", 1)
    assert len(saves(memory)) == 2
    assert read(next(each for each in saves(memory) if each.parent.name == "x.ckpt")) == 1
    (memory / "x.ckpt").unlink()
    write(memory / "y.ckpt", 2)
    assert [each.parent.name for each in saves(memory)] == ["y.ckpt"]


def test_a_commit_object_names_files_beside_it_only(memory):
    data = "../secret"
    text = f'{{"format": "{remote_commit.FORMAT}", "version": 1, "data": "{data}"'
    (memory / "x.ckpt").put(f'{text}, "digest": "{remote_commit.digest(data.encode())}"}}'.encode())
    with pytest.raises(CheckpointError, match="is damaged"):
        CheckpointReader.open(memory / "x.ckpt")


def test_what_is_no_checkpoint_is_not_replaced(memory):
    (memory / "x.ckpt" / "train.csv").put(b"1")
    with pytest.raises(CheckpointError, match=r"memory://run/x.ckpt is not replaced: there are objects below"):
        write(memory / "x.ckpt", 1)
    assert [each.name for each in memory.rglob("*")] == ["train.csv"]


def test_an_error_while_writing_leaves_the_old_one_and_no_files(memory, monkeypatch):
    write(memory / "x.ckpt", 1)
    monkeypatch.setattr(RemotePath, "put", lambda *_: 1 / 0)
    with pytest.raises(CheckpointError, match=r"memory://run/x.ckpt was not saved; .*ZeroDivisionError"):
        write(memory / "x.ckpt", 2)
    assert read(memory / "x.ckpt") == 1
    assert len(saves(memory)) == 1


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_folder_of_pytorchs_own_at_an_address_is_read(memory):
    dcp.save({"a": torch.arange(6.0)}, storage_writer=FsspecWriter(f"{memory}/x.ckpt"), no_dist=True)
    assert torch.equal(CheckpointReader.open(memory / "x.ckpt").read("a"), torch.arange(6.0))


def test_damage_is_told_with_a_checkpoint_to_load_instead(memory):
    for name in ("x.ckpt", "y.ckpt"):
        write(memory / name, 1)
    file = remote_commit.data_of(memory / "x.ckpt") / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[-200] ^= 1
    file.put(bytes(content))
    with pytest.raises(CheckpointError, match=r"__0_0.distcp is damaged.* other checkpoint .* is memory://run/y.ckpt"):
        CheckpointReader.open(memory / "x.ckpt").read("state_dict.b")
    file.unlink()
    with pytest.raises(CheckpointError, match=r"__0_0.distcp, a part of the checkpoint, cannot be read: .*not there"):
        CheckpointReader.open(memory / "x.ckpt").read("state_dict.b")


def test_the_commands_read_and_write_addresses(memory, tmp_path, capsys):
    local, there = str(tmp_path / "x.ckpt"), f"{memory}/x.ckpt"
    write(tmp_path / "x.ckpt", 1)
    assert main(["export", local, there, "--form", "sharded"]) == 0
    assert main(["export", local, there, "--form", "sharded"]) == 2
    assert main(["export", there, there, "--form", "sharded", "--overwrite"]) == 2
    assert main(["export", local, there, "--form", "sharded", "--overwrite"]) == 0
    assert main(["verify", there, local]) == 0
    assert main(["inspect", there, "--verify"]) == 0
    assert main(["export", there, str(tmp_path / "out")]) == 0
    assert main(["import", there, f"{memory}/y.ckpt", "--prefix", "model."]) == 0
    told = capsys.readouterr()
    assert f"{there}: intact" in told.out
    assert f"{there}: sharded checkpoint, 4 files" in told.out
    assert "is there already" in told.err
    assert "has what is to be read" in told.err
    assert CheckpointReader.open(f"{memory}/y.ckpt").read("state_dict.model.a").eq(1).all()


def test_the_commands_say_what_they_do_not_do_at_addresses(memory, tmp_path, capsys):
    write_full(tmp_path / "x.ckpt", {"state_dict": {}})
    (memory / "x.ckpt").put((tmp_path / "x.ckpt").read_bytes())
    assert main(["inspect", f"{memory}/x.ckpt"]) == 2
    assert main(["export", f"{memory}/x.ckpt", str(tmp_path / "out")]) == 2
    assert main(["export", str(tmp_path / "x.ckpt"), f"{memory}/out", "--form", "full"]) == 2
    assert main(["verify", f"{memory}/x.ckpt", f"{memory}/none.ckpt"]) == 2
    told = capsys.readouterr()
    assert told.err.count("x.ckpt is a PyTorch file: only sharded checkpoints are read at an address") == 2
    assert "x.ckpt: unknown: memory://run/x.ckpt is a PyTorch file" in told.out
    assert "/out is an address, and only --form sharded is written to one" in told.err
    assert "none.ckpt does not exist" in told.out


def test_a_missing_package_and_an_unknown_protocol_are_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(CheckpointError, match=r"s3://bucket/x.ckpt needs a package .*: pip install s3fs"):
        any_path("s3://bucket/x.ckpt").exists()
    with pytest.raises(CheckpointError, match=r"none://x.ckpt is no address that fsspec knows"):
        any_path("none://x.ckpt").exists()


def test_paths_of_this_machine_stay_paths(tmp_path):
    assert any_path(f"file://{tmp_path}/x.ckpt") == any_path(f"{tmp_path}/x.ckpt") == tmp_path / "x.ckpt"
    assert any_path(tmp_path / "a::b") == tmp_path / "a::b"
