"""Memory of the host that tensors have left is there for the next ones, whichever thread asks for it.

Each microbatch's program runs in a thread of its own, and glibc gives each thread an arena of its own: a part of the
memory, with its own list of what is free. So a microbatch never computes into what another one has just left. And what
is free at the end of an arena goes back to the system, which after the backward of a microbatch is nearly all of it:
the next one meets new pages, thousands per step, each of which must be mapped and cleared first, and no cache knows
them. Plain training, in one thread, meets neither.

Hence one arena for all threads, which keeps what it has. Threads share it without getting into each other's way: those
of a pipeline take turns.
"""

import ctypes
import functools
import os
import platform

__all__ = ["keep_freed_memory"]

# Parameters of glibc's `mallopt`.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -2, -3, -8
_MOST_BYTES = 2**31 - 1
# Arenas of threads consist of heaps of this size. Padded by as much, an empty heap stays; and what is larger than half
# of one is memory of its own in any case.
_HEAP_BYTES = 64 * 2**20


@functools.cache
def keep_freed_memory() -> None:
    """Let this process keep what it frees, for all threads that begin from now on, as long as it lives.

    Threads that have allocated memory before have arenas, which later threads may share with them; so it is best called
    before the process group is made.

    Does nothing where the user has chosen otherwise (``MALLOC_...`` or ``GLIBC_TUNABLES`` in the environment), or where
    malloc is not glibc's.
    """
    has_chosen = any(name.startswith("MALLOC_") for name in os.environ)
    if has_chosen or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "") or platform.libc_ver()[0] != "glibc":
        return
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(_ARENA_MAX, 1)
    mallopt(_MMAP_THRESHOLD, _HEAP_BYTES // 2)
    mallopt(_TRIM_THRESHOLD, _MOST_BYTES)
    mallopt(_TOP_PAD, _HEAP_BYTES)
