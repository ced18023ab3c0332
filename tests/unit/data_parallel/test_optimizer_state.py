"""What is kept for a parameter, cut into pieces and put together again."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn, optim

from smp_strategy.data_parallel.flat_layout import FlatLayout, FlatParameter, UnitLayout
from smp_strategy.data_parallel.optimizer_state import cut_state, kept_per_element
from smp_strategy.errors import UnsupportedError
from tests.unit.data_parallel.optimizers import Lookahead

OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "SGD": lambda p: optim.SGD(p, 0.1),
    "momentum": lambda p: optim.SGD(p, 0.1, momentum=0.9),
    "AMSGrad": lambda p: optim.Adam(p, amsgrad=True),
    "Adagrad": optim.Adagrad,
    "Rprop": optim.Rprop,
    "ASGD": optim.ASGD,
    "NAdam": optim.NAdam,
    "a step with a dim": lambda p: StepWithDim(p),
}
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch")


class StepWithDim(optim.Optimizer):
    """Counts its steps in a tensor of shape (1,), and has what it keeps in a list."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state.setdefault("step", torch.zeros(1)).add_(1)
                means = state.setdefault("means", [torch.zeros_like(p), None, "plain"])
                means[0].lerp_(p.grad, 0.1)
                if state["step"] == 10:
                    state["late"] = means[0].clone()
                p.sub_(means[0], alpha=group["lr"])


def layout_of(parameter: Tensor, degree: int) -> FlatLayout:
    """The parameter behind another one, so that it is not cut into equal parts."""
    entries = [
        FlatParameter(
            names=(name,),
            shape=tuple(tensor.shape),
            stride=tensor.stride(),
            dtype="float32",
            itemsize=4,
            requires_grad=True,
        )
        for name, tensor in [("other", torch.empty(40)), ("parameter", parameter)]
    ]
    [flat] = UnitLayout.of(entries, degree).flats
    return flat


def cutter(parameter: Tensor, rank: int, degree: int) -> Callable[[Tensor], Tensor]:
    flat = layout_of(parameter, degree)
    piece = flat.piece(flat.slots[1], rank)

    def cut(tensor: Tensor) -> Tensor:
        laid_out = torch.empty_like(parameter, dtype=tensor.dtype).copy_(tensor).detach()
        return laid_out.as_strided((tensor.numel(),), (1,))[piece.start : piece.start + piece.numel]

    return cut


def train(make: Callable[[Any], optim.Optimizer], begin: Tensor, gradients: list[Tensor]) -> optim.Optimizer:
    parameter = nn.Parameter(begin.clone())
    optimizer = make([parameter])
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    return optimizer


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    return type(one) is type(other) and one == other


def state_of(optimizer: optim.Optimizer) -> Any:
    [parameter] = optimizer.param_groups[0]["params"]
    return dict(optimizer.state[parameter])


shapes = st.one_of(st.sampled_from([(), (1,), (1, 1), (33,)]), st.lists(st.integers(1, 9), max_size=4).map(tuple))


@given(st.sampled_from(sorted(OPTIMIZERS)), shapes, st.integers(1, 5), st.sampled_from([1, 3, 11]))
def test_ranks_with_pieces_have_what_is_cut_out_of_the_whole(name, shape, degree, steps):
    make, random = OPTIMIZERS[name], torch.Generator().manual_seed(0)
    begin, *gradients = torch.randn((steps + 1, *shape), generator=random).unbind()
    begin = begin.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else begin
    whole = train(make, begin, gradients)
    [parameter] = whole.param_groups[0]["params"]
    known = kept_per_element(whole, parameter)
    for rank in range(degree):
        cut = cutter(parameter, rank, degree)
        piece = state_of(train(make, cut(begin), [cut(gradient) for gradient in gradients]))
        assert same(cut_state(state_of(whole), shape, cut, known), piece)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_moments_and_steps_of_a_single_element_are_told_apart(shape):
    parameter = nn.Parameter(torch.ones(shape))
    optimizer = optim.Adam([parameter])
    known = kept_per_element(optimizer, parameter)
    assert known == {"step": False, "exp_avg": True, "exp_avg_sq": True}
    state = {"step": torch.tensor(3.0), "exp_avg": torch.ones(shape), "exp_avg_sq": torch.ones(shape)}
    for numel in (0, 1):
        piece = cut_state(state, shape, lambda tensor, numel=numel: tensor.reshape(-1)[:numel], known)
        assert {name: tuple(tensor.shape) for name, tensor in piece.items()} == {
            "step": (),
            "exp_avg": (numel,),
            "exp_avg_sq": (numel,),
        }


def test_to_ask_what_is_kept_leaves_the_optimizer_as_it_is():
    parameter = nn.Parameter(torch.ones(()))
    optimizer = Lookahead(optim.Adam([parameter]))
    kept_per_element(optimizer, parameter)
    assert not optimizer.inner.state
    assert torch.equal(parameter, torch.ones(()))


def test_pieces_do_not_keep_the_whole_alive():
    moment = torch.ones(5, 7)
    piece = cut_state({"moment": moment}, (5, 7), lambda tensor: tensor.view(-1)[3:9], {})
    assert piece["moment"].untyped_storage().nbytes() == 6 * 4
    assert moment.shape == (5, 7)


def test_what_is_no_tensor_stays_where_it_is():
    state = {"moments": [torch.ones(4), torch.zeros(4, dtype=torch.float64)], "step": 3, "name": "x", "none": None}
    piece = cut_state(state, (4,), lambda tensor: tensor[1:3], {})
    expected = {**state, "moments": [torch.ones(2), torch.zeros(2, dtype=torch.float64)]}
    assert same(piece, expected)


@pytest.mark.parametrize("tensor", [torch.ones(5, 1), torch.ones(35), torch.ones(7, 5), torch.ones(0)], ids=str)
def test_a_tensor_that_is_neither_a_scalar_nor_of_the_parameters_shape_is_refused_by_name(tensor):
    state = {"step": torch.tensor(1.0), "averages": {"rows": tensor}}
    message = rf"`averages.rows` of shape \[{', '.join(map(str, tensor.shape))}\] for what is of shape \[5, 7\]"
    with pytest.raises(UnsupportedError, match=f"{message}.*`shard_optimizer_state=True`"):
        cut_state(state, (5, 7), lambda tensor: tensor, {})
