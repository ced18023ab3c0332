"""Context managers for torch's modes that are entered only if that changes something; modes of a thread for another.

Every message and every segment passes through these. Entering a mode takes about twenty microseconds if the processor's
caches are cold, as they are between two kernels; asking for it is one call.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import final

import torch

from smp_strategy.distributed.device import current_stream, entered

__all__ = ["NOTHING", "ThreadModes", "outside_inference_mode", "recording"]

NOTHING: AbstractContextManager[None] = nullcontext()
"""Context without effect. A single one for all, because even making one takes a call."""


def outside_inference_mode() -> AbstractContextManager[object]:
    """Context whose new tensors can be used outside of inference mode, too."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else NOTHING


def recording() -> AbstractContextManager[object]:
    """Context that autograd records."""
    is_on = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    return NOTHING if is_on else _recording()


@contextmanager
def _recording() -> Iterator[None]:
    with torch.inference_mode(False), torch.enable_grad():
        yield


@final
class ThreadModes:
    """Thread-local modes of PyTorch, captured in the constructing thread and entered in another."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = current_stream(device)
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._autocast = torch.is_autocast_enabled(device.type)
        self._autocast_dtype = torch.get_autocast_dtype(device.type)
        self._autocast_cache = torch.is_autocast_cache_enabled()

    @contextmanager
    def apply(self) -> Iterator[None]:
        """Context in which this thread has the modes; a thread begins outside of all of them."""
        with ExitStack() as stack:
            stack.enter_context(entered(self._stream))
            if self._inference:
                stack.enter_context(torch.inference_mode())
            if torch.is_grad_enabled() != self._grad:
                stack.enter_context(torch.set_grad_enabled(self._grad))
            if self._autocast:
                stack.enter_context(
                    torch.autocast(self._device.type, self._autocast_dtype, cache_enabled=self._autocast_cache)
                )
            yield
