"""Flat buffer: values and gradients of parameters of one kind, sharded over a shard group.

Between uses a rank has its shard only. For a use the buffer's memory is allocated and filled by an all-gather;
afterwards it is freed. The buffer object stays, and so do the views of it that autograd has saved: freeing is
``resize_(0)`` of the storage that they all share, and in backward they read the values of the next gather.

The parameters stay the same objects. Their ``data`` are exchanged, which leaves their version counters alone, so that
autograd finds its saved tensors unchanged (and notices when somebody else has changed them). They are gathered,
resting, shown as pieces or shown whole; see [Note: resting parameters] in
:mod:`smp_strategy.data_parallel.parameter_pieces`.

Between uses a parameter could show its piece all the time, so that an optimizer would find it without further ado. But
then its shape would change whenever somebody looks (weight decay by ``ndim``, summaries), and a computation with a
weight that is not gathered could give a plausible number instead of an error.

During a pass gradients are moved into a buffer of the same layout, in which missing ones are zero. It is
reduce-scattered over the group to this rank's gradient shard, to which later microbatches are added. If other ranks
have the same shard and share its updates (its *owners*), this rank's gradients and pieces are those of a part of the
shard, its *own*. The parts that the others update arrive in the background; the next gather waits for them. Between
passes the ``grad`` of a resting parameter is a :class:`~smp_strategy.data_parallel.parameter_pieces.ShardedGradient`
with its piece.

If units compute in half precision, the buffer and the gathered parameters have that dtype. The shard is cast on its way
into the buffer; the values that this rank updates, the master weights, keep the parameters' dtype. Half-precision
gradients are cast where they are added, so that all sums are in float32.

Frozen parameters have buffers without gradients. When one of them is unfrozen before a pass, its buffer has gradients
from then on; those of parameters in it that are still frozen are zero and not visible.
"""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn

from smp_strategy.data_parallel.flat_layout import FlatLayout, Slot
from smp_strategy.data_parallel.parameter_pieces import RestingGuard, ShardedGradient, common_base, elements, view
from smp_strategy.distributed.collectives.interface import Collectives
from smp_strategy.distributed.handle import Handle, wait_for
from smp_strategy.errors import UnsupportedError
from smp_strategy.model.guarded_tensors import guard_of, placeholder, unwatch, watch
from smp_strategy.precision.master_weights import add_in, set_gradient_dtype

__all__ = ["FlatBuffer"]


