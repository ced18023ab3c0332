"""Ranks that split layers between them and read samples of their own (``prescaled_batch=False``).

A call of the model computes the samples of all of them. To the script each is a process of its own, with its own batch
and its own loss of what the model returns for that. So each gets back its own samples; and where it computes the loss
itself, gradients with respect to all samples are those of all ranks' losses, averaged as gradients of replicas are.

A loss that the model computes is the mean over the samples of all of them, on each: what the mean over the processes
would be.
"""

from typing import Any, final

from torch import Tensor
from torch.utils import _pytree as pytree

from smp_strategy.distributed import watched_collectives as collectives
from smp_strategy.distributed.mesh import ProcessMesh
from smp_strategy.model.trace.pytree import flatten

__all__ = ["OwnSamples"]


@final
class OwnSamples:
    """See the module docstring.

    Args:
        mesh: where the ranks stand.
    """

    def __init__(self, mesh: ProcessMesh) -> None:
        self._mesh = mesh

    def of(self, result: Any, own: int | None, total: int) -> Any:
        """What this rank has asked for of ``result``. Collective over the ranks that split layers.

        Args:
            result: of the samples of all ranks.
            own: how many samples of this rank are among them.
            total: samples of all ranks.
        """
        if own is None:
            return result
        start = self._mesh.tp_rank * own
        if own * self._mesh.tp != total:  # on each rank, if on one
            counts = collectives.gather_numbers(own, "how many samples ranks have", self._mesh.tp_group)
            start = sum(counts[: self._mesh.tp_rank])
        leaves, structure = flatten(result)
        return pytree.tree_unflatten([_rows(leaf, slice(start, start + own), total) for leaf in leaves], structure)

    def averaged(self, gradient: Tensor) -> Tensor:
        """Of the mean of all ranks' losses, given the ``gradient`` of this rank's. Collective over them."""
        summed = gradient.clone()
        collectives.all_reduce(summed, group=self._mesh.tp_group, doing="gradients of outputs").wait()
        return summed / self._mesh.tp


def _rows(leaf: Any, part: slice, total: int) -> Any:
    is_per_sample = isinstance(leaf, Tensor) and leaf.ndim > 0 and len(leaf) == total
    return leaf[part] if is_per_sample else leaf
