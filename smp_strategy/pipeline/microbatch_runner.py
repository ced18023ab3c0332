"""The microbatches of one step take turns on a stage.

Each microbatch is a coroutine that runs until it must wait for another stage, and a backward that follows it. Here is
what can be asked of them: go on with a segment, run a segment's backward, get ready early, finish. The plan decides
the order; where a microbatch takes another path than the plan was made for, the stage leaves it
(:mod:`smp_strategy.pipeline.off_plan`).
"""

from collections.abc import Sequence
from typing import Any, final

from smp_strategy.model.rng import derive_seed
from smp_strategy.model.trace.events import Event
from smp_strategy.pipeline.backward import MicrobatchBackward
from smp_strategy.pipeline.coroutine import Coroutine
from smp_strategy.pipeline.current_program import CurrentProgram
from smp_strategy.pipeline.interpreter import MicrobatchInterpreter
from smp_strategy.pipeline.job import Job, StepRun, trace_of
from smp_strategy.pipeline.microbatch_order import Gate
from smp_strategy.pipeline.microbatch_state import MicrobatchState
from smp_strategy.pipeline.placed_tensor import Interpreter
from smp_strategy.pipeline.routing import Placement
from smp_strategy.pipeline.schedule import Action
from smp_strategy.pipeline.stage import Stage
from smp_strategy.pipeline.step_end import StepEnd
from smp_strategy.pipeline.threads import ThreadPool
from smp_strategy.pipeline.transport import Receipt

__all__ = ["ALL_SEGMENTS", "MicrobatchRunner"]

ALL_SEGMENTS = 1 << 30


