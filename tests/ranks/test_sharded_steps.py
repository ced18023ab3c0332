"""Steps of all kinds with parameters spread over shard groups: accumulated, thrown away, evaluated, compiled; on nodes.

What is compared is one process that reads the batches of all replicas, microbatch by microbatch.
"""

import os
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from smp_strategy.config.config import SMPConfig
from smp_strategy.distributed.collectives.gloo import GlooCollectives
from smp_strategy.engine.engine import Engine
from smp_strategy.testing import run_ranks
from tests.ranks.test_sharded_modules import FULL, STAGES, STEPS, Blocks, batch, made
from tests.ranks.test_state_sharding import assert_equal

CASE = "parts of all units are frozen"
BATCHES = 2
"""That are accumulated."""


def one_process(replicas: int, together: int) -> dict[str, Tensor]:
    """Gradients of ``together`` replicas are added up as they come, then those of all such groups."""
    model, optimizer = made(CASE)
    for step in range(STEPS):
        totals: list[dict[nn.Parameter, Tensor]] = []
        for first in range(0, replicas, together):
            model.zero_grad()
            for number in range(BATCHES):
                for replica in range(first, first + together):
                    model.loss(batch((step * BATCHES + number) * replicas + replica)).div(BATCHES).backward()
            totals.append({each: each.grad for each in model.parameters() if each.grad is not None})
        for each in totals[0]:
            each.grad = sum((total[each] for total in totals[1:]), totals[0][each]) / replicas
        optimizer.step()
    return model.state_dict()


def accumulating(options: dict[str, Any], way: str) -> tuple[dict[str, Tensor], list[float], list[float]]:
    """Train in a ``way``; also the losses of evaluations, and those of one process with the same weights."""
    model, optimizer = made(CASE)
    plain, _ = made(CASE)
    engine = Engine(SMPConfig(**options))
    engine.attach(model, [optimizer])
    found, expected = [], []

    def gradients_of(number: int, place: int, **guesses: Any) -> Any:
        data = batch((number * BATCHES + place) * engine.mesh.dp + engine.mesh.dp_rank)
        return engine.train_step(model.loss, data, loss_of=lambda loss: loss, factor=1 / BATCHES, **guesses)

    def evaluate() -> None:
        number = 1000 + engine.mesh.dp_rank
        model.eval()
        with torch.inference_mode() if len(found) % 2 else torch.no_grad():
            found.append(engine.eval_step(model.loss, batch(number)).outputs)
        model.train()
        weights = [engine.saved.full_state_dict()]
        torch.distributed.broadcast_object_list(weights)
        plain.load_state_dict(weights[0])
        expected.append([plain.loss(batch(number)).item()])

    for step in range(STEPS):
        if way == "evaluated":
            evaluate()
        for place in range(BATCHES):
            is_last = place == BATCHES - 1
            guesses = {"continues": place > 0, "reduces": is_last}
            if way == "guessed wrong":
                guesses = {"continues": not guesses["continues"], "reduces": not is_last}
            result = gradients_of(step, place, **guesses)
            if way == "evaluated":
                evaluate()
            if way == "thrown away":
                gradients_of(99, place, **guesses)
            if place == 0:
                model.zero_grad()
            result.commit(torch.tensor(1 / BATCHES), reduce=is_last)
        engine.begin_update(optimizer)
        optimizer.step()
        engine.end_update(optimizer)
    state = engine.saved.full_state_dict()
    engine.close()
    return state, [loss.item() for losses in found for loss in losses], [loss for losses in expected for loss in losses]


