"""FLOP and byte counter: costs of a call and of its backward, kernel by kernel, on fake or real tensors.

Backward is derived from forward: the gradient of each factor of a product takes one more product of the same size, a
fused attention kernel does five products in backward for two in forward (it recomputes the scores), and other kernels
read the incoming gradient and their inputs.

A *weight* is a tensor that is computed from parameters alone (also a cast of one, or a result of inputs without
gradient). Only the optimizer needs the gradients of weights; earlier stages wait for all other gradients.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from smp_strategy.model.trace.pytree import leaves_of
from smp_strategy.model.trace.tensor_spec import storage_of
from smp_strategy.model.trace.work import Effort, Efforts
from smp_strategy.model.trace.working_bytes import Kernel

__all__ = ["Product", "KernelTally"]

_aten = torch.ops.aten

_ADDS_TO_A_PRODUCT = frozenset({_aten.addmm, _aten.baddbmm})
_ATTENTIONS = frozenset(
    {
        _aten._scaled_dot_product_efficient_attention,
        _aten._scaled_dot_product_flash_attention,
        _aten._scaled_dot_product_flash_attention_for_cpu,
        _aten._scaled_dot_product_cudnn_attention,
    }
)
_RECURRENT = frozenset({_aten.mkldnn_rnn_layer, _aten._cudnn_rnn})
# Kernels that read only as much of a table as they return.
_LOOKUPS = frozenset({_aten.embedding, _aten.index, _aten.index_select, _aten.gather})
_ALLOCATIONS = frozenset({_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty})


class Product(NamedTuple):
    """A call of a matrix product, a convolution or an attention."""

    results: list[Tensor]
    versions: list[int]
    """Version counters of the results right after the call."""
    effort: Effort
    is_random: bool
    """Whether it draws random numbers. Keeping its results would shift the draws that follow in a recomputation."""

    @property
    def may_be_kept(self) -> bool:
        """Whether the kept results may replace another call."""
        return not self.is_random and [tensor._version for tensor in self.results] == self.versions


@final
class KernelTally:
    """Sum of the costs of kernels.

    Args:
        parameters: Initial weights.
        notes_products: Record the results of products, and the sizes of all results. Only for fake tensors, which it
            keeps alive.

    Attributes:
        efforts: The sum.
        cheap: Part of the forward that is no product.
        products: Recorded products, in order.
        kernels: Recorded kernels, in order.
    """

    def __init__(self, parameters: Iterable[Tensor] = (), *, notes_products: bool = False) -> None:
        self.efforts = Efforts()
        self.cheap = Effort()
        self.products: list[Product] = []
        self.kernels: list[Kernel] = []
        self._notes_products = notes_products
        # By address; the storages are kept alive, so that no other gets the same address.
        self._weights = {storage_of(parameter): parameter.untyped_storage() for parameter in parameters}
        self._kept: list[Any] = []

    def note(self, func: Any, args: Any, kwargs: Any, result: Any, *, is_random: bool = False) -> None:
        """Add a call of ``func``.

        Args:
            func, args, kwargs, result: Operation, its arguments and its result.
            is_random: It has drawn random numbers.
        """
        inputs, outputs = _tensors((args, kwargs)), _tensors(result)
        needing = [tensor for tensor in inputs if tensor.requires_grad] if torch.is_grad_enabled() else []
        if not any(tensor.is_floating_point() or tensor.is_complex() for tensor in outputs):
            needing = []
        weights = [tensor for tensor in needing if storage_of(tensor) in self._weights]
        if needing and len(weights) == len(needing):
            self._weights.update((storage_of(tensor), tensor.untyped_storage()) for tensor in outputs)
        elif needing:  # written to by something that needs other gradients: no weight any more
            for tensor in outputs:
                self._weights.pop(storage_of(tensor), None)
        if not _is_kernel(func, inputs, outputs):
            return
        if self._notes_products:
            self._kept += [tensor.untyped_storage() for tensor in (*inputs, *outputs)]
            gradients = {storage_of(tensor): tensor.nbytes for tensor in needing}
            self.kernels.append(Kernel(_storages(inputs), _storages(outputs), gradients))
        kind = func.overloadpacket
        flops = _flops(kind, args, kwargs, result)
        if flops is None:
            passes = _other_kernel(kind, inputs, outputs, needing, weights)
            self.cheap = self.cheap.plus(passes[0])
        else:
            passes = _product(kind, flops, inputs, outputs, (needing, weights))
            if self._notes_products:
                versions = [tensor._version for tensor in outputs]
                self.products.append(Product(outputs, versions, passes[0], is_random))
        self._add(*passes)

    def _add(self, forward: Effort, input_gradient: Effort, weight_gradient: Effort) -> None:
        new = (forward, input_gradient, weight_gradient)
        self.efforts = Efforts(*(old.plus(effort) for old, effort in zip(self.efforts, new, strict=True)))


def _flops(kind: Any, args: Any, kwargs: Any, result: Any) -> int | None:
    """FLOPs of a product, by PyTorch's formulas and some that it lacks; ``None``: no product."""
    if kind in _ATTENTIONS:
        query, *others = (tensor.shape for tensor in args[:3])
        # Grouped-query attention: every head of the query has products; torch 2.11 has no formula for that.
        key, value = ((batch, query[1], length, width) for batch, _, length, width in others)
        return int(sdpa_flop_count(query, key, value))
    if kind is _aten._grouped_mm:  # every row of the result, or every entry where the groups are summed over
        inner = args[0].size(-1) if result.ndim < 3 or args[0].ndim == 3 else args[0].size(-1) // len(result)
        return 2 * int(result.numel()) * inner
    if kind in _RECURRENT:
        steps = args[0].shape[:-1].numel()
        weights = args[1] if kind is _aten._cudnn_rnn else args[1:3]
        return 2 * steps * sum(weight.numel() for weight in weights if weight.ndim > 1)
    return int(flop_registry[kind](*args, **kwargs, out_val=result)) if kind in flop_registry else None


