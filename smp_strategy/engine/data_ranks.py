"""Collectives between data ranks, as if each data rank were a single process.

The value of a data rank is that of its first rank. The first ranks exchange their values, and each broadcasts the
result to the ranks that read the same samples. So every rank of the world gets the same answer, even if only the main
process contributed (it is a first rank) or if values differ by rank (a clock), and decisions based on it agree. The
cost is one message more than an exchange between all ranks.

Results of several data ranks carry no gradient, as in Accelerate. With a single data rank nothing is exchanged, and a
loss of gathered embeddings trains them as in a single process: each rank's own tensor gets the gradient.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx

from smp_strategy.distributed import watched_collectives as collectives
from smp_strategy.distributed.process_groups import new_group, new_subgroup

__all__ = ["DataGroups"]

_REDUCTIONS = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


@final
class DataGroups:
    """Process groups of data ranks. Construction and methods are collective over all ranks of the world.

    Args:
        data_ranks: global ranks that read the same samples, for each data rank.

    Attributes:
        readers: global ranks that read the same samples as this rank.
    """

    def __init__(self, data_ranks: Sequence[Sequence[int]], doing: str, *, timeout: timedelta | None = None) -> None:
        rank, self._doing = dist.get_rank(), doing
        self._num = len(data_ranks)
        self.readers = tuple(next(ranks for ranks in data_ranks if rank in ranks))
        self._first = self.readers[0]
        self._is_first = rank == self._first
        firsts = [ranks[0] for ranks in data_ranks]
        # A group numbers its ranks in ascending order.
        self._order = [sorted(firsts).index(first) for first in firsts]
        self._between_firsts: Any = None
        self._among_readers: Any = dist.group.WORLD
        if self._num > 1:
            # Torch would wait for other ranks in the making of the group, unwatched and with Python's lock.
            collectives.barrier(self._doing)
            self._between_firsts = new_group(firsts, timeout=timeout)
        if self._num > 1 and len(self.readers) > 1:
            self._among_readers = new_subgroup(data_ranks, timeout)

    @property
    def reading_group(self) -> dist.ProcessGroup:
        """Group of the ranks that read the same samples as this rank, if there are several."""
        return self._among_readers

    def gather(self, tensor: Tensor) -> Tensor:
        """Concatenate the tensors of all data ranks; with a single data rank the result keeps its gradient history.

        Args:
            tensor: same shape and dtype on all ranks; a tensor without dims counts as one of shape (1,).
        """
        if self._num == 1:
            return self._told_with_history(tensor)
        mine = (tensor[None] if tensor.ndim == 0 else tensor).detach().contiguous()
        if self._is_first:
            parts = [torch.empty_like(mine) for _ in range(self._num)]
            collectives.all_gather(parts, mine, group=self._between_firsts, doing=self._doing).wait()
            return self._told(torch.cat([parts[place] for place in self._order]))
        return self._told(mine.new_empty((self._num * len(mine), *mine.shape[1:])))

    def reduce(self, tensor: Tensor, reduction: str) -> Tensor:
        """Sum, mean or maximum over the data ranks, as a new tensor of the same shape and dtype.

        With a single data rank it has the gradient history of ``tensor``.
        """
        if self._num == 1:
            return self._told_with_history(tensor.clone())
        found = tensor.detach().clone()
        if self._is_first:
            collectives.all_reduce(found, _REDUCTIONS[reduction], group=self._between_firsts, doing=self._doing).wait()
            if reduction == "mean":
                found /= self._num
        return self._told(found)

    def gather_objects(self, mine: Any) -> list[Any]:
        box: list[Any] = [mine] * self._num
        if self._num > 1 and self._is_first:
            found = collectives.gather_objects(mine, self._doing, self._between_firsts)
            box = [found[place] for place in self._order]
        if len(self.readers) > 1:
            box = collectives.tell(box, self._first, self._doing, self._among_readers)
        return box

    def _told_with_history(self, tensor: Tensor) -> Tensor:
        if len(self.readers) == 1 or not (tensor.requires_grad and torch.is_grad_enabled()):
            return self._told(tensor)
        told: Tensor = _ReplacedValue.apply(tensor, self._told(tensor.detach()))  # type: ignore[no-untyped-call]
        return told

    def _told(self, tensor: Tensor) -> Tensor:
        """Broadcast the tensor of the first rank to the ranks that read the same samples."""
        if len(self.readers) == 1:
            return tensor
        found = tensor if self._is_first else torch.empty_like(tensor)
        found = found.detach().contiguous()
        collectives.broadcast(found, self._first, group=self._among_readers, doing=self._doing).wait()
        return found


class _ReplacedValue(torch.autograd.Function):
    """Substitute a value for a tensor; the tensor receives its gradient."""

    @staticmethod
    def forward(ctx: FunctionCtx, tensor: Tensor, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
