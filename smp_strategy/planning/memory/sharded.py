"""Memory of sharded parameters (ZeRO-3) on a rank: flat buffers at rest and at their peak, computed from layouts.

At rest a rank holds its shard of values, gradients and state. During a step it also holds, for a while:

==============  ===========================================  =========================
values          gathered for each use: of the unit in use,   gathered once per step:
                and of the one ahead                         of all units
gradients       reduced early: of the unit in backward,      reduced when a pass ends:
                and of those that are being reduced          of all units
==============  ===========================================  =========================

Memory of one rank by kind of tensor: parameters, gradients, optimizer state, buffers.
"""

from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from typing import NamedTuple, TypeVar, final

from smp_strategy.data_parallel.flat_layout import FlatParameter, UnitLayout
from smp_strategy.model.trace.events import Trace
from smp_strategy.planning.partition.problem import HeldBytes

__all__ = [
    "FlatGroup",
    "RankMemory",
    "Turn",
    "flat_groups",
    "most_gathered",
    "most_unreduced",
    "share_of",
    "turns_of",
    "with_turns",
]


Key = TypeVar("Key", bound=Hashable)


@final
@dataclass(frozen=True)
class FlatGroup:
    """Parameters that share flat buffers, because the same units use them."""

    users: tuple[str, ...]
    parameters: tuple[int, ...]

    @property
    def number(self) -> int:
        """Identity of the group: number of its first parameter."""
        return self.parameters[0]


def flat_groups(parameters: Mapping[str, Iterable[int]]) -> list[FlatGroup]:
    """Groups of parameters by the set of units that use them."""
    users: dict[int, tuple[str, ...]] = {}
    for name, mine in parameters.items():
        for number in dict.fromkeys(mine):
            users[number] = (*users.get(number, ()), name)
    groups: dict[tuple[str, ...], list[int]] = {}
    for number, names in users.items():
        groups.setdefault(names, []).append(number)
    return [FlatGroup(names, tuple(members)) for names, members in groups.items()]


def share_of(
    layout: UnitLayout,
    state_bytes: Callable[[FlatParameter, int], int],
    update_bytes: Callable[[FlatParameter, int], int] = lambda entry, numel: 0,
    *,
    gathers_once: bool,
    reduces_early: bool,
) -> HeldBytes:
    """Bytes of a unit's parameters on the fullest rank, without the room in which units take turns.

    Args:
        layout: Flat buffers of the parameters.
        state_bytes: Size of the optimizer state for a number of elements of a parameter.
        update_bytes: Size of the optimizer's temporary results for a number of elements of a parameter.
        gathers_once: Whether all units stay gathered for a whole step; otherwise units take turns.
        reduces_early: Whether units take turns to have unreduced gradients; otherwise all have them until a pass ends.
    """
    trained = [flat for flat in layout.flats if flat.is_trained]
    # State of each rank and owner: that for no elements, and what the pieces of parameters that it has add.
    empty, updating, added = 0, 0, Counter[int]()
    for flat in trained:
        for slot in flat.slots:
            of_none = state_bytes(slot.entry, 0)
            empty += of_none
            for owner, piece in flat.own_pieces(slot).items():
                added[owner] += state_bytes(slot.entry, piece.numel) - of_none
                updating = max(updating, update_bytes(slot.entry, piece.numel))
    return HeldBytes(
        parameter=layout.resting_bytes,
        gradient=sum(flat.gradient_bytes for flat in trained),
        optimizer=empty + max(added.values(), default=0),
        gathered=layout.transient_bytes if gathers_once else 0,
        unreduced=0 if reduces_early else _unreduced(layout),
        updating=updating,
    )


class Turn(NamedTuple):
    """Bytes of units that take turns, in the backward of a call."""

    gathered: int
    """Gathered values of the call, and of the next one."""
    after: int
    """The same of the next call."""
    own: int
    """Gradients of the units of this call that are not complete yet."""
    reducing: int
    """Gradients that are being reduced."""

    def beside(self, working: int, saved: int) -> int:
        """Most bytes beside the ``saved`` ones of the call.

        Either its backward runs, with ``working`` bytes of its own, which contain gradients of weights. Or it has ended
        and freed what it had saved, and the gradients are copied into a buffer of their unit.
        """
        return max(working + self.gathered, 2 * self.own + self.after - saved) + self.reducing


