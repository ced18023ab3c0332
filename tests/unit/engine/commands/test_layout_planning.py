"""Layouts that are planned from two traces: their costs are those of a trace of the very layout."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from smp_strategy import plan_partition
from smp_strategy.config.config import SMPConfig
from smp_strategy.distributed.mesh_shape import MeshShape
from smp_strategy.engine.commands.layout_planning import LayoutPlanner
from smp_strategy.engine.commands.offline_planning import surveyed
from smp_strategy.planning.layouts.cluster import Cluster, JobLayout
from smp_strategy.planning.layouts.estimate import rough, why_slower
from tests.warm import warm_up

CLUSTER = Cluster.read("2x4xa100")


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    warm_up()


class WithPenalty(nn.Module):
    """Blocks that leave a penalty for the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(PenaltyBlock() for _ in range(3))

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean() + sum(block.penalty for block in self.blocks)


class PenaltyBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        self.penalty = y.abs().mean()
        return y


@pytest.fixture(scope="module")
def plans() -> LayoutPlanner:
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=32, vocab_size=64))
    return LayoutPlanner(
        module=model,
        step=lambda ids: model(ids, labels=ids).loss,
        batch_of=lambda count: torch.zeros(count, 32, dtype=torch.int64),
        cluster=CLUSTER,
    )


def trace_of(module, step, batch, tp=1, *, shares):
    config = SMPConfig.from_options(tensor_parallel_degree=tp)
    shape = MeshShape(pp=1, dp=1, tp=tp)
    with surveyed(config, module, step, batch, shape=shape, machine=CLUSTER.device.machine, shares=shares) as survey:
        return survey.found.trace


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("samples", [1, 3, 8])
def test_costs_of_any_number_of_samples_are_those_of_its_own_trace(plans, samples, tp):
    costs = plans._costs_of(JobLayout(1, tp, 1, 8 // tp, 1, samples))
    alone = trace_of(plans.module, plans.step, plans.batch_of(samples), tp, shares=False)
    assert list(costs.microbatch.trace.events) == list(alone.events)
    assert costs.microbatch.trace.loss == alone.loss


def test_units_that_leave_tensors_for_others_do_not_share_their_dry_run():
    module = WithPenalty()
    alone, shared = (trace_of(module, module.loss, torch.zeros(2, 8), shares=shares) for shares in (False, True))
    assert shared.path == alone.path
    assert list(shared.events) == list(alone.events)


@pytest.mark.parametrize(
    "layout", [JobLayout(2, 1, 1, 4, 4, 2), JobLayout(2, 1, 4, 1, 4, 2), JobLayout(2, 2, 2, 1, 4, 2)]
)
def test_memory_and_time_are_those_of_the_partition(plans, layout):
    (estimate,) = plans.estimate(layout).estimates
    partition = plan_partition(
        plans.module,
        plans.step,
        plans.batch_of(layout.samples),
        num_stages=layout.pp,
        machine=CLUSTER.device.machine,
        pipeline=estimate.partition.schedule,
        virtual_pipeline_degree=estimate.partition.chunks_per_stage,
        **{**layout.options, "pipeline_parallel_degree": layout.pp},
    )
    assert estimate.partition.stage_of == partition.stage_of
    assert estimate.memory.total == max(stage.memory_bytes for stage in partition.stages)
    seconds = estimate.seconds
    alone = seconds.computation + seconds.recomputation + seconds.idle
    if layout.tp == 1:
        assert alone == pytest.approx(partition.step_seconds, rel=0.05)
        assert seconds.split_layers == 0
    else:
        assert seconds.split_layers > 0


def test_a_rough_estimate_of_one_stage_is_the_planned_one(plans):
    for layout in (JobLayout(1, 1, 8, 1, 2, 4), JobLayout(1, 2, 2, 2, 1, 2, True)):
        (estimate,) = plans.estimate(layout).estimates
        guess = rough(plans._costs_of(layout), layout, CLUSTER, 10**12)
        assert guess.seconds.total == pytest.approx(estimate.seconds.total, rel=0.05)
        assert guess.memory.total == pytest.approx(estimate.memory.total, rel=0.1)


def test_gradients_of_later_microbatches_are_added_to_those_of_the_first(plans):
    alone = replace(plans, cluster=Cluster.read("1xcpu"))
    batches = [(1, 4), (2, 2), (4, 1)]
    whole, halves, cut = (alone.estimate(JobLayout(1, 1, 1, 1, *each)).estimates[0].seconds for each in batches)
    assert whole.gradients == 0 < halves.gradients
    assert cut.gradients == pytest.approx(3 * halves.gradients)


def test_a_result_has_two_gradients_at_a_time(plans):
    one, two = (plans.estimate(JobLayout(1, 1, 1, 8, 2, samples)).estimates[0] for samples in (2, 4))
    events = plans._surveyed(1).one.events
    (loss,) = (event for event in events if event.name == "cross_entropy")
    # Labels, which are saved as well, are not needed by then.
    logits, labels = loss.inputs[0].nbytes, loss.saved_bytes - loss.inputs[0].nbytes
    assert loss.kept.working_bytes == 2 * logits - labels
    most = max(event.kept.working_bytes for event in events)
    assert (one.memory.working, two.memory.working) == (2 * most, 4 * most)


def test_recomputation_costs_time_and_spares_memory(plans):
    kept, again = (plans.estimate(JobLayout(1, 1, 1, 8, 1, 8, way)).estimates[0] for way in (False, True))
    assert again.seconds.recomputation > 0 == kept.seconds.recomputation
    assert again.memory.activations < kept.memory.activations
    assert "computes activations again" in why_slower(again, kept)


def test_the_search_sorts_by_time_and_keeps_to_the_memory(plans):
    free = plans.search(64)
    assert [e.seconds.total for e in free.estimates] == sorted(e.seconds.total for e in free.estimates)
    assert all(estimate.fits for estimate in free.estimates)
    limit = min(estimate.memory.total for estimate in free.estimates) - 1
    tight = replace(plans, memory_limit=limit).search(64)
    assert all(estimate.memory.total <= limit for estimate in tight.estimates)
    assert tight.estimates[0].seconds.total >= free.estimates[0].seconds.total


def test_what_fits_nowhere_is_said_with_the_least_need(plans):
    plan = replace(plans, memory_limit=1000).search(64)
    (estimate,) = plan.estimates
    assert not estimate.fits
    assert estimate.memory.total > 1000


def test_a_slow_network_makes_sums_between_nodes_dear(plans):
    slow = CLUSTER.device.network._replace(bytes_per_second=1e6)
    far = replace(plans, cluster=replace(CLUSTER, device=CLUSTER.device._replace(network=slow)))
    best, fast = far.search(64).estimates[0], plans.search(64).estimates[0]
    assert best.seconds.total > fast.seconds.total
    (same,) = far.estimate(fast.layout).estimates
    assert same.seconds.total >= best.seconds.total


def test_utilization_is_that_of_the_models_own_operations(plans):
    plan = plans.estimate(JobLayout(1, 1, 1, 8, 1, 8))
    config = GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=32, vocab_size=64)
    weights = 12 * config.n_layer * 32**2 + 64 * 32
    attention = 4 * config.n_layer * 32 * 32
    assert plan.flops_per_sample == pytest.approx(32 * (6 * weights + 3 * attention), rel=0.15)
