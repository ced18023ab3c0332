"""Garbage collection pauses where it would only cost time.

A search makes and frees millions of small objects that hold no cycles. Each collection that they cause visits all
objects of the process, those of PyTorch and of the model among them, and takes half of the time of a search.
"""

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["collecting_paused"]


@contextlib.contextmanager
def collecting_paused() -> Iterator[None]:
    """Context, or decorator, in which no garbage is collected."""
    is_collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_collecting:
            gc.enable()
