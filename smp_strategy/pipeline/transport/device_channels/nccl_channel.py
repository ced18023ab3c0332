"""Channel through NCCL, for large tensors of accelerators on different machines.

Each direction is an edge with a communicator and a stream of its own; an order of its messages is agreed upon by
announcements (:mod:`~smp_strategy.pipeline.transport.device_channels.message_order`). The header says which number the
tensor has. No host waits for the device.

Small tensors do not queue up behind large ones on the edge, and need one message of gloo instead of two. Their copies
to the host and back take some microseconds each, about as long as a kernel of NCCL.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Final, final

import torch
import torch.distributed as dist
from torch import Tensor

from smp_strategy.distributed.background_call import BackgroundCall
from smp_strategy.distributed.device_paths.ordered_edge import OrderedEdge
from smp_strategy.distributed.host_copies import HostCopies, Landed
from smp_strategy.distributed.torch_modes import outside_inference_mode
from smp_strategy.model.trace.tensor_spec import TensorSpec
from smp_strategy.pipeline.transport.channel import Channel, Header
from smp_strategy.pipeline.transport.device_channels.device_channel import DeviceChannel
from smp_strategy.pipeline.transport.device_channels.message_order import (
    AnnouncementWriter,
    IncomingOrder,
    OutgoingOrder,
    read_announcements,
)
from smp_strategy.pipeline.transport.place_header import PlaceHeader, place_header
from smp_strategy.pipeline.transport.wire_format import dense_strides, received_strides

__all__ = ["NcclChannel", "OrderKeeper"]

LEAST_BYTES: Final = 1 << 16
"""Size from which a tensor goes through NCCL. Not measured: at 64 KiB gloo needs about as long as two headers."""
FAREWELL_SECONDS: Final = 5.0


@final
class NcclChannel(DeviceChannel):
    """Channel over two edges, one in each direction; ``keeper`` keeps their order with the other rank, unless somebody
    else does.
    """

    def __init__(
        self,
        outgoing: OutgoingOrder,
        incoming: IncomingOrder,
        copies: HostCopies,
        small: Channel,
        keeper: "OrderKeeper | None" = None,
    ) -> None:
        super().__init__("NCCL", LEAST_BYTES, small)
        self._outgoing, self._incoming, self._copies = outgoing, incoming, copies
        self._keeper = keeper

    def post_large(self, tensor: Tensor, spec: TensorSpec) -> Tensor:
        message = self._copies.snapshot(tensor, dense_strides(tensor))
        with outside_inference_mode():
            elements = message.as_strided((message.numel(),), (1,)).view(torch.uint8)
        return place_header(tensor.stride(), self._outgoing.send(elements))

    def header_of_large(self, spec: TensorSpec) -> Header:
        def take(strides: Sequence[int], words: Sequence[int]) -> Landed:
            dense, last = received_strides(spec, strides)
            elements, copied = self._incoming.take(words[0])
            with outside_inference_mode():
                tensor = torch.empty(0, dtype=spec.dtype, device=elements.device)
                tensor.set_(elements.untyped_storage(), 0, spec.size, dense)
            if last == dense:
                return Landed(tensor, copied)
            return self._copies.bring(tensor, last, copied)

        return PlaceHeader(spec, 1, take, goes_on=True)

    def settle(self) -> None:
        if self._keeper is not None:
            self._keeper.settle()

    def release(self) -> None:
        if self._keeper is not None:
            self._keeper.close()


@final
class OrderKeeper:
    """Announcements of two edges, which travel between this rank and another by gloo.

    Attributes:
        outgoing, incoming: the ends for a channel.
    """

    def __init__(self, edges: tuple[OrderedEdge, OrderedEdge], group: dist.ProcessGroup, peer: int) -> None:
        self._edges = edges
        self._writer = AnnouncementWriter(group, peer)
        self.outgoing, self.incoming = OutgoingOrder(edges[0], self._writer), IncomingOrder(edges[1])
        self._reader = BackgroundCall(lambda: read_announcements(self.incoming, group, peer, self._break_off))

    def settle(self) -> None:
        """Free the memory of announcements, once they have arrived."""
        self._writer.wait()

    def close(self) -> None:
        """End the edges, together with the other rank unless that is gone."""
        with suppress(RuntimeError):  # its connection is broken
            self._writer.end()
        is_broken = not self._reader.within(FAREWELL_SECONDS) or self.incoming.is_broken
        for edge in self._edges:
            edge.close(is_broken=is_broken)

    def _break_off(self) -> None:
        for edge in self._edges:
            with suppress(RuntimeError):  # there is another error to tell
                edge.close(is_broken=True)
