"""Units that are computed again in backward: the numbers of one process in which they are not."""

import gc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import smp_strategy
from smp_strategy.activations.checkpoint import Recomputed
from smp_strategy.activations.selective import Products
from smp_strategy.config.config import SMPConfig
from smp_strategy.engine.engine import Engine
from smp_strategy.testing import run_ranks

from . import test_additions, test_architectures, test_collected, test_control_flow, test_interfaces
from .compare import STEPS, WIDTH, Block, Blocks, Case, check, in_order, mean_square, pipeline
from .test_sharded import sharded

ALL = {"activation_checkpointing": "all"}
WAYS: dict[str, dict[str, Any]] = {
    "each": ALL,
    "contiguous": {**ALL, "checkpoint_strategy": "contiguous"},
    "group_2": {**ALL, "checkpoint_strategy": "group_2"},
    "selective": {**ALL, "selective_checkpointing": True},
    "selective groups": {**ALL, "selective_checkpointing": True, "checkpoint_strategy": "group_3"},
    "some": {"activation_checkpointing": "blocks.1, blocks.3"},
    "parts": {"activation_checkpointing": ["blocks.*.mlp"]},
}
SCHEDULES: dict[str, dict[str, Any]] = {
    "simple": {"pipeline": "simple"},
    "1f1b": {"pipeline": "1f1b"},
    "zb-h1": {"pipeline": "zb-h1"},
    "zb-v": {"pipeline": "zb-v"},
    "interleaved, 2 chunks": {"virtual_pipeline_degree": 2},
}


class Dropping(Block):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(F.dropout(x, 0.2)), 0.5)


class WithStatistics(Block):
    def __init__(self) -> None:
        super().__init__()
        self.statistics = nn.BatchNorm1d(WIDTH)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(torch.tanh(self.statistics(x)))


def recomputed(case: Case, options: dict[str, Any]) -> Case:
    return replace(case, options={**case.options, **options})


@pytest.mark.parametrize("pp", [1, 2, 4])
@pytest.mark.parametrize("way", WAYS)
def test_weights_are_those_of_one_process_whichever_units_are_computed_again(way: str, pp: int) -> None:
    for block in (Block, WithStatistics):
        check(Case(lambda block=block: Blocks(in_order, block), options=WAYS[way]), pp)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("way", ["each", "contiguous", "selective"])
def test_weights_are_those_of_one_process_under_every_schedule(way: str, schedule: str) -> None:
    options = {**WAYS[way], **SCHEDULES[schedule]}
    check(Case(lambda: Blocks(in_order), options=options), 2, (4,))


def runs_and_calls(options: dict[str, Any]) -> tuple[int, int]:
    """On a rank: how often its units were called to be run again, and were."""
    noted: list[str] = []
    call, run_again = Recomputed.call, Recomputed._run_again

    def noted_call(self: Recomputed, args: Any, kwargs: Any) -> Any:
        noted.append("call")
        return call(self, args, kwargs)

    def noted_run(self: Recomputed, results: Any, **how: Any) -> Any:
        noted.append("run")
        return run_again(self, results, **how)

    Recomputed.call, Recomputed._run_again = noted_call, noted_run  # type: ignore[method-assign]
    pipeline(Case(lambda: Blocks(in_order), options=options), dist.get_world_size(), (4,))
    return noted.count("call"), noted.count("run")


