"""What of each parameter this rank holds, as rectangles of the whole: the one description that files need of a layout.

Three things spread a parameter. Stages hold it or do not. Ranks that split a layer hold a part of it, and a shard group
a run of the elements of what is left. Whatever has one value per element is spread alike: values, gradients, moments of
an optimizer. ``local`` is what this rank has of it, ``whole`` what one process has::

    whole 6 x 4  ->  part 3 x 4 (tensor parallelism)  ->  piece, 5 elements (sharding)
"""

from typing import final

import torch
from torch import Tensor, nn

from smp_strategy.checkpoint.blocks import blocks_of_part, blocks_of_run
from smp_strategy.checkpoint.storage.held_tensor import Block, Held
from smp_strategy.data_parallel.sharded_module import ShardedUnits
from smp_strategy.data_parallel.zero1 import StateSharding
from smp_strategy.distributed.mesh import ProcessMesh
from smp_strategy.model.ownership import Ownership
from smp_strategy.tensor_parallel.parameter_parts import Parts

__all__ = ["Holdings"]


@final
class Holdings:
    """See the module docstring.

    Args:
        module: spread over the ranks.
        ownership: which stages hold which parameter.
        mesh: where the ranks stand.
        sharding: which replica updates which parameter.
        sharded: the parameters that a shard group holds together, if there are any.
        parts: the parameters of layers that are split, if there are any.

    Attributes:
        module, ownership, mesh: as given.
        names: the first name of each parameter.
    """

    def __init__(
        self,
        module: nn.Module,
        ownership: Ownership,
        mesh: ProcessMesh,
        sharding: StateSharding,
        sharded: ShardedUnits | None = None,
        parts: Parts | None = None,
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
        """Whether what replicas have each of its own, buffers and extra state, is saved as this rank has it."""
        return self.mesh.dp_rank == 0 and self.mesh.tp_rank == 0

    def is_here(self, parameter: Tensor) -> bool:
        """Whether this rank's stage holds ``parameter``."""
        return self.mesh.stage in self.ownership.holders(parameter)

    def is_updated_here(self, parameter: Tensor) -> bool:
        """Whether this rank updates ``parameter``, or a piece of it, and keeps state for that."""
        return self._sharding.is_mine(parameter)

    def is_sharded(self, parameter: Tensor) -> bool:
        """Whether this rank has a run of its elements."""
        return self._sharded is not None and self._sharded.has(parameter)

    def whole_shape(self, parameter: Tensor) -> tuple[int, ...]:
        """The shape of ``parameter`` in one process."""
        return tuple(self._part_shape(parameter) if self._parts is None else self._parts.whole_shape(parameter))

    def local_shape(self, parameter: nn.Parameter) -> tuple[int, ...]:
        """The shape of what this rank updates of ``parameter``, which it holds."""
        if self._sharded is not None and self._sharded.has(parameter):
            return (self._sharded.own_piece(parameter).numel,)
        return tuple(self._part_shape(parameter))

    def held(self, parameter: nn.Parameter, local: Tensor, *, aliases: tuple[str, ...] = ()) -> Held:
        """What this rank has of something with one value per element of ``parameter``.

        Args:
            parameter: this rank holds it.
            local: what it has, of :meth:`local_shape`.
            aliases: further names of what is held.
        """
        if self._sharded is None or not self._sharded.has(parameter):
            blocks = self._of_whole([Block((0,) * local.ndim, local)], parameter)
        else:
            blocks = self._of_run(parameter, self._sharded.own_piece(parameter).start, local, self._sharded)
        return self._held(parameter, blocks, local.dtype, aliases)

    def values(self, parameter: nn.Parameter, *, aliases: tuple[str, ...] = ()) -> Held:
        """The values of ``parameter`` that this rank updates, which holds it."""
        if self._sharded is not None and self._sharded.has(parameter):
            return self.held(parameter, self._sharded.run_of(parameter).values, aliases=aliases)
        return self.held(parameter, parameter.detach(), aliases=aliases)

    def to_fill(self, parameter: nn.Parameter) -> Held:
        """All memory of this rank for values of ``parameter``, to be filled on all ranks alike."""
        if self._sharded is None or not self._sharded.has(parameter):
            return self.values(parameter)
        runs = self._sharded.runs_to_fill(parameter)
        blocks = [block for start, values in runs for block in self._of_run(parameter, start, values, self._sharded)]
        return self._held(parameter, blocks, parameter.dtype, ())

    def give_gradient(self, parameter: nn.Parameter, local: Tensor) -> None:
        """Let ``parameter`` have a gradient, which is summed up over ranks already."""
        if self._sharded is not None and self._sharded.has(parameter):
            self._sharded.take_gradient(parameter, local)
        elif self.is_updated_here(parameter) or not self._sharding.drops_gradients:
            parameter.grad = local

    def _held(self, parameter: Tensor, blocks: list[Block], dtype: torch.dtype, aliases: tuple[str, ...]) -> Held:
        return Held(shape=self.whole_shape(parameter), dtype=dtype, blocks=tuple(blocks), aliases=aliases)

    def _of_run(self, parameter: nn.Parameter, start: int, run: Tensor, sharded: ShardedUnits) -> list[Block]:
        shape, stride = self._part_shape(parameter), sharded.stride_of(parameter)
        return self._of_whole(blocks_of_run(run, start, shape, stride), parameter)

    def _of_whole(self, blocks: list[Block], parameter: nn.Parameter) -> list[Block]:
        """Blocks of this rank's part as blocks of the whole."""
        if self._parts is None or not self._parts.has(parameter):
            return blocks
        cut, rank = self._parts.cuts[parameter], self._parts.group.rank
        return [whole for block in blocks for whole in blocks_of_part(block, cut, rank)]

    def _part_shape(self, parameter: Tensor) -> torch.Size:
        if self._parts is not None and self._parts.has(parameter):
            return self._parts.shape(parameter)
        return parameter.shape
