"""torch's modes, entered only where that changes something.

Every message and every segment passes through these. Entering a mode takes about twenty microseconds where the
processor's caches are cold, as they are between two kernels; asking for it is one call.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

__all__ = ["NOTHING", "outside_inference_mode", "recording"]

NOTHING: AbstractContextManager[None] = nullcontext()
"""Changes nothing. One for all, because even making one takes a call."""


def outside_inference_mode() -> AbstractContextManager[object]:
    """Tensors that are made in here can be used outside of inference mode, too."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else NOTHING


def recording() -> AbstractContextManager[object]:
    """Autograd records what happens in here."""
    is_on = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    return NOTHING if is_on else _recording()


@contextmanager
def _recording() -> Iterator[None]:
    with torch.inference_mode(False), torch.enable_grad():
        yield
