"""Column- and row-parallel linear layers and convolutions, and the vocabulary-parallel head.

In backward the gradient of a column-parallel layer's input is all-reduced. The gradient of its weight does not need
that sum, and is computed while it is under way (:class:`_Columns`). If several column-parallel layers read one tensor,
they share one all-reduce instead (:mod:`~smp_strategy.tensor_parallel.region`).

Besides ``nn.Linear``, GPT-2's ``Conv1D`` of Hugging Face is supported: a linear layer with its weight transposed.

The result of :class:`VocabParallelHead`, which computes scores for the tokens of a vocabulary, is a split tensor:
losses exchange two numbers per token, and the scores are gathered only if other code reads them.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, Self, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.conv import _ConvNd

from smp_strategy.distributed.tensor_group import TensorGroup
from smp_strategy.model.shard_layout import Cut
from smp_strategy.model.weight_gradient_formula import WeightGradientFormula, WeightGradientKind
from smp_strategy.tensor_parallel.autograd_collectives import add_up, copy, split
from smp_strategy.tensor_parallel.layers.base import CannotSplit, check_plain, cut_evenly
from smp_strategy.tensor_parallel.region import (
    ColumnParallelLayer,
    Entered,
    RegionReaders,
    RowParallelLayer,
    as_computed,
    enter,
    enter_parts,
)
from smp_strategy.tensor_parallel.region_rng import RegionRng
from smp_strategy.tensor_parallel.sharded_tensor.parts import InParts
from smp_strategy.tensor_parallel.sharded_tensor.tensor import SplitTensor

__all__ = ["ColumnParallelLinear", "RowParallelLinear", "VocabParallelHead", "ColumnParallelConv", "RowParallelConv"]


class ColumnParallelLinear(ColumnParallelLayer):
    """A linear layer with some of the outputs."""

    _is_transposed: bool

    @classmethod
    def from_dense(
        cls,
        layer: nn.Module,
        group: TensorGroup,
        *,
        num_blocks: int = 1,
        granule: int = 1,
        gather_output: bool = False,
        looks_whole: bool = False,
        shares_input: bool = False,
        randomness: RegionRng | None = None,
    ) -> Self:
        """Split ``layer`` in place.

        Args:
            layer: ``nn.Linear``, or Hugging Face's ``Conv1D``.
            group: Ranks that get the parts.
            num_blocks: Number of fused layers of one size, each of which is split by itself (queries, keys and
                values: 3).
            granule: Number of outputs that stay together (the size of an attention head).
            gather_output, looks_whole, shares_input, randomness: See the class; ``looks_whole`` requires one block.

        Raises:
            CannotSplit: It is another layer, or too small.
        """
        form = _form_of(layer)
        cut = cut_evenly(form.out_dim, getattr(layer, form.outputs), group, num_blocks=num_blocks, granule=granule)
        cuts = {"weight": cut}
        if layer.bias is not None:
            cuts["bias"] = Cut(0, cut.blocks)
        settings = {
            "gather_output": gather_output,
            "looks_whole": looks_whole,
            "shares_input": shares_input,
            # A split tensor itself decides which numbers are drawn per part and which for the whole.
            "randomness": None if gather_output or looks_whole else randomness,
            "_features": -1,
            "_is_transposed": form.out_dim == 1,
        }
        return cls._split(layer, group, cuts, {form.outputs: cut.length_of(group.rank)}, settings)

    def _product(self, x: Tensor) -> Tensor:
        weight = self.weight.t() if self._is_transposed else self.weight
        if isinstance(x, InParts):
            return _product_of_parts(enter_parts(x, self.group, shares=self.shares_input), weight, self.bias)
        if self.shares_input or not (x.requires_grad and torch.is_grad_enabled()):
            return F.linear(enter(x, self.group), weight, self.bias)
        bias = None if self.bias is None else as_computed(self.bias)
        y: Tensor = _Columns.apply(as_computed(x), as_computed(weight), bias, self.group)  # type: ignore[no-untyped-call]
        return y


class RowParallelLinear(RowParallelLayer):
    """A linear layer with some of the inputs."""

    _is_transposed: bool

    @classmethod
    def from_dense(
        cls,
        layer: nn.Module,
        group: TensorGroup,
        *,
        num_blocks: int = 1,
        granule: int = 1,
        splits_input: bool = False,
        randomness: RegionRng | None = None,
    ) -> Self:
        """Split ``layer`` in place.

        Args:
            layer: ``nn.Linear``, or Hugging Face's ``Conv1D``.
            group: Ranks that get the parts.
            num_blocks: Number of blocks of inputs of one size, each of which is split by itself.
            granule: Number of inputs that stay together (the size of an attention head).
            splits_input, randomness: See the class.

        Raises:
            CannotSplit: It is another layer, or too small.
        """
        form = _form_of(layer)
        cut = cut_evenly(1 - form.out_dim, getattr(layer, form.inputs), group, num_blocks=num_blocks, granule=granule)
        settings = {
            "splits_input": splits_input,
            "splits_output": None,
            "randomness": randomness,
            "_features": -1,
            "_is_transposed": form.out_dim == 1,
        }
        return cls._split(layer, group, {"weight": cut}, {form.inputs: cut.length_of(group.rank)}, settings)

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        weight = self.weight.t() if self._is_transposed else self.weight
        return _linear_of_its_own(x, weight, bias)


def _linear_of_its_own(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``F.linear`` whose result is no view.

    With a bias the result of ``F.linear`` is a view: it cannot be summed in place, and an autograd Function must not
    return a view that later code changes (``nn.ReLU(inplace=True)``).
    """
    if bias is None:
        return F.linear(x, weight)
    rows = F.linear(x.reshape(-1, x.shape[-1]), weight, bias)
    return torch.ops.aten._unsafe_view.default(rows, [*x.shape[:-1], len(weight)])


