"""The microbatches of one step take turns on a stage.

Each microbatch is a coroutine that runs until it must wait for another stage, and a backward that follows it. Here is
what can be asked of them: go on with a segment, run a segment's backward, get ready early, finish. The plan decides
the order; where a microbatch takes another path than the plan was made for, the stage improvises.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from smp_strategy.distributed.deadlock import PATIENCE_SECONDS, PAUSE_SECONDS
from smp_strategy.errors import UnsupportedError
from smp_strategy.model.rng import derive_seed
from smp_strategy.model.trace.events import Event, Trace
from smp_strategy.pipeline.backward import MicrobatchBackward
from smp_strategy.pipeline.coroutine import BETWEEN_TURNS, Coroutine, ThreadPool
from smp_strategy.pipeline.interpreter import MicrobatchInterpreter
from smp_strategy.pipeline.microbatch_order import Gate
from smp_strategy.pipeline.microbatch_state import MicrobatchState
from smp_strategy.pipeline.placed_tensor import PlacedTensor
from smp_strategy.pipeline.rehearsal import Rehearsal
from smp_strategy.pipeline.routing import Placement
from smp_strategy.pipeline.schedule import Action
from smp_strategy.pipeline.stage import Stage
from smp_strategy.pipeline.step_end import StepEnd
from smp_strategy.pipeline.transport import Receipt

__all__ = ["Barrier", "Job", "Step", "StepRun", "MicrobatchRunner", "trace_of"]

Step = Callable[[Any], Any]

ALL_SEGMENTS = 1 << 30
# How long a stage without a plan sleeps before it looks for messages again.
POLL_SECONDS = 1e-4


@final
@dataclass(frozen=True, kw_only=True)
class Job:
    """What is done with every microbatch of a step."""

    step: Step
    """The user's code."""
    seed: int
    """Where all random numbers of the step derive from."""
    loss_of: Callable[[Any], Tensor | None] | None = None
    """Picks the loss out of what ``step`` returns, or ``None`` where the step skips its microbatch; no function:
    forward only."""
    weights: Sequence[float] = ()
    """Factor of each microbatch's loss."""
    expected: Sequence[object] | None = None
    """Signatures of the events that the plan was made for; ``None`` where there is no plan."""
    gate: int | None = None
    """After how many events a microbatch waits for those before it to end, if it does."""
    around_last: Callable[[], AbstractContextManager[None]] = nullcontext
    """Entered from the last backward action of the plan on: gradients to which nothing is added in here are final."""


@final
@dataclass(frozen=True)
class Barrier:
    """Where a microbatch waits for all others, because what follows is done once for the batch."""

    name: str
    """What is done there, as the user calls it."""
    act: Callable[[list[Any]], Any]
    """Does it; called by the scheduler with what each microbatch has brought. All microbatches get its result."""
    value: Any
    """What this microbatch brings."""


@final
@dataclass(frozen=True)
class StepRun:
    """What came out of a step."""

    outputs: list[Any]
    """The step's return values, one per microbatch, with real detached tensors on every stage."""
    losses: list[Tensor | None]
    """Loss of each microbatch that has one, real and detached on every stage."""
    trace: Trace
    """Events of the first microbatch that has a loss, if any has."""

    def loss(self, weights: Sequence[float]) -> Tensor | None:
        """The sum of the microbatches' losses times ``weights``, if any has one; a scalar."""
        weighted = [
            loss.reshape(()) * loss.new_tensor(weight)
            for loss, weight in zip(self.losses, weights, strict=True)
            if loss is not None
        ]
        return torch.stack(weighted).sum() if weighted else None


