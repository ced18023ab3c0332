"""Optimizer dependence: whether an optimizer can update some parameters without the gradients of the others.

Where stages or replicas divide the parameters among them (pipeline stages, ``shard_optimizer_state``), each rank
updates its own: to its optimizer the others are parameters without a gradient. That is right for optimizers that update
every parameter by itself, in whatever way (Adam, Muon, LAMB), and silently wrong for those that relate parameters to
each other: that find one step size for all (Prodigy, D-Adaptation), clip by the norm of all gradients in their step, or
move along the gradient of the whole model (SAM, LBFGS).

Any optimizer may be used, so it is tried, as for pieces (:mod:`smp_strategy.data_parallel.optimizer_checks`). A twin
takes some steps with small stand-ins, one for each param group, number of dims and rank that there are. Other twins get
what each rank would see of them: gradients of its own only, and no values of other stages. The values that a rank
updates must come out alike, and so must their state and the options of its groups, which may tell of an effect at later
steps only.

If there is a difference, all is tried again with the same random numbers in each operation: an optimizer may draw some.
One that wants a closure gets one that evaluates nothing. One that cannot be tried even then is used on trust.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from smp_strategy.data_parallel.optimizer_probe import step_by_values, take_step, twin_with
from smp_strategy.model.ownership import HomeStages, HookAccess, send_away

__all__ = ["Updater", "can_be_dealt_out", "dependence", "problems_of_dependence"]

# Some optimizers look at other parameters every few steps only, as an average over every fifth step does.
NUM_STEPS = 12
# Scales of successive gradients: norms are clipped only if they are large.
_SCALES = (1.0, 0.3, 1e6, 3.0)
_MOST_PER_DIM = 6
_TOLERANCE = 1e-5


class Updater(NamedTuple):
    """Rank among those that divide the parameters of an optimizer."""

    stage: int
    """Stage of the rank, of which it has all values."""
    replica: int = 0
    """Replica, if replicas divide the parameters of a stage."""


Updaters = Callable[[nn.Parameter], Collection[Updater]]


def problems_of_dependence(
    optimizers: Iterable[Optimizer],
    updaters: Updaters,
    names: Mapping[nn.Parameter, str],
    options: Mapping[str, object],
) -> list[str]:
    """Problem and remedy for each optimizer that relates parameters of several ranks, in sentences.

    Only the metadata of parameters count, so that all ranks come to the same result, wherever values are.

    Args:
        optimizers: Optimizers of the model. They, and their schedulers, are not changed.
        updaters: Returns the ranks that update a parameter.
        names: Names of parameters.
        options: Options that divide parameters among ranks, with their values.
    """
    given = " and ".join(f"`{name}` ({value})" for name, value in options.items())
    them = "it" if len(options) == 1 else "them"
    return [
        f"With {given} each rank updates some of the parameters, and {type(optimizer).__name__} cannot update some "
        f"without the others: {reason}. Leave {them} out, so that every rank updates all parameters, or use an "
        "optimizer that updates each parameter by itself."
        for optimizer in optimizers
        if (reason := dependence(optimizer, updaters, names)) is not None
    ]


def dependence(optimizer: Optimizer, updaters: Updaters, names: Mapping[nn.Parameter, str]) -> str | None:
    """Difference that it makes if each rank updates its own parameters, as a half-sentence; ``None``: none is known.

    Args:
        optimizer: Optimizer, which is not changed: twins of it are tried.
        updaters: Returns the ranks that update a parameter.
        names: Names of parameters, as far as they have one.
    """
    try:
        return _difference(optimizer, updaters, names)
    except _NotTriedError:
        return None


def can_be_dealt_out(optimizer: Optimizer) -> bool:
    """Whether a trial shows that replicas may each update any subset of its parameters."""
    given = {each: number for number, each in enumerate(_trained(optimizer))}
    try:
        return _difference(optimizer, lambda parameter: [Updater(0, given[parameter] % 2)], {}) is None
    except _NotTriedError:
        return False


class _NotTriedError(Exception):
    """The optimizer takes no steps with stand-ins."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _ProbeParameter:
    """Stand-in for the parameters of a param group with equal numbers of dims that the same ranks update."""

    parameter: nn.Parameter
    name: str
    updaters: frozenset[Updater]
    begin: Tensor
    gradients: tuple[Tensor, ...]

    def is_on(self, stage: int) -> bool:
        return any(updater.stage == stage for updater in self.updaters)


class _TrialOutcome(NamedTuple):
    """Outcome of a trial for a parameter."""

    values: list[Tensor]
    """Values after each step."""
    kept: Any
    options: dict[str, Any]


