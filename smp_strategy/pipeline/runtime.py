"""Runs the microbatches of a step on one stage, in the order of the plan.

With a plan, the stage does its actions one after the other. Without one (the path of the step is not known yet), each
microbatch runs forward and then backward in program order: slower, but the same on every stage and therefore free of
deadlock. Either way the events of the first microbatch are kept: they are the trace that the next plan is made of.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.profiler import record_function
from torch.utils import _pytree as pytree

from smp_strategy.errors import UnsupportedError
from smp_strategy.pipeline.backward import Backward
from smp_strategy.pipeline.coroutine import Coroutine
from smp_strategy.pipeline.placed import PlacedTensor
from smp_strategy.pipeline.program import Program
from smp_strategy.pipeline.rng import derive_seed
from smp_strategy.pipeline.routing import Router
from smp_strategy.pipeline.schedule import Action, Plan
from smp_strategy.pipeline.transport import Receipt, Transport
from smp_strategy.trace.events import Trace
from smp_strategy.trace.oracle import Callee, Oracle
from smp_strategy.trace.tree import flatten

__all__ = ["Runtime", "StepRun"]

Step = Callable[[Any], Any]

ALL_SEGMENTS = 1 << 30
# How long a stage without a plan sleeps before it looks for messages again.
POLL_SECONDS = 1e-4


@final
@dataclass(frozen=True)
class StepRun:
    """What came out of a step."""

    outputs: list[Any]
    """The step's return values, one per microbatch, with real detached tensors on every stage."""
    losses: list[Tensor]
    """Loss of each microbatch, real and detached on every stage; empty for a forward-only step."""
    trace: Trace
    """Events of the first microbatch."""


