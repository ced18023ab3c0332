"""Shutdown: cleanup of threads and process groups when the process ends.

[Note: leaving] A thread of gloo drops the tensors of a collective after its waiter has returned, and needs Python's GIL
for that. While the interpreter shuts down, Python (before 3.14) ends a thread that asks for the GIL, here in the middle
of a C++ destructor, and the process aborts after all of its work is done: ``terminate called without an active
exception``. So gloo's threads have to end before the interpreter does. They end with their process group, which lives
until torch and all engines drop it: ``destroy_process_group``, which Lightning calls for NCCL only and Accelerate in
``end_training``.

After a failure groups are not dropped: a thread may be in a collective for which other ranks will never come.
"""

import atexit
import weakref
from collections.abc import Callable

__all__ = ["call_at_exit"]


def call_at_exit(method: Callable[[], object], then: Callable[[], None] = lambda: None) -> None:
    """Call a bound ``method`` when the process ends, if its object still lives; the object is not kept alive."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        alive = reference()
        if alive is not None and alive():
            then()

    atexit.register(call)
