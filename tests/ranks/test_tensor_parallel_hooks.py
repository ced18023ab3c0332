"""What hooks see of split layers: whole weights and gradients, on all ranks alike, from their first use on."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from smp_strategy.errors import UnsupportedError
from smp_strategy.testing import run_ranks
from tests.ranks.test_tensor_parallel_engine import Setting, Text, assert_close, batch_of, built, engine_for, train

LAYOUTS = {
    "t2": Setting(2),
    "t2 pp2": Setting(2, pp=2),
    "t2 sdp2": Setting(2, dp=2, options=(("sharded_data_parallel_degree", 2),)),
    "t2 zero1": Setting(2, dp=2, options=(("shard_optimizer_state", True),)),
}


def looks(model: Text) -> Any:
    """What a hook may read, and what it may do: sizes first, which have no values."""
    layer = model.blocks[0].mlp[0]
    found = [
        layer.weight.numel(),
        tuple(model.blocks[3].mlp[2].weight.shape),
        sum(p.numel() for p in model.parameters()),
    ]
    found.append(layer.weight.norm().item())
    found.append(torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm().item())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
            parameter.grad.mul_(0.5)
        layer.bias[20] = 7.0  # of the second part
    found.append(model.state_dict()["blocks.0.mlp.0.bias"][18:22].tolist())
    return found


def gradients_of(model: Text, setting: Setting) -> None:
    for replica in range(setting.dp):
        (model.loss(batch_of(0, replica)) / setting.dp).backward()


def run_hook(setting: Setting) -> Any:
    model, optimizer = built()
    setting = setting._replace(microbatches=1)
    engine = engine_for(setting, model, optimizer)
    engine.gradients_are_seen = True
    result = engine.train_step(model.loss, batch_of(0, engine.mesh.dp_rank), loss_of=lambda loss: loss)
    result.commit(torch.ones(()), reduce=True)
    shadow: dict[str, Tensor] = {}
    engine.run_hook(lambda: None)  # one that uses nothing
    engine.run_hook(lambda: shadow.update({name: each.detach().clone() for name, each in model.named_parameters()}))
    found = engine.run_hook(lambda: looks(model))
    engine.begin_update(optimizer)
    optimizer.step()
    engine.end_update(optimizer)

    def distance() -> float:
        return sum((each - shadow[name]).abs().sum().item() for name, each in model.named_parameters())

    found.append(engine.run_hook(distance))
    found.append(engine.run_hook(lambda: model.loss(batch_of(1, 0)).item()))
    return found, engine.full_state_dict()


@pytest.mark.parametrize("name", LAYOUTS)
def test_hooks_see_and_change_what_one_process_has(name):
    setting = LAYOUTS[name]
    ranks = run_ranks(run_hook, setting.ranks, setting)
    model, optimizer = built()
    gradients_of(model, setting)
    shadow = {each: parameter.detach().clone() for each, parameter in model.named_parameters()}
    expected = looks(model)
    optimizer.step()
    expected.append(sum((p - shadow[each]).abs().sum().item() for each, p in model.named_parameters()))
    expected.append(model.loss(batch_of(1, 0)).item())
    for found, _ in ranks:
        assert found[:3] == expected[:3]
        for mine, theirs in zip(found[3:], expected[3:], strict=True):
            assert mine == pytest.approx(theirs, rel=1e-4)
    assert_close(ranks[0][1], model.state_dict())


def run_on_some_ranks(setting: Setting) -> str:
    model, optimizer = built()
    engine = engine_for(setting, model, optimizer)
    train(engine, model, optimizer, range(1), None)
    with pytest.raises(UnsupportedError) as caught:
        engine.run_hook(lambda: model.blocks[0].mlp[0].weight.norm() if engine.mesh.tp_rank == 0 else None)
    return str(caught.value)


@pytest.mark.parametrize("name", ["t2", "t2 sdp2"])
def test_a_hook_that_only_some_ranks_run_is_an_error_on_all_of_them(name):
    setting = LAYOUTS[name]
    for told in run_ranks(run_on_some_ranks, setting.ranks, setting):
        assert "on 1 of 2 ranks that have parts" in told


def run_copy(setting: Setting) -> Any:
    model, optimizer = built()
    engine = engine_for(setting, model, optimizer)
    train(engine, model, optimizer, range(1), None)
    copied = engine.run_hook(lambda: copy.deepcopy(model.blocks[0].mlp))
    return {name: value.clone() for name, value in copied.state_dict().items()}, engine.full_state_dict()


def test_a_copy_that_a_hook_makes_has_all_values():
    for copied, _ in (ranks := run_ranks(run_copy, 2, LAYOUTS["t2"])):
        for name, value in copied.items():
            assert_close(value, ranks[0][1][f"blocks.0.mlp.{name}"])
