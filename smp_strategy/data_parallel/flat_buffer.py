"""Flat buffer: values of parameters of one kind, sharded over a shard group.

Between uses a rank has its shard only. For a use the buffer's memory is allocated and filled by an all-gather;
afterwards it is freed. The buffer object stays, and so do the views of it that autograd has saved: freeing is
``resize_(0)`` of the storage that they all share, and in backward they read the values of the next gather.

The parameters stay the same objects. Their ``data`` are exchanged, which leaves their version counters alone, so that
autograd finds its saved tensors unchanged (and notices when somebody else has changed them). What they are by turns is
their :class:`ParameterState`; see [Note: resting parameters] in :mod:`smp_strategy.data_parallel.parameter_pieces`.

Between uses a parameter could show its piece all the time, so that an optimizer would find it without further ado. But
then its shape would change whenever somebody looks (weight decay by ``ndim``, summaries), and a computation with a
weight that is not gathered could give a plausible number instead of an error.

If other ranks have the same shard and share its updates (its *owners*), this rank updates a part of the shard, its
*own*. The parts that the others update arrive in the background; the next gather waits for them.

If units compute in half precision, the buffer and the gathered parameters have that dtype. The shard is cast on its way
into the buffer; the values that this rank updates, the master weights, keep the parameters' dtype.
"""

import enum
from collections.abc import Sequence
from typing import Final, final

import torch
from torch import Tensor, nn

from smp_strategy.data_parallel.flat_gradients import FlatGradients
from smp_strategy.data_parallel.flat_layout import FlatLayout
from smp_strategy.data_parallel.parameter_pieces import RestingGuard, ShardedGradient, elements, lost_writes, view
from smp_strategy.distributed.collectives.interface import Collectives
from smp_strategy.distributed.handle import Handle, wait_for
from smp_strategy.model.guarded_tensors import guard_of, placeholder, untracked, unwatch, watch
from smp_strategy.precision.master_weights import add_in, set_gradient_dtype

__all__ = ["FlatBuffer"]


class ParameterState(enum.Enum):
    """What the parameters of a buffer are; all of them change together."""

    RESTING = enum.auto()
    """Without values."""
    GATHERING = enum.auto()
    """As before, and their values are on the way."""
    GATHERED = enum.auto()
    """Views of the buffer."""
    PIECES = enum.auto()
    """The elements that this rank updates."""
    WHOLE = enum.auto()
    """Whole, in memory of their own."""


_MOST_COMPARED: Final = 16384
"""Elements of a shard that are compared before a buffer is freed."""
_FREES_PER_COMPARISON: Final = 64


def _are_same(mine: Tensor, sent: Tensor) -> bool:
    sent = sent.to(mine.dtype)
    return torch.equal(mine, sent) or torch.allclose(mine, sent, rtol=0, atol=0, equal_nan=True)


