"""Gradient shards are added up over replicas once per step, while backward goes on, and whatever ranks guess wrong."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from smp_strategy.testing import run_ranks
from tests.ranks.sharded_models import Model, batch
from tests.ranks.sharded_training import (
    Setting,
    Sharded,
    assert_equal,
    gradients_of,
    made,
    one_behind_the_other,
    plain_gradients,
)

TWO_BY_TWO = Setting(4, 2)
DEALT_OUT = Setting(4, 2, deals_out=True)
Paths = Callable[[Model, Tensor, int], Tensor]
"""What a rank computes, by its number."""


def everything(model: Model, x: Tensor, rank: int) -> Tensor:
    return model(x)


def other_orders(model: Model, x: Tensor, rank: int) -> Tensor:
    """The shard groups, ranks 0 and 1, and 2 and 3, take the blocks in other orders, and not the same ones."""
    x = model.first(x)
    for number in ((0, 1, 2), (3, 2, 0))[rank // 2]:
        x = x + model.blocks[number](x)
    return model.head(x).square().mean()


def all_differ(model: Model, x: Tensor, rank: int) -> Tensor:
    x = model.first(x)
    for number in range(rank, 3):
        x = x + model.blocks[number](x)
    return x.square().mean() if rank == 2 else model.head(x).square().mean()


def watch_sums(sharded: Sharded) -> list[str]:
    """Notes which unit's sum begins when, and when reductions do."""
    seen: list[str] = []
    names = {id(unit): name for name, unit in sharded.units.items()}
    for unit in sharded.units.values():
        take, reduce = unit.take_gradients, unit.reduce

        def watched_take(take: Any = take, name: str = names[id(unit)]) -> Any:
            seen.append(f"sum {name}")
            return take()

        def watched_reduce(factor: float = 1.0, reduce: Any = reduce, name: str = names[id(unit)]) -> None:
            seen.append(f"reduce {name}")
            reduce(factor)

        unit.take_gradients, unit.reduce = watched_take, watched_reduce  # type: ignore[method-assign]
    return seen


def train_on(paths: Paths, num_passes: int, says_last: bool) -> Callable[[Sharded], list[list[str]]]:
    def work(sharded: Sharded) -> list[list[str]]:
        seen, steps = watch_sums(sharded), []
        for _ in range(3):
            for unit in sharded.units.values():
                unit.begin_gradients()
            for turn in range(num_passes):
                loss = paths(sharded.model, batch(4 * turn + dist.get_rank()), dist.get_rank())
                sharded.uses.is_last = says_last and turn == num_passes - 1
                loss.backward()
                sharded.uses.end_pass()
            seen.append("end")
            sharded.uses.finish_sums()
            steps.append(seen[:])
            seen.clear()
        return steps

    return work


def expected_gradients(paths: Paths, num_passes: int) -> dict[str, Tensor]:
    """Added up pass by pass, in each of them over the ranks of a group, and then over the groups."""

    def of_group(group: int) -> dict[str, Tensor]:
        found: dict[str, list[Tensor]] = {}
        for turn in range(num_passes):
            for rank in (2 * group, 2 * group + 1):
                model = made(Model)
                paths(model, batch(4 * turn + rank), rank).backward()
                for name, parameter in model.named_parameters():
                    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                    found.setdefault(name, []).append(gradient)
        return {name: one_behind_the_other(gradients) for name, gradients in found.items()}

    first, second = of_group(0), of_group(1)
    return {name: first[name] + second[name] for name in first}


@pytest.mark.parametrize("setting", [TWO_BY_TWO, DEALT_OUT])
@pytest.mark.parametrize("says_last", [True, False])
@pytest.mark.parametrize("num_passes", [1, 3])
@pytest.mark.parametrize("paths", [everything, other_orders])
def test_gradients_are_sums_over_groups_and_replicas_bit_for_bit(paths, num_passes, says_last, setting):
    expected = expected_gradients(paths, num_passes)
    for outcome in run_ranks(gradients_of, 4, Model, train_on(paths, num_passes, says_last), setting):
        assert_equal(outcome.gradients, expected)
        for step in outcome.seen:
            assert sum(event.startswith("sum") for event in step) == 6, "every unit's sum begins once"


@pytest.mark.parametrize("setting", [TWO_BY_TWO, DEALT_OUT])
def test_ranks_that_differ_in_everything_get_the_same_sums(setting):
    expected = expected_gradients(all_differ, 2)
    outcomes = run_ranks(gradients_of, 4, Model, train_on(all_differ, 2, True), setting)
    for outcome in outcomes:
        assert_equal(outcome.gradients, outcomes[0].gradients)
        torch.testing.assert_close(outcome.gradients, expected, rtol=1e-6, atol=1e-7)


def test_a_sum_begins_when_its_unit_is_reduced():
    units = ["head", "blocks.3", "blocks.2", "blocks.1", "blocks.0", "first"]
    for outcome in run_ranks(gradients_of, 4, Model, train_on(everything, 2, True), TWO_BY_TWO):
        for step in outcome.seen:
            assert step[6:] == [event for name in units for event in (f"reduce {name}", f"sum {name}")] + ["end"]


