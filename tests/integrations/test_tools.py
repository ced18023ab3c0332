"""The command ``smp`` on checkpoints as they come: of ranks of ours, of plain Lightning, of FSDP, of scripts."""

import json
import shutil

import pytest
import torch
from lightning_toy import on_ranks, quiet, toy_module
from safetensors.torch import load_file, save_file
from tools_checks import Tied, fsdp_directory, smp, train
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.utils import _pytree as pytree

from smp_strategy.checkpoint.storage.reader import CheckpointReader

PIPELINE = {"pipeline_parallel_degree": 2, "microbatches": 4, "state_dict_type": "sharded"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with ``ours.ckpt``, that two ranks have written, and ``plain.ckpt``, of one process."""
    folder = tmp_path_factory.mktemp("trained")
    on_ranks(train, 2, folder, PIPELINE)
    with quiet():
        train(folder, None)
    return folder


def states(path):
    """Weights and the optimizer's state of a full checkpoint, by names."""
    checkpoint = torch.load(path, weights_only=True)
    [optimizer] = checkpoint["optimizer_states"]
    names = [name for name, _ in toy_module().named_parameters()]
    return checkpoint, {names[number]: kept for number, kept in optimizer["state"].items()}


def test_a_directory_becomes_a_file_and_a_directory_again(trained, tmp_path):
    ours = trained / "ours.ckpt"
    assert smp("export", ours, tmp_path / "full.ckpt", "--form", "full", "--quiet") == 0
    assert smp("export", tmp_path / "full.ckpt", tmp_path / "again.ckpt", "--form", "sharded", "--quiet") == 0
    first, last = CheckpointReader.open(ours), CheckpointReader.open(tmp_path / "again.ckpt")
    assert set(first.tensors) == set(last.tensors)
    assert set(first.objects) == set(last.objects)
    for name in first.tensors:
        assert first.read(name).equal(last.read(name)), name
    for name in first.objects:
        assert first.read_objects([name]) == last.read_objects([name])
    assert same(first.rest(), last.rest())
    assert first.note == last.note


def same(one, other):
    leaves, form = pytree.tree_flatten(one)
    others, other_form = pytree.tree_flatten(other)
    return form == other_form and all(
        a.equal(b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(leaves, others, strict=True)
    )


def test_a_file_made_of_a_directory_is_one_of_plain_lightning(trained, tmp_path):
    assert smp("export", trained / "ours.ckpt", tmp_path / "full.ckpt", "--form", "full", "--quiet") == 0
    checkpoint, kept = states(tmp_path / "full.ckpt")
    expected, expected_kept = states(trained / "plain.ckpt")
    for name, tensor in expected["state_dict"].items():
        torch.testing.assert_close(checkpoint["state_dict"][name], tensor)
        for key, value in expected_kept[name].items():
            torch.testing.assert_close(kept[name][key], value)
    with quiet():
        train(tmp_path, None, 2, tmp_path / "full.ckpt")


@pytest.mark.parametrize("form", ["full", "sharded"])
def test_a_plain_checkpoint_goes_on_under_a_layout(form, trained, tmp_path):
    target = tmp_path / "imported.ckpt"
    assert smp("import", trained / "plain.ckpt", target, "--form", form, "--quiet") == 0
    on_ranks(train, 2, tmp_path, {**PIPELINE, "state_dict_type": "full"}, 2, target)
    with quiet():
        weights = train(tmp_path, None, 2, trained / "plain.ckpt")
    found = torch.load(tmp_path / "ours.ckpt", weights_only=True)["state_dict"]
    for name, tensor in weights.items():
        torch.testing.assert_close(found[name], tensor)


@pytest.mark.parametrize("form", ["full", "sharded"])
def test_training_begins_with_weights_of_others(form, tmp_path):
    torch.manual_seed(3)
    save_file(
        {name: torch.randn_like(value) for name, value in toy_module().net.state_dict().items()},
        tmp_path / "x.safetensors",
    )
    target = tmp_path / "imported.ckpt"
    assert smp("import", tmp_path / "x.safetensors", target, "--form", form, "--prefix", "net.", "--quiet") == 0
    on_ranks(train, 2, tmp_path, {**PIPELINE, "state_dict_type": "full"}, 1, target)
    found = torch.load(tmp_path / "ours.ckpt", weights_only=True)["state_dict"]
    assert smp("import", tmp_path / "x.safetensors", tmp_path / "file.ckpt", "--form", "full", "--prefix", "net.") == 0
    with quiet():
        weights = train(tmp_path, None, 1, tmp_path / "file.ckpt")
    for name, tensor in weights.items():
        torch.testing.assert_close(found[name], tensor)


@pytest.mark.parametrize("keys", [("model", "optimizer_0"), ("model", "optimizer"), ("state_dict", "optim"), ()])
def test_directories_of_fsdp_become_checkpoints(keys, tmp_path):
    weights, kept = on_ranks(fsdp_directory, 2, tmp_path / "theirs", keys)[0]
    assert smp("import", tmp_path / "theirs", tmp_path / "ours.ckpt", "--prefix", "net.", "--quiet") == 0
    found = CheckpointReader.open(tmp_path / "ours.ckpt")
    for name, tensor in weights.items():
        assert found.read(f"state_dict.net.{name}").equal(tensor)
        for key, value in kept[name].items() if keys else ():
            assert found.read(f"optimizer_0.state.net.{name}.{key}").equal(value)
    assert smp("verify", tmp_path / "ours.ckpt", "--") == 0
    assert smp("import", tmp_path / "theirs", tmp_path / "full.ckpt", "--form", "full", "--quiet") == 0
    checkpoint = torch.load(tmp_path / "full.ckpt", weights_only=True)
    assert all(checkpoint["state_dict"][name].equal(tensor) for name, tensor in weights.items())
    assert len(checkpoint["optimizer_states"]) == bool(keys)
    assert checkpoint["global_step"] == 0


def test_tied_weights_and_buffers_stay_what_they_are(tmp_path, capsys):
    model = Tied()
    optimizer = torch.optim.AdamW(list(model.named_parameters()))
    model(torch.arange(12)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}, tmp_path / "script.pt")
    assert smp("import", tmp_path / "script.pt", tmp_path / "sharded") == 0
    assert "epoch: left out" in capsys.readouterr().err
    assert smp("export", tmp_path / "sharded", tmp_path / "full.ckpt", "--form", "full") == 0
    again, checkpoint = Tied(), torch.load(tmp_path / "full.ckpt", weights_only=True)
    again.load_state_dict(checkpoint["state_dict"])
    torch.optim.AdamW(again.parameters()).load_state_dict(checkpoint["optimizer_states"][0])
    state = checkpoint["state_dict"]
    assert state["head.weight"].data_ptr() == state["embedding.weight"].data_ptr()
    for name, tensor in model.state_dict().items():
        assert state[name].equal(tensor)
    kept = checkpoint["optimizer_states"][0]["state"]
    for number, parameter in enumerate(model.parameters()):
        assert kept[number]["exp_avg"].equal(optimizer.state[parameter]["exp_avg"])
    # Their own tool reads it, too.
    dcp_to_torch_save(tmp_path / "sharded", tmp_path / "theirs.pt")
    theirs = torch.load(tmp_path / "theirs.pt", weights_only=True)
    assert theirs["state_dict"]["head.weight"].equal(model.head.weight)


def test_names_that_are_left_out_come_from_a_checkpoint_of_the_same_model(tmp_path, capsys):
    model = Tied()
    torch.save(model.state_dict(), tmp_path / "bare.pt")
    state = {name: value.clone() for name, value in model.state_dict().items() if name != "head.weight"}
    save_file(state, tmp_path / "model.safetensors")
    arguments = ("import", tmp_path / "model.safetensors", tmp_path / "full.ckpt", "--form", "full")
    assert smp(*arguments, "--like", tmp_path / "bare.pt") == 0
    assert "`head.weight` was added" in capsys.readouterr().err
    Tied().load_state_dict(torch.load(tmp_path / "full.ckpt", weights_only=True)["state_dict"])


def test_safetensors_of_a_directory(trained, tmp_path):
    assert smp("export", trained / "ours.ckpt", tmp_path / "out", "--prefix", "net.", "--quiet") == 0
    found, ours = load_file(tmp_path / "out" / "model.safetensors"), CheckpointReader.open(trained / "ours.ckpt")
    assert found.keys() == toy_module().net.state_dict().keys()
    assert all(tensor.equal(ours.read(f"state_dict.net.{name}")) for name, tensor in found.items())


def test_what_is_there_is_told(trained, capsys):
    assert smp("inspect", trained / "ours.ckpt", "--json", "--verify") == 0
    found = json.loads(capsys.readouterr().out)
    parameters = dict(toy_module().named_parameters())
    assert found["kind"] == "sharded checkpoint"
    assert found["has_digests"]
    assert found["verified"]["status"] == "intact"
    assert found["note"]["layout"]
    assert found["lightning"]["global_step"] == 6
    weights = {entry["name"]: entry for entry in found["tensors"] if entry["group"] == "weights"}
    assert {name: entry["shape"] for name, entry in weights.items()} == {
        n: list(p.shape) for n, p in parameters.items()
    }
    groups = {group["name"]: group for group in found["groups"]}
    numel = sum(parameter.numel() for parameter in parameters.values())
    assert groups["weights"] == {"name": "weights", "tensors": 8, "elements": numel, "bytes": 4 * numel}
    assert groups["optimizer 0"]["elements"] == 2 * numel + 8
    assert smp("inspect", trained / "ours.ckpt") == 0
    text = capsys.readouterr().out
    assert "net.0.weight.exp_avg_sq" in text
    assert "layout" in text
    assert smp("inspect", trained / "plain.ckpt", "--summary") == 0
    assert "net.0.weight" not in capsys.readouterr().out


def flip(file, at):
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("form", ["full", "sharded"])
def test_damage_is_named_with_the_checkpoint_before(form, trained, tmp_path, capsys):
    for name in ("first.ckpt", "second.ckpt"):
        assert smp("import", trained / "plain.ckpt", tmp_path / name, "--form", form, "--quiet") == 0
    assert smp("verify", tmp_path / "first.ckpt", tmp_path / "second.ckpt") == 0
    second = tmp_path / "second.ckpt"
    weight = toy_module_weight(trained)
    file = second if form == "full" else second / "__0_0.distcp"
    flip(file, file.read_bytes().index(weight) + 3)
    capsys.readouterr()
    assert smp("verify", tmp_path / "first.ckpt", second, tmp_path / "none.ckpt") == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(": ")[2].partition(":")[0] for line in lines] == ["intact", "damaged", "unknown"]
    assert "net.2.weight" in lines[1]
    assert file.name in lines[1]
    assert "first.ckpt" in lines[1]
    assert smp("inspect", second, "--verify", "--summary") == 1
    for arguments in (("export", second, tmp_path / "out"), ("import", second, tmp_path / "out")):
        assert smp(*arguments) == 2
    assert "net.2.weight" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def toy_module_weight(trained):
    weight = torch.load(trained / "plain.ckpt", weights_only=True)["state_dict"]["net.2.weight"]
    return weight.numpy().tobytes()


