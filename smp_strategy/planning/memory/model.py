"""Memory model of parameters, gradients and optimizer state: bytes per rank, from shapes alone, before sharding.

Code above the units runs on every stage, so its parameters are on every rank, whole. The parameters of a unit are on
its stage: whole on each rank, or sharded over a shard group (:mod:`smp_strategy.planning.memory.sharded`), with
padding. If units take turns to be gathered, or to have unreduced gradients, a stage needs room for the largest turn.
This room is modelled as a parameter of every stage: all stages get as much as the one with the largest turn may need.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from smp_strategy.config.config import SMPConfig
from smp_strategy.config.precision_options import GradientDtype
from smp_strategy.data_parallel.flat_layout import FlatParameter, UnitLayout
from smp_strategy.data_parallel.gather_schedule import MOST_REDUCING
from smp_strategy.data_parallel.optimizer_probe import StateSize, moments, optimizer_state_sizes
from smp_strategy.distributed.mesh_shape import MeshShape
from smp_strategy.model.units import Unit
from smp_strategy.planning.memory.sharded import Turn, flat_groups, most_gathered, share_of, turns_of
from smp_strategy.planning.partition.problem import HeldBytes
from smp_strategy.precision.dtypes import summed_dtype

__all__ = ["ModelMemory", "ShardingOf", "holdings_of"]

# Number of the pseudo-parameter for the room in which units take turns.
_TURNS = -1
# Default: units compute in the dtypes of their parameters.
_AS_THEY_ARE: Final[Mapping[str, torch.dtype]] = {}


@final
@dataclass(frozen=True, kw_only=True)
class ShardingOf:
    """Sharding of parameters and optimizer state among the ranks of a stage."""

    degree: int = 1
    """Ranks of a shard group."""
    persistence_threshold: int = 0
    """Number of elements below which parameters stay gathered."""
    most_live: int | None = None
    """Most gathered elements for prefetching; ``None``: unlimited."""
    gathers_once: bool = False
    """Whether units are gathered once per step instead of for each use."""
    num_stages: int = 1
    state_shards: int = 1
    """Ranks that share the optimizer state, by whole parameters."""
    num_owners: int = 1
    """Replicas of a shard group that share the optimizer state of each shard."""
    gradient_dtype: GradientDtype = "float32"
    """Dtype in which gradients of half-precision parameters are added up."""
    sends_copies: bool = False
    """Whether parts for other ranks are copied before they are sent, as in memory that the ranks of a host share."""

    @property
    def reduces_early(self) -> bool:
        """Whether gradients are reduced as soon as they are complete instead of at the end of a pass."""
        return self.num_stages == 1

    @classmethod
    def of(cls, config: SMPConfig, shape: MeshShape, *, sends_copies: bool = False) -> "ShardingOf":
        """Sharding by the options, on this mesh."""
        return cls(
            degree=shape.dp_shard,
            persistence_threshold=config.sdp_param_persistence_threshold,
            most_live=config.sdp_max_live_parameters,
            gathers_once=config.gathers_once(shape.pp),
            num_stages=shape.pp,
            state_shards=shape.dp if config.shard_optimizer_state and shape.dp_shard == 1 else 1,
            num_owners=shape.dp // shape.dp_shard if config.shard_optimizer_state and shape.dp_shard > 1 else 1,
            gradient_dtype=config.gradient_dtype,
            sends_copies=sends_copies,
        )


@final
@dataclass(frozen=True, kw_only=True)
class ModelMemory:
    """Bytes per parameter; parameters have numbers that are equal on all ranks."""

    by_unit: Mapping[str, Mapping[int, HeldBytes]]
    """Bytes that a rank holds for each unit; units in order of registration."""
    everywhere: Mapping[int, HeldBytes]
    """Bytes that every stage holds, independent of its units."""
    whole: Mapping[str, HeldBytes]
    """Unsharded bytes of each unit's parameters."""
    turns: tuple[Turn, ...] = ()
    """Of each call; empty: units take no turns."""
    least_live: int = 0
    """Elements of the largest unit that is gathered by itself; 0: none is."""


