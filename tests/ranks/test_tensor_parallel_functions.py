"""Steps between whole, split and summand: forward, backward and the backward of that, against one process."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from smp_strategy.distributed.tensor_group import TensorGroup
from smp_strategy.tensor_parallel.autograd_collectives import add_up, copy, gather, gather_split, scatter_sum, split
from smp_strategy.testing import run_ranks
from tests.ranks.split_layers import assert_close, group_of_all, random

LENGTHS = {2: (3, 2), 4: (2, 1, 1, 1)}
Steps = Callable[[Tensor, list[Tensor]], Tensor]


def own(weights: list[Tensor], group: TensorGroup) -> Tensor:
    """What this rank does with a whole value, in its own way."""
    return weights[group.rank]


def compare(ranks: Steps, one: Steps) -> None:
    """Both go from a whole tensor to a whole tensor; ``one`` knows what all ranks do."""
    found, expected = [], []
    for steps, results in ((ranks, found), (one, expected)):
        x = random(4, 5, 5, seed=1).requires_grad_()
        weights = [random(4, 5, 5, seed=2 + rank) for rank in range(group_of_all().size)]
        y = steps(x, weights)
        (first,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.pow(2).sum(), x)
        results += [y.detach(), first.detach(), second]
    for pair in zip(found, expected, strict=True):
        assert_close(*pair)


def all_steps(dim: int) -> None:
    group = group_of_all()
    lengths = LENGTHS[group.size]

    def parts(tensor: Tensor) -> Tensor:
        return tensor.split(lengths, dim)[group.rank]

    compare(
        lambda x, w: add_up(copy(x, group) * own(w, group), group),
        lambda x, w: sum(x * each for each in w),
    )
    compare(
        lambda x, w: gather(split(x, group, dim, lengths) * parts(w[0]), group, dim, lengths),
        lambda x, w: x * w[0],
    )
    compare(
        lambda x, w: gather(
            scatter_sum(
                gather_split(split(x, group, dim, lengths), group, dim, lengths) * own(w, group), group, dim, lengths
            ),
            *(group, dim, lengths),
        ),
        lambda x, w: sum(x * each for each in w),
    )
    compare(
        lambda x, w: add_up((copy(x, group) * own(w, group)).transpose(0, 1), group),
        lambda x, w: sum(x * each for each in w).transpose(0, 1),
    )


@pytest.mark.parametrize("dim", [1, -1])
@pytest.mark.parametrize("ranks", [2, 4])
def test_first_and_second_derivatives_are_those_of_one_process(ranks: int, dim: int) -> None:
    run_ranks(all_steps, ranks, dim)


def own_memory() -> None:
    group = group_of_all()
    leaf = random(3).requires_grad_()
    total = add_up(leaf, group)
    assert_close(total.detach(), group.size * leaf.detach())
    total.sum().backward()
    assert torch.equal(leaf.grad, torch.ones(3))
    whole = random(2, 3)
    expected = whole.clone()
    add_up(whole[0], group)
    assert torch.equal(whole, expected), "a view's base was changed"
    computed = leaf * 1
    assert add_up(computed, group).data_ptr() == computed.data_ptr(), "memory was copied that nobody needs"
    saved = leaf.exp()  # its backward needs the result
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        add_up(saved, group).sum().backward()


def test_a_sum_is_taken_in_place_where_the_memory_is_nobody_elses() -> None:
    run_ranks(own_memory, 2)


def gradients_shared() -> None:
    group = group_of_all()
    x = random(3).requires_grad_()
    y = x * 1
    seen: list[Tensor] = []
    y.register_hook(seen.append)
    copied = copy(y, group)
    copied.register_hook(seen.append)
    (copied * 1).sum().backward()
    assert torch.equal(seen[0], torch.ones(3)), "a gradient that a hook keeps was changed"
    assert torch.equal(seen[1], torch.full((3,), float(group.size)))


def test_gradients_that_others_have_are_not_changed_in_place() -> None:
    run_ranks(gradients_shared, 2)


def test_fake_tensors_get_their_shapes_and_nothing_is_sent() -> None:
    group = TensorGroup(None, rank=1, size=2)
    with FakeTensorMode():
        x = torch.empty(4, 5, requires_grad=True)
        whole = add_up(copy(x * 1, group), group)
        part = split(whole, group, 1, (3, 2))
        again = gather(part, group, 1, (3, 2))
        summand = scatter_sum(again, group, 0, (1, 3))
        y = gather_split(summand, group, 0, (1, 3))
        y.sum().backward()
    assert (part.shape, again.shape, summand.shape, y.shape) == ((4, 2), (4, 5), (3, 5), (4, 5))
    assert x.grad is not None
    assert x.grad.shape == (4, 5)
    assert group.sent_bytes == 0


def dtypes() -> None:
    group = group_of_all()
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        x = random(4, 5).to(dtype).requires_grad_()
        lengths = LENGTHS[group.size]
        y = gather(split(add_up(copy(x, group) * 1, group), group, 1, lengths), group, 1, lengths)
        y.sum().backward()
        assert y.dtype == x.grad.dtype == dtype
        assert_close(y.detach(), group.size * x.detach(), 1e-2)
    empty = torch.empty(0, 5, requires_grad=True)
    y = gather(split(add_up(copy(empty, group) * 1, group), group, 1, lengths), group, 1, lengths)
    scatter_sum(y, group, 1, lengths).sum().backward()
    assert y.shape == empty.grad.shape == (0, 5)
    with torch.inference_mode():
        assert_close(add_up(copy(torch.ones(3), group) * 1, group), torch.full((3,), float(group.size)))


def test_other_dtypes_nothing_at_all_and_inference_mode() -> None:
    run_ranks(dtypes, 2)
