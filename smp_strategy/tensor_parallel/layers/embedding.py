"""Embeddings of which each rank has some rows, or some columns.

With some *rows* (words of the vocabulary) a rank looks up what it has and adds zeros for the rest; the sum is what one
embedding finds. With some *columns* each rank looks up everything, and the results stand side by side.
"""

from typing import Self

import torch.nn.functional as F
from torch import Tensor, nn

from smp_strategy.tensor_parallel.autograd_collectives import add_up, gather
from smp_strategy.tensor_parallel.group import TensorGroup
from smp_strategy.tensor_parallel.layers.base import CannotSplit, SplitLayer, check_plain, cut_evenly

__all__ = ["HiddenParallelEmbedding", "VocabParallelEmbedding"]


class _ParallelEmbedding(SplitLayer):
    weight: nn.Parameter
    num_embeddings: int
    embedding_dim: int
    padding_idx: int | None
    scale_grad_by_freq: bool


class VocabParallelEmbedding(_ParallelEmbedding):
    """An embedding with some of the rows."""

    @classmethod
    def from_dense(cls, layer: nn.Module, group: TensorGroup) -> Self:
        """Split ``layer``, an ``nn.Embedding``, in place over the ranks of ``group``.

        Raises:
            CannotSplit: it is another layer, too small, or has an option that needs whole rows in one place.
        """
        layer = _checked(layer)
        if layer.scale_grad_by_freq:
            raise CannotSplit("it scales gradients by the number of a token's uses (`scale_grad_by_freq`)")
        cut = cut_evenly(0, layer.num_embeddings, group)
        return cls._split(layer, group, {"weight": cut}, {"num_embeddings": cut.length_of(group.rank)}, {})

    def forward(self, tokens: Tensor) -> Tensor:
        """The same on all ranks."""
        (lengths,) = self.cuts["weight"].blocks
        start = sum(lengths[: self.group.rank])
        local = tokens - start
        elsewhere = (local < 0) | (local >= self.num_embeddings)
        # Tokens that no rank has are not elsewhere: they are refused as ever.
        elsewhere &= (tokens >= 0) & (tokens < sum(lengths))
        padding = None if self.padding_idx is None else self.padding_idx - start
        if padding is not None and not 0 <= padding < self.num_embeddings:
            padding = None
        found = F.embedding(local.masked_fill_(elsewhere, 0), self.weight, padding)
        return add_up(found.masked_fill_(elsewhere.unsqueeze(-1), 0.0), self.group)


class HiddenParallelEmbedding(_ParallelEmbedding):
    """An embedding with some of the columns.

    Attributes:
        gather_output: whether the result has the columns of all ranks, and all go on alike.
    """

    gather_output: bool

    @classmethod
    def from_dense(cls, layer: nn.Module, group: TensorGroup, *, gather_output: bool = True) -> Self:
        """Split ``layer``, an ``nn.Embedding``, in place over the ranks of ``group``.

        Raises:
            CannotSplit: it is another layer, too small, or has an option that needs whole rows in one place.
        """
        layer = _checked(layer)
        cut = cut_evenly(1, layer.embedding_dim, group)
        settings = {"gather_output": gather_output}
        return cls._split(layer, group, {"weight": cut}, {"embedding_dim": cut.length_of(group.rank)}, settings)

    def forward(self, tokens: Tensor) -> Tensor:
        """The same on all ranks where it is gathered, else this rank's columns."""
        (lengths,) = self.cuts["weight"].blocks
        found = F.embedding(tokens, self.weight, self.padding_idx, scale_grad_by_freq=self.scale_grad_by_freq)
        return found if not self.gather_output else gather(found, self.group, -1, lengths)


def _checked(layer: nn.Module) -> nn.Embedding:
    if not isinstance(layer, nn.Embedding):
        raise CannotSplit(f"{type(layer).__name__} is no embedding")
    check_plain(layer, nn.Embedding, ("weight",))
    if layer.max_norm is not None:
        raise CannotSplit("it rescales rows as they are used (`max_norm`), by the norms of whole rows")
    if layer.sparse:
        raise CannotSplit("its gradients are sparse")
    return layer