def _product(
    kind: Any, flops: int, inputs: list[Tensor], outputs: list[Tensor], gradients: tuple[list[Tensor], list[Tensor]]
) -> tuple[Effort, Effort, Effort]:
    moved = sum(map(_nbytes, inputs)) + sum(map(_nbytes, outputs))
    forward = Effort(flops, moved, 0, 1)
    needing, weights = gradients
    is_waited_for = len(needing) > len(weights)
    if kind in _ATTENTIONS:
        backward = Effort(flops * 5 // 2, 2 * moved, 0, 1) if needing else Effort()
        return (forward, backward, Effort()) if is_waited_for else (forward, Effort(), backward)
    if kind in _RECURRENT:
        return forward, forward if is_waited_for else Effort(), forward if weights else Effort()
    addends = _keys([inputs[0]] if kind in _ADDS_TO_A_PRODUCT else [tensor for tensor in inputs if tensor.ndim < 2])
    known = _keys(weights)
    of_weight, of_input = Effort(), Effort()
    for tensor in needing:
        each = Effort(0, 0, _nbytes(outputs[0]), 1) if storage_of(tensor) in addends else forward
        if storage_of(tensor) in known:
            of_weight = of_weight.plus(each)
        else:
            of_input = of_input.plus(each)
    return forward, of_input, of_weight


def _other_kernel(
    kind: Any, inputs: list[Tensor], outputs: list[Tensor], needing: list[Tensor], weights: list[Tensor]
) -> tuple[Effort, Effort, Effort]:
    written = sum(map(_nbytes, outputs))
    read = sum(map(_nbytes, inputs))
    if kind in _LOOKUPS:
        read = written + sum(map(_nbytes, inputs[1:]))
    moved = read + written
    of_input = Effort(0, 0, moved + written, 1) if len(needing) > len(weights) else Effort()
    # The gradient of a table is as large as the table.
    table = sum(map(_nbytes, weights)) if kind in _LOOKUPS else 0
    of_weight = Effort(0, 0, moved + table, 1) if weights else Effort()
    return Effort(0, 0, moved, 1), of_input, of_weight


def _is_kernel(func: Any, inputs: list[Tensor], outputs: list[Tensor]) -> bool:
    """Whether ``func`` launches a kernel: views and uninitialised tensors are free."""
    if func.overloadpacket in _ALLOCATIONS or not outputs:
        return False
    return bool(func._schema.is_mutable) or not _keys(outputs) <= _keys(inputs)


def _nbytes(tensor: Tensor) -> int:
    """Bytes of the elements; an expanded tensor has fewer than its shape says."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    return {storage_of(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}


def _keys(tensors: Iterable[Tensor]) -> set[int]:
    return set(map(storage_of, tensors))


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in leaves_of(tree) if isinstance(leaf, Tensor)]
