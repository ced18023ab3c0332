"""Calls that all ranks must make together, and what is said if they do not."""

import time

import torch.distributed as dist

from smp_strategy.distributed.rendezvous import alike, meet
from smp_strategy.errors import PeerFailedError, SMPError
from smp_strategy.testing import run_ranks


def fails(*, rank):
    if dist.get_rank() == rank:
        raise OSError("the disk is full")


def meetings():
    found = []
    for number in range(3):
        time.sleep(0.05 * dist.get_rank() * number)
        meet("saving")
    try:
        meet("saving" if dist.get_rank() == 1 else "waiting")
    except SMPError as error:
        found.append(str(error))
    try:
        with alike("writing"):
            fails(rank=2)
    except (OSError, PeerFailedError) as error:
        found.append(f"{type(error).__name__}: {error}")
    meet("saving")
    return found


def test_ranks_that_do_not_meet_are_told_so():
    for rank, (different, failed) in enumerate(run_ranks(meetings, 3)):
        assert "rank 0: `waiting`" in different
        assert "rank 1: `saving`" in different
        assert failed.startswith("OSError" if rank == 2 else "PeerFailedError: Rank 2 failed while writing: OSError")


def diverge():
    """One rank fails where it is alone, and the others are in another call than it expects."""
    try:
        with alike("running hooks"):
            fails(rank=0)
            meet("get_state_dict")
    except (OSError, SMPError) as error:
        return str(error)


def test_the_reason_of_a_rank_that_left_is_not_hidden():
    first, second = run_ranks(diverge, 2)
    assert first == "the disk is full"
    assert "rank 0: the end of running hooks" in second
