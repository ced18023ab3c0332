"""Samples of ranks: the same on those of a replica, or own ones of ranks that split layers.

Batches of a replica's ranks, which must be the same.

In SageMaker's library the first rank of a replica runs the step function, so what the other ranks have read does not
matter. Here all ranks run it, each with its own inputs. A loader that shuffles without a common seed would give each
stage other samples, without any error. So ranks compare what they have read. If it differs, the first rank sends its
inputs to the others from then on, as if it ran the function alone.

Outputs of this rank's own samples, where the ranks of a tensor-parallel group read samples of their own.

With ``prescaled_batch=False`` a step computes the samples of the whole tensor-parallel group, in the order of the ranks
(:mod:`smp_strategy.tensor_parallel.joint_batch`). Tensors with one entry per sample are cut down to this rank's
samples, and cut into as many microbatches again. Others, such as losses, belong to the samples of all of these ranks.
"""

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from smp_strategy.distributed import watched_collectives as collectives
from smp_strategy.distributed.agreement.same_inputs import digest_of, looks_closely
from smp_strategy.distributed.mesh import ProcessMesh
from smp_strategy.engine.engine import Engine
from smp_strategy.model.samples import find_samples
from smp_strategy.model.trace.pytree import flatten_output
from smp_strategy.pipeline.microbatch import sizes_of

__all__ = ["OwnSamples", "SameBatches", "own_outputs"]


def own_outputs(
    results: Sequence[Any], sizes: Sequence[int], batch: Any, engine: Engine
) -> tuple[Sequence[Any], Sequence[int]]:
    """Results of this rank's samples (``batch``) in those of the joint batch, for each microbatch, and numbers of these
    samples. Collective.
    """
    if engine.config.prescaled_batch or engine.mesh.tp == 1:
        return results, sizes
    own = find_samples(batch).number
    if own is None:
        return results, sizes
    start = engine.mesh.first_sample(own)
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


@final
class OwnSamples:
    """Results and gradients of this rank's own samples, for ``prescaled_batch=False``."""

    def __init__(self, mesh: ProcessMesh) -> None:
        self._mesh = mesh

    def of(self, result: Any, own: int | None, total: int) -> Any:
        """Select the results of this rank's samples. Collective over the tensor-parallel group.

        Args:
            result: result for the samples of all ranks.
            own: number of samples of this rank; ``None``: unknown, ``result`` is returned unchanged.
            total: number of samples of all ranks.
        """
        if own is None:
            return result
        start = self._mesh.tp_rank * own
        if own * self._mesh.tp != total:  # true on all ranks or on none
            start = self._mesh.first_sample(own)
        leaves, structure = flatten_output(result)
        return pytree.tree_unflatten([_rows(leaf, slice(start, start + own), total) for leaf in leaves], structure)

    def averaged(self, gradient: Tensor) -> Tensor:
        """Average the gradients of all ranks' losses. Collective over the tensor-parallel group."""
        summed = gradient.clone()
        collectives.all_reduce(summed, group=self._mesh.tp_group, doing="gradients of outputs").wait()
        return summed / self._mesh.tp


def _rows(leaf: Any, part: slice, total: int) -> Any:
    is_per_sample = isinstance(leaf, Tensor) and leaf.ndim > 0 and len(leaf) == total
    return leaf[part] if is_per_sample else leaf


@final
class SameBatches:
    """Makes the inputs of a step equal on the ranks ``members`` of a replica; calls ``tell`` once if they differ."""

    def __init__(self, members: Sequence[int], group: dist.ProcessGroup, doing: str, tell: Callable[[], None]) -> None:
        self._members, self._group, self._doing, self._tell = members, group, doing, tell
        self._num_calls = 0
        self._sends = False

    def of(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Inputs of the first rank of the replica. Collective over its ranks."""
        if len(self._members) == 1:
            return batch
        self._num_calls += 1
        if not self._sends and self._compares(batch):
            digests = collectives.gather_numbers(digest_of(batch).number, self._doing, self._group)
            if len(set(digests)) > 1:
                self._sends = True
                self._tell()
        return self._sent(batch) if self._sends else batch

    def _compares(self, batch: dict[str, Any]) -> bool:
        # On an accelerator, reading values waits for all work.
        is_cheap = all(value.device.type == "cpu" for value in batch.values() if isinstance(value, Tensor))
        return is_cheap or looks_closely(self._num_calls)

    def _sent(self, batch: dict[str, Any]) -> dict[str, Any]:
        is_first = dist.get_rank() == self._members[0]
        own = {name: value.cpu() for name, value in batch.items() if isinstance(value, Tensor)} if is_first else {}
        found = collectives.tell(own, self._members[0], self._doing, self._group)
        return {name: found[name].to(value.device) if name in found else value for name, value in batch.items()}
