"""What a path is, and which folders may be replaced."""

import json
import os
import zipfile

import pytest
import torch
from safetensors.torch import save_file

from smp_strategy.checkpoint.storage.atomic_commit import begin, commit, link, merge, replacing
from smp_strategy.checkpoint.storage.full_file import write_full
from smp_strategy.checkpoint.storage.path_kind import (
    CheckpointKind,
    foreign_entries,
    kind_of,
    reason_to_keep,
    unreadable,
)
from smp_strategy.checkpoint.storage.writer import ShardedWriter
from smp_strategy.errors import CheckpointError, ConfigError


def sharded(path):
    ShardedWriter().prepare({"state_dict": {"w": torch.ones(3)}}).write(path, rest={"n": 1})
    return path


def folder(path, *names):
    for name in names:
        each = path / name
        each.parent.mkdir(parents=True, exist_ok=True)
        each.mkdir() if name.endswith("/") else each.write_text("x")
    return path


@pytest.mark.parametrize("new_zip", [True, False])
def test_files_are_what_their_bytes_are_and_not_what_they_are_called(tmp_path, new_zip):
    path = tmp_path / "x.safetensors.bak"
    torch.save({"w": torch.ones(3)}, path, _use_new_zipfile_serialization=new_zip)
    assert kind_of(path) is CheckpointKind.TORCH_FILE
    path.write_bytes(path.read_bytes()[:300])  # cut off: it is a damaged one, and no other kind
    assert kind_of(path) is CheckpointKind.TORCH_FILE
    save_file({"w": torch.ones(3)}, path)
    assert kind_of(path) is CheckpointKind.SAFETENSORS


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning", "ignore:`torch.jit:FutureWarning")  # from 2.14 on
def test_archives_of_others_are_named_and_not_taken_for_checkpoints(tmp_path):
    with zipfile.ZipFile(tmp_path / "data.ckpt", "w") as archive:
        archive.writestr("a/readme.txt", "text")
    torch.jit.save(torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(1, 2)), tmp_path / "program.ckpt")
    (tmp_path / "empty.ckpt").touch()
    for name, kind in [
        ("data", CheckpointKind.ZIP),
        ("program", CheckpointKind.TORCHSCRIPT),
        ("empty", CheckpointKind.EMPTY),
    ]:
        path = tmp_path / f"{name}.ckpt"
        assert kind_of(path) is kind
        assert str(path) in unreadable(path, kind)


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["config.json", "model.safetensors"], CheckpointKind.WEIGHTS),
        (["pytorch_model.bin.index.json", "pytorch_model-00001-of-00001.bin"], CheckpointKind.WEIGHTS),
        (["model.safetensors", "optimizer.bin", "random_states_0.pkl"], CheckpointKind.STATE),
        (["model_0_0.pt"], CheckpointKind.SAGEMAKER),
        (["newest", "a_partial/"], CheckpointKind.TAGGED),
        (["latest", "global_step5/mp_rank_00_model_states.pt"], CheckpointKind.DEEPSPEED),
        (["checkpoint/zero_pp_rank_0_mp_rank_00_optim_states.pt", "latest"], CheckpointKind.DEEPSPEED),
        (["pytorch_model_fsdp_0/.metadata", "random_states_0.pkl"], CheckpointKind.FSDP_STATE),
        (["latest_checkpointed_iteration.txt", "iter_0000010/"], CheckpointKind.MEGATRON),
        (["config.json", "src/"], CheckpointKind.OTHER),
        ([], CheckpointKind.EMPTY),
    ],
)
def test_folders_are_what_is_in_them(tmp_path, names, kind):
    (tmp_path / "x").mkdir()
    assert kind_of(folder(tmp_path / "x", *names)) is kind


PRECIOUS = [
    ["config.json", ".git/", "src/"],
    ["config.json", "model.safetensors", ".git/"],
    ["config.json", "model.safetensors", "train.py"],
    ["config.json", "model.safetensors", "README.md"],
    [".metadata", "__0_0.distcp", "notes.txt"],
    ["model.safetensors", "optimizer.bin", "sharded_state/mine.txt"],
    ["model.safetensors", "manifest.json"],
    ["newest", "step_1_partial/"],
    ["global_step5/"],
    ["letter"],
]


@pytest.mark.parametrize("names", PRECIOUS)
def test_a_folder_with_anything_else_in_it_is_not_replaced(tmp_path, names):
    target = folder(tmp_path / "out", *names)
    before = sorted(target.rglob("*"))
    assert foreign_entries(target)
    for is_folder in (True, False):
        with (
            pytest.raises(CheckpointError, match=r"out is not replaced: .*in it: "),
            replacing(target, is_folder=is_folder),
        ):
            raise AssertionError("it has begun")
    with pytest.raises(CheckpointError, match="is not replaced"):
        write_full(target, {"w": torch.ones(1)})
    with pytest.raises(CheckpointError, match="is not replaced"):
        sharded(target)
    with pytest.raises(CheckpointError, match="is not replaced"):
        link(tmp_path / "elsewhere", target)
    assert sorted(target.rglob("*")) == before
    assert [each.name for each in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    "names",
    [
        ["config.json", "model.safetensors", "tokenizer.json", "modeling_own.py"],
        [".metadata", "__0_0.distcp", "__1_0.distcp", "meta.pt", ".nfs000a1"],
        ["model.safetensors", "optimizer.bin", "random_states_0.pkl", "sharded_state/.metadata"],
        ["model_0_0.pt", "optimizer_0_0.pt", "user_content.pt"],
        [],
    ],
)
def test_what_is_wholly_a_checkpoint_is_replaced(tmp_path, names):
    (tmp_path / "out").mkdir()
    sharded(folder(tmp_path / "out", *names))
    assert foreign_entries(tmp_path / "out") == []
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_what_comes_there_while_a_checkpoint_is_written_stays(tmp_path):
    target = tmp_path / "out"
    staging = begin(target, is_folder=True)
    folder(target, "precious")
    with pytest.raises(CheckpointError, match=r"is not replaced.*precious"):
        commit(staging, target)
    assert (target / "precious").read_text() == "x"


def test_links_are_not_followed_and_the_working_folder_stays(tmp_path, monkeypatch):
    home = folder(tmp_path / "home", "letter")
    (tmp_path / "out").symlink_to(home)
    sharded(tmp_path / "out")
    assert not (tmp_path / "out").is_symlink()
    assert (home / "letter").exists()
    monkeypatch.chdir(tmp_path / "out")
    assert "works" in reason_to_keep(tmp_path / "out")


def test_what_a_manifest_of_ours_names_is_part_of_it(tmp_path):
    path = sharded(tmp_path / "x")
    assert json.loads((path / "manifest.json").read_text())["files"]
    assert foreign_entries(path) == []
    (path / ".metadata").unlink()  # damaged, and still ours
    assert foreign_entries(path) == []


def test_devices_fifos_and_links_to_them_are_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("/dev/null")
    for name, kind in {"fifo": "a FIFO", "link": "a device"}.items():
        with (
            pytest.raises(CheckpointError, match=f"{name} is not replaced: it is {kind}"),
            replacing(tmp_path / name, is_folder=False),
        ):
            pass
    assert sorted(os.listdir(tmp_path)) == ["fifo", "link"]
    assert (tmp_path / "link").is_symlink()


@pytest.mark.parametrize("is_folder", [False, True])
def test_nothing_is_begun_below_files_devices_and_fifos(is_folder, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("/dev/null")
    for name, kind in {"fifo": "a FIFO", "link": "a device", "file": "a file"}.items():
        for target in (tmp_path / name / "x", tmp_path / name / "x" / "y"):
            with pytest.raises(ConfigError) as failure, replacing(target, is_folder=is_folder):
                pass
            assert str(failure.value) == (
                f"{tmp_path / name} is {kind}, but a folder is to be written. Name another one."
            )
    assert sorted(os.listdir(tmp_path)) == ["fifo", "file", "link"]


@pytest.mark.parametrize("stale", [(), ("optimizer.bin",)])
def test_devices_and_fifos_in_a_folder_stay_where_files_are_moved_in(tmp_path, stale):
    target, staging = folder(tmp_path / "out", "notes.txt"), folder(tmp_path / "new", "model.safetensors")
    os.mkfifo(target / (stale or ("model.safetensors",))[0])
    before = sorted(os.listdir(target))
    with pytest.raises(CheckpointError, match="is not replaced: it is a FIFO"):
        merge(staging, target, stale=stale)
    assert sorted(os.listdir(target)) == before


def test_a_fifo_among_files_of_a_checkpoint_does_not_go_with_them(tmp_path):
    target = folder(tmp_path / "out", "model.safetensors", "random_states_0.pkl")
    assert foreign_entries(target) == []
    os.mkfifo(target / "optimizer.bin")
    assert foreign_entries(target) == ["optimizer.bin"]
