"""In a step, "all ranks" are the replicas: numbers of data-parallel processes, on any layout, or a refusal."""

import pytest
import torch
import torch.distributed as dist

from smp_strategy.testing import run_ranks
from tests.ranks import collective_steps as steps
from tests.ranks.collective_steps import Net, check, on_layout

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

STAGES = {"pipeline_parallel_degree": 2}
SHARDS = {"sharded_data_parallel_degree": 2}
LAYOUTS = {
    "replicas": (2, 2, {"pipeline_parallel_degree": 1}),
    "stages": (2, 1, STAGES),
    "four stages": (4, 1, {"pipeline_parallel_degree": 4}),
    "shards": (2, 2, SHARDS),
    "state shards": (2, 2, {"pipeline_parallel_degree": 1, "shard_optimizer_state": True}),
    "stages and shards": (4, 2, {**STAGES, **SHARDS}),
    "parts": (
        4,
        2,
        {"pipeline_parallel_degree": 1, "tensor_parallel_degree": 2, "tensor_parallel": {"*.mlp.0": "column"}},
    ),
    "1f1b": (4, 2, {**STAGES, "pipeline": "1f1b"}),
    "chunks": (4, 2, {**STAGES, "pipeline": "1f1b", "virtual_pipeline_degree": 2}),
    "recomputed": (4, 2, {**STAGES, "activation_checkpointing": "all"}),
    "measured": (4, 2, {**STAGES, "trace_execution_times": True}),
}
STEPS = [
    *(steps.gathered_with_gradients, steps.autograd_function, steps.neighbours, steps.own_put_back),
    *(steps.into_plain_tensors, steps.into_one_tensor, steps.on_several_stages, steps.means, steps.objects),
    *(steps.from_and_to_one, steps.exchanged, steps.functional_ones, steps.after_a_look, steps.inside_of_units),
    steps.norms_inside_of_units,
]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_numbers_are_those_of_data_parallel_processes(step):
    check(step, 4, 2, 4, **STAGES)


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_a_single_replica_meets_itself(step):
    check(step, 2, 1, 2, **STAGES)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("step", [steps.on_several_stages, steps.inside_of_units], ids=lambda step: step.__name__)
def test_numbers_are_the_same_on_any_layout(step, layout):
    world_size, replicas, options = LAYOUTS[layout]
    check(step, world_size, replicas, 4, **options)


@pytest.mark.dear
@pytest.mark.parametrize("step", [steps.path_by_values, steps.path_by_number], ids=lambda step: step.__name__)
def test_paths_that_differ_meet_in_order_where_microbatches_do_not_overlap(step):
    check(step, 4, 2, 4, **STAGES, active_microbatches=1)
    check(step, 4, 2, 1, **STAGES)
    check(step, 2, 2, 4, pipeline_parallel_degree=1)


@pytest.mark.parametrize("step", [steps.path_by_values, steps.path_by_number], ids=lambda step: step.__name__)
def test_paths_that_differ_are_refused_where_replicas_would_miss_each_other(step):
    assert "`active_microbatches=1`" in refusal(step, microbatches=4)


def test_whatever_path_is_taken_where_nobody_is_met():
    check(steps.path_by_values, 2, 1, 4, **STAGES)


def refusal(step, world_size=4, microbatches=2, **options):
    with pytest.raises(RuntimeError) as caught:
        run_ranks(on_layout, world_size, step, microbatches, {**STAGES, **options})
    return str(caught.value)


def in_group_of_two(net, x):
    z = net(x)
    total = z.detach().sum(0)
    dist.all_reduce(total, group=net.group)
    return (z * total).mean()


def make_group(ranks):
    """A step in a group that is made before."""

    def train(options):
        def step(net: Net, x):
            net.group = group
            return in_group_of_two(net, x)

        group = dist.new_subgroups_by_enumeration(ranks)[0]
        return on_layout(step, 2, options)

    return train


def test_a_group_of_replicas_is_used_as_it_is():
    found = run_ranks(make_group([[0, 2], [1, 3]]), 4, STAGES)
    wanted = run_ranks(make_group([[0, 1]]), 2, {"pipeline_parallel_degree": 1})
    for outcome in found:
        expected = next(each for each in wanted if each.replica == outcome.replica)
        torch.testing.assert_close(outcome.losses, expected.losses)


def test_a_group_that_mixes_stages_is_refused():
    with pytest.raises(RuntimeError, match=r"process group of the ranks \[0, 1\]") as caught:
        run_ranks(make_group([[0, 1], [2, 3]]), 4, STAGES)
    assert "the ranks [0, 2]" in str(caught.value)
    assert "Leave `group` out" in str(caught.value)


def make_group_in_step(net, x):
    net.group = dist.new_group()
    return in_group_of_two(net, x)


def count_ranks_of_the_world(net, x):
    z = net(x)
    output = [torch.zeros_like(z) for _ in range(4)]
    dist.all_gather(output, z)
    return torch.cat(output).mean() + z.mean()


def send_in_glue(net, x):
    z = net(x)
    dist.isend(z.detach(), 0)
    return z.mean()


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (make_group_in_step, "`new_group` is called in a step"),
        (count_ranks_of_the_world, "4 tensors as `tensor_list`, but 2 replicas meet"),
        (send_in_glue, "into an autograd Function"),
    ],
)
def test_what_cannot_be_is_refused(step, message):
    assert message in refusal(step)


def test_ranks_are_counted_as_ever_outside_of_steps():
    def train():
        functions = (dist.get_rank, dist.get_world_size, dist.all_reduce.__wrapped__, dist.P2POp.__init__)
        codes = [function.__code__ for function in functions]
        on_layout(steps.inside_of_units, 2, STAGES)
        assert codes == [function.__code__ for function in functions]
        seen = []

        def step(net, x):
            seen.append((dist.get_rank(), dist.get_world_size()))
            if len(seen) == 4:
                raise ValueError("stop")
            return net(x).mean()

        with pytest.raises(ValueError, match="stop"):
            on_layout(step, 2, STAGES)
        assert all(size == 2 for _, size in seen)
        total = torch.ones(())
        dist.all_reduce(total)
        return dist.get_rank(), dist.get_world_size(), total.item(), {rank for rank, _ in seen}

    found = run_ranks(train, 4)
    assert [each[:3] for each in found] == [(rank, 4, 4.0) for rank in range(4)]
    assert [each[3] for each in found] == [{0}, {0}, {1}, {1}]
