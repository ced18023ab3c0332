"""Loading model, optimizers and gradients: each rank reads its shards of the full tensors of a source.

A :class:`~smp_strategy.checkpoint.storage.held_tensor.Source` is a folder, of which a rank reads the needed bytes
only, or a dict in memory. Values go straight to their place; no full tensor is made on the way.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from smp_strategy.checkpoint.state_dict import held, to_fill, with_lists
from smp_strategy.checkpoint.storage.held_tensor import HeldTensor, Source, TensorInfo
from smp_strategy.data_parallel.holdings import Holdings
from smp_strategy.data_parallel.optimizer_state import has_one_per_element, kept_per_element
from smp_strategy.errors import CheckpointError
from smp_strategy.model.guarded_tensors import in_plain_sight, untracked

__all__ = [
    "GRADIENTS",
    "MODULE",
    "by_parameter",
    "decoded",
    "load_gradients",
    "load_groups",
    "load_module",
    "load_optimizer",
    "optimizer_key",
    "read_optimizer",
]

# Keys of a state.
MODULE, GRADIENTS = "state_dict", "gradients"
# PyTorch's key of `get_extra_state`.
_EXTRA_STATE = "_extra_state"


def optimizer_key(number: int) -> str:
    return f"optimizer_{number}"


def load_module(
    module: nn.Module,
    source: Source,
    holdings: Holdings | None,
    *,
    strict: bool,
    leave_out: Collection[Tensor] = (),
) -> None:
    """Load this rank's shards of the module's state dict.

    Args:
        module: Takes the values.
        source: Has them.
        holdings: Shards of ``module`` that this rank holds; ``None``: all of it.
        strict: Whether names must match.
        leave_out: Tensors that are not to be filled now.

    Raises:
        RuntimeError: ``strict`` and the names do not fit, or shapes do not, as from ``nn.Module.load_state_dict``.
    """
    prefix = f"{MODULE}."
    with in_plain_sight():
        own = module.state_dict(keep_vars=True)
    there = {name.removeprefix(prefix): name for name in (*source.tensors, *source.objects) if name.startswith(prefix)}
    extra = _take_extra_states(own, there)
    _refuse_other_names(own.keys() - extra.keys(), there.keys(), strict=strict)
    tensors = {name: tensor for name, tensor in own.items() if name in there and isinstance(tensor, Tensor)}
    whole_shape = (lambda tensor: tuple(tensor.shape)) if holdings is None else holdings.whole_shape
    _refuse_other_shapes({there[name]: whole_shape(tensor) for name, tensor in tensors.items()}, source)
    wanted: dict[str, HeldTensor] = {}
    with untracked():
        for tensor, name in {tensor: name for name, tensor in reversed(tensors.items())}.items():
            if tensor in leave_out:
                continue
            if holdings is None:
                wanted[there[name]] = HeldTensor.whole(tensor.detach())
            elif isinstance(tensor, nn.Parameter):
                if holdings.is_here(tensor):
                    wanted[there[name]] = to_fill(holdings, tensor)
            elif holdings.ownership.is_held(name, holdings.mesh.stage):
                wanted[there[name]] = HeldTensor.whole(tensor.detach())
        source.fill(wanted)
        if extra:
            states = OrderedDict((name, _extra_state(source, pieces)) for name, pieces in extra.items())
            # Versions of modules: without them, modules take the state for an old one and convert it.
            states._metadata = own._metadata  # type: ignore[attr-defined]
            module.load_state_dict(states, strict=False)


def _take_extra_states(own: Mapping[str, Any], there: dict[str, str]) -> dict[str, dict[str, str]]:
    """Remove the extra states of modules from ``there``; returns the names of their pieces.

    Files of other programs have a dict in pieces; otherwise there is one piece, without a name.
    """
    found = {}
    for name in [name for name in own if name.rpartition(".")[2] == _EXTRA_STATE]:
        pieces = {"": there.pop(name)} if name in there else {}
        for piece in [each for each in there if each.startswith(f"{name}.")]:
            pieces[piece.removeprefix(f"{name}.")] = there.pop(piece)
        if pieces:
            found[name] = pieces
    return found


def _extra_state(source: Source, pieces: Mapping[str, str]) -> Any:
    tensors = {
        stored: torch.empty(tuple(source.tensors[stored].shape), dtype=source.tensors[stored].dtype, device="cpu")
        for stored in pieces.values()
        if stored in source.tensors
    }
    source.fill({stored: HeldTensor.whole(tensor) for stored, tensor in tensors.items()})
    values = {**tensors, **source.read_objects([stored for stored in pieces.values() if stored not in tensors])}
    if "" in pieces:
        return values[pieces[""]]
    return decoded({key: values[stored] for key, stored in pieces.items()})


def load_groups(optimizer: Optimizer, source: Source, number: int, names: Mapping[nn.Parameter, str]) -> None:
    """Load the options of the groups of ``optimizer``, and drop its state."""
    optimizer.load_state_dict({"state": {}, "param_groups": _groups(optimizer, source, number, names)})


def load_optimizer(
    optimizer: Optimizer, source: Source, number: int, holdings: Holdings, names: Mapping[nn.Parameter, str]
) -> None:
    """Load this rank's shards of the state of ``optimizer``; the options of its groups stay.

    Raises:
        CheckpointError: the state is of other parameters.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    prefix = f"{optimizer_key(number)}.state."
    by_name = {names[each]: each for each in parameters if each in names}
    tensors = by_parameter(source.tensors, prefix, by_name)
    objects = by_parameter(source.objects, prefix, by_name)
    state: dict[int, Any] = {}
    wanted: dict[str, HeldTensor] = {}
    with untracked():
        for index, parameter in enumerate(parameters):
            if not holdings.is_updated_here(parameter):
                continue
            kept: dict[str, Any] = {}
            place = _places(holdings, optimizer, parameter)
            for key, name in tensors.get(parameter, {}).items():
                kept[key], wanted[name] = place(key, source.tensors[name])
            found = objects.get(parameter, {})
            values = source.read_objects(list(found.values()))
            kept |= {key: values[name] for key, name in found.items()}
            if kept:
                state[index] = decoded(kept)
        source.fill(wanted)
        own = optimizer.state_dict()
        optimizer.load_state_dict({**own, "state": state})