LAYOUTS = {"two shards": (FULL, 2), "two groups": (FULL, 4), "two stages": (STAGES, 4)}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("way", ["as Lightning does", "guessed wrong", "thrown away", "evaluated"])
def test_batches_are_accumulated_as_in_one_process(layout, way):
    options, num_ranks = LAYOUTS[layout]
    ranks = run_ranks(accumulating, num_ranks, options, way)
    expected = one_process(num_ranks // options["pipeline_parallel_degree"], 2)
    # Wrong guesses, and microbatches of stages, are added up before they are added to what is there.
    assert_equal(ranks[0][0], expected, tolerance=0.0 if way != "guessed wrong" and layout != "two stages" else 1e-6)
    for _, found, losses in ranks:
        assert found == losses
        assert bool(found) == (way == "evaluated")


def with_optimizers(num_optimizers: int) -> tuple[dict[str, Tensor], int]:
    """Each for as many units; and how many gathers their steps have begun, all together."""
    model, _ = made(CASE)
    share = len(model.blocks) // num_optimizers
    optimizers = [
        torch.optim.AdamW(model.blocks[first : first + share].parameters(), lr=0.02)
        for first in range(0, len(model.blocks), share)
    ]
    engine = Engine(SMPConfig(**FULL, shard_optimizer_state=True))
    engine.attach(model, optimizers)
    num_gathers = 0
    for step in range(STEPS):
        data = batch(step * engine.mesh.dp + engine.mesh.dp_rank)
        result = engine.train_step(model.loss, data, loss_of=lambda loss: loss, reduces=True)
        model.zero_grad()
        result.commit(torch.ones(()), reduce=True)
        with mock.patch.object(GlooCollectives, "gather", autospec=True, side_effect=GlooCollectives.gather) as gather:
            for optimizer in optimizers:
                engine.begin_update(optimizer)
                optimizer.step()
                engine.end_update(optimizer)
        num_gathers += gather.call_count
    state = engine.saved.full_state_dict()
    engine.close()
    return state, num_gathers


def test_an_optimizer_passes_on_what_it_has_updated_and_nothing_else():
    one, two = (run_ranks(with_optimizers, 4, number)[0] for number in (1, 2))
    assert_equal(two[0], one[0])
    assert two[1] == one[1] == STEPS * 4


class OnPurposeError(Exception):
    pass


def failing(options: dict[str, Any], place: str) -> dict[str, Tensor]:
    """Some steps fail at a ``place``, on all ranks; before a step that evaluates, and before one that trains."""
    model, optimizer = made(CASE)
    engine = Engine(SMPConfig(**options))
    engine.attach(model, [optimizer])

    def fail(*_: Any) -> None:
        raise OnPurposeError

    def loss_that_fails(x: Tensor) -> Tensor:
        loss = model.loss(x)
        return fail() if place == "forward" else loss

    for step in range(STEPS):
        data = batch(step * engine.mesh.dp + engine.mesh.dp_rank)
        if step > 1 and place:
            with (
                pytest.raises(OnPurposeError),
                model.blocks[1].up.register_forward_hook(lambda _, args, result: result.register_hook(fail) and None),
            ):
                engine.train_step(loss_that_fails, data, loss_of=lambda loss: loss, reduces=True)
        if step == 2:
            engine.eval_step(model.loss, data)
        result = engine.train_step(model.loss, data, loss_of=lambda loss: loss, reduces=True)
        model.zero_grad()
        result.commit(torch.ones(()), reduce=True)
        engine.begin_update(optimizer)
        optimizer.step()
        engine.end_update(optimizer)
    state = engine.saved.full_state_dict()
    engine.close()
    return state


@pytest.mark.parametrize(
    ("options", "num_ranks", "place"),
    [
        (FULL, 2, "backward"),
        (FULL, 4, "backward"),
        (FULL | {"shard_optimizer_state": True}, 4, "backward"),
        (FULL | {"sdp_gather": "step"}, 4, "backward"),
        (FULL, 4, "forward"),
        (STAGES, 4, "forward"),
    ],
)
def test_of_a_step_that_fails_nothing_is_left_in_the_next_ones(options, num_ranks, place):
    found, expected = (run_ranks(failing, num_ranks, options, where)[0] for where in (place, ""))
    assert_equal(found, expected)


def compiled() -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
    warnings.simplefilter("ignore")  # what torch.compile itself causes in torch
    torch.manual_seed(0)
    model, plain = Blocks(), Blocks()
    plain.load_state_dict(model.state_dict())
    theirs, ours = (torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (plain, model))
    engine = Engine(SMPConfig(**FULL, compile=True))
    engine.attach(model, [ours])
    # The one backend that needs no C++ compiler, which takes longer than all else here.
    with mock.patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")):
        for step in range(3):
            plain.zero_grad()
            for number in (2 * step, 2 * step + 1):
                plain.loss(batch(number)).div(2).backward()
            theirs.step()
            data = batch(2 * step + engine.mesh.dp_rank)
            result = engine.train_step(model.loss, data, loss_of=lambda loss: loss, reduces=True)
            model.zero_grad()
            result.commit(torch.ones(()), reduce=True)
            engine.begin_update(ours)
            ours.step()
            engine.end_update(ours)
            engine.eval_step(model.loss, data)
    return engine.saved.full_state_dict(), plain.state_dict(), torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.one_in(3)
def test_compiled_units_have_the_weights_of_one_process():
    for number, (found, expected, num_graphs) in enumerate(run_ranks(compiled, 2)):
        assert num_graphs >= 1
        if number == 0:
            assert_equal(found, expected, tolerance=1e-6)  # kernels may be fused


def on_nodes(options: dict[str, Any]) -> tuple[dict[str, Tensor], int]:
    """Two ranks on each."""
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    model, optimizer = made(CASE)
    engine = Engine(SMPConfig(pipeline_parallel_degree=1, sharded_data_parallel_degree=4, **options))
    engine.attach(model, [optimizer])
    assert engine.mesh.shape.nodes_of_shard_group == 2
    for step in range(STEPS):
        data = batch(step * 4 + engine.mesh.dp_rank)
        result = engine.train_step(model.loss, data, loss_of=lambda loss: loss, reduces=True)
        model.zero_grad()
        result.commit(torch.ones(()), reduce=True)
        engine.begin_update(optimizer)
        optimizer.step()
        engine.end_update(optimizer)
    found = engine.saved.full_state_dict()
    engine.close()
    return found


def in_order_of(nodes: Callable[[list[Tensor]], Tensor]) -> dict[str, Tensor]:
    """One process that adds up the gradients of four replicas so."""
    model, optimizer = made(CASE)
    for step in range(STEPS):
        found: dict[nn.Parameter, list[Tensor]] = {}
        for replica in range(4):
            model.zero_grad()
            model.loss(batch(step * 4 + replica)).div(4).backward()
            for each in model.parameters():
                if each.grad is not None:
                    found.setdefault(each, []).append(each.grad)
        for each, gradients in found.items():
            each.grad = nodes(gradients)
        optimizer.step()
    return model.state_dict()


def test_a_group_over_two_nodes_adds_up_node_by_node_however_it_gathers():
    by_nodes = run_ranks(on_nodes, 4, {})[0]
    assert_equal(by_nodes, in_order_of(lambda g: (g[0] + g[1]) + (g[2] + g[3])))
    assert_equal(run_ranks(on_nodes, 4, {"sdp_hierarchical_allgather": False})[0], by_nodes)


def bytes_of_rank(options: dict[str, Any]) -> tuple[int, int]:
    """Of the parameters that it holds between steps, and the most that were gathered at a time."""
    model = Blocks()
    engine = Engine(SMPConfig(pipeline_parallel_degree=1, **options))
    engine.attach(model)
    for _ in range(2):
        engine.train_step(model.loss, batch(0), loss_of=lambda loss: loss).commit(torch.ones(()), reduce=True)
    held = engine.inspection.memory_report().ranks[engine.mesh.rank]
    engine.close()
    return held.parameters, held.gathered


# A unit has parameters of 8, 8, 128, 16, 128 and 8 elements, which take 1, 1, 4, 1, 4 and 1 blocks of 32.
UNIT = 12 * 32


@pytest.mark.parametrize(("most_live", "num_live"), [(UNIT, 1), (2 * UNIT - 1, 1), (2 * UNIT, 2), (10 * UNIT, 2)])
@pytest.mark.parametrize("degree", [2, 4])
def test_a_rank_holds_its_part_and_gathers_no_more_at_a_time_than_it_may(degree, most_live, num_live):
    options = {"sharded_data_parallel_degree": degree, "sdp_max_live_parameters": most_live}
    expected = 4 * UNIT * 4 // degree, num_live * UNIT * 4
    assert run_ranks(bytes_of_rank, degree, options) == [expected] * degree
