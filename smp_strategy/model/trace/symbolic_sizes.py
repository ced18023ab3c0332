"""Symbolic sizes: one dry run of a call for all sizes, by PyTorch's symbolic shapes (``torch.fx.experimental``).

A symbol stands for each number by which two calls differ. Sizes that are computed from it are expressions, and each
branch of Python code that looks at one leaves a *guard*, a condition under which other numbers take the same branch.

This module alone uses the private parts of PyTorch's symbolic shapes.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
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

from smp_strategy.model.trace.call_sizes import numbers_of, with_numbers
from smp_strategy.model.trace.tensor_spec import TensorSpec

__all__ = ["NoFormulaError", "SymbolicSizes"]

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
            return with_numbers(now, iter([self._number(*pair) for pair in pairs]))
        sizes = [self._number(*pair) for pair in zip(before.size, now.size, strict=True)]
        return with_numbers(now, iter([*sizes, *self._strides(before, now, sizes)]))

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
