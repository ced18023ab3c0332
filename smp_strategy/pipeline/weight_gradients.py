"""Deferred weight gradients of matrix products and convolutions ([Note: split backward] in ``split_backward.py``).

Autograd computes the gradients of a product's input and weight in one visit of its node, and frees the saved tensors.
Here the operands of the weight's gradient (the input, and the gradient of the result) are taken from the node during
that visit, in which autograd computes the input's gradient only. The formulas are those of autograd, kernel by kernel,
so the results are bitwise equal.

Only products and convolutions are worth it: biases and scales cost next to nothing, and a norm's kernel computes all of
its gradients at once. An autograd Function that is a product declares it, see :class:`WeightGradientKind`.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from smp_strategy.activations.offload import ReadBack
from smp_strategy.model.weight_gradient_formula import WeightGradientFormula, WeightGradientKind

__all__ = ["can_come_later", "formula_of"]


def can_come_later(node: Any, inputs: Sequence[int]) -> bool:
    """Whether the gradients of these ``inputs`` of ``node`` can be computed after its visit.

    Returns False if the node has hooks, because a hook must see all gradients at once, or if saved tensors are packed
    (by ``checkpoint``), because they can be unpacked only once; offloaded ones can be read repeatedly.
    """
    kind = _kind_of(node)
    if kind is None or kind.weight not in inputs or not {kind.weight, kind.bias}.issuperset(inputs):
        return False
    hooks = [saved.unpack_hook for name in kind.saved for saved in _all_of(getattr(node, name))]
    if not all(hook is None or (isinstance(hook, ReadBack) and hook.can_repeat) for hook in hooks):
        return False
    # Autograd does not list the hooks of a node: the dict behind a hook of our own shows whether there are others.
    handle = node.register_hook(_nothing)
    is_alone = len(handle.hooks_dict_ref()) == 1
    handle.remove()
    return is_alone


def formula_of(node: Any, inputs: Sequence[int]) -> WeightGradientFormula:
    """Function that computes the gradients of ``inputs``, in their order; call this while ``node`` is visited."""
    kind = _kind_of(node)
    assert kind is not None
    return kind.make(node, inputs)


def _kind_of(node: Any) -> WeightGradientKind | None:
    function = getattr(node, "_forward_cls", None)
    return _KINDS.get(type(node).__name__) if function is None else getattr(function, "product", None)


def _all_of(saved: Any) -> tuple[Any, ...]:
    return saved if isinstance(saved, tuple) else (saved,)


def _nothing(*gradients: Any) -> None:
    """A hook that changes nothing."""


def _addmm(node: Any, inputs: Sequence[int]) -> WeightGradientFormula:
    transposed = _is_transposed(node._saved_mat2_sym_sizes, node._saved_mat2_sym_strides)
    weight = partial(_second_factor, node._saved_mat1.detach(), transposed, node._saved_alpha)
    if 0 not in inputs:
        return partial(_each, [weight])
    below, number = node.next_functions[0]
    return partial(_each, [partial(_summand, node._saved_beta, below._input_metadata[number].shape), weight])


def _mm(node: Any, inputs: Sequence[int]) -> WeightGradientFormula:
    transposed = _is_transposed(node._saved_mat2_sym_sizes, node._saved_mat2_sym_strides)
    return partial(_each, [partial(_second_factor, node._saved_self.detach(), transposed, 1)])


def _bmm(node: Any, inputs: Sequence[int]) -> WeightGradientFormula:
    return partial(_each, [partial(_second_batch, node._saved_self.detach())])


def _convolution(node: Any, inputs: Sequence[int]) -> WeightGradientFormula:
    options = (
        *(node._saved_bias_sym_sizes_opt, node._saved_stride, node._saved_padding, node._saved_dilation),
        *(node._saved_transposed, node._saved_output_padding, node._saved_groups),
        [False, 1 in inputs, 2 in inputs],
    )
    return partial(_kernel, node._saved_input.detach(), node._saved_weight.detach(), options, tuple(inputs))


def _each(parts: Sequence[Callable[[Tensor], Tensor]], gradient: Tensor) -> list[Tensor]:
    return [part(gradient) for part in parts]


def _summand(factor: Any, shape: Sequence[int], gradient: Tensor) -> Tensor:
    return _times(gradient, factor).sum_to_size(tuple(shape))


def _is_transposed(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    return strides[0] == 1 and strides[1] == sizes[0]


def _second_factor(first: Tensor, transposed: bool, factor: Any, gradient: Tensor) -> Tensor:
    # As autograd does it: the gradient gets the layout of the factor.
    if transposed and first.layout is gradient.layout is torch.strided:
        return _times(gradient.t().mm(first.conj()).t(), factor)
    return _times(first.t().conj().mm(gradient), factor)


def _second_batch(first: Tensor, gradient: Tensor) -> Tensor:
    return first.transpose(1, 2).conj().bmm(gradient)


def _times(tensor: Tensor, factor: Any) -> Tensor:
    return tensor if factor == 1 else tensor * factor


def _kernel(x: Tensor, weight: Tensor, options: Sequence[Any], inputs: Sequence[int], gradient: Tensor) -> list[Tensor]:
    found = torch.ops.aten.convolution_backward(gradient, x, weight, *options)
    return [found[position] for position in inputs]


# By the node's name: positions of weight and bias among the operation's inputs, saved tensors, and the formula.
_KINDS: Mapping[str, WeightGradientKind] = {
    "AddmmBackward0": WeightGradientKind(2, 0, ("_raw_saved_mat1",), _addmm),
    "MmBackward0": WeightGradientKind(1, None, ("_raw_saved_self",), _mm),
    "BmmBackward0": WeightGradientKind(1, None, ("_raw_saved_self",), _bmm),
    "ConvolutionBackward0": WeightGradientKind(1, 2, ("_raw_saved_input", "_raw_saved_weight"), _convolution),
}
