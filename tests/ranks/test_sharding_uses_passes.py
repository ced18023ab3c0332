"""What can happen in a pass with sharded units: failures, microbatches in flight, other paths, second derivatives."""

import gc
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from smp_strategy.testing import run_ranks
from tests.ranks.sharded_models import WIDTH, Model, batch
from tests.ranks.sharded_training import Setting, Sharded, assert_equal, gradients_of, plain_gradients


def fail_and_go_on(sharded: Sharded) -> Any:
    def fails(x: Tensor) -> Tensor:
        raise ValueError("not today")

    block = sharded.model.blocks[1]
    works, block.forward = block.forward, partial(sharded._call, "blocks.1", fails)  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="not today"):
        sharded.model(batch(dist.get_rank()))
    block.forward = works  # type: ignore[method-assign]
    sharded.uses.end_pass()
    assert sharded.live_numel == 0

    loss = sharded.model(batch(dist.get_rank()))
    hook = loss.grad_fn.next_functions[0][0].register_prehook(lambda _: fails(loss))
    with pytest.raises(ValueError, match="not today"):
        loss.backward()
    hook.remove()
    sharded.uses.end_pass()
    assert sharded.live_numel == 0
    for unit in sharded.units.values():
        unit.begin_gradients()
    backward_from_a_block(sharded)
    for unit in sharded.units.values():
        unit.begin_gradients()
    sharded.model(batch(dist.get_rank())).backward()
    sharded.uses.end_pass()


def backward_from_a_block(sharded: Sharded) -> None:
    """A backward that fails in the middle, with a unit gathered."""
    loss = sharded.model(batch(dist.get_rank()))

    def stop(gradient: Tensor) -> None:
        raise ValueError("not today")

    handle = sharded.model.blocks[1].down.bias.register_hook(stop)
    with pytest.raises(ValueError, match="not today"):
        loss.backward()
    handle.remove()
    assert sharded.live_numel > 0
    sharded.uses.end_pass()
    assert sharded.live_numel == 0


def of_two_ranks(model: Model) -> Iterator[Tensor]:
    for rank in range(2):
        yield model(batch(rank))


def test_a_function_or_a_backward_that_fails_leaves_nothing_behind():
    outcomes = run_ranks(gradients_of, 2, Model, fail_and_go_on, Setting(2, 2))
    for outcome in outcomes:
        assert_equal(outcome.gradients, plain_gradients(Model, of_two_ranks))


def two_in_flight(sharded: Sharded) -> Any:
    """Microbatches that take turns, like a pipeline's."""
    for _ in range(3):
        for unit in sharded.units.values():
            unit.begin_gradients()
        hidden, losses = [], []
        for turn in range(2):
            sharded.token = turn
            hidden.append(sharded.model.blocks[0](sharded.model.first(batch(2 * turn + dist.get_rank()))))
        for turn in range(2):
            sharded.token = turn
            losses.append(sharded.model.head(sharded.model.blocks[1](hidden[turn])).square().mean())
        for turn in range(2):
            losses[turn].backward()
        sharded.uses.end_pass()
    return sharded.reductions[-8:]


def of_two_in_flight(model: Model) -> Iterator[Tensor]:
    for number in range(4):
        yield model.head(model.blocks[1](model.blocks[0](model.first(batch(number))))).square().mean()


def test_each_microbatch_is_reduced_by_itself_while_others_are_in_flight():
    for outcome in run_ranks(gradients_of, 2, Model, two_in_flight, Setting(2, 2)):
        assert_equal(outcome.gradients, plain_gradients(Model, of_two_in_flight))
        assert outcome.seen == ["head", "blocks.1", "blocks.0", "first"] * 2


def reduce_late(sharded: Sharded) -> Any:
    for _ in range(2):
        for unit in sharded.units.values():
            unit.begin_gradients()
        loss = sharded.model(batch(dist.get_rank()))
        parameters = list(sharded.model.parameters())
        # Part of the gradients first, like zero-bubble schedules.
        loss.backward(retain_graph=True, inputs=parameters[:5])
        loss.backward(inputs=parameters[5:])
        sharded.uses.end_pass()
    return sharded.reductions[-6:]


def test_a_backward_in_parts_is_reduced_at_the_end_and_once():
    for outcome in run_ranks(gradients_of, 2, Model, reduce_late, Setting(2, 2, reduces_early=False)):
        assert_equal(outcome.gradients, plain_gradients(Model, of_two_ranks))
        assert outcome.seen == ["first", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "head"]


