"""Lower bound on the recompute time of a partial choice, by Lagrangian relaxation; prunes the knapsack search.

If bytes have a price, equal for all units of a stage, each unit can choose for itself, and the sum is a lower bound on
any choice of :mod:`smp_strategy.planning.activation_budget.knapsack`. Subgradient steps find good prices: they raise
those of moments that are too full, and lower the others. Feasible choices turn up on the way.
"""

from collections.abc import Sequence
from typing import Protocol, final

__all__ = ["UnitAlternatives", "BytePrices", "find_prices"]

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
