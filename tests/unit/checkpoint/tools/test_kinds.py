"""Commands agree on what a path is; nothing is lost by ``--overwrite``; names do not steer the terminal."""

import os
import zipfile

import pytest
import torch
from safetensors.torch import save_file

from smp_strategy.checkpoint.storage.full_file import write_full
from smp_strategy.checkpoint.storage.sagemaker_folder import TaggedFolder
from smp_strategy.checkpoint.storage.verified_reads import describe
from smp_strategy.checkpoint.storage.writer import ShardedWriter
from smp_strategy.checkpoint.torch_file import without_checksums
from smp_strategy.cli import main


def smp(*arguments):
    return main([str(argument) for argument in arguments])


def sharded(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    ShardedWriter().prepare({"state_dict": {"w": torch.ones(3)}}).write(path, rest={})


def tagged(path, *, partial):
    folder = TaggedFolder(path, "step_1")
    path.mkdir()
    sharded(folder.partial) if partial else write_full(folder.full, {"w": torch.ones(3)})
    folder.announce()


def state(path, *, is_sharded):
    path.mkdir()
    torch.save({"x": 1}, path / "scheduler.bin")
    if is_sharded:
        sharded(path / "sharded_state")
    else:
        save_file({"w": torch.ones(3)}, path / "model.safetensors")
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], momentum=0.5)
        optimizer.param_groups[0]["params"][0].grad = torch.ones(3)
        optimizer.step()
        torch.save(optimizer.state_dict(), path / "optimizer.bin")
    describe(path, {})


def halves(path):
    path.mkdir()
    torch.save({"w": torch.ones(3)}, path / "pytorch_model-00001-of-00001.bin")
    (path / "pytorch_model.bin.index.json").write_text('{"weight_map": {"w": "pytorch_model-00001-of-00001.bin"}}')


KINDS = {
    "file": (lambda path: write_full(path, {"w": torch.ones(3)}), 0),
    "sharded": (sharded, 0),
    "tagged, partial": (lambda path: tagged(path, partial=True), 0),
    "tagged, full": (lambda path: tagged(path, partial=False), 0),
    "Accelerate, sharded": (lambda path: state(path, is_sharded=True), 0),
    "Accelerate, full": (lambda path: state(path, is_sharded=False), 0),
    "file of others": (lambda path: torch.save({"w": torch.ones(3)}, path), 0),
    "file of others, no archive": (
        lambda path: torch.save({"w": torch.ones(3)}, path, _use_new_zipfile_serialization=False),
        2,
    ),
    "safetensors": (lambda path: save_file({"w": torch.ones(3)}, path), 2),
    "Hugging Face": (halves, 2),
}


@pytest.mark.parametrize("kind", KINDS)
def test_all_commands_read_the_same_kinds(kind, tmp_path, capsys):
    write, status = KINDS[kind]
    path = tmp_path / "x"
    write(path)
    assert smp("verify", path) == status
    said = capsys.readouterr().out
    assert said.startswith(f"{path}: " + ("intact" if status == 0 else "unknown: readable, but another program"))
    assert smp("inspect", path, "--verify") == status
    assert smp("export", path, tmp_path / "out", "--quiet") == 0
    assert smp("import", path, tmp_path / "in", "--form", "full", "--quiet") == 0
    loaded = torch.load(tmp_path / "in", weights_only=True)
    assert loaded["state_dict"]["w"].equal(torch.ones(3))
    assert len(loaded["optimizer_states"]) == (kind == "Accelerate, full")


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["global_step5/mp_rank_00_model_states.pt", "latest"], "zero_to_fp32"),
        (["pytorch_model_fsdp_0/.metadata"], "pytorch_model_fsdp_0"),
        (["latest_checkpointed_iteration.txt"], "Megatron"),
    ],
)
@pytest.mark.parametrize("command", ["verify", "inspect", "export", "import"])
def test_known_kinds_that_cannot_be_read_are_named(command, names, said, tmp_path, capsys):
    for name in names:
        (tmp_path / "x" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "x" / name).write_text("x")
    out = [tmp_path / "out"] if command in ("export", "import") else []
    assert smp(command, tmp_path / "x", *out) == 2
    assert said in "".join(capsys.readouterr())


def test_only_what_is_known_to_be_undamaged_is_called_that(tmp_path, capsys):
    with zipfile.ZipFile(tmp_path / "newest.zip", "w") as archive:
        archive.writestr("a", "b")
    with without_checksums():
        torch.save({"w": torch.ones(3)}, tmp_path / "theirs.ckpt")
    bad = tmp_path / "bad.ckpt"
    write_full(bad, {"w": torch.full((3,), 7.0)})
    bad.write_bytes(bad.read_bytes().replace(torch.full((3,), 7.0).numpy().tobytes(), bytes(12)))
    assert smp("verify", bad) == 1
    said = capsys.readouterr().out
    assert "No checkpoint beside it is known to be undamaged" in said
    assert "theirs.ckpt, has no digests" in said
    assert "newest.zip" not in said
    write_full(tmp_path / "good.ckpt", {"w": torch.ones(3)})
    os.utime(tmp_path / "good.ckpt", (1, 1))
    assert smp("verify", bad) == 1
    assert f"newest undamaged checkpoint beside it is {tmp_path}/good.ckpt" in capsys.readouterr().out


