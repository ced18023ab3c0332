"""Sums of gradients over replicas on two nodes: hierarchical, flat, and those of one process."""

import os
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from smp_strategy.data_parallel import gradient_sums
from smp_strategy.data_parallel.bucketed_all_reduce import BucketedAllReduce
from smp_strategy.distributed.collectives import fusion_buffers
from smp_strategy.distributed.collectives.fusion_buffers import FusionBuffers
from smp_strategy.distributed.collectives.gloo import GlooCollectives
from smp_strategy.errors import ConfigError
from smp_strategy.testing import run_ranks
from tests.ranks.replica_training import differing, one_process, trained

# Buffers of 256 elements: the model has parameters that are smaller and larger.
BUFFER_BYTES = 1024


def train(options: dict[str, Any], per_node: str, overlaps: bool = True) -> tuple[dict[str, Tensor], bool, int]:
    """Weights of this rank, whether its sums are hierarchical, and the threads that are left behind."""
    os.environ["LOCAL_WORLD_SIZE"] = per_node
    fusion_buffers.FusionBuffers.__init__.__defaults__ = (BUFFER_BYTES,)
    model, engine = trained(options, overlaps)
    sums = engine.local_model.reduction._sums
    is_hierarchical = sums is not None and isinstance(sums.begin(), FusionBuffers)
    found = {name: value.clone() for name, value in model.state_dict().items()}
    engine.close()
    relays = sum(thread.name == "relay" for thread in threading.enumerate())
    return found, is_hierarchical, relays


@pytest.mark.parametrize("how", ["auto", "hierarchical"])
@pytest.mark.parametrize("overlaps", [True, False])
def test_sums_over_two_nodes_are_those_of_one_process_that_adds_node_by_node(how, overlaps):
    everyones = run_ranks(train, 4, {"ddp_reduction": how}, "2", overlaps, timeout=90)
    for found, is_hierarchical, relays in everyones:
        assert is_hierarchical
        assert not relays
        assert not differing(found, one_process(by_node=True))


def test_flat_sums_differ_by_rounding_only():
    hierarchical = run_ranks(train, 4, {}, "2", timeout=90)[0][0]
    for found, is_hierarchical, _ in run_ranks(train, 4, {"ddp_reduction": "flat"}, "2", timeout=90):
        assert not is_hierarchical
        for name, value in hierarchical.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("ranks", "per_node"), [(2, "2"), (2, "1"), (4, "4"), (4, "1")])
def test_without_a_hierarchy_they_are_flat(ranks, per_node):
    found = run_ranks(train, ranks, {"ddp_reduction": "hierarchical"}, per_node, timeout=90)
    assert [is_hierarchical for _, is_hierarchical, _ in found] == [False] * ranks
    assert all(not differing(weights, found[0][0]) for weights, *_ in found)


def refused_elsewhere() -> str:
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    gradient_sums.is_gloo = lambda group, device: False
    with pytest.raises(ConfigError) as caught:
        trained({"ddp_reduction": "hierarchical"})
    trained({})
    return str(caught.value)


def test_another_backend_refuses_them_if_they_are_asked_for():
    for message in run_ranks(refused_elsewhere, 4, timeout=60):
        assert message.startswith("`ddp_reduction=hierarchical` is for gloo, but gradients on cpu")


def test_gradients_may_travel_in_a_narrower_dtype():
    narrow = run_ranks(train, 4, {"reduce_dtype": "bfloat16"}, "2", timeout=90)
    assert all(not differing(weights, narrow[0][0]) for weights, *_ in narrow)
    for name, value in one_process(by_node=True).items():
        torch.testing.assert_close(narrow[0][0][name], value, rtol=0.05, atol=0.02)


def train_in_shards(options: dict[str, Any]) -> dict[str, Tensor]:
    """Shard groups of two, two of them on each node: four ranks with the same shards."""
    os.environ["LOCAL_WORLD_SIZE"] = "4"
    _, engine = trained({"sharded_data_parallel_degree": 2, **options})
    found = engine.saved.full_state_dict()
    engine.close()
    return found


