"""What a rank will hold of each parameter, from shapes alone, before anything is spread.

Code above the units runs on every stage, so what it computes with is everywhere, whole. Units are on their stage, and
there either whole on each rank, or spread over a shard group (:mod:`smp_strategy.planning.memory.sharded`), where
padding counts. Where units take turns to be gathered, or to have whole gradients, a stage needs room for the largest
turn. This room is like a parameter that every stage has: of several stages all get as much as the one with the largest
turn may need.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from smp_strategy.config.config import SMPConfig
from smp_strategy.data_parallel.flat_layout import FlatParameter, UnitLayout
from smp_strategy.data_parallel.gather_schedule import MOST_REDUCING
from smp_strategy.data_parallel.optimizer_probe import StateSize, moments, optimizer_state_sizes
from smp_strategy.distributed.mesh_shape import MeshShape
from smp_strategy.model.units import Unit
from smp_strategy.planning.memory.sharded import flat_groups, most_gathered, most_unreduced, share_of
from smp_strategy.planning.partition.problem import HeldBytes
from smp_strategy.precision.dtypes import gradient_dtype

__all__ = ["ModelMemory", "ShardingOf", "holdings_of"]

# The room in which units take turns, among the numbers of parameters.
_TURNS = -1
# Units compute in the dtypes of their parameters.
_AS_THEY_ARE: Final[Mapping[str, torch.dtype]] = {}


@final
@dataclass(frozen=True, kw_only=True)
class ShardingOf:
    """How the ranks of a stage share what it holds."""

    degree: int = 1
    """Ranks of a shard group."""
    persistence_threshold: int = 0
    """Parameters with fewer elements stay gathered."""
    most_live: int | None = None
    """Elements up to which units are gathered ahead; ``None``: any number."""
    gathers_once: bool = False
    """Whether units are gathered for a whole step, and not for each use."""
    num_stages: int = 1
    state_shards: int = 1
    """Ranks over which the state of the optimizers is dealt out, whole parameters to each."""
    num_owners: int = 1
    """Replicas of a shard group among which the state for each shard is dealt out."""

    @property
    def reduces_early(self) -> bool:
        """Whether gradients are reduced as soon as they are there, and not when a pass ends."""
        return self.num_stages == 1

    @classmethod
    def of(cls, config: SMPConfig, shape: MeshShape) -> "ShardingOf":
        """What the options ask for on this mesh."""
        return cls(
            degree=shape.dp_shard,
            persistence_threshold=config.sdp_param_persistence_threshold,
            most_live=config.sdp_max_live_parameters,
            gathers_once=config.gathers_once(shape.pp),
            num_stages=shape.pp,
            state_shards=shape.dp if config.shard_optimizer_state and shape.dp_shard == 1 else 1,
            num_owners=shape.dp // shape.dp_shard if config.shard_optimizer_state and shape.dp_shard > 1 else 1,
        )


@final
@dataclass(frozen=True, kw_only=True)
class ModelMemory:
    """Bytes of parameters, by a number that is the same on all ranks."""

    by_unit: Mapping[str, Mapping[int, HeldBytes]]
    """What a rank holds for each unit, by unit in order of registration."""
    everywhere: Mapping[int, HeldBytes]
    """What every stage holds, whatever its units are."""
    whole: Mapping[str, HeldBytes]
    """All of each unit's parameters, as in one process."""


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
    """What the fullest rank of a stage will hold.

    Args:
        module: the whole module.
        units: of the module.
        spreading: how the ranks of a stage share.
        optimizers: of the module, if they are known.
        use_dtypes: dtypes that units compute in, by name of the parameter, where they differ from the parameter's.
        used_by_glue: tensors of units that code above the units computes with.
        calls: names of units in the order in which a step calls them; none: that of registration.
    """
    named = list(module.named_parameters())
    numbers = {id(parameter): number for number, (_, parameter) in enumerate(named)}
    members = {unit.name: [numbers[id(each)] for each in unit.module.parameters()] for unit in units}
    alone = set().union(*members.values()).difference(numbers[id(t)] for t in used_by_glue if id(t) in numbers)
    sizes = _state_sizes(dict(named), optimizers)
    in_units = set().union(*members.values())
    plain = [
        _plain(parameter, sizes[name].nbytes(parameter.shape), use_dtypes.get(name) if number in in_units else None)
        for number, (name, parameter) in enumerate(named)
    ]
    everywhere = {number: held for number, held in enumerate(plain) if number not in alone}
    by_unit = {name: {number: plain[number] for number in mine} for name, mine in members.items()}
    whole = {name: HeldBytes.sum_of(mine.values()) for name, mine in by_unit.items()}
    if spreading.degree > 1:
        spread = {name: [number for number in mine if number in alone] for name, mine in members.items()}
        shares, turns = _spread(spread, named, optimizers, use_dtypes, spreading, calls)
        kept = {name: {n: held for n, held in mine.items() if n in everywhere} for name, mine in by_unit.items()}
        by_unit = {name: kept[name] | shares[name] for name in by_unit}
        everywhere[_TURNS] = turns
    return ModelMemory(by_unit=by_unit, everywhere=everywhere, whole=whole)


