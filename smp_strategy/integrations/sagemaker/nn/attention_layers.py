"""Attention, linear layer, embedding and layer norm under SageMaker's names.

Masks are tensors of zeros and ones, of which a one is a position that nobody attends to.
"""

import math
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smp_strategy import set_tensor_parallelism
from smp_strategy.errors import ConfigError

__all__ = [
    "DistributedAttentionLayer",
    "FlashAttentionLayer",
    "DistributedEmbedding",
    "DistributedLinear",
    "FusedLayerNorm",
    "initialised",
]


def alibi(num_heads: int, length: int, most: float, like: Tensor) -> Tensor:
    """Linear biases of attention scores (Press et al. 2022), of shape ``[1, heads, 1, keys]``."""
    slopes = 2.0 ** (-most * torch.arange(1, num_heads + 1, device=like.device) / num_heads)
    positions = torch.arange(1 - length, 1, device=like.device)
    return (slopes[:, None] * positions).to(like.dtype)[None, :, None]


class FlashAttentionLayer(nn.Module):
    """Attention over queries, keys and values in one tensor, by PyTorch's fused function.

    Args:
        attention_dropout_prob: dropout of attention weights.
        attention_head_size: size of a head, for the scale; ``None``: that of the input.
        scale_attention_scores: whether to divide scores by the root of that size.
        scale_attn_by_layer_idx, layer_idx: whether to divide scores by the layer's number, from 1 on.
        scale: factor of scores instead of these.
        triton_flash_attention: accepted; PyTorch chooses the kernel.
        use_alibi: whether to add linear biases.
    """

    def __init__(
        self,
        attention_dropout_prob: float = 0.1,
        attention_head_size: int | None = None,
        scale_attention_scores: bool = True,
        scale_attn_by_layer_idx: bool = False,
        layer_idx: int | None = None,
        scale: float | None = None,
        triton_flash_attention: bool = False,
        use_alibi: bool = False,
    ) -> None:
        super().__init__()
        self.attention_dropout_prob = attention_dropout_prob
        self.use_alibi = use_alibi
        self.scale = scale
        if scale is None and (attention_head_size is not None or not scale_attention_scores):
            self.scale = 1.0 if not scale_attention_scores else 1 / math.sqrt(attention_head_size or 1)
        self.divisor = 1.0
        if scale_attn_by_layer_idx and scale is None:
            if layer_idx is None:
                raise ConfigError("`scale_attn_by_layer_idx` needs `layer_idx`, the number of the layer from 0 on.")
            self.divisor = float(layer_idx + 1)

    def forward(self, qkv: Tensor, attn_mask: Tensor | None = None, causal: bool = False) -> Tensor:
        """Attend.

        Args:
            qkv: ``[batch, length, 3, heads, head size]``.
            attn_mask: added to scores; ``None``: nothing is.
            causal: whether positions attend to earlier ones only.

        Returns:
            ``[batch, length, heads, head size]``.
        """
        query, key, value = (part.transpose(1, 2) for part in qkv.unbind(2))
        length = qkv.size(1)
        bias = attn_mask
        if self.use_alibi:
            linear = alibi(query.size(1), length, 8.0, query)
            bias = linear if bias is None else bias + linear
        if causal and bias is not None:
            ahead = torch.ones(length, length, dtype=torch.bool, device=qkv.device).triu(1)
            bias = bias.masked_fill(ahead, float("-inf"))
        scale = (self.scale if self.scale is not None else 1 / math.sqrt(qkv.size(-1))) / self.divisor
        found = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=bias,
            dropout_p=self.attention_dropout_prob if self.training else 0.0,
            is_causal=causal and bias is None,
            scale=scale,
        )
        return found.transpose(1, 2)


