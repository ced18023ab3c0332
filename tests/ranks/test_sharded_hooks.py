"""Hooks of the user see whole weights and gradients, from their first use on; elsewhere resting ones are refused."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from smp_strategy.config.config import SMPConfig
from smp_strategy.data_parallel.sharded_module import ShardedModule
from smp_strategy.engine.engine import Engine
from smp_strategy.errors import UnsupportedError
from smp_strategy.testing import run_ranks
from tests.parity.models import MODELS, batch_for

NAME = "gpt2"
LAYOUTS = [(1, 2), (2, 4)]


def started(pp: int) -> tuple[Engine, Any]:
    """After a training step whose gradients are handed over."""
    torch.manual_seed(0)
    model = MODELS[NAME]()
    options = {"pipeline_parallel_degree": pp, "microbatches": 1, "sharded_data_parallel_degree": 2}
    engine = Engine(SMPConfig(**options))
    engine.attach(model)
    result = engine.train_step(model.loss, batch_for(NAME, engine.mesh.dp_rank, 4), loss_of=lambda loss: loss)
    result.commit(torch.ones(()), reduce=True)
    return engine, model


def plain() -> Any:
    torch.manual_seed(0)
    model = MODELS[NAME]()
    for replica in range(2):
        (model.loss(batch_for(NAME, replica, 4)) / 2).backward()
    return model


def with_hook(pp: int, hook: Callable[[Any], Any]) -> Any:
    engine, model = started(pp)
    result = engine.run_hook(lambda: hook(model))
    state = engine.saved.full_state_dict()
    engine.close()
    return result, state


def norms(model: Any) -> list[float]:
    return [tensor.norm().item() for each in model.parameters() for tensor in (each, each.grad)]


def halve(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)


def of_a_copy(model: Any) -> list[float]:
    return [parameter.sum().item() for parameter in copy.deepcopy(model).parameters()]


def of_a_call(model: Any) -> float:
    with torch.no_grad():
        return model.loss(batch_for(NAME, 7, 4)).item()


@pytest.mark.parametrize(("pp", "world"), LAYOUTS)
@pytest.mark.parametrize("hook", [norms, halve, of_a_copy, of_a_call])
def test_a_hook_does_what_it_does_in_one_process(hook, pp, world):
    model = plain()
    expected = hook(model)
    ranks = run_ranks(with_hook, world, pp, hook)
    for found, _ in ranks:
        assert found == (None if expected is None else pytest.approx(expected, rel=1e-6))
    for name, value in model.state_dict().items():
        torch.testing.assert_close(ranks[0][1][name], value, rtol=0, atol=0, msg=name)


def scaled_gradients(pp: int) -> list[float]:
    engine, model = started(pp)

    def scale() -> None:
        for parameter in model.parameters():
            parameter.grad.mul_(2.0)

    engine.run_hook(scale)
    found = engine.run_hook(lambda: [parameter.grad.norm().item() for parameter in model.parameters()])
    engine.close()
    return found


@pytest.mark.parametrize(("pp", "world"), LAYOUTS)
def test_what_a_hook_does_to_gradients_stays(pp, world):
    expected = [2 * parameter.grad.norm().item() for parameter in plain().parameters()]
    for found in run_ranks(scaled_gradients, world, pp):
        assert found == (None if expected is None else pytest.approx(expected, rel=1e-6))


def uses(pp: int) -> tuple[list[bool], list[str]]:
    engine, model = started(pp)
    sharded = engine.local_model.holdings.sharded
    assert isinstance(sharded, ShardedModule)
    parameter = next(each for each in model.parameters() if sharded.has(each))

    def was_whole_after(use: Callable[[], Any]) -> bool:
        def hook() -> bool:
            use()
            return sharded.is_whole

        return engine.run_hook(hook)

    shapes = lambda: [each.shape for each in model.parameters()]  # noqa: E731
    found = [was_whole_after(shapes), was_whole_after(lambda: parameter.sum().item()), sharded.is_whole]
    refused = []
    for use in (lambda: parameter.sum(), lambda: copy.deepcopy(model), lambda: parameter.grad.norm()):
        with pytest.raises(UnsupportedError) as caught:
            use()
        refused.append(str(caught.value))
    engine.close()
    return found, refused


def test_nothing_is_gathered_for_a_hook_that_does_not_look_and_resting_parameters_are_refused_elsewhere():
    for found, refused in run_ranks(uses, 2, 1):
        assert found == [False, True, False]
        needs = "needs the values of a parameter that is spread over ranks"
        assert [needs in message for message in refused] == [True, True, False]
        assert "`linalg_vector_norm` of a gradient of shape" in refused[2]
