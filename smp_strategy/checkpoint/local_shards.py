"""Local shards: the rectangles of each parameter, moment and gradient that this rank holds.

Three things shard a parameter. A pipeline stage holds it or does not. A tensor-parallel rank holds a part of it, and a
rank of a shard group a run of the elements of that part. Values, gradients and optimizer state with one value per
element are sharded alike. ``local`` tensors are this rank's, ``whole`` shapes those of the unpartitioned module::

    whole 6 x 4  ->  part 3 x 4 (tensor parallelism)  ->  run of 5 elements (sharding)
"""

from collections.abc import Iterable, Iterator
from typing import final

import torch
from torch import Tensor, nn

from smp_strategy.checkpoint.storage.held_tensor import HeldRectangle, HeldTensor
from smp_strategy.data_parallel.sharded_module import ShardedModule
from smp_strategy.data_parallel.zero1 import ZeroOptimizer
from smp_strategy.distributed.mesh import ProcessMesh
from smp_strategy.model.ownership import Ownership
from smp_strategy.model.shard_layout import Run, shard_rectangles
from smp_strategy.tensor_parallel.parameter_parts import ParameterParts

__all__ = ["LocalShards"]


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

    def held(self, parameter: nn.Parameter, local: Tensor, *, aliases: tuple[str, ...] = ()) -> HeldTensor:
        """The sharded tensor of which this rank has ``local``, with one value per element of ``parameter``.

        Args:
            parameter: Parameter that this rank holds.
            local: This rank's values, of :meth:`local_shape`.
            aliases: Further names of the tensor.
        """
        start = None
        if self._sharded is not None and self._sharded.has(parameter):
            start = self._sharded.own_piece(parameter).start
        return self._held(parameter, self._blocks(parameter, local, start), local.dtype, aliases)

    def values(self, parameter: nn.Parameter, *, aliases: tuple[str, ...] = ()) -> HeldTensor:
        """Values of ``parameter`` that this rank, which holds it, updates."""
        if self._sharded is not None and self._sharded.has(parameter):
            return self.held(parameter, self._sharded.own_values(parameter), aliases=aliases)
        return self.held(parameter, parameter.detach(), aliases=aliases)

    def to_fill(self, parameter: nn.Parameter) -> HeldTensor:
        """All memory of this rank for values of ``parameter``, to be filled on all ranks alike."""
        if self._sharded is None or not self._sharded.has(parameter):
            return self.values(parameter)
        runs = self._sharded.runs_to_fill(parameter)
        blocks = (block for start, values in runs for block in self._blocks(parameter, values, start))
        return self._held(parameter, blocks, parameter.dtype, ())

    def give_gradient(self, parameter: nn.Parameter, local: Tensor) -> None:
        """Set the gradient of ``parameter``, which is summed over ranks already."""
        if self._sharded is not None and self._sharded.has(parameter):
            self._sharded.take_gradient(parameter, local)
        elif self.is_updated_here(parameter) or not self._sharding.drops_gradients:
            parameter.grad = local

    def _held(
        self, parameter: Tensor, blocks: Iterable[HeldRectangle], dtype: torch.dtype, aliases: tuple[str, ...]
    ) -> HeldTensor:
        return HeldTensor(shape=self.whole_shape(parameter), dtype=dtype, blocks=tuple(blocks), aliases=aliases)

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
