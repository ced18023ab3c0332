"""``smp.nn``: layers under SageMaker's names, as ordinary modules. The library splits them like any other.

In reading order::

    attention_layers.py     DistributedLinear, DistributedEmbedding, FusedLayerNorm; DistributedAttentionLayer,
                            FlashAttentionLayer
    transformer_layers.py   DistributedTransformerLayer, -OutputLayer, DistributedTransformer, -LMHead;
                            Hugging Face's models, in which SageMaker's library puts these layers
    huggingface.py          translations of state dicts, which change nothing

Sizes are those of the whole layer. Parameters keep their whole names and shapes in all state dicts.
"""

from smp_strategy.integrations.sagemaker.nn import huggingface
from smp_strategy.integrations.sagemaker.nn.attention_layers import (
    DistributedAttentionLayer,
    DistributedEmbedding,
    DistributedLinear,
    FlashAttentionLayer,
    FusedLayerNorm,
)
from smp_strategy.integrations.sagemaker.nn.transformer_layers import (
    DistributedTransformer,
    DistributedTransformerLayer,
    DistributedTransformerLMHead,
    DistributedTransformerOutputLayer,
)

__all__ = [
    "DistributedAttentionLayer",
    "DistributedEmbedding",
    "DistributedLinear",
    "DistributedTransformer",
    "DistributedTransformerLMHead",
    "DistributedTransformerLayer",
    "DistributedTransformerOutputLayer",
    "FlashAttentionLayer",
    "FusedLayerNorm",
    "huggingface",
]
