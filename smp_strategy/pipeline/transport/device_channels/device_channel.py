"""Channel for large tensors of accelerators, over another one for the rest.

Small tensors are in the header, by way of the host: they need one message of gloo and no place that is to be found,
lent or ordered. Tensors of the host take the path of the host.
"""

from abc import abstractmethod

from torch import Tensor

from smp_strategy.distributed.device import is_host
from smp_strategy.distributed.host_copies import OnHost
from smp_strategy.model.trace.tensor_spec import TensorSpec
from smp_strategy.pipeline.transport.channel import Channel, Header

__all__ = ["DeviceChannel"]


class DeviceChannel(Channel):
    """Channel between accelerators.

    Args:
        least_bytes: size from which a tensor takes it.
        small: channel for small tensors, and for those of the host.
    """

    def __init__(self, name: str, least_bytes: int, small: Channel) -> None:
        self._name, self._least_bytes, self._small = name, least_bytes, small

    def post(self, tensor: Tensor, spec: TensorSpec) -> Tensor | OnHost:
        if not self._takes(spec):
            return self._small.post(tensor, spec)
        return self.post_large(tensor.detach().to(spec.dtype), spec)

    def header(self, spec: TensorSpec) -> Header:
        return self.header_of_large(spec) if self._takes(spec) else self._small.header(spec)

    def path_of(self, spec: TensorSpec) -> str:
        return self._name if self._takes(spec) else self._small.path_of(spec)

    def trim(self) -> None:
        self.settle()
        self._small.trim()

    def close(self) -> None:
        self.release()
        self._small.close()

    @abstractmethod
    def post_large(self, tensor: Tensor, spec: TensorSpec) -> Tensor | OnHost:
        """As :meth:`post`."""

    @abstractmethod
    def header_of_large(self, spec: TensorSpec) -> Header:
        """As :meth:`header`."""

    @abstractmethod
    def settle(self) -> None:
        """End a step."""

    @abstractmethod
    def release(self) -> None:
        """Free what belongs to this path; the other channel stays."""

    def _takes(self, spec: TensorSpec) -> bool:
        return spec.nbytes >= self._least_bytes and not is_host(spec.device)
