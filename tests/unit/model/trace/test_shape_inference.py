"""Predictions against what calls really return."""

import ctypes
import os
import random
import signal
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from smp_strategy.model.trace.prediction import Callee, Made, Prediction, Same, Unpredictable
from smp_strategy.model.trace.shape_inference import ShapeInference
from smp_strategy.model.trace.tensor_spec import TensorSpec

CPU = torch.device("cpu")


def predict(function: Any, *args: Any, shape_inference: ShapeInference | None = None, **kwargs: Any) -> Prediction:
    """Predict a call of a function, or of a module as the runtime calls a unit."""
    module = function if isinstance(function, nn.Module) else None
    callee = Callee(function, module.forward if module else function, module)
    leaves, structure = pytree.tree_flatten((args, kwargs))
    return (shape_inference or ShapeInference(CPU)).predict(callee, leaves, structure)


def real(*shape: int, grad: bool = True) -> Tensor:
    """A tensor inside a graph, as units return them."""
    made = torch.rand(*shape, requires_grad=grad)
    return made * 1 if grad else made


OPS: dict[str, tuple[Any, list[Tensor]]] = {
    "add": (torch.add, [real(3, 4), real(4)]),
    "add without gradient": (torch.add, [real(3, 4, grad=False), real(4, grad=False)]),
    "matmul": (torch.matmul, [real(2, 3, 4), real(4, 5)]),
    "view": (lambda x: x.view(2, 6), [real(3, 4)]),
    "transpose": (lambda x: x.transpose(0, 1), [real(3, 4)]),
    "slice": (lambda x: x[:, 1:3], [real(3, 4)]),
    "index": (lambda x: x[torch.tensor([0, 2])], [real(3, 4)]),
    "chunk": (lambda x: x.chunk(2, dim=1), [real(3, 4)]),
    "expand": (lambda x: x.expand(5, 3, 4), [real(3, 4)]),
    "detach": (lambda x: x.detach(), [real(3, 4)]),
    "argmax": (lambda x: x.argmax(-1), [real(3, 4)]),
    "max": (lambda x: x.max(dim=1), [real(3, 4)]),
    "half": (lambda x: x.half(), [real(3, 4)]),
    "comparison": (lambda x: x > 0.5, [real(3, 4)]),
    "cross entropy": (F.cross_entropy, [real(3, 4), torch.tensor([0, 1, 2])]),
    "attention": (F.scaled_dot_product_attention, [real(1, 2, 3, 4), real(1, 2, 3, 4), real(1, 2, 3, 4)]),
    "no_grad": (torch.no_grad()(torch.add), [real(3), real(3)]),
    "softmax": (lambda x: x.softmax(-1), [real(3, 4)]),
    "conv": (F.conv2d, [real(1, 2, 5, 5), real(3, 2, 3, 3)]),
    "einsum": (lambda x, y: torch.einsum("ij,jk->ik", x, y), [real(2, 3), real(3, 2)]),
    "dict": (lambda x: {"a": x * 2, "b": (x.sum(), 3, None)}, [real(3)]),
}


@pytest.mark.parametrize("name", OPS)
def test_the_prediction_has_the_metadata_of_the_result(name):
    function, args = OPS[name]
    prediction = predict(function, *args)
    leaves, structure = pytree.tree_flatten(function(*args))
    assert prediction.structure == structure
    assert prediction.changed == {}
    expected = tuple(Made(TensorSpec.of(leaf)) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    assert prediction.outputs == expected


def test_arguments_may_be_specs():
    assert predict(torch.relu, TensorSpec.of(real(3))) == predict(torch.relu, real(3))


def test_the_values_of_the_arguments_stay():
    x = torch.ones(3)
    predict(lambda t: t.mul_(2), x)
    assert x.tolist() == [1, 1, 1]


def test_an_input_that_is_returned_is_the_same():
    assert predict(lambda x, y: (y, x.contiguous()), real(3), real(4)).outputs == (Same(1), Same(0))


@pytest.mark.parametrize("grad", [True, False])
def test_an_in_place_change_is_noticed_with_its_new_metadata(grad):
    prediction = predict(lambda x, y: x.mul_(y), real(3, grad=False), real(3, grad=grad))
    assert prediction.outputs == (Same(0),)
    assert list(prediction.changed) == [0]
    assert prediction.changed[0].requires_grad == grad


def test_a_change_through_a_view_is_noticed():
    def set_column(x: Tensor) -> None:
        x[:, 0] = 1.0

    assert list(predict(set_column, real(3, 4)).changed) == [0]


class Net(nn.Module):
    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.dropout = nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.linear(x))


def test_dropout_is_random_in_training_only():
    net = Net()
    assert predict(net, real(2, 4)).random
    assert not predict(net.eval(), real(2, 4)).random


