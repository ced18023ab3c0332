"""Channel: how the elements of a tensor reach another stage.

gloo carries the header of every message, whatever the channel. Its tag says which message it is, it tells the receiver
that the message is there, and the death of a peer breaks its connection. So order, deadlock detection and failures do
not depend on the channel::

    sender      post       puts the elements in place, returns the header            [Channel.post]
                           ... gloo sends the header, Transport confirms its arrival
    receiver    header     memory for the header, which gloo receives into           [Channel.header]
                take       makes a tensor of what has arrived                        [Header.take]

Both ends know size, dtype and device of the tensor from the program, and so choose the same way for it without a word.
"""

from abc import ABC, abstractmethod
from typing import Final, final

import torch
from torch import Tensor

from smp_strategy.distributed.device import is_host
from smp_strategy.distributed.host_copies import HostCopies, Landed, OnHost
from smp_strategy.distributed.torch_modes import outside_inference_mode
from smp_strategy.model.trace.tensor_spec import TensorSpec
from smp_strategy.pipeline.transport import wire_format as messages

__all__ = ["GLOO", "Channel", "GlooChannel", "Header"]

GLOO: Final = "gloo"
"""Name of the path whose headers contain the tensor."""


class Header(ABC):
    """Receive buffer of a header.

    Attributes:
        memory: host memory that gloo receives into.
        goes_on: whether :meth:`take` should be called as soon as possible, because it begins a copy.
    """

    memory: Tensor
    goes_on: bool

    @abstractmethod
    def is_there(self) -> bool:
        """Whether the header has arrived, except for a moment that gloo may need; without blocking."""

    @abstractmethod
    def take(self) -> Landed:
        """The tensor, once gloo has received the header; called once."""


class Channel(ABC):
    """Way of tensors between this stage and another, in both directions.

    Attributes:
        declined: paths that would be better and why they are not taken, in words for the report.
    """

    declined: tuple[str, ...] = ()

    @abstractmethod
    def post(self, tensor: Tensor, spec: TensorSpec) -> Tensor | OnHost:
        """Put the elements of ``tensor`` in place for the other stage, which expects them to be like ``spec``.

        Returns:
            The header, in memory of the host; a copy under way if it is not there yet. Later changes of ``tensor`` do
            not reach it.
        """

    @abstractmethod
    def header(self, spec: TensorSpec) -> Header:
        """Receive buffer for the header of a tensor like ``spec``."""

    @abstractmethod
    def path_of(self, spec: TensorSpec) -> str:
        """Name of the path that a tensor like ``spec`` takes."""

    @abstractmethod
    def trim(self) -> None:
        """Free memory that the last step has not used."""

    @abstractmethod
    def close(self) -> None:
        """Free all memory that no tensor is in."""


@final
class GlooChannel(Channel):
    """Channel whose header is the whole tensor. Those of accelerators are copied through the host."""

    def __init__(self) -> None:
        self._copies: dict[torch.device, HostCopies] = {}

    def post(self, tensor: Tensor, spec: TensorSpec) -> Tensor | OnHost:
        message = messages.pack(tensor, spec)
        return message if is_host(message.device) else self._copies_of(message.device).out(message)

    def header(self, spec: TensorSpec) -> Header:
        host = messages.on_host(spec)
        return _WholeTensor(spec, host, None if host is spec else self._copies_of(spec.device))

    def path_of(self, spec: TensorSpec) -> str:
        return GLOO

    def trim(self) -> None:
        pass

    def close(self) -> None:
        pass

    def _copies_of(self, device: torch.device) -> HostCopies:
        if device not in self._copies:
            self._copies[device] = HostCopies(device)
        return self._copies[device]


@final
class _WholeTensor(Header):
    """Header that contains the tensor.

    Args:
        host: ``spec`` on the host.
        copies: copies to its device; ``None``: it is the host.
    """

    def __init__(self, spec: TensorSpec, host: TensorSpec, copies: HostCopies | None) -> None:
        nbytes = messages.bytes_of(spec)
        with outside_inference_mode():  # the tensor may be used outside of the inference mode of its first use
            self.memory = (
                torch.empty(nbytes, dtype=torch.uint8, device="cpu") if copies is None else copies.memory(nbytes)
            )
        self.goes_on = copies is not None
        self._copies = copies
        self._incoming = messages.Incoming(self.memory, host)

    def is_there(self) -> bool:
        return self._incoming.is_there()

    def take(self) -> Landed:
        arrived = self._incoming.tensor()
        return Landed(arrived) if self._copies is None else self._copies.back(arrived)