@final
class FlatBuffer:
    """Sharded values of some parameters. Takes over those that there are; the parameters rest then.

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
        own_pieces: Elements of each parameter that this rank updates.
        own: Values that this rank updates: its shard, or a part of it.
        gradients: Gradients of the parameters.
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
        self.parameters = parameters
        self._collectives = collectives
        self._guard = RestingGuard() if guard is None else guard
        self._placeholders = [placeholder(each.shape, each.dtype, device) for each in parameters]
        self._owners = owners
        self.own_pieces = [
            layout.own_piece(slot, collectives.rank, 0 if owners is None else owners.rank) for slot in layout.slots
        ]
        self.gradients = FlatGradients(layout, parameters, self.own_pieces, collectives, owners, reduce_dtype, device)
        # Gradients that autograd adds up in another dtype than that in which it computes them.
        is_widened = {layout.dtype, layout.use_dtype} != {layout.gradient_dtype}
        self._widening = [add_in(each, self.gradients.dtype) for each in parameters] if is_widened else []
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
        if layout.is_cast:
            self.own = torch.zeros(layout.own_numel, dtype=getattr(torch, layout.dtype), device=device)
        else:
            start = 0 if owners is None else owners.rank * layout.own_numel
            self.own = self._shard[start : start + layout.own_numel]
        for number in (number for number, each in enumerate(parameters) if each.untyped_storage().nbytes()):
            self._put(number, parameters[number])
        self._state = ParameterState.RESTING
        # Versions of the gathered parameters.
        self._versions: list[int] = []
        self._num_frees, self._is_compared = 0, True
        self._refreshing: list[Handle[object]] = []
        self._arriving: Handle[object] | None = None
        # Gradients that parameters had while they rested, which are shown in another form now.
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

    def gather(self, *, again: bool = False) -> None:
        """Begin to gather the values; if they are gathered, only for other ranks that need it (``again``)."""
        if self._state in (ParameterState.GATHERING, ParameterState.GATHERED):
            # A persistent buffer is gathered on all ranks or on none, so nobody starts this collective.
            if self.layout.is_persistent or not again:
                return
            self.wait()
        elif not self.layout.is_persistent:
            self._full.untyped_storage().resize_(self.layout.full_bytes)
        shard = self._shard if self._shard.numel() else self.own.to(self._full.dtype)
        self._arriving = self._collectives.gather(self._full, shard, self._refreshing)
        self._state = ParameterState.GATHERING

    def wait(self) -> None:
        """Wait for values that are being gathered."""
        if self._arriving is not None:
            self._arriving.wait()
            self._arriving = None
            self._refreshing = []
            self._show(self._views, ParameterState.GATHERED)
            self._versions = [each._version for each in self.parameters]

    def free(self) -> None:
        """Free the values of other ranks; those of small parameters stay."""
        if not self.layout.is_persistent:
            self._retire()

    def show_pieces(self) -> None:
        """Make every parameter and its gradient this rank's piece."""
        self.wait()
        self._wait_refreshed()
        self._before = self.gradients.move_out()
        self._show(self._pieces(self.own), ParameterState.PIECES)
        # Optimizers compute with parameter, gradient and state of one dtype.
        for parameter, gradient in zip(self.parameters, self._before, strict=True):
            parameter.grad = None if gradient is None else gradient.piece.to(self.own.dtype)

    def hide_pieces(self) -> None:
        """Let the parameters rest; changes of their pieces stay, values that were gathered before are out of date."""
        pairs = zip(self.parameters, self._before, strict=True)
        self._rest([self._widened(parameter.grad, before) for parameter, before in pairs])
        if self._owners is not None and self.gradients.is_trained:
            self._refreshing = [self._owners.gather(self._shard, self.own.to(self._shard.dtype))]

    def show_whole(self) -> None:
        """Make every parameter and gradient whole, in memory of its own. Collective."""
        self._retire()
        self._before = self.gradients.move_out()
        self._show(self.values(), ParameterState.WHOLE)
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

    @untracked()
    def piece_of(self, number: int, tensor: Tensor) -> Tensor:
        """Copy of this rank's piece of a tensor with the shape of the parameter ``number``; one-dimensional."""
        piece = self.own_pieces[number]
        return elements(tensor, self.layout.slots[number])[piece.start : piece.start + piece.numel].clone()

    def own_values(self, number: int) -> Tensor:
        """Values of the parameter ``number`` that this rank updates: a one-dimensional view of the buffer."""
        return self.own[self.own_pieces[number].in_shard]

    @untracked()
    def runs_to_fill(self, number: int) -> list[tuple[int, Tensor]]:
        """Runs of the resting parameter ``number`` in this rank's memory: first element, and view to fill.

        Fill all of it, on all ranks alike.
        """
        self._retire()
        self._wait_refreshed()
        own = (self.own_pieces[number].start, self.own_values(number))
        piece = self.layout.piece(self.layout.slots[number], self._collectives.rank)
        shard = [(piece.start, self._shard[piece.in_shard])] if self._shard.numel() else []
        # Otherwise the own values are a part of the shard's memory.
        return [*shard, own] if not shard or self.layout.is_cast else shard

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
            self._show(values, ParameterState.WHOLE)

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

    def _rest(self, gradients: Sequence[Tensor | None]) -> None:
        """Let the parameters rest, with pieces of gradients."""
        for parameter in self.parameters:
            parameter.grad = None
        self._retire()
        for number, (piece, before) in enumerate(zip(gradients, self._before, strict=True)):
            if piece is not None:
                self.gradients.set_piece(number, piece, is_used=before is None or before.is_used)
        self._before = []

    def _widened(self, gradient: Tensor | None, before: ShardedGradient | None) -> Tensor | None:
        """Cast a gradient back that the optimizer saw in the parameter's dtype."""
        if gradient is None or gradient.dtype == self.gradients.dtype or before is None:
            return gradient
        return before.piece.copy_(gradient)

    def _retire(self) -> None:
        self.wait()
        self._hide()
        if not self.layout.is_persistent:
            self._full.untyped_storage().resize_(0)

    def _show(self, tensors: Sequence[Tensor], state: ParameterState) -> None:
        self._refuse_written()
        self._state = state
        for parameter, tensor in zip(self.parameters, tensors, strict=True):
            if guard_of(parameter) is self._guard:
                unwatch(parameter)
            parameter.data = tensor

    def _hide(self) -> None:
        self._refuse_written()
        self._state = ParameterState.RESTING
        for parameter, tensor in zip(self.parameters, self._placeholders, strict=True):
            if guard_of(parameter) is not self._guard:
                watch(parameter, self._guard)
            parameter.data = tensor

    def _refuse_written(self) -> None:
        """Before gathered values are given up: refuse that code of a unit has written to them.

        Raises:
            UnsupportedError: it has, and the shards do not have what it has written.
        """
        if self._state is not ParameterState.GATHERED:
            return
        states = zip(self.parameters, self._versions, self._views, self.layout.slots, strict=True)
        names = [
            slot.entry.names[0]
            for parameter, version, values, slot in states
            if parameter._version != version or parameter.data_ptr() != values.data_ptr()
        ] or self._written_behind_data()
        if names:
            # The error is raised once.
            self._versions = [each._version for each in self.parameters]
            self._is_compared = False
            raise lost_writes(names)

    @untracked()
    def _written_behind_data(self) -> list[str]:
        """Names of gathered parameters of which this rank's elements are not those that it has sent.

        Versions do not tell of writes to ``parameter.data``. A comparison reads memory, and waits for an accelerator.
        """
        self._num_frees += 1
        if not self._is_compared or self._num_frees % _FREES_PER_COMPARISON:
            return []
        mine = self._full.chunk(self.layout.degree)[self._collectives.rank]
        shard = self._shard if self._shard.numel() else self.own
        step = max(len(mine) // _MOST_COMPARED, 1)
        if _are_same(mine[::step], shard[::step]):
            return []
        pieces = [(slot, self.layout.piece(slot, self._collectives.rank).in_shard) for slot in self.layout.slots]
        return [slot.entry.names[0] for slot, here in pieces if not _are_same(mine[here], shard[here])]

    def _pieces(self, own: Tensor) -> list[Tensor]:
        return [own[piece.in_shard] for piece in self.own_pieces]

    def _put(self, number: int, value: Tensor) -> None:
        """Copy this rank's elements of a parameter's whole ``value``."""
        slot, own = self.layout.slots[number], self.own_pieces[number]
        values = elements(value, slot)
        self.own[own.in_shard].copy_(values[own.start : own.start + own.numel])
        if self._shard.numel():
            piece = self.layout.piece(slot, self._collectives.rank)
            self._shard[piece.in_shard].copy_(values[piece.start : piece.start + piece.numel])

    def _wait_refreshed(self) -> None:
        """Wait until the shard has the updates of all its owners."""
        wait_for(self._refreshing)
        self._refreshing = []
