"""Sets of files as SageMaker's library writes them, made here by cutting a model in the way that it does."""

from collections import OrderedDict

import pytest
import torch
from torch import nn

from smp_strategy.checkpoint.convert.detect_format import open_checkpoint
from smp_strategy.checkpoint.convert.read_sagemaker import open_sagemaker
from smp_strategy.errors import CheckpointError
from tests.unit.checkpoint.convert.test_join_tp import flat_files


class Evil:
    def __reduce__(self):
        return (print, ("executed",))


@pytest.fixture
def model():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 6), nn.BatchNorm1d(6))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 3)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def stage_of(name):
    return 0 if name.startswith("0.") else 1


def cut(name, tensor, tp):
    """Rank ``tp`` of 2 has half of the columns of the second layer's weight."""
    return tensor.chunk(2, 1)[tp].clone() if name == "1.weight" else tensor


def write(path, model, optimizer, *, num_splits=1, names=True):
    path.mkdir()
    state = model.state_dict()
    named = dict(model.named_parameters())
    for pp in range(2):
        for tp in range(num_splits):
            mine = {name: value for name, value in state.items() if stage_of(name) == pp}
            parts = {name: cut(name, value, tp) if num_splits > 1 else value for name, value in mine.items()}
            torch.save({**parts, "_smp_is_partial": True}, path / f"model_{pp}_{tp}.pt")
            own = [name for name in named if name in mine]
            kept = {
                (name if names else number): {
                    key: cut(name, value, tp) if num_splits > 1 and value.ndim else value
                    for key, value in optimizer.state[named[name]].items()
                }
                for number, name in enumerate(own)
            }
            group = {**optimizer.state_dict()["param_groups"][0], "params": list(kept)}
            torch.save(
                {"state": kept, "param_groups": [group], "_smp_is_partial": True}, path / f"optimizer_{pp}_{tp}.pt"
            )


def check(found, model, optimizer):
    state = model.state_dict()
    assert found.weights.keys() == state.keys()
    for name, value in state.items():
        assert found.weights[name].read().equal(value)
        assert found.weights[name].shape == tuple(value.shape)
    if optimizer is not None:
        [kept] = found.optimizers
        assert kept.groups[0]["params"] == [name for name, _ in model.named_parameters()]
        for name, parameter in model.named_parameters():
            for key, value in optimizer.state[parameter].items():
                assert kept.state[name][key].read().equal(value), (name, key)


def test_stages_are_put_together(model, tmp_path):
    write(tmp_path / "tag_partial", *model)
    (tmp_path / "newest").write_text("tag\n")
    check(open_checkpoint(tmp_path), *model)
    check(open_sagemaker(tmp_path / "tag_partial"), *model)


def test_the_newest_may_be_a_whole_file(model, tmp_path):
    torch.save(model[0].state_dict(), tmp_path / "last")
    (tmp_path / "newest").write_text("last")
    check(open_checkpoint(tmp_path), model[0], None)
    (tmp_path / "newest").write_text("../last")
    with pytest.raises(CheckpointError, match="damaged"):
        open_checkpoint(tmp_path)


def test_replicas_may_have_shares_of_the_state(model, tmp_path):
    write(tmp_path / "set", *model)
    for pp in range(2):
        file = tmp_path / "set" / f"optimizer_{pp}_0.pt"
        whole = torch.load(file, weights_only=True)
        for replica in range(2):
            names = list(whole["state"])[replica::2]
            share = {"state": {name: whole["state"][name] for name in names}, "param_groups": whole["param_groups"]}
            torch.save(share, tmp_path / "set" / f"optimizer_{pp}_0_{replica}.pt")
        file.unlink()
    check(open_sagemaker(tmp_path / "set"), *model)


def test_parts_of_split_layers_are_put_together(model, tmp_path):
    write(tmp_path / "set", *model, num_splits=2)
    like = {name: tuple(value.shape) for name, value in model[0].state_dict().items()}
    check(open_sagemaker(tmp_path / "set", like=like), *model)
    with pytest.raises(CheckpointError, match="`1.weight`.*--like"):
        open_sagemaker(tmp_path / "set")


def test_numbers_are_left_out_where_they_could_be_buffers(model, tmp_path):
    write(tmp_path / "set", *model, names=False)
    found = open_sagemaker(tmp_path / "set")
    check(found, model[0], None)
    assert found.optimizers == []
    assert "optimizer_1_0.pt" in found.remarks[0]


def test_numbers_of_a_stage_are_found_among_its_own_weights(model, tmp_path):
    plain = nn.Sequential(*model[0][:2])
    write(tmp_path / "set", plain, model[1], names=False)
    check(open_sagemaker(tmp_path / "set"), plain, model[1])


def test_weights_below_a_key_are_found(tmp_path):
    torch.save({"model": OrderedDict(a=torch.ones(2)), "epoch": 3}, tmp_path / "model_0_0.pt")
    assert open_sagemaker(tmp_path).weights["a"].read().equal(torch.ones(2))


@pytest.mark.parametrize("missing", ["model_0_1.pt", "model_1_0.pt"])
def test_a_set_that_lacks_a_file_is_refused(model, missing, tmp_path):
    write(tmp_path / "set", *model, num_splits=2)
    (tmp_path / "set" / missing).unlink()
    with pytest.raises(CheckpointError, match=f"{missing} is lacking"):
        open_sagemaker(tmp_path / "set")


def test_hostile_and_damaged_files_are_refused(model, tmp_path, capsys):
    write(tmp_path / "set", *model)
    file = tmp_path / "set" / "model_1_0.pt"
    torch.save({"a": Evil()}, file)
    with pytest.raises(CheckpointError, match="model_1_0.pt cannot be loaded without running code"):
        open_sagemaker(tmp_path / "set")
    file.write_bytes(b"nothing of that kind")
    with pytest.raises(CheckpointError, match="model_1_0.pt .*is damaged"):
        open_sagemaker(tmp_path / "set")
    torch.save([1, 2], file)
    with pytest.raises(CheckpointError, match="no dict"):
        open_sagemaker(tmp_path / "set")
    assert "executed" not in capsys.readouterr().out


def write_flat(path, model, num_files):
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    buffers = dict(model.named_buffers())
    placeholders = {name: torch.empty(0) for name in parameters}
    torch.save({"module": {**buffers, **placeholders}}, path / "model_0.pt")
    for number, flat in enumerate(flat_files(parameters, num_files)):
        torch.save({"partition_count": num_files, "fp32_flat_groups": [flat]}, path / f"optimizer_{number}.pt")
    shapes = {name: parameter.shape for name, parameter in parameters.items()}
    torch.save({"buffer_names": list(buffers), "param_shapes": shapes}, path / "user_content.pt")


@pytest.mark.parametrize("num_files", [1, 2, 4])
def test_weights_come_out_of_the_flat_groups_of_sharded_data_parallelism(model, num_files, tmp_path):
    write_flat(tmp_path, model[0], num_files)
    found = open_sagemaker(tmp_path)
    check(found, model[0], None)
    assert "optimizer" in found.remarks[0]


def test_flat_groups_that_are_not_complete_are_refused(model, tmp_path):
    write_flat(tmp_path, model[0], 3)
    (tmp_path / "optimizer_2.pt").unlink()
    with pytest.raises(CheckpointError, match="3 optimizer files are needed"):
        open_sagemaker(tmp_path)
    write_flat(tmp_path, model[0], 2)
    (tmp_path / "user_content.pt").unlink()
    with pytest.raises(CheckpointError, match="param_shapes"):
        open_sagemaker(tmp_path)
