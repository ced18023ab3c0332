"""One rank of hundreds starts: what it makes and whom it talks to, counted where the other ranks do not exist."""

import pytest
import torch.distributed as dist

from benchmarks.startup_at_scale import STAGES, Start, alone, largest
from smp_strategy.distributed.watched_collectives import FAN_OUT, barrier, gather_numbers
from smp_strategy.errors import ApartError
from smp_strategy.testing import run_ranks

# Stages have three more groups for large messages where they are on several nodes.
GROUPS = {8: 2, 64: 7, 512: 7}
# All groups of all axes: one call of torch for each, on each rank.
MADE = {8: 2, 64: 8 + 16 + 8 + 8 + 3 * 8 + 24, 512: 64 + 64 + 64 + 8 + 3 * 64}
# The stages of a replica, four times, the shards, their copies, and all replicas.
CONNECTIONS = {8: 7, 64: 4 * 7 + 3 + 1 + 7, 512: 4 * 7 + 7 + 7 + 63}


@pytest.fixture(scope="module")
def found() -> dict[int, Start]:
    """Of the first stage and the last one, whose rank is 0."""
    return {
        num_ranks: largest([alone(num_ranks, stage, counts=True, is_small=True) for stage in (0, STAGES - 1)])
        for num_ranks in GROUPS
    }


@pytest.mark.parametrize("num_ranks", GROUPS)
def test_a_rank_is_in_a_few_groups_and_has_no_connection_to_all_others(found, num_ranks):
    assert found[num_ranks].groups == GROUPS[num_ranks]
    assert found[num_ranks].made == MADE[num_ranks]
    assert found[num_ranks].connections == CONNECTIONS[num_ranks]


def test_ranks_talk_to_a_few_others_where_all_compare_something(found):
    # Those below it in the tree of all ranks, and the one above it.
    assert found[8].partners == 0
    assert 0 < found[64].partners <= FAN_OUT + 1
    assert 0 < found[512].partners <= FAN_OUT + 1


def test_no_phase_of_the_start_grows_faster_than_the_number_of_ranks(found):
    for phase, calls in found[512].spent.items():
        assert calls < 8 * found[64].spent[phase], phase


def run_deep_tree() -> tuple[list[int], str]:
    """Each rank's square; then the rank at the lower end of the tree is in another call."""
    rank = dist.get_rank()
    numbers = gather_numbers(rank * rank, "squares")
    with pytest.raises(ApartError) as error:
        barrier("an odd call" if rank == FAN_OUT + 2 else "the call of most")
    return numbers, str(error.value)


def test_numbers_pass_through_several_levels_and_so_does_the_call_that_differs():
    ranks = range(FAN_OUT + 3)  # two of them are below the second
    for numbers, error in run_ranks(run_deep_tree, len(ranks)):
        assert numbers == [rank * rank for rank in ranks]
        assert "rank 10: an odd call" in error
        assert all(f"rank {rank}: the call of most" in error for rank in ranks[:-1])
