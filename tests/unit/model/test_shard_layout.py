"""Cuts, runs and rectangles name the elements that counting through indices finds."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from smp_strategy.model.shard_layout import Cut, Rectangle, Run, difference, disjoint, intersection, shard_rectangles

SHAPE = (3, 4, 5)
SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@st.composite
def rectangles(draw):
    offsets, sizes = [], []
    for length in SHAPE:
        start = draw(st.integers(0, length - 1))
        offsets.append(start)
        sizes.append(draw(st.integers(1, length - start)))
    return Rectangle(tuple(offsets), tuple(sizes))


@st.composite
def runs(draw, shape):
    start = draw(st.integers(0, math.prod(shape)))
    return Run(start, draw(st.integers(start, math.prod(shape))))


@st.composite
def strides(draw, shape):
    """Of a tensor without gaps whose dims stand in memory in any order."""
    order = draw(st.permutations(range(len(shape))))
    stride = [0] * len(shape)
    for number, dim in enumerate(order):
        stride[dim] = math.prod(shape[later] for later in order[number + 1 :])
    return tuple(stride)


@st.composite
def cuts(draw, max_length=3):
    """Uneven ones, too, and ranks that have nothing of a block."""
    ranks = draw(st.integers(1, 3))
    lengths = st.lists(st.integers(0, max_length), min_size=ranks, max_size=ranks).map(tuple)
    return tuple(draw(st.lists(lengths, min_size=1, max_size=3))), ranks


def indices(rectangle):
    """Of all elements, one by one."""
    return list(
        itertools.product(*(range(start, start + size) for start, size in zip(*rectangle, strict=True))),
    )


def number(index, stride):
    return sum(place * step for place, step in zip(index, stride, strict=True))


# Rectangles


@given(rectangles(), rectangles())
def test_an_intersection_has_the_elements_of_both(one, other):
    common = intersection(one, other)
    found = set() if common is None else set(indices(common))
    assert found == set(indices(one)) & set(indices(other))


@given(rectangles(), rectangles())
def test_a_difference_has_each_element_of_the_first_only_once(one, other):
    found = [index for part in difference(one, other) for index in indices(part)]
    assert sorted(found) == sorted(set(indices(one)) - set(indices(other)))


@given(st.lists(rectangles(), min_size=1, max_size=6))
def test_rectangles_are_divided_until_each_element_is_in_one(given_ones):
    found = disjoint(given_ones)
    covered = [index for part in found for index in indices(part)]
    assert sorted(covered) == sorted({index for each in given_ones for index in indices(each)})
    for part, of in found.items():
        assert of in given_ones
        assert intersection(part, of) == part


def test_rectangles_that_do_not_overlap_stay_as_they_are():
    halves = [Rectangle((0, 0), (2, 3)), Rectangle((0, 3), (2, 1)), Rectangle((2, 0), (1, 4))]
    assert disjoint([*halves, *halves]) == {half: half for half in halves}
    assert disjoint([Rectangle((), ())]) == {Rectangle((), ()): Rectangle((), ())}
    assert list(disjoint([Rectangle((0, 0), (0, 3))])) == [Rectangle((0, 0), (0, 3))]


@given(rectangles())
def test_a_rectangle_is_a_run_where_its_elements_are_in_a_row(rectangle):
    numbers = [number(index, (20, 5, 1)) for index in indices(rectangle)]
    is_run = numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert rectangle.run_in(SHAPE) == (Run(numbers[0], numbers[-1] + 1) if is_run else None)


@given(rectangles(), rectangles())
def test_the_view_of_a_rectangle_has_its_elements(one, other):
    whole = torch.arange(60).view(SHAPE)
    view = one.view_of(whole)
    assert view.flatten().tolist() == [int(whole[index]) for index in indices(one)]
    if (common := intersection(one, other)) is not None:
        assert torch.equal(common.view_of(view, one), common.view_of(whole))


# Runs


@given(st.data())
def test_rectangles_of_a_run_have_its_elements_in_their_order(data):
    shape = data.draw(SHAPES)
    run, stride = data.draw(runs(shape)), data.draw(strides(shape))
    found = list(run.rectangles(shape, stride))
    assert all(rectangle.numel for rectangle in found)
    assert len(found) <= max(2 * len(shape) - 1, 1)
    numbers = [sorted(number(index, stride) for index in indices(rectangle)) for rectangle in found]
    assert list(itertools.chain(*numbers)) == list(range(run.start, run.stop))
    if math.prod(shape[1:]) > 0 and stride == tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape))):
        assert [rectangle.run_in(shape) for rectangle in found] == [Run(each[0], each[-1] + 1) for each in numbers]
        assert list(run.rectangles(shape)) == found


@given(st.data())
def test_the_view_of_a_rectangle_in_a_run_is_its_memory(data):
    shape = data.draw(SHAPES)
    run, stride = data.draw(runs(shape)), data.draw(strides(shape))
    memory = torch.arange(math.prod(shape))
    whole, values = memory.as_strided(shape, stride), memory[run.start : run.stop]
    for rectangle in run.rectangles(shape, stride):
        view = rectangle.view_of_run(values, run.start, stride)
        assert torch.equal(view, rectangle.view_of(whole))
        assert view.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()
        same = torch.zeros(1, dtype=torch.int64).expand(len(values))  # one element in memory
        assert not rectangle.view_of_run(same, run.start, stride).any()


# Cuts


@given(
    num_ranks=st.integers(1, 5),
    num_blocks=st.integers(1, 4),
    granule=st.integers(1, 3),
    granules=st.integers(5, 12),
    dim=st.integers(0, 2),
)
def test_parts_of_all_ranks_are_the_whole_tensor_again(num_ranks, num_blocks, granule, granules, dim):
    length = num_blocks * granule * granules
    cut = Cut.evenly(dim, length, num_ranks, num_blocks=num_blocks, granule=granule)
    shape = [2, 2, 2]
    shape[dim] = length
    whole = torch.randn(shape)
    parts = [cut.part(whole, rank) for rank in range(num_ranks)]
    assert [part.shape[dim] for part in parts] == [cut.length_of(rank) for rank in range(num_ranks)]
    assert cut.length == length
    assert torch.equal(cut.join(parts), whole)
    lengths = {part.shape[dim] // (num_blocks * granule) for part in parts}
    assert max(lengths) - min(lengths) <= 1


def test_every_rank_has_a_part_of_each_fused_matrix():
    cut = Cut.evenly(0, 12, 2, num_blocks=2, granule=2)
    whole = torch.arange(12)
    assert cut.part(whole, 0).tolist() == [0, 1, 2, 3, 6, 7, 8, 9]
    assert cut.part(whole, 1).tolist() == [4, 5, 10, 11]
    part = torch.zeros(4, dtype=torch.float64)
    cut.fill(part, whole, 1)
    assert part.tolist() == [4, 5, 10, 11]


@pytest.mark.parametrize(("length", "num_blocks", "granule"), [(7, 2, 1), (12, 1, 5), (4, 1, 4)])
def test_what_does_not_fit_is_refused(length, num_blocks, granule):
    with pytest.raises(ValueError, match=f"{length} elements"):
        Cut.evenly(0, length, 2, num_blocks=num_blocks, granule=granule)


def owners(cut, ranks):
    """The rank that has each place along the dim that is cut, and the place in its part."""
    found, filled = [], [0] * ranks
    for lengths in cut.blocks:
        for rank, length in enumerate(lengths):
            found += [(rank, filled[rank] + place) for place in range(length)]
            filled[rank] += length
    return found


@given(SHAPES.filter(bool), st.data())
def test_rectangles_of_a_cut_and_a_run_have_the_elements_that_the_rank_holds(shape, data):
    dim = data.draw(st.integers(0, len(shape) - 1))
    blocks, ranks = data.draw(cuts())
    cut = Cut(dim, blocks)
    place_of = {owner: place for place, owner in enumerate(owners(cut, ranks))}
    seen = []
    for rank in range(ranks):
        part_shape = (*shape[:dim], cut.length_of(rank), *shape[dim + 1 :])
        stride = data.draw(strides(part_shape))
        middle = data.draw(st.integers(0, math.prod(part_shape)))
        for run in (Run(0, middle), Run(middle, math.prod(part_shape))):
            expected = {}
            for inside in itertools.product(*map(range, part_shape)):
                if run.start <= number(inside, stride) < run.stop:
                    expected[*inside[:dim], place_of[rank, inside[dim]], *inside[dim + 1 :]] = inside
            found = {}
            for whole, part in shard_rectangles(part_shape, stride, run=run, cut=cut, rank=rank):
                assert not found.keys() & set(indices(whole))
                found.update(zip(indices(whole), indices(part), strict=True))
            assert found == expected
            seen += found
    assert sorted(seen) == sorted(itertools.product(*map(range, (*shape[:dim], cut.length, *shape[dim + 1 :]))))


@given(SHAPES.filter(bool), st.data())
def test_rectangles_of_a_cut_are_where_its_parts_come_from(shape, data):
    dim = data.draw(st.integers(0, len(shape) - 1))
    blocks, ranks = data.draw(cuts())
    cut = Cut(dim, blocks)
    whole = torch.arange(math.prod(shape) // shape[dim] * cut.length).view(*shape[:dim], cut.length, *shape[dim + 1 :])
    for rank in range(ranks):
        part = cut.part(whole, rank)
        for place, inside in shard_rectangles(part.shape, part.stride(), cut=cut, rank=rank):
            assert torch.equal(place.view_of(whole), inside.view_of(part))


def test_without_cut_and_run_it_is_the_whole_tensor():
    assert list(shard_rectangles((2, 3), (3, 1))) == [(Rectangle((0, 0), (2, 3)),) * 2]
    assert list(shard_rectangles((), ())) == [(Rectangle((), ()),) * 2]
