"""Rectangles cover exactly the elements of a run, and those of a part of a cut tensor, in their places."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from smp_strategy.checkpoint.local_shards import blocks_of_part, blocks_of_run, rectangles_of_run
from smp_strategy.checkpoint.storage.held_tensor import HeldRectangle
from smp_strategy.tensor_parallel.cut import Cut

SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


def put(blocks, shape):
    """A tensor of ``shape`` with the blocks in their places, and -1 elsewhere; none overlap."""
    whole = torch.full(shape, -1)
    for block in blocks:
        place = whole[tuple(slice(o, o + n) for o, n in zip(block.offsets, block.tensor.shape, strict=True))]
        assert bool((place == -1).all())
        place.copy_(block.tensor)
    return whole


@st.composite
def runs(draw):
    shape = draw(SHAPES)
    start = draw(st.integers(0, math.prod(shape)))
    return shape, start, draw(st.integers(start, math.prod(shape)))


@given(runs(), st.randoms(use_true_random=False))
def test_a_run_is_these_rectangles_whatever_the_order_in_memory(run, random):
    shape, start, stop = run
    order = random.sample(range(len(shape)), len(shape))  # from the slowest dim in memory
    memory = torch.arange(math.prod(shape))
    whole = memory.view([shape[dim] for dim in order]).permute([order.index(dim) for dim in range(len(shape))])
    blocks = blocks_of_run(memory[start:stop], start, shape, whole.stride())
    expected = torch.where((whole >= start) & (whole < stop), whole, -1)
    assert torch.equal(put(blocks, shape), expected)
    assert all(block.tensor.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr() for block in blocks)


@given(runs())
def test_there_are_few_rectangles_and_none_is_empty(run):
    shape, start, stop = run
    found = list(rectangles_of_run(shape, start, stop))
    assert len(found) <= max(2 * len(shape) - 1, 1)
    assert sum(math.prod(rectangle.sizes) for rectangle in found) == stop - start
    assert all(math.prod(rectangle.sizes) for rectangle in found)


@given(SHAPES.filter(bool), st.data())
def test_blocks_of_parts_are_those_of_the_whole(shape, data):
    dim = data.draw(st.integers(0, len(shape) - 1))
    ranks = data.draw(st.integers(1, 3))
    blocks = data.draw(st.lists(st.lists(st.integers(0, 3), min_size=ranks, max_size=ranks), min_size=1, max_size=3))
    cut = Cut(dim, tuple(map(tuple, blocks)))
    shape = (*shape[:dim], cut.length, *shape[dim + 1 :])
    whole = torch.arange(math.prod(shape)).view(shape)
    found = []
    for rank in range(ranks):
        part = cut.part(whole, rank)
        length = data.draw(st.integers(0, part.shape[dim]))
        for first, last in ((0, length), (length, part.shape[dim])):
            offsets = tuple(first if each == dim else 0 for each in range(len(shape)))
            found += blocks_of_part(HeldRectangle(offsets, part.narrow(dim, first, last - first)), cut, rank)
    assert torch.equal(put(found, shape), whole)
