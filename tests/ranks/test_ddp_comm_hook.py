"""The hierarchical hook of DistributedDataParallel: weights are those without a hook, on two nodes and on one."""

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from smp_strategy import ConfigError, HierarchicalAllReduceState, hierarchical_allreduce_hook
from smp_strategy.config.config import SMPConfig
from smp_strategy.distributed import failure
from smp_strategy.distributed.topology import ranks_per_node
from smp_strategy.integrations.sagemaker.distributed_model import options_for
from smp_strategy.testing import run_ranks

STEPS = 3


def made() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 70), nn.Tanh(), nn.Linear(70, 33), nn.Tanh(), nn.Linear(33, 1))


def batch(number: int) -> Tensor:
    torch.manual_seed(number)
    return torch.randn(4, 6)


def train(hooked: bool, per_node: str, arguments: dict[str, Any], microbatches: int = 1) -> tuple[list[Tensor], Any]:
    os.environ["LOCAL_WORLD_SIZE"] = per_node
    model = made()
    # Buckets of 4 KB, and buffers of 256 elements.
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.004)
    state = None
    if hooked:
        state = HierarchicalAllReduceState(buffer_bytes=1024, **arguments)
        wrapped.register_comm_hook(state, hierarchical_allreduce_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        for microbatch in range(microbatches):
            data = batch((step * microbatches + microbatch) * dist.get_world_size() + dist.get_rank())
            with wrapped.no_sync() if microbatch < microbatches - 1 else torch.enable_grad():
                wrapped(data).square().mean().backward()
        optimizer.step()
    if state is not None:
        state.close()
    return [each.detach() for each in model.parameters()], state and state.ranks_per_node


def one_process() -> list[Tensor]:
    """Four replicas, added up node by node."""
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        found = []
        for replica in range(4):
            model.zero_grad()
            model(batch(step * 4 + replica)).square().mean().backward()
            found.append([each.grad for each in model.parameters()])
        for each, g0, g1, g2, g3 in zip(model.parameters(), *found, strict=True):
            each.grad = (g0 / 4 + g1 / 4) + (g2 / 4 + g3 / 4)
        optimizer.step()
    return list(model.parameters())


@pytest.mark.parametrize("arguments", [{}, {"ranks_per_node": 2}])
def test_weights_over_two_nodes_are_those_of_one_process_that_adds_node_by_node(arguments):
    per_node = "4" if arguments else "2"
    for weights, found in run_ranks(train, 4, True, per_node, arguments, timeout=90):
        assert found == 2
        assert all(map(torch.equal, weights, one_process()))


def test_they_are_those_of_distributed_data_parallel_up_to_rounding():
    plain = run_ranks(train, 4, False, "2", {}, 2, timeout=90)[0][0]
    hooked = run_ranks(train, 4, True, "2", {}, 2, timeout=90)
    for weights, _ in hooked:
        assert all(map(torch.equal, weights, hooked[0][0]))
        for found, expected in zip(weights, plain, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("ranks", "per_node"), [(2, "2"), (2, "1"), (4, "4")])
def test_without_a_hierarchy_they_have_the_same_bits(ranks, per_node):
    plain = run_ranks(train, ranks, False, per_node, {}, timeout=90)[0][0]
    for weights, found in run_ranks(train, ranks, True, per_node, {}, timeout=90):
        assert found is None
        assert all(map(torch.equal, weights, plain))


def in_two_groups() -> tuple[list[float], int | None]:
    """Replicas of two models, of which each is on both nodes."""
    os.environ["LOCAL_WORLD_SIZE"] = "4"
    members = [[0, 1, 4, 5], [2, 3, 6, 7]]
    groups = [dist.new_group(each) for each in members]
    mine = groups[0 if dist.get_rank() in members[0] else 1]
    model = nn.Linear(3, 1, bias=False)
    wrapped = DistributedDataParallel(model, process_group=mine)
    state = HierarchicalAllReduceState(mine)
    wrapped.register_comm_hook(state, hierarchical_allreduce_hook)
    wrapped(torch.full((1, 3), float(dist.get_rank()))).sum().backward()
    state.close()
    return model.weight.grad.flatten().tolist(), state.ranks_per_node


def test_a_process_group_of_some_ranks_has_a_hierarchy_of_its_own():
    averages = [[2.5] * 3, [4.5] * 3]
    assert run_ranks(in_two_groups, 8, timeout=90) == [(averages[rank // 2 % 2], 2) for rank in range(8)]


def refused() -> str:
    try:
        HierarchicalAllReduceState(ranks_per_node=3)
    except ConfigError as error:
        return str(error)
    return ""


def test_nodes_that_do_not_divide_the_ranks_are_refused():
    assert run_ranks(refused, 2) == ["`ranks_per_node` must divide the number of ranks (2), but is 3."] * 2


@pytest.mark.parametrize(
    ("nodes", "found"),
    [("aabb", 2), ("aaaa", 4), ("abcd", 1), ("aab", None), ("abab", None), ("a", 1)],
)
def test_ranks_per_node_are_even_or_unknown(nodes, found):
    assert ranks_per_node(nodes) == found


def without_one() -> str:
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    failure._PATIENCE_SECONDS = 0.1
    wrapped = DistributedDataParallel(made())
    wrapped.register_comm_hook(HierarchicalAllReduceState(), hierarchical_allreduce_hook)
    for number in range(2):  # in its second forward it exchanges the order of its buckets by itself
        wrapped(batch(number)).sum().backward()
    if dist.get_rank() == 3:
        return ""
    try:
        wrapped(batch(1)).sum().backward()
    except RuntimeError as error:
        return str(error)
    return "nothing happened"


def test_a_rank_that_stops_is_named_to_those_who_wait_for_it():
    *others, _ = run_ranks(without_one, 4, timeout=60)
    assert all("PeerFailedError" in error for error in others)
    assert "rank 3" in "".join(others)


def test_a_model_of_sagemakers_library_takes_the_hook_as_an_option():
    assert options_for(hierarchical_allreduce_hook, SMPConfig()).ddp_reduction == "hierarchical"
