"""Fallback execution of a step whose microbatch departs from the path of the plan.

The plan's order could deadlock then. A stage that has left it runs whatever microbatch can run, as messages arrive.

[Note: no deadlock off the plan] Stages notice at different times. A stage that still follows the plan waits only for
work that the plan's path demands of other stages, and a stage that has left it does that work as soon as it can. So
there is always a stage that can advance.
"""

import time
from collections.abc import Callable, Sequence

from smp_strategy.distributed.deadlock import PATIENCE_SECONDS, PAUSE_SECONDS, watch_of
from smp_strategy.pipeline.microbatch_runner import MicrobatchRunner
from smp_strategy.pipeline.transport.transport import Receipt

__all__ = ["finish_off_plan"]

# Pause between two looks for messages.
_POLL_SECONDS = 1e-4


def finish_off_plan(runner: MicrobatchRunner, *, is_in_order: bool, improvises: Callable[[], None]) -> None:
    """Complete all microbatches of a stage that has left the plan.

    Args:
        is_in_order: whether under the plan all stages complete one microbatch after the other. They can do so off the
            plan as well, which keeps the order of collectives equal on all ranks.
        improvises: called before microbatches continue in the order of their messages.
    """
    if is_in_order:
        _one_after_the_other(runner)
        return
    if len(runner.coroutines) > 1:
        improvises()
    _as_messages_arrive(runner)


def _one_after_the_other(runner: MicrobatchRunner) -> None:
    for number, coroutine in enumerate(runner.coroutines):
        while not coroutine.finished:
            for receipt in runner.waiting.get(number, ()):
                receipt.wait()
            runner.resume(number)
        if number in runner.backwards:
            runner.offload.begin_backward(number)
            runner.backwards[number].complete()


def _as_messages_arrive(runner: MicrobatchRunner) -> None:
    numbers = range(len(runner.coroutines))
    idle_since = time.monotonic()
    while not all(_is_through(runner, number) for number in numbers):
        advanced = [_advance(runner, number) for number in numbers]
        # Backwards stay in the order of the microbatches: gradients are added up in that order.
        first = next((number for number in numbers if not _is_through(runner, number)), None)
        if first in runner.backwards and _have_arrived(runner, runner.backwards[first].awaited()):
            runner.offload.begin_backward(first)
            runner.backwards[first].run_next()
            advanced.append(True)
        if any(advanced):
            idle_since = time.monotonic()
        elif time.monotonic() - idle_since > PATIENCE_SECONDS:
            _wait_for_any(runner, first)
        else:
            time.sleep(_POLL_SECONDS)


def _is_through(runner: MicrobatchRunner, number: int) -> bool:
    has_more = number in runner.backwards and not runner.backwards[number].is_done
    return runner.coroutines[number].finished and not has_more


def _advance(runner: MicrobatchRunner, number: int) -> bool:
    """Resume a microbatch if it can run; returns whether it did."""
    can_run = not runner.coroutines[number].finished and _have_arrived(runner, runner.waiting.get(number, ()))
    if can_run:
        runner.resume(number)
    return can_run


def _have_arrived(runner: MicrobatchRunner, receipts: Sequence[Receipt]) -> bool:
    # Tensor-parallel ranks decide together, or their collectives would be of different microbatches.
    return not receipts or runner.stage.agree(all(receipt.arrived() for receipt in receipts))


def _wait_for_any(runner: MicrobatchRunner, first: int | None) -> None:
    """Wait for any message under the deadlock watch; called when none has come for a while."""
    receipts = [receipt for waiting in runner.waiting.values() for receipt in waiting]
    if first in runner.backwards:
        receipts += runner.backwards[first].awaited()
    time.sleep(_POLL_SECONDS)
    transport = runner.stage.transport
    if transport is None or not receipts:
        return
    watch = watch_of()
    with transport.waiting_for(receipts):
        while not any(receipt.arrived() for receipt in receipts):
            watch.poll()  # which raises if none of them can arrive
            time.sleep(PAUSE_SECONDS)
