"""What a rank of a shard group holds of flat buffers, at rest and at most: functions of their layouts.

At rest it is this rank's shard, of values, gradients and state. In a step more is there for a while:

==============  ===========================================  =========================
values          gathered for each use: of the unit in use,   gathered once per step:
                and of the one ahead                         of all units
gradients       reduced early: of the unit in backward,      reduced when a pass ends:
                and of those that are being reduced          of all units
==============  ===========================================  =========================
"""

from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise, product
from typing import TypeVar, final

from smp_strategy.data_parallel.flat_layout import FlatLayout, FlatParameter, UnitLayout
from smp_strategy.planning.partition.problem import HeldBytes

__all__ = ["FlatGroup", "flat_groups", "most_gathered", "most_unreduced", "share_of"]

Key = TypeVar("Key", bound=Hashable)


@final
@dataclass(frozen=True)
class FlatGroup:
    """Parameters that stand in flat buffers together, because the same units use them."""

    users: tuple[str, ...]
    parameters: tuple[int, ...]

    @property
    def number(self) -> int:
        """An identity: that of its first parameter."""
        return self.parameters[0]


def flat_groups(parameters: Mapping[str, Iterable[int]]) -> list[FlatGroup]:
    """The groups of the parameters of some units: those of a unit alone, and those that several units share.

    Args:
        parameters: numbers of each unit's parameters, by unit.
    """
    users: dict[int, tuple[str, ...]] = {}
    for name, mine in parameters.items():
        for number in dict.fromkeys(mine):
            users[number] = (*users.get(number, ()), name)
    groups: dict[tuple[str, ...], list[int]] = {}
    for number, names in users.items():
        groups.setdefault(names, []).append(number)
    return [FlatGroup(names, tuple(members)) for names, members in groups.items()]


def share_of(
    layout: UnitLayout, state_bytes: Callable[[FlatParameter, int], int], *, gathers_once: bool, reduces_early: bool
) -> HeldBytes:
    """What the fullest rank holds of a unit's parameters. What units take turns to need is not counted here.

    Args:
        layout: their flat buffers.
        state_bytes: what the optimizer keeps of so many elements of a parameter.
        gathers_once: whether the values of all units are gathered for a whole step; otherwise units take turns.
        reduces_early: whether units take turns to have whole gradients; otherwise all have them when a pass ends.
    """
    trained = [flat for flat in layout.flats if flat.is_trained]

    def state_of(rank: int, owner: int) -> int:
        pieces = [(slot.entry, flat.own_piece(slot, rank, owner)) for flat in trained for slot in flat.slots]
        return sum(state_bytes(entry, piece.numel) for entry, piece in pieces)

    return HeldBytes(
        parameter=layout.resting_bytes,
        gradient=sum(flat.gradient_bytes for flat in trained),
        optimizer=max(state_of(*place) for place in product(*_places(trained[0]))) if trained else 0,
        gathered=layout.transient_bytes if gathers_once else 0,
        unreduced=0 if reduces_early else _unreduced(layout),
    )


def _places(flat: FlatLayout) -> tuple[range, range]:
    return range(flat.degree), range(flat.num_owners)


def most_gathered(
    uses: Sequence[Collection[Key]],
    layouts: Mapping[Key, UnitLayout],
    most_live: int | None,
    *,
    in_any_order: bool = False,
) -> int:
    """Most bytes of values that come and go, where units take turns and one is gathered ahead.

    Args:
        uses: what each call uses, in the order of a forward pass. Backward goes the same way back.
        layouts: of what is used.
        most_live: number of elements up to which one is gathered ahead; ``None``: any.
        in_any_order: any call may follow any other: it is not known which calls are those of a stage.
    """
    alone = [frozenset(use) for use in uses if use]
    pairs = [one | other for one, other in (combinations(set(alone), 2) if in_any_order else pairwise(alone))]
    if most_live is not None:
        pairs = [pair for pair in pairs if sum(layouts[key].transient_numel for key in pair) <= most_live]
    return max((sum(layouts[key].transient_bytes for key in live) for live in (*alone, *pairs)), default=0)


def most_unreduced(uses: Sequence[Collection[Key]], layouts: Mapping[Key, UnitLayout], most_reducing: int) -> int:
    """Most bytes of whole gradients, where each is reduced once backward is through with all its uses.

    Args:
        uses: what each call uses, in the order of a forward pass.
        layouts: of what is used.
        most_reducing: of so many units gradients are being reduced at a time.
    """
    first = {key: position for position, use in reversed(list(enumerate(uses))) for key in use}
    has_gradient = {key for key in first if _unreduced(layouts[key])}
    begun: set[Key] = set()
    reducing: deque[Key] = deque(maxlen=most_reducing)
    peak = 0
    for position in range(len(uses) - 1, -1, -1):
        begun |= has_gradient.intersection(uses[position])
        peak = max(peak, sum(_unreduced(layouts[key]) for key in (*begun, *reducing)))
        through = [key for key in uses[position] if key in begun and first[key] == position]
        reducing.extend(through)
        begun.difference_update(through)
    return peak


def _unreduced(layout: UnitLayout) -> int:
    return sum(flat.full_gradient_bytes for flat in layout.flats if flat.is_trained)
