"""``SplitLayer``: base of layers that are split in place, and can be made dense again.

The module stays the same object, under its name and with its hooks; its class becomes a subclass of the class it had,
so ``isinstance`` gives the same answers. Its parameters stay the same objects with smaller values, so optimizers keep
working. Attributes with sizes have those of the part. :meth:`SplitLayer.to_dense` reverts all of that.

Custom code of a layer (a ``forward`` of a subclass, weights that are computed from others) was written for whole
weights. Such layers are refused, with the reason.

:class:`AmongParts` is a layer that is the same on all ranks but gets parts, such as the norm of each head's queries:
each rank sees only what its own heads do to the parameters, so their gradients are summed.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from smp_strategy.distributed.door_words import door_words
from smp_strategy.distributed.tensor_group import TensorGroup
from smp_strategy.errors import UnsupportedError
from smp_strategy.model.shard_layout import Cut
from smp_strategy.tensor_parallel.autograd_collectives import copy

__all__ = ["AmongParts", "CannotSplit", "SplitLayer", "check_plain", "cut_evenly"]


class CannotSplit(Exception):
    """Reason why a layer stays whole; reports show the text after the layer's name."""


class SplitLayer(nn.Module):
    """A layer of which this rank has a part. Made from dense layers by ``from_dense`` of subclasses.

    Attributes:
        group: Ranks that have the parts.
        cuts: Cuts of parameters, by their names in this layer; other parameters are the same on all ranks.
    """

    group: TensorGroup
    cuts: Mapping[str, Cut]
    _whole_sizes: Mapping[str, int]
    _settings: tuple[str, ...]

    @classmethod
    def _split(
        cls,
        layer: nn.Module,
        group: TensorGroup,
        cuts: Mapping[str, Cut],
        sizes: Mapping[str, int],
        settings: Mapping[str, Any],
    ) -> Self:
        """Turn ``layer`` into this class, all or nothing.

        Args:
            layer: Dense layer that has passed :func:`check_plain`.
            group: See the class.
            cuts: See the class.
            sizes: New values of attributes of the layer.
            settings: Attributes of this class.
        """
        for name, cut in cuts.items():
            length = layer._parameters[name].shape[cut.dim]  # type: ignore[union-attr]
            if length not in (cut.length, cut.length_of(group.rank)):
                raise CannotSplit(f"its {name} has {length} elements along dim {cut.dim} instead of {cut.length}")
        for name, cut in cuts.items():
            _cut_in_place(layer._parameters[name], cut, group.rank)
        layer.__class__ = _subclass(cls, type(layer))  # type: ignore[arg-type]
        assert isinstance(layer, cls)
        layer.group, layer.cuts = group, dict(cuts)
        layer._whole_sizes = {name: getattr(layer, name) for name in sizes}
        layer._settings = ("group", "cuts", "_whole_sizes", "_settings", *settings)
        for name, value in {**sizes, **settings}.items():
            setattr(layer, name, value)
        return layer

    def to_dense(self) -> nn.Module:
        """Make the layer dense again, in place; all ranks of the group call it.

        Gradients of cut parameters are dropped.
        """
        for name, cut in self.cuts.items():
            _join_in_place(self._parameters[name], cut, self.group)
        for name, size in self._whole_sizes.items():
            setattr(self, name, size)
        for name in self._settings:
            delattr(self, name)
        self.__class__ = type(self)._dense  # type: ignore[attr-defined]
        return self

    def __delattr__(self, name: str) -> None:
        # A parametrization deletes the weight that it replaces. It would take this part for the whole weight.
        if name in vars(self).get("cuts", ()):
            raise UnsupportedError(
                f"`{name}` of a {type(self)._dense.__name__} cannot be replaced: `tensor_parallel_degree` has "  # type: ignore[attr-defined]
                f"divided it among {self.group.size} ranks. Put parametrizations on before the first step, which keeps "
                'the layer whole, or keep it so: `tensor_parallel={"<layer>": "replicate"}`.'
            )
        super().__delattr__(name)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        # A part must not be mistaken for the whole. In hooks the parameter is whole by the time its size is read.
        for name, cut in self.cuts.items():
            parameter = self._parameters[name]
            if not keep_vars and parameter is not None and parameter.shape[cut.dim] != cut.length:
                words = door_words()
                raise UnsupportedError(
                    f"`state_dict` here would have this rank's part of `{prefix}{name}` only, which "
                    f"`tensor_parallel_degree` divides among {self.group.size} ranks. To save the model, call "
                    f"{words.save_model} on all ranks; {words.in_hook} weights are whole."
                )
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def extra_repr(self) -> str:
        """Text of the dense layer, with the sizes of the part."""
        return f"{super().extra_repr()}, rank {self.group.rank} of {self.group.size}".removeprefix(", ")


