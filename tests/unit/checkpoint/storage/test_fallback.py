import os
import shutil

import pytest
import torch

from smp_strategy.checkpoint.storage.full_file import read_full, write_full
from smp_strategy.checkpoint.storage.reader import CheckpointReader
from smp_strategy.checkpoint.storage.verify import advice, previous, problems_of
from smp_strategy.checkpoint.storage.writer import ShardedWriter
from smp_strategy.errors import CheckpointError


def save(path, age):
    write_full(path, {"state_dict": {"w": torch.full((50,), float(age))}})
    os.utime(path, (10_000 - age, 10_000 - age))


def damage(path):
    times = path.stat()
    data = path.read_bytes()
    path.write_bytes(data[:900] + bytes([data[900] ^ 4]) + data[901:])
    os.utime(path, (times.st_atime, times.st_mtime))


def test_the_newest_other_one_that_is_undamaged_is_offered(tmp_path):
    for age, name in enumerate(["epoch=3", "epoch=2", "epoch=1", "epoch=0"]):
        save(tmp_path / f"{name}.ckpt", age)
    (tmp_path / "last.ckpt").symlink_to("epoch=3.ckpt")
    (tmp_path / "notes.txt").write_text("PKZ")
    (tmp_path / "logs").mkdir()
    (tmp_path / ".epoch=4.ckpt.saving-00000000-1-1-1").write_bytes((tmp_path / "epoch=1.ckpt").read_bytes())
    damage(tmp_path / "epoch=3.ckpt")
    assert previous(tmp_path / "epoch=3.ckpt") == tmp_path / "epoch=2.ckpt"
    assert previous(tmp_path / "last.ckpt") == tmp_path / "epoch=2.ckpt"
    damage(tmp_path / "epoch=2.ckpt")
    for name in ("epoch=3", "last"):
        with pytest.raises(CheckpointError) as raised:
            read_full(tmp_path / f"{name}.ckpt")
        text = str(raised.value)
        assert text.startswith(f"{tmp_path}/{name}.ckpt is damaged: ")
        assert f"The newest undamaged checkpoint beside it is {tmp_path}/epoch=1.ckpt: load that one" in text
    for name in ("epoch=1", "epoch=0"):
        (tmp_path / f"{name}.ckpt").unlink()
    assert previous(tmp_path / "epoch=3.ckpt") is None
    assert "There is no undamaged checkpoint beside it" in advice(tmp_path / "epoch=3.ckpt")


def test_one_that_was_moved_aside_by_a_process_that_died_is_found(tmp_path):
    save(tmp_path / "new.ckpt", 0)
    damage(tmp_path / "new.ckpt")
    save(tmp_path / "old.ckpt", 1)
    shutil.move(tmp_path / "old.ckpt", tmp_path / ".old.ckpt.replaced")
    assert previous(tmp_path / "new.ckpt") == tmp_path / "old.ckpt"


def test_what_is_not_there_has_no_problems_but_is_missing(tmp_path):
    with pytest.raises(FileNotFoundError):
        problems_of(tmp_path / "x.ckpt")
    assert previous(tmp_path / "nowhere" / "x.ckpt") is None
    (tmp_path / "folder.ckpt").mkdir()
    assert problems_of(tmp_path / "folder.ckpt")


def save_folder(path, age):
    state = {"state_dict": {"w": torch.full((50,), float(age))}, "step": age}
    ShardedWriter().prepare(state).write(path, rest={"n": 1})
    for each in path.iterdir():
        os.utime(each, (10_000 - age, 10_000 - age))


@pytest.mark.parametrize("file", ["__0_0.distcp", "meta.pt", "manifest.json", ".metadata"])
def test_a_damaged_directory_is_told_with_the_checkpoint_to_load_instead(tmp_path, file):
    save(tmp_path / "oldest.ckpt", 2)
    save_folder(tmp_path / "old.ckpt", 1)
    save_folder(tmp_path / "new.ckpt", 0)
    path = tmp_path / "new.ckpt" / file
    data = bytearray(path.read_bytes())
    data[-50] ^= 1
    path.write_bytes(data)

    def load():
        found = CheckpointReader.open(tmp_path / "new.ckpt")
        found.rest()
        for name in found.tensors:
            found.read(name)
        found.read_objects(found.objects)

    with pytest.raises(CheckpointError) as raised:
        load()
    text = str(raised.value)
    assert text.startswith(f"{tmp_path}/new.ckpt")
    assert file in text
    assert text.count(f"The newest other checkpoint beside it is {tmp_path}/old.ckpt") == 1
    damage_folder = tmp_path / "old.ckpt" / "meta.pt"
    damage_folder.write_bytes(b"")
    assert previous(tmp_path / "new.ckpt") == tmp_path / "oldest.ckpt"
    assert not any("beside it" in str(each) for each in problems_of(tmp_path / "new.ckpt"))