class _Form(NamedTuple):
    """Layout of a dense layer's weight."""

    out_dim: int
    """Dim of the outputs; the other one is that of the inputs."""
    outputs: str
    """Name of the attribute with the number of outputs."""
    inputs: str


def _form_of(layer: nn.Module) -> _Form:
    if isinstance(layer, nn.Linear):
        check_plain(layer, nn.Linear)
        return _Form(0, "out_features", "in_features")
    # Recognised by name: the package works without transformers.
    for kind in type(layer).__mro__:
        if kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils":
            check_plain(layer, kind)
            return _Form(1, "nf", "nx")
    raise CannotSplit(f"{type(layer).__name__} is no linear layer")


@final
class _Columns(torch.autograd.Function):
    """Matrix product whose input gradient is all-reduced while the weight gradient is computed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: TensorGroup) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group = group
        ctx.later = frozenset()
        return _linear_of_its_own(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight = ctx.saved_tensors
        rows = gradients[0].reshape(-1, len(weight))
        of_x = rows.mm(weight) if ctx.needs_input_grad[0] else None
        work = None
        if torch.is_grad_enabled():  # second derivatives
            of_x, x = None if of_x is None else add_up(of_x, ctx.group), copy(x, ctx.group)
        elif of_x is not None:
            work = ctx.group.start_sum(of_x)
        needs = [number for number in (1, 2) if ctx.needs_input_grad[number] and number not in ctx.later]
        others = dict(zip(needs, _gradients(x, weight.is_contiguous(), needs, rows), strict=True))
        if work is not None:
            work.wait()
        return None if of_x is None else of_x.view(x.shape), others.get(1), others.get(2), None

    @staticmethod
    def _make_later(node: Any, inputs: Sequence[int]) -> WeightGradientFormula:
        node.later = frozenset(inputs)
        x, weight = node.saved_tensors
        return partial(_gradients, x.detach(), weight.is_contiguous(), inputs)

    product = WeightGradientKind(1, 2, ("_raw_saved_tensors",), _make_later)


def _product_of_parts(came_in: Entered, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Product of a gathered input of which only this rank's part is saved."""
    if not (weight.requires_grad and torch.is_grad_enabled()):
        return F.linear(came_in.whole, weight, bias)
    bias = None if bias is None else as_computed(bias)
    y: Tensor = _ColumnsOfParts.apply(  # type: ignore[no-untyped-call]
        came_in.whole, came_in.part, as_computed(weight), bias, came_in.readers
    )
    return y


