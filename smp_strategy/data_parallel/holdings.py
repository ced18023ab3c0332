"""Holdings: where each parameter of a module is, and which part of it this rank holds, updates and saves.

Four things spread a parameter. A pipeline stage holds it or does not (:mod:`smp_strategy.model.ownership`). A
tensor-parallel rank holds a part of it (:mod:`smp_strategy.model.parameter_parts`), and a rank of a shard group a run
of the elements of that part (:mod:`smp_strategy.data_parallel.sharded_module`). One replica updates it, or each of them
does (:mod:`smp_strategy.data_parallel.zero1`). Values, gradients and optimizer state with one value per element are
spread alike. ``local`` tensors are this rank's, ``whole`` shapes those of the unpartitioned module::

    whole 6 x 4  ->  part 3 x 4 (tensor parallelism)  ->  run of 5 elements (sharding)

Where nothing is split, sharded or dealt out, the same objects answer that this rank has all of it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from smp_strategy.data_parallel.optimizer_dependence import Updater
from smp_strategy.data_parallel.optimizer_state import cut_state, kept_per_element
from smp_strategy.data_parallel.sharded_module import ShardedModule
from smp_strategy.data_parallel.zero1 import ZeroOptimizer
from smp_strategy.distributed.mesh import ProcessMesh
from smp_strategy.model.guarded_tensors import untracked
from smp_strategy.model.ownership import Ownership
from smp_strategy.model.parameter_parts import ParameterParts
from smp_strategy.model.shard_layout import Run, shard_rectangles

__all__ = ["Holdings"]


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Holdings:
    """Parameters of a partitioned module, seen from one rank."""

    module: nn.Module
    ownership: Ownership
    """Stages of each parameter."""
    mesh: ProcessMesh
    zero: ZeroOptimizer
    """Replica that updates each parameter."""
    sharded: ShardedModule
    """Parameters that a shard group holds together."""
    parts: ParameterParts
    """Parameters that a tensor-parallel group splits."""
    names: Mapping[nn.Parameter, str] = field(init=False)
    """First name of each parameter."""

    def __post_init__(self) -> None:
        # The dataclass is frozen, and makes this field itself.
        object.__setattr__(self, "names", {each: name for name, each in self.module.named_parameters()})

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Parameters that this rank holds, fully or in part."""
        return self.ownership.local_parameters(self.mesh.stage)

    @property
    def sharded_names(self) -> dict[nn.Parameter, str]:
        """Parameters of all stages that shard groups hold together, with names; the same on all ranks."""
        groups = self.ownership.parameters_by_units().values() if self.mesh.shard_group is not None else ()
        return {parameter: name for members in groups for name, parameter in members}

    @property
    def lacking(self) -> dict[int, str]:
        """Names of the parameters of which some ranks do not have the values in steps, by id; the same on all ranks."""
        resting, pp = self.sharded_names, self.mesh.pp
        named = [(name, each) for name, each in self.module.named_parameters()]
        return {id(p): name for name, p in named if p in resting or len(self.ownership.holders(p)) < pp}

    # Ranks

    @property
    def updates_all(self) -> bool:
        """Whether optimizers see the same parameters here as in a single process."""
        return not (self.mesh.spreads_model or self.zero.is_on)

    @property
    def is_divided(self) -> bool:
        """Whether each rank updates only some of the parameters."""
        return self.mesh.pp > 1 or self.zero.is_on

    @property
    def speaks_for_replicas(self) -> bool:
        """Whether this rank saves the state that replicas have each of its own: buffers and extra state."""
        return self.mesh.dp_rank == 0 and self.mesh.tp_rank == 0

    def is_here(self, tensor: Tensor) -> bool:
        """Whether this rank's stage holds ``tensor``, a parameter or buffer."""
        return self.mesh.stage in self.ownership.holders(tensor)

    def is_first_here(self, parameter: Tensor) -> bool:
        """Whether this rank's stage is the first that holds ``parameter``."""
        return self.ownership.first_holder(parameter) == self.mesh.stage

    def is_updated_here(self, parameter: Tensor) -> bool:
        """Whether this rank updates ``parameter``, or a run of it, and keeps optimizer state for that."""
        return self.zero.is_mine(parameter)

    def is_counted_here(self, parameter: Tensor) -> bool:
        """Whether this rank counts ``parameter``, or its run of it, in norms."""
        return self.is_first_here(parameter) and self.is_updated_here(parameter)

    def updaters(self, parameter: nn.Parameter) -> list[Updater]:
        """Stages and replicas that update ``parameter``; all of them if it is not the module's."""
        stages = self.ownership.holders(parameter)
        # Of the user's own, beside the module's: nothing deals it out, so every rank updates it.
        if parameter not in self.names:
            return [Updater(stage, replica) for stage in stages for replica in range(self.mesh.dp)]
        return [Updater(stage, self.zero.owner(parameter, stage)) for stage in stages]

    # Elements

    def is_sharded(self, parameter: Tensor) -> bool:
        """Whether this rank has a run of the elements of ``parameter``."""
        return self.sharded.has(parameter)

    def whole_shape(self, parameter: Tensor) -> tuple[int, ...]:
        """Shape of ``parameter`` in the unpartitioned module."""
        return tuple(self.parts.whole_shape(parameter))

    def local_shape(self, parameter: nn.Parameter) -> tuple[int, ...]:
        """Shape of the elements of ``parameter`` that this rank updates; it must hold the parameter."""
        if not self.is_sharded(parameter):
            return tuple(self.parts.shape(parameter))
        buffer, number = self.sharded.place_of(parameter)
        return (buffer.own_pieces[number].numel,)

    def local_values(self, parameter: nn.Parameter) -> Tensor:
        if not self.is_sharded(parameter):
            return parameter.detach()
        buffer, number = self.sharded.place_of(parameter)
        return buffer.own_values(number)

    def to_fill(self, parameter: nn.Parameter) -> list[tuple[int, Tensor]]:
        """All memory of this rank for values of ``parameter``, to be filled on all ranks alike.

        Returns:
            Number of the first element, and view, as for :meth:`rectangles`.
        """
        if not self.is_sharded(parameter):
            return [(0, parameter.detach())]
        buffer, number = self.sharded.place_of(parameter)
        return buffer.runs_to_fill(number)

    def rectangles(
        self, parameter: nn.Parameter, local: Tensor, start: int | None = None
    ) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        """Rectangles of the whole tensor that ``local`` is.

        Args:
            parameter: Parameter that this rank holds.
            local: This rank's values, one per element of the parameter, of :meth:`local_shape`.
            start: Number of the first of them, of a sharded parameter; ``None``: they are those that this rank updates.

        Returns:
            Offsets of each in the whole tensor, and the view of ``local`` that it is.
        """
        shape, cut, rank = self.parts.shape(parameter), self.parts.cuts.get(parameter), self.parts.group.rank
        if not self.is_sharded(parameter):
            for whole, part in shard_rectangles(shape, (), cut=cut, rank=rank):
                yield whole.offsets, part.view_of(local)
            return
        buffer, number = self.sharded.place_of(parameter)
        start = buffer.own_pieces[number].start if start is None else start
        stride, run = buffer.layout.slots[number].entry.stride, Run(start, start + len(local))
        for whole, part in shard_rectangles(shape, stride, run=run, cut=cut, rank=rank):
            yield whole.offsets, part.view_of_run(local, start, stride)

    def give_gradient(self, parameter: nn.Parameter, local: Tensor) -> None:
        """Set the gradient of ``parameter``, which is summed over ranks already."""
        if self.is_sharded(parameter):
            buffer, number = self.sharded.place_of(parameter)
            with untracked():
                buffer.gradients.set_piece(number, local, is_used=True)
        elif self.is_updated_here(parameter) or not self.zero.drops_gradients:
            parameter.grad = local

    def keep_share(self, optimizer: Optimizer) -> None:
        """Cut the state of ``optimizer``, which is that of whole parameters, to this rank's share, in place."""
        for parameter in [each for group in optimizer.param_groups for each in group["params"]]:
            if parameter not in optimizer.state or parameter not in self.names:
                continue
            if not self.is_updated_here(parameter):
                del optimizer.state[parameter]
                continue
            kept = optimizer.state[parameter]
            # First the part, then a run of it, as in the picture above.
            if self.parts.has(parameter):
                kept.update(_part_of(kept, parameter, self.parts))
            if self.is_sharded(parameter):
                if _is_cut(kept, parameter, self.local_shape(parameter)):
                    continue
                # A single element: shapes do not tell its moments from a number of steps, so a twin is probed.
                known = kept_per_element(optimizer, parameter) if parameter.numel() == 1 else {}
                buffer, number = self.sharded.place_of(parameter)
                kept.update(cut_state(kept, parameter.shape, partial(buffer.piece_of, number), known))


def _part_of(state: Mapping[str, Any], parameter: nn.Parameter, parts: ParameterParts) -> Any:
    """This rank's part of full ``state`` of a split parameter; state of a part is left as it is."""
    whole = parts.whole_shape(parameter)
    return pytree.tree_map(
        lambda leaf: parts.part(parameter, leaf) if isinstance(leaf, Tensor) and leaf.shape == whole else leaf,
        dict(state),
    )


def _is_cut(state: Mapping[str, Any], parameter: nn.Parameter, shape: tuple[int, ...]) -> bool:
    """Whether ``state`` is that of a run of elements of this ``shape`` already, left by an earlier run."""
    shapes = {tuple(value.shape) for value in state.values() if isinstance(value, Tensor) and value.ndim}
    # A run that is all of a one-dimensional parameter looks like the whole: cutting it changes nothing.
    return shapes == {shape} and shape != tuple(parameter.shape)
