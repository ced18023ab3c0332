"""Parallel embeddings by rows or columns, and attention with some of the heads.

With some *rows* (words of the vocabulary) a rank looks up its own and adds zeros for the rest; the sum over the ranks
is the embedding. With some *columns* each rank looks up everything, and the results are concatenated.

Some embeddings of Hugging Face (Gemma's, Bart's) multiply the result by a number, in a ``forward`` of their own. Such a
class is recognised by its name and by the names that its code uses.

Attention with some of the heads: its attention weights appear as those of all heads.

Models return attention weights on request (``output_attentions``), with an entry for each head. They are returned as a
split tensor, which is gathered only if code reads it.
"""

from collections.abc import Mapping
from typing import Any, Self

import torch.nn.functional as F
from torch import Tensor, nn

from smp_strategy.distributed.tensor_group import TensorGroup
from smp_strategy.tensor_parallel.autograd_collectives import add_up, gather
from smp_strategy.tensor_parallel.layers.base import CannotSplit, SplitLayer, check_plain, cut_evenly
from smp_strategy.tensor_parallel.sharded_tensor.tensor import SplitTensor

__all__ = [
    "HiddenParallelEmbedding",
    "ScaledVocabParallelEmbedding",
    "VocabParallelEmbedding",
    "is_scaled_embedding",
    "SomeHeads",
]


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
            CannotSplit: It is another layer, too small, or has an option that needs whole rows in one place.
        """
        layer = _checked(layer)
        if layer.scale_grad_by_freq:
            raise CannotSplit("it scales gradients by the number of a token's uses (`scale_grad_by_freq`)")
        cut = cut_evenly(0, layer.num_embeddings, group)
        return cls._split(layer, group, {"weight": cut}, {"num_embeddings": cut.length_of(group.rank)}, {})

    def forward(self, tokens: Tensor) -> Tensor:
        """Embeddings of ``tokens``, the same on all ranks."""
        (lengths,) = self.cuts["weight"].blocks
        start = sum(lengths[: self.group.rank])
        local = tokens - start
        elsewhere = (local < 0) | (local >= self.num_embeddings)
        # Tokens outside the vocabulary are not masked: `F.embedding` refuses them as in the dense layer.
        elsewhere &= (tokens >= 0) & (tokens < sum(lengths))
        padding = None if self.padding_idx is None else self.padding_idx - start
        if padding is not None and not 0 <= padding < self.num_embeddings:
            padding = None
        found = F.embedding(local.masked_fill_(elsewhere, 0), self.weight, padding)
        return add_up(found.masked_fill_(elsewhere.unsqueeze(-1), 0.0), self.group)


class HiddenParallelEmbedding(_ParallelEmbedding):
    """An embedding with some of the columns.

    Attributes:
        gather_output: Whether the columns of all ranks are gathered, for code that is the same on all.
    """

    gather_output: bool

    @classmethod
    def from_dense(cls, layer: nn.Module, group: TensorGroup, *, gather_output: bool = True) -> Self:
        """Split ``layer``, an ``nn.Embedding``, in place over the ranks of ``group``.

        Raises:
            CannotSplit: It is another layer, too small, or has an option that needs whole rows in one place.
        """
        layer = _checked(layer)
        cut = cut_evenly(1, layer.embedding_dim, group)
        settings = {"gather_output": gather_output}
        return cls._split(layer, group, {"weight": cut}, {"embedding_dim": cut.length_of(group.rank)}, settings)

    def forward(self, tokens: Tensor) -> Tensor:
        """Embeddings of ``tokens``: the same on all ranks if gathered, else this rank's columns."""
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


_ASKED_FOR = {"super", "forward", "embed_scale", "to", "weight", "dtype"}


def is_scaled_embedding(layer: nn.Module) -> bool:
    """Whether ``layer`` is an embedding of Hugging Face that multiplies its result by a number."""
    kind = type(layer)
    if not (isinstance(layer, nn.Embedding) and kind.__module__.startswith("transformers.")):
        return False
    names = set(kind.forward.__code__.co_names)
    return kind.__name__.endswith("ScaledWordEmbedding") and "embed_scale" in names and names <= _ASKED_FOR


class ScaledVocabParallelEmbedding(VocabParallelEmbedding):
    """A scaled embedding with some of the rows."""

    embed_scale: Any

    @classmethod
    def from_dense(cls, layer: nn.Module, group: TensorGroup) -> Self:
        """Split ``layer`` in place over the ranks of ``group``.

        Raises:
            CannotSplit: It is too small.
        """
        assert isinstance(layer, nn.Embedding)
        cut = cut_evenly(0, layer.num_embeddings, group)
        return cls._split(layer, group, {"weight": cut}, {"num_embeddings": cut.length_of(group.rank)}, {})

    def forward(self, tokens: Tensor) -> Tensor:
        """Scaled embeddings of ``tokens``, the same on all ranks."""
        scale = self.embed_scale
        return super().forward(tokens) * (scale.to(self.weight.dtype) if isinstance(scale, Tensor) else scale)


HEADS_DIM = 1


class SomeHeads(SplitLayer):
    """An attention whose projections are split by heads.

    Attributes:
        weights_at: Position of the attention weights [batch, head, query, key] in the result of the dense
            attention.
    """

    weights_at: int

    @classmethod
    def from_dense(cls, layer: nn.Module, group: TensorGroup, sizes: Mapping[str, int], weights_at: int) -> Self:
        """Change ``layer`` in place.

        Args:
            layer: An attention.
            group: Ranks that have the heads.
            sizes: New values of attributes of the layer.
            weights_at: See the class.

        Raises:
            CannotSplit: Its results cannot be changed.
        """
        if "forward" in vars(layer):
            raise CannotSplit(f"the forward of this {type(layer).__name__} has been replaced")
        return cls._split(layer, group, {}, sizes, {"weights_at": weights_at})

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Result of the dense attention, with split attention weights."""
        result = type(self)._dense.forward(self, *args, **kwargs)  # type: ignore[attr-defined]
        at = self.weights_at
        if not isinstance(result, tuple) or len(result) <= at or not isinstance(result[at], Tensor):
            return result
        weights = result[at]
        lengths = [weights.shape[HEADS_DIM]] * self.group.size
        return *result[:at], SplitTensor.from_part(weights, self.group, HEADS_DIM, lengths), *result[at + 1 :]
