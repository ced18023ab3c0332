"""Messages that nobody waits for, after a failure: the connection that they have begun on stays usable."""

import gc
import time

import pytest
import torch
import torch.distributed as dist

from smp_strategy.distributed import pending_messages, watched_collectives
from smp_strategy.distributed.failure import begin_run
from smp_strategy.testing import run_ranks


def abandon_a_receive():
    world = dist.group.WORLD
    if dist.get_rank() == 0:
        pending_messages.receive(torch.empty(4), 1, 5, world)
        gc.collect()
        time.sleep(0.5)
    else:
        time.sleep(0.2)
        pending_messages.send(torch.ones(4), 0, 5, world)()
    return watched_collectives.gather_numbers(dist.get_rank(), "the next step")


def test_messages_after_an_abandoned_one_arrive():
    assert run_ranks(abandon_a_receive, 2, timeout=20) == [[0, 1]] * 2


def reduced(number):
    tensor = torch.tensor([number])
    return tensor, watched_collectives.reduce_numbers(tensor, group=None, doing="the stop")


def abandon_a_reduction(ahead):
    if dist.get_rank() == ahead:
        reduced(100)
    begin_run()
    tensor, handle = reduced(1)
    handle.wait()
    return tensor.item()


@pytest.mark.parametrize("ahead", range(3))
def test_numbers_of_a_failed_run_are_not_those_of_the_next(ahead):
    assert run_ranks(abandon_a_reduction, 3, ahead, timeout=20) == [3] * 3
