"""State dicts, files of single ranks, and checkpoints of scripts with SageMaker's functions."""

import os

import pytest
import torch
from smp_checks import LAYOUTS, adamw, assert_same, batches, begin, mine, net, on_ranks, plain, train_step

import smp_strategy.smp as smp
from smp_strategy import CheckpointError, ConfigError, SMPError

SPREAD = ["pp2", "sdp2", "tp2", "pp2 x replicas2"]
ZERO1 = {"shard_optimizer_state": True, "ddp": True}


def steps(model, optimizer, some):
    for batch in some:
        optimizer.zero_grad()
        train_step(model, *mine(batch))
        optimizer.step()


def half_way(parameters, folder, how):
    """Trains two steps, saves; a second run loads before or after its first step, and trains on."""
    model, optimizer = begin(parameters)
    steps(model, optimizer, batches()[:2])
    if how == "full":
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        if smp.rank() == 0:
            smp.save(state, folder / "full", partial=False)
    elif how == "older":  # the form in which parts of optimizers were saved at first
        own = optimizer.local_state_dict()
        part = {f"{number}.{key}": value for number, kept in own.pop("state").items() for key, value in kept.items()}
        smp.save({"model": model.local_state_dict(), "optimizer": {**own, "part": part}}, folder / "part")
    elif how == "local":
        smp.save({"model": model.local_state_dict(), "optimizer": optimizer.local_state_dict()}, folder / "part")
    else:
        smp.save_checkpoint(folder, "two", model=model, optimizer=optimizer, user_content={"step": 2})
    smp.barrier()
    steps(model, optimizer, batches()[2:])
    expected = model.state_dict()
    smp.shutdown()

    for late in (False, True):
        model, optimizer = begin(parameters)
        if late:
            steps(model, optimizer, batches()[:1])
        if how == "checkpoint":
            assert smp.resume_from_checkpoint(folder) == {"step": 2}
        else:
            name = "full" if how == "full" else "part"
            state = smp.load(folder / name, partial=how != "full")
            model.load_state_dict(state["model"], same_partition_load=late)
            optimizer.load_state_dict(state["optimizer"])
        steps(model, optimizer, batches()[2:])
        assert_same(model.state_dict(), expected)
        smp.shutdown()
    return expected


