"""Runner of the microbatches of one step, which take turns on a stage.

Each microbatch is a coroutine that runs until it must wait for another stage, and a backward that follows it. The
runner resumes a microbatch up to a segment, runs a segment's backward, lets a microbatch begin early, and finishes the
step. The plan decides the order; a stage leaves it when a microbatch departs from the planned path
(:mod:`smp_strategy.pipeline.off_plan`).
"""

from collections.abc import Sequence
from typing import Any, final

from smp_strategy.model.rng import derive_seed
from smp_strategy.pipeline.action_order import ALL_SEGMENTS
from smp_strategy.pipeline.backward import MicrobatchBackward
from smp_strategy.pipeline.coroutine import Coroutine, ThreadPool
from smp_strategy.pipeline.current_program import CurrentProgram
from smp_strategy.pipeline.interpreter import MicrobatchInterpreter
from smp_strategy.pipeline.isolation.microbatch_state import MicrobatchState
from smp_strategy.pipeline.job import Job, StepRun, trace_of
from smp_strategy.pipeline.results import up_to_date
from smp_strategy.pipeline.schedule import Action
from smp_strategy.pipeline.stage import Stage
from smp_strategy.pipeline.step_end import StepEnd
from smp_strategy.pipeline.transport.transport import Receipt

__all__ = ["MicrobatchRunner"]


