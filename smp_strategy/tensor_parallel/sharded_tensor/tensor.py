"""``SplitTensor``: a tensor of which each rank has a part, and which code uses as if it were whole.

Logits of a split vocabulary, or the residual stream under sequence parallelism, should stay in parts while code written
for whole tensors keeps working: models, losses, metrics. A :class:`SplitTensor` has the sizes of the whole tensor, and
intercepts its operations:

* metadata are those of the whole tensor;
* operations that work on each part by itself give split tensors again: elementwise ones, with broadcasting (whole
  operands are cut likewise, or get their gradients summed), and those with a rule in
  :mod:`~smp_strategy.tensor_parallel.sharded_tensor.shapes`;
* some operations exchange less than the whole: cross-entropy, ``argmax``, sums;
* for all others the parts are gathered first: slower, but right.

So all ranks of the group must execute the same operations, printing included.

The autograd graph is that of the parts. A border node makes the split tensor itself a part of the graph, too, for code
that bypasses Python (custom autograd Functions, hooks of modules, backward itself); gradients that arrive there may be
split or whole.
"""

from collections.abc import Callable, Sequence
from typing import Any, Self, final

import torch
from torch import Tensor

from smp_strategy.distributed.tensor_group import TensorGroup
from smp_strategy.distributed.torch_private import plain_functions
from smp_strategy.model.trace.tensor_spec import METADATA
from smp_strategy.tensor_parallel import autograd_collectives as functions
from smp_strategy.tensor_parallel.sharded_tensor.operations import operate
from smp_strategy.tensor_parallel.sharded_tensor.parts import Along, InParts, part_of

__all__ = ["SplitTensor", "even_lengths"]

# Attributes of a tensor's memory or graph, taken from the part.
_OF_PART = frozenset({"data_ptr", "untyped_storage", "is_shared", "is_pinned", "_is_view", "_version", "retains_grad"})
# Attributes that PyTorch itself keeps for a tensor of the graph.
_OF_ITSELF = frozenset({"_backward_hooks", "_post_accumulate_grad_hooks", "output_nr", "_base", "_cdata"})


@final
class SplitTensor(InParts):
    """A tensor in parts. Created by :meth:`from_part` and :meth:`from_whole`."""

    @classmethod
    def from_part(cls, part: Tensor, group: TensorGroup, dim: int, lengths: Sequence[int]) -> Self:
        """The tensor of which this rank has ``part``.

        Args:
            part: This rank's part, which gradients flow back to.
            group: Ranks that have the parts.
            dim: Dim along which the parts are concatenated.
            lengths: Lengths of the ranks' parts along it.
        """
        return cls.of(part, Along(group, dim % part.dim(), tuple(lengths)))

    @classmethod
    def from_whole(cls, whole: Tensor, group: TensorGroup, dim: int, lengths: Sequence[int] | None = None) -> Self:
        """``whole``, of which each rank keeps its part.

        Args:
            whole: The same tensor on all ranks.
            group: Ranks that get the parts.
            dim: Dim that is cut.
            lengths: Lengths of the parts along it; ``None``: as equal as possible. Some are zero if there are too
                few elements.
        """
        dim %= whole.dim()
        along = Along(group, dim, tuple(lengths or even_lengths(whole.shape[dim], group.size)))
        return cls.of(functions.split(whole, *along), along)

    @classmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = _name(func)
        if func in METADATA or name.removeprefix("set ") in _OF_ITSELF:
            with plain_functions():
                return func(*args, **kwargs)
        if name in _OF_PART:
            return func(args[0].part, *args[1:], **kwargs)
        if func is torch.autograd.backward:
            return _backward(*args, **kwargs)
        if func is torch.autograd.grad:
            return _grad(*args, **kwargs)
        return operate(name, func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # Calls that bypass `__torch_function__`. Gradients are recorded above, for the tensor as a whole.
        with torch.no_grad():
            return operate(func._schema.name.split("::")[1], func, args, kwargs or {})

    def backward(self, gradient: Tensor | None = None, *args: Any, **kwargs: Any) -> None:
        torch.autograd.backward(self, gradient, *args, **kwargs)

    def register_hook(self, hook: Callable[[Tensor], Any]) -> Any:
        """As in torch; the gradient that ``hook`` gets, and may return, is split like this tensor."""
        along = self.along

        def of_part(gradient: Tensor) -> Tensor | None:
            changed = hook(SplitTensor.of(gradient, along))
            return None if changed is None else part_of(changed, along)

        return self.part.register_hook(of_part)

    def retain_grad(self) -> None:
        self.part.retain_grad()

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        return self.begin(requires_grad)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        memo[id(self)] = made = SplitTensor.of(self.part.__deepcopy__(memo), self.along)
        return made

    @property
    def requires_grad(self) -> bool:
        return self.part.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.begin(value)

    @property
    def grad_fn(self) -> Any:  # type: ignore[override]
        return None if self.part.is_leaf else self.node

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        return self.part.is_leaf

    @property
    def grad(self) -> Tensor | None:
        """As in torch; split like this tensor."""
        gradient = self.part.grad
        return None if gradient is None else SplitTensor.of(gradient, self.along)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self.part.grad = None if value is None else part_of(value, self.along)

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        return SplitTensor.of(self.part.data, self.along)


def even_lengths(length: int, size: int) -> list[int]:
    """``length`` divided among ``size`` ranks as equally as possible; the first ones get more."""
    return [length // size + (rank < length % size) for rank in range(size)]


def _backward(tensors: Any, grad_tensors: Any = None, *args: Any, inputs: Any = None, **kwargs: Any) -> None:
    outputs, gradients = _parts_of(tensors, grad_tensors)
    if inputs is not None:
        kwargs["inputs"] = [each.part if isinstance(each, InParts) else each for each in _listed(inputs)]
    torch.autograd.backward(outputs, gradients, *args, **kwargs)


def _grad(outputs: Any, inputs: Any, grad_outputs: Any = None, *args: Any, **kwargs: Any) -> Any:
    given = _listed(inputs)
    roots, gradients = _parts_of(outputs, grad_outputs)
    parts = [each.part if isinstance(each, InParts) else each for each in given]
    found = torch.autograd.grad(roots, parts, gradients, *args, **kwargs)
    return tuple(
        SplitTensor.of(gradient, each.along) if isinstance(each, InParts) and gradient is not None else gradient
        for each, gradient in zip(given, found, strict=True)
    )


def _parts_of(tensors: Any, gradients: Any) -> tuple[list[Any], list[Any] | None]:
    """Roots and gradients of a backward, as parts."""
    roots = _listed(tensors)
    parts = [each.part if isinstance(each, InParts) else each for each in roots]
    if gradients is None:
        if any(isinstance(each, InParts) and each.numel() != 1 for each in roots):
            raise RuntimeError("grad can be implicitly created only for scalar outputs")
        return parts, None
    starts = [
        part_of(gradient, root.along) if isinstance(root, InParts) and gradient is not None else gradient
        for root, gradient in zip(roots, _listed(gradients), strict=True)
    ]
    return parts, starts


def _listed(tensors: Any) -> list[Any]:
    return list(tensors) if isinstance(tensors, Sequence) else [tensors]


def _name(func: Callable[..., Any]) -> str:
    name = getattr(func, "__name__", str(func))
    if name not in ("__get__", "__set__"):
        return name
    # A property of Tensor, such as `T`.
    attribute = str(getattr(getattr(func, "__self__", None), "__name__", name))
    return attribute if name == "__get__" else f"set {attribute}"