@pytest.mark.dear
@pytest.mark.parametrize("deals_out", [False, True])
def test_shards_are_summed_over_replicas_in_hops_too(deals_out):
    flat = run_ranks(train_in_shards, 8, {"ddp_reduction": "flat", "shard_optimizer_state": deals_out}, timeout=100)[0]
    found = run_ranks(train_in_shards, 8, {"shard_optimizer_state": deals_out}, timeout=100)[0]
    assert differing(found, flat), "another order of additions"
    for name, value in flat.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


def filled(sizes: list[int]) -> tuple[list[int], list[float]]:
    """Elements of each all-reduce, and how far the sums are off."""
    collectives = GlooCollectives(dist.group.WORLD, 2, least_chunk_bytes=64)
    sent = []
    all_reduce = collectives.all_reduce
    collectives.all_reduce = lambda tensor: (sent.append(tensor.numel()), all_reduce(tensor))[1]  # type: ignore
    buffers = FusionBuffers(collectives, 400)
    tensors = [torch.arange(size) + 1000.0 * number for number, size in enumerate(sizes)]
    sums = [buffers.add([tensor * (collectives.rank + 1)], dtype=torch.float32) for tensor in tensors]
    buffers.flush()
    off = [(sum_.wait() - 10 * tensor).abs().sum().item() for sum_, tensor in zip(sums, tensors, strict=True)]
    collectives.close()
    return sent, off


@pytest.mark.parametrize(
    ("sizes", "sent"), [([30, 50, 40], [100, 20]), ([250], [100, 100, 50]), ([100, 100], [100, 100]), ([0, 3], [3])]
)
def test_all_reduces_have_one_size_whatever_the_sizes_of_tensors(sizes, sent):
    assert run_ranks(filled, 4, sizes, timeout=60) == [(sent, [0.0] * len(sizes))] * 4


def two_dtypes() -> list[float]:
    collectives = GlooCollectives(dist.group.WORLD, 2)
    buffers = FusionBuffers(collectives)
    wide = buffers.add([torch.ones(5), torch.ones(2, 3)], dtype=torch.float32)
    narrow = buffers.add([torch.ones(4)], dtype=torch.bfloat16)
    none = buffers.add([], dtype=torch.float32)
    buffers.flush()
    sums = [wide.wait(), narrow.wait(), none.wait()]
    assert [each.dtype for each in sums] == [torch.float32, torch.bfloat16, torch.float32]
    collectives.close()
    return [each.sum().item() for each in sums]


def test_each_dtype_has_buffers_of_its_own():
    assert run_ranks(two_dtypes, 4, timeout=60) == [[44.0, 16.0, 0.0]] * 4


def sent_early() -> tuple[int, int]:
    """Buffers under way when the first layer's gradient is there, and in the end."""
    collectives = GlooCollectives(dist.group.WORLD, 2)
    started = []
    all_reduce = collectives.all_reduce
    collectives.all_reduce = lambda tensor: (started.append(tensor.numel()), all_reduce(tensor))[1]  # type: ignore
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(4)))
    buckets = [[[layer.weight]] for layer in reversed(net)]
    sums = BucketedAllReduce(buckets, dist.group.WORLD, joined=FusionBuffers(collectives, BUFFER_BYTES))
    early = []
    with sums.watching():
        net[0].weight.register_post_accumulate_grad_hook(lambda _: early.append(len(started)))
        net(torch.ones(2, 16)).sum().backward()
    sums.send_rest()
    found, was_early, _ = sums.finish()
    assert not was_early
    for layer in net:
        assert torch.isfinite(found[layer.weight]).all()
    collectives.close()
    return early[0], len(started)


def test_a_full_buffer_travels_while_backward_computes():
    # Four layers of 256 weights and a flag each, in buffers of 256 elements.
    assert run_ranks(sent_early, 4, timeout=60) == [(4, 5)] * 4
