"""Collectives of flat buffers: every element arrives, and sums are added up in the order that is promised."""

from collections.abc import Callable
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from smp_strategy.distributed import failure
from smp_strategy.distributed.collectives.gloo import GlooCollectives
from smp_strategy.distributed.collectives.interface import Collectives, NativeCollectives, collectives_of
from smp_strategy.distributed.collectives.shared_memory_hop import SharedMemoryHop
from smp_strategy.distributed.handle import Handle
from smp_strategy.distributed.shared_arena import open_arenas
from smp_strategy.testing import run_ranks

DTYPES = [torch.float32, torch.float64, torch.bfloat16]
# 70 elements and more are cut into chunks of unequal size.
SHARDS = [0, 1, 32, 70, 999]


def direct() -> Collectives:
    return collectives_of(dist.group.WORLD, torch.device("cpu"))


def in_shared_memory(most_reduced: int | None = None) -> Collectives:
    group = dist.group.WORLD
    own, theirs, failures = open_arenas(group)
    assert own is not None
    assert not failures
    shared = SharedMemoryHop(group, own, theirs, least_bytes=100)
    return GlooCollectives(group, shared=shared, most_reduced=most_reduced)


def in_shared_memory_in_slices() -> Collectives:
    return in_shared_memory(most_reduced=400)