def test_without_a_word_about_the_last_backward_sums_begin_when_they_are_asked_for():
    for outcome in run_ranks(gradients_of, 4, Model, train_on(everything, 2, False), TWO_BY_TWO):
        for step in outcome.seen:
            assert all(event.startswith("reduce") for event in step[:12])
            assert step[12] == "end"


def backwards_through(model: Model, x: Tensor, rank: int) -> Tensor:
    """In another order than that of the units."""
    x = model.first(x)
    for block in reversed(model.blocks):
        x = x + block(x)
    return model.head(x).square().mean()


def test_the_order_of_sums_is_that_of_the_reductions_of_the_step_before():
    used = ["head", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "first"]
    for outcome in run_ranks(gradients_of, 4, Model, train_on(backwards_through, 1, True), TWO_BY_TWO):
        for step in outcome.seen[1:]:
            assert step == [event for name in used for event in (f"reduce {name}", f"sum {name}")] + ["end"]


class Twice(NamedTuple):
    """From a step on, ranks have two microbatches in their last backward."""

    ranks: tuple[int, ...]
    first_step: int

    def __call__(self, sharded: Sharded) -> list[list[str]]:
        seen, steps = watch_sums(sharded), []
        for step in range(4):
            for unit in sharded.units.values():
                unit.begin_gradients()
            losses = []
            for turn in range(2 if dist.get_rank() in self.ranks and step >= self.first_step else 1):
                sharded.token = turn
                losses.append(sharded.model(batch(4 * turn + dist.get_rank())))
            sharded.uses.is_last = True
            for loss in losses:
                loss.backward()
            sharded.uses.end_pass()
            sharded.uses.finish_sums()
            steps.append(seen[:])
            seen.clear()
        return steps


@pytest.mark.parametrize("setting", [TWO_BY_TWO, DEALT_OUT])
@pytest.mark.parametrize("ranks", [(0, 1, 2, 3), (0, 1), (3,)])
def test_a_sum_that_has_begun_too_early_is_completed(ranks, setting):
    outcomes = run_ranks(gradients_of, 4, Model, Twice(ranks, 3), setting)
    expected = plain_gradients(
        Model,
        lambda model: (
            model(batch(4 * turn + rank)) for turn in range(2) for rank in range(4) if turn == 0 or rank in ranks
        ),
    )
    for outcome in outcomes:
        assert sum(event.startswith("sum") for event in outcome.seen[-1]) == 12
        assert_equal(outcome.gradients, outcomes[0].gradients)
        torch.testing.assert_close(outcome.gradients, expected, rtol=1e-5, atol=1e-6)


def test_what_was_guessed_too_early_is_not_so_again():
    for outcome in run_ranks(gradients_of, 4, Model, Twice((0, 1, 2, 3), 1), TWO_BY_TWO):
        num_sums = [sum(event.startswith("sum") for event in step) for step in outcome.seen]
        assert num_sums == [6, 12, 6, 6]


def fail_in_the_last_backward(sharded: Sharded) -> None:
    def stop(gradient: Tensor) -> None:
        raise ValueError("not today")

    sharded.uses.is_last = True
    loss = sharded.model(batch(dist.get_rank()))
    handle = sharded.model.blocks[1].down.bias.register_hook(stop)
    with pytest.raises(ValueError, match="not today"):
        loss.backward()
    handle.remove()
    sharded.uses.end_pass()
    sharded.uses.finish_sums()
    train_on(everything, 1, True)(sharded)


@pytest.mark.parametrize("setting", [TWO_BY_TWO, DEALT_OUT])
def test_a_last_backward_that_fails_leaves_nothing_behind(setting):
    for outcome in run_ranks(gradients_of, 4, Model, fail_in_the_last_backward, setting):
        assert_equal(outcome.gradients, expected_gradients(everything, 1))


def leave_out_everything(sharded: Sharded) -> int:
    sharded.uses.is_last = True
    sharded.model.first(batch(0)).sum().backward()
    sharded.uses.end_pass()
    sharded.uses.finish_sums()
    return sum(len(unit.gradient_shards) for unit in sharded.units.values())


@pytest.mark.parametrize("setting", [TWO_BY_TWO, DEALT_OUT, Setting(2, 2)])
def test_units_that_no_rank_uses_have_gradients_of_zero(setting):
    for outcome in run_ranks(gradients_of, setting.ranks, Model, leave_out_everything, setting):
        assert outcome.seen == 6
        assert all(not gradient.any() for name, gradient in outcome.gradients.items() if "first" not in name)
        assert outcome.gradients["first.bias"].eq(3 * setting.ranks).all()


@pytest.mark.parametrize("deals_out", [False, True])
def test_four_replicas_of_one_rank_add_in_their_order(deals_out):
    expected = plain_gradients(Model, lambda model: (model(batch(rank)) for rank in range(4)))
    for outcome in run_ranks(gradients_of, 4, Model, train_on(everything, 1, True), Setting(4, 1, deals_out=deals_out)):
        assert_equal(outcome.gradients, expected)
