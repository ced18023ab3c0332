"""``nn.TransformerEncoder`` whose layers are units, or split: padded positions in evaluation as in a single process.

With ``src_key_padding_mask`` and without gradients, PyTorch's encoder passes a nested tensor from layer to layer, which
lacks the padded positions. At the end it fills them with zeros. Another stage cannot know the sizes of a nested tensor,
and PyTorch itself passes none where weights are of a tensor subclass. So the layers get the padded tensor and the mask
here, and the padded positions become zero afterwards: all positions have the values of a single process.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

__all__ = ["padded_encoders", "zero_padding_of"]

# Each says whether the form of this file applies to an encoder now. While there are some, `forward` is replaced on the
# class: subclasses call it from a `forward` of their own.
_RULES: list[Callable[[nn.TransformerEncoder], bool]] = []
_original = nn.TransformerEncoder.forward


def zero_padding_of(applies: Callable[[nn.TransformerEncoder], bool]) -> Callable[[], None]:
    """Let encoders to which ``applies`` make no nested tensors, but zeros all the same.

    Returns:
        A function that ends this.
    """
    _RULES.append(applies)
    nn.TransformerEncoder.forward = _forward  # type: ignore[method-assign]

    def end() -> None:
        _RULES.remove(applies)
        if not _RULES:
            nn.TransformerEncoder.forward = _original  # type: ignore[method-assign]

    return end


@contextmanager
def padded_encoders(is_glue: Callable[[], bool]) -> Iterator[None]:
    """Context in which encoders that the code above the units calls make no nested tensors."""
    end = zero_padding_of(lambda encoder: getattr(encoder, "use_nested_tensor", False) and is_glue())
    try:
        yield
    finally:
        end()


def _forward(
    self: nn.TransformerEncoder,
    src: Tensor,
    mask: Tensor | None = None,
    src_key_padding_mask: Tensor | None = None,
    is_causal: bool | None = None,
) -> Tensor:
    # Compiled code leaves padding alone, with a check of the mask.
    if src_key_padding_mask is None or mask is not None or torch.compiler.is_compiling():
        return _original(self, src, mask, src_key_padding_mask, is_causal)
    if not any(applies(self) for applies in _RULES) or not _makes_nested(self, src):
        return _original(self, src, mask, src_key_padding_mask, is_causal)
    return _padded(self, src, src_key_padding_mask)


def _makes_nested(encoder: nn.TransformerEncoder, src: Tensor) -> bool:
    """Whether an encoder that may make nested tensors does so in a single process, if the mask pads at the ends."""
    first: Any = encoder.layers[0]
    if not torch.backends.mha.get_fastpath_enabled() or first.training:
        return False
    if src.dim() != 3 or src.is_nested or torch.is_autocast_enabled():
        return False
    if src.device.type not in ("cpu", "cuda", "xpu", torch.utils.backend_registration._privateuse1_backend_name):
        return False
    parts = (first.self_attn, first.self_attn.out_proj, first.norm1, first.norm2, first.linear1, first.linear2)
    used = [src, *(each for part in parts for each in part.parameters(recurse=False))]
    return not (torch.is_grad_enabled() and any(each.requires_grad for each in used))


def _padded(encoder: nn.TransformerEncoder, src: Tensor, padding: Tensor) -> Tensor:
    # All of this is computed, nothing is read: the mask may be on one stage only.
    kept = padding.logical_not()  # as in PyTorch, also for masks of numbers
    if getattr(encoder, "mask_check", True):
        # Padding elsewhere than at the ends stays as it is.
        pads_at_ends = (kept[:, 1:] <= kept[:, :-1]).all()
        zeroed = padding.logical_and(pads_at_ends)
        if padding.dtype != torch.bool:
            padding = padding.masked_fill(zeroed, float("-inf"))
    else:
        # PyTorch counts only.
        padding = zeroed = torch.arange(src.size(1), device=src.device) >= kept.sum(1, keepdim=True)
    output = src
    for layer in encoder.layers:
        output = layer(output, src_mask=None, is_causal=False, src_key_padding_mask=padding)
    output = output.masked_fill(zeroed.unsqueeze(-1), 0.0)
    return output if encoder.norm is None else cast(Tensor, encoder.norm(output))