def skip_on_one_rank(sharded: Sharded) -> Any:
    for step in range(3):
        for unit in sharded.units.values():
            unit.begin_gradients()
        sharded.gathers.clear()
        x = sharded.model.first(batch(dist.get_rank()))
        if dist.get_rank() == 1 or step == 0:
            x = sharded.model.blocks[0](x)
        sharded.model.head(x).square().mean().backward()
        sharded.uses.end_pass()
    return sharded.gathers


def of_one_that_skips(model: Model) -> Iterator[Tensor]:
    yield model.head(model.first(batch(0))).square().mean()
    yield model.head(model.blocks[0](model.first(batch(1)))).square().mean()


def test_a_unit_that_one_rank_does_not_use_is_gathered_by_all():
    for outcome in run_ranks(gradients_of, 2, Model, skip_on_one_rank, Setting(2, 2)):
        assert_equal(outcome.gradients, plain_gradients(Model, of_one_that_skips))
        assert outcome.seen == ["first", "blocks.0", "head", "blocks.0", "first"]


def first_derivative(model: Model, x: Tensor) -> Tensor:
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(model(x), x, create_graph=True)
    return gradient.square().sum()


def penalize(sharded: Sharded) -> Any:
    first_derivative(sharded.model, batch(dist.get_rank())).backward()
    sharded.uses.end_pass()


def penalties(model: Model) -> Iterator[Tensor]:
    for rank in range(2):
        yield first_derivative(model, batch(rank))


def test_gradients_of_gradients_need_weights_that_stay():
    for outcome in run_ranks(gradients_of, 2, Model, penalize, Setting(2, 2, gathers_once=True)):
        assert_equal(outcome.gradients, plain_gradients(Model, penalties))
    with pytest.raises(RuntimeError, match="create_graph=True.*sdp_gather=step"):
        run_ranks(gradients_of, 2, Model, penalize, Setting(2, 2))


def give_weight_away(sharded: Sharded) -> Any:
    linear = sharded.model.first
    sharded._call("first", lambda: linear.weight.t())


def test_a_weight_is_no_result():
    with pytest.raises(RuntimeError, match=r"`first` returns one of its weights, or a view of one, of shape \[8, 8\]"):
        run_ranks(gradients_of, 2, Model, give_weight_away, Setting(2, 2))


def watch_lifetime(sharded: Sharded) -> Any:
    gc.collect()
    gc.disable()
    for _ in range(2):
        x = batch(dist.get_rank()).requires_grad_()
        hidden = sharded.model.blocks[0](sharded.model.first(x))
        gone = [weakref.ref(hidden), weakref.ref(x)]
        sharded.model.head(hidden).square().mean().backward()
        del hidden, x
        assert [ref() for ref in gone] == [None, None]
        sharded.uses.end_pass()
        # Nor where there is no backward.
        x = batch(dist.get_rank()).requires_grad_()
        sharded.model(x)
        gone = [weakref.ref(x)]
        del x
        assert [ref() for ref in gone] == [None]
        sharded.uses.end_pass()


def test_no_activation_lives_longer_than_its_graph():
    run_ranks(gradients_of, 2, Model, watch_lifetime, Setting(2, 2))


def save_elsewhere(sharded: Sharded) -> Any:
    weights = {tuple(parameter.shape) for parameter in sharded.model.parameters() if parameter.ndim == 2}
    shapes = []

    def save(tensor: Tensor) -> list[Tensor]:
        shapes.append(tuple(tensor.shape))
        return [tensor.detach().clone()]

    for _ in range(2):
        for unit in sharded.units.values():
            unit.begin_gradients()
        with torch.autograd.graph.saved_tensors_hooks(save, lambda saved: saved[0]):
            loss = sharded.model(batch(dist.get_rank()))
        loss.backward()
        sharded.uses.end_pass()
    return [shape for shape in shapes if shape in weights or shape[::-1] in weights], len(shapes)


def test_hooks_around_the_model_get_what_units_save_except_their_weights():
    for outcome in run_ranks(gradients_of, 2, Model, save_elsewhere, Setting(2, 2)):
        assert_equal(outcome.gradients, plain_gradients(Model, of_two_ranks))
        weights, count = outcome.seen
        assert not weights
        assert count > 40


def change_what_is_saved(sharded: Sharded) -> Any:
    def tamper(x: Tensor) -> Tensor:
        y = x * sharded.model.first.weight
        result = y * y
        with torch.no_grad():
            y.add_(1.0)
        return result

    sharded._call("first", tamper, torch.ones(WIDTH)).sum().backward()


def test_autograd_still_notices_that_a_saved_tensor_was_changed():
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run_ranks(gradients_of, 2, Model, change_what_is_saved, Setting(2, 2))
