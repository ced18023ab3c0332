"""Cross-stage shape inference: metadata of a result on stages that do not have the operands' values.

An operation runs once on fake tensors; calls with equal metadata are then answered from a cache. Its key ignores the
values of floats and complex numbers, because they do not change metadata.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from smp_strategy.model.ownership import home_of
from smp_strategy.model.trace.fake_call import draws, fails_again
from smp_strategy.model.trace.pytree import unflatten_call
from smp_strategy.model.trace.tensor_spec import TensorSpec

__all__ = ["Argument", "InferredResult", "CrossStageInference", "spec_of"]

_PLAIN = (bool, int, str, type(None), torch.dtype, torch.device, torch.Size, torch.memory_format, torch.layout)
# Bound of the cache: shapes may change with every call.
MOST_ANSWERS = 1 << 12


@final
@dataclass(frozen=True)
class InferredResult:
    """Inferred result of an operation."""

    leaves: tuple[Any, ...]
    """Flattened: a :class:`TensorSpec` per new tensor, an :class:`Argument` per returned operand, or a constant."""
    structure: Any
    draws: bool
    """Whether it draws random numbers."""


@final
@dataclass(frozen=True)
class Argument:
    """Result that is one of the arguments."""

    number: int


@final
class CrossStageInference:
    """Infers results by metadata, with a cache."""

    def __init__(self) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._known: dict[Any, InferredResult | None] = {}

    def of(self, func: Any, leaves: Sequence[Any], structure: Any) -> InferredResult | None:
        """Result of ``func`` for flattened arguments; ``None`` if it depends on their values."""
        given = [spec_of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        keys = [_key(leaf) for leaf in given]
        if any(key is None for key in keys):
            return self._ask(func, given, structure)
        question = (func, structure, *keys)
        if question not in self._known:
            if len(self._known) >= MOST_ANSWERS:
                self._known.clear()
            self._known[question] = self._ask(func, given, structure)
        return self._known[question]

    def _ask(self, func: Any, given: Sequence[Any], structure: Any) -> InferredResult | None:
        def imitate(leaf: Any) -> Any:
            if not isinstance(leaf, TensorSpec):
                return leaf
            return torch.empty_strided(leaf.size, leaf.stride, dtype=leaf.dtype, device=leaf.device)

        def run() -> tuple[list[Any], list[Any], Any, bool]:
            with self._mode, torch.no_grad(), _Draws() as watched:
                fakes = [imitate(leaf) for leaf in given]
                args, kwargs = unflatten_call(fakes, structure)
                return fakes, *pytree.tree_flatten(func(*args, **kwargs)), watched.any

        try:
            fakes, results, form, is_random = run()
        except Exception as error:  # operations that need values may raise anything
            if not fails_again(run, error):
                raise
            return None
        numbers = {id(fake): number for number, fake in enumerate(fakes) if isinstance(fake, Tensor)}

        def told(leaf: Any) -> Any:
            if id(leaf) in numbers:
                return Argument(numbers[id(leaf)])
            return TensorSpec.of(leaf) if isinstance(leaf, Tensor) else leaf

        return InferredResult(tuple(told(leaf) for leaf in results), form, is_random)


@final
class _Draws(TorchDispatchMode):
    """Detects operations that draw random numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.any = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.any |= draws(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def spec_of(tensor: Tensor) -> TensorSpec:
    """Metadata that ``tensor`` has in its home, without ``requires_grad``."""
    home = home_of(tensor)
    stride = tensor.stride() if home is None or home.is_here else home.stride
    return TensorSpec(tuple(tensor.size()), tuple(stride), tensor.dtype, tensor.device, False)


def _key(leaf: Any) -> Any:
    """Part of an argument that the result depends on; ``None``: unknown."""
    if isinstance(leaf, TensorSpec):
        return leaf
    if isinstance(leaf, slice):
        return slice, leaf.start, leaf.stop, leaf.step
    if isinstance(leaf, (float, complex)):
        return type(leaf)
    return (type(leaf), leaf) if isinstance(leaf, _PLAIN) else None