def _spread(
    members: Mapping[str, Sequence[int]],
    named: Sequence[tuple[str, nn.Parameter]],
    optimizers: Sequence[Optimizer],
    use_dtypes: Mapping[str, torch.dtype],
    spreading: ShardingOf,
    calls: Sequence[str],
) -> tuple[dict[str, dict[int, HeldBytes]], HeldBytes]:
    """What a rank holds of parameters that are spread, by unit, and the room in which units take turns."""
    groups = flat_groups(members)
    layouts = {
        group.number: UnitLayout.of(
            [_entry(*named[number], use_dtypes) for number in group.parameters],
            spreading.degree,
            spreading.persistence_threshold,
            spreading.num_owners,
        )
        for group in groups
    }
    sizes = _state_sizes(dict(named), optimizers, {named[number][0] for group in groups for number in group.parameters})

    def state_bytes(entry: FlatParameter, numel: int) -> int:
        return sizes[entry.names[0]].nbytes((numel,))

    shares = {
        number: share_of(
            layout, state_bytes, gathers_once=spreading.gathers_once, reduces_early=spreading.reduces_early
        )
        for number, layout in layouts.items()
    }
    of_unit = {name: [group.number for group in groups if name in group.users] for name in members}
    uses = [of_unit[name] for name in calls or members]
    gathered = unreduced = 0
    if not spreading.gathers_once:
        gathered = most_gathered(uses, layouts, spreading.most_live, in_any_order=spreading.num_stages > 1)
    if spreading.reduces_early:
        unreduced = most_unreduced(uses, layouts, MOST_REDUCING)
    turns = HeldBytes(0, gathered=gathered, unreduced=unreduced)
    return {name: {number: shares[number] for number in mine} for name, mine in of_unit.items()}, turns


def _state_sizes(
    named: Mapping[str, nn.Parameter], optimizers: Sequence[Optimizer], in_pieces: Collection[str] = ()
) -> dict[str, StateSize]:
    """What optimizers will keep, by name of the parameter; without any it is not known which, so two moments.

    Args:
        named: all parameters, by name.
        optimizers: of the module, if they are known.
        in_pieces: names of the parameters of which optimizers will see one-dimensional pieces.
    """
    known = optimizer_state_sizes(optimizers, {id(named[name]) for name in in_pieces})
    found = {}
    for name, parameter in named.items():
        ndim = 1 if name in in_pieces else parameter.ndim
        unknown = StateSize(()) if optimizers else moments(ndim, parameter.itemsize)
        found[name] = known.get(id(parameter), unknown)
    return found


def _plain(parameter: nn.Parameter, state_bytes: int, copied_to: torch.dtype | None) -> HeldBytes:
    """Of one that is whole on each rank; where units compute in half precision there is a copy for them."""
    values = parameter.nbytes + (0 if copied_to is None else parameter.numel() * copied_to.itemsize)
    if not parameter.requires_grad:
        return HeldBytes(values)
    return HeldBytes(values, parameter.numel() * gradient_dtype(parameter.dtype).itemsize, state_bytes)


def _entry(name: str, parameter: nn.Parameter, dtypes: Mapping[str, torch.dtype]) -> FlatParameter:
    used_as = dtypes.get(name, parameter.dtype)
    return FlatParameter(
        names=(name,),
        shape=tuple(parameter.shape),
        stride=parameter.stride(),
        dtype=str(parameter.dtype).removeprefix("torch."),
        itemsize=parameter.itemsize,
        requires_grad=parameter.requires_grad,
        use_dtype=str(used_as).removeprefix("torch."),
        use_itemsize=used_as.itemsize,
    )
