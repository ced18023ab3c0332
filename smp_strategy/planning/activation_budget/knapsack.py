"""Which units of a stage should give up activations, so that what is left fits, for the least time?

Every unit has alternatives: keep everything, compute all or a part again, put it into host memory. Each takes some time
and leaves some bytes, and the stage has so many bytes. That is a knapsack problem with a choice per item, with two
things to it:

* Not only what is kept counts. While a unit is computed again, all that it would have kept is there for a while, beside
  what the units before it keep for the same backward (those after it are through). So the order of units counts.
* The stage is full at several *moments* of its schedule: in the backward of this segment or of that, with so many
  microbatches in flight. All of them must fit.

Solved by dynamic programming over the units in the order of the program. A state is the time so far, the bytes so far
and the fullest moment so far; of states one of which is no worse in anything the other is dropped. What survives is
small: units that are alike lead to the same states. Should it be too much nevertheless, which copies to host memory can
make it, bytes are rounded up to grains, of which the limits have fewer and fewer until it is not. So the answer always
fits, and it is known whether it is exact.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

from smp_strategy.planning.activation_budget.lower_bound import find_prices

__all__ = ["Alternative", "SelectionCost", "MemoryUse", "MemoryBudget", "Selection", "choose"]

# States that may survive a unit before bytes are rounded, without copies and with them: there are more ways to be good
# then, and most of them are equally good.
MOST_STATES = 1500
MOST_STATES_OF_COPIES = 120
# Grains that the largest limit has then at first.
MOST_GRAINS = 64
# Times that differ by less than such a share of the whole are equal.
TICKS = 1 << 40


class MemoryUse(NamedTuple):
    """Bytes of a unit on the device at one moment, under one alternative."""

    around: int = 0
    """Of microbatches other than the one in backward."""
    before: int = 0
    """Of the microbatch in backward, until the unit's own backward is through."""
    during: int = 0
    """And while its own backward runs."""


class Alternative(NamedTuple):
    """What could become of what a unit keeps."""

    seconds: float
    """That it takes longer, per microbatch."""
    loads: tuple[MemoryUse, ...]
    """At each moment."""
    copied_bytes: int = 0
    """That go to host memory and come back, beside the work of the device."""

    @property
    def kept_bytes(self) -> tuple[int, ...]:
        """Bytes that it adds to each moment after the unit's own backward began."""
        return tuple(load.around + load.before for load in self.loads)


class SelectionCost(NamedTuple):
    """What one alternative for every unit costs."""

    seconds: float
    """Per microbatch."""
    copied_bytes: int
    peaks: tuple[int, ...]
    """Bytes at each moment."""


