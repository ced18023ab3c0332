"""One microbatch's program as a coroutine: it runs until it has to wait, and later goes on from there.

The program is the user's own code, so it cannot ``yield``. It runs in a thread of its own and passes a baton: either
the scheduler runs or exactly one program, never two of them. Threads rather than greenlets, because grad mode,
autocast, inference mode and saved-tensor hooks are thread-local in PyTorch and must not leak from one microbatch
into another. So are the current device and its stream, which are those of the scheduler.
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
    """Raised inside a paused program that will not be resumed; no ``except Exception`` of the user swallows it."""


@final
class Coroutine:
    """Runs ``body`` in steps.

    Args:
        body: the program.
        threads: one of them runs it.
        seed: where the program's random streams begin. Where it pauses, others begin that derive from it, too: nobody
            draws its next numbers before it goes on. Whoever lets programs take turns keeps the global ones from that
            (:meth:`smp_strategy.model.rng.Streams.seeded`).
        streams: gives the program its random stream.
    """

    def __init__(self, body: Callable[[], Any], threads: ThreadPool, *, seed: int, streams: Streams) -> None:
        self.finished = False
        self.result: Any = None
        self._body = body
        self._threads = threads
        self._streams = streams
        self._error: BaseException | None = None
        self._cancelled = False
        # From the first turn to the end.
        self._thread: ProgramThread | None = None
        self._seed = seed
        self._num_turns = 0
        self._stream = streams.stream(seed)

    def resume(self) -> bool:
        """Run until the program pauses or ends, and say whether it ended; its exception is raised here."""
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
        """Hand the baton back; call it from inside the program."""
        assert self._thread is not None
        if not self._cancelled:
            self._thread.hand_back()
        if self._cancelled:
            raise _CancelledError

    def cancel(self) -> None:
        """End a program at the point where it waits, or will do so next if Ctrl-C has interrupted its turn."""
        if self._thread is not None:
            self._cancelled = True
            self._thread.finish(lambda: self.finished)
            self._thread = None

    def _turn(self) -> None:
        """Let the program run until it pauses or ends."""
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
    """PyTorch's thread-local modes of the thread that constructs this, to be entered in another."""

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
