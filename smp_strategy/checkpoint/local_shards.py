"""What of each parameter this rank holds, as rectangles of the whole: the one description that files need of a layout.

Three things spread a parameter. Stages hold it or do not. Ranks that split a layer hold a part of it, and a shard group
a run of the elements of what is left. Whatever has one value per element is spread alike: values, gradients, moments of
an optimizer. ``local`` is what this rank has of it, ``whole`` what one process has::

    whole 6 x 4  ->  part 3 x 4 (tensor parallelism)  ->  piece, 5 elements (sharding)

Rectangles of a tensor: which ones a run of its elements is, and where those of a part are in the whole.

Files of spread tensors know rectangles only (:mod:`smp_strategy.checkpoint.storage.held_tensor`). A run of elements in
row-major order is a few of them: what is left of a first row, whole rows, and the beginning of a last one, where a row
is a tensor of one dim less. So there are at most 2 n - 1 of them for n dims.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor, nn

from smp_strategy.checkpoint.storage.held_tensor import HeldRectangle, HeldTensor
from smp_strategy.data_parallel.sharded_module import ShardedModule
from smp_strategy.data_parallel.zero1 import ZeroOptimizer
from smp_strategy.distributed.mesh import ProcessMesh
from smp_strategy.model.ownership import Ownership
from smp_strategy.tensor_parallel.cut import Cut
from smp_strategy.tensor_parallel.parameter_parts import ParameterParts

__all__ = ["LocalShards", "PlacedRectangle", "blocks_of_part", "blocks_of_run", "rectangles_of_run"]


class PlacedRectangle(NamedTuple):
    """A rectangle of consecutive elements."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def rectangles_of_run(shape: Sequence[int], start: int, stop: int) -> Iterator[PlacedRectangle]:
    """The rectangles that elements ``start`` to ``stop`` of a tensor are, in row-major order; none is empty.

    Args:
        shape: of the tensor.
        start, stop: numbers of elements, ``0 <= start <= stop <= numel``.
    """
    if start >= stop:
        return
    if not shape:
        yield PlacedRectangle((), ())
        return
    inner = shape[1:]
    row = math.prod(inner)
    (first, begin), (last, end) = divmod(start, row), divmod(stop, row)
    if first == last:
        yield from _in_row(inner, first, begin, end)
        return
    if begin:
        yield from _in_row(inner, first, begin, row)
        first += 1
    if first < last:
        yield PlacedRectangle((first, *(0 for _ in inner)), (last - first, *inner))
    yield from _in_row(inner, last, 0, end)


def _in_row(inner: Sequence[int], row: int, start: int, stop: int) -> Iterator[PlacedRectangle]:
    for offsets, sizes in rectangles_of_run(inner, start, stop):
        yield PlacedRectangle((row, *offsets), (1, *sizes))


def blocks_of_run(run: Tensor, start: int, shape: Sequence[int], stride: Sequence[int]) -> list[HeldRectangle]:
    """The blocks that a run of elements is, as views of it.

    Args:
        run: the elements, one-dimensional.
        start: the number of the first of them, in the order in which they stand in memory.
        shape, stride: of the whole tensor, without gaps.
    """
    # From the slowest dim in memory to the fastest: in this order the tensor is row-major.
    order = sorted(range(len(shape)), key=lambda dim: (-stride[dim], dim))
    back = [order.index(dim) for dim in range(len(shape))]
    found, position = [], 0
    for offsets, sizes in rectangles_of_run([shape[dim] for dim in order], start, start + len(run)):
        numel = math.prod(sizes)
        values = run[position : position + numel].view(sizes).permute(back)
        found.append(HeldRectangle(tuple(offsets[place] for place in back), values))
        position += numel
    return found


def blocks_of_part(block: HeldRectangle, cut: Cut, rank: int) -> list[HeldRectangle]:
    """The blocks of the whole tensor that a block of a rank's part is; several, where matrices are fused.

    Args:
        block: its offsets are those in the part of ``rank``.
        cut: how the tensor is divided.
        rank: whose part it is.
    """
    dim, found = cut.dim, []
    first, last = block.offsets[dim], block.offsets[dim] + block.tensor.shape[dim]
    for mine, whole, length in cut.segments(rank):
        start, stop = max(first, mine), min(last, mine + length)
        if start < stop:
            offsets = (*block.offsets[:dim], whole + start - mine, *block.offsets[dim + 1 :])
            found.append(HeldRectangle(offsets, block.tensor.narrow(dim, start - first, stop - start)))
    return found


@final
class LocalShards:
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

    def held(self, parameter: nn.Parameter, local: Tensor, *, aliases: tuple[str, ...] = ()) -> HeldTensor:
        """What this rank has of something with one value per element of ``parameter``.

        Args:
            parameter: this rank holds it.
            local: what it has, of :meth:`local_shape`.
            aliases: further names of what is held.
        """
        if self._sharded is None or not self._sharded.has(parameter):
            blocks = self._of_whole([HeldRectangle((0,) * local.ndim, local)], parameter)
        else:
            blocks = self._of_run(parameter, self._sharded.own_piece(parameter).start, local, self._sharded)
        return self._held(parameter, blocks, local.dtype, aliases)

    def values(self, parameter: nn.Parameter, *, aliases: tuple[str, ...] = ()) -> HeldTensor:
        """The values of ``parameter`` that this rank updates, which holds it."""
        if self._sharded is not None and self._sharded.has(parameter):
            return self.held(parameter, self._sharded.run_of(parameter).values, aliases=aliases)
        return self.held(parameter, parameter.detach(), aliases=aliases)

    def to_fill(self, parameter: nn.Parameter) -> HeldTensor:
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

    def _held(
        self, parameter: Tensor, blocks: list[HeldRectangle], dtype: torch.dtype, aliases: tuple[str, ...]
    ) -> HeldTensor:
        return HeldTensor(shape=self.whole_shape(parameter), dtype=dtype, blocks=tuple(blocks), aliases=aliases)

    def _of_run(self, parameter: nn.Parameter, start: int, run: Tensor, sharded: ShardedModule) -> list[HeldRectangle]:
        shape, stride = self._part_shape(parameter), sharded.stride_of(parameter)
        return self._of_whole(blocks_of_run(run, start, shape, stride), parameter)

    def _of_whole(self, blocks: list[HeldRectangle], parameter: nn.Parameter) -> list[HeldRectangle]:
        """Blocks of this rank's part as blocks of the whole."""
        if self._parts is None or not self._parts.has(parameter):
            return blocks
        cut, rank = self._parts.cuts[parameter], self._parts.group.rank
        return [whole for block in blocks for whole in blocks_of_part(block, cut, rank)]

    def _part_shape(self, parameter: Tensor) -> torch.Size:
        if self._parts is not None and self._parts.has(parameter):
            return self._parts.shape(parameter)
        return parameter.shape
