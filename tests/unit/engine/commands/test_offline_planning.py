"""Partitions that are decided without ranks and without memory."""

import resource
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import smp_strategy
from smp_strategy import ConfigError, Machine, UnsupportedError, plan_partition
from smp_strategy.config.config import SMPConfig
from smp_strategy.engine.engine import Engine
from smp_strategy.planning.partition.partition import Partition
from smp_strategy.testing import run_ranks
from tests.parity.models import Text, batch_for
from tests.warm import warm_up

MEBIBYTE = 1 << 20


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    warm_up()


def tokens(length: int) -> Tensor:
    return torch.zeros(1, length, dtype=torch.int64)


def plan_thirty_billion() -> tuple[int, Partition]:
    """Bytes by which the memory of a fresh process has grown at its peak, and the partition."""
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(n_embd=7168, n_layer=48, n_head=64, n_positions=2048))
    assert sum(parameter.numel() for parameter in model.parameters()) > 29.9e9
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    partition = plan_partition(
        model, lambda ids: model(ids, labels=ids).loss, tokens(2048), num_stages=8, microbatches=8, machine="cuda"
    )
    assert all(parameter.is_meta for parameter in model.parameters())
    return 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before), partition


def test_thirty_billion_parameters_are_planned_with_little_memory():
    [(grown, partition)] = run_ranks(plan_thirty_billion, 1)
    assert grown < 500 * MEBIBYTE
    blocks = [unit for unit in partition.units if unit.name.startswith("transformer.h.")]
    assert len(blocks) == 48
    assert {unit.stage for unit in blocks} == set(range(8))
    # 12 h^2 weights per block, each used once per token: what everybody computes by hand.
    by_hand = 2 * 12 * 7168**2 * 2048
    per_block = {unit.work.forward * Machine.nominal("cuda").flops_per_second for unit in blocks}
    assert all(1.0 < flops / by_hand < 2.0 for flops in per_block)


def test_tables_above_the_units_get_memory_while_the_step_runs_dry():
    with torch.device("meta"):
        model = LlamaForCausalLM(
            LlamaConfig(hidden_size=32, num_hidden_layers=3, intermediate_size=64, num_attention_heads=2, vocab_size=50)
        )
    assert model.model.rotary_emb.inv_freq.is_meta
    partition = plan_partition(model, lambda ids: model(ids, labels=ids).loss, tokens(16), num_stages=2)
    assert partition.num_stages == 2
    assert model.model.rotary_emb.inv_freq.is_meta


class OnMeta(Text):
    """With a parameter above the units, and tied weights."""

    def __init__(self) -> None:
        with torch.device("meta"):
            super().__init__(tied=True)


def on_a_rank(options: dict[str, Any]) -> Any:
    model = Text(tied=True)
    engine = Engine(SMPConfig(pipeline_parallel_degree=2, microbatches=2, **options))
    engine.attach(model)
    engine.train_step(model.loss, batch_for("text", 0, 4), loss_of=lambda loss: loss)
    return engine.partition


BUDGET = {"activation_checkpointing": "auto", "memory_limit": "92KiB"}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("options", [{}, {"optimize": "speed"}, {"skip_tracing": True}, BUDGET], ids=str)
def test_the_plan_is_what_ranks_decide(options):
    model = OnMeta()
    position = model.position
    planned = plan_partition(model, model.loss, batch_for("text", 0, 2), num_stages=2, microbatches=2, **options)
    assert planned == run_ranks(on_a_rank, 2, options)[0]
    assert model.position is position
    assert position.is_meta
    assert bool(planned.activation_policies) == (options is BUDGET)


def test_a_batch_may_be_on_the_meta_device_too():
    model = OnMeta()
    here, there = batch_for("text", 0, 2), {name: x.to("meta") for name, x in batch_for("text", 0, 2).items()}
    assert plan_partition(model, model.loss, there, num_stages=2) == plan_partition(
        model, model.loss, here, num_stages=2
    )


class LooksAtValues(OnMeta):
    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        return loss * 2 if loss > 0 else loss


def test_a_step_that_looks_at_values_is_refused_where_there_are_none():
    model = LooksAtValues()
    with pytest.raises(UnsupportedError, match="looks at a value .* but the module is on the meta device"):
        plan_partition(model, model.loss, batch_for("text", 0, 2), num_stages=2)


def test_units_without_values_can_be_measured():
    model = OnMeta()
    planned = plan_partition(
        model, model.loss, batch_for("text", 0, 2), num_stages=2, trace_execution_times=True, trace_memory_usage=True
    )
    assert all(unit.work.forward > 0 for unit in planned.units)
    assert all(parameter.is_meta for parameter in model.parameters())


