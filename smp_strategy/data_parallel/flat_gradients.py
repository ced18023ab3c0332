"""Flat gradients: those of the parameters of a flat buffer, from backward to the optimizer.

In a pass over the model::

    begin                     what the parameters have is accumulated onto
    collect                   gradients of whole parameters are moved into a buffer of the layout of the values
    reduce                    it is reduce-scattered over the shard group, missing gradients as zeros, and added up
    take_reduced, put_summed  sums over the replicas
    end                       the parameters get the pieces of this rank

If other ranks have the same shard and share its updates (its *owners*), the reduced gradients are those of the whole
shard, and :meth:`FlatGradients.put_summed` gets this rank's part of their sums. Between passes ``grad`` of a resting
parameter is a :class:`~smp_strategy.data_parallel.parameter_pieces.ShardedGradient` with its piece. Half-precision
gradients are cast where they are added, so all sums have the dtype of the layout's gradients.

When a frozen parameter is unfrozen before a pass, its buffer has gradients from then on. Those of parameters in it that
are still frozen are zero and not visible.
"""

import math
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn

from smp_strategy.data_parallel.flat_layout import FlatLayout, Piece, Slot
from smp_strategy.data_parallel.parameter_pieces import ShardedGradient, common_base, view
from smp_strategy.distributed.collectives.interface import Collectives
from smp_strategy.distributed.handle import Handle
from smp_strategy.errors import UnsupportedError

__all__ = ["FlatGradients"]