@final
class MicrobatchRunner:
    """Runs the microbatches of one step, segment by segment.

    Args:
        private: private state of the microbatches; ``None`` for a single microbatch without recomputation.

    Attributes:
        offload: activation offload of the stage.
        programs: interpreters of the microbatches.
        coroutines: their code.
        backwards: backwards of the microbatches that have run forward and have a loss, by number.
        waiting: receives that a paused microbatch waits for; empty: it has begun early.
        stopped: barriers at which microbatches wait.
        has_left_plan: whether a microbatch is known to depart from the path of the plan.
    """

    def __init__(
        self,
        stage: Stage,
        microbatches: Sequence[Any],
        job: Job,
        *,
        threads: ThreadPool,
        current: CurrentProgram,
        private: MicrobatchState | None,
    ) -> None:
        self.stage = stage
        self.offload = stage.activations.offload
        self.job = job
        self._threads = threads
        self._current = current
        self.private = private
        self.waiting: dict[int, Sequence[Receipt]] = {}
        # The microbatch that has begun before its first action, if any, and whether beginning early is worthwhile.
        self._begun_early: int | None = None
        self._receives_first = True
        self.backwards: dict[int, MicrobatchBackward] = {}
        self._losses: dict[int, Any] = {}
        self.stopped: dict[int, Any] = {}
        self._ending: StepEnd | None = None
        self.has_left_plan = False
        made = [self._make(number, each, derive_seed(job.seed, number)) for number, each in enumerate(microbatches)]
        self.programs, self.coroutines = [program for program, _ in made], [coroutine for _, coroutine in made]

    def _make(self, number: int, microbatch: Any, seed: int) -> tuple[MicrobatchInterpreter, Coroutine]:
        def pause(receipts: Sequence[Receipt]) -> None:
            # Without receipts the program is about to compute for the first time: only a microbatch that `prepare` has
            # begun pauses there, all others compute.
            if receipts or number == self._begun_early:
                self.waiting[number] = receipts
                coroutine.pause()

        job = self.job
        program = MicrobatchInterpreter(
            self.stage,
            microbatch=number,
            seed=seed,
            pause=pause,
            expected=job.expected,
            current=self._current,
        )
        terms = program.terms = None if job.loss_weights is None else job.loss_weights.program(number)
        step = job.step if terms is None else terms.recorded(job.step)
        coroutine = Coroutine(
            lambda: up_to_date(step(microbatch)), self._threads, seed=seed, streams=self.stage.streams
        )
        return program, coroutine

    def do(self, action: Action) -> None:
        """Carry out one action."""
        if action.kind == "F":
            self.forward(action.microbatch, action.segment)
        else:
            # A backward needs the loss, so code of the program after its last planned segment has to run first.
            self.forward(action.microbatch, ALL_SEGMENTS)
            self.offload.begin_backward(action.microbatch)
            # Off the plan `off_plan` runs backwards. A skipped microbatch has none.
            backward = None if self.has_left_plan else self.backwards.get(action.microbatch)
            if backward is not None and action.kind == "W":
                backward.run_weights(action.segment)
            elif backward is not None:
                backward.run_from(action.segment, split=action.kind == "I")

    def prepare(self, microbatches: Sequence[int]) -> None:
        """Run ``microbatches`` up to their first receive, so that the message travels while others compute.

        This must not compute, which would delay the action that the plan has next. It relies on `LocalGraph` calling
        ``pause`` before the first work of a program, and on all microbatches of a step beginning alike: if one arrives
        there without a receive, no other is tried.
        """
        for number in microbatches:
            if not self._receives_first:
                return
            if number in self.waiting or self.coroutines[number].finished:
                continue
            self._begun_early = number
            self.resume(number)
            self._receives_first = bool(self.waiting.get(number))

    def finish(self) -> bool:
        """Complete the work without an action: segments off the plan, and backwards that no gradient passes through.
        Returns false if the stage has left the plan.
        """
        for number in range(len(self.programs)):
            self.forward(number, ALL_SEGMENTS)
            if self.has_left_plan:
                return False
            if number in self.backwards:
                self.backwards[number].complete()
        return True

    def agree(self) -> None:
        """Make sure that all stages have run the same programs; collective."""
        self._end().agree()

    def share_results(self, *, at_once: bool) -> None:
        """Begin to broadcast the results, if all programs have ended; collective.

        Args:
            at_once: wait for the other stages, which are nearly as far, as no stage waits for the remaining work of
                this one. Otherwise wait for no stage; the caller asks again.
        """
        # Reversed, because the microbatch that began last ends last.
        if self._ending is None and not all(coroutine.finished for coroutine in reversed(self.coroutines)):
            return
        if at_once and not self.has_left_plan:
            self._end().agree()
        else:
            self._end().go_on()

    def _end(self) -> StepEnd:
        if self._ending is None:
            outputs = [coroutine.result for coroutine in self.coroutines]
            losses = [self._losses.get(number) for number in range(len(outputs))]
            self._ending = StepEnd(self.stage, self.programs, (outputs, losses))
        return self._ending

    def cancel(self) -> None:
        """Cancel the programs that wait, and release everything."""
        for number, coroutine in enumerate(self.coroutines):
            if self.private is not None and not coroutine.finished:
                self.private.enter(number)  # what it puts back on its way out is its own
                coroutine.cancel()
                self.private.leave(number)
            else:
                coroutine.cancel()
        self._let_go()

    def end_private(self) -> None:
        """Merge the private state of the microbatches into the shared objects; they write nothing more."""
        if self.private is not None:
            self.private.end()
            self.private = None

    def _let_go(self) -> None:
        """Close the programs and break their reference cycles with this run, so that results are freed now."""
        self.end_private()
        for program in self.programs:
            program.close()
        self.coroutines.clear()
        self.backwards.clear()
        self._losses.clear()
        self.stopped.clear()
        self._ending = None
        self.waiting.clear()

    def result(self) -> StepRun:
        """Return the results with real tensors on every stage; collective."""
        first = min(self._losses, default=0)
        trace = trace_of(self.programs[first], self._losses.get(first))
        outputs, losses = self._end().finish()
        self._let_go()
        return StepRun(outputs, losses, trace)

    def forward(self, number: int, segment: int) -> None:
        """Run the program of a microbatch until ``segment`` is done, or it leaves the plan and would have to wait."""
        if number == self._begun_early:
            self._begun_early = None
        coroutine, program = self.coroutines[number], self.programs[number]
        # A paused program counts as being in the segment that follows its wait: `LocalGraph` opens a segment before it
        # pauses. So `current <= segment` asks whether that one is still wanted. A program that has never paused has
        # not begun, and runs at least once: its segment 0 may end without any wait.
        while not coroutine.finished and (number not in self.waiting or program.graph.current <= segment):
            # At a barrier: resumed by the barrier when all microbatches are there.
            if number in self.stopped:
                return
            # Off the plan no blocking wait is safe: the sender may need another microbatch of this stage first.
            if self.waiting.get(number) and self.has_left_plan:
                return
            # Before the turn, so that the turn itself never blocks.
            for receipt in self.waiting.get(number, ()):
                receipt.wait()
            self.resume(number)

    def resume(self, number: int) -> bool:
        """Give a microbatch its turn; returns whether it has ended."""
        coroutine = self.coroutines[number]
        if coroutine.finished:
            return True
        self._current.enter(self.programs[number])
        self.offload.enter((number, self.programs[number].graph.current))
        if self.private is not None:
            self.private.enter(number)
        try:
            finished = coroutine.resume()
        finally:
            if self.private is not None:
                self.private.leave(number)
            self.offload.enter(None)
            self._current.enter(None)
        if finished and self.private is not None:
            self.private.end_of(number)
        if finished:
            self.programs[number].program_trace.end()
            self.programs[number].graph.end()
            self.waiting.pop(number, None)
            if self.job.loss_of is not None:
                self._begin_backward(number)
        self.has_left_plan |= self.programs[number].program_trace.left_plan
        return finished

    def _begin_backward(self, number: int) -> None:
        assert self.job.loss_of is not None
        loss = self.job.loss_of(self.coroutines[number].result)
        if loss is None:
            return
        self._losses[number] = loss
        self.backwards[number] = self.backward_of(number, loss)

    def backward_of(self, number: int, loss: Any, factor: float = 1.0, **options: bool) -> MicrobatchBackward:
        """The backward of a microbatch from ``loss``, weighted by its share of the samples and ``factor``."""
        if self.stage.note_inputs is not None:
            self.stage.carried.note_loss(number, loss)
        return MicrobatchBackward(self.programs[number], loss, self.job.weights[number] * factor, self.stage, **options)
