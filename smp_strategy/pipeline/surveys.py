"""Programs outside of steps: hooks that run once on every stage, and dry runs that trace or rehearse a step."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import Tensor

from smp_strategy.model.rng import derive_seed
from smp_strategy.model.trace.events import Trace
from smp_strategy.pipeline.batch_loss.sample_watch import SampleWatch
from smp_strategy.pipeline.coroutine import BETWEEN_TURNS
from smp_strategy.pipeline.interpreter import MicrobatchInterpreter
from smp_strategy.pipeline.isolation.global_rng import GlobalGenerators
from smp_strategy.pipeline.job import Job, Step, trace_of
from smp_strategy.pipeline.results import up_to_date
from smp_strategy.pipeline.runtime import Runtime
from smp_strategy.pipeline.wrapping.autograd_functions import watched_entrances

__all__ = ["alone", "entered", "rehearse", "survey"]


@contextmanager
def alone(runtime: Runtime, generators: GlobalGenerators) -> Iterator[MicrobatchInterpreter]:
    """Context of code of the glue that runs once, on every stage, outside of the microbatches; gives its program."""
    program = MicrobatchInterpreter(runtime.stage, microbatch=0, generators=generators, current=runtime.current)
    with entered(runtime, program):
        yield program
    runtime.flush()
    program.close()


@contextmanager
def entered(runtime: Runtime, program: MicrobatchInterpreter) -> Iterator[None]:
    """Context in which ``program`` is the running program."""
    runtime.current.enter(program)
    try:
        with watched_entrances(runtime.current, runtime.note_values):
            yield
    except BaseException:
        program.close()
        raise
    finally:
        runtime.current.enter(None)


def survey(
    runtime: Runtime,
    step: Step,
    microbatch: Any,
    loss_of: Callable[[Any], Tensor | None] | None,
    watch: SampleWatch | None = None,
) -> Trace:
    """Trace ``step`` by one dry run, which has a backward if there is ``loss_of``.

    Raises:
        ValueNeededError: the stage computes nothing, and the step reads a value or makes a shape that depends on one.
    """
    program = MicrobatchInterpreter(runtime.stage, microbatch=0, current=runtime.current)
    program.terms = watch
    runtime.barriers.dry_values.clear()
    with entered(runtime, program), runtime.collectives.open(), nullcontext() if watch is None else watch.record:
        output = up_to_date(step(microbatch))
        if runtime.note_values is not None:
            runtime.note_values(output)
    program.close()
    trace = trace_of(program, loss_of(output) if loss_of else None)
    if watch is not None:
        watch.end(trace, runtime.barriers.dry_values)
    return trace


def rehearse(runtime: Runtime, job: Job, microbatches: Sequence[Any]) -> None:
    """Run microbatches of a dry run without backward; each advances in turn to where the rehearsal of the stage pauses
    it.
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
                    runner.resume(number)
    finally:
        runner.cancel()