def test_files_of_other_programs_are_verified_by_their_checksums(trained, tmp_path, capsys):
    assert smp("verify", trained / "plain.ckpt") == 0
    weight = toy_module_weight(trained)
    (tmp_path / "x.ckpt").write_bytes((trained / "plain.ckpt").read_bytes().replace(weight, bytes(len(weight))))
    assert smp("verify", tmp_path / "x.ckpt") == 1
    assert "net.2.weight: has changed since it was written" in capsys.readouterr().out


class Evil:
    def __reduce__(self):
        return (print, ("executed",))


@pytest.mark.parametrize("command", ["inspect", "import", "export"])
def test_hostile_files_are_refused_by_all_commands(command, trained, tmp_path, capfd):
    bomb, odd, nested = tmp_path / "bomb.ckpt", tmp_path / "odd.ckpt", []
    torch.save({"state_dict": {"a": torch.ones(1)}, "hyper": Evil()}, bomb)
    odd.write_bytes(b"PK\x03\x04 and so on")
    nested.append(nested)
    torch.save({"state_dict": {"a": torch.ones(1)}, "nested": nested}, tmp_path / "nested.ckpt")
    shutil.copytree(trained / "ours.ckpt", tmp_path / "folder.ckpt")
    torch.save(Evil(), tmp_path / "folder.ckpt" / "meta.pt")
    (tmp_path / "empty").mkdir()
    torch.save({"epoch": 1}, tmp_path / "nothing.pt")
    for path in sorted(tmp_path.iterdir()):
        arguments = [command, path] if command == "inspect" else [command, path, tmp_path / "out"]
        assert smp(*arguments) == 2, path
        out, err = capfd.readouterr()
        assert "executed" not in out
        assert err.startswith(f"smp {command}: "), err
        assert "Traceback" not in err
    assert not (tmp_path / "out").exists()


def test_nothing_is_overwritten_unless_told(trained, tmp_path, capsys):
    (tmp_path / "out").write_text("precious")
    arguments = ("import", trained / "plain.ckpt", tmp_path / "out", "--quiet")
    assert smp(*arguments) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert (tmp_path / "out").read_text() == "precious"
    assert smp(*arguments, "--overwrite") == 0
    assert smp("verify", tmp_path / "out") == 0
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter").write_text("precious")
    assert smp("import", trained / "plain.ckpt", tmp_path / "home", "--overwrite") == 2
    shutil.copy(trained / "plain.ckpt", tmp_path / "home" / "here.ckpt")
    for target in (tmp_path / "home", tmp_path / "home" / "here.ckpt"):
        assert smp("import", tmp_path / "home" / "here.ckpt", target, "--overwrite") == 2
    assert (tmp_path / "home" / "letter").read_text() == "precious"


def test_an_interrupted_write_leaves_nothing(trained, tmp_path, monkeypatch, capsys):
    def interrupt(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("smp_strategy.checkpoint.convert.safetensors.SafetensorsFile.write", interrupt)
    assert smp("export", trained / "ours.ckpt", tmp_path / "out") == 130
    assert list(tmp_path.iterdir()) == []
