"""Linear layer, embedding and layer norm under SageMaker's names."""

from typing import Any, Final

import torch
from torch import Tensor, nn

from smp_strategy.tensor_parallel.plan.annotations import set_tensor_parallelism

__all__ = ["DistributedEmbedding", "DistributedLinear", "FusedLayerNorm", "initialised"]

_RANGE: Final = 0.02


class DistributedLinear(nn.Linear):
    """A linear layer whose split is enabled.

    Args:
        in_features, out_features: sizes of the whole layer.
        bias: whether there is a bias.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__(in_features, out_features, bias)
        set_tensor_parallelism(self)


class DistributedEmbedding(nn.Embedding):
    """An embedding whose split is enabled.

    Args:
        num_embeddings, embedding_dim: sizes of the whole table.
        padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse, _weight: as of ``nn.Embedding``.
        initializer_range: standard deviation of the initial values.
        _skip_allgather, _skip_scatter_and_merge: accepted; they are about SageMaker's messages.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: Tensor | None = None,
        initializer_range: float = _RANGE,
        _skip_allgather: bool = False,
        _skip_scatter_and_merge: bool = False,
    ) -> None:
        self._range = initializer_range
        super().__init__(
            num_embeddings, embedding_dim, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse, _weight
        )
        set_tensor_parallelism(self)

    def reset_parameters(self) -> None:
        """Draw the initial values."""
        nn.init.normal_(self.weight, std=self._range)
        self._fill_padding_idx_with_zero()


class FusedLayerNorm(nn.LayerNorm):
    """PyTorch's layer norm, which is one kernel already.

    Args:
        normalized_shape, eps, elementwise_affine: as of ``nn.LayerNorm``.
    """

    def __init__(self, normalized_shape: Any, eps: float = 1e-5, elementwise_affine: bool = True) -> None:
        super().__init__(normalized_shape, eps=eps, elementwise_affine=elementwise_affine)


def initialised(layer: nn.Linear, initializer_range: float, *, normal: bool) -> nn.Linear:
    """Draw the initial values of a layer: normal with that deviation, or PyTorch's; returns it."""
    if normal:
        with torch.no_grad():
            nn.init.normal_(layer.weight, std=initializer_range)
            nn.init.zeros_(layer.bias)
    return layer