class Call:
    def __reduce__(self):
        return (os.system, ("touch executed",))


@pytest.mark.parametrize("command", ["verify", "inspect", "export"])
def test_refusals_name_what_a_file_would_run(command, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"w": torch.ones(3), "x": Call()}, tmp_path / "bomb.ckpt")
    assert smp(command, tmp_path / "bomb.ckpt", *([tmp_path / "out"] if command == "export" else [])) == 2
    said = "".join(capsys.readouterr())
    assert "it names `posix.system`" in said
    assert "\x1b" not in said
    assert not (tmp_path / "executed").exists()


def test_names_do_not_steer_the_terminal_and_are_no_markup(tmp_path, capsys):
    name = "a\x1b]0;title\x07[red]:smile:\u202e\nfile: intact"
    path = tmp_path / f"{name}.ckpt"
    write_full(path, {name: torch.ones(3)})
    assert smp("verify", path) == 0
    assert smp("inspect", path) == 0
    assert smp("export", path, tmp_path / name, "--form", "full") == 0
    assert smp("export", path, tmp_path / name) == 2
    out, err = capsys.readouterr()
    assert not {"\x1b", "\x07", "\u202e"} & set(out + err)
    assert "a\\x1b]0;title\\x07[red]:smile:\\u202e\\nfile: intact" in out
    assert not any(line.startswith("file: intact") for line in (out + err).splitlines())


def test_overwriting_takes_nothing_but_a_checkpoint(tmp_path, capsys):
    write_full(tmp_path / "x.ckpt", {"w": torch.ones(3)})
    clone = tmp_path / "clone"
    for name in (".git/HEAD", "src/main.py", "config.json", "model.safetensors"):
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        (clone / name).write_text("{}")
    for more in ([], ["--form", "full"], ["--form", "sharded"], ["--hf", clone]):
        assert smp("export", tmp_path / "x.ckpt", clone, "--overwrite", *more) == 2
        assert ".git, src" in capsys.readouterr().err
    assert len([each for each in clone.rglob("*") if each.is_file()]) == 4
    sharded(tmp_path / "s.ckpt")
    assert smp("export", tmp_path / "s.ckpt", tmp_path / "s.ckpt" / "meta.pt", "--form", "full", "--overwrite") == 2
    assert "what is to be read" in capsys.readouterr().err


def test_files_that_come_again_do_not_hinder(tmp_path):
    write_full(tmp_path / "x.ckpt", {"w": torch.ones(3)})
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "helper.py").write_text("# of the model")
    for _ in range(2):
        assert smp("export", tmp_path / "x.ckpt", tmp_path / "out", "--hf", model, "--overwrite", "--quiet") == 0
    (tmp_path / "out" / "helper.py").write_text("# changed by somebody")
    assert smp("export", tmp_path / "x.ckpt", tmp_path / "out", "--hf", model, "--overwrite", "--quiet") == 2
    assert (tmp_path / "out" / "helper.py").read_text() == "# changed by somebody"


@pytest.mark.parametrize(
    "index",
    [
        '{"weight_map": {"w": "../x"}}',
        '{"weight_map": {"w": "/x"}}',
        "[" * 100_000,
        '{"weight_map": {"w": "a", "w": "b"}}',
        '{"weight_map": {"w": "a\\u0000"}}',
    ],
)
def test_hostile_indices_are_refused(index, tmp_path, capsys):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "model.safetensors.index.json").write_text(index)
    assert smp("export", tmp_path / "x", tmp_path / "out") == 2
    assert "model.safetensors.index.json" in capsys.readouterr().err


def test_a_manifest_of_another_program_is_none_of_ours(tmp_path, capsys):
    (tmp_path / "x").mkdir()
    save_file({"w": torch.ones(3)}, tmp_path / "x" / "model.safetensors")
    (tmp_path / "x" / "manifest.json").write_text('{"name": "app"}')
    assert smp("verify", tmp_path / "x") == 2
    assert "damage cannot be ruled out" in capsys.readouterr().out


def test_a_damaged_directory_of_an_archive_is_damage(tmp_path, capsys):
    write_full(tmp_path / "x", {"w": torch.ones(3)})
    data = (tmp_path / "x").read_bytes()
    begin = data.rindex(b"data.pkl")
    (tmp_path / "x").write_bytes(data[:begin] + b"dada.pkl" + data[begin + 8 :])
    assert smp("verify", tmp_path / "x") == 1
    assert "damaged" in capsys.readouterr().out
