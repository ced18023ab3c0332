"""Which optimizers can be given pieces of parameters."""

import math
import threading
from collections.abc import Callable, Iterable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn, optim
from torch.optim.optimizer import register_optimizer_step_pre_hook

from smp_strategy.data_parallel.optimizer_checks import difference_in_pieces, problems_of_cuts
from smp_strategy.errors import ConfigError
from tests.unit.data_parallel.optimizers import (
    DecaysMatrices,
    GlobalNorm,
    GoesByGroup,
    Lamb,
    LateShampoo,
    Lion,
    Lookahead,
    PassesOverEmpty,
    WholeBlocks,
)

Make = Callable[[Iterable[nn.Parameter]], optim.Optimizer]

ELEMENTWISE: dict[str, Make] = {
    **{
        one.__name__: one
        for one in (optim.Adadelta, optim.Adagrad, optim.Adam, optim.AdamW, optim.Adamax, optim.ASGD, optim.NAdam)
        + (optim.RAdam, optim.RMSprop, optim.Rprop, optim.SGD, Lion)
    },
    "fused Adam": lambda p: optim.Adam(p, fused=True),
    "foreach AMSGrad": lambda p: optim.Adam(p, amsgrad=True, foreach=True, maximize=True),
    "AdamW with a tensor as rate": lambda p: optim.AdamW(p, lr=torch.tensor(0.0), weight_decay=0.1),
    "Nesterov": lambda p: optim.SGD(p, 0.0, momentum=0.9, nesterov=True, weight_decay=0.1),
    "centered RMSprop": lambda p: optim.RMSprop(p, momentum=0.9, centered=True),
    "Lookahead around Adam": lambda p: Lookahead(optim.Adam(p)),
}
WHOLE: dict[str, tuple[Make, str]] = {
    "Adafactor": (optim.Adafactor, ""),
    "Muon": (optim.Muon, "it needs whole tensors \\(ValueError: Param gradient must be a 2D matrix\\)"),
    "LBFGS": (optim.LBFGS, "it cannot be tried, .*TypeError: .*closure"),
    "SparseAdam": (optim.SparseAdam, "it cannot be tried, .*does not support dense gradients"),
    "LAMB": (Lamb, "its steps look at more than one element"),
    "LAMB whose rate warms up": (lambda p: Lamb(p, lr=0.0), "its steps look at more than one element"),
    "Lookahead around LAMB": (lambda p: Lookahead(Lamb(p)), "its steps look at more than one element"),
    "Shampoo that has not begun": (LateShampoo, "it keeps something else"),
    "decay of matrices": (DecaysMatrices, "its steps look at more than one element"),
    "nothing for what is empty": (PassesOverEmpty, "it keeps something else"),
    "a distance of all elements": (GoesByGroup, "it goes by a number of all elements"),
}
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch")
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def refuse(optimizers: Iterable[optim.Optimizer], *sharded: nn.Parameter, degree: int = 2) -> None:
    named = {parameter: f"p{number}" for number, parameter in enumerate(sharded)}
    if problems := problems_of_cuts(optimizers, named, degree=degree):
        raise ConfigError(problems)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_an_elementwise_optimizer_gets_pieces_of_parameters_of_any_shape(name, dtype):
    made = [nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in [(), (1,), (300,), (200, 50), (6, 3, 5, 5)]]
    refuse([ELEMENTWISE[name](made)], *made)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", WHOLE)
def test_an_optimizer_that_needs_whole_parameters_is_refused(name, dtype):
    make, reason = WHOLE[name]
    parameter = nn.Parameter(torch.ones(30, 20, dtype=dtype))
    with pytest.raises(ConfigError, match=f"cannot update pieces of `p0`: .*{reason}"):
        refuse([make([parameter])], parameter)


def test_every_optimizer_of_torch_is_sorted():
    everything = {
        name for name, one in vars(optim).items() if isinstance(one, type) and issubclass(one, optim.Optimizer)
    }
    assert everything - {"Optimizer"} <= ELEMENTWISE.keys() | WHOLE.keys()


def cut(shape: tuple[int, ...], fractions: list[float]) -> list[int]:
    return sorted(round(fraction * math.prod(shape)) for fraction in fractions)


shapes = st.lists(st.integers(1, 9), max_size=4).map(tuple)
fractions = st.lists(st.floats(0, 1), max_size=4)


@given(st.sampled_from(sorted(ELEMENTWISE)), shapes, fractions)
def test_it_does_not_matter_where_an_elementwise_optimizer_is_cut(name, shape, fractions):
    parameter = nn.Parameter(torch.ones(shape))
    assert difference_in_pieces(ELEMENTWISE[name]([parameter]), parameter, shape, cut(shape, fractions)) is None


@given(st.sampled_from(["Adafactor", "LAMB", "Lookahead around LAMB"]), shapes, fractions)
def test_a_norm_shows_wherever_it_is_cut(name, shape, fractions):
    edges = cut(shape, fractions)
    pieces = [stop - start for start, stop in zip([0, *edges], [*edges, math.prod(shape)], strict=True)]
    parameter = nn.Parameter(torch.ones(shape))
    found = difference_in_pieces(WHOLE[name][0]([parameter]), parameter, shape, edges)
    if sum(size > 0 for size in pieces) > 1:
        assert found is not None
    elif len(shape) < 2 and 0 not in pieces:  # nothing is cut
        assert found is None


