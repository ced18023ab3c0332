"""Sharded state dicts of module, optimizer and gradients: plain names, whole shapes, and this rank's rectangles.

Names are those of PyTorch's distributed checkpoints as Lightning writes them: ``state_dict.<name>``,
``optimizer_0.state.<name>.<key>`` and ``optimizer_0.param_groups`` with names of parameters. So either can read the
other's folders. Nothing here communicates, and nothing is copied.

A tensor that several ranks hold is offered by all of them; the write plan settles who writes it. State of which each
replica has its own (buffers, extra state) is offered by the first replica only.

Local shards: the rectangles of each parameter, moment and gradient that this rank holds.

Three things shard a parameter. A pipeline stage holds it or does not. A tensor-parallel rank holds a part of it, and a
rank of a shard group a run of the elements of that part. Values, gradients and optimizer state with one value per
element are sharded alike. ``local`` tensors are this rank's, ``whole`` shapes those of the unpartitioned module::

    whole 6 x 4  ->  part 3 x 4 (tensor parallelism)  ->  run of 5 elements (sharding)
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from smp_strategy.checkpoint.storage.held_tensor import HeldRectangle, HeldTensor, WholeObject, with_aliases
from smp_strategy.data_parallel.optimizer_state import has_one_per_element, kept_per_element
from smp_strategy.data_parallel.parameter_pieces import ShardedGradient
from smp_strategy.data_parallel.sharded_module import ShardedModule
from smp_strategy.data_parallel.zero1 import ZeroOptimizer
from smp_strategy.distributed.mesh import ProcessMesh
from smp_strategy.errors import UnsupportedError
from smp_strategy.model.guarded_tensors import in_plain_sight
from smp_strategy.model.ownership import Ownership
from smp_strategy.model.shard_layout import Run, shard_rectangles
from smp_strategy.tensor_parallel.split_module import ParameterParts

__all__ = [
    "encoded",
    "gradient_state",
    "kept_by",
    "module_state",
    "named_state",
    "optimizer_state",
    "whole_module_state",
    "whole_optimizer_state",
    "LocalShards",
]


@final
class LocalShards:
    """Shards of a module that this rank holds, updates and saves.

    Args:
        module: Partitioned module.
        ownership: Stages of each parameter.
        mesh: Coordinates of the ranks.
        sharding: Replica that updates each parameter.
        sharded: Parameters that a shard group holds together, if there are any.
        parts: Parameters of layers that are split, if there are any.

    Attributes:
        module, ownership, mesh: As given.
        names: First name of each parameter.
    """

    def __init__(
        self,
        module: nn.Module,
        ownership: Ownership,
        mesh: ProcessMesh,
        sharding: ZeroOptimizer,
        sharded: ShardedModule | None = None,
        parts: ParameterParts | None = None,
    ) -> None:
        self.module = module
        self.ownership = ownership
        self.mesh = mesh
        self._sharding = sharding
        self._sharded = sharded
        self._parts = parts
        self.names = {parameter: name for name, parameter in module.named_parameters()}

    @property
    def speaks_for_replicas(self) -> bool:
        """Whether this rank saves the state that replicas have each of its own: buffers and extra state."""
        return self.mesh.dp_rank == 0 and self.mesh.tp_rank == 0

    def is_here(self, parameter: Tensor) -> bool:
        """Whether this rank's stage holds ``parameter``."""
        return self.mesh.stage in self.ownership.holders(parameter)

    def is_updated_here(self, parameter: Tensor) -> bool:
        """Whether this rank updates ``parameter``, or a run of it, and keeps optimizer state for that."""
        return self._sharding.is_mine(parameter)

    def is_sharded(self, parameter: Tensor) -> bool:
        """Whether this rank has a run of the elements of ``parameter``."""
        return self._sharded is not None and self._sharded.has(parameter)

    def whole_shape(self, parameter: Tensor) -> tuple[int, ...]:
        """Shape of ``parameter`` in the unpartitioned module."""
        return tuple(self._part_shape(parameter) if self._parts is None else self._parts.whole_shape(parameter))

    def local_shape(self, parameter: nn.Parameter) -> tuple[int, ...]:
        """Shape of the elements of ``parameter`` that this rank updates; it must hold the parameter."""
        if self._sharded is not None and self._sharded.has(parameter):
            return (self._sharded.own_piece(parameter).numel,)
        return tuple(self._part_shape(parameter))

    def held(self, parameter: nn.Parameter, local: Tensor) -> HeldTensor:
        """The sharded tensor of which this rank has ``local``, with one value per element of ``parameter``.

        Args:
            parameter: Parameter that this rank holds.
            local: This rank's values, of :meth:`local_shape`.
        """
        start = None
        if self._sharded is not None and self._sharded.has(parameter):
            start = self._sharded.own_piece(parameter).start
        return self._held(parameter, self._blocks(parameter, local, start), local.dtype)

    def values(self, parameter: nn.Parameter) -> HeldTensor:
        """Values of ``parameter`` that this rank, which holds it, updates."""
        if self._sharded is not None and self._sharded.has(parameter):
            return self.held(parameter, self._sharded.own_values(parameter))
        return self.held(parameter, parameter.detach())

    def to_fill(self, parameter: nn.Parameter) -> HeldTensor:
        """All memory of this rank for values of ``parameter``, to be filled on all ranks alike."""
        if self._sharded is None or not self._sharded.has(parameter):
            return self.values(parameter)
        runs = self._sharded.runs_to_fill(parameter)
        blocks = (block for start, values in runs for block in self._blocks(parameter, values, start))
        return self._held(parameter, blocks, parameter.dtype)

    def give_gradient(self, parameter: nn.Parameter, local: Tensor) -> None:
        """Set the gradient of ``parameter``, which is summed over ranks already."""
        if self._sharded is not None and self._sharded.has(parameter):
            self._sharded.take_gradient(parameter, local)
        elif self.is_updated_here(parameter) or not self._sharding.drops_gradients:
            parameter.grad = local

    def _held(self, parameter: Tensor, blocks: Iterable[HeldRectangle], dtype: torch.dtype) -> HeldTensor:
        return HeldTensor(shape=self.whole_shape(parameter), dtype=dtype, blocks=tuple(blocks))

    def _blocks(self, parameter: nn.Parameter, local: Tensor, start: int | None) -> Iterator[HeldRectangle]:
        """Rectangles of the whole that ``local`` is: this rank's part, or the run of its elements from ``start`` on."""
        shape, cut, rank = self._part_shape(parameter), None, 0
        if self._parts is not None and self._parts.has(parameter):
            cut, rank = self._parts.cuts[parameter], self._parts.group.rank
        if start is None or self._sharded is None:
            for whole, part in shard_rectangles(shape, (), cut=cut, rank=rank):
                yield HeldRectangle(whole.offsets, part.view_of(local))
            return
        stride, run = self._sharded.stride_of(parameter), Run(start, start + len(local))
        for whole, part in shard_rectangles(shape, stride, run=run, cut=cut, rank=rank):
            yield HeldRectangle(whole.offsets, part.view_of_run(local, start, stride))

    def _part_shape(self, parameter: Tensor) -> torch.Size:
        if self._parts is not None and self._parts.has(parameter):
            return self._parts.shape(parameter)
        return parameter.shape


