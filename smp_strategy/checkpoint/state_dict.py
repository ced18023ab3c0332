"""Sharded state dicts of module, optimizer and gradients: plain names, whole shapes, and this rank's rectangles.

Names are those of PyTorch's distributed checkpoints as Lightning writes them: ``state_dict.<name>``,
``optimizer_0.state.<name>.<key>`` and ``optimizer_0.param_groups`` with names of parameters. So either can read the
other's folders. Nothing here communicates, and nothing is copied.

A tensor that several ranks hold is offered by all of them; the write plan settles who writes it. State of which each
replica has its own (buffers, extra state) is offered by the first replica only.
:class:`~smp_strategy.data_parallel.holdings.Holdings` knows which rectangles of a parameter this rank holds; those of
its moments and gradient are the same.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from smp_strategy.checkpoint.storage.held_tensor import HeldRectangle, HeldTensor, WholeObject, with_aliases
from smp_strategy.data_parallel.holdings import Holdings
from smp_strategy.data_parallel.optimizer_state import has_one_per_element, kept_per_element
from smp_strategy.data_parallel.parameter_pieces import ShardedGradient
from smp_strategy.errors import UnsupportedError
from smp_strategy.model.guarded_tensors import in_plain_sight

__all__ = [
    "encoded",
    "gradient_state",
    "held",
    "kept_by",
    "module_state",
    "named_state",
    "optimizer_state",
    "to_fill",
    "whole_module_state",
    "with_lists",
    "whole_optimizer_state",
]


def held(holdings: Holdings, parameter: nn.Parameter, local: Tensor) -> HeldTensor:
    """The sharded tensor of which this rank has ``local``, with one value per element of ``parameter``."""
    return _held(holdings, parameter, holdings.rectangles(parameter, local), local.dtype)


def to_fill(holdings: Holdings, parameter: nn.Parameter) -> HeldTensor:
    """All memory of this rank for values of ``parameter``, to be filled on all ranks alike."""
    runs = holdings.to_fill(parameter)
    rectangles = (each for start, values in runs for each in holdings.rectangles(parameter, values, start))
    return _held(holdings, parameter, rectangles, parameter.dtype)


def _held(
    holdings: Holdings, parameter: Tensor, rectangles: Iterable[tuple[tuple[int, ...], Tensor]], dtype: torch.dtype
) -> HeldTensor:
    blocks = tuple(HeldRectangle(offsets, values) for offsets, values in rectangles)
    return HeldTensor(shape=holdings.whole_shape(parameter), dtype=dtype, blocks=blocks)


def module_state(holdings: Holdings) -> dict[str, Any]:
    """This rank's shards of the module's state dict."""
    with in_plain_sight():
        return _shares(holdings, holdings.module.state_dict(keep_vars=True))


def named_state(holdings: Holdings, names: Iterable[str]) -> dict[str, Any]:
    """This rank's shards of some parameters and buffers, by their first names."""
    with in_plain_sight():
        tensors = {**dict(holdings.module.named_parameters()), **dict(holdings.module.named_buffers())}
        return _shares(holdings, {name: tensors[name] for name in names})


def _shares(holdings: Holdings, values: Mapping[str, Any]) -> dict[str, Any]:
    """This rank's shards of parameters, buffers and extra states, by their names."""
    state: dict[str, Any] = {}
    known: dict[nn.Parameter, HeldTensor] = {}
    for name, value in values.items():
        if isinstance(value, nn.Parameter):
            if holdings.is_here(value):
                if value not in known:
                    known[value] = held(holdings, value, holdings.local_values(value))
                state[name] = known[value]
        elif holdings.speaks_for_replicas and holdings.ownership.saver(name) == holdings.mesh.stage:
            state[name] = _whole(value)
    return with_aliases(state)


def whole_module_state(module: nn.Module, *, is_first: bool) -> dict[str, Any]:
    """State dict of a module that every rank has as a whole.

    Args:
        module: Module that is not partitioned.
        is_first: Whether this rank saves the state that may differ between ranks.
    """
    state: dict[str, Any] = {}
    known: dict[nn.Parameter, HeldTensor] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, nn.Parameter):
            state[name] = known.setdefault(value, HeldTensor.whole(value.detach()))
        elif is_first:
            state[name] = _whole(value)
    return with_aliases(state)


def _whole(value: Any) -> HeldTensor | WholeObject:
    """A buffer or extra state."""
    return HeldTensor.whole(value.detach()) if isinstance(value, Tensor) else WholeObject(value)


def optimizer_state(
    holdings: Holdings, optimizer: Optimizer, names: Mapping[nn.Parameter, str] | None = None
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


def gradient_state(holdings: Holdings) -> dict[str, Any]:
    """This rank's shards of the gradients, which are summed over ranks."""
    state: dict[str, Any] = {}
    with in_plain_sight():
        for parameter, name in holdings.names.items():
            if holdings.is_here(parameter) and parameter.grad is not None:
                gradient = parameter.grad
                local = gradient.piece if isinstance(gradient, ShardedGradient) else gradient
                state[name] = held(holdings, parameter, local)
    return state


def _in_whole(holdings: Holdings, optimizer: Optimizer, parameter: nn.Parameter) -> Callable[[str, Tensor], HeldTensor]:
    """Function that makes a sharded tensor of a tensor in the state of ``parameter``, by its name there."""
    shape, is_sharded = holdings.local_shape(parameter), holdings.is_sharded(parameter)
    by_name = kept_per_element(optimizer, parameter) if is_sharded and shape == (1,) else {}

    def of_leaf(name: str, leaf: Tensor) -> HeldTensor:
        has_shape = tuple(leaf.shape) == shape
        is_spread = has_one_per_element(name, leaf, shape, by_name) if is_sharded else has_shape
        return held(holdings, parameter, leaf.detach()) if is_spread else HeldTensor.whole(leaf.detach())

    return of_leaf


def encoded(value: Any, change: Callable[[str, Tensor], Any], name: str = "") -> Any:
    """State with its tensors mapped by ``change``. Files have dicts only, so lists with tensors become dicts."""
    if isinstance(value, Tensor):
        return change(name.replace("#", ""), value)
    if isinstance(value, list | tuple) and any(isinstance(item, Tensor) for item in value):
        value = {f"#{number}": item for number, item in enumerate(value)}
    if isinstance(value, Mapping):
        return {str(key): encoded(item, change, f"{name}.{key}".strip(".")) for key, item in value.items()}
    return value


def with_lists(value: Any, key_of: Callable[[int], Any] = "#{}".format) -> Any:
    """State with its lists again, the inverse of :func:`encoded`; ``key_of`` gives the key of a number."""
    if not isinstance(value, dict):
        return value
    items = {key: with_lists(item, key_of) for key, item in value.items()}
    in_order = list(map(key_of, range(len(items))))
    return [items[key] for key in in_order] if items and items.keys() == set(in_order) else items


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