def test_an_error_names_all_optimizers_the_option_the_reason_and_the_remedy():
    matrix, other, vector, plain = (nn.Parameter(torch.ones(shape)) for shape in [(6, 4), (4, 4), (4,), (4, 6)])
    optimizers = [optim.Muon([matrix, other]), optim.AdamW([plain]), Lamb([vector])]
    with pytest.raises(ConfigError) as caught:
        refuse(optimizers, matrix, other, vector, plain, degree=4)
    first, second = caught.value.problems
    assert first == (
        "`sharded_data_parallel_degree` (4) cuts parameters into pieces, and Muon cannot update pieces of `p0` and 1 "
        "other parameter: it needs whole tensors (ValueError: Param gradient must be a 2D matrix). Use "
        "`shard_optimizer_state=True` instead, which gives each rank whole parameters, or use an optimizer that "
        "treats every element by itself."
    )
    assert "and Lamb cannot update pieces of `p2`: its steps look at more than one element at a time" in second


@pytest.mark.parametrize("make", [GoesByGroup, GlobalNorm, optim.LBFGS])
def test_whole_parameters_are_not_recommended_to_an_optimizer_that_relates_them(make):
    matrices = [nn.Parameter(torch.ones(6, 4)) for _ in range(2)]
    with pytest.raises(ConfigError) as caught:
        refuse([make(matrices)], *matrices)
    assert "shard_optimizer_state" not in str(caught.value)
    assert "Leave the degree out and let replicas each have the whole model and update all of it" in str(caught.value)


def test_options_of_each_group_count():
    first, second = (nn.Parameter(torch.ones(6, 4)) for _ in range(2))
    groups = [{"params": [first], "decay": 0.0}, {"params": [second]}]
    with pytest.raises(ConfigError, match="DecaysMatrices in parameter group 1 cannot update pieces of `p1`:"):
        refuse([DecaysMatrices(groups)], first, second)


def test_the_number_of_dims_counts():
    matrix, vector = nn.Parameter(torch.ones(6, 4)), nn.Parameter(torch.ones(6))
    refuse([LateShampoo([matrix, vector])], vector)
    with pytest.raises(ConfigError, match="pieces of `p1`:"):
        refuse([LateShampoo([matrix, vector])], vector, matrix)


def test_what_is_done_to_large_parameters_only_is_found():
    small, large = nn.Parameter(torch.ones(50)), nn.Parameter(torch.ones(100_000))
    with pytest.raises(ConfigError, match="pieces of `p1`:"):
        refuse([WholeBlocks([small, large])], small, large)


def test_parameters_that_stay_whole_or_are_frozen_may_have_any_optimizer():
    whole, frozen = (nn.Parameter(torch.ones(6, 4)) for _ in range(2))
    frozen.requires_grad_(False)
    refuse([Lamb([whole, frozen]), optim.LBFGS([whole])], frozen)


def test_a_trial_leaves_optimizers_schedulers_and_random_numbers_as_they_are():
    parameter = nn.Parameter(torch.ones(6, 4))
    inner = optim.Adam([parameter], lr=torch.tensor(0.1))
    optimizers = [inner, Lookahead(optim.Adam([parameter])), optim.LBFGS([parameter])]
    for optimizer in optimizers:
        optimizer.register_step_pre_hook(lambda *_: pytest.fail("a twin runs hooks of the original"))
        optim.lr_scheduler.StepLR(optimizer, 1)  # replaces `optimizer.step`
    before = [dict(vars(optimizer)) for optimizer in optimizers]
    groups, random = str([optimizer.param_groups for optimizer in optimizers]), torch.get_rng_state()
    with register_optimizer_step_pre_hook(lambda *_: pytest.fail("a twin runs hooks of all optimizers")):
        for optimizer in optimizers:
            difference_in_pieces(optimizer, parameter, (6, 4))
    assert [vars(optimizer) for optimizer in optimizers] == before
    assert str([optimizer.param_groups for optimizer in optimizers]) == groups
    assert not inner.state
    assert not optimizers[1].inner.state
    assert not optimizers[1].slow
    assert parameter.grad is None
    assert torch.equal(parameter, torch.ones(6, 4))
    assert torch.equal(torch.get_rng_state(), random)


def test_parameters_without_memory_can_be_asked_about():
    with torch.device("meta"):
        parameter = nn.Parameter(torch.empty(50_000, 50_000))
    refuse([optim.AdamW([parameter])], parameter)


def test_an_optimizer_of_which_there_can_be_no_twin_is_refused():
    parameter = nn.Parameter(torch.ones(6, 4))
    optimizer = optim.SGD([parameter], 0.1)
    optimizer.lock = threading.Lock()
    with pytest.raises(ConfigError, match="SGD cannot update pieces of `p0`: it cannot be tried, .*pickle"):
        refuse([optimizer], parameter)