@final
class FlatGradients:
    """Gradients of some parameters, sharded over a shard group.

    Args:
        layout: Places of the parameters.
        parameters: Parameters in the order of the layout's slots.
        own_pieces: Elements of each parameter that this rank updates.
        collectives: Collectives of the shard group.
        owners: Collectives of the ranks that have the same shard, if each of them updates a part of it.
        reduce_dtype: Dtype in which gradients are sent; ``None``: that in which they are summed.
        device: Device of the parameters.

    Attributes:
        is_trained: Whether there are gradients: a parameter was trained when this was made, or is by now.
        dtype: Dtype of the sums.
        own: Gradients of the elements that this rank updates; ``None``: there are none.
    """

    def __init__(
        self,
        layout: FlatLayout,
        parameters: Sequence[nn.Parameter],
        own_pieces: Sequence[Piece],
        collectives: Collectives,
        owners: Collectives | None,
        reduce_dtype: torch.dtype | None,
        device: torch.device,
    ) -> None:
        self.is_trained = layout.is_trained
        self.dtype: torch.dtype = getattr(torch, layout.gradient_dtype)
        self.own: Tensor | None = None
        self._layout = layout
        self._parameters = parameters
        self._own_pieces = own_pieces
        self._collectives = collectives
        self._owners = owners
        self._reduce_dtype = self.dtype if reduce_dtype is None else reduce_dtype
        self._device = device
        # Collected and not yet reduced; which parameters have a gradient in it.
        self._collected: Tensor | None = None
        self._is_collected: list[bool] = []
        self._reducing: Handle[object] | None = None
        # Reduced, if a shard has several owners: the gradients of the whole shard.
        self._of_shard: Tensor | None = None
        # Whether each parameter had a gradient before this pass; whether one was computed on this rank by now.
        self._goes_on = [False] * len(parameters)
        self._is_used = [False] * len(parameters)

    @property
    def are_unreduced(self) -> bool:
        """Whether there are gradients that have not been reduced."""
        return self._collected is not None or any(_is_new(parameter) for parameter in self._parameters)

    def begin(self) -> None:
        """Accumulate onto the gradients that the parameters have, which are pieces."""
        self.wait()
        self._collected = self._of_shard = None
        # The same on all ranks, which run the same code that freezes and unfreezes.
        self.is_trained = self.is_trained or any(parameter.requires_grad for parameter in self._parameters)
        earlier = self.move_out()
        self._goes_on = [gradient is not None for gradient in earlier]
        self._is_used = [gradient is not None and gradient.is_used for gradient in earlier]
        self.own = self._joined(earlier)

    def collect(self) -> None:
        """Add the parameters' gradients to the flat buffer."""
        new: dict[int, Tensor] = {}
        for number, (parameter, slot) in enumerate(zip(self._parameters, self._layout.slots, strict=True)):
            if not self.is_trained:
                _refuse_gradient(parameter, slot)
            elif _is_new(parameter):
                gradient, parameter.grad = parameter.grad, None
                assert gradient is not None
                if gradient.layout is not torch.strided:
                    raise UnsupportedError(
                        f"The gradient of `{slot.entry.names[0]}` is sparse, and shards are dense: use `sparse=False`."
                    )
                new[number] = gradient
        if not new:
            return
        full, slots = self._buffer(), self._layout.slots
        # A fresh buffer has no zeros in it: the first gradient of a parameter is copied, later ones are added.
        for is_there, put in ((False, torch._foreach_copy_), (True, torch._foreach_add_)):
            if numbers := [number for number in new if self._is_collected[number] == is_there]:
                put([view(full, slots[number]) for number in numbers], [new[number] for number in numbers])
        for number in new:
            self._is_collected[number] = self._is_used[number] = True

    def reduce(self, factor: float) -> None:
        """Begin to reduce-scatter the gradients, multiplied by ``factor`` on all ranks, onto earlier ones."""
        self.collect()
        if not self.is_trained:
            return
        self.wait()
        full = self._buffer()
        there = zip(self._layout.slots, self._is_collected, strict=True)
        # Other ranks may have these gradients, so this rank must send numbers that do not change the sums.
        empty = [view(full, slot) for slot, is_there in there if not is_there]
        if empty := [*empty, *(full[start:stop] for start, stop in self._layout.padding)]:
            torch._foreach_zero_(empty)
        # A power of two is exact wherever it is multiplied, so it costs no pass over memory of its own. Numbers of
        # float16 could overflow on their way.
        is_exact = math.frexp(factor)[0] == 0.5 and self._reduce_dtype != torch.float16
        if not is_exact:
            full.mul_(factor)
        self._collected = None
        # With several owners this is the sum of the whole shard, which its owners sum up and divide among themselves.
        before = self.own if self._owners is None else self._of_shard
        into = self._empty(self._layout.shard_numel) if before is None else before
        if self._owners is None:
            self.own = into
        else:
            self._of_shard = into
        self._reducing = self._collectives.reduce(
            full.to(dtype=self._reduce_dtype), into, is_first=before is None, factor=factor if is_exact else 1
        )

    def wait(self) -> None:
        """Wait for gradients that are being reduced."""
        if self._reducing is not None:
            self._reducing.wait()
            self._reducing = None

    def take_reduced(self) -> tuple[Tensor, Handle[object] | None]:
        """Move out the gradients that the group has reduced (zeros if there are none), and the work to wait for."""
        if self._owners is None:
            shard, self.own = self.own, None
        else:
            shard, self._of_shard = self._of_shard, None
        reducing, self._reducing = self._reducing, None
        return self._empty(self._layout.shard_numel).zero_() if shard is None else shard, reducing

    def put_summed(self, sums: Tensor) -> None:
        """Set this rank's gradients to their sums over the ranks that have the same shard."""
        if self.own is None:
            self.own = sums
        else:
            assert self._owners is not None, "gradients have come that nobody has taken"
            self.own.add_(sums)

    def end(self) -> None:
        """Give the parameters the gradients of this pass, as pieces."""
        self.wait()
        if self.own is not None:
            for number, (parameter, piece) in enumerate(zip(self._parameters, self._own_pieces, strict=True)):
                # A parameter that is frozen for a while keeps its earlier gradient.
                if parameter.requires_grad or self._goes_on[number]:
                    self.set_piece(number, self.own[piece.in_shard], is_used=self._is_used[number])
        self.own = None

    def set_piece(self, number: int, piece: Tensor, *, is_used: bool) -> None:
        """Set the gradient of the resting parameter ``number``, which has its shape, to this rank's ``piece``."""
        parameter = self._parameters[number]
        start = self._own_pieces[number].start
        parameter.grad = ShardedGradient(parameter, piece.to(self.dtype), start=start, is_used=is_used)

    def move_out(self) -> list[ShardedGradient | None]:
        """Remove the gradients that the resting parameters have, and return them."""
        return [_moved_out(parameter) for parameter in self._parameters]

    def _buffer(self) -> Tensor:
        if self._collected is None:
            self._collected = self._empty(self._layout.full_numel)
            self._is_collected = [False] * len(self._parameters)
        return self._collected

    def _joined(self, gradients: Sequence[ShardedGradient | None]) -> Tensor | None:
        """The gradients of this rank in one tensor, zero where one is missing; ``None`` if all are."""
        if all(gradient is None for gradient in gradients):
            return None
        like = self._empty(self._layout.own_numel)
        pieces = [None if each is None else each.piece for each in gradients]
        # Usually they still are views of the tensor of the last pass, which needs no copy then.
        base = common_base(pieces, [piece.offset for piece in self._own_pieces], like)
        if base is not None:
            return base
        joined = like.zero_()
        for place, piece in zip(self._own_pieces, pieces, strict=True):
            if piece is not None:
                joined[place.in_shard].copy_(piece)
        return joined

    def _empty(self, numel: int) -> Tensor:
        return torch.empty(numel, dtype=self.dtype, device=self._device)


def _moved_out(parameter: nn.Parameter) -> ShardedGradient | None:
    gradient, parameter.grad = parameter.grad, None
    if gradient is not None and not isinstance(gradient, ShardedGradient):
        raise UnsupportedError(
            f"A parameter of shape {list(parameter.shape)}, which is spread over ranks "
            "(`sharded_data_parallel_degree`), has got a gradient outside of a training step. Compute gradients in "
            "`training_step`, or set them in a hook."
        )
    return gradient


def _is_new(parameter: nn.Parameter) -> bool:
    """Whether a backward has computed its gradient, which is not one of an earlier pass."""
    return parameter.grad is not None and not isinstance(parameter.grad, ShardedGradient)


def _refuse_gradient(parameter: nn.Parameter, slot: Slot) -> None:
    if parameter.requires_grad or parameter.grad is not None:
        raise UnsupportedError(
            f"`{slot.entry.names[0]}`, which is spread over ranks, was frozen when the step began, and has been "
            "unfrozen in it. Unfreeze it between steps."
        )