@final
@dataclass(frozen=True, kw_only=True)
class MemoryBudget:
    """What a stage has."""

    most_bytes: tuple[int, ...]
    """At each moment."""
    hidden_bytes: float = float("inf")
    """Bytes that go to host memory, and come back, while the device computes what it computes anyway."""
    bytes_per_second: float = float("inf")
    """Of the way to host memory and back, one after the other."""

    def in_grains(self, tick: float, grain: int) -> "MemoryBudget":
        """The same, counted in ticks and grains."""
        limits = tuple(limit // grain for limit in self.most_bytes)
        rate = self.bytes_per_second * tick / grain
        return MemoryBudget(most_bytes=limits, hidden_bytes=self.hidden_bytes / grain, bytes_per_second=rate)

    def fits(self, peaks: Sequence[int]) -> bool:
        """Whether there is enough at every moment."""
        return all(peak <= most for peak, most in zip(peaks, self.most_bytes, strict=True))

    def seconds(self, again: float, copied_bytes: int) -> float:
        """What a microbatch takes longer if ``again`` seconds of work are done again and so much is copied away and
        back. Copies back are hidden by what is computed again, too."""
        waits = max(0.0, copied_bytes - self.hidden_bytes) / self.bytes_per_second
        return waits + max(waits, again)


class Selection(NamedTuple):
    """The best choice."""

    chosen: tuple[int, ...]
    """Number of the alternative, per unit."""
    bill: SelectionCost
    is_exact: bool
    """Whether none that fits is faster; otherwise bytes were rounded up."""


class _State(NamedTuple):
    """Choices for the units so far; the smallest is the best."""

    seconds: float
    copied_bytes: int
    bytes_so_far: tuple[int, ...]
    fullest: tuple[int, ...]
    chosen: tuple[int, ...]

    def joined(self, number: int, alternative: Alternative) -> "_State":
        so_far = tuple(
            mine + load.around + load.before for mine, load in zip(self.bytes_so_far, alternative.loads, strict=True)
        )
        fullest = tuple(
            max(peak + load.around, mine + load.during)
            for peak, mine, load in zip(self.fullest, so_far, alternative.loads, strict=True)
        )
        return _State(
            self.seconds + alternative.seconds,
            self.copied_bytes + alternative.copied_bytes,
            so_far,
            fullest,
            (*self.chosen, number),
        )


def choose(units: Sequence[Sequence[Alternative]], stock: MemoryBudget) -> Selection | None:
    """The alternative of every unit that takes the least time altogether and fits; ``None``: nothing fits.

    Among equally fast choices the one with the fewest copies and bytes is taken, then the first.

    Args:
        units: alternatives of each unit, in the order of the program; the first one is what is preferred.
        stock: what there is.
    """
    grain, num_grains = 1, MOST_GRAINS
    met = [*_met(units, stock), *_without_copies(units, stock)]
    copies = any(each.copied_bytes for unit in units for each in unit)
    most = min(MOST_STATES, MOST_STATES_OF_COPIES) if copies else MOST_STATES
    tick = sum(max(each.seconds for each in unit) for unit in units) / TICKS or 1.0
    while True:
        rounded = [[_in_grains(each, tick, grain) for each in unit] for unit in units]
        own = stock.in_grains(tick, grain)
        states = _states(rounded, own, most if num_grains > 1 else None)
        if states is not None:
            break
        grain, num_grains = max(1, *stock.most_bytes) // num_grains + 1, num_grains // 2
    # Where bytes are rounded, a choice that the prices have led to may be better.
    found = [(each.chosen, bill(units, each.chosen)) for each in states] + (met if grain > 1 else [])
    if not found:
        return None
    chosen, costs = min(found, key=lambda each: (stock.seconds(each[1].seconds, each[1].copied_bytes), *each[1][1:]))
    return Selection(chosen, costs, grain == 1)


def bill(units: Sequence[Sequence[Alternative]], chosen: Sequence[int]) -> SelectionCost:
    """What a choice costs."""
    state = _nothing(len(units[0][0].loads) if units else 0)
    for unit, number in zip(units, chosen, strict=True):
        state = state.joined(number, unit[number])
    return SelectionCost(state.seconds, state.copied_bytes, state.fullest)


def _nothing(num_moments: int) -> _State:
    return _State(0.0, 0, (0,) * num_moments, (0,) * num_moments, ())


def _without_copies(
    units: Sequence[Sequence[Alternative]], stock: MemoryBudget
) -> list[tuple[tuple[int, ...], SelectionCost]]:
    """The best choice that copies nothing, where others do and there is one."""
    numbers = [[number for number, each in enumerate(unit) if not each.copied_bytes] for unit in units]
    if not all(numbers) or sum(map(len, numbers)) == sum(map(len, units)):
        return []
    rest = [[unit[number] for number in mine] for unit, mine in zip(units, numbers, strict=True)]
    verdict = choose(rest, stock)
    if verdict is None:
        return []
    chosen = tuple(mine[number] for mine, number in zip(numbers, verdict.chosen, strict=True))
    return [(chosen, verdict.bill)]


def _met(units: Sequence[Sequence[Alternative]], stock: MemoryBudget) -> list[tuple[tuple[int, ...], SelectionCost]]:
    """Choices that fit, as prices lead to them."""
    _, met = find_prices(units, stock.most_bytes, stock.hidden_bytes, 1 / stock.bytes_per_second)
    bills = [(chosen, bill(units, chosen)) for chosen in met]
    return [each for each in bills if stock.fits(each[1].peaks)]


def _states(units: Sequence[Sequence[Alternative]], stock: MemoryBudget, most: int | None) -> list[_State] | None:
    """What may come out; ``None``: there are more than ``most`` states on the way."""
    limits = stock.most_bytes
    prices, met = find_prices(units, limits, stock.hidden_bytes, 1 / stock.bytes_per_second)
    bills = [bill(units, chosen) for chosen in met]
    known = [stock.seconds(each.seconds, each.copied_bytes) for each in bills if stock.fits(each.peaks)]
    enough = min(known, default=float("inf")) + 1
    # What the units to come add at least.
    rest: list[tuple[int, ...]] = [(0,) * len(limits)]
    for unit in reversed(units):
        least = [min(each.loads[m].around for each in unit) for m in range(len(limits))]
        rest.append(tuple(map(sum, zip(rest[-1], least, strict=True))))
    states = [_nothing(len(limits))]
    for position, unit in enumerate(units):
        num_left = len(units) - position - 1
        extended = [state.joined(number, alternative) for state in states for number, alternative in enumerate(unit)]
        states = _frontier(
            state
            for state in extended
            if stock.fits(tuple(map(sum, zip(state.fullest, rest[num_left], strict=True))))
            and prices.least(state.seconds, state.bytes_so_far, state.copied_bytes, num_left) <= enough
        )
        if most is not None and len(states) > most:
            return None
    return states


def _frontier(states: Iterable[_State]) -> list[_State]:
    """Those than which no other is better in something and worse in nothing; of equal ones the first."""
    ordered = sorted(states)
    if ordered and len(ordered[0].fullest) == 1 and not any(state.copied_bytes for state in ordered):
        return _staircase(ordered)
    found: list[_State] = []
    figures: list[tuple[int, ...]] = []
    for state in ordered:
        mine = (state.copied_bytes, *state.bytes_so_far, *state.fullest)
        if not any(all(map(int.__le__, other, mine)) for other in figures):
            found.append(state)
            figures.append(mine)
    return found


def _staircase(ordered: Iterable[_State]) -> list[_State]:
    """The same, faster, where there is one moment and nothing is copied."""
    found: list[_State] = []
    bytes_so_far: list[int] = []  # ascending, and of each the fullest moment: descending
    fullest: list[int] = []
    for state in ordered:
        (mine,), (peak,) = state.bytes_so_far, state.fullest
        place = bisect_right(bytes_so_far, mine)
        if place and fullest[place - 1] <= peak:
            continue
        found.append(state)
        end = place
        while end < len(fullest) and fullest[end] >= peak:
            end += 1
        begin = place - 1 if place and bytes_so_far[place - 1] == mine else place
        bytes_so_far[begin:end] = [mine]
        fullest[begin:end] = [peak]
    return found


def _in_grains(alternative: Alternative, tick: float, grain: int) -> Alternative:
    """``alternative`` in whole numbers, so that equal sums are equal in whatever order they are added up."""
    loads = tuple(MemoryUse(*(-(-nbytes // grain) for nbytes in load)) for load in alternative.loads)
    return Alternative(round(alternative.seconds / tick), loads, -(-alternative.copied_bytes // grain))
