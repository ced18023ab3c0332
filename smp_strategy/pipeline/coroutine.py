"""Coroutine of one microbatch's program: it runs until it has to wait, and is resumed at that point.

The program is the user's own code, so it cannot ``yield``. It runs in a thread of its own, and control is handed over:
either the scheduler runs or exactly one program. Threads rather than greenlets, because grad mode, autocast, inference
mode and saved-tensor hooks are thread-local in PyTorch and must not leak from one microbatch into another. The current
device, its stream, grad mode, inference mode and autocast are copied from the scheduler's thread when a program begins.
"""

import contextvars
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, final

import torch

from smp_strategy.distributed.device import current_stream, entered
from smp_strategy.model.rng import Streams, derive_seed
from smp_strategy.pipeline.threads import ProgramThread, ThreadPool

__all__ = ["BETWEEN_TURNS", "Coroutine"]

# No other stream derives from the seed of a step or a microbatch by this number.
BETWEEN_TURNS = -1


class _CancelledError(BaseException):
    """Ends a paused program that will not be resumed; a ``BaseException``, so that user code does not swallow it."""


@final
class Coroutine:
    """Runs ``body`` in turns.

    Args:
        body: program.
        threads: thread pool; one of its threads runs the program.
        seed: seed of the program's random streams. At each pause the global generators move to another stream derived
            from it, so that no other code draws the program's next numbers. The caller protects the global generators
            from that (:meth:`smp_strategy.model.rng.Streams.seeded`).
        streams: factory of random streams.
    """

    def __init__(self, body: Callable[[], Any], threads: ThreadPool, *, seed: int, streams: Streams) -> None:
        self.finished = False
        self.result: Any = None
        self._body = body
        self._threads = threads
        self._streams = streams
        self._error: BaseException | None = None
        self._cancelled = False
        # Taken at the first turn, given back at the end.
        self._thread: ProgramThread | None = None
        self._seed = seed
        self._num_turns = 0
        self._stream = streams.stream(seed)

    def resume(self) -> bool:
        """Run until the program pauses or ends; returns whether it has ended, and raises its exception."""
        self._stream.enter()
        try:
            self._turn()
        finally:
            self._num_turns += 1
            self._stream.leave(for_good=self.finished)
            if not self.finished:
                self._streams.begin_states_at(derive_seed(self._seed, BETWEEN_TURNS, self._num_turns))
        if self._error is not None:
            raise self._error
        return self.finished

    def pause(self) -> None:
        """Return control to the scheduler; call it from inside the program."""
        assert self._thread is not None
        if not self._cancelled:
            self._thread.hand_back()
        if self._cancelled:
            raise _CancelledError

    def cancel(self) -> None:
        """End a program at the point where it waits, or at its next pause if Ctrl-C has interrupted its turn."""
        if self._thread is not None:
            self._cancelled = True
            self._thread.finish(lambda: self.finished)
            self._thread = None

    def _turn(self) -> None:
        """Run the program until it pauses or ends."""
        if self._thread is not None:
            self._thread.resume()
        else:
            self._thread = self._threads.take()
            context, modes = contextvars.copy_context(), _ThreadModes(self._streams.device)
            self._thread.begin(lambda: context.run(self._run, modes))
        if self.finished:
            self._threads.put_back(self._thread)
            self._thread = None

    def _run(self, modes: "_ThreadModes") -> None:
        try:
            if not self._cancelled:
                with modes.apply():
                    self.result = self._body()
        except _CancelledError:
            pass
        except BaseException as error:
            self._error = error
        finally:
            self.finished = True


@final
class _ThreadModes:
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
        with ExitStack() as stack:
            stack.enter_context(entered(self._stream))
            # A thread begins outside of all modes.
            if self._inference:
                stack.enter_context(torch.inference_mode())
            if torch.is_grad_enabled() != self._grad:
                stack.enter_context(torch.set_grad_enabled(self._grad))
            if self._autocast:
                stack.enter_context(
                    torch.autocast(self._device.type, self._autocast_dtype, cache_enabled=self._autocast_cache)
                )
            yield
