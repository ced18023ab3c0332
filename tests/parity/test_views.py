"""In-place changes through views, with code of other stages between the view, the change and the next use."""

from typing import Any

import pytest
import torch
from torch import Tensor

from .compare import WIDTH, check, mean_square, steps_of


def refined_boxes(net: Any, x: Tensor) -> Tensor:
    """As Conditional DETR refines boxes: what is added to a part of the prediction comes from another stage."""
    a, b, c, d = net.blocks
    reference = c(b(x))
    boxes = a(x) * 1
    boxes[..., :2] += reference[..., :2]
    return mean_square(d(boxes.sigmoid()))


def view_of_an_earlier_stage(net: Any, x: Tensor) -> Tensor:
    a, b, c, d = net.blocks
    h = b(a(x)) * 1
    view = h.view(-1)
    h += d(c(h * 1))
    return mean_square(h) + (view * torch.arange(len(view))).mean()


def base_of_a_changed_row(net: Any, x: Tensor) -> Tensor:
    a, b, c, d = net.blocks
    h = a(x) * 1
    row, column, corner = h[0], h[:, 1], h[:2, :2]
    row.add_(d(c(b(x))).mean(0))
    column *= 2.0
    return mean_square(b(h)) + corner.sum() + (column * row.sum()).mean()


def changes_after_a_change(net: Any, x: Tensor) -> Tensor:
    """The base is written anew after the first change, so the second one does not meet it in memory either."""
    a, b, c, d = net.blocks
    h = a(x) * 1
    left, right = h[:, : WIDTH // 2], h[:, WIDTH // 2 :]
    left.mul_(c(b(x))[:, : WIDTH // 2])
    g = d(h * 1)
    left.add_(1.0)
    h.mul_(0.5)
    right.sub_(left)
    return mean_square(g + h) + mean_square(left)


def change_without_history(net: Any, x: Tensor) -> Tensor:
    """The base is used without recording first; its gradient is not lost for the next use."""
    a, b, c, d = net.blocks
    h = a(x) * 1
    part = h[:, 2:4]
    part += d(c(b(x)))[:, 2:4]
    with torch.no_grad():
        scale = 1 / (1 + h.abs().max())
    return mean_square(b(h * scale))


def transposed_parts(net: Any, x: Tensor) -> Tensor:
    a, b, c, d = net.blocks
    h = (a(x) * 1).t()
    h[1:3] = d(c(b(x))).t()[1:3]
    g = h.t()
    h.diagonal().fill_(0.0)
    return mean_square(d(g))


LAYOUT = "the gradient of a changed tensor has other strides, and sums over it another order"

STEPS = steps_of([refined_boxes, view_of_an_earlier_stage]) | steps_of(
    [change_without_history, transposed_parts, base_of_a_changed_row, changes_after_a_change], differs=LAYOUT
)


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("name", STEPS)
def test_a_change_through_a_view_has_the_numbers_of_one_process(name: str, pp: int) -> None:
    check(STEPS[name], pp)