@final
class MicrobatchRunner:
    """The microbatches of one step.

    Args:
        stage: where this happens.
        microbatches: what the step gets, one after the other.
        job: what is done with each of them.
        threads: one for every microbatch.
        enter: told whose turn it is, before a program runs, and ``None`` after it.
        active: tells that again.
        private: keeps what the microbatches leave in shared objects apart; ``None`` where there is one microbatch.
        improvises: told before the microbatches go on as messages arrive.

    Attributes:
        has_left_plan: whether a microbatch is known to take another path than the plan was made for.
        answer: what the microbatches that are at a barrier get from it.
    """

    def __init__(
        self,
        stage: Stage,
        microbatches: Sequence[Any],
        job: Job,
        *,
        threads: ThreadPool,
        enter: Callable[[MicrobatchInterpreter | None], None],
        active: Callable[[], MicrobatchInterpreter | None],
        private: MicrobatchState | None,
        improvises: Callable[[], None],
    ) -> None:
        self._stage = stage
        self._offload = stage.activations.offload
        self._job = job
        self._threads = threads
        self._enter = enter
        self._active = active
        self._private = private
        self._improvises = improvises
        self._waiting: dict[int, Sequence[Receipt]] = {}
        # Microbatches that are at the gate.
        self._at_gate = set[int]()
        # The microbatch that has begun before the plan says so, if one has, and whether that makes sense.
        self._begun_early: int | None = None
        self._receives_first = True
        self._programs: list[MicrobatchInterpreter] = []
        self._coroutines: list[Coroutine] = []
        self._backwards: dict[int, MicrobatchBackward] = {}
        self._losses: dict[int, Any] = {}
        self._barriers: dict[int, Barrier] = {}
        self.answer: Any = None
        self._ending: StepEnd | None = None
        self.has_left_plan = False
        for number, microbatch in enumerate(microbatches):
            program, coroutine = self._make(number, microbatch, derive_seed(job.seed, number))
            self._programs.append(program)
            self._coroutines.append(coroutine)

    def _make(self, number: int, microbatch: Any, seed: int) -> tuple[MicrobatchInterpreter, Coroutine]:
        def pause(receipts: Sequence[Receipt]) -> None:
            if receipts or number == self._begun_early:
                self._waiting[number] = receipts
                coroutine.pause()

        def wait_at_gate() -> None:
            self._at_gate.add(number)
            if self._is_held(number):
                self._waiting[number] = []
                coroutine.pause()

        job = self._job
        program = self._stage.program(
            microbatch=number,
            seed=seed,
            pause=pause,
            expected=job.expected,
            gate=None if job.gate is None or number == 0 else Gate(job.gate, wait_at_gate),
            active=self._active,
        )
        step = job.step
        coroutine = Coroutine(lambda: step(microbatch), self._threads, seed=seed, streams=self._stage.streams)
        return program, coroutine

    def _is_held(self, number: int) -> bool:
        """Whether a microbatch is at the gate, and one before it has not ended."""
        return number in self._at_gate and not all(each.finished for each in self._coroutines[:number])

    def rehearse(self, rehearsal: Rehearsal, *, in_order: bool) -> list[tuple[Event, Placement]]:
        """Let the microbatches run through, without backward; returns the events of the last one, with their places.

        Args:
            rehearsal: tells where they pause.
            in_order: one after the other; otherwise all go on by one pause in turn.
        """
        rehearsal.pause = lambda number: self._coroutines[number].pause()
        numbers = range(len(self._programs))
        while not all(coroutine.finished for coroutine in self._coroutines):
            for number in numbers:
                while not self._is_held(number) and not self._resume(number) and in_order:
                    pass
        return self._programs[-1].record.events

    def program_order(self) -> list[Action]:
        """Each microbatch forward and backward, one after the other, all segments at once."""
        order = []
        for number in range(len(self._programs)):
            order.append(Action("F", number, ALL_SEGMENTS))
            if self._job.loss_of:
                order.append(Action("B", number, 0))
        return order

    def do(self, action: Action) -> None:
        """Carry out one action."""
        if action.kind == "F":
            self._forward(action.microbatch, action.segment)
        else:
            self._forward(action.microbatch, ALL_SEGMENTS)
            self._offload.begin_backward(action.microbatch)
            backward = None if self.has_left_plan else self._backwards.get(action.microbatch)
            if backward is not None and action.kind == "W":
                backward.run_weights(action.segment)
            elif backward is not None:
                backward.run_from(action.segment, split=action.kind == "I")

    def improvise(self) -> None:
        """Do whatever can be done, until everything is: the plan is for another path, and could wait in a circle.

        Stages notice at different times. One that still follows the plan waits only for what the plan's path makes
        other stages do, and a stage that has left it does that as soon as it can: so there is always one that can go
        on. Backwards stay in the order of the microbatches, which keeps the sums of gradients.
        """
        if len(self._programs) > 1:
            self._improvises()
        numbers = range(len(self._programs))
        idle_since = time.monotonic()
        while not all(self._is_through(number) for number in numbers):
            advanced = [self._advance(number) for number in numbers]
            first = next((number for number in numbers if not self._is_through(number)), None)
            if first in self._backwards and self._have_arrived(self._backwards[first].awaited()):
                self._offload.begin_backward(first)
                self._backwards[first].run_next()
                advanced.append(True)
            if any(advanced):
                idle_since = time.monotonic()
            elif time.monotonic() - idle_since > PATIENCE_SECONDS:
                self._wait_for_any(first)
            else:
                time.sleep(POLL_SECONDS)

    def _wait_for_any(self, first: int | None) -> None:
        """Nothing has come for a while: wait for it in the way that is watched."""
        receipts = [receipt for waiting in self._waiting.values() for receipt in waiting]
        if first in self._backwards:
            receipts += self._backwards[first].awaited()
        time.sleep(POLL_SECONDS)
        if self._stage.transport is None or not receipts:
            return
        with self._stage.transport.waiting_for(receipts):
            while not any(receipt.arrived() for receipt in receipts):
                self._stage.transport.poll()
                time.sleep(PAUSE_SECONDS)

    def _is_through(self, number: int) -> bool:
        has_more = number in self._backwards and not self._backwards[number].is_done
        return self._coroutines[number].finished and not has_more

    def _advance(self, number: int) -> bool:
        """Let a microbatch go on forward if it can."""
        if self._coroutines[number].finished or self._is_held(number):
            return False
        if not self._have_arrived(self._waiting.get(number, ())):
            return False
        self._resume(number)
        return True

    def _have_arrived(self, receipts: Sequence[Receipt]) -> bool:
        # Ranks that split layers between them go on together, or they would meet in different microbatches.
        return not receipts or self._stage.agree(all(receipt.arrived() for receipt in receipts))

    def prepare(self, microbatches: Sequence[int]) -> None:
        """Let ``microbatches`` run up to their first receive, so that the message travels while others compute."""
        for number in microbatches:
            if not self._receives_first:
                return
            if number in self._waiting or self._coroutines[number].finished:
                continue
            self._begun_early = number
            self._resume(number)
            self._receives_first = bool(self._waiting.get(number))

    def has(self, program: MicrobatchInterpreter) -> bool:
        """Whether ``program`` is one of these microbatches', and not that of a hook at a barrier."""
        return self._programs[program.microbatch] is program

    def stop_at(self, barrier: Barrier, program: MicrobatchInterpreter) -> Any:
        """Called by a program: wait until all microbatches are at ``barrier`` and it is done."""
        self._barriers[program.microbatch] = barrier
        self._coroutines[program.microbatch].pause()
        return self.answer

    def meet(self) -> bool:
        """Let the microbatches run to their next barrier, one after the other, and do what is to be done there.

        The stages of a replica still overlap: none waits for work of another that it does not need.

        Returns:
            Whether there was a barrier; otherwise all microbatches have ended.
        """
        with self._stage.streams.seeded(derive_seed(self._job.seed, BETWEEN_TURNS)):
            for number in range(len(self._programs)):
                self._forward(number, ALL_SEGMENTS)
        barriers, self._barriers = self._barriers, {}
        if not barriers:
            return False
        _check_same_barrier([barriers.get(number) for number in range(len(self._programs))])
        with nullcontext() if self._private is None else self._private.at_barrier(len(self._programs) - 1):
            self.answer = barriers[0].act([barrier.value for _, barrier in sorted(barriers.items())])
        return True

    def backward(self, losses: Sequence[Any], factor: float, *, retain_graph: bool) -> None:
        """At a barrier: add ``factor`` times the gradients of the weighted ``losses`` to the parameters'."""
        for number, loss in enumerate(losses):
            self._offload.begin_backward(number)
            self._backward_of(number, loss, factor, goes_on=True, retain_graph=retain_graph).run_from(0)

    def finish(self, is_in_order: Callable[[], bool]) -> None:
        """Complete what no action asked for: segments off the plan, and backwards that no gradient passes through.

        Args:
            is_in_order: whether under the plan all stages complete one microbatch after the other. Then they can do so
                off the plan, too, and whoever meets in collectives does so in the same order.
        """
        for number in range(len(self._programs)):
            self._forward(number, ALL_SEGMENTS)
            if self.has_left_plan:
                if is_in_order():
                    self._go_on_in_order()
                else:
                    self.improvise()
                return
            if number in self._backwards:
                self._backwards[number].complete()

    def _go_on_in_order(self) -> None:
        for number, coroutine in enumerate(self._coroutines):
            while not coroutine.finished:
                for receipt in self._waiting.get(number, ()):
                    receipt.wait()
                self._resume(number)
            if number in self._backwards:
                self._offload.begin_backward(number)
                self._backwards[number].complete()

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
        if self._ending is None and not all(coroutine.finished for coroutine in reversed(self._coroutines)):
            return
        if at_once and not self.has_left_plan:
            self._end().agree()
        else:
            self._end().go_on()

    def _end(self) -> StepEnd:
        if self._ending is None:
            outputs = [coroutine.result for coroutine in self._coroutines]
            losses = [self._losses.get(number) for number in range(len(outputs))]
            self._ending = StepEnd(self._stage, self._programs, (outputs, losses))
        return self._ending

    def cancel(self) -> None:
        """Let go of programs that wait."""
        for number, coroutine in enumerate(self._coroutines):
            if self._private is not None and not coroutine.finished:
                self._private.enter(number)  # what it puts back on its way out is its own
                coroutine.cancel()
                self._private.leave(number)
            else:
                coroutine.cancel()
        self._let_go()

    def end_private(self) -> None:
        """Put what the microbatches have left in shared objects where other steps find it: they leave nothing more."""
        if self._private is not None:
            self._private.end()
            self._private = None

    def _let_go(self) -> None:
        """Close the programs and untie them from this run, so that results are freed now and not by the collector."""
        self.end_private()
        for program in self._programs:
            program.close()
        self._coroutines.clear()
        self._backwards.clear()
        self._losses.clear()
        self._barriers.clear()
        self.answer = self._ending = None
        self._waiting.clear()

    def result(self) -> StepRun:
        """Make results real on every stage."""
        first = min(self._losses, default=0)
        trace = trace_of(self._programs[first], self._losses.get(first))
        outputs, losses = self._end().finish()
        self._let_go()
        return StepRun(outputs, losses, trace)

    def _forward(self, number: int, segment: int) -> None:
        """Run the program of a microbatch until ``segment`` is done, or it leaves the plan and would have to wait."""
        if number == self._begun_early:
            self._begun_early = None
        coroutine, program = self._coroutines[number], self._programs[number]
        while not coroutine.finished and (number not in self._waiting or program.graph.current <= segment):
            if number in self._barriers:
                return
            if self._waiting.get(number) and self.has_left_plan:
                return
            if self._is_held(number):
                if self.has_left_plan or program.graph.current == segment:  # others come first, by the plan
                    return
                for earlier in range(number):
                    self._forward(earlier, ALL_SEGMENTS)
            for receipt in self._waiting.get(number, ()):
                receipt.wait()
            self._resume(number)

    def _resume(self, number: int) -> bool:
        """Let a microbatch go on, and say whether it has ended."""
        coroutine = self._coroutines[number]
        if coroutine.finished:
            return True
        self._enter(self._programs[number])
        self._offload.enter((number, self._programs[number].graph.current))
        if self._private is not None:
            self._private.enter(number)
        try:
            finished = coroutine.resume()
        finally:
            if self._private is not None:
                self._private.leave(number)
            self._offload.enter(None)
            self._enter(None)
        if finished and self._private is not None:
            self._private.end_of(number)
        if finished:
            self._programs[number].record.end()
            self._programs[number].graph.end()
            self._waiting.pop(number, None)
            if self._job.loss_of is not None:
                self._begin_backward(number)
        self.has_left_plan |= self._programs[number].record.left_plan
        return finished

    def _begin_backward(self, number: int) -> None:
        assert self._job.loss_of is not None
        loss = self._job.loss_of(self._coroutines[number].result)
        if loss is None:
            return
        self._losses[number] = loss
        self._backwards[number] = self._backward_of(number, loss)

    def _backward_of(self, number: int, loss: Any, factor: float = 1.0, **options: bool) -> MicrobatchBackward:
        return MicrobatchBackward(
            self._programs[number],
            loss,
            self._job.weights[number] * factor,
            stage=self._stage.number,
            num_stages=self._stage.num_stages,
            transport=self._stage.transport,
            **options,
        )


def _check_same_barrier(barriers: Sequence[Barrier | None]) -> None:
    """Refuse microbatches that are at different places: what follows could not be done once for all of them."""
    names = ["has ended" if barrier is None else f"calls {barrier.name}" for barrier in barriers]
    for number, name in enumerate(names):
        if name != names[0]:
            raise UnsupportedError(
                f"Microbatch {number} {name} where microbatch 0 {names[0]}: the step has taken different paths. It is "
                "done once for the whole batch. Decide on something that is the same for all samples (`batch_idx`, a "
                "number of the last batch), or set `microbatches=1`."
            )


def trace_of(program: MicrobatchInterpreter, loss: Any) -> Trace:
    """The record of a program whose loss is ``loss``."""
    number = loss.value.id if isinstance(loss, PlacedTensor) else None
    return Trace([event for event, _ in program.record.events], number)
