"""Full state dict: gathers sharded model and optimizer state on global rank 0.

Names, shapes and parameter numbers are those of the unpartitioned module, so a file written under one layout is read
under any other, or by plain PyTorch.

Whole tensors are made of a :class:`~smp_strategy.checkpoint.spread_state.SpreadState` by a function of the type
:data:`Take`: :func:`collect` gathers all values at once; for a file they are gathered later, one after the other
(:mod:`smp_strategy.checkpoint.torch_file`).
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from smp_strategy.checkpoint.load import by_parameter, decoded
from smp_strategy.checkpoint.sources import WholeState, flattened
from smp_strategy.checkpoint.spread_state import SpreadState
from smp_strategy.checkpoint.state_dict import encoded, module_state, optimizer_state
from smp_strategy.data_parallel.holdings import Holdings
from smp_strategy.model.guarded_tensors import in_plain_sight

__all__ = [
    "Take",
    "collect",
    "numbered",
    "numbers_of",
    "optimizer_state_on_all_ranks",
    "spread_optimizer_state",
    "state_dict",
    "whole_optimizer_state_dict",
]

Take: TypeAlias = Callable[[SpreadState], OrderedDict[str, Any]]


def collect(state: SpreadState | Mapping[str, Any]) -> "OrderedDict[str, Any]":
    """All entries of ``state`` on global rank 0, tensors in new memory on the host; none elsewhere. Collective."""
    return (state if isinstance(state, SpreadState) else SpreadState(state, ())).on_first()


def state_dict(holdings: Holdings, take: Take) -> "OrderedDict[str, Any]":
    """The full state dict on global rank 0, an empty one elsewhere. Collective. Tied parameters are one tensor."""
    with in_plain_sight():
        found = holdings.module.state_dict(keep_vars=True)
    state = take(SpreadState(module_state(holdings), found))
    if state:
        state._metadata = found._metadata  # type: ignore[attr-defined]
    return state


def spread_optimizer_state(holdings: Holdings, optimizer: Optimizer) -> SpreadState:
    """The state of ``optimizer``, by numbers of parameters: ``0.exp_avg``. Collective."""
    return SpreadState(flattened(optimizer_state(holdings, optimizer, numbers_of(optimizer))["state"]), ())


def whole_optimizer_state_dict(optimizer: Optimizer, entries: Mapping[str, Any]) -> dict[str, Any]:
    """``optimizer.state_dict()`` of a single process, with whole ``entries``, named as in
    :func:`spread_optimizer_state`."""
    numbers = numbers_of(optimizer)
    state = {int(numbers[parameter]): kept for parameter, kept in _by_parameter(entries, numbers).items()}
    return {**optimizer.state_dict(), "state": dict(sorted(state.items()))}


def optimizer_state_on_all_ranks(holdings: Holdings, optimizer: Optimizer) -> defaultdict[Any, Any]:
    """The full ``optimizer.state`` on every rank, in memory of its own; collective over all ranks."""
    numbers = numbers_of(optimizer)
    collected = spread_optimizer_state(holdings, optimizer).on_all_ranks()
    state: defaultdict[Any, Any] = defaultdict(dict)
    found = _by_parameter(collected, numbers)
    for parameter in [each for each in numbers if each in found]:
        device = parameter.device
        # Scalars (numbers of steps) stay on the host.
        state[parameter] = pytree.tree_map(
            lambda leaf, to=device: leaf.to(to) if isinstance(leaf, Tensor) and leaf.ndim else leaf, found[parameter]
        )
    state.update((key, kept) for key, kept in optimizer.state.items() if key not in holdings.names)
    return state


def _by_parameter(
    collected: Mapping[str, Any], numbers: Mapping[nn.Parameter, str]
) -> dict[nn.Parameter, dict[str, Any]]:
    found = by_parameter(collected, "", {number: parameter for parameter, number in numbers.items()})
    return {
        parameter: decoded({key: collected[name] for key, name in names.items()}) for parameter, names in found.items()
    }


def numbered(state: Mapping[str, Any]) -> WholeState:
    """The result of ``optimizer.state_dict()`` as a source: state of optimizer 0, parameters by :func:`numbers_of`."""
    kept = {str(number): encoded(value, lambda _, leaf: leaf) for number, value in state["state"].items()}
    groups = [{**group, "params": [str(number) for number in group["params"]]} for group in state["param_groups"]]
    return WholeState(flattened({"optimizer_0": {"state": kept, "param_groups": groups}}))


def numbers_of(optimizer: Optimizer) -> dict[nn.Parameter, str]:
    """The number of each parameter in ``optimizer.state_dict()``."""
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return {parameter: str(number) for number, parameter in enumerate(parameters)}
