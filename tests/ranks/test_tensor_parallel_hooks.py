"""What hooks see of split layers: whole weights and gradients, on all ranks alike, from their first use on."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from smp_strategy.distributed import deadlock as watch
from smp_strategy.distributed.failure import publish_own
from smp_strategy.errors import ApartError, PeerFailedError, UnsupportedError
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
    return found, engine.saved.full_state_dict()


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


def calls_the_model(engine: Any, model: Text, tp_rank: int) -> None:
    engine.run_hook(lambda: model.loss(batch_of(1, 0)) if tp_rank == 0 else None)


def calls_the_model_or_looks(engine: Any, model: Text, tp_rank: int) -> None:
    layer = model.blocks[0].mlp[0]
    engine.run_hook(lambda: model.loss(batch_of(1, 0)) if tp_rank == 0 else layer.weight.norm())


def calls_it_once_more_before_all_do(engine: Any, model: Text, tp_rank: int) -> None:
    engine.run_hook(lambda: [model.loss(batch_of(1, 0)) for _ in range(1 + tp_rank)])


def calls_it_with_other_shapes(engine: Any, model: Text, tp_rank: int) -> None:
    batch = {name: each[: 2 + tp_rank] for name, each in batch_of(1, 0).items()}
    engine.run_hook(lambda: model.loss(batch))


def evaluates_instead_of_training(engine: Any, model: Text, tp_rank: int) -> None:
    if tp_rank == 0:
        engine.eval_step(model.loss, batch_of(1, 0))
    engine.train_step(model.loss, batch_of(1, 0), loss_of=lambda loss: loss)


def run_apart(setting: Setting, part: Any) -> str:
    watch.PATIENCE_SECONDS, watch.PAUSE_SECONDS = 1.5, 0.2  # type: ignore[misc]
    model, optimizer = built()
    engine = engine_for(setting, model, optimizer)
    train(engine, model, optimizer, range(2), None)
    engine.eval_step(model.loss, batch_of(1, 0))

    def go_on() -> None:
        part(engine, model, engine.mesh.tp_rank)
        train(engine, model, optimizer, range(1), None)

    with pytest.raises((ApartError, PeerFailedError, UnsupportedError)) as caught:
        go_on()
    publish_own(caught.value)  # as Lightning and Accelerate do, for ranks that only lose their connection
    return str(caught.value)


@pytest.mark.parametrize("name", ["t2", "t2 pp2"])
@pytest.mark.parametrize(
    "part",
    [
        calls_the_model,
        calls_the_model_or_looks,
        calls_it_once_more_before_all_do,
        calls_it_with_other_shapes,
        evaluates_instead_of_training,
    ],
)
def test_ranks_that_part_are_told_so_instead_of_adding_up_what_does_not_belong_together(part, name):
    setting = LAYOUTS[name]
    for told in run_ranks(run_apart, setting.ranks, setting, part, timeout=60):
        # Who compares first is a matter of time: the calls, or at the end of the hook what was used in it.
        reasons = ("different calls", "wait for each other for ever", "on 1 of 2 ranks that have parts")
        assert any(reason in told for reason in reasons), told


def run_step_that_sends_nothing() -> list[float]:
    model, optimizer = built()
    engine = engine_for(LAYOUTS["t2"], model, optimizer)
    found = []
    for _ in range(3):
        found.append(engine.eval_step(lambda batch: batch["tokens"].float().mean(), batch_of(0, 0)).outputs)
        found.append(engine.eval_step(model.loss, batch_of(0, 0)).outputs)
    return [torch.as_tensor(each).float().mean().item() for each in found]


def test_steps_may_use_layers_that_are_split_or_not():
    model, _ = built()
    expected = [batch_of(0, 0)["tokens"].float().mean().item(), model.loss(batch_of(0, 0)).item()] * 3
    for found in run_ranks(run_step_that_sends_nothing, 2):
        assert found == pytest.approx(expected, rel=1e-5)


def run_copy(setting: Setting) -> Any:
    model, optimizer = built()
    engine = engine_for(setting, model, optimizer)
    train(engine, model, optimizer, range(1), None)
    copied = engine.run_hook(lambda: copy.deepcopy(model.blocks[0].mlp))
    return {name: value.clone() for name, value in copied.state_dict().items()}, engine.saved.full_state_dict()


def test_a_copy_that_a_hook_makes_has_all_values():
    for copied, _ in (ranks := run_ranks(run_copy, 2, LAYOUTS["t2"])):
        for name, value in copied.items():
            assert_close(value, ranks[0][1][f"blocks.0.mlp.{name}"])
