"""Linear layers of which each rank has some outputs, or some inputs.

A *column-parallel* layer has some of the outputs: it reads a whole tensor, and each rank goes on with outputs of its
own. A *row-parallel* layer has some of the inputs: what the ranks compute is added up, and all go on with the sum. A
column-parallel layer, anything that treats each column alike, and a row-parallel layer together cost one sum in forward
and one in backward, both of the size of a whole activation, which is the least.

In backward the sum is that of the gradient of the column-parallel layer's input. The gradient of its weight does not
need it, and is computed while the sum is under way (:class:`_Columns`). Where several column-parallel layers read one
tensor, that comes second: they share one sum (:mod:`~smp_strategy.tensor_parallel.boundary`).

Besides ``nn.Linear`` there is the linear layer of GPT-2 as Hugging Face writes it, with its weight transposed.
"""

from typing import Any, NamedTuple, Self, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smp_strategy.tensor_parallel.boundary import as_computed, enter, leave
from smp_strategy.tensor_parallel.cut import Cut
from smp_strategy.tensor_parallel.functions import add_up, copy, gather, split
from smp_strategy.tensor_parallel.group import TensorGroup
from smp_strategy.tensor_parallel.randomness import SplitRandomness
from smp_strategy.tensor_parallel.split_layer import CannotSplit, SplitLayer, cut_evenly

__all__ = ["ColumnParallelLinear", "RowParallelLinear"]


class _Form(NamedTuple):
    """How a dense layer has its weight."""

    out_dim: int
    """The dim of the outputs; the inputs have the other one."""
    outputs: str
    """The attribute with their number."""
    inputs: str


class _ParallelLinear(SplitLayer):
    weight: nn.Parameter
    bias: nn.Parameter | None
    randomness: SplitRandomness | None
    _is_transposed: bool

    @classmethod
    def _form(cls, layer: nn.Module) -> _Form:
        if isinstance(layer, nn.Linear):
            cls._check(layer, nn.Linear.forward)
            return _Form(0, "out_features", "in_features")
        kind = next((kind for kind in type(layer).__mro__ if _is_transposed_linear(kind)), None)
        if kind is None:
            raise CannotSplit(f"{type(layer).__name__} is no linear layer")
        cls._check(layer, kind.forward)  # type: ignore[attr-defined]
        return _Form(1, "nf", "nx")

    def _matrix(self) -> Tensor:
        return self.weight.t() if self._is_transposed else self.weight


class ColumnParallelLinear(_ParallelLinear):
    """A linear layer with some of the outputs.

    Attributes:
        gather_output: whether the result has the outputs of all ranks, and all go on alike.
        shares_input: whether other layers of the region read the same tensor.
        randomness: what the region draws from, if random numbers are drawn in it.
    """

    gather_output: bool
    shares_input: bool

    @classmethod
    def from_dense(
        cls,
        layer: nn.Module,
        group: TensorGroup,
        *,
        num_blocks: int = 1,
        granule: int = 1,
        gather_output: bool = False,
        shares_input: bool = False,
        randomness: SplitRandomness | None = None,
    ) -> Self:
        """Split ``layer`` in place.

        Args:
            layer: ``nn.Linear``, or Hugging Face's ``Conv1D``.
            group: the ranks that get the parts.
            num_blocks: fused layers of one size, each of which is split by itself (queries, keys and values: 3).
            granule: outputs that stay together (the size of an attention head).
            gather_output: see the class.
            shares_input: see the class.
            randomness: see the class.

        Raises:
            CannotSplit: it is another layer, or too small.
        """
        form = cls._form(layer)
        cut = cut_evenly(form.out_dim, getattr(layer, form.outputs), group, num_blocks=num_blocks, granule=granule)
        settings = {
            "gather_output": gather_output,
            "shares_input": shares_input,
            "randomness": None if gather_output else randomness,
            "_is_transposed": form.out_dim == 1,
        }
        cuts = {"weight": cut}
        if layer.bias is not None:
            cuts["bias"] = Cut(0, cut.blocks)
        return cls._split(layer, group, cuts, {form.outputs: cut.length_of(group.rank)}, settings)

    def forward(self, x: Tensor) -> Tensor:
        """Of a whole ``x``."""
        if self.randomness is not None and self.training:
            self.randomness.enter(x)
        y = self._product(x)
        return self._gathered(y) if self.gather_output else y

    def _product(self, x: Tensor) -> Tensor:
        if self.shares_input or not (x.requires_grad and torch.is_grad_enabled()):
            return F.linear(enter(x, self.group), self._matrix(), self.bias)
        bias = None if self.bias is None else as_computed(self.bias)
        y: Tensor = _Columns.apply(as_computed(x), as_computed(self._matrix()), bias, self.group)  # type: ignore[no-untyped-call]
        return y

    def _gathered(self, y: Tensor) -> Tensor:
        blocks = self.cuts["weight"].blocks
        parts = y.split([lengths[self.group.rank] for lengths in blocks], -1)
        whole = [gather(part, self.group, -1, lengths) for part, lengths in zip(parts, blocks, strict=True)]
        return torch.cat(whole, -1) if len(whole) > 1 else whole[0]


