"""PyTorch's own layers: ``nn.MultiheadAttention`` and the feed-forward parts of its transformer layers.

``nn.MultiheadAttention`` passes its weights to one function that cannot handle parts; so its projections and the
attention itself are computed here, for this rank's heads, as that function computes them. Its output projection is a
row-parallel layer.

``nn.TransformerEncoderLayer`` and its kin have a fast path for inference that reads weights without calling the layers.
PyTorch takes it only if attributes claim equal widths, so split layers deny that.
"""

from collections.abc import Iterator, Mapping
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smp_strategy.distributed.tensor_group import TensorGroup
from smp_strategy.model.shard_layout import Cut
from smp_strategy.tensor_parallel.autograd_collectives import add_up, gather
from smp_strategy.tensor_parallel.layers.base import CannotSplit, SplitLayer, check_plain, cut_evenly
from smp_strategy.tensor_parallel.layers.linear import RowParallelLinear
from smp_strategy.tensor_parallel.plan.plan import LayerBlock, SplitKind
from smp_strategy.tensor_parallel.region import enter
from smp_strategy.tensor_parallel.region_rng import RegionRng

__all__ = ["ParallelMultiheadAttention", "torch_blocks"]

_ACTIVATIONS = (nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh)
_PROJECTIONS = ("q_proj_weight", "k_proj_weight", "v_proj_weight")


def torch_blocks(modules: Mapping[str, nn.Module]) -> Iterator[LayerBlock]:
    """Blocks of PyTorch's own layers in ``modules``, which maps all qualified names."""
    encoder_of = {
        id(layer): name
        for name, module in modules.items()
        if isinstance(module, nn.TransformerEncoder)
        for layer in module.layers
    }
    for name, module in modules.items():
        if isinstance(module, nn.MultiheadAttention):
            how = SplitKind("layer", split_by=ParallelMultiheadAttention.from_dense)
            yield LayerBlock(name, "nn.MultiheadAttention", {name: how}, {"heads": module.num_heads})
        elif isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
            yield _feed_forward(name, module, encoder_of.get(id(module)))


def _feed_forward(name: str, layer: nn.Module, encoder: str | None) -> LayerBlock:
    first, second = (f"{name}.{part}" if name else part for part in ("linear1", "linear2"))
    replaced: list[tuple[str, str, object]] = []
    # Disables the fast path, see the module docstring.
    if isinstance(layer, nn.TransformerEncoderLayer):
        replaced.append((name, "activation_relu_or_gelu", 0))
    if encoder is not None:
        replaced.append((encoder, "use_nested_tensor", False))
    source = "nn.TransformerEncoderLayer" if replaced else "nn.TransformerDecoderLayer"
    block = LayerBlock(first, source, {first: SplitKind("column"), second: SplitKind("row")}, replaced=tuple(replaced))
    home = next(kind for kind in type(layer).__mro__ if kind.__module__ == nn.TransformerEncoderLayer.__module__)
    if any(getattr(type(layer), method) is not getattr(home, method) for method in ("forward", "_ff_block")):
        return block.refused(f"{type(layer).__name__} has a forward of its own")
    if layer.activation not in (F.relu, F.gelu) and not isinstance(layer.activation, _ACTIVATIONS):
        return block.refused(f"its activation {layer.activation!r} may need all features")
    return block


