"""Which folder of checkpoints is written or read, and that none looks complete before it is."""

import contextlib
import os
import signal

import pytest

from smp_strategy.checkpoint.storage import atomic_commit as commit
from smp_strategy.engine.saving.saved_models import state_folders as folders
from smp_strategy.errors import ConfigError


def checkpoints(folder, *numbers):
    for number in numbers:
        (folder / f"checkpoint_{number}").mkdir(parents=True)
    return folder


def test_the_highest_number_is_the_newest(tmp_path):
    checkpoints(tmp_path, 2, 10, 9)
    (tmp_path / "final").mkdir()
    assert folders.newest(tmp_path).name == "checkpoint_10"
    assert [each.name for each in folders.delete_oldest(tmp_path, 1)] == ["checkpoint_2", "checkpoint_9"]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["checkpoint_10", "final"]


def test_without_checkpoints_there_is_no_newest(tmp_path):
    with pytest.raises(ValueError, match="no checkpoint to load"):
        folders.newest(tmp_path / "nowhere")


def test_what_is_written_is_not_among_the_checkpoints_before_it_is_complete(tmp_path):
    target = checkpoints(tmp_path / "checkpoints", 0) / "checkpoint_1"
    staging = folders.begin(target)
    (staging / "part").write_text("1")
    assert staging.name == target.name
    assert [each.name for each in target.parent.iterdir()] == ["checkpoint_0"]
    folders.move_in(staging, target)
    assert (target / "part").read_text() == "1"
    assert [each.name for each in tmp_path.iterdir()] == ["checkpoints"]


def begun_in_a_process_that_is_killed(target):
    """The staging folder of a process that has ended without a word."""
    if (pid := os.fork()) == 0:
        (folders.begin(target) / "old").write_text("1")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)


@pytest.mark.parametrize("name", ["state", "checkpoints/checkpoint_1"])
def test_what_killed_processes_have_left_is_deleted(name, tmp_path):
    begun_in_a_process_that_is_killed(tmp_path / name)
    left = list(tmp_path.rglob("old"))
    assert len(left) == 1
    staging = folders.begin(tmp_path / name)
    assert not any(staging.iterdir())
    assert not list(tmp_path.rglob("old"))


def test_two_savers_of_one_name_do_not_meet(tmp_path):
    first, second = folders.begin(tmp_path / "state"), folders.begin(tmp_path / "state")
    for name in ("weights", "optimizer"):
        (first / name).write_text("first")
        (second / name).write_text("second")
    folders.move_in(second, tmp_path / "state")
    assert {each.read_text() for each in (tmp_path / "state").iterdir()} == {"second"}
    folders.move_in(first, tmp_path / "state", replaces="weights|optimizer")
    assert {each.read_text() for each in (tmp_path / "state").iterdir()} == {"first"}


class Killed(BaseException):
    pass


@pytest.mark.parametrize("moment", range(7))
def test_a_save_that_is_killed_among_files_of_the_user_is_the_old_one_or_the_new_one(moment, tmp_path, monkeypatch):
    """And is ended by the next reader, also if that is killed."""
    target, index = tmp_path / "state", "model.safetensors.index.json"
    old = {index: "old", "model-00001-of-00001.safetensors": "old", "optimizer_1.bin": "old", "mine.txt": "mine"}
    new = {index: "new", "model-00001-of-00001.safetensors": "new", "optimizer.bin": "new"}
    target.mkdir()
    for name, text in old.items():
        (target / name).write_text(text)
    staging = folders.begin(target)
    for name, text in new.items():
        (staging / name).write_text(text)
    calls = []

    def stopping(original):
        def call(*args, **kwargs):
            if len(calls) == moment:
                raise Killed
            calls.append(original)
            return original(*args, **kwargs)

        return call

    with monkeypatch.context() as patches:
        patches.setattr(commit.os, "replace", stopping(os.replace))
        patches.setattr(commit.os, "rename", stopping(os.rename))
        patches.setattr(commit, "_is_alive", lambda *_: False)
        with contextlib.suppress(Killed):
            folders.move_in(staging, target, replaces=rf"{folders.STATES}|{folders.WEIGHTS}")
        calls[:] = [None] * (moment - 1)  # the reader is killed at its next step but one
        with contextlib.suppress(Killed):
            commit.recover(target)
    monkeypatch.setattr(commit, "_is_alive", lambda *_: False)
    commit.recover(target)
    found = {each.name: each.read_text() for each in target.iterdir()}
    assert found in (old, {**new, "mine.txt": "mine"})
    assert found != old or moment == 0


def test_files_are_moved_into_a_folder_that_exists(tmp_path):
    for name in ("model.safetensors", "pytorch_model.bin", "random_states_1.pkl", "mine.txt", "unet/config"):
        (tmp_path / "state" / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / "state" / name).write_text("old")
    staging = folders.begin(tmp_path / "state")
    for name in ("pytorch_model.bin", "unet/weights"):
        (staging / name).parent.mkdir(exist_ok=True)
        (staging / name).write_text("new")
    folders.move_in(staging, tmp_path / "state", replaces=folders.STATES)
    found = {str(each.relative_to(tmp_path / "state")): each for each in tmp_path.rglob("*") if each.is_file()}
    assert {name: each.read_text() for name, each in found.items()} == {
        "pytorch_model.bin": "new",
        "mine.txt": "old",
        "unet/config": "old",
        "unet/weights": "new",
    }


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "state").write_text("")
    os.mkfifo(tmp_path / "fifo")
    for name, kind in (("state", "a file"), ("fifo", "a FIFO")):
        for target in (tmp_path / name, tmp_path / name / "below"):
            with pytest.raises(ConfigError, match=f"{name} is {kind}, but a folder is to be written"):
                folders.begin(target)
