"""Buffers of host memory: of few sizes, from large slabs, used again and given back."""

import pytest
import torch
from torch import Tensor

from smp_strategy.distributed.pinned_pool import PinnedPool
from tests.unit.activations.double import Moment


class System:
    """Where slabs come from."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def allocate(self, nbytes: int) -> Tensor:
        self.asked.append(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8, device="meta")


@pytest.mark.parametrize("nbytes", [1, 511, 513, 5000, 3 << 20, (33 << 20) + 1, (300 << 20) + 7])
def test_a_buffer_is_at_most_an_eighth_or_half_a_kibibyte_larger_than_asked_for(nbytes: int) -> None:
    size = PinnedPool(System().allocate).lease(nbytes).memory.numel()
    assert nbytes <= size <= max(nbytes * 9 / 8, nbytes + 511)


@pytest.mark.parametrize("nbytes", [1000, 3 << 20, 33 << 20, 300 << 20])
def test_memory_is_asked_for_in_powers_of_two_that_hold_several_buffers(nbytes: int) -> None:
    system = System()
    memory = PinnedPool(system.allocate)
    leases = [memory.lease(nbytes) for _ in range(3)]
    assert len(leases) == 3
    assert all(asked == 1 << (asked.bit_length() - 1) for asked in system.asked)
    assert len(system.asked) == (3 if nbytes > 1 << 28 else 1)
    assert memory.allocated == sum(system.asked)


def test_a_buffer_whose_lease_is_gone_is_used_again_and_knows_how_long_it_is_busy() -> None:
    system = System()
    memory = PinnedPool(system.allocate)
    lease = memory.lease(1000)
    moment = Moment("read")
    lease.busy_until = moment
    address = lease.memory.storage_offset()
    assert memory.leased > 0
    del lease
    assert memory.leased == 0
    again = memory.lease(999)
    assert again.memory.storage_offset() == address
    assert again.busy_until is moment
    assert len(system.asked) == 1


def test_sizes_do_not_share_buffers() -> None:
    memory = PinnedPool(System().allocate)
    large = memory.lease(5000)
    del large
    assert memory.lease(600).memory.numel() < 5000


def test_memory_that_nobody_has_used_for_a_whole_step_is_given_back() -> None:
    memory = PinnedPool(System().allocate)
    kept, gone = memory.lease(1000), memory.lease(100_000)
    del gone
    memory.trim()
    before = memory.allocated
    memory.trim()
    assert 0 < memory.allocated < before
    del kept
    memory.trim()
    assert memory.allocated == 0


def test_the_highest_amount_is_remembered() -> None:
    memory = PinnedPool(System().allocate)
    leases = [memory.lease(1024) for _ in range(3)]
    leases.clear()
    memory.lease(1024)
    assert memory.most_leased == 3 * 1024
