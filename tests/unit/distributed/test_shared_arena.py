"""An arena and those who read it, in one process and in a child."""

import gc
import os
from pathlib import Path

import pytest
import torch

from smp_strategy.distributed.shared_arena import GRANULE, STEPS_KEPT, Arena, PeerArena
from smp_strategy.errors import SMPError

MIB = 1 << 20


def resident(arena: Arena) -> int:
    """Bytes that the file takes."""
    return os.fstat(arena.address.descriptor).st_blocks * 512


def bytes_of(peer: PeerArena, start: int, nbytes: int) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(peer.take(start, nbytes))


@pytest.fixture
def arena():
    arena = Arena(8 * MIB)
    yield arena
    arena.close()


def test_a_peer_reads_what_was_put_and_gives_it_back(arena):
    peer = PeerArena(arena.address)
    first = arena.put(torch.full((MIB,), 7, dtype=torch.uint8), (1,))
    second = arena.put(torch.full((MIB,), 8, dtype=torch.uint8), (1,))
    seen, view = bytes_of(peer, first, MIB), bytes_of(peer, second, MIB)[5:9]
    assert seen.eq(7).all()
    assert arena.live_blocks == 2
    del seen
    gc.collect()
    assert arena.live_blocks == 1
    assert arena.put(torch.full((MIB,), 9, dtype=torch.uint8), (1,)) == first  # used again
    assert view.tolist() == [8] * 4  # a part keeps the whole


def test_the_reader_may_write_to_its_block(arena):
    seen = bytes_of(PeerArena(arena.address), arena.put(torch.zeros(64, dtype=torch.uint8), (1,)), 64)
    seen.add_(3)
    assert seen.sum() == 3 * 64


def test_another_order_in_memory_is_kept(arena):
    tensor = torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1)
    start = arena.put(tensor, (1, 12, 4))
    seen = torch.empty(0).set_(PeerArena(arena.address).take(start, 96), 0, tensor.shape, (1, 12, 4))
    assert torch.equal(seen, tensor)


@pytest.mark.parametrize("tensor", [torch._efficientzerotensor(8), torch.rand(8, dtype=torch.complex64).conj()])
def test_tensors_that_are_not_what_their_memory_says_are_resolved(tensor, arena):
    start = arena.put(tensor, (1,))
    seen = torch.empty(0, dtype=tensor.dtype).set_(PeerArena(arena.address).take(start, tensor.nbytes))
    assert torch.equal(seen, tensor.clone())


def test_a_full_arena_says_what_to_do(arena):
    for _ in range(8):
        arena.put(torch.zeros(MIB, dtype=torch.uint8), (1,))
    with pytest.raises(SMPError, match="stage_transport=gloo"):
        arena.put(torch.zeros(1, dtype=torch.uint8), (1,))


def test_memory_that_steps_do_not_use_any_more_goes_back_to_the_system(arena):
    peer, large, small = PeerArena(arena.address), torch.ones(6 * MIB), torch.ones(GRANULE, dtype=torch.uint8)
    large = large[:MIB]  # 4 MiB
    bytes_of(peer, arena.put(large, (1,)), 4)
    assert resident(arena) >= 4 * MIB
    for step in range(STEPS_KEPT + 1):
        assert resident(arena) >= 4 * MIB, step
        arena.trim()
        arena.trim()  # without a block in between: no step
        bytes_of(peer, arena.put(small, (1,)), 4)
    arena.trim()
    assert resident(arena) < MIB


def test_what_peers_hold_outlives_the_arena():
    arena = Arena(8 * MIB)
    peer = PeerArena(arena.address)
    kept, dropped = (arena.put(torch.full((MIB,), value, dtype=torch.uint8), (1,)) for value in (1, 2))
    seen = bytes_of(peer, kept, MIB)
    bytes_of(peer, dropped, MIB)
    descriptor = os.dup(arena.address.descriptor)
    arena.close()
    assert os.fstat(descriptor).st_blocks * 512 < 2 * MIB
    os.close(descriptor)
    del arena, peer
    gc.collect()
    assert seen.eq(1).all()


def test_what_a_forked_process_drops_stays_with_its_parent(arena):
    seen = bytes_of(PeerArena(arena.address), arena.put(torch.ones(64, dtype=torch.uint8), (1,)), 64)
    child = os.fork()
    if child == 0:
        del seen
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    assert arena.live_blocks == 1
    assert seen.sum() == 64


def test_other_systems_and_files_are_out_of_reach(arena, tmp_path):
    with pytest.raises(OSError, match="another machine"):
        PeerArena(arena.address._replace(system="another"))
    with pytest.raises(OSError, match="another file"):
        PeerArena(arena.address._replace(key=b"0" * 16))
    with pytest.raises(OSError, match="No such file"):
        PeerArena(arena.address._replace(descriptor=9999))


def test_an_arena_takes_no_memory_until_it_is_used_and_leaves_no_descriptor():
    before = len(list(Path("/proc/self/fd").iterdir()))
    arena = Arena()
    assert resident(arena) <= 2 * GRANULE
    assert arena.address.capacity >= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    arena.close()
    del arena
    gc.collect()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
