"""Parameters of one kind in a flat buffer, of which a rank keeps its shard: their values, and their gradients.

Between uses a rank has its shard only. For a use the buffer's memory is allocated anew and an all-gather fills it;
afterwards the memory is freed. The buffer itself stays, and so do the views of it that autograd has saved: freeing is
``resize_(0)`` of the storage that they all share, and what they read in backward is what the next gather has put there.

The parameters stay the same objects. Their ``data`` are exchanged, which leaves their version counters alone, so that
autograd finds its saved tensors unchanged (and notices when somebody else has changed them).

============  ==============================================================================================
gathered      a view of the buffer
resting       shape, dtype and device as ever, without values: NaN, stored once
pieces shown  this rank's piece, one-dimensional, a view of the shard; ``grad`` likewise
============  ==============================================================================================

Between uses a parameter could show its piece all the time, so that an optimizer would find it without further ado.
But then its shape would be another one whenever somebody looks (weight decay by ``ndim``, summaries), and a computation
with a weight that is not gathered could give a plausible number. NaN is no plausible number.

Gradients are moved into a buffer of the same layout, in which those that are missing are zero. It is reduced over the
group, and what is left of it is this rank's shard, to which later microbatches are added.
"""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn

from smp_strategy.errors import UnsupportedError
from smp_strategy.sharding.collectives import Collectives
from smp_strategy.sharding.layout import FlatLayout, Slot
from smp_strategy.sharding.messages import Pending

__all__ = ["FlatBuffer"]


@final
class FlatBuffer:
    """See the module docstring. Takes over the values of the parameters, which rest from then on.

    Args:
        layout: where the parameters stand.
        parameters: in the order of the layout's slots; those on the meta device are zero until their pieces are
            filled in.
        collectives: those of the shard group.
        device: where the buffer is.

    Attributes:
        layout: as given.
        shard: this rank's share of the values.
        gradients: this rank's share of the gradients; ``None`` where there are none.
        is_used: for each parameter, whether it has had a gradient on this rank since gradients were begun anew.
    """

    def __init__(
        self, layout: FlatLayout, parameters: Sequence[nn.Parameter], collectives: Collectives, device: torch.device
    ) -> None:
        self.layout = layout
        self.gradients: Tensor | None = None
        self._parameters = parameters
        self._collectives = collectives
        self._placeholders = [_placeholder(parameter, device) for parameter in parameters]
        self._full = torch.empty(layout.full_numel, dtype=getattr(torch, layout.dtype), device=device)
        self._views = [_view(self._full, slot) for slot in layout.slots]
        if layout.is_persistent:
            self.shard = self._full.chunk(layout.degree)[collectives.rank].zero_()
        else:
            self.shard = self._full.new_zeros(layout.shard_numel)
            self._full.untyped_storage().resize_(0)
        for parameter, slot, piece in zip(parameters, layout.slots, self._pieces(self.shard), strict=True):
            if parameter.is_meta:
                _leave_meta(parameter, device)
            else:
                start = layout.piece(slot, collectives.rank).start
                piece.copy_(_elements(parameter, slot)[start : start + piece.numel()])
        self._arriving: Pending | None = None
        self._is_gathered = False
        self.is_used = [False] * len(parameters)
        self._collected: Tensor | None = None
        self._has_gradient: list[bool] = []
        self._reducing: Pending | None = None
        self._show(self._placeholders)

    @property
    def held_bytes(self) -> int:
        """Bytes of parameters that this rank holds now."""
        full = self._full.untyped_storage().nbytes()
        return full if self.layout.is_persistent else full + self.shard.nbytes

    @property
    def memory(self) -> range:
        """The addresses of the values, while they are gathered."""
        start = self._full.data_ptr()
        return range(start, start + self.layout.full_bytes)

    @property
    def has_gradients(self) -> bool:
        """Whether there are gradients that have not been reduced."""
        return self._collected is not None or any(parameter.grad is not None for parameter in self._parameters)

    def gather(self, *, anew: bool = False) -> None:
        """Begin to gather the values; does nothing while they are gathered, unless other ranks need it ``anew``."""
        if self._is_gathered or self._arriving is not None:
            if self.layout.is_persistent or not anew:
                return
            self.wait()
        elif not self.layout.is_persistent:
            self._full.untyped_storage().resize_(self.layout.full_bytes)
        self._arriving = self._collectives.gather(self._full, self.shard)

    def wait(self) -> None:
        """Until the values that are being gathered are there."""
        if self._arriving is not None:
            self._arriving.wait()
            self._arriving = None
            self._is_gathered = True
            self._show(self._views)

    def free(self) -> None:
        """Let go of the values of other ranks; of small parameters everything stays."""
        if not self.layout.is_persistent:
            self._retire()

    def collect(self) -> None:
        """Move the parameters' gradients into the buffer, to those that are there."""
        for number, (parameter, slot) in enumerate(zip(self._parameters, self.layout.slots, strict=True)):
            if not self.layout.is_trained:
                _refuse_gradient(parameter, slot)
            elif (gradient := parameter.grad) is not None:
                parameter.grad = None
                if gradient.layout is not torch.strided:
                    raise UnsupportedError(
                        f"The gradient of `{slot.entry.names[0]}` is sparse, and shards are dense: use `sparse=False`."
                    )
                self._collect(number, gradient)

    def reduce(self, factor: float) -> None:
        """Begin to add up the gradients of all ranks, each multiplied by a factor of its own, to those of before."""
        self.collect()
        if not self.layout.is_trained:
            return
        self.wait_reduced()
        full = self._gradient_buffer()
        for slot, is_there in zip(self.layout.slots, self._has_gradient, strict=True):
            if not is_there:
                _view(full, slot).zero_()
        for start, stop in self.layout.padding:
            full[start:stop].zero_()
        if factor != 1.0:
            full.mul_(factor)
        self._collected = None
        is_first = self.gradients is None
        if self.gradients is None:
            self.gradients = torch.empty_like(self.shard)
        self._reducing = self._collectives.reduce(full, self.gradients, is_first=is_first)

    def wait_reduced(self) -> None:
        """Until the gradients that are being reduced are there."""
        if self._reducing is not None:
            self._reducing.wait()
            self._reducing = None

    def drop_gradients(self) -> None:
        """Begin anew with gradients."""
        self.wait_reduced()
        self.gradients = self._collected = None
        self.is_used = [False] * len(self._parameters)

    def take_gradients(self) -> tuple[Tensor, Pending | None]:
        """Hand over the gradients, zeros where there are none, and what is left to wait for. It has none then."""
        shard, self.gradients = self.gradients, None
        reducing, self._reducing = self._reducing, None
        return torch.zeros_like(self.shard) if shard is None else shard, reducing

    def show_pieces(self, has_gradient: Sequence[bool]) -> None:
        """Let every parameter be this rank's piece of it, and its gradient, where it is to have one, alike."""
        assert all(parameter.grad is None for parameter in self._parameters), "gradients are collected before"
        self.wait()
        self.wait_reduced()
        self._show(self._pieces(self.shard))
        if self.gradients is not None:
            pieces = self._pieces(self.gradients)
            for parameter, piece, is_there in zip(self._parameters, pieces, has_gradient, strict=True):
                parameter.grad = piece if parameter.requires_grad and is_there else None

    def hide_pieces(self) -> None:
        """Let the parameters rest; what was done to their pieces stays, what was gathered before is out of date."""
        found = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        if all(gradient is None for gradient in found):
            self.gradients = None
        else:
            self._keep_gradients(found)
        self._retire()

    def dissolve(self) -> None:
        """Gather, and let the parameters own their values again."""
        self.gather()
        self.wait()
        self._show([view.clone() for view in self._views])

    def _keep_gradients(self, found: Sequence[Tensor | None]) -> None:
        if self.gradients is None:
            self.gradients = torch.zeros_like(self.shard)
        for gradient, piece in zip(found, self._pieces(self.gradients), strict=True):
            if gradient is None:
                piece.zero_()
            elif gradient.data_ptr() != piece.data_ptr():
                piece.copy_(gradient)

    def _retire(self) -> None:
        self.wait()
        self._show(self._placeholders)
        self._is_gathered = False
        if not self.layout.is_persistent:
            self._full.untyped_storage().resize_(0)

    def _collect(self, number: int, gradient: Tensor) -> None:
        view = _view(self._gradient_buffer(), self.layout.slots[number])
        if self._has_gradient[number]:
            view.add_(gradient)
        else:
            view.copy_(gradient)
        self._has_gradient[number] = self.is_used[number] = True

    def _gradient_buffer(self) -> Tensor:
        if self._collected is None:
            self._collected = torch.empty(self.layout.full_numel, dtype=self.shard.dtype, device=self.shard.device)
            self._has_gradient = [False] * len(self._parameters)
        return self._collected

    def _show(self, tensors: Sequence[Tensor]) -> None:
        for parameter, tensor in zip(self._parameters, tensors, strict=True):
            parameter.data = tensor

    def _pieces(self, shard: Tensor) -> list[Tensor]:
        pieces = [self.layout.piece(slot, self._collectives.rank) for slot in self.layout.slots]
        return [shard[piece.offset : piece.offset + piece.numel] for piece in pieces]


