"""Blocks never overlap, are as low as they can be, and leave nothing behind."""

from hypothesis import given
from hypothesis import strategies as st

from smp_strategy.distributed.shared_arena import FirstFit

CAPACITY, GRANULE = 40, 4


@given(st.lists(st.one_of(st.integers(1, 17), st.integers(-8, -1)), max_size=60))
def test_blocks_are_apart_and_each_is_the_lowest_that_fits(moves):
    blocks, sizes, peak = FirstFit(CAPACITY, GRANULE), {}, 0
    for move in moves:
        if move < 0:
            if sizes:
                start = sorted(sizes)[move % len(sizes)]
                blocks.give_back(start)
                del sizes[start]
        else:
            size = -(-move // GRANULE) * GRANULE
            taken = {unit for begin, n in sizes.items() for unit in range(begin, begin + n)}
            fitting = (at for at in range(0, CAPACITY - size + 1, GRANULE) if not taken & set(range(at, at + size)))
            start = blocks.take(move)
            assert start == next(fitting, None)
            if start is not None:
                sizes[start] = size
                peak = max(peak, start + size)
        assert blocks.starts == sorted(sizes)
        assert blocks.end == max((begin + n for begin, n in sizes.items()), default=0)
        assert blocks.peak == peak
        taken = {unit for begin, n in sizes.items() for unit in range(begin, begin + n)}
        free = {unit for begin, end in blocks.gaps(CAPACITY) for unit in range(begin, end)}
        assert free == set(range(CAPACITY)) - taken


def test_an_address_range_is_used_up_and_used_again():
    blocks = FirstFit(12, 4)
    assert [blocks.take(1), blocks.take(4), blocks.take(3), blocks.take(1)] == [0, 4, 8, None]
    blocks.give_back(4)
    assert blocks.take(5) is None
    assert blocks.take(2) == 4
