"""Size formulas: the prediction of a call with new sizes, from dry runs of the same call with other sizes.

Batches that are padded to their longest sample bring new lengths all the time, and a dry run for each would take longer
than the step. The second call of a kind, which differs from the first one in some numbers, runs dry once more with
symbols for these (:mod:`smp_strategy.model.trace.symbolic_sizes`). From then on a formula predicts calls of the kind,
as long as its guards hold: code that branches on a size is run dry again for the other branch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

from smp_strategy.errors import SMPError
from smp_strategy.model.trace.call_sizes import numbers_of, with_numbers
from smp_strategy.model.trace.prediction import Made, Prediction, Unpredictable
from smp_strategy.model.trace.symbolic_sizes import SymbolicSizes

__all__ = ["SizeFormulas"]

# A kind whose calls have so little in common is run dry for each of them.
_MOST_FORMULAS = 8
_MOST_FAILURES = 2

_Numbers = tuple[Any, ...]


@final
@dataclass(frozen=True)
class _Formula:
    """Prediction of a call as a function of its numbers."""

    solve: Callable[[_Numbers], _Numbers | None]
    """Maps numbers of the arguments to those of the results, or to ``None`` if the formula does not hold for them."""
    symbolic: Prediction
    """Result of the symbolic run."""
    sample: Prediction
    """Result for one set of numbers. Costs are those of this sample: plans are made for the first sizes anyway."""

    def predict(self, numbers: _Numbers) -> Prediction | None:
        """The prediction for other numbers, if the formula holds for them."""
        found = self.solve(numbers)
        if found is None:
            return None
        left = iter(found)
        outputs = tuple(_renumbered(output, left) for output in self.symbolic.outputs)
        changed = {position: with_numbers(spec, left) for position, spec in self.symbolic.changed.items()}
        return replace(self.sample, outputs=outputs, changed=changed, aliases=self.symbolic.aliases)


@final
@dataclass
class _Kind:
    """Calls that differ in their numbers only."""

    first: Sequence[Any]
    """Arguments of the first call."""
    predicted: Prediction | Unpredictable
    """Its prediction."""
    formulas: list[_Formula] = field(default_factory=list)
    failures: int = 0


@final
class SizeFormulas:
    """Formulas by kind of call."""

    def __init__(self) -> None:
        self._kinds: dict[object, _Kind] = {}

    def predict(
        self,
        kind: object,
        leaves: Sequence[Any],
        run: Callable[[], Prediction | Unpredictable],
        run_symbolic: Callable[[SymbolicSizes, list[Any]], Prediction],
    ) -> Prediction | Unpredictable:
        """Predict a call that was not predicted before.

        Args:
            kind: Equal for calls that differ in their numbers only.
            leaves: Its flattened arguments; tensors are given by their metadata.
            run: Dry run of the call.
            run_symbolic: Dry run with other arguments, in a given mode.
        """
        known = self._kinds.get(kind)
        if known is None:
            first = run()
            self._kinds[kind] = _Kind(leaves, first)
            return first
        numbers = _all_numbers(leaves)
        for formula in known.formulas:
            found = formula.predict(numbers)
            if found is not None:
                return found
        prediction = run()
        if known.failures == _MOST_FAILURES or len(known.formulas) == _MOST_FORMULAS:
            return prediction
        derived = _derive(known, leaves, prediction, run_symbolic)
        if derived is None:
            known.failures += 1
        else:
            known.formulas.append(derived)
        return prediction


def _derive(
    known: _Kind,
    leaves: Sequence[Any],
    sample: Prediction | Unpredictable,
    run_symbolic: Callable[[SymbolicSizes, list[Any]], Prediction],
) -> _Formula | None:
    """The formula for calls like the first one of the kind and that with ``leaves``, if there is one."""
    if isinstance(known.predicted, Unpredictable) or isinstance(sample, Unpredictable):
        return None
    sizes = SymbolicSizes()
    try:
        given = [sizes.between(before, now) for before, now in zip(known.first, leaves, strict=True)]
        symbolic = run_symbolic(sizes, given)
        results = [*map(_bare, symbolic.outputs), *symbolic.changed.values()]
        formula = _Formula(sizes.solve(_all_numbers(given), _all_numbers(results)), symbolic, sample)
        found, before = formula.predict(_all_numbers(leaves)), formula.predict(_all_numbers(known.first))
    except SMPError:
        raise
    except Exception:
        # Code that does not run with symbols runs dry for each size, which is right, too, but slower.
        return None
    # The first call may have taken another branch.
    is_right = found is not None and found.agrees(sample) and (before is None or before.agrees(known.predicted))
    return formula if is_right and symbolic.aliases == sample.aliases else None


def _all_numbers(leaves: Sequence[Any]) -> _Numbers:
    return tuple([number for leaf in leaves for number in numbers_of(leaf)])


def _bare(output: Any) -> Any:
    return output.spec if isinstance(output, Made) else output


def _renumbered(output: Any, numbers: Any) -> Any:
    return Made(with_numbers(output.spec, numbers)) if isinstance(output, Made) else with_numbers(output, numbers)
