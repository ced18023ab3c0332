"""Step output: a tensor of each microbatch, and ways to join them.

The result of a function with ``@smp.step`` keeps its structure: tuples, lists, dicts and other containers stay what
they are, each tensor in them becomes a :class:`StepOutput`, and any other value a list with one item per microbatch.
A container that differs between microbatches (another length, say) is such a value, too.

Outputs of this rank's own samples, where the ranks of a tensor-parallel group read samples of their own.

With ``prescaled_batch=False`` a step computes the samples of the whole tensor-parallel group, in the order of the ranks
(:mod:`smp_strategy.tensor_parallel.joint_batch`). Tensors with one entry per sample are cut down to this rank's
samples, and cut into as many microbatches again. Others, such as losses, belong to the samples of all of these ranks.
"""

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from smp_strategy.distributed import watched_collectives as collectives
from smp_strategy.engine.engine import Engine
from smp_strategy.model.samples import find_samples
from smp_strategy.model.trace.opened_objects import is_opened_value
from smp_strategy.model.trace.pytree import flatten, flatten_output
from smp_strategy.pipeline.microbatch import sizes_of

__all__ = ["StepOutput", "over_microbatches", "own_outputs"]


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
    flat = [flatten(result, _is_size, is_opened_value) for result in results]
    if any(structure != flat[0][1] for _, structure in flat):
        flat = [_opened(result) for result in results]
    structure = flat[0][1]
    if structure.is_leaf() or any(other != structure for _, other in flat):
        return _joined(results, sizes)
    joined = [over_microbatches(leaves, sizes) for leaves in zip(*(leaves for leaves, _ in flat), strict=True)]
    return pytree.tree_unflatten(joined, structure)


def _opened(result: Any) -> tuple[list[Any], Any]:
    """Direct contents of a container."""
    return flatten(result, lambda node: node is not result)


def _joined(values: Sequence[Any], sizes: Sequence[int]) -> Any:
    if all(isinstance(value, Tensor) for value in values):
        return StepOutput(values, sizes)
    return None if all(value is None for value in values) else list(values)


def _is_size(node: Any) -> bool:
    return type(node) is torch.Size


def own_outputs(
    results: Sequence[Any], sizes: Sequence[int], batch: Any, engine: Engine
) -> tuple[Sequence[Any], Sequence[int]]:
    """Results of this rank's samples, for each microbatch, and numbers of these samples. Collective.

    Args:
        results: result of each microbatch of the joint batch.
        sizes: number of samples in each of these.
        batch: what this rank has read.
        engine: engine of the model.
    """
    if engine.config.prescaled_batch or engine.mesh.tp == 1:
        return results, sizes
    own = find_samples(batch).number
    if own is None:
        return results, sizes
    counts = collectives.gather_numbers(own, "how many samples ranks have", engine.mesh.tp_group)
    start = sum(counts[: engine.mesh.tp_rank])
    own_sizes = sizes_of(own, len(sizes))
    if len(own_sizes) != len(sizes):
        return results, sizes
    flat = [flatten_output(result) for result in results]
    if any(structure != flat[0][1] for _, structure in flat):
        return results, sizes
    columns = [
        _own_rows(leaves, sizes, start, own_sizes) for leaves in zip(*(leaves for leaves, _ in flat), strict=True)
    ]
    rows = zip(*columns, strict=True) if columns else [() for _ in results]
    return [pytree.tree_unflatten(list(row), flat[0][1]) for row in rows], own_sizes


def _own_rows(leaves: Sequence[Any], sizes: Sequence[int], start: int, own_sizes: Sequence[int]) -> Sequence[Any]:
    are_per_sample = all(
        isinstance(leaf, Tensor) and leaf.ndim > 0 and len(leaf) == size
        for leaf, size in zip(leaves, sizes, strict=True)
    )
    if not are_per_sample:
        return leaves
    return torch.cat(list(leaves))[start : start + sum(own_sizes)].split(list(own_sizes))
