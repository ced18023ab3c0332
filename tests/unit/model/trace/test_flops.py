"""What calls have a device do, forward and backward."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smp_strategy.model.trace.prediction import Callee, Prediction
from smp_strategy.model.trace.pytree import flatten_call
from smp_strategy.model.trace.shape_inference import ShapeInference
from smp_strategy.model.trace.work import Effort, Efforts

ROWS, WIDTH, WIDE = 5, 8, 16
PRODUCT = 2 * ROWS * WIDTH * WIDE


def efforts(function: Any, *args: Any) -> Efforts:
    module = function if isinstance(function, nn.Module) else None
    leaves, structure = flatten_call(args, {})
    callee = Callee("unit", module.forward if module else function, module)
    prediction = ShapeInference(torch.device("cpu")).predict(callee, leaves, structure)
    assert isinstance(prediction, Prediction)
    return prediction.effort


def flops(function: Any, *args: Any) -> tuple[int, ...]:
    return tuple(effort.flops for effort in efforts(function, *args))


def real(*shape: int, grad: bool = True) -> Tensor:
    return torch.zeros(*shape, requires_grad=grad)


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


class Scores(nn.Module):
    """Attention by hand: two products of activations."""

    def forward(self, x: Tensor) -> Tensor:
        return (x @ x.transpose(1, 2)) @ x


class Fused(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x)


class Grouped(nn.Module):
    """Attention in which two heads share a key."""

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x[:, :2], x[:, :2], enable_gqa=True)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(WIDTH, WIDE, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(x) @ self.down.weight


class Adapted(nn.Module):
    """A frozen layer with a trained part of low rank."""

    def __init__(self) -> None:
        super().__init__()
        self.base = frozen(nn.Linear(WIDTH, WIDE))
        self.a, self.b = nn.Parameter(torch.zeros(2, WIDTH)), nn.Parameter(torch.zeros(WIDE, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + (x @ self.a.T) @ self.b.T


class Merged(Adapted):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.base.weight + self.b @ self.a)


class Deep(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDE), nn.Tanh(), nn.Linear(WIDE, WIDTH))


BMM = 2 * 2 * ROWS * ROWS * WIDTH
CONV = 2 * (2 * 4 * 6 * 6) * (3 * 3 * 3)
LOW = 2 * ROWS * 2 * (WIDTH + WIDE)


@pytest.mark.parametrize(
    ("module", "x", "expected"),
    [
        pytest.param(nn.Linear(WIDTH, WIDE), real(ROWS, WIDTH), (PRODUCT, PRODUCT, PRODUCT), id="linear"),
        pytest.param(nn.Linear(WIDTH, WIDE), real(ROWS, WIDTH, grad=False), (PRODUCT, 0, PRODUCT), id="first"),
        pytest.param(frozen(nn.Linear(WIDTH, WIDE)), real(ROWS, WIDTH), (PRODUCT, PRODUCT, 0), id="frozen"),
        pytest.param(frozen(Deep()), real(ROWS, WIDTH, grad=False), (2 * PRODUCT, 0, 0), id="frozen first"),
        pytest.param(Deep(), real(ROWS, WIDTH, grad=False), (2 * PRODUCT, 0, 3 * PRODUCT), id="deep first"),
        pytest.param(Scores(), real(2, ROWS, WIDTH), (2 * BMM, 4 * BMM, 0), id="products of activations"),
        pytest.param(Fused(), real(2, 1, ROWS, WIDTH), (2 * BMM, 5 * BMM, 0), id="fused attention"),
        pytest.param(Grouped(), real(2, 4, ROWS, WIDTH), (8 * BMM, 20 * BMM, 0), id="grouped heads"),
        pytest.param(nn.Conv2d(3, 4, 3, padding=1), real(2, 3, 6, 6), (CONV, CONV, CONV), id="convolution"),
        pytest.param(Tied(), real(ROWS, WIDTH), (2 * PRODUCT, 2 * PRODUCT, 2 * PRODUCT), id="tied"),
        pytest.param(Adapted(), real(ROWS, WIDTH), (PRODUCT + LOW, PRODUCT + LOW, LOW), id="adapter"),
        pytest.param(nn.Embedding(9, WIDTH), torch.zeros(ROWS, dtype=torch.int64), (0, 0, 0), id="embedding"),
    ],
)
def test_gradients_take_a_product_per_factor_of_a_product(module, x, expected):
    assert flops(module, x) == expected


def test_what_is_computed_from_parameters_alone_is_a_weight():
    merge = 2 * WIDTH * WIDE * 2
    # The merged weight has a gradient, though the frozen base has none; the two factors of the merge have theirs.
    assert flops(Merged(), real(ROWS, WIDTH)) == (PRODUCT + merge, PRODUCT, PRODUCT + 2 * merge)


def test_a_cast_of_a_weight_is_a_weight():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert flops(nn.Linear(WIDTH, WIDE), real(ROWS, WIDTH)) == (PRODUCT, PRODUCT, PRODUCT)


def test_without_gradients_there_is_no_backward():
    with torch.no_grad():
        assert efforts(Deep(), real(ROWS, WIDTH))[1:] == (Effort(), Effort())


def test_a_recurrent_layer_multiplies_each_step_by_its_weights():
    steps, batch = 3, 2
    expected = 2 * steps * batch * 4 * WIDE * (WIDTH + WIDE)
    assert flops(nn.LSTM(WIDTH, WIDE), real(steps, batch, WIDTH)) == (expected,) * 3


def test_a_product_moves_its_factors_and_its_result():
    forward = efforts(nn.Linear(WIDTH, WIDE, bias=False), real(ROWS, WIDTH)).forward
    assert forward == Effort(PRODUCT, 4 * (ROWS * WIDTH + WIDTH * WIDE + ROWS * WIDE), 0, 1)


def test_a_look_up_moves_the_rows_that_it_returns_and_its_gradient_the_whole_table():
    found = efforts(nn.Embedding(1000, WIDTH), torch.zeros(ROWS, dtype=torch.int64))
    rows, indices, table = 4 * ROWS * WIDTH, 8 * ROWS, 4 * 1000 * WIDTH
    assert found.forward == Effort(0, 0, 2 * rows + indices, 1)
    assert found.input_gradient == Effort()
    assert found.weight_gradient.other_bytes > table


def test_views_are_free_and_other_kernels_read_and_write():
    assert efforts(lambda x: x.view(-1).unsqueeze(0).expand(3, -1), real(ROWS, WIDTH)) == Efforts()
    assert efforts(torch.exp, real(ROWS, WIDTH)).forward == Effort(0, 0, 2 * 4 * ROWS * WIDTH, 1)
    assert efforts(lambda x: x.mul_(2), real(ROWS, WIDTH) * 1).forward.kernels == 1