def holdings_of(
    module: nn.Module,
    units: Sequence[Unit],
    spreading: ShardingOf,
    *,
    optimizers: Sequence[Optimizer] = (),
    use_dtypes: Mapping[str, torch.dtype] = _AS_THEY_ARE,
    used_by_glue: Collection[Tensor] = (),
    calls: Sequence[str] = (),
) -> ModelMemory:
    """Predicted bytes of the fullest rank of a stage.

    Args:
        module: Whole module.
        units: Units of the module.
        spreading: Sharding among the ranks of a stage.
        optimizers: Optimizers of the module, if they are known.
        use_dtypes: Compute dtypes by name of the parameter, if they differ from the parameter's.
        used_by_glue: Tensors of units that code above the units uses.
        calls: Names of units in the order of calls in a step; empty: order of registration.
    """
    named = list(module.named_parameters())
    numbers = {id(parameter): number for number, (_, parameter) in enumerate(named)}
    members = {unit.name: [numbers[id(each)] for each in unit.module.parameters()] for unit in units}
    alone = set().union(*members.values()).difference(numbers[id(t)] for t in used_by_glue if id(t) in numbers)
    sizes = _state_sizes(dict(named), optimizers)
    in_units = set().union(*members.values())
    plain = [
        _plain(
            parameter,
            sizes[name],
            use_dtypes.get(name) if number in in_units else None,
            summed_dtype(parameter.dtype, spreading.gradient_dtype),
        )
        for number, (name, parameter) in enumerate(named)
    ]
    everywhere = {number: held for number, held in enumerate(plain) if number not in alone}
    by_unit = {name: {number: plain[number] for number in mine} for name, mine in members.items()}
    whole = {name: HeldBytes.sum_of(mine.values()) for name, mine in by_unit.items()}
    turns: tuple[Turn, ...] = ()
    least_live = 0
    if spreading.degree > 1:
        spread = {name: [number for number in mine if number in alone] for name, mine in members.items()}
        shares, room, turns, least_live = _spread(spread, named, optimizers, use_dtypes, spreading, calls)
        kept = {name: {n: held for n, held in mine.items() if n in everywhere} for name, mine in by_unit.items()}
        by_unit = {name: kept[name] | shares[name] for name in by_unit}
        everywhere[_TURNS] = room
    return ModelMemory(by_unit=by_unit, everywhere=everywhere, whole=whole, turns=turns, least_live=least_live)


def _spread(
    members: Mapping[str, Sequence[int]],
    named: Sequence[tuple[str, nn.Parameter]],
    optimizers: Sequence[Optimizer],
    use_dtypes: Mapping[str, torch.dtype],
    spreading: ShardingOf,
    calls: Sequence[str],
) -> tuple[dict[str, dict[int, HeldBytes]], HeldBytes, tuple[Turn, ...], int]:
    """Bytes of sharded parameters on a rank, by unit.

    Beside them: the room in which units take turns, the turns of calls, and the elements of the largest unit in turn.
    """
    groups = flat_groups(members)
    layouts = {
        group.number: UnitLayout.of(
            [_entry(*named[number], use_dtypes, spreading.gradient_dtype) for number in group.parameters],
            spreading.degree,
            spreading.persistence_threshold,
            spreading.num_owners,
        )
        for group in groups
    }
    sizes = _state_sizes(dict(named), optimizers, {named[number][0] for group in groups for number in group.parameters})

    def state_bytes(entry: FlatParameter, numel: int) -> int:
        return sizes[entry.names[0]].nbytes((numel,))

    def update_bytes(entry: FlatParameter, numel: int) -> int:
        return sizes[entry.names[0]].update_bytes((numel,))

    shares = {
        number: share_of(
            layout,
            state_bytes,
            update_bytes,
            gathers_once=spreading.gathers_once,
            reduces_early=spreading.reduces_early,
        )
        for number, layout in layouts.items()
    }
    of_unit = {name: [group.number for group in groups if name in group.users] for name in members}
    uses = [of_unit[name] for name in calls or members]
    turns = turns_of(
        uses,
        layouts,
        most_live=spreading.most_live,
        most_reducing=MOST_REDUCING,
        gathers=not spreading.gathers_once,
        reduces=spreading.reduces_early,
    )
    live = [] if spreading.gathers_once else [layout.transient_numel for layout in layouts.values()]
    by_unit = {name: {number: shares[number] for number in mine} for name, mine in of_unit.items()}
    known = tuple(turns) if calls and spreading.num_stages == 1 else ()
    return by_unit, _room(turns, uses, layouts, spreading), known, max(live, default=0)


