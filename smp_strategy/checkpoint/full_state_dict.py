"""The whole model and optimizer as one process would have them.

Before the partition every rank has everything. After it, saving puts together on global rank 0 what ranks hold, and
loading lets every rank take its share out of the whole. Names, shapes and parameter numbers are those of the plain
module, so that a file written under one layout is read under any other, or by plain PyTorch.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from smp_strategy.checkpoint.gather import collect, merged, on_all_ranks
from smp_strategy.checkpoint.load import by_parameter, decoded
from smp_strategy.checkpoint.local_shards import Holdings
from smp_strategy.checkpoint.sources import WholeState, flattened
from smp_strategy.checkpoint.state_dict import encoded, gradient_state, module_state, optimizer_state
from smp_strategy.data_parallel.optimizer_state import cut_state, kept_per_element
from smp_strategy.data_parallel.sharded_module import ShardedUnits
from smp_strategy.data_parallel.zero1 import StateSharding
from smp_strategy.model.guarded_tensors import in_plain_sight
from smp_strategy.tensor_parallel.parameter_parts import Parts

__all__ = [
    "gradients",
    "keep_share",
    "numbered",
    "numbers_of",
    "optimizer_state_dict",
    "optimizer_state_on_all_ranks",
    "state_dict",
]


def state_dict(holdings: Holdings) -> dict[str, Any]:
    """The whole state dict on global rank 0, ``{}`` elsewhere; collective. Tied parameters are one tensor in it."""
    collected = collect(module_state(holdings))
    if not collected:
        return {}
    with in_plain_sight():
        found = holdings.module.state_dict(keep_vars=True)
    state = OrderedDict((name, collected[name]) for name in merged([found, collected]) if name in collected)
    state._metadata = found._metadata  # type: ignore[attr-defined]
    return state


def optimizer_state_dict(holdings: Holdings, optimizer: Optimizer) -> dict[str, Any]:
    """The whole ``optimizer.state_dict()`` on global rank 0, ``{}`` elsewhere; collective over all ranks."""
    numbers = numbers_of(optimizer)
    collected = _collected(holdings, optimizer)
    if holdings.mesh.rank != 0:
        return {}
    state = {int(numbers[parameter]): kept for parameter, kept in _by_parameter(collected, numbers).items()}
    return {**optimizer.state_dict(), "state": dict(sorted(state.items()))}


def optimizer_state_on_all_ranks(holdings: Holdings, optimizer: Optimizer) -> defaultdict[Any, Any]:
    """The whole ``optimizer.state`` on every rank, in memory of its own; collective over all ranks."""
    numbers = numbers_of(optimizer)
    collected = on_all_ranks(_collected(holdings, optimizer))
    state: defaultdict[Any, Any] = defaultdict(dict)
    found = _by_parameter(collected, numbers)
    for parameter in [each for each in numbers if each in found]:
        device = parameter.device
        # Numbers of steps stay on the host.
        state[parameter] = pytree.tree_map(
            lambda leaf, to=device: leaf.to(to) if isinstance(leaf, Tensor) and leaf.ndim else leaf, found[parameter]
        )
    state.update((key, kept) for key, kept in optimizer.state.items() if key not in holdings.names)
    return state


def _collected(holdings: Holdings, optimizer: Optimizer) -> dict[str, Any]:
    return collect(flattened(optimizer_state(holdings, optimizer, numbers_of(optimizer))["state"]))


def _by_parameter(
    collected: Mapping[str, Any], numbers: Mapping[nn.Parameter, str]
) -> dict[nn.Parameter, dict[str, Any]]:
    found = by_parameter(collected, "", {number: parameter for parameter, number in numbers.items()})
    return {
        parameter: decoded({key: collected[name] for key, name in names.items()}) for parameter, names in found.items()
    }


def gradients(holdings: Holdings) -> dict[str, Tensor]:
    """The whole gradients on global rank 0, ``{}`` elsewhere; collective over all ranks."""
    return collect(gradient_state(holdings))


def numbered(state: Mapping[str, Any]) -> WholeState:
    """What ``optimizer.state_dict()`` has given, as the state of optimizer 0, parameters by :func:`numbers_of`."""
    kept = {str(number): encoded(value, lambda _, leaf: leaf) for number, value in state["state"].items()}
    groups = [{**group, "params": [str(number) for number in group["params"]]} for group in state["param_groups"]]
    return WholeState(flattened({"optimizer_0": {"state": kept, "param_groups": groups}}))


def numbers_of(optimizer: Optimizer) -> dict[nn.Parameter, str]:
    """The number of each parameter in ``optimizer.state_dict()``."""
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return {parameter: str(number) for number, parameter in enumerate(parameters)}


def keep_share(
    optimizer: Optimizer, sharding: StateSharding, sharded: ShardedUnits | None = None, parts: Parts | None = None
) -> None:
    """Of whole optimizer state keep what this rank needs for the updates that it makes.

    Args:
        optimizer: has it.
        sharding: says what this rank updates.
        sharded: of which parameters it updates a piece.
        parts: of which parameters it has a part.
    """
    for parameter in numbers_of(optimizer):
        if parameter not in optimizer.state or not sharding.knows(parameter):
            continue
        if not sharding.is_mine(parameter):
            del optimizer.state[parameter]
            continue
        if parts is not None and parts.has(parameter):
            kept = optimizer.state[parameter]
            kept.update(_cut(kept, parameter, parts))
        if sharded is not None and sharded.has(parameter):
            kept = optimizer.state[parameter]
            if _is_cut(kept, parameter, sharded.own_piece(parameter).numel):
                continue
            known = kept_per_element(optimizer, parameter) if parameter.numel() == 1 else {}
            kept.update(cut_state(kept, parameter.shape, partial(sharded.piece_of, parameter), known))


def _cut(state: Mapping[str, Any], parameter: nn.Parameter, parts: Parts) -> Any:
    """Of ``state`` for the whole of a split parameter, this rank's part; what is for its part is left as it is."""
    whole = parts.whole_shape(parameter)
    return pytree.tree_map(
        lambda leaf: parts.part(parameter, leaf) if isinstance(leaf, Tensor) and leaf.shape == whole else leaf,
        dict(state),
    )


def _is_cut(state: Mapping[str, Any], parameter: nn.Parameter, numel: int) -> bool:
    """Whether ``state`` is that for a piece of ``numel`` elements already: an earlier run has left it."""
    shapes = {tuple(value.shape) for value in state.values() if isinstance(value, Tensor) and value.ndim}
    return shapes == {(numel,)} != {tuple(parameter.shape)}
