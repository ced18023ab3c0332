"""Operations on placed tensors that read values, and those that are refused."""

from typing import Any

import torch
from torch import Tensor

__all__ = ["READS", "REFUSED"]

READS: frozenset[Any] = frozenset(
    {
        *(
            getattr(Tensor, name)
            for name in (
                *("item", "tolist", "numpy", "__array__", "__bool__", "__int__", "__float__", "__complex__"),
                *("__index__", "__repr__", "__format__", "__contains__", "equal", "allclose", "is_nonzero"),
            )
        ),
        *(torch.equal, torch.allclose, torch.is_nonzero),
    }
)


def _setter(name: str) -> Any:
    return getattr(Tensor, name).__set__


REFUSED: dict[Any, str] = {
    Tensor.backward: "Return the loss from the step; under manual optimization call `self.manual_backward(loss)`.",
    Tensor.retain_grad: "Gradients of activations stay on the stage that computes them.",
    Tensor.data_ptr: "A placed tensor has memory on one stage only.",
    Tensor.share_memory_: "A placed tensor has memory on one stage only.",
    Tensor.untyped_storage: "A placed tensor has memory on one stage only.",
    Tensor.__reduce_ex__: "It cannot be pickled. Return it from the step and save what the step returned.",
    Tensor.resize_: "Make a new tensor instead.",
    Tensor.set_: "Make a new tensor instead.",
    _setter("data"): "Use an operation that returns a new tensor.",
    _setter("grad"): "Gradients of activations stay on the stage that computes them.",
    _setter("requires_grad"): "Create the tensor inside a module.",
    torch.autograd.backward: "Return the loss from the step and let the trainer call backward on it.",
    torch.autograd.grad: "Move the computation that needs gradients into an nn.Module that belongs to a unit.",
}
