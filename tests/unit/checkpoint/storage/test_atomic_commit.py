import os
import subprocess
import sys
from pathlib import Path

import pytest

from smp_strategy.checkpoint.storage import atomic_commit as commits
from smp_strategy.checkpoint.storage import process_marks
from smp_strategy.checkpoint.storage.atomic_commit import (
    begin,
    clean,
    commit,
    discard,
    merge,
    recover,
    recover_all,
    remove,
    replacing,
)
from smp_strategy.errors import CheckpointError


def fill(path, text):
    if path.is_dir():
        (path / "sharded_state").mkdir()
        (path / "sharded_state" / ".metadata").write_text(text)
        (path / "scheduler.bin").write_text(text)
    else:
        path.write_text(text)


def content(path):
    if path.is_dir():
        found = sorted(str(each.relative_to(path)) for each in path.rglob("*"))
        assert found == ["scheduler.bin", "sharded_state", "sharded_state/.metadata"]
        assert (path / "sharded_state" / ".metadata").read_text() == (path / "scheduler.bin").read_text()
        return (path / "scheduler.bin").read_text()
    return path.read_text()


def make(path, kind, text):
    if kind == "link":
        path.with_name("elsewhere").mkdir()
        fill(path.with_name("elsewhere"), text)
        path.symlink_to("elsewhere")
    elif kind != "nothing":
        if kind == "folder":
            path.mkdir()
        fill(path, text)


@pytest.mark.parametrize("old", ["nothing", "file", "folder", "link"])
@pytest.mark.parametrize("is_folder", [False, True])
def test_what_is_committed_takes_the_place_of_whatever_was_there(tmp_path, old, is_folder):
    target = tmp_path / "x.ckpt"
    make(target, old, "old")
    staging = begin(target, is_folder=is_folder)
    fill(staging, "new")
    assert (content(target) if old != "nothing" else target.exists()) == ("old" if old != "nothing" else False)
    commit(staging, target)
    assert content(target) == "new"
    assert target.is_dir() == is_folder
    assert not target.is_symlink()
    names = {each.name for each in tmp_path.iterdir()}
    assert names == {"x.ckpt"} | ({"elsewhere"} if old == "link" else set())
    if old == "link":
        assert content(tmp_path / "elsewhere") == "old"


class Killed(BaseException):
    """In the place of a signal: nothing may handle it."""


def steps_until(call, monkeypatch, at):
    """Run ``call``, which ends before its change of the folder number ``at``; whether it did."""
    count = 0

    def counted(change):
        def wrapper(*args, **options):
            nonlocal count
            if count == at:
                raise Killed
            count += 1
            return change(*args, **options)

        return wrapper

    with monkeypatch.context() as patches:
        for owner, name in [(os, "rename"), (os, "replace"), (os, "unlink"), (os, "rmdir")]:
            patches.setattr(owner, name, counted(getattr(os, name)))
        try:
            call()
        except Killed:
            return True
    return False


@pytest.mark.parametrize("old", ["file", "folder", "link"])
@pytest.mark.parametrize("is_folder", [False, True])
def test_whoever_is_killed_leaves_the_old_or_the_new_one(tmp_path, old, is_folder, monkeypatch):
    seen = set()
    for at in range(100):
        folder = tmp_path / str(at)
        folder.mkdir()
        target = folder / "x.ckpt"
        make(target, old, "old")
        staging = begin(target, is_folder=is_folder)
        fill(staging, "new")
        if not steps_until(lambda staging=staging, target=target: commit(staging, target), monkeypatch, at):
            break
        recover(target)
        seen.add(content(target))
        monkeypatch.setattr(process_marks, "_started", lambda pid: "another")  # as if this process had gone
        with replacing(target, is_folder=is_folder) as staging:
            fill(staging, "newer")
        monkeypatch.undo()
        assert content(target) == "newer"
        assert {each.name for each in folder.iterdir()} - {"elsewhere"} == {"x.ckpt"}
    else:
        raise AssertionError("it never ended")
    assert "old" in seen
    assert ("new" in seen) == (is_folder or old == "folder")


def test_everything_is_on_the_disk_before_it_is_renamed_and_the_rename_before_the_end(tmp_path, monkeypatch):
    calls = []
    opened = {}
    real_open, real_fsync, real_rename = os.open, os.fsync, os.rename

    def record_open(path, *args, **options):
        number = real_open(path, *args, **options)
        opened[number] = str(path)
        return number

    monkeypatch.setattr(os, "open", record_open)
    monkeypatch.setattr(os, "fsync", lambda number: (calls.append(("fsync", opened[number])), real_fsync(number)))
    monkeypatch.setattr(os, "rename", lambda a, b: (calls.append(("rename", str(a), str(b))), real_rename(a, b)))
    target = tmp_path / "made" / "here" / "x.ckpt"
    staging = begin(target, is_folder=True)
    made, calls[:] = list(calls), []
    assert made == [("fsync", str(tmp_path)), ("fsync", str(tmp_path / "made"))]
    fill(staging, "new")
    commit(staging, target)
    parent, name = str(target.parent), str(staging)
    assert calls[:2] == [("fsync", f"{name}/sharded_state/.metadata"), ("fsync", f"{name}/sharded_state")]
    assert calls[2:] == [
        ("fsync", f"{name}/scheduler.bin"),
        ("fsync", name),
        ("rename", name, str(target)),
        ("fsync", parent),
    ]
    calls.clear()
    staging = begin(target, is_folder=True)
    commit(staging, target)
    aside = str(target.with_name(".x.ckpt.replaced"))
    assert [call for call in calls if call[0] == "rename" or call[1] == parent][:4] == [
        ("rename", str(target), aside),
        ("fsync", parent),
        ("rename", str(staging), str(target)),
        ("fsync", parent),
    ]


