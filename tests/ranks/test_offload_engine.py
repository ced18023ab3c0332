"""Offload beside split layers, shard groups, compiled units and steps that leave their plan: the bits without it."""

import functools
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from smp_strategy.config.config import SMPConfig
from smp_strategy.engine import parallelize
from smp_strategy.engine.engine import Engine
from smp_strategy.pipeline import split_backward
from smp_strategy.testing import run_ranks
from tests.parity.compare import WIDTH, Blocks, in_order
from tests.ranks.test_tensor_parallel_engine import Setting, run_training
from tests.unit.activations.double import Device

OFFLOAD = {"offload_activations": True, "offload_min_bytes": 0, "activation_loading_horizon": 1}
LAYOUTS = {
    "2 parts": Setting(2),
    "2 parts of 2 stages": Setting(2, pp=2, options=(("pipeline", "simple"),)),
    "2 parts of 2 shards": Setting(2, dp=2, options=(("sharded_data_parallel_degree", 2),)),
}


def trained_each_way(setting: Setting, ways: list[dict[str, Any]]) -> list[Any]:
    return [trained(setting, more) for more in ways]


def trained(setting: Setting, more: dict[str, Any]) -> Any:
    losses, norms, _, (weights, state), _ = run_training(setting._replace(options=(*setting.options, *more.items())))
    return losses, norms, weights, state


@pytest.mark.dear
@pytest.mark.parametrize("layout", LAYOUTS)
def test_split_layers_train_alike(layout: str) -> None:
    """What is sent away is what units keep, or their inputs only, if they are computed again."""
    setting = LAYOUTS[layout]
    ways = [{}, OFFLOAD, OFFLOAD | {"activation_checkpointing": "all"}]
    for wanted, *others in run_ranks(trained_each_way, setting.ranks, setting, ways):
        for found in others:
            assert found[:2] == wanted[:2]
            assert_same(found[2], wanted[2])


def train(step: Any, options: dict[str, Any], batches: int = 3) -> Any:
    """Weights and what has gone out, of each step."""
    torch.manual_seed(0)
    module = Blocks(step)
    engine = Engine(SMPConfig(microbatches=4, **options))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    engine.attach(module, [optimizer])
    traffic = []
    for number in range(batches):
        batch = {"x": torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(number))}
        result = engine.train_step(module.loss, batch, loss_of=lambda loss: loss)
        optimizer.zero_grad()
        result.commit(torch.ones(()), reduce=True)
        engine.begin_update(optimizer)
        optimizer.step()
        engine.end_update(optimizer)
        traffic.append(engine.inspection.traffic)
    state = engine.saved.full_state_dict()
    engine.close()
    return state, traffic


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("policy", [{}, {"activation_checkpointing": "all"}], ids=["kept", "computed again"])
def test_copies_that_are_done_as_late_as_possible_change_no_number(policy: dict[str, Any], pp: int) -> None:
    """Whoever reads before its copy is done, or uses memory again that is still copied, gets other numbers."""
    options = {"pipeline_parallel_degree": pp, "pipeline": "simple"}
    expected = run_ranks(train, pp, in_order, options)[0][0]
    found = run_ranks(train_on_a_slow_link, pp, options | OFFLOAD | policy)
    assert_same(found[0][0], expected)
    assert any(each.bytes_in for _, traffic in found for each in traffic)


def train_on_a_slow_link(options: dict[str, Any]) -> Any:
    parallelize.HostCopies = lambda device: Device()
    return train(in_order, options)


def by_value(net: Any, x: Tensor) -> Tensor:
    """Microbatches take different paths."""
    for block in net.blocks:
        x = block(x)
        if float(x.detach().mean()) > 0.1:
            x = block(x)
    return x.pow(2).mean()


def assert_same(found: Any, expected: Any) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("pp", [1, 2])
def test_microbatches_that_leave_the_plan_train_alike(pp: int) -> None:
    options = {"pipeline_parallel_degree": pp, "pipeline": "simple"}
    expected = run_ranks(train, pp, by_value, options)[0][0]
    found = run_ranks(train, pp, by_value, options | OFFLOAD)
    assert_same(found[0][0], expected)
    assert all(each.bytes_out for _, traffic in found for each in traffic)


def test_weights_come_in_two_parts_as_without_offload() -> None:
    """Products whose factors are on the host are still split, or zero-bubble schedules would be plain ones."""
    options = {"pipeline_parallel_degree": 2, "pipeline": "zb-h1"}
    expected = run_ranks(train_counting_parts, 2, options)
    found = run_ranks(train_counting_parts, 2, options | OFFLOAD)
    assert [parts for _, parts in found] == [parts for _, parts in expected], (found, expected)
    assert any(parts for _, parts in found)
    assert_same(found[0][0], expected[0][0])


def train_counting_parts(options: dict[str, Any]) -> Any:
    parts = []
    go_on = split_backward._go_on

    def counted(*args: Any) -> None:
        parts.append(1)
        go_on(*args)

    split_backward._go_on = counted
    state, _ = train(in_order, options)
    return state, len(parts)


@pytest.mark.one_in(3)
def test_compiled_units_train_alike() -> None:
    options = {"pipeline_parallel_degree": 1, "compile": True}
    expected = run_ranks(train_compiled, 1, options)[0][0]
    state, traffic = run_ranks(train_compiled, 1, options | OFFLOAD)[0]
    assert_same(state, expected)
    assert all(each.bytes_out for each in traffic)


def train_compiled(options: dict[str, Any]) -> Any:
    warnings.simplefilter("ignore")  # what torch.compile itself causes in torch
    torch.compile = functools.partial(torch.compile, backend="aot_eager")  # the same way without a C++ compiler
    return train(in_order, options)


def test_what_a_stage_keeps_for_backward_is_on_the_host_while_it_waits() -> None:
    """Nothing else holds it: not the record of the program, not the cut between segments, not the scheduler."""
    first_stage = 1  # its rank
    assert run_ranks(count_alive, 2, {})[first_stage] == 4 * 3
    assert run_ranks(count_alive, 2, OFFLOAD)[first_stage] == 0


def count_alive(options: dict[str, Any]) -> int:
    """How many results inside of units are alive when the first backward begins."""
    storages: list[Any] = []
    most: list[int] = []

    class Watched(torch.nn.Tanh):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            storages.append(weakref.ref(y.untyped_storage()))
            y.register_hook(lambda gradient: most.append(sum(each() is not None for each in storages)))
            return y

    torch.manual_seed(0)
    module = Blocks(in_order)
    for block in module.blocks:
        block.mlp[1] = Watched()
    engine = Engine(SMPConfig(pipeline_parallel_degree=2, microbatches=4, pipeline="simple", **options))
    engine.attach(module, [])
    for _ in range(2):
        storages.clear()
        most.clear()
        engine.train_step(module.loss, {"x": torch.randn(8, WIDTH)}, loss_of=lambda loss: loss)
    engine.close()
    return most[0]
