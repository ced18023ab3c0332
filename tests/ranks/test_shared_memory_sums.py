"""Sums of gradients of replicas on one node, in the memory that they share."""

import gc
import os
import signal
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from smp_strategy.data_parallel import gradient_sums
from smp_strategy.distributed.collectives import shared_memory_sums
from smp_strategy.distributed.collectives.shared_memory_sums import SharedMemorySums
from smp_strategy.distributed.shared_arena import open_arenas
from smp_strategy.errors import PeerFailedError
from smp_strategy.testing import run_ranks
from tests.ranks.replica_training import differing, one_process, trained


def train(options: dict[str, Any], overlaps: bool = True, least_bytes: int = 256) -> tuple[dict[str, Tensor], bool]:
    """Weights of this rank, and whether its sums were in shared memory."""
    os.environ["LOCAL_WORLD_SIZE"] = str(dist.get_world_size())
    shared_memory_sums.SharedMemorySums.__init__.__defaults__ = (least_bytes,)
    model, engine = trained(options, overlaps)
    sums = engine.local_model.reduction._sums
    found = {name: value.clone() for name, value in model.state_dict().items()}
    gc.collect()
    dist.barrier()
    if sums is not None:
        assert sums.begin()._own.live_blocks == 0, "everyone has given the sums back"
    engine.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "relay"]
    return found, sums is not None


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("overlaps", [True, False])
def test_sums_are_those_of_one_process_that_adds_in_the_order_of_the_ranks(ranks, overlaps):
    for found, is_shared in run_ranks(train, ranks, {}, overlaps, timeout=90):
        assert is_shared
        assert not differing(found, one_process(ranks))


def test_gradients_may_be_summed_in_a_narrower_dtype():
    narrow = run_ranks(train, 4, {"reduce_dtype": "bfloat16"}, timeout=90)
    assert all(not differing(weights, narrow[0][0]) for weights, _ in narrow)
    assert differing(narrow[0][0], one_process(4))
    for name, value in one_process(4).items():
        torch.testing.assert_close(narrow[0][0][name], value, rtol=0.05, atol=0.02)


def without_memory() -> tuple[dict[str, Tensor], bool]:
    gradient_sums.open_arenas = lambda group: (None, {}, {(0, 1): "in another container"})
    return train({})


def test_ranks_that_cannot_share_memory_use_the_backend():
    for found, is_shared in run_ranks(without_memory, 2, timeout=90):
        assert not is_shared
        assert not differing(found, one_process(2))


def test_flat_sums_are_those_of_the_backend():
    assert [is_shared for _, is_shared in run_ranks(train, 2, {"ddp_reduction": "flat"}, timeout=90)] == [False] * 2


Shapes = list[list[tuple[int, ...]]]


def opened(least_bytes: int) -> SharedMemorySums:
    group = dist.group.WORLD
    own, theirs, failures = open_arenas(group)
    assert own is not None
    assert not failures
    return SharedMemorySums(group, own, theirs, least_bytes)


def summed(steps: list[Shapes], least_bytes: int) -> None:
    """Several sums under way at a time, in several steps."""
    sums = opened(least_bytes)
    for step in steps:
        sum_at_a_time(sums, step)
    gc.collect()
    dist.barrier()
    assert sums._own.live_blocks == 0
    sums.close()


def sum_at_a_time(sums: SharedMemorySums, step: Shapes) -> None:
    tensors = [[torch.arange(torch.Size(each).numel()).reshape(each) + 1.0 for each in together] for together in step]
    summands = [[(dist.get_rank() + 1) * each for each in together] for together in tensors]
    handles = [sums.add(together, dtype=torch.float32) for together in summands]
    sums.flush()
    factor = sum(range(1, dist.get_world_size() + 1))
    for handle, together in zip(handles, tensors, strict=True):
        assert torch.equal(handle.wait(), torch.cat([each.reshape(-1) for each in together]) * factor)
        assert handle.wait() is handle.wait()


shapes = st.lists(st.lists(st.integers(0, 30), max_size=2).map(tuple), min_size=1, max_size=4)


@settings(max_examples=6)
@given(st.lists(st.lists(shapes, max_size=5), max_size=3), st.sampled_from([0, 200, 1 << 20]), st.sampled_from([2, 4]))
def test_tensors_of_any_size(steps, least_bytes, ranks):
    run_ranks(summed, ranks, steps, least_bytes, timeout=60)


def killed_in_a_sum(begins: bool) -> str:
    sums = opened(0)
    sums.add([torch.ones(100)], dtype=torch.float32).wait()
    if dist.get_rank() == 1:
        if begins:
            sums.add([torch.ones(100)], dtype=torch.float32)
        os.kill(os.getpid(), signal.SIGKILL)
    first, second = (sums.add([torch.ones(100)], dtype=torch.float32) for _ in range(2))
    with pytest.raises(PeerFailedError) as caught:
        (first.wait(), second.wait())
    raise RuntimeError(f"noticed: {caught.value}")


@pytest.mark.parametrize("begins", [False, True])
def test_a_rank_that_dies_in_a_sum_is_named(begins):
    with pytest.raises(RuntimeError, match="noticed: .*[Rr]ank 1"):
        run_ranks(killed_in_a_sum, 2, begins, timeout=60)
