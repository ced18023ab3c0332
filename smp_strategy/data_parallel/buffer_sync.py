"""Buffer synchronisation: after each step all replicas take over the changed buffers of the first replica.

Replicas read different samples, so each computes running statistics, codebooks and queues of its own, and it would be
chance which of them a checkpoint or validation uses. DistributedDataParallel broadcasts the buffers of rank 0 before a
forward. Here they are broadcast where gradients are averaged: when a step has ended an accumulation window. So hooks,
validation, checkpoints and the next step find the same values everywhere, and evaluation, in which replicas may have
different numbers of batches, sends nothing.

Most buffers are constants (masks, rotary tables) and must not be sent in each step. So every replica notes, for each
module, whether its buffers were replaced or written to since the last broadcast, and the maximum of the replicas' notes
decides. The notes travel together with those about gradients, if there are any.

PyTorch counts writes, but not those of batch norm's kernel. The layers of ``torch.nn`` that call it count their batches
in a buffer of the same module. For other modules values are compared once, after the first window; a module that was
changed without being counted is always sent from then on.
"""

from collections.abc import Sequence
from typing import NamedTuple, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from smp_strategy.distributed import watched_collectives as collectives
from smp_strategy.distributed.torch_private import overlaps_itself
from smp_strategy.model.guarded_tensors import untracked

__all__ = ["Notes", "BufferSync"]

Notes = Sequence[int]
"""For each module ``SAME``, ``VALUES`` (values have changed) or ``SHAPES`` (names, shapes or dtypes have)."""
SAME, VALUES, SHAPES = 0, 1, 2

_BUFFERS = "the buffers of replicas"