def turns_of(
    uses: Sequence[Collection[Key]],
    layouts: Mapping[Key, UnitLayout],
    *,
    most_live: int | None = None,
    most_reducing: int = 0,
    gathers: bool = True,
    reduces: bool = True,
) -> list[Turn]:
    """Turns of all calls; each group is reduced once backward has passed all its uses.

    Args:
        uses: Groups used by each call, in the order of a forward pass; backward goes the same way back.
        layouts: Flat buffers of the groups.
        most_live: Most gathered elements for prefetching; ``None``: unlimited.
        most_reducing: Most groups that are being reduced at a time.
        gathers: Whether groups are gathered for each use.
        reduces: Whether groups are reduced early.
    """
    first = {key: position for position, use in reversed(list(enumerate(uses))) for key in use}
    has_gradient = {key for key in first if reduces and _unreduced(layouts[key])}
    ahead = zip(uses, [(), *uses], strict=False)
    gathered = [_gathered(*pair, layouts, most_live) if gathers else 0 for pair in ahead]
    begun: set[Key] = set()
    reducing: deque[Key] = deque(maxlen=most_reducing)
    found = []
    for position in range(len(uses) - 1, -1, -1):
        begun |= has_gradient.intersection(uses[position])
        own, on_the_way = (sum(_unreduced(layouts[key]) for key in keys) for keys in (begun, reducing))
        found.append(Turn(gathered[position], gathered[position - 1] if position else 0, own, on_the_way))
        through = [key for key in uses[position] if key in begun and first[key] == position]
        reducing.extend(through)
        begun.difference_update(through)
    return found[::-1]


def with_turns(trace: Trace, turns: Sequence[Turn]) -> Trace:
    """``trace`` whose working memory is relative to the room in which units take ``turns``."""
    if not turns:
        return trace
    room = max(turn.gathered for turn in turns) + max(turn.own + turn.reducing for turn in turns)
    events, rest, turn = [], iter(turns), turns[0]
    for event in trace.events:
        # Backward of glue comes between those of the units after it and before it.
        turn = next(rest) if event.kind == "unit" else turn._replace(own=0)
        beside = turn.beside(event.kept.working_bytes, event.saved_bytes)
        events.append(event._replace(kept=event.kept._replace(working_bytes=beside - room)))
    return replace(trace, events=events)


def _gathered(
    use: Collection[Key], ahead: Collection[Key], layouts: Mapping[Key, UnitLayout], most_live: int | None
) -> int:
    both = set(use) | set(ahead)
    if not use or (most_live is not None and sum(layouts[key].transient_numel for key in both) > most_live):
        both = set(use)
    return sum(layouts[key].transient_bytes for key in both)


def most_gathered(
    uses: Sequence[Collection[Key]],
    layouts: Mapping[Key, UnitLayout],
    most_live: int | None,
    *,
    in_any_order: bool = False,
) -> int:
    """Peak bytes of gathered values, if units take turns and the next one is prefetched.

    Args:
        uses, layouts, most_live: As for :func:`turns_of`.
        in_any_order: Whether any call may follow any other, because the calls of a stage are not known yet.
    """
    alone = [frozenset(use) for use in uses if use]
    pairs = [*combinations(set(alone), 2)] if in_any_order else [*pairwise(alone)]
    pairs += [(use, frozenset()) for use in alone]
    return max((_gathered(one, other, layouts, most_live) for one, other in pairs), default=0)


def most_unreduced(uses: Sequence[Collection[Key]], layouts: Mapping[Key, UnitLayout], most_reducing: int) -> int:
    """Peak bytes of unreduced gradients; arguments as for :func:`turns_of`."""
    turns = turns_of(uses, layouts, most_reducing=most_reducing)
    return max((turn.own + turn.reducing for turn in turns), default=0)


def _unreduced(layout: UnitLayout) -> int:
    return sum(flat.full_gradient_bytes for flat in layout.flats if flat.is_trained)


@final
@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes that a rank holds between steps."""

    rank: int
    stage: int
    parameters: int
    """Bytes of values that stay on the rank between uses."""
    gathered: int
    """Peak bytes of gathered values, which come and go."""
    gradients: int
    optimizer: int
    """Bytes of optimizer state."""
    buffers: int

    @property
    def amounts(self) -> dict[str, int]:
        """Bytes by kind."""
        return {
            "parameters": self.parameters,
            "gathered": self.gathered,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "buffers": self.buffers,
        }

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return sum(self.amounts.values())