def check_plain(layer: nn.Module, kind: type, parameters: Sequence[str] = ("weight", "bias")) -> None:
    """Refuse a ``layer`` that computes something else than ``kind``, or with other values than its parameters.

    Raises:
        CannotSplit: With the reason.
    """
    if isinstance(layer, SplitLayer):
        raise CannotSplit("it is split already")
    if type(layer).forward is not kind.forward or "forward" in vars(layer):  # type: ignore[attr-defined]
        raise CannotSplit(f"{type(layer).__name__} has a forward of its own")
    for name in parameters:
        if name not in layer._parameters:
            raise CannotSplit(f"its {name} is no parameter of its own, but computed from others")
        parameter = layer._parameters[name]
        if parameter is not None and type(parameter.data) not in (Tensor, FakeTensor):
            raise CannotSplit(f"its {name} is a {type(parameter.data).__name__}")


def cut_evenly(dim: int, length: int, group: TensorGroup, *, num_blocks: int = 1, granule: int = 1) -> Cut:
    """:meth:`Cut.evenly` for the ranks of ``group``.

    Raises:
        CannotSplit: The length cannot be divided.
    """
    try:
        return Cut.evenly(dim, length, group.size, num_blocks=num_blocks, granule=granule)
    except ValueError as error:
        raise CannotSplit(str(error)) from None


@cache
def _subclass(split: type[SplitLayer], dense: type[nn.Module]) -> type[SplitLayer]:
    """Subclass of both; one class per pair, because tests and ``torch.compile`` rely on identity."""
    # Compiled graphs contain no collectives: compiled code calls these layers eagerly.
    forward = torch.compiler.disable(split.forward)
    return type(split.__name__, (split, dense), {"_dense": dense, "forward": forward, "__module__": split.__module__})


@torch.no_grad()
def _cut_in_place(parameter: Tensor | None, cut: Cut, rank: int) -> None:
    # A tied parameter comes here once for each of its layers.
    if parameter is None or parameter.shape[cut.dim] != cut.length:
        return
    gradient, parameter.grad = parameter.grad, None
    parameter.data = cut.part(parameter.data, rank)
    if gradient is not None:
        parameter.grad = cut.part(gradient, rank)


@torch.no_grad()
def _join_in_place(parameter: Tensor | None, cut: Cut, group: TensorGroup) -> None:
    if parameter is None or parameter.shape[cut.dim] == cut.length:
        return
    parameter.grad = None
    lengths = [cut.length_of(rank) for rank in range(group.size)]
    parts = group.gather(parameter.data, cut.dim, lengths)
    parameter.data = cut.join(parts.split(lengths, cut.dim)) if len(cut.blocks) > 1 else parts


class AmongParts(SplitLayer):
    """A whole layer inside a region, whose parameters' gradients are all-reduced."""

    @classmethod
    def from_dense(cls, layer: nn.Module, group: TensorGroup) -> Self:
        """Change ``layer`` in place.

        Raises:
            CannotSplit: Its parameters belong to layers in it.
        """
        if any(True for _ in layer.children()):
            raise CannotSplit("it is made of other layers")
        return cls._split(layer, group, {}, {}, {})

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Result of the dense layer."""
        own = self._parameters
        # The dense code reads `self.weight`, so the copies stand in for the parameters.
        vars(self)["_parameters"] = {
            name: None if parameter is None else copy(parameter, self.group) for name, parameter in own.items()
        }
        try:
            return type(self)._dense.forward(self, *args, **kwargs)  # type: ignore[attr-defined]
        finally:
            vars(self)["_parameters"] = own