class RowParallelLinear(_ParallelLinear):
    """A linear layer with some of the inputs.

    Attributes:
        splits_input: whether it gets inputs of all ranks, and reads its part of them.
        randomness: what the region that ends here has drawn from.
    """

    splits_input: bool

    @classmethod
    def from_dense(
        cls,
        layer: nn.Module,
        group: TensorGroup,
        *,
        num_blocks: int = 1,
        granule: int = 1,
        splits_input: bool = False,
        randomness: SplitRandomness | None = None,
    ) -> Self:
        """Split ``layer`` in place.

        Args:
            layer: ``nn.Linear``, or Hugging Face's ``Conv1D``.
            group: the ranks that get the parts.
            num_blocks: blocks of inputs of one size, each of which is split by itself.
            granule: inputs that stay together (the size of an attention head).
            splits_input: see the class.
            randomness: see the class.

        Raises:
            CannotSplit: it is another layer, or too small.
        """
        form = cls._form(layer)
        cut = cut_evenly(1 - form.out_dim, getattr(layer, form.inputs), group, num_blocks=num_blocks, granule=granule)
        settings = {
            "splits_input": splits_input,
            "randomness": randomness,
            "_is_transposed": form.out_dim == 1,
        }
        return cls._split(layer, group, {"weight": cut}, {form.inputs: cut.length_of(group.rank)}, settings)

    def forward(self, x: Tensor) -> Tensor:
        """The same on all ranks."""
        y = leave(F.linear(self._part(x) if self.splits_input else x, self._matrix()), self.group)
        if self.bias is not None:
            y = y.add_(self.bias)  # the sum is nobody else's
        if self.randomness is not None:
            self.randomness.leave()
        return y

    def _part(self, x: Tensor) -> Tensor:
        blocks = self.cuts["weight"].blocks
        whole = x.split([sum(lengths) for lengths in blocks], -1)
        parts = [split(each, self.group, -1, lengths) for each, lengths in zip(whole, blocks, strict=True)]
        return torch.cat(parts, -1) if len(parts) > 1 else parts[0]


@final
class _Columns(torch.autograd.Function):
    """A product of matrices whose input has its gradients added up while the weight's is computed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: TensorGroup) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight = ctx.saved_tensors
        needs = ctx.needs_input_grad
        rows = gradients[0].reshape(-1, len(weight))
        of_x = rows.mm(weight) if needs[0] else None
        work = None
        if torch.is_grad_enabled():  # somebody wants second derivatives
            of_x, x = None if of_x is None else add_up(of_x, ctx.group), copy(x, ctx.group)
        elif of_x is not None:
            work = ctx.group.start_sum(of_x)
        of_weight = _like(weight, rows, x.reshape(-1, x.shape[-1])) if needs[1] else None
        of_bias = rows.sum(0) if needs[2] else None
        if work is not None:
            work.wait()
        return None if of_x is None else of_x.view(x.shape), of_weight, of_bias, None


def _like(weight: Tensor, rows: Tensor, inputs: Tensor) -> Tensor:
    """The gradient of ``weight``, with its layout, as autograd has it."""
    return rows.t().mm(inputs) if weight.is_contiguous() else inputs.t().mm(rows).t()


def _is_transposed_linear(kind: type) -> bool:
    # Known by its name: the package works without transformers.
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"
