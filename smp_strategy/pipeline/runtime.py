"""Runs the user's code on one stage: steps in the order of the plan, and whatever else needs placed tensors.

With a plan, the stage does its actions one after the other. Without one (the path of the step is not known yet), each
microbatch runs forward and then backward in program order: slower, but the same on every stage and therefore free of
deadlock. Either way the events of the first microbatch are kept: they are the trace that the next plan is made of.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any, final

from torch import Tensor, nn

from smp_strategy.activations.offload_stats import OffloadStats
from smp_strategy.distributed.device import is_host
from smp_strategy.distributed.malloc import keep_freed_memory
from smp_strategy.errors import UnsupportedError
from smp_strategy.model.rng import derive_seed
from smp_strategy.model.trace.events import Event, Trace
from smp_strategy.model.trace.prediction import Callee
from smp_strategy.model.trace.pytree import flatten
from smp_strategy.pipeline.autograd_functions import watched_entrances
from smp_strategy.pipeline.coroutine import BETWEEN_TURNS, ThreadPool
from smp_strategy.pipeline.global_rng import GlobalGenerators
from smp_strategy.pipeline.interpreter import MicrobatchInterpreter
from smp_strategy.pipeline.microbatch_runner import Barrier, Job, MicrobatchRunner, Step, StepRun, trace_of
from smp_strategy.pipeline.microbatch_state import MicrobatchState
from smp_strategy.pipeline.pause import PausedStep
from smp_strategy.pipeline.placed_tensor import PlacedTensor
from smp_strategy.pipeline.recorder import Recorder
from smp_strategy.pipeline.recording import Recording
from smp_strategy.pipeline.routing import Placement
from smp_strategy.pipeline.schedule import Action, Plan, backward_positions, begun_early, is_in_order, tail_of
from smp_strategy.pipeline.stage import Stage
from smp_strategy.pipeline.user_collectives import ReplicaCollectives
from smp_strategy.pipeline.writes import WatchedWrites

__all__ = ["Runtime"]


@final
class Runtime:
    """Executes steps on one stage.

    Args:
        stage: this rank's stage.
        private: keeps microbatches apart; ``None`` for a dry run.
        told: told what the glue gives to units.
        called: told which unit the glue calls with what.
        written: told, before the glue sets or deletes an attribute of a module; ``None``: ``private`` is.
    """

    def __init__(
        self,
        stage: Stage,
        private: MicrobatchState | None = None,
        *,
        told: Callable[[Any], None] | None = None,
        called: Callable[[Callee, Any, Any], None] | None = None,
        written: Callable[[nn.Module, str], None] | None = None,
    ) -> None:
        self._stage = stage
        self._private = private
        self._told = told
        self._called = called
        self._program: MicrobatchInterpreter | None = None
        self._collectives = ReplicaCollectives(stage.replicas, self._active, meets=not stage.is_dry)
        self._meeting: MicrobatchRunner | None = None
        self._offload_of_pause = ExitStack()
        self._threads = ThreadPool()
        if private is not None:
            stage.activations.switched = private.of_now
        self._written = written if private is None else private.touch
        self._writes = None if self._written is None else WatchedWrites(self._touch)
        if is_host(stage.device):
            keep_freed_memory()

    def call_unit(self, unit: Callee, args: Any, kwargs: Any) -> Any:
        """Stand-in for the ``forward`` of a unit, whose key is its name."""
        name = str(unit.key)
        program = self._program
        if self._stage.activations.repeating is not None:  # the work of the unit that is being run once more
            return unit.function(*args, **kwargs)
        if program is not None and program.enclosing is None:
            if program.function:
                raise UnsupportedError(
                    f"`{program.function}`, an autograd Function in the code above the units, calls unit `{name}`, but "
                    "runs on one stage as a whole. Let it stay together with the modules that it calls: use "
                    "`smp_strategy.unit(module)` on the module that applies it."
                )
            if self._told is not None:
                self._told((args, kwargs))
            if self._called is not None:
                self._called(unit, args, kwargs)
            return program.unit(name, unit, args, kwargs)
        # The work of another unit: the weights are there if that unit holds this one, and a dry run needs none.
        if program is not None and (program.is_predicting or _holds(program.enclosing, unit.module)):
            return unit.function(*args, **kwargs)
        if self._stage.stage_of[name] != self._stage.number:
            raise UnsupportedError(
                f"Unit `{name}` lives on stage {self._stage.stage_of[name]} and was called "
                f"{'inside another unit' if program else 'outside of a step'} on stage {self._stage.number}, where its "
                "weights are not. Call the model inside a training, validation, test or predict step."
            )
        return self._stage.with_weights(name, unit.runs, None)(*args, **kwargs)

    def call_with_values(
        self, function: Callable[..., Any], args: Any, kwargs: Any, *, unknown: Callable[[], Any]
    ) -> Any:
        """See :meth:`smp_strategy.engine.engine.Engine.call_with_values`."""
        program = self._program
        if program is None or not any(isinstance(leaf, PlacedTensor) for leaf in flatten((args, kwargs))[0]):
            return function(*args, **kwargs)
        if program.is_survey:
            return unknown()
        return program.read(getattr(function, "__qualname__", repr(function)), function, args, kwargs)

    def run(self, job: Job, microbatches: Sequence[Any], plan: Plan | None) -> tuple[StepRun, Recording]:
        """Do ``job`` with every microbatch; with a loss, also backward.

        Gradients of the weighted sum of the losses are added to the ``.grad`` of this stage's parameters.

        Args:
            job: the user's code and what belongs to it.
            microbatches: what it gets.
            plan: order of work; ``None``: program order. A microbatch that takes another path than the plan was made
                for makes its stage leave the plan.

        Returns:
            What came out of it, and when this stage did what.
        """
        turns, recorder = self._turns(job, microbatches), Recorder(self._stage.transport)
        try:
            with ExitStack() as stack:
                stack.enter_context(watched_entrances(self._active))
                stack.enter_context(self._collectives.open())
                stack.enter_context(self._stage.streams.seeded(derive_seed(job.seed, BETWEEN_TURNS)))
                actions = plan.stages[self._stage.number] if plan else turns.program_order()
                if job.loss_of is not None:
                    stack.enter_context(self._offloading(microbatches, actions, follows_plan=plan is not None))
                last = max((position for position, action in enumerate(actions) if action.kind != "F"), default=None)
                early, tail = begun_early(actions), tail_of(actions)
                for position, action in enumerate(actions):
                    if position == last:
                        stack.enter_context(job.around_last())
                    self._stage.activations.offload.reach(position)
                    recorder.note(action, turns.do)
                    if turns.has_left_plan:
                        self._stage.activations.offload.leave_plan()
                        break
                    turns.prepare(early[position])
                    turns.share_results(at_once=position >= tail)
                turns.finish(lambda: plan is None or is_in_order(plan))
            turns.agree()
            self._flush()
        except BaseException:
            turns.cancel()
            raise
        result = turns.result()
        return result, recorder.recording(left_plan=turns.has_left_plan, traffic=self.traffic)

    def run_with_barriers(self, job: Job, microbatches: Sequence[Any]) -> StepRun:
        """Do ``job``, whose step stops at barriers: see :meth:`once` and :meth:`backward`."""
        turns = self._turns(job, microbatches)
        with self._running(turns):
            with self._offloading(microbatches):
                while turns.meet():
                    pass
            turns.agree()
        return turns.result()

    def run_to_barrier(self, job: Job, microbatches: Sequence[Any]) -> tuple[Any, PausedStep]:
        """Do ``job``, whose step stops at a barrier and then leaves nothing more in shared objects, up to there.

        Returns:
            What the barrier's action returns, and the step, which waits.
        """
        turns = self._turns(job, microbatches)
        # It lasts until the next step: in between, backward expects what has gone to the host.
        self._offload_of_pause.enter_context(self._offloading(microbatches))
        pause = PausedStep(turns, self._running)
        found = pause.go_on()
        turns.end_private()
        return found, pause

    @contextmanager
    def _running(self, turns: MicrobatchRunner) -> Iterator[None]:
        """Microbatches run in here up to a barrier, or to their end."""
        self._meeting = turns
        try:
            with watched_entrances(self._active), self._collectives.open():
                yield
            self._flush()
        except BaseException:
            turns.cancel()
            raise
        finally:
            self._meeting = None

    @property
    def is_in_step(self) -> bool:
        """Whether a program runs: the caller is code of a step, or of a hook that sees gradients."""
        return self._program is not None

    def once(self, barrier: Barrier, *, also_dry: bool) -> Any:
        """Called in a step: do something once for the batch, when all microbatches are there.

        Args:
            barrier: what, and with which values.
            also_dry: do it in a dry run, too, where nothing else is done.
        """
        program = self._program
        assert program is not None
        if program.is_survey:
            return barrier.act([barrier.value]) if also_dry else None
        if self._meeting is None or not self._meeting.has(program):
            raise UnsupportedError(
                f"{barrier.name} is called in a hook that sees gradients, or in a step that returns its loss. Call it "
                "in a training step under manual optimization."
            )
        return self._meeting.stop_at(replace(barrier, act=self._outside_of_step(barrier.act)), program)

    def _outside_of_step(self, act: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        def outside(values: list[Any]) -> Any:
            with self._collectives.aside():
                return act(values)

        return outside

    def backward(self, losses: Sequence[Any], factor: float, *, retain_graph: bool) -> None:
        """At a barrier: see :meth:`~smp_strategy.pipeline.microbatch_runner.MicrobatchRunner.backward`."""
        assert self._meeting is not None
        with self._collectives.aside(False):
            self._meeting.backward(losses, factor, retain_graph=retain_graph)
        self._flush()

    def make_real(self, tree: Any) -> Any:
        """See :meth:`~smp_strategy.pipeline.stage.Stage.make_real`."""
        return self._stage.make_real(tree)

    def _offloading(
        self, microbatches: Sequence[Any], actions: Sequence[Action] = (), *, follows_plan: bool = False
    ) -> AbstractContextManager[None]:
        """What units keep for backward may go to the host in here."""
        # One stage has so few actions that calls are counted.
        uses = backward_positions(actions) if follows_plan and self._stage.num_stages > 1 else None
        alternates = [action.kind == "F" for action in actions] == [True, False] * (len(actions) // 2)
        batch = (leaf for leaf in flatten(microbatches)[0] if isinstance(leaf, Tensor))
        return self._stage.activations.offload.step(uses, backward_follows=bool(actions) and alternates, batch=batch)

    def _turns(self, job: Job, microbatches: Sequence[Any]) -> MicrobatchRunner:
        self._offload_of_pause.close()
        private = self._private if len(microbatches) > 1 or self._stage.activations.recomputes else None
        if private is not None:
            private.begin(job.step)
        return MicrobatchRunner(
            self._stage,
            microbatches,
            job,
            threads=self._threads,
            enter=self._enter,
            active=self._active,
            private=private,
            improvises=self._collectives.begin_to_improvise,
        )

    def survey(self, step: Step, microbatch: Any, loss_of: Callable[[Any], Tensor | None] | None) -> Trace:
        """Run ``step`` to look at it and return its trace.

        Raises:
            ValueNeededError: the stage computes nothing, and the step reads a value or makes a shape that depends on
                one.
        """
        program = self._stage.program(microbatch=0, seed=0, active=self._active)
        with self.entered(program), self._collectives.open():
            output = step(microbatch)
            if self._told is not None:
                self._told(output)
        program.close()
        loss = loss_of(output) if loss_of else None
        return trace_of(program, loss)

    def rehearse(self, job: Job, microbatches: Sequence[Any], *, in_order: bool) -> list[tuple[Event, Placement]]:
        """Let microbatches of a dry run take turns; see ``MicrobatchRunner.rehearse``."""
        assert self._stage.rehearsal is not None
        turns = self._turns(job, microbatches)
        try:
            with (
                watched_entrances(self._active),
                self._collectives.open(),
                self._stage.streams.seeded(derive_seed(job.seed, BETWEEN_TURNS)),
            ):
                return turns.rehearse(self._stage.rehearsal, in_order=in_order)
        finally:
            turns.cancel()

    def run_alone(self, code: Callable[[MicrobatchInterpreter], Any], generators: GlobalGenerators) -> Any:
        """Run code of the glue once, on every stage, outside of the microbatches.

        Args:
            code: gets the program that routes its calls.
            generators: it draws from the global ones, and these follow.

        Returns:
            What ``code`` returns, with real tensors on every stage.
        """
        program = self._stage.program(microbatch=0, generators=generators, active=self._active)
        with self.entered(program):
            result = self._stage.make_real(code(program))
        self._flush()
        program.close()
        return result

    @contextmanager
    def entered(self, program: MicrobatchInterpreter) -> Iterator[None]:
        """Calls of units in here are calls of ``program``."""
        self._enter(program)
        try:
            with watched_entrances(self._active):
                yield
        except BaseException:
            program.close()
            raise
        finally:
            self._enter(None)

    @property
    def is_in_unit(self) -> bool:
        """Whether a unit runs just now, perhaps once more in a backward, to compute something."""
        program = self._program
        runs = program is not None and program.is_in_unit and not program.is_predicting
        return runs or self._stage.activations.repeating is not None

    @property
    def running_unit(self) -> nn.Module | None:
        """The unit whose code runs just now, if any."""
        return None if self._program is None else self._program.enclosing

    @property
    def traffic(self) -> OffloadStats:
        """What has gone between the device and the host in the latest step with backward."""
        return self._stage.activations.offload.traffic

    def _touch(self, module: nn.Module, name: str, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """An attribute of ``module`` is about to be set or deleted; returns what it is set to."""
        program = self._program
        if self._written is None or program is None or program.is_in_unit:
            return values
        self._written(module, name)
        is_placed = len(values) == 1 and isinstance(values[0], PlacedTensor) and not values[0].requires_grad
        if is_placed and name in vars(module).get("_buffers", ()):
            # Buffers outlive the step, and every stage has them.
            return (program.read(f"the buffer `{name}`", Tensor.clone, values, {}),)
        return values

    def _enter(self, program: MicrobatchInterpreter | None) -> None:
        if self._program is not None:
            self._program.cached.leave()
        self._program = program
        if program is not None:
            program.cached.enter()

    def _active(self) -> MicrobatchInterpreter | None:
        return self._program

    def _flush(self) -> None:
        if self._stage.transport is not None:
            self._stage.transport.flush()

    def close(self) -> None:
        """End the threads."""
        self._offload_of_pause.close()
        if self._writes is not None:
            self._writes.close()
        self._collectives.close()
        self._threads.close()
        if self._stage.transport is not None:
            self._stage.transport.close()


def _holds(outer: nn.Module | None, inner: nn.Module | None) -> bool:
    return outer is not None and any(part is inner for part in outer.modules())