def read_optimizer(source: Source, number: int, names: Mapping[nn.Parameter, str]) -> dict[nn.Parameter, Any]:
    """The full state of an optimizer, on the host."""
    prefix = f"{optimizer_key(number)}.state."
    by_name = {name: parameter for parameter, name in names.items()}
    tensors = by_parameter(source.tensors, prefix, by_name)
    values = {
        name: torch.empty(tuple(source.tensors[name].shape), dtype=source.tensors[name].dtype, device="cpu")
        for found in tensors.values()
        for name in found.values()
    }
    source.fill({name: HeldTensor.whole(value) for name, value in values.items()})
    objects = by_parameter(source.objects, prefix, by_name)
    others = source.read_objects([name for found in objects.values() for name in found.values()])
    values |= others
    return {
        parameter: decoded(
            {key: values[name] for key, name in (tensors.get(parameter, {}) | objects.get(parameter, {})).items()}
        )
        for parameter in dict.fromkeys((*tensors, *objects))
    }


def load_gradients(source: Source, holdings: Holdings) -> None:
    """Give parameters the gradients of a checkpoint, if it has any."""
    prefix = f"{GRADIENTS}."
    there = {name.removeprefix(prefix): name for name in source.tensors if name.startswith(prefix)}
    wanted, found = {}, {}
    with untracked():
        for parameter, name in holdings.names.items():
            if name in there and holdings.is_here(parameter):
                dtype = source.tensors[there[name]].dtype
                local = torch.zeros(holdings.local_shape(parameter), dtype=dtype, device=parameter.device)
                found[parameter] = local
                wanted[there[name]] = held(holdings, parameter, local)
        source.fill(wanted)
        for parameter, local in found.items():
            holdings.give_gradient(parameter, local)


def _places(
    holdings: Holdings, optimizer: Optimizer, parameter: nn.Parameter
) -> Callable[[str, TensorInfo], tuple[Tensor, HeldTensor]]:
    """Function that allocates memory for a tensor in the state of ``parameter``, by its name there."""
    whole, local = holdings.whole_shape(parameter), holdings.local_shape(parameter)
    is_sharded = holdings.is_sharded(parameter)
    by_name = kept_per_element(optimizer, parameter) if is_sharded and math.prod(whole) == 1 else {}

    def place(key: str, described: TensorInfo) -> tuple[Tensor, HeldTensor]:
        shape, dtype = tuple(described.shape), described.dtype
        stored = torch.empty(shape, dtype=dtype, device="meta")
        if has_one_per_element(key.replace("#", ""), stored, whole, by_name) if is_sharded else shape == whole:
            like = torch.empty_like(parameter, device="meta") if local == tuple(parameter.shape) else None
            tensor = _memory(local, dtype, parameter.device, like)
            return tensor, held(holdings, parameter, tensor)
        tensor = torch.empty(shape, dtype=dtype, device=parameter.device if shape else "cpu")
        return tensor, HeldTensor.whole(tensor)

    return place


