"""Multiple-choice knapsack: recomputation and offload of the units of a stage, in least time within its memory.

Every unit has alternatives: keep everything, recompute all or a part, offload to host memory. Each alternative takes
some time and leaves some bytes. Two properties go beyond the textbook problem:

* Recomputed bytes count, too. During its recomputation a unit has all its activations on the device, beside those that
  the units before it keep for the same backward (the units after it have freed theirs). So the order of units counts.
* The constraints are several *moments* of the schedule: in the backward of one or another segment, with some number of
  microbatches in flight. The choice must fit at all of them.

The solver is dynamic programming over the units in program order. A state is the time so far, the bytes so far and the
peak so far; dominated states are dropped. Few states survive, because similar units lead to the same states. If there
are too many nevertheless (copies to host memory can cause that), bytes are rounded up to ever coarser grains. So the
answer always fits, and the solver knows whether it is exact.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, final

__all__ = [
    "Alternative",
    "SelectionCost",
    "MemoryUse",
    "MemoryBudget",
    "Selection",
    "choose",
    "UnitAlternatives",
    "BytePrices",
    "find_prices",
]


# Most states per unit before bytes are rounded, without and with copies: these add states, most of them equally good.
MOST_STATES = 1500
MOST_STATES_OF_COPIES = 120
# Grains of the largest limit at the first rounding.
MOST_GRAINS = 64
# Resolution of times: ticks in the largest possible sum. Integers, for [Note: same decision on every rank].
TICKS = 1 << 40


class MemoryUse(NamedTuple):
    """Bytes of a unit on the device at one moment, under one alternative."""

    around: int = 0
    """Bytes of microbatches other than the one in backward."""
    before: int = 0
    """Bytes of the microbatch in backward, until the unit's own backward has ended."""
    during: int = 0
    """Further bytes while the unit's own backward runs."""


class Alternative(NamedTuple):
    """One way to treat the activations of a unit."""

    seconds: float
    """Added seconds per microbatch."""
    loads: tuple[MemoryUse, ...]
    """Memory use at each moment."""
    copied_bytes: int = 0
    """Bytes copied to host memory and back, asynchronously."""

    @property
    def kept_bytes(self) -> tuple[int, ...]:
        """Bytes kept at each moment, apart from the unit's own backward."""
        return tuple(load.around + load.before for load in self.loads)


class SelectionCost(NamedTuple):
    """Total cost of one alternative for every unit."""

    seconds: float
    """Added seconds per microbatch."""
    copied_bytes: int
    peaks: tuple[int, ...]
    """Peak bytes at each moment."""


