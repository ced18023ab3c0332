import torch
from hypothesis import given
from hypothesis import strategies as st

from smp_strategy.checkpoint.storage.rectangles import Rectangle, cut_out, disjoint, shared

SHAPE = (3, 4, 5)


@st.composite
def rectangles(draw, *, may_be_empty=False):
    offsets, sizes = [], []
    for length in SHAPE:
        start = draw(st.integers(0, length - 1))
        offsets.append(start)
        sizes.append(draw(st.integers(0 if may_be_empty else 1, length - start)))
    return Rectangle(tuple(offsets), tuple(sizes))


def marked(rectangle):
    mask = torch.zeros(SHAPE, dtype=torch.int)
    mask[tuple(slice(start, start + size) for start, size in zip(*rectangle, strict=True))] = 1
    return mask


@given(rectangles(), rectangles())
def test_what_two_rectangles_share_are_the_elements_of_both(one, other):
    common = shared(one, other)
    expected = marked(one) * marked(other)
    assert torch.equal(torch.zeros_like(expected) if common is None else marked(common), expected)


@given(st.lists(rectangles(), min_size=1, max_size=6))
def test_rectangles_are_divided_until_each_element_is_in_one(given_ones):
    found = disjoint(given_ones)
    assert torch.equal(sum(map(marked, found)), sum(map(marked, given_ones)).clamp(max=1))
    for part, of in found.items():
        assert of in given_ones
        assert shared(part, of) == part


def test_rectangles_that_do_not_overlap_stay_as_they_are():
    halves = [Rectangle((0, 0), (2, 3)), Rectangle((0, 3), (2, 1)), Rectangle((2, 0), (1, 4))]
    assert disjoint([*halves, *halves]) == {half: half for half in halves}
    assert disjoint([Rectangle((), ())]) == {Rectangle((), ()): Rectangle((), ())}
    assert list(disjoint([Rectangle((0, 0), (0, 3))])) == [Rectangle((0, 0), (0, 3))]


@given(rectangles())
def test_a_run_is_where_the_elements_are_in_a_row(rectangle):
    numbers = torch.arange(60).view(SHAPE)
    inside = numbers[tuple(slice(start, start + size) for start, size in zip(*rectangle, strict=True))].flatten()
    is_run = bool((inside.diff() == 1).all())
    assert rectangle.run_in(SHAPE) == ((int(inside[0]), int(inside[-1]) + 1) if is_run else None)


@given(rectangles(), rectangles())
def test_a_part_of_a_block_is_cut_out_of_it(one, other):
    numbers = torch.arange(60).view(SHAPE)
    if (common := shared(one, other)) is not None:
        whole = Rectangle((0, 0, 0), SHAPE)
        assert torch.equal(cut_out(cut_out(numbers, whole, one), one, common), cut_out(numbers, whole, common))