@final
class _ColumnsOfParts(torch.autograd.Function):
    """Matrix product whose input is gathered again in backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, part: Tensor, weight: Tensor, bias: Tensor | None, readers: RegionReaders
    ) -> Tensor:
        ctx.save_for_backward(part, weight)
        ctx.readers = readers
        readers.left += 1
        return _linear_of_its_own(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        part, weight = ctx.saved_tensors
        rows = gradients[0].reshape(-1, len(weight))
        of_x = rows.mm(weight).view(*gradients[0].shape[:-1], -1) if ctx.needs_input_grad[0] else None
        needs = [number for number in (1, 2) if ctx.needs_input_grad[number + 1]]
        x = ctx.readers.gather(part)
        found = dict(zip(needs, _gradients(x, weight.is_contiguous(), needs, rows), strict=True))
        return of_x, None, found.get(1), found.get(2), None


def _gradients(x: Tensor, has_rows: bool, inputs: Sequence[int], gradient: Tensor) -> list[Tensor]:
    """Gradients of the weight (1) and the bias (2) as autograd computes them: in the memory layout of the weight."""
    rows, x = gradient.reshape(-1, gradient.shape[-1]), x.reshape(-1, x.shape[-1])
    found = {}
    if 1 in inputs:
        found[1] = rows.t().mm(x) if has_rows else x.t().mm(rows).t()
    if 2 in inputs:
        found[2] = rows.sum(0)
    return [found[number] for number in inputs]


class VocabParallelHead(ColumnParallelLinear):
    """A linear layer whose outputs are the tokens of a vocabulary."""

    def forward(self, x: Tensor) -> Tensor:
        """Scores of all tokens, as a split tensor."""
        (lengths,) = self.cuts["weight"].blocks
        return SplitTensor.from_part(super().forward(x), self.group, -1, lengths)


# --- convolutions ----------------------------------------------------------------------------------------------------
# Column- and row-parallel convolutions: each rank has some output channels, or some input channels.
#
# They are linear layers whose features are channels. A grouped convolution is split by groups: a rank reads the
# channels of its groups, and computes theirs. Inside a region its input is split like that already, and nothing is
# sent.


class ColumnParallelConv(ColumnParallelLayer):
    """A convolution (``nn.Conv1d``, ``Conv2d`` or ``Conv3d``) with some of the output channels."""

    groups: int
    in_channels: int

    @classmethod
    def from_dense(
        cls,
        layer: nn.Module,
        group: TensorGroup,
        *,
        granule: int = 1,
        gather_output: bool = False,
        shares_input: bool = False,
        is_inside: bool = False,
        randomness: RegionRng | None = None,
    ) -> Self:
        """Split ``layer`` in place.

        Args:
            layer: ``nn.Conv1d``, ``nn.Conv2d`` or ``nn.Conv3d``.
            group: Ranks that get the parts.
            granule: Number of channels that stay together.
            gather_output, shares_input, is_inside, randomness: See the class; ``is_inside`` requires groups.

        Raises:
            CannotSplit: It is another layer, or has too few channels or groups.
        """
        conv = _checked(layer)
        if is_inside and conv.groups == 1:
            raise CannotSplit("each of its output channels needs all input channels, which are split")
        together = granule if conv.groups == 1 else conv.out_channels // conv.groups
        if together % granule:
            raise CannotSplit(f"it has {together} channels in a group, where {granule} stay together")
        cut = cut_evenly(0, conv.out_channels, group, granule=together)
        sizes = {"out_channels": cut.length_of(group.rank)}
        if conv.groups > 1:
            sizes["groups"] = sizes["out_channels"] // together
            sizes["in_channels"] = sizes["groups"] * (conv.in_channels // conv.groups)
        settings = {
            "gather_output": gather_output,
            "shares_input": shares_input,
            "is_inside": is_inside,
            "randomness": None if gather_output or is_inside else randomness,
            "_features": -len(conv.kernel_size) - 1,
        }
        cuts = {"weight": cut} if conv.bias is None else {"weight": cut, "bias": cut}
        return cls._split(layer, group, cuts, sizes, settings)

    def _product(self, x: Tensor) -> Tensor:
        return self._conv_forward(self._input(x), self.weight, self.bias)

    def _input(self, x: Tensor) -> Tensor:
        if self.is_inside:
            return x
        if "groups" not in self._whole_sizes:
            return enter(x, self.group)
        (outputs,) = self.cuts["weight"].blocks
        lengths = [self.in_channels * length // outputs[self.group.rank] for length in outputs]
        return split(x, self.group, self._features, lengths)

    _conv_forward: Any  # of the dense class


class RowParallelConv(RowParallelLayer):
    """A convolution (``nn.Conv1d``, ``Conv2d`` or ``Conv3d``) with some of the input channels."""

    @classmethod
    def from_dense(
        cls,
        layer: nn.Module,
        group: TensorGroup,
        *,
        granule: int = 1,
        splits_input: bool = False,
        randomness: RegionRng | None = None,
    ) -> Self:
        """Split ``layer`` in place.

        Args:
            layer: ``nn.Conv1d``, ``nn.Conv2d`` or ``nn.Conv3d``.
            group: Ranks that get the parts.
            granule: Number of channels that stay together.
            splits_input, randomness: See the class.

        Raises:
            CannotSplit: It is another layer, has groups, or too few channels.
        """
        conv = _checked(layer)
        if conv.groups > 1:
            raise CannotSplit(f"its {conv.groups} groups are not added up; split it by its output channels")
        cut = cut_evenly(1, conv.in_channels, group, granule=granule)
        settings = {"splits_input": splits_input, "randomness": randomness, "_features": -len(conv.kernel_size) - 1}
        return cls._split(layer, group, {"weight": cut}, {"in_channels": cut.length_of(group.rank)}, settings)

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return self._conv_forward(x, self.weight, bias)

    _conv_forward: Any  # of the dense class


def _checked(layer: nn.Module) -> _ConvNd:
    for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
        if isinstance(layer, kind):
            check_plain(layer, kind)
            if type(layer)._conv_forward is not kind._conv_forward:
                raise CannotSplit(f"{type(layer).__name__} computes it in its own way")
            return layer
    raise CannotSplit(f"{type(layer).__name__} is no convolution")
