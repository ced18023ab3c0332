"""What calls keep for their backward, memory by memory, and what it takes to make it again."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smp_strategy.model.trace.prediction import Callee, Prediction
from smp_strategy.model.trace.pytree import flatten_call
from smp_strategy.model.trace.shape_inference import ShapeInference
from smp_strategy.model.trace.work import SavedBytes, StorageBytes

ROWS, WIDTH, WIDE = 5, 8, 16
NARROW_BYTES, WIDE_BYTES = 4 * ROWS * WIDTH, 4 * ROWS * WIDE
DOWN = 2 * ROWS * WIDTH * WIDE


def predict(module: nn.Module, *args: object) -> Prediction:
    leaves, structure = flatten_call(args, {})
    prediction = ShapeInference(torch.device("cpu")).predict(Callee("unit", module.forward, module), leaves, structure)
    assert isinstance(prediction, Prediction)
    return prediction


def kept(module: nn.Module, *args: object) -> SavedBytes:
    return predict(module, *args).kept


def rows(*, grad: bool = True) -> Tensor:
    return torch.zeros(ROWS, WIDTH, requires_grad=grad)


class Mlp(nn.Module):
    """Up, an activation, down."""

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDE), nn.Linear(WIDE, WIDTH)
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x), inplace=self.in_place))


def test_inputs_products_and_the_rest_are_told_apart():
    found = kept(Mlp(), rows())
    assert sorted(found.memories) == sorted(
        [
            StorageBytes(NARROW_BYTES, "input"),
            # Backward of the activation needs what it returns, so the product before it is needed to make that again.
            StorageBytes(WIDE_BYTES, "product", is_saved=False),
            StorageBytes(WIDE_BYTES, "other"),
        ]
    )


def test_what_comes_after_the_last_thing_that_is_kept_is_not_done_again():
    prediction = predict(Mlp(), rows())
    assert prediction.effort.forward.flops == 2 * DOWN
    assert prediction.kept.again.flops == DOWN
    assert prediction.kept.cheap.flops == 0
    assert 0 < prediction.kept.cheap.kernels < prediction.kept.again.kernels < prediction.effort.forward.kernels


def test_a_product_that_is_changed_in_place_is_done_again():
    found = kept(Mlp(in_place=True), rows())
    assert "product" not in [memory.origin for memory in found.memories]
    assert found.cheap.flops == DOWN


class Returning(Mlp):
    """Returns a product whose result is needed in backward."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        wide = self.up(x)
        return wide, self.down(wide * wide)


def test_a_product_that_is_returned_is_done_again():
    found = kept(Returning(), rows())
    assert "product" not in [memory.origin for memory in found.memories]
    assert found.cheap.flops == DOWN


def test_an_input_that_backward_does_not_need_is_needed_to_compute_again():
    (memory,) = kept(nn.Sequential(nn.Flatten(0)), rows()).memories
    assert memory == StorageBytes(NARROW_BYTES, "input", is_saved=False)


@pytest.mark.parametrize("grad", [True, False])
def test_bytes_are_those_that_autograd_keeps(grad):
    prediction = predict(nn.Sequential(Mlp(), nn.Tanh(), Mlp()).requires_grad_(grad), rows(grad=grad))
    assert prediction.saved_bytes == prediction.kept.saved_bytes
    assert (prediction.saved_bytes > 0) == grad


def test_weights_are_nobodys_activations():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))

        def forward(self, x: Tensor, weight: Tensor) -> Tensor:
            return x @ self.weight @ weight

    module = Tied()
    assert [memory.origin for memory in kept(module, rows(), torch.zeros(WIDTH, WIDTH)).memories].count("input") == 2