@final
class MicrobatchRunner:
    """The microbatches of one step.

    Args:
        stage: where this happens.
        microbatches: what the step gets, one after the other.
        job: what is done with each of them.
        threads: one for every microbatch.
        current: told whose turn it is.
        private: keeps what the microbatches leave in shared objects apart; ``None`` where there is one microbatch.

    Attributes:
        stage, job, private: as given.
        offload: what goes to the host meanwhile.
        coroutines: the programs of the microbatches.
        backwards: of microbatches that have run forward and have a loss.
        waiting: receives that a microbatch waits for; without any: it waits for its turn.
        stopped: barriers at which microbatches wait.
        has_left_plan: whether a microbatch is known to take another path than the plan was made for.
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
        # Microbatches that are at the gate.
        self._at_gate = set[int]()
        # The microbatch that has begun before the plan says so, if one has, and whether that makes sense.
        self._begun_early: int | None = None
        self._receives_first = True
        self._programs: list[MicrobatchInterpreter] = []
        self.coroutines: list[Coroutine] = []
        self.backwards: dict[int, MicrobatchBackward] = {}
        self._losses: dict[int, Any] = {}
        self.stopped: dict[int, Any] = {}
        self._ending: StepEnd | None = None
        self.has_left_plan = False
        for number, microbatch in enumerate(microbatches):
            program, coroutine = self._make(number, microbatch, derive_seed(job.seed, number))
            self._programs.append(program)
            self.coroutines.append(coroutine)

    def _make(self, number: int, microbatch: Any, seed: int) -> tuple[MicrobatchInterpreter, Coroutine]:
        def pause(receipts: Sequence[Receipt]) -> None:
            if receipts or number == self._begun_early:
                self.waiting[number] = receipts
                coroutine.pause()

        def wait_at_gate() -> None:
            self._at_gate.add(number)
            if self.is_held(number):
                self.waiting[number] = []
                coroutine.pause()

        job = self.job
        program = self.stage.program(
            microbatch=number,
            seed=seed,
            pause=pause,
            expected=job.expected,
            gate=None if job.gate is None or number == 0 else Gate(job.gate, wait_at_gate),
            current=self._current,
        )
        step = job.step
        coroutine = Coroutine(lambda: step(microbatch), self._threads, seed=seed, streams=self.stage.streams)
        return program, coroutine

    def is_held(self, number: int) -> bool:
        """Whether a microbatch is at the gate, and one before it has not ended."""
        return number in self._at_gate and not all(each.finished for each in self.coroutines[:number])

    def events_of_last(self) -> list[tuple[Event, Placement]]:
        """Events of the last microbatch, with their places."""
        return self._programs[-1].record.events

    def program_order(self) -> list[Action]:
        """Each microbatch forward and backward, one after the other, all segments at once."""
        order = []
        for number in range(len(self._programs)):
            order.append(Action("F", number, ALL_SEGMENTS))
            if self.job.loss_of:
                order.append(Action("B", number, 0))
        return order

    def do(self, action: Action) -> None:
        """Carry out one action."""
        if action.kind == "F":
            self.forward(action.microbatch, action.segment)
        else:
            self.forward(action.microbatch, ALL_SEGMENTS)
            self.offload.begin_backward(action.microbatch)
            backward = None if self.has_left_plan else self.backwards.get(action.microbatch)
            if backward is not None and action.kind == "W":
                backward.run_weights(action.segment)
            elif backward is not None:
                backward.run_from(action.segment, split=action.kind == "I")

    def prepare(self, microbatches: Sequence[int]) -> None:
        """Let ``microbatches`` run up to their first receive, so that the message travels while others compute."""
        for number in microbatches:
            if not self._receives_first:
                return
            if number in self.waiting or self.coroutines[number].finished:
                continue
            self._begun_early = number
            self.resume(number)
            self._receives_first = bool(self.waiting.get(number))

    def has(self, program: Interpreter) -> bool:
        """Whether ``program`` is one of these microbatches', and not that of a hook at a barrier."""
        return self._programs[program.microbatch] is program

    def finish(self) -> bool:
        """Complete what no action asked for: segments off the plan, and backwards that no gradient passes through.

        Returns:
            Whether that is done; not so where the stage has left the plan.
        """
        for number in range(len(self._programs)):
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
        """Begin to, if all programs have ended; collective.

        Args:
            at_once: nobody waits for what this stage has still to do, so it can wait until others are as far, which
                they nearly are. Otherwise it waits for nobody, and is asked again.
        """
        # The last one to begin ends last.
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
            self._ending = StepEnd(self.stage, self._programs, (outputs, losses))
        return self._ending

    def cancel(self) -> None:
        """Let go of programs that wait."""
        for number, coroutine in enumerate(self.coroutines):
            if self.private is not None and not coroutine.finished:
                self.private.enter(number)  # what it puts back on its way out is its own
                coroutine.cancel()
                self.private.leave(number)
            else:
                coroutine.cancel()
        self._let_go()

    def end_private(self) -> None:
        """Put what the microbatches have left in shared objects where other steps find it: they leave nothing more."""
        if self.private is not None:
            self.private.end()
            self.private = None

    def _let_go(self) -> None:
        """Close the programs and untie them from this run, so that results are freed now and not by the collector."""
        self.end_private()
        for program in self._programs:
            program.close()
        self.coroutines.clear()
        self.backwards.clear()
        self._losses.clear()
        self.stopped.clear()
        self._ending = None
        self.waiting.clear()

    def result(self) -> StepRun:
        """Make results real on every stage."""
        first = min(self._losses, default=0)
        trace = trace_of(self._programs[first], self._losses.get(first))
        outputs, losses = self._end().finish()
        self._let_go()
        return StepRun(outputs, losses, trace)

    def forward(self, number: int, segment: int) -> None:
        """Run the program of a microbatch until ``segment`` is done, or it leaves the plan and would have to wait."""
        if number == self._begun_early:
            self._begun_early = None
        coroutine, program = self.coroutines[number], self._programs[number]
        while not coroutine.finished and (number not in self.waiting or program.graph.current <= segment):
            if number in self.stopped:
                return
            if self.waiting.get(number) and self.has_left_plan:
                return
            if self.is_held(number):
                if self.has_left_plan or program.graph.current == segment:  # others come first, by the plan
                    return
                for earlier in range(number):
                    self.forward(earlier, ALL_SEGMENTS)
            for receipt in self.waiting.get(number, ()):
                receipt.wait()
            self.resume(number)

    def resume(self, number: int) -> bool:
        """Let a microbatch go on, and say whether it has ended."""
        coroutine = self.coroutines[number]
        if coroutine.finished:
            return True
        self._current.enter(self._programs[number])
        self.offload.enter((number, self._programs[number].graph.current))
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
            self._programs[number].record.end()
            self._programs[number].graph.end()
            self.waiting.pop(number, None)
            if self.job.loss_of is not None:
                self._begin_backward(number)
        self.has_left_plan |= self._programs[number].record.left_plan
        return finished

    def _begin_backward(self, number: int) -> None:
        assert self.job.loss_of is not None
        loss = self.job.loss_of(self.coroutines[number].result)
        if loss is None:
            return
        self._losses[number] = loss
        self.backwards[number] = self.backward_of(number, loss)

    def backward_of(self, number: int, loss: Any, factor: float = 1.0, **options: bool) -> MicrobatchBackward:
        return MicrobatchBackward(
            self._programs[number],
            loss,
            self.job.weights[number] * factor,
            stage=self.stage.number,
            num_stages=self.stage.num_stages,
            transport=self.stage.transport,
            **options,
        )
