"""Configuration of glibc's malloc: freed host memory is kept and reused by all threads.

Each microbatch's program runs in a thread of its own, and glibc gives each thread an arena of its own: a part of the
memory, with its own list of free blocks. So a microbatch never reuses memory, warm in the caches, that another one has
just freed. And free memory at the end of an arena is returned to the system, which after the backward of a microbatch
is nearly all of it: the next one gets new pages, thousands per step, each of which must be mapped and cleared first.
Plain training, in a single thread, has neither problem.

Hence one arena for all threads, which keeps its memory. Threads do not contend for it: those of a pipeline take turns.
"""

import ctypes
import functools
import os
import platform

__all__ = ["keep_freed_memory"]

# Parameters of glibc's `mallopt`.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -2, -3, -8
_MOST_BYTES = 2**31 - 1
# Size of the heaps that arenas of threads consist of. With as much padding an empty heap stays. Blocks larger than half
# of one are mapped by themselves in any case.
_HEAP_BYTES = 64 * 2**20


@functools.cache
def keep_freed_memory() -> None:
    """Keep freed memory in this process for all threads that start from now on.

    Call it before the process group is made: threads that have allocated memory before have arenas, which later threads
    may share with them.

    Has no effect if the user has set ``MALLOC_...`` or ``GLIBC_TUNABLES`` in the environment, or if malloc is not
    glibc's.
    """
    has_chosen = any(name.startswith("MALLOC_") for name in os.environ)
    if has_chosen or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "") or platform.libc_ver()[0] != "glibc":
        return
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(_ARENA_MAX, 1)
    mallopt(_MMAP_THRESHOLD, _HEAP_BYTES // 2)
    mallopt(_TRIM_THRESHOLD, _MOST_BYTES)
    mallopt(_TOP_PAD, _HEAP_BYTES)