def two_nodes() -> Collectives:
    return GlooCollectives(dist.group.WORLD, dist.get_world_size() // 2, least_chunk_bytes=64)


def direct_in_slices() -> Collectives:
    return collectives_of(dist.group.WORLD, torch.device("cpu"), most_reduced=100)


def two_nodes_in_slices() -> Collectives:
    ranks = dist.get_world_size()
    return GlooCollectives(dist.group.WORLD, ranks // 2, most_reduced=40 * ranks, least_chunk_bytes=64)


def native() -> Collectives:
    return NativeCollectives(dist.group.WORLD)


def values(rank: int, numel: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """What ``rank`` has; every rank can tell."""
    random = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(numel, generator=random, dtype=torch.float64).to(dtype)


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def gathered_wrongly(make: Callable[[], Collectives]) -> list[str]:
    collectives, wrong = make(), []
    dtypes = [*DTYPES, torch.uint8, torch.bool, torch.int64, torch.complex64, torch.float8_e4m3fn]
    for dtype in dtypes:
        for numel in SHARDS:
            for in_place in (False, True):
                shards = [values(rank, numel, torch.float32).to(dtype) for rank in range(collectives.size)]
                full = torch.zeros(numel * collectives.size, dtype=dtype)
                shard = full.chunk(collectives.size)[collectives.rank] if in_place else torch.zeros(numel, dtype=dtype)
                shard.copy_(shards[collectives.rank])
                collectives.gather(full, shard).wait()
                if bits(full) != b"".join(map(bits, shards)):
                    wrong.append(f"{dtype} {numel} {in_place=}")
    collectives.close()
    return wrong


@pytest.mark.parametrize(
    ("make", "ranks"),
    [(direct, 2), (direct, 3), (in_shared_memory, 3), (two_nodes, 4), (two_nodes, 6), (native, 2)],
)
def test_a_gather_brings_every_byte_of_all_shards(make, ranks):
    assert run_ranks(gathered_wrongly, ranks, make) == [[]] * ranks


def in_order_of_ranks(old: Tensor | None, summands: list[Tensor]) -> Tensor:
    total = summands.pop(0) if old is None else old
    for summand in summands:
        total = total + summand
    return total


def by_node(old: Tensor | None, summands: list[Tensor]) -> Tensor:
    half = len(summands) // 2
    return in_order_of_ranks(old, [in_order_of_ranks(None, summands[:half]), in_order_of_ranks(None, summands[half:])])


def reduced_wrongly(
    make: Callable[[], Collectives], order: Callable[[Tensor | None, list[Tensor]], Tensor]
) -> list[str]:
    collectives, wrong = make(), []
    for dtype in DTYPES:
        for numel in SHARDS:
            # A power of two gives the bits of summands that are multiplied before, but for the tiny ones of float16.
            factors = (1, 0.25) if dtype != torch.float16 else (1,)
            for is_first, factor in product((False, True), factors):
                full = [values(rank, numel * collectives.size, dtype) for rank in range(collectives.size)]
                mine = [part.chunk(collectives.size)[collectives.rank] * factor for part in full]
                into = values(collectives.rank, numel, dtype, seed=1)
                expected = order(None if is_first else into.clone(), mine)
                collectives.reduce(full[collectives.rank], into, is_first=is_first, factor=factor).wait()
                if bits(into) != bits(expected):
                    wrong.append(f"{dtype} {numel} {is_first=} {factor=}")
    collectives.close()
    return wrong


@pytest.mark.parametrize(
    ("make", "ranks", "order"),
    [
        (direct, 2, in_order_of_ranks),
        (direct, 4, in_order_of_ranks),
        (in_shared_memory, 4, in_order_of_ranks),
        (in_shared_memory_in_slices, 2, in_order_of_ranks),
        (two_nodes, 4, by_node),
        (two_nodes, 6, by_node),
        (direct_in_slices, 3, in_order_of_ranks),
        (two_nodes_in_slices, 4, by_node),
    ],
)
def test_a_reduction_adds_in_the_promised_order(make, ranks, order):
    assert run_ranks(reduced_wrongly, ranks, make, order) == [[]] * ranks


def test_the_order_of_additions_can_be_told_from_the_bits():
    summands = [values(rank, 999, torch.float32) for rank in range(4)]
    assert bits(in_order_of_ranks(None, list(summands))) != bits(by_node(None, list(summands)))
    assert bits(in_order_of_ranks(None, list(summands))) != bits(in_order_of_ranks(None, summands[::-1]))


def native_sums() -> list[float]:
    collectives = native()
    full = torch.arange(4.0) + collectives.rank
    into = torch.tensor([100.0, 200.0])
    collectives.reduce(full, into, is_first=False).wait()
    first = torch.zeros(2)
    collectives.reduce(full, first, is_first=True).wait()
    halves = torch.zeros(2)
    collectives.reduce(full, halves, is_first=True, factor=0.5).wait()
    collectives.reduce(full, halves, is_first=False, factor=0.5).wait()
    collectives.all_reduce(full).wait()
    return [*into.tolist(), *first.tolist(), *halves.tolist(), *full.tolist()]


def test_a_backend_that_has_its_own_collectives_gives_the_same_sums():
    sums = [1.0, 3.0, 5.0, 7.0]
    first, second = run_ranks(native_sums, 2)
    assert first == [101.0, 203.0, *sums[:2], *sums[:2], *sums]
    assert second == [105.0, 207.0, *sums[2:], *sums[2:], *sums]


def all_reduced_wrongly() -> list[str]:
    collectives, wrong = direct(), []
    for dtype in DTYPES:
        for numel in [2, 5, 64, 999]:
            found = values(collectives.rank, numel, dtype)
            collectives.all_reduce(found).wait()
            summands = [values(rank, numel, dtype) for rank in range(collectives.size)]
            if bits(found) != bits(in_order_of_ranks(None, summands)):
                wrong.append(f"{dtype} {numel}")
    collectives.close()
    return wrong


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_an_all_reduce_adds_in_the_order_of_the_ranks_on_all_of_them(ranks):
    assert run_ranks(all_reduced_wrongly, ranks) == [[]] * ranks


def all_reduced_by_node_wrongly() -> list[str]:
    """Several at a time, waited for in the opposite order."""
    collectives, wrong = two_nodes(), []
    for dtype in DTYPES:
        cases = []
        for number, numel in enumerate([0, 1, 2, 5, 64, 280, 999, 4096]):
            found = values(collectives.rank, numel, dtype, seed=number)
            expected = by_node(None, [values(rank, numel, dtype, seed=number) for rank in range(collectives.size)])
            cases.append((numel, found, expected, collectives.all_reduce(found)))
        for numel, found, expected, work in reversed(cases):
            work.wait()
            if bits(found) != bits(expected):
                wrong.append(f"{dtype} {numel}")
    collectives.close()
    return wrong


@pytest.mark.parametrize("ranks", [4, 6])
def test_an_all_reduce_over_two_nodes_adds_up_node_by_node_on_all_ranks(ranks):
    assert run_ranks(all_reduced_by_node_wrongly, ranks, timeout=60) == [[]] * ranks


def waits_for_a_summand() -> list[float]:
    collectives = two_nodes()
    summands = [torch.zeros(64) for _ in range(3)]

    def fill(summand: Tensor) -> None:
        summand.fill_(1.0 + collectives.rank)

    # The relay thread does this wait.
    work = [
        collectives.all_reduce(summand, [Handle(lambda summand=summand: fill(summand))])  # type: ignore[misc]
        for summand in summands
    ]
    for each in work:
        each.wait()
    collectives.close()
    return [summand.sum().item() for summand in summands]


def test_an_all_reduce_over_two_nodes_begins_when_its_summand_is_ready():
    assert run_ranks(waits_for_a_summand, 4, timeout=60) == [[640.0] * 3] * 4


def many_at_once(make: Callable[[], Collectives]) -> bool:
    collectives = make()
    steps = range(6)
    fulls = [torch.zeros(70 * collectives.size) for _ in steps]
    sums = [torch.zeros(70) for _ in steps]
    gradients = [torch.full((70 * collectives.size,), step + 10.0 * collectives.rank) for step in steps]
    under_way = []
    for step in steps:
        shard = torch.full((70,), step + 10.0 * collectives.rank)
        under_way.append(collectives.gather(fulls[step], shard))
        under_way.append(collectives.reduce(gradients[step], sums[step], is_first=True))
    for pending in reversed(under_way):
        pending.wait()
        pending.wait()
    collectives.close()
    ranks = torch.arange(float(collectives.size)).repeat_interleave(70) * 10
    total = sum(10.0 * rank for rank in range(collectives.size))
    return all(
        torch.equal(fulls[step], ranks + step)
        and torch.equal(sums[step], torch.full((70,), total + step * collectives.size))
        for step in steps
    )


@pytest.mark.parametrize(
    ("make", "ranks"),
    [(direct, 2), (in_shared_memory, 4), (two_nodes, 4), (direct_in_slices, 3), (two_nodes_in_slices, 4)],
)
def test_many_can_be_under_way_and_are_waited_for_in_any_order(make, ranks):
    assert run_ranks(many_at_once, ranks, make) == [True] * ranks


def wait_for_a_neighbour_first(make: Callable[[], Collectives]) -> float:
    collectives = make()
    full, shard = torch.zeros(280), torch.full((70,), float(collectives.rank))
    gathering = collectives.gather(full, shard)
    into = torch.zeros(70)
    reducing = collectives.reduce(torch.ones(280), into, is_first=True)
    neighbour = collectives.rank ^ 1
    word = torch.zeros(1)
    if collectives.rank % 2:  # the others pass things on to this one, while they wait for its word
        gathering.wait()
        reducing.wait()
        dist.send(word, neighbour)
    else:
        dist.recv(word, neighbour)
        gathering.wait()
        reducing.wait()
    collectives.close()
    return full.sum().item() + into.sum().item()


@pytest.mark.parametrize("make", [two_nodes, two_nodes_in_slices])
def test_things_are_passed_on_while_a_rank_waits_for_something_else(make):
    assert run_ranks(wait_for_a_neighbour_first, 4, make, timeout=20) == [70.0 * 6 + 280.0] * 4


def without_the_others(make: Callable[[], Collectives]) -> str:
    collectives = make()
    failure._PATIENCE_SECONDS = 0.1
    if collectives.rank == 0:
        return ""
    try:
        collectives.gather(torch.zeros(280), torch.zeros(280 // collectives.size)).wait()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing happened"


def all_reduces_without_the_others() -> str:
    collectives = two_nodes()
    failure._PATIENCE_SECONDS = 0.1
    if collectives.rank == 0:
        return ""
    try:
        collectives.all_reduce(torch.zeros(280)).wait()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing happened"


def test_a_rank_that_stops_is_named_to_those_who_wait_for_its_summands():
    _, *others = run_ranks(all_reduces_without_the_others, 4, timeout=60)
    assert "rank 0 failed first: its process (" in "".join(others)
    assert all(error.startswith("PeerFailedError") for error in others)


@pytest.mark.parametrize(("make", "ranks"), [(direct, 2), (in_shared_memory, 2), (two_nodes, 4)])
def test_a_rank_that_stops_is_named_to_those_who_wait_for_it(make, ranks):
    _, *others = run_ranks(without_the_others, ranks, make)
    assert "rank 0 failed first: its process (" in "".join(others)
    assert all(error.startswith("PeerFailedError") for error in others)


def bytes_to_the_other_node(numel: int) -> tuple[int, int, int]:
    """That this rank sends for a gather, for a reduction and for an all-reduce."""
    collectives = two_nodes()
    messages = collectives._messages
    sent: list[tuple[int, int]] = []
    send = messages.send
    messages.send = lambda tensor, peer, tag: (sent.append((peer, tensor.nbytes)), send(tensor, peer, tag))[1]
    collectives.gather(torch.zeros(numel * 4), torch.zeros(numel)).wait()
    gather = sum(size for peer, size in sent if peer // 2 != collectives.rank // 2)
    sent.clear()
    collectives.reduce(torch.zeros(numel * 4), torch.zeros(numel), is_first=True).wait()
    reduce = sum(size for peer, size in sent if peer // 2 != collectives.rank // 2)
    sent.clear()
    collectives.all_reduce(torch.zeros(numel * 4)).wait()
    all_reduce = sum(size for peer, size in sent if peer // 2 != collectives.rank // 2)
    collectives.close()
    return gather, reduce, all_reduce


def test_each_byte_crosses_the_link_between_nodes_once_per_node():
    # A node has half of the 16000 bytes of the buffer: the other one needs no more and no less. An all-reduce is both,
    # and all ranks send the same.
    assert run_ranks(bytes_to_the_other_node, 4, 1000) == [(4000, 4000, 8000)] * 4


def most_arriving_at_once(make: Callable[[], Collectives], numel: int) -> int:
    """Elements of summands that a reduction has memory for at a time, while the others have yet to send."""
    collectives = make()
    messages = collectives._messages
    open_, most = 0, 0
    receive = messages.receive

    def received(tensor: Tensor, peer: int, tag: int) -> Handle[None]:
        nonlocal open_, most

        def waited(_: None) -> None:
            nonlocal open_
            open_ -= tensor.numel()

        open_ += tensor.numel()
        most = max(most, open_)
        return receive(tensor, peer, tag).then(waited)

    messages.receive = received
    collectives.reduce(torch.zeros(numel * collectives.size), torch.zeros(numel), is_first=True).wait()
    collectives.close()
    return most


def test_memory_for_summands_does_not_grow_with_the_buffer_where_it_is_reduced_in_slices():
    assert run_ranks(most_arriving_at_once, 3, direct, 999) == [2 * 999] * 3
    assert run_ranks(most_arriving_at_once, 3, direct_in_slices, 999) == [2 * 33] * 3
    # Per element of a run: what a neighbour has for both nodes, and the sum of the other node.
    assert run_ranks(most_arriving_at_once, 4, two_nodes_in_slices, 999) == [3 * 40] * 4


def blocks_left() -> int:
    collectives = in_shared_memory()
    full, into = torch.zeros(400 * collectives.size), torch.zeros(400)
    for _ in range(3):
        collectives.gather(full, torch.ones(400)).wait()
        collectives.reduce(full, into, is_first=True).wait()
    dist.barrier()
    hop = collectives._shared
    assert hop._own._blocks.peak > 0, "the arena was used"
    left = hop._own.live_blocks
    collectives.close()
    return left


def test_blocks_in_shared_memory_are_given_back():
    assert run_ranks(blocks_left, 3, timeout=60) == [0, 0, 0]
