"""Sharded state dicts of module, optimizer and gradients: plain names, whole shapes, and this rank's rectangles.

Names are those of PyTorch's distributed checkpoints as Lightning writes them: ``state_dict.<name>``,
``optimizer_0.state.<name>.<key>`` and ``optimizer_0.param_groups`` with names of parameters. So either can read the
other's folders. Nothing here communicates, and nothing is copied.

A tensor that several ranks hold is offered by all of them; the write plan settles who writes it. State of which each
replica has its own (buffers, extra state) is offered by the first replica only.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from smp_strategy.checkpoint.local_shards import LocalShards
from smp_strategy.checkpoint.storage.held_tensor import HeldTensor, WholeObject
from smp_strategy.data_parallel.optimizer_state import has_one_per_element, kept_per_element
from smp_strategy.data_parallel.sharded_gradient import ShardedGradient
from smp_strategy.errors import UnsupportedError
from smp_strategy.model.guarded_tensors import in_plain_sight

__all__ = [
    "encoded",
    "gradient_state",
    "kept_by",
    "module_state",
    "named_state",
    "optimizer_state",
    "tied_names",
    "whole_module_state",
    "whole_optimizer_state",
]


def module_state(holdings: LocalShards) -> dict[str, Any]:
    """This rank's shards of the module's state dict."""
    state: dict[str, Any] = {}
    with in_plain_sight():
        found = holdings.module.state_dict(keep_vars=True)
        aliases, same = _aliases(found)
        for name, value in found.items():
            if isinstance(value, nn.Parameter):
                if name not in same and holdings.is_here(value):
                    state[name] = holdings.values(value, aliases=aliases.get(name, ()))
            elif holdings.speaks_for_replicas and holdings.ownership.saver(name) == holdings.mesh.stage:
                state[name] = HeldTensor.whole(value.detach()) if isinstance(value, Tensor) else WholeObject(value)
    return state


def named_state(holdings: LocalShards, names: Iterable[str]) -> dict[str, Any]:
    """This rank's shards of some parameters and buffers, by their first names."""
    state: dict[str, Any] = {}
    with in_plain_sight():
        tensors = {**dict(holdings.module.named_parameters()), **dict(holdings.module.named_buffers())}
        for name in names:
            value = tensors[name]
            if isinstance(value, nn.Parameter):
                if holdings.is_here(value):
                    state[name] = holdings.values(value)
            elif holdings.speaks_for_replicas and holdings.ownership.saver(name) == holdings.mesh.stage:
                state[name] = HeldTensor.whole(value.detach())
    return state


def whole_module_state(module: nn.Module, *, is_first: bool) -> dict[str, Any]:
    """State dict of a module that every rank has as a whole.

    Args:
        module: Module that is not partitioned.
        is_first: Whether this rank saves the state that may differ between ranks.
    """
    found = module.state_dict(keep_vars=True)
    aliases, same = _aliases(found)
    return {
        name: HeldTensor.whole(value.detach(), aliases=aliases.get(name, ()))
        if isinstance(value, Tensor)
        else WholeObject(value)
        for name, value in found.items()
        if name not in same and (is_first or isinstance(value, nn.Parameter))
    }


def optimizer_state(
    holdings: LocalShards, optimizer: Optimizer, names: Mapping[nn.Parameter, str] | None = None
) -> dict[str, Any]:
    """This rank's shards of the state of ``optimizer``.

    Args:
        holdings: Shards of each parameter that this rank holds.
        optimizer: Optimizer of parameters of the module.
        names: Names of parameters; ``None``: those of the module.
    """
    names = holdings.names if names is None else names
    state: dict[str, Any] = {}
    with in_plain_sight():
        for parameter, kept in kept_by(optimizer).items():
            # An optimizer may keep no state, or wrong state, of an empty run.
            if holdings.is_updated_here(parameter) and (
                holdings.local_shape(parameter) != (0,) or not parameter.numel()
            ):
                state[_name(names, parameter)] = encoded(kept, _in_whole(holdings, optimizer, parameter))
    return _with_groups(state, optimizer, names, is_first=holdings.mesh.rank == 0)