def _view(flat: Tensor, slot: Slot) -> Tensor:
    return flat.as_strided(slot.entry.shape, slot.entry.stride, slot.offset)


def _elements(parameter: nn.Parameter, slot: Slot) -> Tensor:
    """In the order in which they stand in memory."""
    tensor = parameter.detach()
    if tensor.stride() != slot.entry.stride:
        tensor = torch.empty_strided(tensor.shape, slot.entry.stride, dtype=tensor.dtype, device=tensor.device)
        tensor.copy_(parameter.detach())
    return tensor.as_strided((tensor.numel(),), (1,))


def _leave_meta(parameter: nn.Parameter, device: torch.device) -> None:
    """Give it memory of another device, which an exchange of ``data`` cannot."""
    real = nn.Parameter(torch.empty(0, dtype=parameter.dtype, device=device), parameter.requires_grad)
    vars(real).update(vars(parameter))
    torch.utils.swap_tensors(parameter, real)


def _placeholder(parameter: nn.Parameter, device: torch.device) -> Tensor:
    fill = float("nan") if parameter.is_floating_point() or parameter.is_complex() else 0
    one = torch.full((1,) * parameter.ndim, fill, dtype=parameter.dtype, device=device)
    return one.expand(parameter.shape)


def _refuse_gradient(parameter: nn.Parameter, slot: Slot) -> None:
    if parameter.requires_grad or parameter.grad is not None:
        raise UnsupportedError(
            f"`{slot.entry.names[0]}` was frozen when it was sharded, and is to be trained now. Unfreeze it before the "
            "run begins, or begin another run."
        )
