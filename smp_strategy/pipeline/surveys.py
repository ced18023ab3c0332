"""Programs outside of steps: hooks that run once on every stage, and dry runs that trace or rehearse a step."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from smp_strategy.model.rng import derive_seed
from smp_strategy.model.trace.events import Event, Trace
from smp_strategy.pipeline.autograd_functions import watched_entrances
from smp_strategy.pipeline.coroutine import BETWEEN_TURNS
from smp_strategy.pipeline.global_rng import GlobalGenerators
from smp_strategy.pipeline.interpreter import MicrobatchInterpreter
from smp_strategy.pipeline.job import Job, Step, trace_of
from smp_strategy.pipeline.routing import Placement
from smp_strategy.pipeline.runtime import Runtime

__all__ = ["rehearse", "run_alone", "survey"]


def run_alone(runtime: Runtime, code: Callable[[MicrobatchInterpreter], Any], generators: GlobalGenerators) -> Any:
    """Run code of the glue once, on every stage, outside of the microbatches.

    Args:
        runtime: of the stage.
        code: gets the program that routes its calls.
        generators: it draws from the global ones, and these follow.

    Returns:
        The result of ``code``, with real tensors on every stage.
    """
    program = runtime.stage.program(microbatch=0, generators=generators, current=runtime.current)
    with _entered(runtime, program):
        result = runtime.stage.make_real(code(program))
    runtime.flush()
    program.close()
    return result


@contextmanager
def _entered(runtime: Runtime, program: MicrobatchInterpreter) -> Iterator[None]:
    """Calls of units in here are calls of ``program``."""
    runtime.current.enter(program)
    try:
        with watched_entrances(runtime.current):
            yield
    except BaseException:
        program.close()
        raise
    finally:
        runtime.current.enter(None)


def survey(runtime: Runtime, step: Step, microbatch: Any, loss_of: Callable[[Any], Tensor | None] | None) -> Trace:
    """Run ``step`` once and return its trace.

    Args:
        runtime: of a stage that is dry.
        step: the user's code.
        microbatch: its argument.
        loss_of: picks the loss out of its result; ``None``: there is no backward.

    Raises:
        ValueNeededError: the stage computes nothing, and the step reads a value or makes a shape that depends on one.
    """
    program = runtime.stage.program(microbatch=0, seed=0, current=runtime.current)
    with _entered(runtime, program), runtime.collectives.open():
        output = step(microbatch)
        if runtime.told is not None:
            runtime.told(output)
    program.close()
    return trace_of(program, loss_of(output) if loss_of else None)


def rehearse(
    runtime: Runtime, job: Job, microbatches: Sequence[Any], *, in_order: bool
) -> list[tuple[Event, Placement]]:
    """Let microbatches of a dry run take turns, without backward.

    Args:
        runtime: of a stage with a rehearsal, which tells where microbatches pause.
        job: what is done with every microbatch.
        microbatches: arguments of the step.
        in_order: one after the other; otherwise each advances by one pause in turn.

    Returns:
        The events of the last microbatch, with their places.
    """
    rehearsal = runtime.stage.rehearsal
    assert rehearsal is not None
    runner = runtime.runner_of(job, microbatches)
    rehearsal.pause = lambda number: runner.coroutines[number].pause()
    try:
        with (
            watched_entrances(runtime.current),
            runtime.collectives.open(),
            runtime.stage.streams.seeded(derive_seed(job.seed, BETWEEN_TURNS)),
        ):
            while not all(coroutine.finished for coroutine in runner.coroutines):
                for number in range(len(runner.coroutines)):
                    while not runner.is_held(number) and not runner.resume(number) and in_order:
                        pass
            return runner.events_of_last()
    finally:
        runner.cancel()