class _SameDraws(TorchFunctionMode):
    """Mode in which each operation draws the same random numbers, whatever was drawn before."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        torch.default_generator.manual_seed(0)
        return func(*args, **(kwargs or {}))


def _difference(optimizer: Optimizer, updaters: Updaters, names: Mapping[nn.Parameter, str]) -> str | None:
    with torch.inference_mode(False), torch.no_grad():  # before `predict` as well
        stand_ins = _stand_ins(optimizer, updaters, names)
        if len({each.updaters for each in stand_ins}) < 2:
            return None  # nothing of it is divided
        reason = None
        for draws in (nullcontext, _SameDraws):
            reason = _difference_in_steps(optimizer, stand_ins, draws)
            if reason is None:
                break
        return reason


def _difference_in_steps(
    optimizer: Optimizer, stand_ins: list[_ProbeParameter], draws: Callable[[], AbstractContextManager[Any]]
) -> str | None:
    def trained(rank: Updater | None, with_closure: bool) -> dict[_ProbeParameter, _TrialOutcome]:
        with draws():
            return _trained_by(rank, optimizer, stand_ins, with_closure=with_closure)

    with_closure = False
    try:
        everything = trained(None, with_closure)
    except Exception:
        with_closure = True
        try:
            everything = trained(None, with_closure)
        except Exception as error:
            raise _NotTriedError from error
    for rank in sorted(frozenset().union(*(each.updaters for each in stand_ins))):
        try:
            own = trained(rank, with_closure)
        except Exception as error:
            return f"without these it fails ({_shown(error)})"
        for stand_in, outcome in own.items():
            if reason := _difference_between(stand_in.name, everything[stand_in], outcome):
                return reason
    return None


def _trained_by(
    rank: Updater | None, optimizer: Optimizer, stand_ins: list[_ProbeParameter], *, with_closure: bool
) -> dict[_ProbeParameter, _TrialOutcome]:
    """Outcomes of the stand-ins if ``rank`` trains its own; ``None``: if a single process trains all."""
    made: dict[Tensor, nn.Parameter] = {each.parameter: nn.Parameter(each.begin.clone()) for each in stand_ins}
    twin = twin_with(optimizer, made)
    step_by_values(twin)
    for each in stand_ins:
        if rank is not None and not each.is_on(rank.stage):
            send_away(made[each.parameter], _home(each, rank.stage))
    own = {made[each.parameter]: each for each in stand_ins if rank is None or rank in each.updaters}
    values: dict[nn.Parameter, list[Tensor]] = {mine: [] for mine in own}
    for step in range(NUM_STEPS):

        def evaluate(step: int = step) -> Tensor:
            for mine, each in own.items():  # a loss whose gradients depend on where the weights have moved
                mine.grad = each.gradients[step % len(_SCALES)] + mine.detach()
            return torch.tensor(1.0)

        evaluate()
        take_step(twin, evaluate if with_closure else None)
        for mine in own:
            values[mine].append(mine.detach().clone())
    options = {each: group for group in twin.param_groups for each in group["params"]}
    return {own[mine]: _TrialOutcome(values[mine], twin.state.get(mine, {}), options[mine]) for mine in own}


def _stand_ins(optimizer: Optimizer, updaters: Updaters, names: Mapping[nn.Parameter, str]) -> list[_ProbeParameter]:
    found: dict[object, _ProbeParameter] = {}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if not parameter.requires_grad or not parameter.numel():
                continue
            users = frozenset(updaters(parameter))
            kind = (number, parameter.ndim, parameter.dtype, users)
            if kind not in found:
                found[kind] = _stand_in(parameter, names.get(parameter, "a parameter"), users, seed=len(found))
    return list(found.values())


def _stand_in(parameter: nn.Parameter, name: str, updaters: frozenset[Updater], *, seed: int) -> _ProbeParameter:
    shape = [min(size, _MOST_PER_DIM) for size in parameter.shape]
    keeps = parameter.dtype.is_complex or parameter.dtype == torch.float64
    random = torch.Generator().manual_seed(seed)

    def draw() -> Tensor:
        return torch.randn(shape, generator=random, dtype=parameter.dtype if keeps else torch.float32)

    return _ProbeParameter(
        parameter=parameter,
        name=name,
        updaters=updaters,
        begin=draw(),
        gradients=tuple(scale * draw() for scale in _SCALES),
    )


def _home(stand_in: _ProbeParameter, stage: int) -> HomeStages:
    return HomeStages(
        name=stand_in.name,
        holders=frozenset(updater.stage for updater in stand_in.updaters),
        stage=stage,
        stride=stand_in.begin.stride(),
        sight=HookAccess(),
    )


def _trained(optimizer: Optimizer) -> list[nn.Parameter]:
    return [each for group in optimizer.param_groups for each in group["params"] if each.requires_grad]


def _shown(error: Exception) -> str:
    first, *_ = str(error).split(". ")  # what follows is advice for other places
    return f"{type(error).__name__}: {first}".rstrip(".")


def _difference_between(name: str, together: _TrialOutcome, apart: _TrialOutcome) -> str | None:
    if not _are_alike(together.values, apart.values):
        return f"its steps of `{name}` depend on what others have"
    for option, value in together.options.items():
        if option != "params" and not _are_alike(value, apart.options.get(option)):
            return f"it goes by `{option}`, which it computes from all of them"
    if not _are_alike(together.kept, apart.kept):
        return f"what it keeps for `{name}` depends on what others have"
    return None


def _are_alike(one: Any, other: Any) -> bool:
    leaves, structure = pytree.tree_flatten(one)
    others, other_structure = pytree.tree_flatten(other)
    return structure == other_structure and all(map(_is_alike, leaves, others))


def _is_alike(one: object, other: object) -> bool:
    if isinstance(one, Tensor):
        if not isinstance(other, Tensor) or one.shape != other.shape or one.dtype != other.dtype:
            return False
        if not one.numel() or torch.equal(one, other):
            return True
        most = float(one.nan_to_num(0.0, 0.0, 0.0).abs().max())
        return torch.allclose(one, other, rtol=0.0, atol=_TOLERANCE * most, equal_nan=True)
    if isinstance(one, int | float) and isinstance(other, int | float):
        return math.isclose(one, other, rel_tol=_TOLERANCE) or (math.isnan(one) and math.isnan(other))
    return one == other if isinstance(one, complex | str) else True