def test_a_faster_machine_is_faster_and_an_unknown_one_is_refused():
    model = OnMeta()

    def planned(machine: Any) -> Any:
        return plan_partition(model, model.loss, batch_for("text", 0, 2), num_stages=2, machine=machine)

    nominal = Machine.nominal("cpu")
    slow = nominal._replace(flops_per_second=1.0, bytes_per_second=1.0)
    assert planned("cpu") == planned(nominal)
    assert sum(unit.work.forward for unit in planned(slow).units) > sum(
        unit.work.forward for unit in planned("cuda").units
    )
    with pytest.raises(ConfigError, match="A nominal machine is `cpu` or `cuda`, but this is 'abacus'"):
        planned("abacus")


def test_planning_leaves_calls_of_units_as_they_were():
    model = Text()
    plan_partition(model, model.loss, batch_for("text", 0, 2), num_stages=2)
    assert all("forward" not in vars(part) for part in model.modules())
    assert isinstance(model.loss(batch_for("text", 0, 2)), Tensor)
    assert smp_strategy.plan_partition is plan_partition
    assert isinstance(model, nn.Module)


def test_units_that_are_spread_over_replicas_are_planned_with_their_shares():
    model = Text(width=64)
    step, microbatch = model.loss, batch_for("text", 0, 2)
    alone, spread = (
        plan_partition(
            model,
            step,
            microbatch,
            num_stages=2,
            microbatches=2,
            sharded_data_parallel_degree=degree,
            sdp_param_persistence_threshold=0,
        )
        for degree in (1, 4)
    )
    assert alone.stage_of == spread.stage_of
    glue = model.position.nbytes
    for before, after in zip(alone.stages, spread.stages, strict=True):
        assert before.held.passing == 0
        values = before.held.parameter - glue
        assert values / 4 < after.held.parameter - glue < 1.1 * values / 4  # padding
        assert values < after.held.gathered < 1.1 * values
        assert after.held.states < 0.3 * before.held.states
    assert [unit.held for unit in alone.units] == [unit.held for unit in spread.units]


class Wide(OnMeta):
    """With pairs of layers that are large enough to count; what `mlp` is, the step shows."""

    def __init__(self) -> None:
        with torch.device("meta"):
            Text.__init__(self, width=64)


def on_ranks_that_split_layers(options: dict[str, Any]) -> tuple[Any, int]:
    torch.manual_seed(0)
    model = Text(width=64)
    engine = Engine(SMPConfig(pipeline_parallel_degree=2, tensor_parallel_degree=2, microbatches=2, **options))
    engine.attach(model)
    engine.train_step(model.loss, batch_for("text", 0, 4), loss_of=lambda loss: loss)
    return engine.partition, sum(line.is_split for line in engine.layout.split_report.lines)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("options", [{}, {"tensor_parallel": {"*.mlp": "replicate"}}, {"skip_tracing": True}], ids=str)
def test_layers_that_are_split_are_planned_as_ranks_do(options):
    found, num_split = run_ranks(on_ranks_that_split_layers, 4, options)[0]
    assert (num_split == 0) == ("tensor_parallel" in options)
    given = {"num_stages": 2, "microbatches": 2, **options}
    for model in (Wide(), Text(width=64)):
        planned = plan_partition(model, model.loss, batch_for("text", 0, 2), tensor_parallel_degree=2, **given)
        assert planned == found
    whole = plan_partition(model, model.loss, batch_for("text", 0, 2), **given | {"tensor_parallel": None})
    assert (planned.stages[0].held.parameter < whole.stages[0].held.parameter) == (num_split > 0)


def test_planning_with_split_layers_leaves_the_module_as_it_was():
    model = Text(width=16)
    model.loss(batch_for("text", 0, 2)).backward()
    before = [(parameter, parameter.detach().clone(), parameter.grad) for parameter in model.parameters()]
    kinds = [type(part) for part in model.modules()]
    plan_partition(model, model.loss, batch_for("text", 0, 2), num_stages=2, tensor_parallel_degree=2)
    assert [type(part) for part in model.modules()] == kinds
    for parameter, (same, value, gradient) in zip(model.parameters(), before, strict=True):
        assert parameter is same
        assert torch.equal(parameter, value)
        assert parameter.grad is gradient


def test_a_step_that_looks_at_values_is_refused_with_split_layers_too():
    model = LooksAtValues()
    with pytest.raises(UnsupportedError, match="looks at a value .* but the module is on the meta device"):
        plan_partition(model, model.loss, batch_for("text", 0, 2), num_stages=2, tensor_parallel_degree=2)
    assert all(parameter.is_meta for parameter in model.parameters())