def _room(
    turns: Sequence[Turn], uses: Sequence[Sequence[int]], layouts: Mapping[int, UnitLayout], spreading: ShardingOf
) -> HeldBytes:
    """Room in which units take turns, with copies of the parts that other ranks get."""
    gathered = max((turn.gathered for turn in turns), default=0)
    if not spreading.gathers_once and spreading.num_stages > 1:
        gathered = most_gathered(uses, layouts, spreading.most_live, in_any_order=True)
    unreduced = max((turn.own + turn.reducing for turn in turns), default=0)
    if spreading.reduces_early and spreading.sends_copies:
        reducing = max((turn.reducing for turn in turns), default=0)
        shard = max((layout.transient_bytes for layout in layouts.values()), default=0) // spreading.degree
        unreduced += shard + reducing - reducing // spreading.degree
    return HeldBytes(0, gathered=gathered, unreduced=unreduced)


def _state_sizes(
    named: Mapping[str, nn.Parameter], optimizers: Sequence[Optimizer], in_pieces: Collection[str] = ()
) -> dict[str, StateSize]:
    """Size of the optimizer state by name of the parameter; two moments if no optimizer is known.

    Args:
        named: All parameters, by name.
        optimizers: Optimizers of the module, if they are known.
        in_pieces: Names of the sharded parameters, which optimizers see as one-dimensional pieces.
    """
    known = optimizer_state_sizes(optimizers, {id(named[name]) for name in in_pieces})
    found = {}
    for name, parameter in named.items():
        ndim = 1 if name in in_pieces else parameter.ndim
        unknown = StateSize(()) if optimizers else moments(ndim, parameter.itemsize)
        found[name] = known.get(id(parameter), unknown)
    return found


def _plain(
    parameter: nn.Parameter, state: StateSize, copied_to: torch.dtype | None, summed_in: torch.dtype
) -> HeldBytes:
    """Bytes of a parameter that is whole on each rank, with its half-precision copy if units compute in one."""
    values = parameter.nbytes + (0 if copied_to is None else parameter.numel() * copied_to.itemsize)
    if not parameter.requires_grad:
        return HeldBytes(values)
    shape = parameter.shape
    return HeldBytes(
        values, parameter.numel() * summed_in.itemsize, state.nbytes(shape), updating=state.update_bytes(shape)
    )


def _entry(
    name: str, parameter: nn.Parameter, dtypes: Mapping[str, torch.dtype], of_halves: GradientDtype
) -> FlatParameter:
    used_as, summed_in = dtypes.get(name, parameter.dtype), summed_dtype(parameter.dtype, of_halves)
    return FlatParameter(
        names=(name,),
        shape=tuple(parameter.shape),
        stride=parameter.stride(),
        dtype=str(parameter.dtype).removeprefix("torch."),
        itemsize=parameter.itemsize,
        requires_grad=parameter.requires_grad,
        use_dtype=str(used_as).removeprefix("torch."),
        use_itemsize=used_as.itemsize,
        gradient_dtype=str(summed_in).removeprefix("torch."),
        gradient_itemsize=summed_in.itemsize,
    )