class ParallelMultiheadAttention(SplitLayer):
    """``nn.MultiheadAttention`` with some of the heads."""

    embed_dim: int
    num_heads: int
    head_dim: int
    dropout: float
    batch_first: bool
    add_zero_attn: bool
    in_proj_weight: nn.Parameter | None
    in_proj_bias: nn.Parameter | None
    q_proj_weight: nn.Parameter
    k_proj_weight: nn.Parameter
    v_proj_weight: nn.Parameter
    bias_k: nn.Parameter | None
    bias_v: nn.Parameter | None
    out_proj: RowParallelLinear
    randomness: RegionRng
    _num_own_heads: int
    """Number of this rank's heads. ``num_heads`` stays that of all ranks: code that makes a mask for each head reads
    it.
    """

    @classmethod
    def from_dense(cls, layer: nn.Module, group: TensorGroup) -> Self:
        """Split ``layer`` in place over the ranks of ``group``.

        Raises:
            CannotSplit: It is another layer, or its heads cannot be divided.
        """
        if not isinstance(layer, nn.MultiheadAttention):
            raise CannotSplit(f"{type(layer).__name__} is no nn.MultiheadAttention")
        check_plain(layer, nn.MultiheadAttention, ("in_proj_weight", "in_proj_bias"))
        if layer.num_heads % group.size:
            raise CannotSplit(f"{layer.num_heads} heads cannot be divided over {group.size} ranks")
        granule = layer.head_dim
        one = cut_evenly(0, layer.embed_dim, group, granule=granule)
        three = cut_evenly(0, 3 * layer.embed_dim, group, num_blocks=3, granule=granule)
        cuts = dict.fromkeys(_PROJECTIONS, one)
        cuts |= {"in_proj_weight": three, "in_proj_bias": three}
        cuts |= {name: Cut(2, one.blocks) for name in ("bias_k", "bias_v")}
        cuts = {name: cut for name, cut in cuts.items() if getattr(layer, name) is not None}
        randomness = RegionRng(group)
        RowParallelLinear.from_dense(layer.out_proj, group, granule=granule, randomness=randomness)
        settings = {"randomness": randomness, "_num_own_heads": layer.num_heads // group.size}
        return cls._split(layer, group, cuts, {"_qkv_same_embed_dim": False}, settings)

    def to_dense(self) -> nn.Module:
        """Make the layer dense again, in place; all ranks of the group call it. Gradients are dropped."""
        self.out_proj.to_dense()
        return super().to_dense()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Result of ``nn.MultiheadAttention``."""
        is_batched = query.dim() == 3
        if is_causal and attn_mask is None:
            raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
        if self.training:
            self.randomness.enter(query, self)
        q, k, v = self._projected(query, key, value, is_batched)
        padding = key_padding_mask if is_batched or key_padding_mask is None else key_padding_mask.unsqueeze(0)
        # With the causal hint the mask itself is read only if something else needs it.
        hinted = is_causal and padding is None and not need_weights
        mask = None if hinted else self._mask(attn_mask, padding, q)
        k, v, mask = self._with_more_keys(k, v, mask)
        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores = (q * (1.0 / q.shape[-1]) ** 0.5) @ k.transpose(-2, -1)
            shares = F.softmax(scores if mask is None else scores + mask, dim=-1)
            shares = F.dropout(shares, dropout) if dropout > 0.0 else shares
            attended = shares @ v
            weights = self._weights(shares, average_attn_weights)
        else:
            attended = F.scaled_dot_product_attention(q, k, v, mask, dropout, hinted)
        result = self.out_proj(attended.transpose(1, 2).flatten(2))
        if not is_batched:
            return result.squeeze(0), None if weights is None else weights.squeeze(0)
        return result if self.batch_first else result.transpose(0, 1), weights

    def _projected(self, query: Tensor, key: Tensor, value: Tensor, is_batched: bool) -> list[Tensor]:
        """Queries, keys and values of this rank's heads: [batch, head, position, feature]."""
        packed = self.in_proj_weight
        matrices = packed.chunk(3) if packed is not None else [getattr(self, name) for name in _PROJECTIONS]
        biases = [None] * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        entered = {id(given): enter(given, self.group) for given in (query, key, value)}
        inputs = [entered[id(given)] for given in (query, key, value)]
        found = [F.linear(*each) for each in zip(inputs, matrices, biases, strict=True)]
        if not is_batched:
            found = [each.unsqueeze(0) for each in found]
        elif not self.batch_first:
            found = [each.transpose(0, 1) for each in found]
        return [self._heads(each) for each in found]

    def _heads(self, values: Tensor) -> Tensor:
        return values.unflatten(-1, (self._num_own_heads, self.head_dim)).transpose(1, 2)

    def _mask(self, mask: Tensor | None, padding: Tensor | None, q: Tensor) -> Tensor | None:
        """Sum of both masks, to add to the scores: [batch, head, query, key], with 1 for dims that are shared."""
        found = None
        if mask is not None:
            found = _as_numbers(mask, q)
            if found.dim() == 3:  # for each head
                start = self.group.rank * self._num_own_heads
                found = found.unflatten(0, (q.shape[0], -1))[:, start : start + self._num_own_heads]
        if padding is not None:
            numbers = _as_numbers(padding, q)[:, None, None, :]
            found = numbers if found is None else found + numbers
        return found

    def _with_more_keys(self, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Append the learned key and the zero key, if the layer has them."""
        more = 0
        if self.bias_k is not None and self.bias_v is not None:
            k, v = (
                torch.cat([each, self._heads(bias).expand(len(each), -1, -1, -1)], 2)
                for each, bias in ((k, self.bias_k), (v, self.bias_v))
            )
            more += 1
        if self.add_zero_attn:
            k, v = (torch.cat([each, torch.zeros_like(each[:, :, :1])], 2) for each in (k, v))
            more += 1
        return k, v, mask if mask is None or not more else F.pad(mask, (0, more))

    def _weights(self, shares: Tensor, average: bool) -> Tensor:
        """Attention weights of all heads, the same on all ranks."""
        if average:
            return add_up(shares.mean(1) / self.group.size, self.group)
        return gather(shares, self.group, 1, [self._num_own_heads] * self.group.size)


def _as_numbers(mask: Tensor, q: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=q.dtype).masked_fill_(mask, float("-inf"))
    return mask.to(q.dtype)
