"""Which folder of checkpoints is written or read, and that none looks complete before it is."""

import pytest

from smp_strategy.errors import ConfigError
from smp_strategy.integrations.saved_models import state_folders as folders


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


def test_what_an_earlier_call_has_left_is_forgotten(tmp_path):
    (folders.begin(tmp_path / "state") / "old").write_text("1")
    assert not any(folders.begin(tmp_path / "state").iterdir())


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
    with pytest.raises(ConfigError, match="is a file"):
        folders.begin(tmp_path / "state")
