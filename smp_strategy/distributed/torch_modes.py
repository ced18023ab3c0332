"""Context managers for torch's modes that are entered only if that changes something.

Every message and every segment passes through these. Entering a mode takes about twenty microseconds if the processor's
caches are cold, as they are between two kernels; asking for it is one call.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

__all__ = ["NOTHING", "outside_inference_mode", "recording"]

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
