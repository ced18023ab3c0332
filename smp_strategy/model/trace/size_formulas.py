"""Size formulas: the prediction of a call with new sizes, from dry runs of the same call with other sizes.

Batches that are padded to their longest sample bring new lengths all the time, and a dry run for each would take longer
than the step. The second call of a kind, which differs from the first one in some numbers, runs dry once more with
symbols for these (:class:`SymbolicSizes`). From then on a formula predicts calls of the kind, as long as its guards
hold: code that branches on a size is run dry again for the other branch.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any, final

import sympy
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP, DimDynamic, ShapeEnv
from torch.overrides import TorchFunctionMode
from torch.utils._sympy.printers import PythonPrinter

from smp_strategy.errors import SMPError
from smp_strategy.model.trace.prediction import Made, Prediction, Unpredictable
from smp_strategy.model.trace.tensor_spec import TensorSpec

__all__ = ["SizeFormulas", "shape_kind", "SymbolicSizes"]


# Smaller integers are dims, flags and factors: code branches on them.
_SMALL = 8
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


# --- numbers of a call -----------------------------------------------------------------------------------------------
# Numbers of a call by which calls of one kind differ: sizes and strides of its tensors, and large plain integers.
#
# Two calls with the same *shape kind* have the same arguments but for these numbers.


def shape_kind(leaf: Any, key: object) -> object:
    """Flattened argument without its numbers.

    Args:
        leaf: Argument; a tensor is given by its metadata.
        key: Hashable form of the whole argument.
    """
    if isinstance(leaf, TensorSpec):
        return TensorSpec, len(leaf.size), leaf.dtype, leaf.device, leaf.requires_grad
    if type(leaf) is torch.Size:
        return torch.Size, len(leaf)
    if type(leaf) is slice:
        return slice, *(int if _is_number(bound) else bound for bound in _bounds(leaf))
    return int if _is_number(leaf) else key


def numbers_of(leaf: Any) -> tuple[Any, ...]:
    """Numbers of a flattened argument or result, which may be symbolic."""
    if isinstance(leaf, TensorSpec):
        return *leaf.size, *leaf.stride
    if type(leaf) is torch.Size:
        return tuple(leaf)
    if type(leaf) is slice:
        return tuple(bound for bound in _bounds(leaf) if _is_number(bound))
    return (leaf,) if _is_number(leaf) else ()


def _with_numbers(leaf: Any, numbers: Iterator[Any]) -> Any:
    """``leaf`` with others for its numbers, which are taken from ``numbers``."""
    if isinstance(leaf, TensorSpec):
        size = tuple(next(numbers) for _ in leaf.size)
        return replace(leaf, size=size, stride=tuple(next(numbers) for _ in leaf.stride))
    if type(leaf) is torch.Size:
        return torch.Size([next(numbers) for _ in leaf])
    if type(leaf) is slice:
        return slice(*(next(numbers) if _is_number(bound) else bound for bound in _bounds(leaf)))
    return next(numbers) if _is_number(leaf) else leaf


def _bounds(leaf: slice) -> tuple[Any, Any, Any]:
    return leaf.start, leaf.stop, leaf.step


def _is_number(leaf: Any) -> bool:
    return (type(leaf) is int and abs(leaf) > _SMALL) or isinstance(leaf, _SYMBOLIC)


# --- symbolic sizes --------------------------------------------------------------------------------------------------
# Symbolic sizes: one dry run of a call for all sizes, by PyTorch's symbolic shapes (`torch.fx.experimental`).
#
# A symbol stands for each number by which two calls differ. Sizes that are computed from it are expressions, and each
# branch of Python code that looks at one leaves a *guard*, a condition under which other numbers take the same branch.
#
# This module alone uses the private parts of PyTorch's symbolic shapes.


# PyTorch assumes that a symbolic size is no 0 and no 1.
_LEAST = 2
_LOOPS = frozenset({"gru", "lstm", "rnn_relu", "rnn_tanh"})


class NoFormulaError(Exception):
    """The results of a call cannot be expressed by its numbers."""


@final
class SymbolicSizes:
    """Symbols for the numbers by which two calls differ."""

    def __init__(self) -> None:
        # Symbols are shared by the rule of `_number`. Results that depend on values stay errors.
        self._env = _Environment(duck_shape=False, allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
        self._mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=self._env)
        self._mode.cache_enabled = False  # making its entries takes longer than the run
        self._numbers: dict[tuple[int, int], torch.SymInt] = {}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context of the dry run.

        Raises:
            NoFormulaError: nothing differs but sizes of one or zero; or the code takes a symbol for a constant.
        """
        if not self._numbers:
            raise NoFormulaError("nothing differs but sizes of one or zero")
        # Operations that PyTorch composes of others in C++ mostly fix sizes; their forms in Python do not.
        with self._mode, _Observer(self._refuse_fixed), enable_python_dispatcher():
            yield

    def between(self, before: Any, now: Any) -> Any:
        """The argument ``now`` with a symbol for each number in which the argument ``before`` differs."""
        if not isinstance(now, TensorSpec):
            pairs = zip(numbers_of(before), numbers_of(now), strict=True)
            return _with_numbers(now, iter([self._number(*pair) for pair in pairs]))
        sizes = [self._number(*pair) for pair in zip(before.size, now.size, strict=True)]
        return _with_numbers(now, iter([*sizes, *self._strides(before, now, sizes)]))

    def _strides(self, before: TensorSpec, now: TensorSpec, sizes: Sequence[Any]) -> list[Any]:
        """Strides for symbolic sizes: products of the sizes of the dims inside, where they are that in both calls."""
        found: list[Any] = list(now.stride)
        inside: tuple[Any, Any, Any] = (1, 1, 1)
        for dim in sorted(range(len(sizes)), key=lambda dim: (now.stride[dim], now.size[dim])):
            pair = (before.stride[dim], now.stride[dim])
            found[dim] = inside[2] if pair == inside[:2] else self._number(*pair)
            inside = (pair[0] * before.size[dim], pair[1] * now.size[dim], found[dim] * sizes[dim])
        return found

    def _number(self, before: int, now: int) -> int | torch.SymInt:
        """A number of a call; those that are the same in one call and the same in the other have one symbol."""
        if before == now or now < _LEAST:
            return now
        if (before, now) not in self._numbers:
            source = ConstantSource(f"n{len(self._numbers)}")
            symbol = self._env.create_symbol(now, source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
            number = self._env.create_symintnode(symbol, hint=now, source=source)
            assert isinstance(number, torch.SymInt)
            self._numbers[before, now] = number
        return self._numbers[before, now]

    def _refuse_fixed(self) -> None:
        """Refuse code that takes a symbol for a constant (a loop over ``range(n)``, say)."""
        if any(number.node.expr.is_number for number in self._numbers.values()):
            raise NoFormulaError("the code makes a constant of a size")

    def solve(self, given: Sequence[Any], results: Iterable[Any]) -> Callable[[tuple[int, ...]], Any]:
        """A function that maps the numbers of a call to those of its results, or to ``None`` if a guard fails.

        Args:
            given: Numbers of the arguments, symbolic where :meth:`between` has made a symbol.
            results: Numbers of the results.

        Raises:
            NoFormulaError: the code takes a symbol for a constant.
        """
        self._refuse_fixed()
        symbols = list(self._numbers.values())
        positions = [next(i for i, number in enumerate(given) if number is symbol) for symbol in symbols]
        names = [str(symbol.node._expr) for symbol in symbols]
        conditions = [f"{name} >= {_LEAST}" for name in names]
        conditions += dict.fromkeys(_text(guard.expr) for guard in self._env.guards)
        conditions.append(f"numbers == {_tuple(given)}")
        source = f"lambda numbers, {', '.join(names)}: {_tuple(results)} if {' and '.join(conditions)} else None"
        function = eval(source, dict(SYMPY_INTERP))
        return lambda numbers: function(numbers, *[numbers[position] for position in positions])


class _Environment(ShapeEnv):
    """Symbols and guards that do not note which line of the user's code they come from.

    To find that line, PyTorch imports ``torch.export`` and its compiler, which takes longer than all else.
    """

    def _get_user_frame(self) -> FrameType | None:
        return inspect.currentframe()


class _Observer(TorchFunctionMode):
    """Calls ``look`` at each call of torch: a long loop should not run to its end."""

    def __init__(self, look: Callable[[], None]) -> None:
        super().__init__()
        self._look = look

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Not in a dispatch mode: autograd calls some operations where C++ lets no exception pass.
        self._look()
        if getattr(func, "__name__", "") in _LOOPS:
            raise NoFormulaError("a recurrent layer loops over a size")
        return func(*args, **(kwargs or {}))


def _tuple(numbers: Iterable[Any]) -> str:
    return f"({''.join(f'{_text(_expression(number))}, ' for number in numbers)})"


def _expression(number: Any) -> Any:
    return number.node.expr if isinstance(number, torch.SymInt | torch.SymFloat | torch.SymBool) else number


def _text(expression: Any) -> str:
    """An expression in Python's syntax."""
    return f"({PythonPrinter().doprint(expression)})" if isinstance(expression, sympy.Basic) else repr(expression)


# A kind whose calls have so little in common is run dry for each of them.
_MOST_FORMULAS = 8
_MOST_FAILURES = 2

_Numbers = tuple[Any, ...]


# --- formulas --------------------------------------------------------------------------------------------------------


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
        changed = {position: _with_numbers(spec, left) for position, spec in self.symbolic.changed.items()}
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
    return Made(_with_numbers(output.spec, numbers)) if isinstance(output, Made) else _with_numbers(output, numbers)