@pytest.mark.parametrize("how", ["full", "local", "checkpoint"])
@pytest.mark.parametrize("layout", SPREAD)
def test_training_goes_on_from_what_was_saved(tmp_path, layout, how):
    ranks, parameters = LAYOUTS[layout]
    _, weights = plain()
    for found in on_ranks(half_way, ranks, parameters, tmp_path, how):
        assert_same(found, weights, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("how", ["full", "local", "older"])
def test_training_goes_on_with_sharded_optimizer_state(tmp_path, how):
    on_ranks(half_way, 2, ZERO1, tmp_path, how)


def part_of_optimizer(parameters):
    model, optimizer = begin(parameters)
    steps(model, optimizer, batches()[:2])
    own, whole = optimizer.local_state_dict(), optimizer.state_dict()
    assert own["param_groups"] == whole["param_groups"]
    for number, kept in own["state"].items():
        assert kept.keys() == whole["state"][number].keys()
        assert all(torch.equal(value, whole["state"][number][key]) for key, value in kept.items())
    return set(own["state"]), set(whole["state"])


@pytest.mark.parametrize("parameters", [LAYOUTS["pp2"][1], ZERO1])
def test_a_part_of_an_optimizer_has_the_form_of_pytorchs(parameters):
    (first, whole), (second, _) = on_ranks(part_of_optimizer, 2, parameters)
    assert first | second == whole
    assert not first & second
    assert first
    assert second


def on_first_replica(parameters, folder):
    model, optimizer = begin(parameters)
    steps(model, optimizer, batches()[:2])
    found = None
    if smp.rdp_rank() == 0:
        found = model.state_dict(), optimizer.state_dict()
        first = model.state_dict(gather_to_rank0=True)
        assert bool(first) == (smp.mp_rank() == 0)
    smp.barrier()
    return found


def test_the_ranks_of_one_replica_may_ask_for_a_state_dict(tmp_path):
    ranks, parameters = LAYOUTS["pp2 x replicas2"]
    found = on_ranks(on_first_replica, ranks, parameters, tmp_path)
    assert [each is None for each in found] == [False, False, True, True]
    twin = net()
    optimizer = adamw(twin.parameters())
    for data, targets in batches()[:2]:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(twin(data), targets).backward()
        optimizer.step()
    for weights, state in found[:2]:
        assert_same(weights, twin.state_dict(), rtol=1e-5, atol=1e-6)
        expected = optimizer.state_dict()
        assert state["param_groups"] == expected["param_groups"]
        assert list(state["state"]) == list(expected["state"])
        for number, kept in expected["state"].items():
            assert_same(state["state"][number], kept, rtol=1e-4, atol=1e-5)


def marked_as_whole(parameters):
    model, _ = begin(parameters)
    state = net().state_dict()
    model.load_state_dict({**state, "_smp_is_partial": False}, strict=True)
    assert_same(model.state_dict(), state)


def test_a_state_dict_may_say_that_it_is_whole():
    on_ranks(marked_as_whole, 1, {})


def whole_again(parameters):
    model, optimizer = begin(parameters)
    steps(model, optimizer, batches()[:2])
    before = model.state_dict()
    model.cpu()
    assert_same(dict(model.module.state_dict()), before)
    steps(model, optimizer, batches()[2:])
    return model.state_dict()


@pytest.mark.parametrize("layout", SPREAD)
def test_a_model_that_was_made_whole_trains_on(layout):
    ranks, parameters = LAYOUTS[layout]
    _, weights = plain()
    for found in on_ranks(whole_again, ranks, parameters):
        assert_same(found, weights, rtol=1e-5, atol=1e-6)


def files(folder, parameters):
    smp.init(parameters)
    smp.save({"rank": smp.rank()}, folder / "some", v3=smp.rdp_size() > 1)
    fifo = folder / f"fifo of {smp.rank()}"
    os.mkfifo(fifo)
    with pytest.raises(CheckpointError, match="is not replaced: it is a FIFO"):
        smp.save({}, fifo, partial=False)
    with pytest.raises(ConfigError, match="a FIFO, but a folder is to be written. Name another one."):
        smp.save({}, fifo / "below", partial=False)
    fifo.unlink()
    smp.barrier()
    assert smp.load(folder / "some", v3=smp.rdp_size() > 1)["rank"] == smp.rank()
    with pytest.raises(CheckpointError, match="There is no file .*other_.*read under the degrees"):
        smp.load(folder / "other")
    smp.barrier()
    return sorted(path.name for path in folder.iterdir())


def test_files_of_single_ranks_have_their_place_in_the_name(tmp_path):
    names = {
        "pp2": ["some_0", "some_1"],
        "tp2": ["some_0_0", "some_0_1"],
        "pp2 x replicas2": ["some_0_0_0", "some_0_0_1", "some_1_0_0", "some_1_0_1"],
    }
    for layout, expected in names.items():
        ranks, parameters = LAYOUTS[layout]
        folder = tmp_path / layout
        folder.mkdir()
        assert on_ranks(files, ranks, folder, parameters)[0] == expected


def local_parts(parameters):
    model, optimizer = begin(parameters)
    assert not model.partitioned
    hooks = []
    model.register_post_partition_hook(lambda *given: hooks.append(("partition", *given)))
    handle = model.register_post_step_hook(lambda *given: hooks.append(("step", *given)))
    train_step(model, *batches()[0])
    handle.remove()
    train_step(model, *batches()[0])
    assert hooks == [("partition", model, optimizer), ("step", model, optimizer)]
    assert model.partitioned
    assert model.get_module() is model.module
    names = [name for name, _ in model.local_named_parameters()]
    assert len(names) == len(list(model.local_parameters()))
    assert len(list(model.parameters())) == len(list(net().parameters()))
    return names, [name for name, _ in model.local_named_modules()], model.local_state_dict()["_smp_is_partial"]


def test_stages_tell_what_they_hold():
    (first, modules, is_partial), (second, _, _) = on_ranks(local_parts, 2, LAYOUTS["pp2"][1])
    assert sorted(first + second) == sorted(name for name, _ in net().named_parameters())
    assert "outlet" in modules
    assert "" in modules
    assert is_partial


def split_parts(parameters):
    model, _ = begin(parameters)
    train_step(model, *batches()[0])
    found = {name for name, each in model.named_parameters() if model.is_distributed_parameter(each)}
    assert len(list(model.distributed_modules())) == 8
    assert not list(model.default_reducer_named_parameters())
    assert all(model.is_scaled_batch_parameter(each) for each in model.parameters())
    return found


def test_split_layers_are_told():
    found = on_ranks(split_parts, 2, LAYOUTS["tp2"][1])[0]
    assert found == {f"blocks.{block}.{name}" for block in range(4) for name in ("0.weight", "0.bias", "3.weight")}


def saves(parameters, folder):
    model, optimizer = begin(parameters)
    steps(model, optimizer, batches()[:2])
    for partial in (True, False):
        with pytest.raises(SMPError, match="/dev/null is a device, but a folder is to be written. Name another one."):
            smp.save_checkpoint("/dev/null/x", "two", partial=partial, model=model, optimizer=optimizer)
    smp.save_checkpoint(folder, "two", model=model, optimizer=optimizer)


def resumes(parameters, folder):
    model, optimizer = begin(parameters)
    smp.resume_from_checkpoint(folder, "two")
    steps(model, optimizer, batches()[2:])
    return model.state_dict()


@pytest.mark.parametrize("layout", ["sdp2", "tp2", "single"])
def test_a_checkpoint_is_read_under_another_layout(tmp_path, layout):
    on_ranks(saves, 2, LAYOUTS["pp2"][1], tmp_path)
    ranks, parameters = LAYOUTS[layout]
    _, weights = plain()
    for found in on_ranks(resumes, ranks, parameters, tmp_path):
        assert_same(found, weights, rtol=1e-5, atol=1e-6)


def half(parameters, folder):
    parameters = parameters | {"fp16": True}
    rules = {"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": 2.0**10, "scale_window": 2}}
    smp.init(parameters)
    model = smp.DistributedModel(net())
    optimizer = smp.DistributedOptimizer(adamw(model.parameters()), **rules)
    steps(model, optimizer, batches())
    assert optimizer.loss_scale == 2.0**12
    smp.save_checkpoint(folder, "four", model=model, optimizer=optimizer)
    state = optimizer.state_dict()
    smp.shutdown()
    smp.init(parameters)
    model = smp.DistributedModel(net())
    optimizer = smp.DistributedOptimizer(adamw(model.parameters()), **rules)
    smp.resume_from_checkpoint(folder)
    assert optimizer.loss_scale == 2.0**12
    optimizer.load_scaler_state_dict({**state["loss_scaler"], "scale": 4.0})
    assert optimizer.loss_scale == 4.0
    optimizer.load_state_dict(state)
    assert optimizer.loss_scale == 2.0**12


def test_checkpoints_have_the_loss_scale(tmp_path):
    on_ranks(half, 2, LAYOUTS["pp2"][1], tmp_path)