@pytest.mark.parametrize("way", ["each", "contiguous"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v"])
def test_each_call_is_run_again_once_also_where_backwards_are_split(schedule: str, way: str) -> None:
    for calls, runs in run_ranks(runs_and_calls, 2, {**WAYS[way], **SCHEDULES[schedule]}):
        assert calls == runs > 0


@pytest.mark.parametrize("gather", ["use", "step"])
@pytest.mark.parametrize("way", ["each", "contiguous", "selective", "parts"])
def test_weights_are_those_of_one_process_where_they_are_spread_over_ranks(way: str, gather: str) -> None:
    case = Case(lambda: Blocks(in_order, WithStatistics), options={**WAYS[way], "sdp_gather": gather})
    check(case, 2, (1,), sharded)
    check(case, 4, (4,), sharded)


CASES = {
    **{name: test_additions.CASES[name] for name in ("hooks that collect", "spectral_norm", "TorchScript")},
    **{name: test_architectures.CASES[name] for name in ("resnet", "u-net")},
    **{name: test_control_flow.STEPS[name] for name in ("with_autocast", "several_passes")},
    **{name: test_interfaces.STEPS[name] for name in ("functional_call", "attention to itself", "nested containers")},
    "a hook inside fills a list above": test_collected.CASES["a hook inside fills a list above"],
    "lists in a context variable": test_collected.CASES["lists in a context variable"],
    "GPT-2": test_additions.MODELS["LoRA on GPT-2"],
}


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")  # of transformers, within itself and peft
@pytest.mark.parametrize("way", ["contiguous", "selective"])
@pytest.mark.parametrize("name", CASES)
def test_what_people_do_with_models_is_done_once(name: str, way: str) -> None:
    check(recomputed(CASES[name], WAYS[way]), 2, (2,))


def drawing(case: Case, pp: int, counts: tuple[int, ...]) -> Any:
    return run_ranks(pipeline, pp, case, pp, counts)[0]


@pytest.mark.parametrize("way", WAYS)
def test_random_numbers_are_those_that_are_drawn_without(way: str) -> None:
    plain = Case(lambda: Blocks(in_order, Dropping))
    (expected,) = drawing(plain, 1, (2,))
    for pp in (1, 2):
        (found,) = drawing(recomputed(plain, WAYS[way]), pp, (2,))
        assert found.losses == expected.losses
        assert all(torch.equal(found.state[name], value) for name, value in expected.state.items())


def by_hand(ask: Callable[[Blocks], Any]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        net = Blocks(in_order)
        ask(net)
        return net

    return make


ASKED: dict[str, Callable[[Blocks], Any]] = {
    "a unit": lambda net: smp_strategy.set_activation_checkpointing(net.blocks[2]),
    "what holds units": lambda net: smp_strategy.set_activation_checkpointing(net.blocks, strategy="contiguous"),
    "a part": lambda net: smp_strategy.set_activation_checkpointing(net.blocks[1].mlp, strategy="group_2"),
    "a norm": lambda net: smp_strategy.set_activation_checkpointing(net.blocks[3].norm, preserve_rng_state=False),
}


@pytest.mark.parametrize("asked", ASKED)
def test_what_is_asked_for_by_hand_is_done(asked: str) -> None:
    check(Case(by_hand(ASKED[asked])), 2)
    assert min(run_ranks(kept_inputs, 1, Case(by_hand(ASKED[asked])), {})) >= 1


def checkpoint_in_step(net: Any, x: Tensor) -> Tensor:
    for block in net.blocks:
        x = checkpoint(block, x, use_reentrant=False)
    return mean_square(x)


def checkpoint_in_groups(net: Any, x: Tensor) -> Tensor:
    return mean_square(smp_strategy.checkpoint_sequential(nn.Sequential(*net.blocks), x, strategy="group_2"))


def checkpoint_whole(net: Any, x: Tensor) -> Tensor:
    return mean_square(smp_strategy.checkpoint_sequential(nn.Sequential(*net.blocks), x, strategy="contiguous"))


def checkpoint_with_contexts(net: Any, x: Tensor) -> Tensor:
    """Keeps products, says the user; which operations these are is up to the library."""
    contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
    for block in net.blocks:
        x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
    return mean_square(x)


def kept_products(case: Case) -> int:
    """On a rank: how many products the calls of a microbatch keep."""
    kept: list[int] = []
    settle = Products.settle

    def counted(self: Products, results: Any) -> None:
        settle(self, results)
        kept.append(sum(each is not None for each in self._kept))

    Products.settle = counted  # type: ignore[method-assign]
    pipeline(case, 1, (1,))
    return sum(kept) // STEPS


def test_contexts_that_the_step_gives_to_checkpoint_keep_products() -> None:
    check(Case(lambda: Blocks(checkpoint_with_contexts)), 2)
    assert run_ranks(kept_products, 1, Case(lambda: Blocks(checkpoint_with_contexts))) == [4]
    assert run_ranks(kept_products, 1, Case(lambda: Blocks(checkpoint_in_step))) == [0]


def failing(options: dict[str, Any], backward: bool) -> tuple[int, bool]:
    """On a rank: how many calls are left after a step that fails and another, and whether that has the right loss."""
    torch.manual_seed(0)
    module = Blocks(in_order)
    engine = Engine(SMPConfig(pipeline_parallel_degree=1, microbatches=2, **options))
    engine.attach(module, [])
    batch = module.batch(torch.Generator().manual_seed(0))
    expected = engine.train_step(module.loss, batch, loss_of=lambda loss: loss).loss.item()

    def fail(*args: Any) -> None:
        raise ValueError("no")

    part = module.blocks[2].mlp
    handle = part[0].weight.register_hook(fail) if backward else part.register_forward_hook(fail)
    with pytest.raises(ValueError, match="no"):
        engine.train_step(module.loss, batch, loss_of=lambda loss: loss)
    handle.remove()
    # Autograd itself holds the graph of a backward that has failed until the next one.
    found = engine.train_step(module.loss, batch, loss_of=lambda loss: loss).loss.item()
    gc.collect()
    return sum(type(each) is Recomputed for each in gc.get_objects()), found == expected


@pytest.mark.parametrize("backward", [False, True], ids=["in forward", "in backward"])
@pytest.mark.parametrize("way", ["each", "contiguous", "selective"])
def test_a_step_that_fails_leaves_nothing(way: str, backward: bool) -> None:
    assert run_ranks(failing, 1, WAYS[way], backward) == [(0, True)]


@pytest.mark.parametrize("pp", [1, 2, 4])
@pytest.mark.parametrize("step", [checkpoint_in_step, checkpoint_in_groups, checkpoint_whole])
def test_what_the_step_asks_for_is_done(step: Any, pp: int) -> None:
    check(Case(lambda: Blocks(step)), pp)


def kept_inputs(case: Case, options: dict[str, Any]) -> int:
    """On a rank: how many tensors the calls of a microbatch keep for being repeated."""
    kept: list[int] = []
    call = Recomputed.call

    def counted(self: Recomputed, args: Any, kwargs: Any) -> Any:
        kept.append(len(self._inputs._positions))
        return call(self, args, kwargs)

    Recomputed.call = counted  # type: ignore[method-assign]
    torch.manual_seed(0)
    module = case.make()
    engine = Engine(SMPConfig(pipeline_parallel_degree=1, **options))
    engine.attach(module, [])
    engine.train_step(module.loss, module.batch(torch.Generator().manual_seed(0)), loss_of=lambda loss: loss)
    engine.close()
    return sum(kept)


@pytest.mark.parametrize(("way", "expected"), [("each", 4), ("group_2", 2), ("contiguous", 1), ("some", 2)])
def test_only_the_first_of_a_group_keeps_its_input(way: str, expected: int) -> None:
    assert run_ranks(kept_inputs, 1, Case(lambda: Blocks(in_order)), WAYS[way]) == [expected]


@pytest.mark.parametrize(("step", "expected"), [(checkpoint_in_step, 4), (checkpoint_in_groups, 2)])
def test_groups_that_the_step_asks_for_keep_one_input(step: Any, expected: int) -> None:
    assert run_ranks(kept_inputs, 1, Case(lambda: Blocks(step)), {}) == [expected]