def test_what_dead_processes_have_left_goes_and_what_living_ones_write_stays(tmp_path):
    script = (
        "import sys, pathlib; from smp_strategy.checkpoint.storage.atomic_commit import begin;"
        "print(begin(pathlib.Path(sys.argv[1]), is_folder=True), flush=True); sys.stdin.read()"
    )
    arguments = [sys.executable, "-c", script, str(tmp_path / "other.ckpt")]
    child = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    theirs = tmp_path / child.stdout.readline().strip()
    ours = begin(tmp_path / "ours.ckpt", is_folder=False)
    assert theirs.is_dir()
    assert ours.exists()
    child.kill()
    child.communicate()
    staging = begin(tmp_path / "x.ckpt", is_folder=False)
    assert not theirs.exists()
    assert ours.exists()
    discard(ours)
    discard(staging)
    assert not list(tmp_path.iterdir())


def test_what_another_machine_has_begun_goes_when_nothing_has_been_written_to_it_for_long(tmp_path):
    staging = tmp_path / ".x.ckpt.saving-00000000-1-5-0"
    staging.mkdir()
    (staging / "part").touch()
    os.utime(staging, (1000, 1000))
    os.utime(staging / "part", (3000, 3000))
    clean(tmp_path, now=3000 + commits.GIVEN_UP_SECONDS - 1)
    assert staging.exists()
    clean(tmp_path, now=3000 + commits.GIVEN_UP_SECONDS + 1)
    assert not staging.exists()


def test_a_reader_that_recovers_in_the_middle_of_a_commit_does_no_harm(tmp_path, monkeypatch):
    target = tmp_path / "x.ckpt"
    make(target, "folder", "old")
    staging = begin(target, is_folder=True)
    fill(staging, "new")
    real, times = os.rename, []

    def rename(source, destination):
        if source == staging and not times:
            times.append(1)
            recover(target)
            assert content(target) == "old"
        real(source, destination)

    monkeypatch.setattr(os, "rename", rename)
    commit(staging, target)
    assert times
    assert content(target) == "new"
    assert [each.name for each in tmp_path.iterdir()] == ["x.ckpt"]


def test_a_folder_is_listed_with_what_was_aside(tmp_path):
    (tmp_path / ".x.ckpt.replaced").mkdir()
    (tmp_path / ".y.ckpt.replaced").mkdir()
    make(tmp_path / "y.ckpt", "folder", "new")
    recover_all(tmp_path)
    assert sorted(each.name for each in tmp_path.iterdir()) == [".y.ckpt.replaced", "x.ckpt", "y.ckpt"]
    assert content(tmp_path / "y.ckpt") == "new"
    recover_all(tmp_path / "missing")


@pytest.mark.parametrize("old", ["nothing", "file", "folder", "link"])
def test_what_is_removed_does_not_come_back(tmp_path, old):
    target = tmp_path / "x.ckpt"
    make(target, old, "old")
    (tmp_path / ".x.ckpt.replaced").mkdir()
    remove(target)
    recover(target)
    assert {each.name for each in tmp_path.iterdir()} == ({"elsewhere"} if old == "link" else set())


def test_an_error_leaves_the_old_one_and_nothing_else(tmp_path):
    target = tmp_path / "x.ckpt"
    target.write_text("old")

    def save():
        with replacing(target, is_folder=False) as staging:
            staging.write_text("half")
            raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        save()
    assert content(target) == "old"
    assert [each.name for each in tmp_path.iterdir()] == ["x.ckpt"]


def test_a_commit_of_what_somebody_has_deleted_says_so(tmp_path):
    staging = begin(tmp_path / "x.ckpt", is_folder=True)
    staging.rmdir()
    with pytest.raises(CheckpointError, match=r"x\.ckpt cannot be saved: \.x\.ckpt\.saving-\S+, to which"):
        commit(staging, tmp_path / "x.ckpt")


def test_a_folder_that_another_process_has_moved_aside_meanwhile_is_replaced(tmp_path, monkeypatch):
    target, rename = tmp_path / "state", os.rename
    target.mkdir()
    staging = begin(target, is_folder=True, check=lambda place: None)
    (staging / "new").touch()
    moved = []

    def contested(source, place):
        if Path(source) == target and not moved:
            moved.append(source)
            target.rmdir()
        rename(source, place)

    monkeypatch.setattr(os, "rename", contested)
    commit(staging, target, check=lambda place: None)
    assert moved == [target]
    assert os.listdir(tmp_path) == ["state"]
    assert os.listdir(target) == ["new"]


def test_merging_keeps_what_is_there_and_replaces_file_by_file(tmp_path):
    target = tmp_path / "x"
    make(target, "folder", "old")
    (target / "theirs").write_text("theirs")
    staging = begin(tmp_path / "y", is_folder=True)
    (staging / "sharded_state").mkdir()
    (staging / "sharded_state" / ".metadata").write_text("new")
    (staging / "c").write_text("new")
    merge(staging, target)
    discard(staging)
    found = {str(each.relative_to(target)): each.read_text() for each in target.rglob("*") if each.is_file()}
    assert found == {
        "sharded_state/.metadata": "new",
        "scheduler.bin": "old",
        "c": "new",
        "theirs": "theirs",
    }
    assert [each.name for each in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize("name", ["x" * 250, "ä" * 120 + ".ckpt"])
def test_long_names_can_be_saved_and_replaced(tmp_path, name):
    for text in ["first", "second"]:
        with replacing(tmp_path / name, is_folder=True) as staging:
            fill(staging, text)
    assert content(tmp_path / name) == "second"
    assert [each.name for each in tmp_path.iterdir()] == [name]
