"""Column- and row-parallel convolutions: each rank has some output channels, or some input channels.

They are linear layers whose features are channels. A grouped convolution is split by groups: a rank reads the channels
of its groups, and computes theirs. Inside a region its input is split like that already, and nothing is sent.
"""

from typing import Any, Self

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from smp_strategy.tensor_parallel.autograd_collectives import split
from smp_strategy.tensor_parallel.group import TensorGroup
from smp_strategy.tensor_parallel.layers.base import CannotSplit, check_plain, cut_evenly
from smp_strategy.tensor_parallel.region import ColumnParallelLayer, RowParallelLayer
from smp_strategy.tensor_parallel.region_boundary import enter
from smp_strategy.tensor_parallel.region_rng import RegionRng

__all__ = ["ColumnParallelConv", "RowParallelConv"]


class ColumnParallelConv(ColumnParallelLayer):
    """A convolution (``nn.Conv1d``, ``Conv2d`` or ``Conv3d``) with some of the output channels.

    Attributes:
        is_inside: Whether its input is split already.
    """

    is_inside: bool
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
