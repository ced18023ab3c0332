"""Crash report: a failing run prints one failure once, the cause first, in few lines.

A traceback of a step in Lightning has a hundred lines of which the user has written five, and every rank prints one:
its own, or that of the connection that it has lost. So tracebacks are cut to the user's frames and the innermost one
(:func:`shorten`), also those in the message of an error of a data loader's process, and only the rank that failed first
prints one (:func:`keep_short`). The others print a line. An error of the disk has one traceback, that of the user's
call: its text names the reason. ``SMP_FULL_TRACEBACK=1`` changes nothing in tracebacks and
prints all of them.
"""

import os
import re
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, NoReturn

import torch.distributed as dist

from smp_strategy.distributed.failure import blame, is_library, publish, publish_own, shortened
from smp_strategy.distributed.peer_processes import how_it_ended, is_stopped
from smp_strategy.distributed.torch_private import default_store
from smp_strategy.errors import PeerFailedError, SMPError, is_of_disk

__all__ = ["chosen", "culprit_of", "has_crashed", "keep_short", "publish_end", "shorten", "stopped_for"]

# Most frames shown: the outermost ones, and those near the error.
_NUM_FIRST, _NUM_LAST = 2, 6
_NOTE: Final = "(Frames of libraries are left out; SMP_FULL_TRACEBACK=1 shows all.)"
# Ranks of one machine that print a line: those of very many ranks would bury the first.
_NUM_SPEAKERS: Final = 8
# torch passes on an error of a data loader's process as text, with a traceback in it.
_PASSED_ON: Final = "Original Traceback (most recent call last):"
_LIBRARY_FRAME: Final = re.compile(r'^  File "[^"\n]*/(?:site|dist)-packages/[^\n]*\n(?:    [^\n]*\n)*', re.MULTILINE)
_OF_RANK: Final = re.compile(r"rank (\d+) failed first: ")


def shorten(error: BaseException) -> None:
    """Cut the tracebacks of ``error``, and of the errors behind it, to frames that help the user."""
    if _shows_everything():
        return
    is_cut = False
    for each in _chain(error):
        frames = list(_entries(each.__traceback__))
        kept = chosen([is_library(entry.tb_frame.f_globals) for entry in frames])
        is_cut |= len(kept) < len(frames)
        each.__traceback__ = _joined([frames[number] for number in kept])
        if each.args and isinstance(each.args[0], str) and _PASSED_ON in each.args[0]:
            each.args = (_LIBRARY_FRAME.sub("", each.args[0]), *each.args[1:])
    if is_cut and _NOTE not in getattr(error, "__notes__", ()):
        error.add_note(_NOTE)


def chosen(are_library: Sequence[bool]) -> list[int]:
    """Indices of the frames of a traceback that are shown, from whether each, the outermost first, is a library's."""
    innermost = len(are_library) - 1
    kept = [number for number, is_librarys in enumerate(are_library) if not is_librarys or number == innermost]
    return kept if len(kept) <= _NUM_FIRST + _NUM_LAST else kept[:_NUM_FIRST] + kept[-_NUM_LAST:]


def keep_short() -> None:
    """Install an exception hook: an error that ends this process is told to the other ranks, and printed in short.

    :func:`has_crashed` knows then how the process ends.
    Hydra would print the errors of its jobs itself, in full; it is told not to.
    """
    if "hydra" in sys.modules:
        os.environ["HYDRA_FULL_ERROR"] = "1"
    before = sys.excepthook
    if getattr(before, "_smp_keeps_short", False):
        return

    def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        is_first = publish_own(error, is_fatal=True)
        _cut_causes(error)
        shorten(error)
        if is_first or _shows_everything():
            before(kind, error, error.__traceback__)
        elif int(os.environ.get("LOCAL_RANK", 0)) < _NUM_SPEAKERS:
            before(PeerFailedError, _in_a_line(error), None)

    tell._smp_keeps_short = True  # type: ignore[attr-defined]
    sys.excepthook = tell
    leave = sys.exit

    def exit(status: Any = None, /) -> NoReturn:
        exit._smp_has_failed = bool(status)  # type: ignore[attr-defined]
        leave(status)

    sys.exit = exit


def _cut_causes(error: BaseException) -> None:
    """Leave out causes that the text of an error contains: errors of the disk, and errors of the same text."""
    if _shows_everything():
        return
    for each in _chain(error):
        cause = each.__cause__
        if not isinstance(each, SMPError) or cause is None:
            continue
        if isinstance(cause, OSError) or is_of_disk(cause) or str(cause) == str(each):
            each.__cause__, each.__suppress_context__ = None, True


def has_crashed() -> bool:
    """Whether this process is ending by an uncaught error, or by ``sys.exit`` with another code than 0."""
    return hasattr(sys, "last_value") or getattr(sys.exit, "_smp_has_failed", False)


def culprit_of(error: Exception) -> Exception:
    """``error``, or that of the rank that failed first if this rank has only noticed its end; in short."""
    culprit = blame(error)
    shorten(culprit)
    return culprit


def publish_end(rank: int, pid: int, code: int, *, is_over: bool = False) -> str:
    """Publish, on its behalf, how the process of ``rank`` has ended; returns a sentence about it.

    If the run ``is_over`` nobody needs to know, and rank 0, which has the store, may be gone.
    """
    story = how_it_ended(pid, code)
    if dist.is_initialized() and not is_over:
        # A connection of its own: the main thread may block on the existing one.
        with suppress(RuntimeError):
            publish(default_store().clone(), rank, story)  # type: ignore[attr-defined]
    return story


def stopped_for(pid: int, since: dict[int, float]) -> float:
    """Seconds for which a process of this machine has been stopped; ``since`` keeps when that was seen first."""
    if not is_stopped(pid):
        since.pop(pid, None)
        return 0.0
    return time.monotonic() - since.setdefault(pid, time.monotonic())


def _in_a_line(error: BaseException) -> PeerFailedError:
    """``error`` without a traceback; only the first line if another rank prints it, or if it came later."""
    if isinstance(error, PeerFailedError):
        text = str(error)
        first, is_longer, _ = text.partition("\n")
        culprit = _OF_RANK.match(text)
        is_anothers = culprit is not None and int(culprit[1]) != _rank()
        return PeerFailedError(f"{first} (the rest is in its output)" if is_anothers and is_longer else text)
    said = shortened("".join(traceback.format_exception_only(error)).split("\n", 1)[0])
    return PeerFailedError(f"another rank failed first; here it was {said}")


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", 0)))


def _shows_everything() -> bool:
    return os.environ.get("SMP_FULL_TRACEBACK", "0") not in ("", "0")


def _chain(error: BaseException) -> Iterator[BaseException]:
    """``error`` and the errors that are printed before it."""
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        yield each
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)


def _entries(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _joined(entries: Sequence[TracebackType]) -> TracebackType | None:
    trace = None
    for entry in reversed(entries):
        trace = TracebackType(trace, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return trace