@final
class Runtime:
    """Executes steps on one stage.

    Args:
        stage: this rank's stage.
        stage_of: stage of each unit, by qualified name.
        num_stages: number of stages.
        oracle: predicts results of calls.
        transport: carries values between stages; ``None`` where there is only one stage.
        device: where the units run.
    """

    def __init__(
        self,
        *,
        stage: int,
        stage_of: dict[str, int],
        num_stages: int,
        oracle: Oracle,
        transport: Transport | None,
        device: torch.device,
    ) -> None:
        self._stage = stage
        self._stage_of = stage_of
        self._num_stages = num_stages
        self._oracle = oracle
        self._transport = transport
        self._device = device
        self._program: Program | None = None
        # Threads are reused from step to step: each one keeps an OpenMP team of its own.
        self._executor = ThreadPoolExecutor(max_workers=1 << 16, thread_name_prefix="microbatch")

    def call_unit(self, name: str, unit: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Stand-in for the ``forward`` of a unit."""
        program = self._program
        if program is not None and program.enclosing is None:
            return program.unit(name, Callee(name, forward, unit), args, kwargs)
        # The work of another unit: the weights are there if that unit holds this one, and a dry run needs none.
        if program is not None and (program.is_predicting or _holds(program.enclosing, unit)):
            return forward(*args, **kwargs)
        if self._stage_of[name] != self._stage:
            raise UnsupportedError(
                f"Unit `{name}` lives on stage {self._stage_of[name]} and was called "
                f"{'inside another unit' if program else 'outside of a step'} on stage {self._stage}, where its "
                "weights are not. Call the model inside a training, validation, test or predict step."
            )
        return forward(*args, **kwargs)

    def call_with_values(
        self, function: Callable[..., Any], args: Any, kwargs: Any, *, unknown: Callable[[], Any]
    ) -> Any:
        """See :meth:`smp_strategy.engine.Engine.call_with_values`."""
        program = self._program
        if program is None or not any(isinstance(leaf, PlacedTensor) for leaf in flatten((args, kwargs))[0]):
            return function(*args, **kwargs)
        if not program.computes_here:
            return unknown()
        return program.read(getattr(function, "__qualname__", repr(function)), function, args, kwargs)

    def run(
        self,
        step: Step,
        microbatches: Sequence[Any],
        *,
        plan: Plan | None,
        trace: Trace | None = None,
        seed: int,
        loss_of: Callable[[Any], Tensor] | None = None,
        weights: Sequence[float] = (),
    ) -> StepRun:
        """Run ``step`` on every microbatch; with ``loss_of``, also backward.

        Gradients of the weighted sum of the losses are added to the ``.grad`` of this stage's parameters.

        Args:
            step: the user's code; it gets a microbatch.
            microbatches: what it gets.
            plan: order of work; ``None``: program order.
            trace: what the plan was made for. A microbatch that takes another path makes its stage leave the plan.
            seed: where all random numbers of the step derive from.
            loss_of: picks the loss out of what ``step`` returns.
            weights: factor of each microbatch's loss.
        """
        run = _Run(self, step, microbatches, seed, loss_of, weights, trace.path if plan and trace else None)
        try:
            actions = plan.stages[self._stage] if plan else run.program_order()
            for position, action in enumerate(actions):
                with record_function(str(action)):
                    run.do(action)
                run.prepare(actions, position + 1)
                if run.has_left_plan:
                    break
            run.finish()
            if self._transport is not None:
                self._transport.flush()
        except BaseException:
            run.cancel()
            raise
        return run.result()

    def survey(self, step: Step, microbatch: Any, loss_of: Callable[[Any], Tensor] | None) -> Trace:
        """Run ``step`` without computing anything and return its trace.

        Raises:
            ValueNeededError: the step reads a value, or makes a shape that depends on one.
        """
        program = Program(
            microbatch=0,
            seed=0,
            stage=-1,
            router=Router(dict.fromkeys(self._stage_of, 0), 1),
            oracle=self._oracle,
            transport=None,
            pause=lambda receipts: None,
        )
        self._program = program
        try:
            output = step(microbatch)
        finally:
            self._program = None
            program.close()
        loss = loss_of(output) if loss_of else None
        return _trace_of(program, loss)

    def run_alone(self, code: Callable[[Program], Any], *, seed: int) -> Any:
        """Run code of the glue once, on every stage, outside of the microbatches.

        Args:
            code: gets the program that routes its calls.
            seed: where its random numbers derive from.

        Returns:
            What ``code`` returns, with real tensors on every stage.
        """
        program = Program(
            microbatch=0,
            seed=seed,
            stage=self._stage,
            router=Router(self._stage_of, self._num_stages),
            oracle=self._oracle,
            transport=self._transport,
            pause=lambda receipts: None,
        )
        self._program = program
        try:
            result = self.make_real(code(program))
            if self._transport is not None:
                self._transport.flush()
        finally:
            self._program = None
            program.close()
        return result

    def make_real(self, tree: Any) -> Any:
        """``tree`` with every tensor detached and every placed tensor replaced by its value, on all stages."""
        leaves, structure = flatten(tree)
        placed = [leaf for leaf in leaves if isinstance(leaf, PlacedTensor)]
        for tensor in placed:
            tensor.program.check_current(tensor)
        real: dict[int, Tensor] = {}
        for stage in range(self._num_stages):
            mine = list({id(tensor): tensor for tensor in placed if tensor.program.lives_on(tensor) == stage}.values())
            if not mine:
                continue
            values = [None if t.origin is None or stage != self._stage else t.origin[1] for t in mine]
            if self._transport is None:
                shared = [value.detach() for value in values if value is not None]
            else:
                shared = self._transport.share(values, [tensor.spec for tensor in mine], stage)
            real.update(zip(map(id, mine), shared, strict=True))
        return pytree.tree_unflatten([_real_of(leaf, real) for leaf in leaves], structure)

    def close(self) -> None:
        """End the threads."""
        self._executor.shutdown(wait=False)


@final
class _Run:
    """The state of one step."""

    def __init__(
        self,
        runtime: Runtime,
        step: Step,
        microbatches: Sequence[Any],
        seed: int,
        loss_of: Callable[[Any], Tensor] | None,
        weights: Sequence[float],
        expected: Sequence[object] | None,
    ) -> None:
        self._runtime = runtime
        self._expected = expected
        self._loss_of = loss_of
        self._weights = weights
        self._waiting: dict[int, Sequence[Receipt]] = {}
        self._programs: list[Program] = []
        self._coroutines: list[Coroutine] = []
        self._backwards: dict[int, Backward] = {}
        self._losses: dict[int, Any] = {}
        for number, microbatch in enumerate(microbatches):
            program, coroutine = self._make(number, step, microbatch, derive_seed(seed, number))
            self._programs.append(program)
            self._coroutines.append(coroutine)

    def _make(self, number: int, step: Step, microbatch: Any, seed: int) -> tuple[Program, Coroutine]:
        runtime = self._runtime

        def pause(receipts: Sequence[Receipt]) -> None:
            self._waiting[number] = receipts
            coroutine.pause()

        program = Program(
            microbatch=number,
            seed=seed,
            stage=runtime._stage,
            router=Router(runtime._stage_of, runtime._num_stages),
            oracle=runtime._oracle,
            transport=runtime._transport,
            pause=pause,
            expected=self._expected,
        )
        coroutine = Coroutine(lambda: step(microbatch), runtime._executor, seed=seed, device=runtime._device)
        return program, coroutine

    def program_order(self) -> list[Action]:
        """Each microbatch forward and backward, one after the other, all segments at once."""
        last = ALL_SEGMENTS
        kinds = "FB" if self._loss_of else "F"
        return [Action(kind, number, last) for number in range(len(self._programs)) for kind in kinds]  # type: ignore[arg-type]

    def do(self, action: Action) -> None:
        """Carry out one action."""
        if action.kind == "F":
            self._forward(action.microbatch, action.segment)
        else:
            self._forward(action.microbatch, ALL_SEGMENTS)
            if not self.has_left_plan:
                self._backwards[action.microbatch].run_from(action.segment)

    @property
    def has_left_plan(self) -> bool:
        """Whether a microbatch is known to take another path than the plan was made for."""
        return any(program.left_plan for program in self._programs)

    def improvise(self) -> None:
        """Do whatever can be done, until everything is: the plan is for another path, and could wait in a circle.

        Stages notice at different times. One that still follows the plan waits only for what the plan's path makes
        other stages do, and a stage that has left it does that as soon as it can: so there is always one that can go
        on. Backwards stay in the order of the microbatches, which keeps the sums of gradients.
        """
        numbers = range(len(self._programs))
        while not all(self._is_through(number) for number in numbers):
            went_on = [self._advance(number) for number in numbers]
            first = next((number for number in numbers if not self._is_through(number)), None)
            if first is not None and first in self._backwards:
                backward = self._backwards[first]
                if self._have_arrived(backward.awaited()):
                    backward.run_next()
                    continue
            if not any(went_on):
                time.sleep(POLL_SECONDS)

    def _is_through(self, number: int) -> bool:
        done = self._coroutines[number].finished
        return done and (self._loss_of is None or self._backwards[number].is_done)

    def _advance(self, number: int) -> bool:
        """Let a microbatch go on forward if it can."""
        if self._coroutines[number].finished or not self._have_arrived(self._waiting.get(number, ())):
            return False
        self._resume(number)
        return True

    def _have_arrived(self, receipts: Sequence[Receipt]) -> bool:
        return all(receipt.arrived(self._runtime._executor) for receipt in receipts)

    def prepare(self, actions: Sequence[Action], position: int) -> None:
        """Let the next microbatch run up to its first receive, so that the message travels while others compute."""
        following = next((action for action in actions[position:] if action.kind == "F"), None)
        if following is not None and following.microbatch not in self._waiting:
            self._resume(following.microbatch)

    def finish(self) -> None:
        """Complete what no action asked for: segments off the plan, and backwards that no gradient passes through."""
        for number in range(len(self._programs)):
            self._forward(number, ALL_SEGMENTS)
            if self.has_left_plan:
                self.improvise()
                return
            if self._loss_of is not None:
                self._backwards[number].run_from(0)

    def cancel(self) -> None:
        """Let go of programs that wait."""
        for coroutine in self._coroutines:
            coroutine.cancel()
        self._let_go()

    def _let_go(self) -> None:
        """Close the programs and untie them from this run, so that results are freed now and not by the collector."""
        for program in self._programs:
            program.close()
        self._coroutines.clear()
        self._backwards.clear()
        self._losses.clear()
        self._waiting.clear()

    def result(self) -> StepRun:
        """Make results real on every stage."""
        outputs = [coroutine.result for coroutine in self._coroutines]
        trace = _trace_of(self._programs[0], self._losses.get(0))
        real_outputs, real_losses = self._runtime.make_real(
            (outputs, [self._losses.get(n) for n in range(len(outputs))])
        )
        losses = [loss for loss in real_losses if loss is not None]
        self._let_go()
        return StepRun(real_outputs, losses, trace)

    def _forward(self, number: int, segment: int) -> None:
        """Run the program of a microbatch until ``segment`` is done, or it leaves the plan and would have to wait."""
        coroutine, program = self._coroutines[number], self._programs[number]
        while not coroutine.finished and (number not in self._waiting or program.segments[-1].index <= segment):
            if self._waiting.get(number) and self.has_left_plan:
                return
            for receipt in self._waiting.get(number, ()):
                receipt.wait()
            self._resume(number)

    def _resume(self, number: int) -> None:
        coroutine = self._coroutines[number]
        if coroutine.finished:
            return
        self._runtime._program = self._programs[number]
        try:
            finished = coroutine.resume()
        finally:
            self._runtime._program = None
        if finished:
            self._programs[number].end()
            self._waiting.pop(number, None)
            if self._loss_of is not None:
                self._begin_backward(number)

    def _begin_backward(self, number: int) -> None:
        assert self._loss_of is not None
        loss = self._losses[number] = self._loss_of(self._coroutines[number].result)
        self._backwards[number] = Backward(
            self._programs[number],
            loss,
            self._weights[number],
            stage=self._runtime._stage,
            num_stages=self._runtime._num_stages,
            transport=self._runtime._transport,
        )


def _holds(outer: nn.Module | None, inner: nn.Module) -> bool:
    return outer is not None and any(part is inner for part in outer.modules())


def _real_of(leaf: Any, real: dict[int, Tensor]) -> Any:
    if isinstance(leaf, PlacedTensor):
        return real[id(leaf)]
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _trace_of(program: Program, loss: Any) -> Trace:
    number = loss.value.id if isinstance(loss, PlacedTensor) else None
    return Trace([event for event, _ in program.record], number)