class _Spec(NamedTuple):
    """Metadata of a buffer."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device_type: str
    is_persistent: bool


@final
class BufferSync:
    """Keeps the buffers of a stage's replicas equal.

    Args:
        modules: Modules of this rank's stage, the same on all replicas, with equal buffers.
        group: Replicas of the stage, the first one first. ``None``: they keep their own buffers, or there is only one.
    """

    def __init__(self, modules: Sequence[nn.Module], group: dist.ProcessGroup | None) -> None:
        self._modules = modules if group is not None else ()
        self._group = group
        self._first = 0 if group is None else dist.get_global_rank(group, 0)
        self._held = [module._buffers for module in self._modules]
        # Tensors are kept, because another may be made at the address of one that is gone.
        self._seen: dict[int, list[tuple[str, Tensor, int]]] = {}
        self._specs: dict[int, list[_Spec]] = {}
        for number, held in enumerate(self._held):
            if held:
                self._note(number)
        self._unseen = {number for number, module in enumerate(self._modules) if _counts_nothing(module)}
        self._before = {number: _clones(self._held[number]) for number in self._seen if number not in self._unseen}
        self._may_differ = False

    def may_change(self) -> None:
        """Note that a step is being trained."""
        self._may_differ = True

    def notes(self) -> Notes:
        """Changes on this replica since the last broadcast."""
        found = [SAME] * len(self._modules)
        for number, held in enumerate(self._held):
            if held or number in self._seen:
                found[number] = self._changed(number, held)
        return found

    def meet(self, notes: Notes | None = None) -> None:
        """Take over the buffers of the first replica that have changed on any of them. Collective.

        Args:
            notes: Maximum over the replicas' notes; ``None``: it is computed now.
        """
        if self._group is None or not self._modules:
            return
        # Replicas run the same code, so either all of them have buffers by now or none has.
        if notes is not None or self._seen or any(self._held):
            self._take_over(self._agreed(self.notes()) if notes is None else notes)
            self._before.clear()

    def meet_entirely(self) -> None:
        """Take over all buffers of the first replica, if there was training since. Collective."""
        if self._may_differ:
            self.meet(self._agreed([max(note, VALUES) for note in self.notes()]))
            self._may_differ = False

    def _agreed(self, notes: Notes) -> Notes:
        said = torch.tensor(notes, dtype=torch.int32, device="cpu")
        collectives.reduce_numbers(said, dist.ReduceOp.MAX, group=self._group, doing=_BUFFERS).wait()
        return said.tolist()

    def _changed(self, number: int, held: dict[str, Tensor | None]) -> int:
        tensors = [(name, tensor) for name, tensor in held.items() if tensor is not None]
        seen = self._seen.get(number, [])
        is_same = len(tensors) == len(seen) and all(
            tensor is other and _version(tensor) == version
            for (_, tensor), (_, other, version) in zip(tensors, seen, strict=True)
        )
        if is_same:
            if number in self._before and _differ(tensors, self._before[number]):
                self._unseen.add(number)
            return VALUES if number in self._unseen else SAME
        return VALUES if _specs(self._modules[number]) == self._specs.get(number, []) else SHAPES

    def _take_over(self, notes: Notes) -> None:
        numbers = [number for number, note in enumerate(notes) if note]
        if not numbers:
            return
        if SHAPES in notes:
            described = {number: _specs(self._modules[number]) for number in numbers}
            theirs = collectives.tell(described, self._first, _BUFFERS, self._group)
        else:
            theirs = {number: self._specs.get(number, []) for number in numbers}
        with untracked():
            wanted = [(number, spec) for number in numbers for spec in theirs[number]]
            for kind in dict.fromkeys(spec.device_type for _, spec in wanted):
                self._broadcast([(number, spec) for number, spec in wanted if spec.device_type == kind], kind)
        for number in numbers:
            self._note(number)

    def _broadcast(self, wanted: Sequence[tuple[int, _Spec]], device: str) -> None:
        """Broadcast all buffers on a device as one run of bytes."""
        sizes = [_num_bytes(spec) for _, spec in wanted]
        if dist.get_rank(self._group) == 0:
            values = [_bytes_of(self._modules[number].get_buffer(spec.name)) for number, spec in wanted]
            collectives.broadcast(torch.cat(values), self._first, group=self._group, doing=_BUFFERS).wait()
            return
        flat = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        collectives.broadcast(flat, self._first, group=self._group, doing=_BUFFERS).wait()
        for (number, spec), piece in zip(wanted, flat.split(sizes), strict=True):
            # Not a view: its place in the run need not be aligned to its dtype.
            _put(self._modules[number], spec, piece.clone().view(spec.dtype).view(spec.shape))

    def _note(self, number: int) -> None:
        module = self._modules[number]
        tensors = [(name, tensor) for name, tensor in self._held[number].items() if tensor is not None]
        self._seen[number] = [(name, tensor, _version(tensor)) for name, tensor in tensors]
        self._specs[number] = _specs(module)


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _counts_nothing(module: nn.Module) -> bool:
    """Whether the statistics of ``module`` change without being counted."""
    return isinstance(module, _NormBase) and module.running_mean is not None and module.num_batches_tracked is None


def _specs(module: nn.Module) -> list[_Spec]:
    hidden = module._non_persistent_buffers_set
    return [
        _Spec(name, tuple(tensor.shape), tensor.dtype, tensor.device.type, name not in hidden)
        for name, tensor in module._buffers.items()
        if tensor is not None
    ]


def _clones(held: dict[str, Tensor | None]) -> dict[str, Tensor]:
    return {name: each.clone() for name, each in held.items() if each is not None and each.is_floating_point()}


def _differ(tensors: Sequence[tuple[str, Tensor]], before: dict[str, Tensor]) -> bool:
    return any(name in before and not torch.equal(tensor, before[name]) for name, tensor in tensors)


def _num_bytes(spec: _Spec) -> int:
    return torch.Size(spec.shape).numel() * spec.dtype.itemsize


def _bytes_of(tensor: Tensor) -> Tensor:
    # A single element counts as contiguous whatever its stride.
    return tensor.detach().contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _put(module: nn.Module, spec: _Spec, value: Tensor) -> None:
    buffer = module._buffers.get(spec.name)
    if buffer is not None and _takes(buffer, value):
        buffer.copy_(value)
    else:
        module.register_buffer(spec.name, value, persistent=spec.is_persistent)


def _takes(buffer: Tensor, value: Tensor) -> bool:
    """Whether ``value`` can be written to ``buffer``; not if that is expanded, or was made in inference mode."""
    is_alike = buffer.shape == value.shape and buffer.dtype == value.dtype
    return is_alike and not buffer.is_inference() and not overlaps_itself(buffer)
