"""Transformers under SageMaker's names.

Layers take and return tuples: ``(hidden, mask)``, with cross-attention ``(hidden, other, mask, other_mask)``. Masks are
tensors of zeros and ones, of which a one is a position that nobody attends to.

Hugging Face's models whose layers SageMaker's library replaces by its own: scripts find them here, too.

Under ``smp.tensor_parallelism`` and ``smp.model_creation(tensor_parallelism=True)`` that library puts a
``DistributedTransformer`` into a model of a family that it knows. Scripts rely on it in three ways, although here the
model keeps its layers, names and values:

1. They read ``model.transformer.seq_layers``, and ``attention`` and ``output`` of each layer. These names lead to the
   model's own layers (``name_layers``). They are plain attributes, so state dicts don't have them.
2. They look for ``FusedLayerNorm`` to except it from weight decay. So that is the class of the model's layer norms.
3. They replace ``PreTrainedModel.init_weights`` by nothing, because the library draws the values of its layers anyway.
   In these contexts it is there again (``own_initialisation``): it also ties weights.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smp_strategy import set_tensor_parallelism
from smp_strategy.engine.module_marks import is_enabled
from smp_strategy.errors import ConfigError
from smp_strategy.integrations.sagemaker.nn.attention_layers import (
    DistributedAttentionLayer,
    DistributedEmbedding,
    FusedLayerNorm,
    initialised,
)

__all__ = [
    "DistributedTransformer",
    "DistributedTransformerLMHead",
    "DistributedTransformerLayer",
    "DistributedTransformerOutputLayer",
    "name_layers",
    "own_initialisation",
]


_ACTIVATIONS: Final[dict[str, Callable[[Tensor], Tensor]]] = {"gelu": F.gelu, "relu": F.relu}


class DistributedTransformerOutputLayer(nn.Module):
    """The feed-forward part of a transformer layer, with dropout, residual and layer norms.

    Args:
        hidden_size, intermediate_size: sizes of the whole layer.
        hidden_dropout_prob: dropout of the result.
        activation: ``gelu`` or ``relu``.
        layernorm_epsilon: of the layer norms.
        initializer_range, use_normal_initialization: deviation of the initial values, if they are normal.
        pre_layernorm, post_layernorm: layer norms before the first layer and after the residual.
        fp32_residual_addition: whether to add the residual in float32.
    """

    def __init__(  # noqa: PLR0913  # SageMaker's
        self,
        hidden_size: int = 1024,
        intermediate_size: int = 4096,
        hidden_dropout_prob: float = 0.1,
        activation: str = "gelu",
        layernorm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        fp32_residual_addition: bool = False,
    ) -> None:
        super().__init__()
        if activation not in _ACTIVATIONS:
            raise ConfigError(f"`activation` must be gelu or relu, but is {activation!r}.")
        self.activation = activation
        self.fp32_residual_addition = fp32_residual_addition
        first, second = nn.Linear(hidden_size, intermediate_size), nn.Linear(intermediate_size, hidden_size)
        self.dense1 = initialised(first, initializer_range, normal=use_normal_initialization)
        self.dense2 = initialised(second, initializer_range, normal=use_normal_initialization)
        self.dropout = nn.Dropout(hidden_dropout_prob)
        self.pre_layernorm = nn.LayerNorm(hidden_size, eps=layernorm_epsilon) if pre_layernorm else None
        self.layernorm = nn.LayerNorm(hidden_size, eps=layernorm_epsilon) if post_layernorm else None
        set_tensor_parallelism(self)

    def forward(self, inputs: Tensor) -> Tensor:
        """Compute the layer."""
        normed = inputs if self.pre_layernorm is None else self.pre_layernorm(inputs)
        found = self.dropout(self.dense2(_ACTIVATIONS[self.activation](self.dense1(normed))))
        added = (inputs.float() + found.float()).to(inputs.dtype) if self.fp32_residual_addition else inputs + found
        return added if self.layernorm is None else self.layernorm(added)


class DistributedTransformerLayer(nn.Module):
    """A transformer layer.

    Args:
        num_attention_heads, attention_head_size, hidden_size, intermediate_size: sizes of the whole layer.
        attention_dropout_prob, hidden_dropout_prob: dropout of attention weights, and of results.
        activation: ``gelu`` or ``relu``.
        layernorm_epsilon: of the layer norms.
        initializer_range, use_normal_initialization: deviation of the initial values, if they are normal.
        causal_mask_size: longest sequence whose positions attend to earlier ones only; ``None``: to all.
        add_cross_attention: whether there is attention to another sequence.
        pre_layernorm, post_layernorm: layer norms before each part and after each residual.
        use_alibi, alibi_bias_max: linear biases, and their largest exponent.
    """

    def __init__(  # noqa: PLR0913  # SageMaker's
        self,
        num_attention_heads: int = 32,
        attention_head_size: int = 32,
        hidden_size: int = 1024,
        intermediate_size: int = 4096,
        attention_dropout_prob: float = 0.1,
        hidden_dropout_prob: float = 0.1,
        activation: str = "gelu",
        layernorm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        causal_mask_size: int | None = None,
        add_cross_attention: bool = False,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        use_alibi: bool = False,
        alibi_bias_max: float = 8,
    ) -> None:
        super().__init__()
        shared: dict[str, Any] = {
            "hidden_size": hidden_size,
            "hidden_dropout_prob": hidden_dropout_prob,
            "layernorm_epsilon": layernorm_epsilon,
            "initializer_range": initializer_range,
            "use_normal_initialization": use_normal_initialization,
            "pre_layernorm": pre_layernorm,
            "post_layernorm": post_layernorm,
        }
        heads: dict[str, Any] = {
            "num_attention_heads": num_attention_heads,
            "attention_head_size": attention_head_size,
            "attention_dropout_prob": attention_dropout_prob,
            "use_alibi": use_alibi,
            "alibi_bias_max": alibi_bias_max,
        }
        self.attention = DistributedAttentionLayer(**heads, **shared, causal_mask_size=causal_mask_size)
        self.crossattention = None
        if add_cross_attention:
            self.crossattention = DistributedAttentionLayer(**heads, **shared, cross_attention=True)
        self.output = DistributedTransformerOutputLayer(
            **shared, intermediate_size=intermediate_size, activation=activation
        )

    def forward(self, inputs: Any) -> Any:
        """Compute the layer; the other entries of the tuple are returned as they are."""
        if self.crossattention is None:
            hidden, mask = inputs
            return self.output(self.attention((hidden, mask))), mask
        hidden, other, mask, other_mask = inputs
        hidden = self.crossattention((self.attention((hidden, mask)), other, other_mask))
        return self.output(hidden), other, mask, other_mask


class DistributedTransformer(nn.Module):
    """A sequence of transformer layers.

    Args:
        num_layers: number of layers.
        options: those of :class:`DistributedTransformerLayer`.
    """

    def __init__(self, num_layers: int = 12, **options: Any) -> None:
        super().__init__()
        self.seq_layers = nn.Sequential(*(DistributedTransformerLayer(**options) for _ in range(num_layers)))

    def forward(self, inputs: Any) -> Any:
        """Compute all layers."""
        return self.seq_layers(inputs)


class DistributedTransformerLMHead(nn.Module):
    """A language model: embeddings, a transformer, and a head that is tied to the embedding of words.

    Args:
        num_layers, num_attention_heads, attention_head_size, hidden_size, intermediate_size: sizes.
        vocab_size, num_positions, num_token_types: entries of the embeddings; no token types: no embedding of them.
        embedding_dropout_prob: dropout of the embeddings.
        add_lm_head: whether there is a head; otherwise hidden states are returned.
        initializer_range: deviation of the initial values.
        layernorm_epsilon, pre_layernorm, post_layernorm: layer norms; with ``pre_layernorm`` one at the end, too.
        options: further ones of :class:`DistributedTransformerLayer`.
    """

    def __init__(  # noqa: PLR0913  # SageMaker's
        self,
        num_layers: int = 12,
        num_attention_heads: int = 32,
        attention_head_size: int = 32,
        hidden_size: int = 1024,
        intermediate_size: int = 4096,
        vocab_size: int = 30522,
        num_positions: int = 1024,
        attention_dropout_prob: float = 0.1,
        hidden_dropout_prob: float = 0.1,
        activation: str = "gelu",
        layernorm_epsilon: float = 1e-5,
        num_token_types: int = 0,
        causal_mask_size: int | None = None,
        add_cross_attention: bool = False,
        add_lm_head: bool = True,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        embedding_dropout_prob: float = 0.1,
        use_alibi: bool = False,
        alibi_bias_max: float = 8,
    ) -> None:
        super().__init__()
        self.word_embedding = DistributedEmbedding(vocab_size, hidden_size, initializer_range=initializer_range)
        self.position_embedding = nn.Embedding(num_positions, hidden_size) if not use_alibi else None
        self.token_type_embedding = nn.Embedding(num_token_types, hidden_size) if num_token_types else None
        self.dropout = nn.Dropout(embedding_dropout_prob)
        self.transformer = DistributedTransformer(
            num_layers,
            num_attention_heads=num_attention_heads,
            attention_head_size=attention_head_size,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            attention_dropout_prob=attention_dropout_prob,
            hidden_dropout_prob=hidden_dropout_prob,
            activation=activation,
            layernorm_epsilon=layernorm_epsilon,
            initializer_range=initializer_range,
            use_normal_initialization=use_normal_initialization,
            causal_mask_size=causal_mask_size,
            add_cross_attention=add_cross_attention,
            pre_layernorm=pre_layernorm,
            post_layernorm=post_layernorm,
            use_alibi=use_alibi,
            alibi_bias_max=alibi_bias_max,
        )
        self.layernorm = nn.LayerNorm(hidden_size, eps=layernorm_epsilon) if pre_layernorm else None
        self.lm_head = None
        if add_lm_head:
            self.lm_head = nn.Linear(hidden_size, vocab_size, bias=False)
            self.lm_head.weight = self.word_embedding.weight
            set_tensor_parallelism(self.lm_head)

    def forward(self, inputs: Any) -> Any:
        """Compute logits, or the loss if there are labels.

        Args:
            inputs: ``(input_ids, attention_mask, token_type_ids, position_ids)``, and ``labels`` if there are any;
                with cross-attention the other sequence and its mask at the end.
        """
        given = list(inputs)
        ids, mask, types, positions = given[:4]
        rest = given[4:]
        hidden = self.word_embedding(ids)
        if self.position_embedding is not None:
            if positions is None:
                positions = torch.arange(ids.size(1), device=ids.device)[None]
            hidden = hidden + self.position_embedding(positions)
        if self.token_type_embedding is not None and types is not None:
            hidden = hidden + self.token_type_embedding(types)
        wide = None if mask is None else mask[:, None, None, :]
        state: Any = (self.dropout(hidden), wide)
        if len(rest) > 1:
            other, other_mask = rest[-2:]
            state = (state[0], other, wide, None if other_mask is None else other_mask[:, None, None, :])
            rest = rest[:-2]
        hidden = self.transformer(state)[0]
        hidden = hidden if self.layernorm is None else self.layernorm(hidden)
        if self.lm_head is None:
            return hidden
        logits = self.lm_head(hidden)
        if not rest or rest[0] is None:
            return logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), rest[0][:, 1:].flatten()), logits


class LayerPlaces(NamedTuple):
    """Where a family has its layers: module below the base model, list of layers, and the parts of each."""

    stack: str
    layers: str
    attention: str
    output: str


_FAMILIES: Final = {
    "gpt2": LayerPlaces("", "h", "attn", "mlp"),
    "gptj": LayerPlaces("", "h", "attn", "mlp"),
    "gpt_neo": LayerPlaces("", "h", "attn", "mlp"),
    "gpt_neox": LayerPlaces("", "layers", "attention", "mlp"),
    "bert": LayerPlaces("encoder", "layer", "attention", "output"),
    "roberta": LayerPlaces("encoder", "layer", "attention", "output"),
}


def name_layers(root: nn.Module) -> None:
    """Give SageMaker's names to layers of the models in ``root`` that were created to be split."""
    for model in root.modules():
        names = _FAMILIES.get(getattr(getattr(model, "config", None), "model_type", None) or "")
        base = getattr(model, "base_model", None)
        if names is None or base is None or not is_enabled(model):
            continue
        stack = base.get_submodule(names.stack)
        layers = getattr(stack, names.layers)
        _name(stack, "seq_layers", layers)
        if names.stack == "":
            _name(model, "transformer", base)
        for layer in layers:
            _name(layer, "attention", getattr(layer, names.attention))
            _name(layer, "output", getattr(layer, names.output))
        for part in model.modules():
            if type(part) is nn.LayerNorm:
                part.__class__ = FusedLayerNorm


def _name(module: nn.Module, name: str, part: nn.Module) -> None:
    if module is not part and name not in module._modules:
        vars(module)[name] = part  # not `setattr`, which would register it as a second child


@contextmanager
def own_initialisation() -> Iterator[None]:
    """Context in which Hugging Face's models draw and tie their weights, also if a script has switched that off."""
    loaded = sys.modules.get("transformers.modeling_utils")
    kind: Any = None if loaded is None else loaded.PreTrainedModel
    if kind is None or kind.init_weights.__module__ == kind.__module__:
        yield
        return
    switched_off = kind.init_weights
    kind.init_weights = _init_weights
    try:
        yield
    finally:
        kind.init_weights = switched_off


def _init_weights(model: Any) -> None:
    """What ``PreTrainedModel.init_weights`` does."""
    if not any(parameter.is_meta for parameter in model.parameters()):
        model.initialize_weights()
    model.tie_weights(recompute_mapping=False)
