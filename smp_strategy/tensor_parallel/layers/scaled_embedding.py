"""Embeddings of Hugging Face that multiply what they look up by a number: Gemma's, Bart's and their kin.

They have a ``forward`` of their own, which does just that; a class is known by its name and by what its code asks for.
"""

from typing import Any, Self

from torch import Tensor, nn

from smp_strategy.tensor_parallel.group import TensorGroup
from smp_strategy.tensor_parallel.layers.base import cut_evenly
from smp_strategy.tensor_parallel.layers.embedding import VocabParallelEmbedding

__all__ = ["ScaledVocabParallelEmbedding", "is_scaled_embedding"]

_ASKED_FOR = {"super", "forward", "embed_scale", "to", "weight", "dtype"}


def is_scaled_embedding(layer: nn.Module) -> bool:
    """Whether ``layer`` looks up and multiplies, and does nothing else."""
    kind = type(layer)
    if not (isinstance(layer, nn.Embedding) and kind.__module__.startswith("transformers.")):
        return False
    names = set(kind.forward.__code__.co_names)
    return kind.__name__.endswith("ScaledWordEmbedding") and "embed_scale" in names and names <= _ASKED_FOR


class ScaledVocabParallelEmbedding(VocabParallelEmbedding):
    """One of those with some of the rows."""

    embed_scale: Any

    @classmethod
    def from_dense(cls, layer: nn.Module, group: TensorGroup) -> Self:
        """Split ``layer`` in place over the ranks of ``group``.

        Raises:
            CannotSplit: it is too small.
        """
        assert isinstance(layer, nn.Embedding)
        cut = cut_evenly(0, layer.num_embeddings, group)
        return cls._split(layer, group, {"weight": cut}, {"num_embeddings": cut.length_of(group.rank)}, {})

    def forward(self, tokens: Tensor) -> Tensor:
        """The same on all ranks."""
        scale = self.embed_scale
        return super().forward(tokens) * (scale.to(self.weight.dtype) if isinstance(scale, Tensor) else scale)
