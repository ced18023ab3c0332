"""Step output: a tensor of each microbatch, and ways to join them.

What a function with ``@smp.step`` returns keeps its structure: each tensor in it becomes a :class:`StepOutput`, and any
other value a list with one item per microbatch.
"""

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from smp_strategy.model.trace.opened_objects import is_opened_value
from smp_strategy.model.trace.pytree import flatten, flatten_output

__all__ = ["StepOutput", "over_microbatches"]


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
    """Join the results of microbatches: tensors become a :class:`StepOutput` each, other values lists.

    Args:
        results: result of each microbatch.
        sizes: number of samples in each.
    """
    if all(result is None for result in results):
        return None
    flat = [_flattened(result) for result in results]
    structure = flat[0][1]
    if any(other != structure for _, other in flat):
        return list(results)
    joined = [_joined(leaves, sizes) for leaves in zip(*(leaves for leaves, _ in flat), strict=True)]
    return pytree.tree_unflatten(joined, structure)


def _flattened(result: Any) -> tuple[list[Any], Any]:
    """Leaves of a result: tensors, and values without any tensor, which may be containers."""
    if _has_no_tensor(result):
        return pytree.tree_flatten(result, lambda node: True)
    if type(result) in (tuple, list, dict):
        return flatten(result, _has_no_tensor, is_opened_value)
    return flatten_output(result)


def _has_no_tensor(value: Any) -> bool:
    return not any(isinstance(leaf, Tensor) for leaf in flatten_output(value)[0])


def _joined(leaves: Sequence[Any], sizes: Sequence[int]) -> Any:
    if all(isinstance(leaf, Tensor) for leaf in leaves):
        return StepOutput(leaves, sizes)
    return list(leaves)