def test_a_switch_of_a_module_inside_the_unit_is_noticed():
    net, shape_inference = Net(), ShapeInference(CPU)
    net.dropout.eval()
    assert not predict(net, real(2, 4), shape_inference=shape_inference).random
    net.dropout.train()
    assert predict(net, real(2, 4), shape_inference=shape_inference).random


def test_a_unit_that_is_unfrozen_gets_gradients_from_then_on():
    net, shape_inference = Net().requires_grad_(False), ShapeInference(CPU)
    x = real(2, 4, grad=False)
    assert not predict(net, x, shape_inference=shape_inference).outputs[0].spec.requires_grad
    net.requires_grad_(True)
    assert predict(net, x, shape_inference=shape_inference).outputs[0].spec.requires_grad


def test_pythons_own_random_numbers_count_as_random():
    class Skip(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if random.random() < 0.5 else super().forward(x) * 2

    random.seed(0)
    before = random.getstate()
    assert predict(Skip(2, 2), real(2)).random
    assert random.getstate() == before


def test_random_streams_stay_where_they_are():
    net, x = Net(), real(2, 4)
    before = torch.get_rng_state()
    predict(net, x)
    predict(torch.rand_like, x)
    assert torch.equal(torch.get_rng_state(), before)


def test_bytes_kept_for_backward_are_those_of_the_activations():
    # A linear layer keeps its input; its weight is a parameter and does not count.
    assert predict(nn.Linear(8, 16), real(5, 8)).saved_bytes == 5 * 8 * 4
    assert predict(torch.no_grad()(torch.exp), real(5, 8)).saved_bytes == 0


@pytest.mark.parametrize(
    "unit",
    [nn.Linear(8, 16), nn.Linear(1, 8), nn.Bilinear(4, 4, 1), nn.Conv2d(2, 3, 3), nn.GRUCell(8, 4), nn.LayerNorm(8)],
    ids=lambda unit: type(unit).__name__,
)
def test_a_call_costs_the_same_where_the_weights_are_elsewhere(unit):
    shapes = {nn.Bilinear: [(2, 4), (2, 4)], nn.Conv2d: [(1, 2, 5, 5)]}
    first = unit.in_features if isinstance(unit, nn.Linear) else 8
    args = [real(*shape) for shape in shapes.get(type(unit), [(2, first)])]
    here = predict(unit, *args)
    for parameter in unit.parameters():  # as a rank holds what other stages have
        parameter.data = torch.zeros((1,) * parameter.ndim).expand(parameter.shape)
    elsewhere = predict(unit, *args)
    assert elsewhere.effort == here.effort
    assert elsewhere.saved_bytes == here.saved_bytes
    assert elsewhere.agrees(here)


def test_a_second_call_with_the_same_metadata_does_not_run(capfd):
    calls: list[int] = []

    class Counted(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(1)
            os.write(1, b"called")
            return super().forward(x)

    unit = Counted(4, 4)
    shape_inference = ShapeInference(CPU)
    first = predict(unit, real(2, 4), shape_inference=shape_inference)
    assert predict(unit, real(2, 4), shape_inference=shape_inference) is first
    assert capfd.readouterr().out == "called"
    assert not calls  # what the dry run has put there is taken out again


@pytest.mark.parametrize("change", ["shape", "dtype", "gradient", "no_grad", "training", "constant", "autocast"])
def test_whatever_the_result_may_depend_on_asks_again(change):
    shape_inference = ShapeInference(CPU)
    net = Net(0.0)

    def double(x: Tensor, factor: int) -> Tensor:
        return net(x).repeat(factor, 1)

    unit = Net(0.0)
    unit.forward = lambda x, factor: Net.forward(unit, x).repeat(factor, 1)
    first = predict(unit, real(2, 4), 1, shape_inference=shape_inference)
    x, factor = real(2, 4), 1
    if change == "no_grad":
        with torch.no_grad():
            second = predict(unit, x, factor, shape_inference=shape_inference)
    elif change == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            second = predict(unit, x, factor, shape_inference=shape_inference)
        assert second.outputs[0].spec.dtype == torch.bfloat16
    else:
        x = {"shape": real(3, 4), "dtype": x, "gradient": real(2, 4, grad=False)}.get(change, x)
        if change == "dtype":
            unit, x = unit.double(), x.double()
        if change == "training":
            unit.eval()
        second = predict(unit, x, 2 if change == "constant" else 1, shape_inference=shape_inference)
    assert second is not first


def test_batch_statistics_stay_as_they_are():
    norm = nn.BatchNorm1d(4)
    before = {name: buffer.clone() for name, buffer in norm.named_buffers()}
    predict(norm, real(5, 4))
    assert all(torch.equal(before[name], buffer) for name, buffer in norm.named_buffers())
    assert all(type(tensor) in (Tensor, nn.Parameter) for tensor in (*norm.parameters(), *norm.buffers()))


class Cache:
    """Like a key/value cache."""

    def __init__(self) -> None:
        self.keys = [torch.zeros(2, 4)]


def test_objects_that_are_given_stay_as_they_are():
    class Caching(nn.Linear):
        def forward(self, x: Tensor, cache: Cache) -> Tensor:
            cache.keys.append(x)
            return super().forward(cache.keys[0])

    cache = Cache()
    kept = cache.keys[0]
    assert predict(Caching(4, 4), real(2, 4), cache).outputs[0].spec.size == (2, 4)
    assert len(cache.keys) == 1
    assert cache.keys[0] is kept
    assert type(kept) is Tensor


def test_hooks_of_a_unit_do_not_run():
    net, calls = Net(), []
    net.register_forward_hook(lambda *args: calls.append(1))
    predict(net, real(2, 4))
    assert not calls


@pytest.mark.parametrize(
    "function",
    [
        *(torch.nonzero, torch.unique, lambda x: x.sum().item(), lambda x: x[x > 0], lambda x: x[:, x[0] > 0]),
        *(lambda x: (x, x) if x.sum() > 0 else x, lambda x: x.new_zeros(int(x.sum())), lambda x: x.detach().numpy()),
    ],
)
def test_a_result_that_depends_on_values_cannot_be_predicted(function):
    assert isinstance(predict(function, real(3, 3)), Unpredictable)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * 2 if x.sum() > 0 else x * 3,
        lambda x: x * x.max().item(),
        lambda x: torch.zeros_like(x).index_add(0, *_some_rows(x)),
        lambda x: x + sum(x.detach()[row].sum() for row in x[:, 0].nonzero()),
        lambda x: x * float(torch.equal(x, x + 1)),
    ],
)
def test_a_result_whose_metadata_is_the_same_for_all_values_is_predicted(function):
    prediction = predict(function, real(3, 3))
    assert isinstance(prediction, Prediction)
    assert prediction.made == (TensorSpec.of(function(real(3, 3))),)


