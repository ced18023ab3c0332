"""Which kernels' results are worth keeping where the rest is computed again: those of products.

Matrix products, convolutions, attention and recurrent layers are nearly all of the work, and their results a part of
what is kept. What stands between them (norms, activations, additions) is cheap to compute again. A kernel that draws
random numbers (attention with dropout) is none of these: left out, it would leave the stream where it is, and the next
one would draw other numbers.
"""

from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from smp_strategy.model.trace.dispatch import draws

__all__ = ["is_product"]

_aten = torch.ops.aten

# Those that PyTorch's table of products lacks.
_OTHERS = frozenset(
    {
        _aten._scaled_dot_product_flash_attention_for_cpu,
        _aten._grouped_mm,
        _aten.mkldnn_rnn_layer,
        _aten._cudnn_rnn,
    }
)


def is_product(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether the kernel ``func`` is a product that comes out the same each time, in memory of its own."""
    kind = func.overloadpacket
    is_one = kind in _OTHERS or kind in flop_registry
    return is_one and not func._schema.is_mutable and not draws(func, args, kwargs)