class DistributedAttentionLayer(nn.Module):
    """Attention with its projections, dropout, residual and layer norms.

    Args:
        num_attention_heads, attention_head_size, hidden_size: sizes of the whole layer.
        attention_dropout_prob, hidden_dropout_prob: dropout of attention weights, and of the result.
        layernorm_epsilon: of the layer norms.
        initializer_range, use_normal_initialization: deviation of the initial values, if they are normal.
        cross_attention: whether keys and values come from another sequence.
        causal_mask_size: longest sequence whose positions attend to earlier ones only; ``None``: to all.
        pre_layernorm, post_layernorm: layer norms before the projections and after the residual.
        use_alibi, alibi_bias_max: linear biases, and their largest exponent.
    """

    def __init__(  # noqa: PLR0913  # SageMaker's
        self,
        num_attention_heads: int = 32,
        attention_head_size: int = 32,
        hidden_size: int = 1024,
        attention_dropout_prob: float = 0.1,
        hidden_dropout_prob: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        cross_attention: bool = False,
        causal_mask_size: int | None = None,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        use_alibi: bool = False,
        alibi_bias_max: float = 8,
    ) -> None:
        super().__init__()
        self.num_heads, self.head_size = num_attention_heads, attention_head_size
        self.cross_attention, self.is_causal = cross_attention, causal_mask_size is not None
        self.alibi_bias_max = alibi_bias_max if use_alibi else None
        self.attention_dropout_prob = attention_dropout_prob
        inner = num_attention_heads * attention_head_size

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return initialised(nn.Linear(inputs, outputs), initializer_range, normal=use_normal_initialization)

        self.query, self.key, self.value = (linear(hidden_size, inner) for _ in range(3))
        self.dense = linear(inner, hidden_size)
        self.dropout = nn.Dropout(hidden_dropout_prob)
        self.pre_layernorm = nn.LayerNorm(hidden_size, eps=layernorm_epsilon) if pre_layernorm else None
        self.layernorm = nn.LayerNorm(hidden_size, eps=layernorm_epsilon) if post_layernorm else None
        # Biases differ between heads, so ranks could not compute some heads each.
        set_tensor_parallelism(self, not use_alibi)

    def forward(self, inputs: Any) -> Tensor:
        """Attend: ``(hidden, mask)``, or ``(hidden, other, mask)`` with keys and values from another sequence."""
        hidden, mask = inputs[0], inputs[-1]
        normed = hidden if self.pre_layernorm is None else self.pre_layernorm(hidden)
        source = inputs[1] if self.cross_attention else normed
        query, key, value = (
            self._heads(self.query(normed)),
            self._heads(self.key(source)),
            self._heads(self.value(source)),
        )
        found = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=self._bias(mask, query, key),
            dropout_p=self.attention_dropout_prob if self.training else 0.0,
        )
        attended = self.dropout(self.dense(found.transpose(1, 2).flatten(2)))
        added = hidden + attended
        return added if self.layernorm is None else self.layernorm(added)

    def _heads(self, projected: Tensor) -> Tensor:
        return projected.unflatten(2, (self.num_heads, self.head_size)).transpose(1, 2)

    def _bias(self, mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
        bias = None if self.alibi_bias_max is None else alibi(self.num_heads, key.size(2), self.alibi_bias_max, query)
        least = torch.finfo(query.dtype).min
        if mask is not None:
            masked = mask.to(query.dtype) * least
            bias = masked if bias is None else bias + masked
        if self.is_causal and not self.cross_attention:
            ahead = torch.ones(query.size(2), key.size(2), dtype=query.dtype, device=query.device).triu(1) * least
            bias = ahead if bias is None else (bias + ahead).clamp_min(least)
        return bias


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
    """PyTorch's layer norm, which is one kernel already."""

    def __init__(self, normalized_shape: Any, eps: float = 1e-5, elementwise_affine: bool = True) -> None:
        super().__init__(normalized_shape, eps=eps, elementwise_affine=elementwise_affine)


def initialised(layer: nn.Linear, initializer_range: float, *, normal: bool) -> nn.Linear:
    """Draw the initial values of a layer: normal with that deviation, or PyTorch's; returns it."""
    if normal:
        with torch.no_grad():
            nn.init.normal_(layer.weight, std=initializer_range)
            nn.init.zeros_(layer.bias)
    return layer
