"""Channel through slots, for large tensors of accelerators on one machine.

The header contains the size of the slot and its start, which is its name. If no slot is free, and no more may be made,
the tensor goes through a block of the arena that is not page-locked, and the header has 0 as size: slower, but nobody
waits.
"""

import ctypes
import logging
from collections.abc import Sequence
from typing import Final, final

import torch
from torch import Tensor

from smp_strategy.distributed.host_copies import HostCopies, Landed, OnHost, StreamEvent
from smp_strategy.distributed.shared_arena import Arena, PeerArena
from smp_strategy.distributed.torch_modes import outside_inference_mode
from smp_strategy.model.trace.tensor_spec import TensorSpec
from smp_strategy.pipeline.transport.channel import Channel, Header
from smp_strategy.pipeline.transport.device_channels.device_channel import DeviceChannel
from smp_strategy.pipeline.transport.device_channels.slot_memories import SlotMemory
from smp_strategy.pipeline.transport.device_channels.slots import LentSlots, SlotPool
from smp_strategy.pipeline.transport.place_header import PlaceHeader, place_header
from smp_strategy.pipeline.transport.wire_format import dense_strides, received_strides

__all__ = ["SlotChannel"]

_LOG: Final = logging.getLogger("smp_strategy")


@final
class SlotChannel(DeviceChannel):
    """Channel to a stage through slots in both directions: in this rank's arena for all stages, and in that of the
    other stage.

    Attributes:
        outgoing: slots of this rank.
    """

    def __init__(self, memory: SlotMemory, own: Arena, theirs: PeerArena, copies: HostCopies, small: Channel) -> None:
        super().__init__(memory.name, memory.least_bytes, small)
        self._memory, self._own, self._theirs, self._copies = memory, own, theirs, copies
        self.outgoing = SlotPool(memory.new, memory.most_bytes)
        self._incoming = LentSlots(memory.open)

    def post_large(self, tensor: Tensor, spec: TensorSpec) -> Tensor | OnHost:
        dense = dense_strides(tensor)
        slot = self.outgoing.lend(spec.nbytes)
        if slot is None:
            return self._post_beside(tensor, dense)
        header = place_header(tensor.stride(), slot.memory.nbytes, slot.start)
        copied = self._memory.fill(slot, tensor, _seen_as(slot.memory, spec, dense))
        return header if copied is None else OnHost(header, copied)

    def header_of_large(self, spec: TensorSpec) -> Header:
        self._incoming.sweep()

        def take(strides: Sequence[int], words: Sequence[int]) -> Landed:
            return self._take(spec, strides, *words)

        return PlaceHeader(spec, 2, take, goes_on=True)

    def settle(self) -> None:
        self._incoming.sweep()

    def release(self) -> None:
        self._incoming.wait()
        self._incoming.slots.clear()
        self._memory.close()
        self.outgoing.slots.clear()

    def _take(self, spec: TensorSpec, strides: Sequence[int], nbytes: int, start: int) -> Landed:
        dense, last = received_strides(spec, strides)
        if nbytes:
            slot = self._incoming.at(start, nbytes)
            landed = self._memory.fetch(slot, _seen_as(slot.memory, spec, dense), last)
            self._incoming.call_after(landed.copied, slot.give_back)
            return landed
        with outside_inference_mode():
            block = torch.empty(0, dtype=torch.uint8, device="cpu").set_(self._theirs.take(start, spec.nbytes))
        held = [_seen_as(block, spec, dense)]
        landed = self._copies.bring(held[0], last)
        self._incoming.call_after(landed.copied, held.clear)
        return landed

    def _post_beside(self, tensor: Tensor, dense: tuple[int, ...]) -> OnHost:
        """Begin a message that gets no slot."""
        if self.outgoing.num_lacking == 1:
            why = self.outgoing.error or f"all {self._memory.most_bytes >> 20} MiB of them are in use"
            _LOG.warning(
                f"A message to another stage finds no slot of {self._memory.name} ({why}). Such messages take a slower "
                "way, through memory of the host."
            )
        start = self._own.allocate(tensor.nbytes)
        with outside_inference_mode():
            elements = self._copies.snapshot(tensor, dense).as_strided((tensor.numel(),), (1,))
        on_host = self._copies.out(elements)
        moved = _Moved(on_host, self._own.view(start, tensor.nbytes))
        return OnHost(place_header(tensor.stride(), 0, start), moved)


@final
class _Moved(StreamEvent):
    """Event after a copy to the host, and from there to ``target``, other memory of the host."""

    def __init__(self, source: OnHost, target: Tensor) -> None:
        self._source, self._target = source, target

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        memory = self._source.wait()
        ctypes.memmove(self._target.data_ptr(), memory.data_ptr(), memory.nbytes)

    def wait(self) -> None:
        self.synchronize()


def _seen_as(memory: Tensor, spec: TensorSpec, dense: tuple[int, ...]) -> Tensor:
    """Tensor like ``spec``, with strides without gaps, at the beginning of ``memory``."""
    with outside_inference_mode():
        seen = torch.empty(0, dtype=spec.dtype, device=memory.device)
        offset = memory.storage_offset() // spec.dtype.itemsize
        return seen.set_(memory.untyped_storage(), offset, spec.size, dense)
