"""Channel through shared memory between stages on one machine, for large tensors of the host.

The sender copies a tensor once, into a block of its arena (:mod:`smp_strategy.distributed.shared_arena`), and the
header says where. The receiver computes on the block itself. gloo's socket would copy each byte twice and go through
the kernel for it. Small tensors are in the header, as under gloo alone: passing them on costs less than finding them.

The sender keeps nothing alive and waits for nothing: the block is a copy, which stays until the receiver drops the
tensor. So there are at most as many blocks as there were receive buffers otherwise.
"""

from collections.abc import Sequence
from typing import Final, final

from torch import Tensor

from smp_strategy.distributed.device import is_host
from smp_strategy.distributed.host_copies import Landed, OnHost
from smp_strategy.distributed.shared_arena import Arena, PeerArena
from smp_strategy.model.trace.tensor_spec import TensorSpec
from smp_strategy.pipeline.transport.channel import Channel, Header
from smp_strategy.pipeline.transport.place_header import PlaceHeader, place_header
from smp_strategy.pipeline.transport.wire_format import dense_strides, unpacked

__all__ = ["SharedMemoryChannel"]

LEAST_BYTES: Final = 1 << 19
"""Size from which a tensor is in shared memory. At 256 KiB gloo has more bandwidth, at 1 MiB less."""


@final
class SharedMemoryChannel(Channel):
    """Channel to a stage that can read this rank's arena, and whose arena this rank can read."""

    def __init__(self, own: Arena, theirs: PeerArena, small: Channel) -> None:
        self._own, self._theirs, self._small = own, theirs, small

    def post(self, tensor: Tensor, spec: TensorSpec) -> Tensor | OnHost:
        if not _is_large(spec):
            return self._small.post(tensor, spec)
        tensor = tensor.detach().to(spec.dtype)
        start = self._own.put(tensor, dense_strides(tensor))
        return place_header(tensor.stride(), start)

    def header(self, spec: TensorSpec) -> Header:
        if not _is_large(spec):
            return self._small.header(spec)

        def take(strides: Sequence[int], words: Sequence[int]) -> Landed:
            return Landed(unpacked(self._theirs.take(words[0], spec.nbytes), spec, strides))

        return PlaceHeader(spec, 1, take, goes_on=False)

    def path_of(self, spec: TensorSpec) -> str:
        return "shared memory" if _is_large(spec) else self._small.path_of(spec)

    def trim(self) -> None:
        self._own.trim()

    def close(self) -> None:
        self._own.close()


def _is_large(spec: TensorSpec) -> bool:
    return spec.nbytes >= LEAST_BYTES and is_host(spec.device)
