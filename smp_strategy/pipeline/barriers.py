"""Barriers between the microbatches of a step, at which an action is carried out once for the whole batch.

Manual optimization stops at ``manual_backward`` and ``optimizer.step``; a forward whose loss is computed by the caller
stops at its end. Microbatches run to their next barrier one after the other. The stages of a replica still overlap: a
stage waits only for work of another that it needs.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, final

from smp_strategy.errors import UnsupportedError
from smp_strategy.model.rng import derive_seed
from smp_strategy.pipeline.action_order import ALL_SEGMENTS
from smp_strategy.pipeline.coroutine import BETWEEN_TURNS
from smp_strategy.pipeline.current_program import CurrentProgram
from smp_strategy.pipeline.dist_calls.user_collectives import ReplicaCollectives
from smp_strategy.pipeline.job import Job, StepRun
from smp_strategy.pipeline.microbatch_runner import MicrobatchRunner
from smp_strategy.pipeline.placed_tensor import Interpreter
from smp_strategy.pipeline.wrapping.autograd_functions import watched_entrances

__all__ = ["Barrier", "BarrierRun", "BarrierSteps", "PausedStep"]


@final
@dataclass(frozen=True)
class Barrier:
    """Point of a step at which a microbatch waits for all others."""

    name: str
    """Call that stops there, as the user writes it."""
    act: Callable[[list[Any]], Any]
    """Action, called by the scheduler with the value of each microbatch; all microbatches get its result."""
    value: Any


@final
class BarrierRun:
    """Runs the microbatches of one step from barrier to barrier.

    Attributes:
        answer: result of the last barrier, which the microbatches get when they are resumed.
    """

    def __init__(self, runner: MicrobatchRunner) -> None:
        self.runner = runner
        self.answer: Any = None

    def stop_at(self, barrier: Barrier, interpreter: Interpreter) -> Any:
        """Wait, called by a program, until all microbatches are at ``barrier`` and its action is done."""
        self.runner.stopped[interpreter.microbatch] = barrier
        self.runner.coroutines[interpreter.microbatch].pause()
        return self.answer

    def meet(self) -> bool:
        """Run the microbatches to their next barrier, one after the other, and carry out its action; returns whether
        there was one, else all have ended.
        """
        runner, numbers = self.runner, range(len(self.runner.coroutines))
        with runner.stage.streams.seeded(derive_seed(runner.job.seed, BETWEEN_TURNS)):
            for number in numbers:
                runner.forward(number, ALL_SEGMENTS)
        barriers, runner.stopped = runner.stopped, {}
        if not barriers:
            return False
        _check_same_barrier([barriers.get(number) for number in numbers])
        with nullcontext() if runner.private is None else runner.private.at_barrier(numbers[-1]):
            self.answer = barriers[0].act([barrier.value for _, barrier in sorted(barriers.items())])
        return True

    def backward(self, losses: Sequence[Any], factor: float, *, retain_graph: bool) -> None:
        """Add ``factor`` times the gradients of the weighted ``losses`` to those of the parameters, at a barrier."""
        for number, loss in enumerate(losses):
            self.runner.offload.begin_backward(number)
            backward = self.runner.backward_of(number, loss, factor, goes_on=True, retain_graph=retain_graph)
            backward.run_from(0)


@final
class PausedStep:
    """Step that waits at a barrier while its caller continues.

    Attributes:
        is_over: whether the microbatches have ended.
    """

    def __init__(self, run: BarrierRun, running: Callable[[BarrierRun], AbstractContextManager[None]]) -> None:
        self._run = run
        self._running = running
        self.is_over = False

    def go_on(self, answer: Any = None) -> Any:
        """Run the microbatches to their next barrier, and return the result of its action; ``None`` at their end."""
        assert not self.is_over
        try:
            with self._running(self._run):
                self._run.answer = answer
                if self._run.meet():
                    return self._run.answer
                self.is_over = True
                self._run.runner.agree()
        except BaseException:
            self.is_over = True
            raise
        self._run.runner.result()
        return None

    def cancel(self) -> None:
        """Cancel the microbatches and release everything."""
        if not self.is_over:
            self.is_over = True
            self._run.runner.cancel()


@final
class BarrierSteps:
    """Runs steps with barriers.

    Args:
        collectives: collectives of the user, which mean the replicas in a step and all ranks at a barrier.
        offloading: factory of the context of activation offload, entered while microbatches run.

    Attributes:
        dry_values: values with which a dry run has come to barriers: losses, among others.
    """

    def __init__(
        self,
        current: CurrentProgram,
        collectives: ReplicaCollectives,
        *,
        runner_of: Callable[[Job, Sequence[Any]], MicrobatchRunner],
        offloading: Callable[[Sequence[Any]], AbstractContextManager[None]],
        flush: Callable[[], None],
    ) -> None:
        self._current = current
        self._collectives = collectives
        self._runner_of = runner_of
        self._offloading = offloading
        self._flush = flush
        self._run: BarrierRun | None = None
        self.dry_values: list[Any] = []
        self._offload_of_pause = ExitStack()

    def run(self, job: Job, microbatches: Sequence[Any]) -> StepRun:
        """Run ``job``, whose step calls :meth:`once`, to its end."""
        run = BarrierRun(self._runner_of(job, microbatches))
        with self._entered(run):
            with self._offloading(microbatches):
                while run.meet():
                    pass
            run.runner.agree()
        return run.runner.result()

    def run_to_barrier(self, job: Job, microbatches: Sequence[Any]) -> tuple[Any, PausedStep]:
        """Run ``job`` to its barrier, and return its result with the waiting step, which writes nothing more to shared
        objects.
        """
        run = BarrierRun(self._runner_of(job, microbatches))
        # Open until the next step: the backward in between fetches offloaded activations.
        self._offload_of_pause.enter_context(self._offloading(microbatches))
        pause = PausedStep(run, self._entered)
        found = pause.go_on()
        run.runner.end_private()
        return found, pause

    def once(self, barrier: Barrier, *, also_dry: bool) -> Any:
        """Carry out the action of ``barrier`` once for the batch, when all microbatches have called this.

        Raises:
            UnsupportedError: the step does not stop at barriers.
        """
        interpreter = self._current.interpreter
        assert interpreter is not None
        if interpreter.is_dry_run:
            self.dry_values.append(barrier.value)
            return barrier.act([barrier.value]) if also_dry else None
        # A hook at a barrier has a program of its own.
        if self._run is None or self._run.runner.programs[interpreter.microbatch] is not interpreter:
            raise UnsupportedError(
                f"{barrier.name} is called in a hook that sees gradients, or in a step that returns its loss. Call it "
                "in a training step under manual optimization."
            )
        return self._run.stop_at(replace(barrier, act=self._outside_of_step(barrier.act)), interpreter)

    def backward(self, losses: Sequence[Any], factor: float, *, retain_graph: bool) -> None:
        """Run a backward at a barrier; see :meth:`BarrierRun.backward`."""
        assert self._run is not None
        with self._collectives.aside(False):
            self._run.backward(losses, factor, retain_graph=retain_graph)
        self._flush()

    def close(self) -> None:
        """Release the activations that a paused step has offloaded."""
        self._offload_of_pause.close()

    def _outside_of_step(self, act: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        def outside(values: list[Any]) -> Any:
            with self._collectives.aside():
                return act(values)

        return outside

    @contextmanager
    def _entered(self, run: BarrierRun) -> Iterator[None]:
        self._run = run
        try:
            with watched_entrances(self._current), self._collectives.open():
                yield
            self._flush()
        except BaseException:
            run.runner.cancel()
            raise
        finally:
            self._run = None


def _check_same_barrier(barriers: Sequence[Barrier | None]) -> None:
    """Refuse microbatches at different barriers: no action could be carried out once for all of them."""
    names = ["has ended" if barrier is None else f"calls {barrier.name}" for barrier in barriers]
    for number, name in enumerate(names):
        if name != names[0]:
            raise UnsupportedError(
                f"Microbatch {number} {name} where microbatch 0 {names[0]}: the step has taken different paths. It is "
                "done once for the whole batch. Decide on something that is the same for all samples (`batch_idx`, a "
                "number of the last batch), or set `microbatches=1`."
            )