@final
class FlatBuffer:
    """Sharded values and gradients of some parameters. Takes over their values, if there are any; they rest then.

    Args:
        layout: Places of the parameters.
        parameters: Parameters in the order of the layout's slots.
        collectives: Collectives of the shard group.
        device: Device of the buffer.
        owners: Collectives of the ranks that have the same shard, if each of them updates a part of it.
        reduce_dtype: Dtype in which gradients are sent; ``None``: that in which they are summed.
        guard: Guard of resting parameters; ``None``: one that refuses all uses.

    Attributes:
        layout, parameters: As given.
        is_trained: Whether there are gradients: a parameter was trained when this was made, or is by now.
        own_pieces: Elements of each parameter that this rank updates.
        own: Values that this rank updates: its shard, or a part of it.
        gradients: Gradients of ``own``; ``None``: there are none.
    """

    def __init__(
        self,
        layout: FlatLayout,
        parameters: Sequence[nn.Parameter],
        collectives: Collectives,
        device: torch.device,
        owners: Collectives | None = None,
        reduce_dtype: torch.dtype | None = None,
        guard: RestingGuard | None = None,
    ) -> None:
        self.layout = layout
        self.is_trained = layout.is_trained
        self.gradients: Tensor | None = None
        self.parameters = parameters
        self._collectives = collectives
        self._guard = RestingGuard() if guard is None else guard
        self._placeholders = [placeholder(each.shape, each.dtype, device) for each in parameters]
        self._owners = owners
        self.own_pieces = [
            layout.own_piece(slot, collectives.rank, 0 if owners is None else owners.rank) for slot in layout.slots
        ]
        dtype = getattr(torch, layout.dtype)
        self._gradient_dtype = getattr(torch, layout.gradient_dtype)
        # Gradients that autograd adds up in another dtype than that in which it computes them.
        is_widened = {layout.dtype, layout.use_dtype} != {layout.gradient_dtype}
        self._widening = [add_in(each, self._gradient_dtype) for each in parameters] if is_widened else []
        self._reduce_dtype = self._gradient_dtype if reduce_dtype is None else reduce_dtype
        self._full = torch.empty(layout.full_numel, dtype=getattr(torch, layout.use_dtype), device=device)
        self._views = [view(self._full, slot) for slot in layout.slots]
        # This rank's shard as it is sent; if it is cast for that, it is kept only if others update a part of it.
        if layout.is_persistent and not layout.is_cast:
            self._shard = self._full.chunk(layout.degree)[collectives.rank].zero_()
        else:
            numel = 0 if layout.is_cast and owners is None else layout.shard_numel
            self._shard = self._full.new_zeros(numel)
        if not layout.is_persistent:
            self._full.untyped_storage().resize_(0)
        start = 0 if owners is None else owners.rank * layout.own_numel
        self._own_part = slice(start, start + layout.own_numel)
        if layout.is_cast:
            self.own = torch.zeros(layout.own_numel, dtype=dtype, device=device)
        else:
            self.own = self._shard[self._own_part]
        for number in (number for number, each in enumerate(parameters) if each.untyped_storage().nbytes()):
            self._put(number, parameters[number])
        self._refreshing: list[Handle[object]] = []
        self._arriving: Handle[object] | None = None
        self._is_gathered = False
        # For each parameter, whether it has had a gradient on this rank, in this pass or before it.
        self._is_used = [False] * len(parameters)
        self._goes_on = [False] * len(parameters)
        self._collected: Tensor | None = None
        self._has_gradient: list[bool] = []
        self._reducing: Handle[object] | None = None
        # If a shard has several owners: the reduced gradients of the whole shard.
        self._of_group: Tensor | None = None
        # Gradients that the shown parameters had while they rested.
        self._before: list[ShardedGradient | None] = []
        self._hide()

    @property
    def held_bytes(self) -> int:
        """Bytes of parameters that this rank holds now."""
        full = self._full.untyped_storage().nbytes()
        if self.layout.is_cast:
            return full + self.own.nbytes + self._shard.nbytes
        return full if self.layout.is_persistent else full + self._shard.nbytes

    @property
    def memory(self) -> range:
        """Address range of the values while they are gathered."""
        start = self._full.data_ptr()
        return range(start, start + self.layout.full_bytes)

    @property
    def has_gradients(self) -> bool:
        """Whether there are gradients that have not been reduced."""
        return self._collected is not None or any(_has_new_gradient(parameter) for parameter in self.parameters)

    def gather(self, *, again: bool = False) -> None:
        """Begin to gather the values; if they are gathered, only for other ranks that need it (``again``)."""
        if self._is_gathered or self._arriving is not None:
            # A persistent buffer is gathered on all ranks or on none, so nobody starts this collective.
            if self.layout.is_persistent or not again:
                return
            self.wait()
        elif not self.layout.is_persistent:
            self._full.untyped_storage().resize_(self.layout.full_bytes)
        shard = self._shard if self._shard.numel() else self.own.to(self._full.dtype)
        self._arriving = self._collectives.gather(self._full, shard, self._refreshing)

    def wait(self) -> None:
        """Wait for values that are being gathered."""
        if self._arriving is not None:
            self._arriving.wait()
            self._arriving = None
            self._refreshing = []
            self._is_gathered = True
            self._show(self._views)

    def free(self) -> None:
        """Free the values of other ranks; those of small parameters stay."""
        if not self.layout.is_persistent:
            self._retire()

    def collect(self) -> None:
        """Add the parameters' gradients to the flat gradient buffer."""
        found: dict[int, Tensor] = {}
        for number, (parameter, slot) in enumerate(zip(self.parameters, self.layout.slots, strict=True)):
            if not self.is_trained:
                _refuse_gradient(parameter, slot)
            elif _has_new_gradient(parameter):
                gradient, parameter.grad = parameter.grad, None
                assert gradient is not None
                if gradient.layout is not torch.strided:
                    raise UnsupportedError(
                        f"The gradient of `{slot.entry.names[0]}` is sparse, and shards are dense: use `sparse=False`."
                    )
                found[number] = gradient
        if not found:
            return
        full, slots = self._gradient_buffer(), self.layout.slots
        for is_there, put in ((False, torch._foreach_copy_), (True, torch._foreach_add_)):
            if numbers := [number for number in found if self._has_gradient[number] == is_there]:
                put([view(full, slots[number]) for number in numbers], [found[number] for number in numbers])
        for number in found:
            self._has_gradient[number] = self._is_used[number] = True

    def reduce(self, factor: float) -> None:
        """Begin to reduce-scatter the gradients, each rank's multiplied by its ``factor``, onto earlier ones."""
        self.collect()
        if not self.is_trained:
            return
        self.wait_reduced()
        full = self._gradient_buffer()
        there = zip(self.layout.slots, self._has_gradient, strict=True)
        empty = [view(full, slot) for slot, is_there in there if not is_there]
        if empty := [*empty, *(full[start:stop] for start, stop in self.layout.padding)]:
            torch._foreach_zero_(empty)
        if factor != 1.0:
            full.mul_(factor)
        self._collected = None
        before = self.gradients if self._owners is None else self._of_group
        into = self._empty_gradients(self.layout.shard_numel) if before is None else before
        if self._owners is None:
            self.gradients = into
        else:
            self._of_group = into
        self._reducing = self._collectives.reduce(full.to(dtype=self._reduce_dtype), into, is_first=before is None)

    def wait_reduced(self) -> None:
        """Wait for gradients that are being reduced."""
        if self._reducing is not None:
            self._reducing.wait()
            self._reducing = None

    def begin_gradients(self) -> None:
        """Accumulate onto the gradients that the parameters have, which are pieces."""
        self.wait_reduced()
        self._collected = self._of_group = None
        # The same on all ranks, which run the same code that freezes and unfreezes.
        self.is_trained = self.is_trained or any(parameter.requires_grad for parameter in self.parameters)
        found = [_taken(parameter) for parameter in self.parameters]
        self._goes_on = [gradient is not None for gradient in found]
        self._is_used = [gradient is not None and gradient.is_used for gradient in found]
        self.gradients = self._joined(found)

    def take_gradients(self) -> tuple[Tensor, Handle[object] | None]:
        """Move out the gradients that the group has reduced (zeros if there are none), and the work to wait for."""
        if self._owners is None:
            shard, self.gradients = self.gradients, None
        else:
            shard, self._of_group = self._of_group, None
        reducing, self._reducing = self._reducing, None
        return self._empty_gradients(self.layout.shard_numel).zero_() if shard is None else shard, reducing

    def put_gradients(self, sums: Tensor) -> None:
        """Set the gradients to their sums over the ranks that have the same shard."""
        if self.gradients is None:
            self.gradients = sums
        else:
            assert self._owners is not None, "gradients have come that nobody has taken"
            self.gradients.add_(sums)

    def end_gradients(self) -> None:
        """Give the parameters the gradients of this pass, as pieces."""
        self.wait_reduced()
        if self.gradients is not None:
            for number, piece in enumerate(self._pieces(self.gradients)):
                parameter = self.parameters[number]
                # A parameter that is frozen for a while keeps its earlier gradient.
                if parameter.requires_grad or self._goes_on[number]:
                    parameter.grad = self._in_disguise(number, piece, is_used=self._is_used[number])
        self.gradients = None

    def show_pieces(self) -> None:
        """Make every parameter and its gradient this rank's piece."""
        self.wait()
        self._wait_refreshed()
        self._before = [_taken(parameter) for parameter in self.parameters]
        self._show(self._pieces(self.own))
        # Optimizers compute with parameter, gradient and state of one dtype.
        for parameter, gradient in zip(self.parameters, self._before, strict=True):
            parameter.grad = None if gradient is None else gradient.piece.to(self.own.dtype)

    def hide_pieces(self) -> None:
        """Let the parameters rest; changes of their pieces stay, values that were gathered before are out of date."""
        pairs = zip(self.parameters, self._before, strict=True)
        self._rest([self._widened(parameter.grad, before) for parameter, before in pairs])
        if self._owners is not None and self.is_trained:
            self._refreshing = [self._owners.gather(self._shard, self.own.to(self._shard.dtype))]

    def show_whole(self) -> None:
        """Make every parameter and gradient whole, in memory of its own. Collective."""
        self._retire()
        self._before = [_taken(parameter) for parameter in self.parameters]
        self._show(self.values())
        whole = self.whole_of([None if gradient is None else gradient.piece for gradient in self._before])
        for parameter, gradient in zip(self.parameters, whole, strict=True):
            parameter.grad = gradient

    def hide_whole(self) -> None:
        """Let the parameters rest; changes of them and of their gradients stay."""
        pieces: list[Tensor | None] = []
        self._wait_refreshed()
        for number, parameter in enumerate(self.parameters):
            self._put(number, parameter)
            pieces.append(None if parameter.grad is None else self.piece_of(number, parameter.grad))
        self._rest(pieces)

    def fill(self, number: int, value: Tensor) -> None:
        """Set the parameter ``number`` to a new whole ``value``."""
        self._retire()
        self._wait_refreshed()
        self._put(number, value)

    def whole_of(self, pieces: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Join the ranks' pieces of tensors shaped like the parameters, in memory of its own. Collective.

        Args:
            pieces: This rank's piece for each parameter, all of one dtype; ``None`` where no rank has one.
        """
        there = [piece for piece in pieces if piece is not None]
        if not there:
            return [None] * len(pieces)
        own = torch.zeros_like(self.own, dtype=there[0].dtype)  # gradients, or state of an optimizer
        for place, piece in zip(self._pieces(own), pieces, strict=True):
            if piece is not None:
                place.copy_(piece)
        full = self._gathered(own)
        found = zip(self.layout.slots, pieces, strict=True)
        return [None if piece is None else view(full, slot).clone() for slot, piece in found]

    def values(self) -> list[Tensor]:
        """All values of the parameters, in memory of their own. Collective."""
        self._wait_refreshed()
        full = self._gathered(self.own)
        return [view(full, slot).clone() for slot in self.layout.slots]

    def piece_of(self, number: int, tensor: Tensor) -> Tensor:
        """Copy of this rank's piece of a tensor with the shape of the parameter ``number``."""
        piece = self.own_pieces[number]
        return elements(tensor, self.layout.slots[number])[piece.start : piece.start + piece.numel].clone()

    def own_values(self, number: int) -> Tensor:
        """Values of the parameter ``number`` that this rank updates: a one-dimensional view of the buffer."""
        piece = self.own_pieces[number]
        return self.own[piece.offset : piece.offset + piece.numel]

    def runs_to_fill(self, number: int) -> list[tuple[int, Tensor]]:
        """Runs of the resting parameter ``number`` in this rank's memory: first element, and view to fill."""
        self._retire()
        self._wait_refreshed()
        own = (self.own_pieces[number].start, self.own_values(number))
        piece = self.layout.piece(self.layout.slots[number], self._collectives.rank)
        shard = [(piece.start, self._shard[piece.offset : piece.offset + piece.numel])] if self._shard.numel() else []
        # Otherwise the own values are a part of the shard's memory.
        return [*shard, own] if not shard or self.layout.is_cast else shard

    def take_gradient(self, number: int, piece: Tensor) -> None:
        """Set the gradient of the resting parameter ``number`` to ``piece``."""
        self.parameters[number].grad = self._in_disguise(number, piece, is_used=True)

    def restore(self, *, keep: bool) -> None:
        """Give the parameters their whole values back, without gradients. Collective.

        Args:
            keep: Whether this rank gets them as well; otherwise its parameters rest.
        """
        if self.layout.is_cast:
            values = self.values()
        else:
            self.gather()
            self.wait()
            values = [each.clone() for each in self._views] if keep else []
        self._retire()
        if keep:
            for parameter in self.parameters:
                parameter.grad = None
            for parameter, handle in zip(self.parameters, self._widening, strict=False):
                handle.remove()
                set_gradient_dtype(parameter, self.own.dtype)
            self._widening = []
            self._show(values)

    def release(self) -> None:
        """Free the values, after the parameters have their own."""
        self._shard.untyped_storage().resize_(0)
        self.own.untyped_storage().resize_(0)
        self._full.untyped_storage().resize_(0)

    def _gathered(self, own: Tensor) -> Tensor:
        """All-gather the ranks' ``own`` parts into a full buffer. Collective."""
        shard = own
        if self._owners is not None:
            shard = own.new_empty(self.layout.shard_numel)
            self._owners.gather(shard, own).wait()
        full = own.new_empty(self.layout.full_numel)
        self._collectives.gather(full, shard).wait()
        return full

    def _joined(self, gradients: Sequence[ShardedGradient | None]) -> Tensor | None:
        """This rank's gradient shard, zero where a gradient is missing; ``None`` if all are."""
        if all(gradient is None for gradient in gradients):
            return None
        places = [piece.offset for piece in self.own_pieces]
        like = self._empty_gradients(self.layout.own_numel)
        base = common_base([None if each is None else each.piece for each in gradients], places, like)
        if base is not None:
            return base
        joined = like.zero_()
        for gradient, piece in zip(gradients, self._pieces(joined), strict=True):
            if gradient is not None:
                piece.copy_(gradient.piece)
        return joined

    def _rest(self, gradients: Sequence[Tensor | None]) -> None:
        """Let the parameters rest, with pieces of gradients."""
        for parameter in self.parameters:
            parameter.grad = None
        self._retire()
        for number, (piece, before) in enumerate(zip(gradients, self._before, strict=True)):
            if piece is not None:
                is_used = before is None or before.is_used
                self.parameters[number].grad = self._in_disguise(number, piece, is_used=is_used)
        self._before = []

    def _widened(self, gradient: Tensor | None, before: ShardedGradient | None) -> Tensor | None:
        """Cast a gradient back that the optimizer saw in the parameter's dtype."""
        if gradient is None or gradient.dtype == self._gradient_dtype or before is None:
            return gradient
        return before.piece.copy_(gradient)

    def _in_disguise(self, number: int, piece: Tensor, *, is_used: bool) -> ShardedGradient:
        """Wrap a piece as ``grad`` of a resting parameter, which must have its shape."""
        piece = piece.to(self._gradient_dtype)
        return ShardedGradient(self.parameters[number], piece, start=self.own_pieces[number].start, is_used=is_used)

    def _retire(self) -> None:
        self.wait()
        self._hide()
        self._is_gathered = False
        if not self.layout.is_persistent:
            self._full.untyped_storage().resize_(0)

    def _gradient_buffer(self) -> Tensor:
        if self._collected is None:
            self._collected = self._empty_gradients(self.layout.full_numel)
            self._has_gradient = [False] * len(self.parameters)
        return self._collected

    def _empty_gradients(self, numel: int) -> Tensor:
        return torch.empty(numel, dtype=self._gradient_dtype, device=self.own.device)

    def _show(self, tensors: Sequence[Tensor]) -> None:
        for parameter, tensor in zip(self.parameters, tensors, strict=True):
            if guard_of(parameter) is self._guard:
                unwatch(parameter)
            parameter.data = tensor

    def _hide(self) -> None:
        for parameter, tensor in zip(self.parameters, self._placeholders, strict=True):
            if guard_of(parameter) is not self._guard:
                watch(parameter, self._guard)
            parameter.data = tensor

    def _pieces(self, own: Tensor) -> list[Tensor]:
        return [own[piece.offset : piece.offset + piece.numel] for piece in self.own_pieces]

    def _put(self, number: int, value: Tensor) -> None:
        """Copy this rank's elements of a parameter's whole ``value``."""
        slot, own = self.layout.slots[number], self.own_pieces[number]
        values = elements(value, slot)
        self.own[own.offset : own.offset + own.numel].copy_(values[own.start : own.start + own.numel])
        if self._shard.numel():
            piece = self.layout.piece(slot, self._collectives.rank)
            kept = self._shard[piece.offset : piece.offset + piece.numel]
            kept.copy_(values[piece.start : piece.start + piece.numel])

    def _wait_refreshed(self) -> None:
        """Wait until the shard has the updates of all its owners."""
        wait_for(self._refreshing)
        self._refreshing = []


def _taken(parameter: nn.Parameter) -> ShardedGradient | None:
    """Remove the gradient from ``parameter`` and return it."""
    gradient, parameter.grad = parameter.grad, None
    if gradient is not None and not isinstance(gradient, ShardedGradient):
        raise UnsupportedError(
            f"A parameter of shape {list(parameter.shape)}, which is spread over ranks "
            "(`sharded_data_parallel_degree`), has got a gradient outside of a training step. Compute gradients in "
            "`training_step`, or set them in a hook."
        )
    return gradient


def _has_new_gradient(parameter: nn.Parameter) -> bool:
    """Whether a backward has computed its gradient, which is not one of an earlier pass."""
    return parameter.grad is not None and not isinstance(parameter.grad, ShardedGradient)


def _refuse_gradient(parameter: nn.Parameter, slot: Slot) -> None:
    if parameter.requires_grad or parameter.grad is not None:
        raise UnsupportedError(
            f"`{slot.entry.names[0]}`, which is spread over ranks, was frozen when the step began, and has been "
            "unfrozen in it. Unfreeze it between steps."
        )
