"""Header that says where a tensor is: the strides of the original, then the words of a channel.

Both ends know the size from the program, and only the sender knows the strides (:mod:`wire_format`).
"""

import struct
from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import Tensor

from smp_strategy.distributed.host_copies import Landed
from smp_strategy.distributed.torch_modes import outside_inference_mode
from smp_strategy.model.trace.tensor_spec import TensorSpec
from smp_strategy.pipeline.transport.channel import Header
from smp_strategy.pipeline.transport.wire_format import MARK

__all__ = ["PlaceHeader", "place_header"]


def place_header(strides: Sequence[int], *words: int) -> Tensor:
    """Header of a tensor with these ``strides``. The last word must not look like the mark: no small number does."""
    with outside_inference_mode():
        return torch.frombuffer(
            bytearray(struct.pack(f"={len(strides) + len(words)}q", *strides, *words)), dtype=torch.uint8
        )


@final
class PlaceHeader(Header):
    """Receive buffer of such a header, with ``num_words`` after the strides of the original; ``take`` finds the tensor
    by both.
    """

    def __init__(
        self,
        spec: TensorSpec,
        num_words: int,
        take: Callable[[Sequence[int], Sequence[int]], Landed],
        *,
        goes_on: bool,
    ) -> None:
        self.goes_on = goes_on
        self._take, self._dims, self._format = take, len(spec.size), f"={len(spec.size) + num_words}q"
        self._received = bytearray(struct.calcsize(self._format) - len(MARK)) + MARK
        with outside_inference_mode():
            self.memory = torch.frombuffer(self._received, dtype=torch.uint8)

    def is_there(self) -> bool:
        return not self._received.endswith(MARK)

    def take(self) -> Landed:
        numbers = struct.unpack(self._format, self._received)
        return self._take(numbers[: self._dims], numbers[self._dims :])
