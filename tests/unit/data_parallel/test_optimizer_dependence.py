"""Which optimizers relate parameters to each other, so that ranks cannot each update some of them."""

import threading
from collections.abc import Callable, Iterable

import prodigyopt
import pytest
import schedulefree
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn, optim
from transformers.optimization import Adafactor

from smp_strategy.data_parallel.optimizer_dependence import (
    Updater,
    can_be_dealt_out,
    dependence,
    problems_of_dependence,
)
from tests.unit.data_parallel.optimizers import (
    CentersGroups,
    ClipsAll,
    ClipsEach,
    GlobalNorm,
    GoesByGroup,
    Lamb,
    Langevin,
    LateShampoo,
    Lion,
    Lookahead,
    Perturbs,
)

Make = Callable[[Iterable[nn.Parameter]], optim.Optimizer]
_TORCHS = (optim.Adadelta, optim.Adafactor, optim.Adagrad, optim.Adam, optim.AdamW, optim.Adamax, optim.ASGD)
_TORCHS += (optim.Muon, optim.NAdam, optim.RAdam, optim.RMSprop, optim.Rprop, optim.SGD)
APART: dict[str, Make] = {
    **{one.__name__: one for one in (*_TORCHS, Lion, Lamb, LateShampoo, ClipsEach, Langevin)},
    "fused AdamW": lambda p: optim.AdamW(p, fused=True),
    "foreach AMSGrad": lambda p: optim.Adam(p, amsgrad=True, foreach=True),
    "AdamW whose rate warms up": lambda p: optim.AdamW(p, lr=torch.tensor(0.0)),
    "relative steps": Adafactor,
    "AdamW without a schedule": schedulefree.AdamWScheduleFree,
    "SGD without a schedule": schedulefree.SGDScheduleFree,
}
TOGETHER: dict[str, Make] = {
    **{one.__name__: one for one in (GlobalNorm, GoesByGroup, ClipsAll, Perturbs, prodigyopt.Prodigy)},
    "clipping whose rate warms up": lambda p: ClipsAll(p, lr=0.0),
    "LBFGS": optim.LBFGS,
    "LBFGS that evaluates once": lambda p: optim.LBFGS(p, max_iter=1),
    "Lookahead around a norm of all": lambda p: Lookahead(GlobalNorm(p)),
}
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch", "ignore::UserWarning:transformers")


def matrices(count: int = 4) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(9, 5 + number)) for number in range(count)]


def stages(parameters: list[nn.Parameter]) -> Callable[[nn.Parameter], list[Updater]]:
    """One after the other on two stages."""
    numbers = {parameter: number for number, parameter in enumerate(parameters)}
    return lambda parameter: [Updater(numbers[parameter] % 2)]


def replicas(parameters: list[nn.Parameter]) -> Callable[[nn.Parameter], list[Updater]]:
    """One after the other to two replicas, of a stage that has all values."""
    numbers = {parameter: number for number, parameter in enumerate(parameters)}
    return lambda parameter: [Updater(0, numbers[parameter] % 2)]


@pytest.mark.parametrize("divided", [stages, replicas])
@pytest.mark.parametrize("name", APART)
def test_an_optimizer_that_updates_each_parameter_by_itself_may_be_divided(name, divided):
    parameters = matrices()
    assert dependence(APART[name](parameters), divided(parameters), {}) is None
    assert can_be_dealt_out(APART[name](parameters))


@pytest.mark.parametrize("divided", [stages, replicas])
@pytest.mark.parametrize("name", TOGETHER)
def test_an_optimizer_that_relates_parameters_is_found(name, divided):
    parameters = matrices()
    assert dependence(TOGETHER[name](parameters), divided(parameters), {}) is not None
    assert not can_be_dealt_out(TOGETHER[name](parameters))


@pytest.mark.parametrize("name", TOGETHER)
def test_where_the_same_ranks_update_all_of_them_it_may_relate_them(name):
    parameters = matrices()
    for everyones in ([Updater(1)], [Updater(0), Updater(1)]):
        assert dependence(TOGETHER[name](parameters), lambda _, found=everyones: found, {}) is None