@final
@dataclass(frozen=True, kw_only=True)
class MemoryBudget:
    """Memory and copy bandwidth of a stage."""

    most_bytes: tuple[int, ...]
    """Limit at each moment."""
    hidden_bytes: float = float("inf")
    """Bytes whose copies overlap with the regular work of the device."""
    bytes_per_second: float = float("inf")
    """Bandwidth to host memory and back, one after the other."""

    def in_grains(self, tick: float, grain: int) -> "MemoryBudget":
        limits = tuple(limit // grain for limit in self.most_bytes)
        rate = self.bytes_per_second * tick / grain
        return MemoryBudget(most_bytes=limits, hidden_bytes=self.hidden_bytes / grain, bytes_per_second=rate)

    def fits(self, peaks: Sequence[int]) -> bool:
        """Whether ``peaks`` are within the limit at every moment."""
        return all(peak <= most for peak, most in zip(peaks, self.most_bytes, strict=True))

    def seconds(self, again: float, copied_bytes: int) -> float:
        """Added seconds per microbatch for ``again`` seconds of recomputation and ``copied_bytes`` copied out and back.
        Copies back overlap with recomputation, too."""
        waits = max(0.0, copied_bytes - self.hidden_bytes) / self.bytes_per_second
        return waits + max(waits, again)


class Selection(NamedTuple):
    """Best choice for all units."""

    chosen: tuple[int, ...]
    """Index of the alternative of each unit."""
    bill: SelectionCost
    is_exact: bool
    """Whether the choice is optimal; otherwise bytes were rounded up."""


class _State(NamedTuple):
    """Partial choice for the first units; smaller is better."""

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
    """The fastest choice of one alternative per unit that fits; ``None`` if nothing fits.

    Ties go to the choice with the fewest copies and bytes, then to the first.

    Args:
        units: Alternatives of each unit, in program order; the first one is preferred.
        stock: Memory and copy bandwidth of the stage.
    """
    grain, num_grains = 1, MOST_GRAINS
    met = [*_met(units, stock), *_without_copies(units, stock)]
    copies = any(each.copied_bytes for unit in units for each in unit)
    most = min(MOST_STATES, MOST_STATES_OF_COPIES) if copies else MOST_STATES
    tick = sum(max(each.seconds for each in unit) for unit in units) / TICKS or 1.0
    # Exact first (a grain of one byte), then 64 grains for the largest limit, then half as many each time, until few
    # enough states survive. The coarsest grains are taken with any number of states.
    while True:
        rounded = [[_in_grains(each, tick, grain) for each in unit] for unit in units]
        own = stock.in_grains(tick, grain)
        states = _states(rounded, own, most if num_grains > 1 else None)
        if states is not None:
            break
        grain, num_grains = max(1, *stock.most_bytes) // num_grains + 1, num_grains // 2
    # With rounded bytes, a choice found by the Lagrangian prices may be better.
    found = [(each.chosen, bill(units, each.chosen)) for each in states] + (met if grain > 1 else [])
    if not found:
        return None
    chosen, costs = min(found, key=lambda each: (stock.seconds(each[1].seconds, each[1].copied_bytes), *each[1][1:]))
    return Selection(chosen, costs, grain == 1)


def bill(units: Sequence[Sequence[Alternative]], chosen: Sequence[int]) -> SelectionCost:
    """Total cost of a choice."""
    state = _nothing(len(units[0][0].loads) if units else 0)
    for unit, number in zip(units, chosen, strict=True):
        state = state.joined(number, unit[number])
    return SelectionCost(state.seconds, state.copied_bytes, state.fullest)


def _nothing(num_moments: int) -> _State:
    return _State(0.0, 0, (0,) * num_moments, (0,) * num_moments, ())


def _without_copies(
    units: Sequence[Sequence[Alternative]], stock: MemoryBudget
) -> list[tuple[tuple[int, ...], SelectionCost]]:
    """The best choice without copies, if some alternatives copy; empty if there is none."""
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
    """Feasible choices found while optimizing the Lagrangian prices."""
    _, met = find_prices(units, stock.most_bytes, stock.hidden_bytes, 1 / stock.bytes_per_second)
    bills = [(chosen, bill(units, chosen)) for chosen in met]
    return [each for each in bills if stock.fits(each[1].peaks)]


def _states(units: Sequence[Sequence[Alternative]], stock: MemoryBudget, most: int | None) -> list[_State] | None:
    """Final states of the dynamic program; ``None`` if more than ``most`` states survive on the way."""
    limits = stock.most_bytes
    prices, met = find_prices(units, limits, stock.hidden_bytes, 1 / stock.bytes_per_second)
    bills = [bill(units, chosen) for chosen in met]
    known = [stock.seconds(each.seconds, each.copied_bytes) for each in bills if stock.fits(each.peaks)]
    enough = min(known, default=float("inf")) + 1
    # Lower bounds on the bytes that the remaining units add.
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
    """Pareto frontier: states that no other dominates; the first of equal ones."""
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
    """Pareto frontier for a single moment without copies, in O(n log n)."""
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
    """``alternative`` in integers, so that sums do not depend on the order of addition."""
    loads = tuple(MemoryUse(*(-(-nbytes // grain) for nbytes in load)) for load in alternative.loads)
    return Alternative(round(alternative.seconds / tick), loads, -(-alternative.copied_bytes // grain))


# --- lower bound -----------------------------------------------------------------------------------------------------
# Lower bound on the recompute time of a partial choice, by Lagrangian relaxation; prunes the knapsack search.
#
# If bytes have a price, equal for all units of a stage, each unit can choose for itself, and the sum is a lower bound
# on any choice of the knapsack. Subgradient steps find good prices: they raise those of moments that are too full, and
# lower the others. Feasible choices turn up on the way.


STEPS = 80


class UnitAlternatives(Protocol):
    """One alternative of a unit."""

    @property
    def seconds(self) -> float:
        """Added seconds."""

    @property
    def kept_bytes(self) -> tuple[int, ...]:
        """Bytes added to each moment."""

    @property
    def copied_bytes(self) -> int:
        """Bytes copied to host memory and back."""


@final
class BytePrices:
    """Lagrange multipliers in seconds per byte, with the choice of every unit under them.

    Args:
        units: Alternatives of each unit.
        most_bytes: Limit at each moment.
        hidden_bytes: Bytes that can be copied for free.
        of_bytes: Price of a byte at each moment.
        of_copies: Price of a copied byte.
    """

    def __init__(
        self,
        units: Sequence[Sequence[UnitAlternatives]],
        most_bytes: Sequence[int],
        hidden_bytes: float,
        of_bytes: Sequence[float],
        of_copies: float,
    ) -> None:
        self._of_bytes = of_bytes
        self._of_copies = of_copies
        self._free = sum(price * most for price, most in zip(of_bytes, most_bytes, strict=True))
        self._free += of_copies * hidden_bytes if of_copies else 0.0
        self.chosen = tuple(min(range(len(unit)), key=lambda k: self._price(unit[k])) for unit in units)
        self._rest = [0.0]
        for unit, number in zip(reversed(units), reversed(self.chosen), strict=True):
            self._rest.append(self._rest[-1] + self._price(unit[number]))

    def _price(self, choice: UnitAlternatives) -> float:
        return self.least(choice.seconds, choice.kept_bytes, choice.copied_bytes, 0, is_whole=False)

    def least(
        self, seconds: float, kept_bytes: Sequence[int], copied_bytes: int, num_left: int, *, is_whole: bool = True
    ) -> float:
        """Lower bound on the time of any completion of a partial choice that has ``num_left`` units to go."""
        found = seconds + self._of_copies * copied_bytes
        found += sum(price * nbytes for price, nbytes in zip(self._of_bytes, kept_bytes, strict=True))
        return found + self._rest[num_left] - self._free if is_whole else found

    def improved(
        self, units: Sequence[Sequence[UnitAlternatives]], most_bytes: Sequence[int], step: float
    ) -> list[float]:
        """Prices at each moment after a subgradient step of size ``step``."""
        picked = [unit[number] for unit, number in zip(units, self.chosen, strict=True)]
        used = [sum(each.kept_bytes[moment] for each in picked) for moment in range(len(most_bytes))]
        return [
            max(0.0, price + step * (mine - most) / (max(most, 1) ** 2))
            for price, mine, most in zip(self._of_bytes, used, most_bytes, strict=True)
        ]


def find_prices(
    units: Sequence[Sequence[UnitAlternatives]], most_bytes: Sequence[int], hidden_bytes: float, copy_seconds: float
) -> tuple[BytePrices, list[tuple[int, ...]]]:
    """The best prices, and all choices met on the way.

    Args:
        units: Alternatives of each unit.
        most_bytes: Limit at each moment.
        hidden_bytes: Bytes that can be copied for free.
        copy_seconds: Seconds per copied byte beyond that.
    """
    total = sum(max(choice.seconds for choice in unit) for unit in units) or 1.0
    copied = sum(max(choice.copied_bytes for choice in unit) for unit in units) or 1
    of_bytes, of_copies = [0.0] * len(most_bytes), 0.0
    best: tuple[float, BytePrices] | None = None
    met: dict[tuple[int, ...], None] = {}
    for number in range(1, STEPS + 1):
        prices = BytePrices(units, most_bytes, hidden_bytes, of_bytes, of_copies)
        met[prices.chosen] = None
        bound = prices.least(0.0, [0] * len(most_bytes), 0, len(units))
        if best is None or bound > best[0]:
            best = (bound, prices)
        # Diminishing steps: the subgradient method converges, and the best bound on the way is kept.
        step = 4.0 * total / number
        of_bytes = prices.improved(units, most_bytes, step)
        if copy_seconds and hidden_bytes != float("inf"):
            mine = sum(unit[k].copied_bytes for unit, k in zip(units, prices.chosen, strict=True))
            of_copies = min(copy_seconds, max(0.0, of_copies + step * (mine - hidden_bytes) / copied**2))
    assert best is not None
    return best[1], list(met)