def _memory(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, like: Tensor | None) -> Tensor:
    """Zeros, with the memory layout of ``like``."""
    if like is None:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.empty_strided(shape, like.stride(), dtype=dtype, device=device).zero_()


def _groups(
    optimizer: Optimizer, source: Source, number: int, names: Mapping[nn.Parameter, str]
) -> list[dict[str, Any]]:
    key = f"{optimizer_key(number)}.param_groups"
    if key not in source.objects:
        raise CheckpointError(
            f"The checkpoint has no state of optimizer {number} (`{key}`), which this run has. Load its weights only, "
            "or train with as many optimizers as it was written with."
        )
    theirs = source.read_objects([key])[key]
    own = optimizer.state_dict()["param_groups"]
    mine = [[names.get(parameter, "?") for parameter in group["params"]] for group in optimizer.param_groups]
    if [list(group["params"]) for group in theirs] != mine:
        raise CheckpointError(f"Optimizer {number} {_difference([list(group['params']) for group in theirs], mine)}")
    return [{**group, "params": ours["params"]} for group, ours in zip(theirs, own, strict=True)]


def _difference(theirs: list[list[str]], mine: list[list[str]]) -> str:
    if len(theirs) != len(mine):
        return f"has {len(mine)} groups of parameters, and {len(theirs)} in the checkpoint. Build it as before."
    group = next(number for number, pair in enumerate(zip(theirs, mine, strict=True)) if pair[0] != pair[1])
    lacking, more = sorted(set(mine[group]) - set(theirs[group])), sorted(set(theirs[group]) - set(mine[group]))
    if not lacking and not more:
        return f"has the parameters of group {group} in another order than the checkpoint. Build it as before."
    return (
        f"trains other parameters in group {group} than in the checkpoint: lacking there {lacking[:5]}, and here "
        f"{more[:5]}. Freeze or add parameters as before, or load the weights only."
    )


def by_parameter(
    names: Iterable[str], prefix: str, parameters: Mapping[str, nn.Parameter]
) -> dict[nn.Parameter, dict[str, str]]:
    """Group names by parameter: for each parameter, the full names by the rest behind the parameter's name."""
    found: dict[nn.Parameter, dict[str, str]] = {}
    for name in names:
        if not name.startswith(prefix):
            continue
        # One parameter's name can be a prefix of another's: the longest match counts.
        parameter, key = name.removeprefix(prefix), ""
        while parameter and parameter not in parameters:
            parameter, _, last = parameter.rpartition(".")
            key = f"{last}.{key}".strip(".")
        if parameter:
            found.setdefault(parameters[parameter], {})[key] = name
    return found


def decoded(kept: Mapping[str, Any]) -> dict[str, Any]:
    """Nest dotted names as dicts, and as lists where they are numbered; the inverse of ``state_dict.encoded``."""
    nested: dict[str, Any] = {}
    for name, value in kept.items():
        *path, last = name.split(".")
        level = nested
        for key in path:
            level = level.setdefault(key, {})
        level[last] = value
    return {key: with_lists(value) for key, value in nested.items()}


def _refuse_other_names(own: Collection[str], there: Collection[str], *, strict: bool) -> None:
    missing, unexpected = sorted(set(own) - set(there)), sorted(set(there) - set(own))
    if strict and (missing or unexpected):
        raise RuntimeError(f"The state dict does not fit the module: missing {missing}, unexpected {unexpected}.")


def _refuse_other_shapes(shapes: Mapping[str, tuple[int, ...]], source: Source) -> None:
    """Every rank compares all shapes, so that all of them stop, and not only the one that holds the tensor."""
    other = [
        f"{name.removeprefix(f'{MODULE}.')} {list(source.tensors[name].shape)} instead of {list(shape)}"
        for name, shape in shapes.items()
        if name not in source.tensors or tuple(source.tensors[name].shape) != shape
    ]
    if other:
        raise RuntimeError(f"The state dict does not fit the module: {', '.join(other)}.")