def test_what_is_frozen_is_not_asked_about():
    parameters = matrices()
    for each in parameters[1::2]:
        each.requires_grad_(False)
    assert dependence(GlobalNorm(parameters), stages(parameters), {}) is None
    parameters[1].requires_grad_(True)
    assert dependence(GlobalNorm(parameters), stages(parameters), {}) is not None


@given(st.sampled_from(["GlobalNorm", "Perturbs"]), st.lists(st.sets(st.integers(0, 3), min_size=1), min_size=2))
def test_it_shows_whoever_updates_what(name, held):
    parameters = matrices(len(held))
    numbers = {parameter: number for number, parameter in enumerate(parameters)}
    found = dependence(TOGETHER[name](parameters), lambda each: [Updater(stage) for stage in held[numbers[each]]], {})
    assert (found is None) == (len(set(map(frozenset, held))) == 1)


def test_what_is_done_with_values_of_other_stages_is_found_before_a_step_fails():
    parameters = matrices()
    optimizer = Lookahead(optim.Adam(parameters))
    found = dependence(optimizer, stages(parameters), {each: f"p{n}" for n, each in enumerate(parameters)})
    assert found == (
        "without these it fails (UnsupportedError: `clone` needs the values of `p1`, which are on stage 1 and not on "
        "stage 0, that of this rank)"
    )
    assert dependence(optimizer, replicas(parameters), {}) is None


def test_what_relates_param_groups_is_found_where_they_are_divided():
    first, second = matrices(2)
    optimizer = CentersGroups([{"params": [first]}, {"params": [second]}])
    assert dependence(optimizer, stages([first, second]), {}) is not None
    assert dependence(CentersGroups([{"params": [first]}, {"params": []}]), stages([first, second]), {}) is None


def test_a_norm_of_each_param_group_is_right_where_groups_stay_together():
    parameters = matrices()
    apart = GoesByGroup([{"params": parameters[::2]}, {"params": parameters[1::2]}])
    assert dependence(apart, stages(parameters), {}) is None
    mixed = GoesByGroup([{"params": parameters[:2]}, {"params": parameters[2:]}])
    assert dependence(mixed, stages(parameters), {}) == "it goes by `distance`, which it computes from all of them"


def test_one_that_cannot_be_tried_is_used_as_before_but_nothing_is_said_for_it():
    parameters = matrices()
    locked = optim.SGD(parameters, 0.1)
    locked.lock = threading.Lock()
    for optimizer in (locked, optim.SparseAdam(parameters)):
        assert dependence(optimizer, stages(parameters), {}) is None
        assert not can_be_dealt_out(optimizer)


def test_a_trial_leaves_the_optimizer_and_random_numbers_as_they_are():
    parameters = matrices()
    optimizer = prodigyopt.Prodigy(parameters)
    optimizer.register_step_pre_hook(lambda *_: pytest.fail("a twin runs hooks of the original"))
    groups, random = str(optimizer.param_groups), torch.get_rng_state()
    dependence(optimizer, stages(parameters), {})
    dependence(Langevin(parameters), stages(parameters), {})
    assert str(optimizer.param_groups) == groups
    assert not optimizer.state
    assert all(each.grad is None and type(each) is nn.Parameter for each in parameters)
    assert torch.equal(torch.get_rng_state(), random)


def test_a_problem_names_the_options_the_reason_and_the_remedy():
    parameters = matrices()
    names = {each: f"p{number}" for number, each in enumerate(parameters)}
    optimizers = [optim.AdamW(parameters), GlobalNorm(parameters)]
    options = {"pipeline_parallel_degree": 2, "shard_optimizer_state": True}
    assert problems_of_dependence(optimizers, stages(parameters), names, options) == [
        "With `pipeline_parallel_degree` (2) and `shard_optimizer_state` (True) each rank updates some of the "
        "parameters, and GlobalNorm cannot update some without the others: its steps of `p0` depend on what others "
        "have. Leave them out, so that every rank updates all parameters, or use an optimizer that updates each "
        "parameter by itself."
    ]