def whole_optimizer_state(
    optimizer: Optimizer,
    state: Mapping[nn.Parameter, Any],
    names: Mapping[nn.Parameter, str],
    *,
    is_first: bool,
) -> dict[str, Any]:
    """State of an optimizer of which this rank has all of the ``state``, or nothing."""
    kept = {
        _name(names, parameter): encoded(value, lambda _, leaf: HeldTensor.whole(leaf.detach()))
        for parameter, value in state.items()
    }
    return _with_groups(kept, optimizer, names, is_first=is_first)


def kept_by(optimizer: Optimizer) -> dict[nn.Parameter, Any]:
    """State of ``optimizer`` for each of its parameters, in their order."""
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return {parameter: optimizer.state[parameter] for parameter in parameters if parameter in optimizer.state}


def gradient_state(holdings: LocalShards) -> dict[str, Any]:
    """This rank's shards of the gradients, which are summed over ranks."""
    state: dict[str, Any] = {}
    with in_plain_sight():
        for parameter, name in holdings.names.items():
            if holdings.is_here(parameter) and parameter.grad is not None:
                gradient = parameter.grad
                local = gradient.piece if isinstance(gradient, ShardedGradient) else gradient
                state[name] = holdings.held(parameter, local)
    return state


def tied_names(state: Mapping[str, Any]) -> dict[str, str]:
    """Further names of tied parameters in a state dict, made with ``keep_vars``, with the first name of each.

    Every rank knows every parameter, so they are the same on all ranks. Buffers may have been replaced.
    """
    first: dict[nn.Parameter, str] = {}
    same = {}
    for name, tensor in state.items():
        if isinstance(tensor, nn.Parameter) and first.setdefault(tensor, name) != name:
            same[name] = first[tensor]
    return same


def _aliases(state: Mapping[str, Any]) -> tuple[dict[str, tuple[str, ...]], dict[str, str]]:
    """Further names of each tied parameter by its first name, and the first name by each further one."""
    same, aliases = tied_names(state), dict[str, tuple[str, ...]]()
    for name, first in same.items():
        aliases[first] = (*aliases.get(first, ()), name)
    return aliases, same


def _in_whole(
    holdings: LocalShards, optimizer: Optimizer, parameter: nn.Parameter
) -> Callable[[str, Tensor], HeldTensor]:
    """Function that makes a sharded tensor of a tensor in the state of ``parameter``, by its name there."""
    shape, is_sharded = holdings.local_shape(parameter), holdings.is_sharded(parameter)
    by_name = kept_per_element(optimizer, parameter) if is_sharded and shape == (1,) else {}

    def held(name: str, leaf: Tensor) -> HeldTensor:
        has_shape = tuple(leaf.shape) == shape
        is_spread = has_one_per_element(name, leaf, shape, by_name) if is_sharded else has_shape
        return holdings.held(parameter, leaf.detach()) if is_spread else HeldTensor.whole(leaf.detach())

    return held


def encoded(value: Any, change: Callable[[str, Tensor], Any], name: str = "") -> Any:
    """State with its tensors mapped by ``change``. Files have dicts only, so lists with tensors become dicts."""
    if isinstance(value, Tensor):
        return change(name.replace("#", ""), value)
    if isinstance(value, list | tuple) and any(isinstance(item, Tensor) for item in value):
        value = {f"#{number}": item for number, item in enumerate(value)}
    if isinstance(value, Mapping):
        return {str(key): encoded(item, change, f"{name}.{key}".strip(".")) for key, item in value.items()}
    return value


def _with_groups(
    state: dict[str, Any], optimizer: Optimizer, names: Mapping[nn.Parameter, str], *, is_first: bool
) -> dict[str, Any]:
    if not is_first:
        return {"state": state}
    groups = [
        {**group, "params": [_name(names, parameter) for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    return {"state": state, "param_groups": groups}


def _name(names: Mapping[nn.Parameter, str], parameter: nn.Parameter) -> str:
    if parameter not in names:
        raise UnsupportedError(
            f"An optimizer has a parameter of shape {list(parameter.shape)} that is not in the module, so it has no "
            'name in a checkpoint. Make it a parameter of the module, or use `state_dict_type="full"`.'
        )
    return names[parameter]
