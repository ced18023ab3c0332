"""Which checkpoint is the newest, which are too many, and which tags there can be."""

import os

import pytest

from smp_strategy.checkpoint.storage.sagemaker_folder import TaggedFolder
from smp_strategy.errors import CheckpointError, ConfigError


def save(folder, tag, *, partial=True, age=0):
    """Something that stands for a checkpoint; ``age`` in seconds."""
    found = TaggedFolder(folder, tag)
    if partial:
        found.partial.mkdir(parents=True)
        times = os.stat(found.partial).st_mtime - age
        os.utime(found.partial, (times, times))
    else:
        found.full.write_text("weights")
    found.announce()
    return found


def names(folder):
    return sorted(each.name for each in folder.iterdir())


def test_the_newest_is_that_which_was_announced_last(tmp_path):
    save(tmp_path, "step_9")
    save(tmp_path, "step_10")
    assert (tmp_path / "newest").read_text() == "step_10"
    found = TaggedFolder.to_read(tmp_path, None, partial=True)
    assert (found.tag, found.partial) == ("step_10", tmp_path / "step_10_partial")
    assert TaggedFolder.to_read(tmp_path, "step_9", partial=True).tag == "step_9"


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_the_oldest_partial_ones_are_deleted_but_never_that_which_was_written(limit, tmp_path):
    save(tmp_path, "full", partial=False)
    for age in (3, 2, 1):
        save(tmp_path, f"step_{10 - age}", age=age)
    newest = save(tmp_path, "step_10", age=100)  # as if clocks differed
    (tmp_path / "notes").mkdir()
    newest.delete_oldest(limit)
    kept = ["step_10_partial", "step_9_partial", "step_8_partial", "step_7_partial"][:limit]
    assert names(tmp_path) == sorted([*kept, "full", "newest", "notes"])


def test_a_full_checkpoint_is_none_of_the_partial_ones_that_are_kept(tmp_path):
    for age in (2, 1):
        save(tmp_path, f"step_{10 - age}", age=age)
    save(tmp_path, "step_10", partial=False).delete_oldest(1)
    assert names(tmp_path) == ["newest", "step_10", "step_9_partial"]


@pytest.mark.parametrize(
    "tag",
    ["", ".", "..", "a/b", "../a", ".a", "a\\b", "newest", "user_content_a", "a_partial", " a", "a\n", 5],
)
def test_tags_that_cannot_be_served_are_refused(tag, tmp_path):
    with pytest.raises(ConfigError, match="The tag of a checkpoint cannot be"):
        TaggedFolder(tmp_path, tag)


def test_what_is_not_there_is_said_and_what_is_there(tmp_path):
    with pytest.raises(CheckpointError, match="no file `newest`.*There are no others"):
        TaggedFolder.to_read(tmp_path / "nowhere", None, partial=True)
    save(tmp_path, "step_1", age=5)
    save(tmp_path, "step_2")
    with pytest.raises(CheckpointError, match="step_3_partial is not there.*partial: step_1, step_2"):
        TaggedFolder.to_read(tmp_path, "step_3", partial=True)
    save(tmp_path, "step_3", partial=False)
    with pytest.raises(CheckpointError, match="newest` names.*It was saved with `partial=False`"):
        TaggedFolder.to_read(tmp_path, None, partial=True)
    for damaged in (b"../step_2", b"\xff\xfe", b""):
        (tmp_path / "newest").write_bytes(damaged)
        with pytest.raises(CheckpointError, match="is damaged"):
            TaggedFolder.to_read(tmp_path, None, partial=True)


@pytest.mark.parametrize("limit", [0, -1, True, 1.5])
def test_at_least_one_is_kept(limit, tmp_path):
    with pytest.raises(ConfigError, match="must be at least 1"):
        TaggedFolder(tmp_path, "a").check_limit(limit)