def module_state(holdings: LocalShards) -> dict[str, Any]:
    """This rank's shards of the module's state dict."""
    with in_plain_sight():
        return _shares(holdings, holdings.module.state_dict(keep_vars=True))


def named_state(holdings: LocalShards, names: Iterable[str]) -> dict[str, Any]:
    """This rank's shards of some parameters and buffers, by their first names."""
    with in_plain_sight():
        tensors = {**dict(holdings.module.named_parameters()), **dict(holdings.module.named_buffers())}
        return _shares(holdings, {name: tensors[name] for name in names})


def _shares(holdings: LocalShards, values: Mapping[str, Any]) -> dict[str, Any]:
    """This rank's shards of parameters, buffers and extra states, by their names."""
    state: dict[str, Any] = {}
    held: dict[nn.Parameter, HeldTensor] = {}
    for name, value in values.items():
        if isinstance(value, nn.Parameter):
            if holdings.is_here(value):
                if value not in held:
                    held[value] = holdings.values(value)
                state[name] = held[value]
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
    held: dict[nn.Parameter, HeldTensor] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, nn.Parameter):
            state[name] = held.setdefault(value, HeldTensor.whole(value.detach()))
        elif is_first:
            state[name] = _whole(value)
    return with_aliases(state)


def _whole(value: Any) -> HeldTensor | WholeObject:
    """A buffer or extra state."""
    return HeldTensor.whole(value.detach()) if isinstance(value, Tensor) else WholeObject(value)


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