def _some_rows(x):
    (rows,) = torch.where(x[:, 0] > 0)
    return rows, x[rows]


def test_a_call_that_fails_is_left_to_the_real_run():
    assert "dim" in predict(torch.matmul, real(2, 3), real(2, 3)).reason


def test_a_dry_run_leaves_no_marks_on_a_unit():
    class Caching(nn.Linear):
        table = None

        def forward(self, x):
            self.table = torch.ones(3) if self.table is None else self.table
            return super().forward(x) * self.table

    unit = Caching(3, 3)
    predict(unit, real(2, 3))
    assert unit.table is None


def test_a_spec_reads_well():
    assert str(TensorSpec.of(real(2, 3))) == "float32[2, 3] with gradient"
    assert TensorSpec.of(real(2, 3)).nbytes == 24


class OutsideError(Exception):
    """Raised in whatever code is running."""


def interrupt() -> None:
    thread = ctypes.c_ulong(threading.get_ident())
    ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(OutsideError))


def handle(*_: Any) -> None:
    raise OutsideError


def run_out_of_memory() -> None:
    raise MemoryError


@pytest.mark.parametrize("reads_value", [False, True], ids=["at once", "under an assumed value"])
@pytest.mark.parametrize(
    ("strike", "error"),
    [
        (interrupt, OutsideError),
        (lambda: signal.raise_signal(signal.SIGUSR1), OutsideError),
        (run_out_of_memory, MemoryError),
    ],
    ids=["another thread", "a signal handler", "no memory"],
)
def test_an_error_from_outside_of_the_code_is_no_property_of_it(strike, error, reads_value, capfd):
    before = signal.signal(signal.SIGUSR1, handle)

    def double(x: Tensor) -> Tensor:
        os.write(1, b".")
        number = len(x) if not reads_value else int(x.sum())
        if len(capfd.readouterr().out) == 1 and not is_over:
            is_over.append(True)
            strike()
            sum(range(10))
        return x * number

    is_over: list[bool] = []
    shape_inference = ShapeInference(CPU)
    try:
        with pytest.raises(error):
            predict(double, real(2, 4), shape_inference=shape_inference)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert predict(double, real(2, 4), shape_inference=shape_inference).outputs[0].spec.size == (2, 4)


def test_an_error_that_comes_again_is_a_property_of_the_code():
    def convert(x: Tensor) -> Any:
        return x.detach().numpy()

    found = predict(convert, real(2, 4))
    assert isinstance(found, Unpredictable)
    assert "numpy" in found.reason


def test_a_weight_that_pytorch_does_not_exchange_the_first_time_is_exchanged_the_second_time():
    failed = []

    def converts(x: Tensor) -> Tensor:
        if not failed:
            failed.append(True)
            raise RuntimeError("_apply(): Couldn't swap Linear.weight")
        return x * 2

    assert predict(converts, real(2, 4)).outputs[0].spec.size == (2, 4)
