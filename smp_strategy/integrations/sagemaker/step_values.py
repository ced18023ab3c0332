"""Inputs and outputs of a step: how tensors are cut into microbatches, and joined.

Every tensor among the arguments of a function with ``@smp.step`` is cut along dim 0, also inside of containers, unless
its argument is named in ``non_split_inputs``, or in ``input_split_axes`` with another dim. An object with a method
``smp_slice(num_microbatches, microbatch, axis)`` cuts itself. Everything else goes whole to each microbatch.

The engine cuts a dict of tensors along dim 0. So the tensors are taken out of the arguments, with their dim in front,
and put back for each microbatch.

Step output: a tensor of each microbatch, and ways to join them.

The result of a function with ``@smp.step`` keeps its structure: tuples, lists, dicts and other containers stay what
they are, each tensor in them becomes a :class:`StepOutput`, and any other value a list with one item per microbatch.
A container that differs between microbatches (another length, say) is such a value, too.
"""

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from smp_strategy.engine.join_results import by_leaf, opened
from smp_strategy.errors import ConfigError

__all__ = ["StepInputs", "check_names", "StepOutput", "over_microbatches"]


class _Place(NamedTuple):
    """Place of a leaf that is cut."""

    argument: int
    leaf: int
    axis: int


@final
class _Slicer:
    """Object that cuts itself, along a given axis."""

    def __init__(self, inner: Any, axis: int) -> None:
        self._inner = inner
        self._axis = axis

    def smp_slice(self, num_microbatches: int, microbatch: int, axis: int) -> Any:
        """Part of the object."""
        return self._inner.smp_slice(num_microbatches, microbatch, self._axis)


@final
class StepInputs:
    """Arguments of a call of a step. ``batch`` is what is cut, by names that messages show."""

    def __init__(
        self,
        signature: inspect.Signature,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        whole: Collection[str],
        axes: Mapping[str, int],
    ) -> None:
        signature.bind(*args, **kwargs)  # raises the error of Python
        self._num_positional, self._names = len(args), list(kwargs)
        named = [*zip(_positional_names(signature, len(args)), args, strict=True), *kwargs.items()]
        self._flat = [_flattened(value) for _, value in named]
        self.batch: dict[str, Any] = {}
        self._places: dict[str, _Place] = {}
        for number, (name, _) in enumerate(named):
            if name in whole:
                continue
            axis, leaves = axes.get(name, 0), self._flat[number][0]
            for position, leaf in enumerate(leaves):
                if (cut := _cut(leaf, axis)) is not None:
                    key = name if len(leaves) == 1 else f"{name}.{position}"
                    self.batch[key] = cut
                    self._places[key] = _Place(number, position, axis)

    def call(self, function: Callable[..., Any], microbatch: Mapping[str, Any]) -> Any:
        """Call ``function`` with the arguments of a microbatch."""
        flat = [list(leaves) for leaves, _ in self._flat]
        for key, (argument, leaf, axis) in self._places.items():
            value = microbatch[key]
            if isinstance(value, _Slicer):  # the batch is one microbatch, which nobody has cut
                value = value.smp_slice(1, 0, axis)
            is_moved = axis and isinstance(value, Tensor) and value.ndim > axis
            flat[argument][leaf] = value.movedim(0, axis) if is_moved else value
        values = [
            pytree.tree_unflatten(leaves, structure) for leaves, (_, structure) in zip(flat, self._flat, strict=True)
        ]
        positional, named = values[: self._num_positional], values[self._num_positional :]
        return function(*positional, **dict(zip(self._names, named, strict=True)))

    @property
    def leaves(self) -> Iterator[Any]:
        """Everything among the arguments that is no container."""
        return (leaf for leaves, _ in self._flat for leaf in leaves)

    def described(self) -> tuple[Any, ...]:
        """Key of calls that probably take the same path: kinds of the arguments, flags and words among them."""
        return tuple((tuple(map(_described, leaves)), str(structure)) for leaves, structure in self._flat)


def check_names(function: Callable[..., Any], names: Collection[str], option: str) -> None:
    """Refuse names in ``option`` that are no arguments of ``function``."""
    parameters = inspect.signature(function).parameters
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
        return
    if unknown := sorted(set(names) - set(parameters)):
        raise ConfigError(
            f"`{option}` names {', '.join(unknown)}, which `{function.__name__}` has no argument for. It has: "
            f"{', '.join(parameters) or 'none'}."
        )


def _positional_names(signature: inspect.Signature, number: int) -> list[str]:
    def names() -> Iterator[str]:
        for name, parameter in signature.parameters.items():
            if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
                while True:
                    yield name
            yield name

    found = names()
    return [next(found) for _ in range(number)]


def _flattened(value: Any) -> tuple[list[Any], Any]:
    if isinstance(value, set | frozenset) and any(isinstance(item, Tensor) for item in value):
        raise ConfigError(
            "A step got a set of tensors, whose order differs between ranks. Give a list or a tuple instead."
        )
    return opened(value)


def _cut(leaf: Any, axis: int) -> Any:
    """Tensor of a leaf that is cut along dim 0; ``None``: none."""
    if isinstance(leaf, Tensor):
        return leaf.movedim(axis, 0) if axis and leaf.ndim > axis else leaf
    if isinstance(leaf, PackedSequence):
        return leaf
    return _Slicer(leaf, axis) if hasattr(leaf, "smp_slice") else None


def _described(leaf: Any) -> Any:
    if isinstance(leaf, bool | str | type(None)):
        return leaf
    return type(leaf).__qualname__, getattr(leaf, "training", None)


@final
class StepOutput:
    """A tensor of each microbatch of a step, detached, with equal values on all ranks of a replica.

    Args:
        outputs: the tensors.
        sizes: number of samples in each microbatch; ``()``: all are equal.
    """

    def __init__(self, outputs: Sequence[Tensor], sizes: Sequence[int] = ()) -> None:
        self._outputs = list(outputs)
        self._sizes = tuple(sizes)

    @property
    def outputs(self) -> list[Tensor]:
        """The tensors, in the order of the microbatches."""
        return self._outputs

    def reduce_mean(self) -> Tensor:
        """Mean over the microbatches, weighted by their samples if a batch could not be divided evenly."""
        if len(set(self._sizes)) <= 1:
            return self.reduce_sum() / len(self._outputs)
        total = sum(self._sizes)
        return _added([output * (size / total) for output, size in zip(self._outputs, self._sizes, strict=True)])

    def reduce_sum(self) -> Tensor:
        """Sum over the microbatches."""
        return _added(self._outputs)

    def concat(self) -> Tensor:
        """All samples, along dim 0."""
        return torch.cat(self._outputs)

    def stack(self) -> Tensor:
        """The tensors along a new dim 0."""
        return torch.stack(self._outputs)

    def __len__(self) -> int:
        return len(self._outputs)

    def __repr__(self) -> str:
        return f"StepOutput({self._outputs!r})"


def _added(tensors: Sequence[Tensor]) -> Tensor:
    """Sum, in the order of the microbatches."""
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor
    return total


def over_microbatches(results: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Join the results of microbatches: tensors become a :class:`StepOutput` each, other values lists."""

    def join(values: Sequence[Any]) -> Any:
        if all(isinstance(value, Tensor) for value in values):
            return StepOutput(values, sizes)
        return None if all(value is None for value in values) else list(values)

    return by_leaf(results, join)
