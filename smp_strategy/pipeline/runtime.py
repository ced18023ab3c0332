"""Pipeline runtime of one stage: runs steps in the order of the plan, and other code that needs placed tensors.

With a plan, the stage carries out its actions one after the other. Without one (the path of the step is not known yet),
each microbatch runs forward and then backward in program order: slower, but the same on every stage and therefore free
of deadlock. Either way the events of the first microbatch are kept: the next plan is made from this trace.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, final

from torch import Tensor

from smp_strategy.distributed.device import is_host
from smp_strategy.distributed.malloc import keep_freed_memory
from smp_strategy.distributed.torch_private import mode_set_aside
from smp_strategy.model.rng import derive_seed
from smp_strategy.model.trace.prediction import Callee
from smp_strategy.model.trace.pytree import flatten
from smp_strategy.pipeline.action_order import (
    backward_positions,
    begun_early,
    is_alternating,
    is_in_order,
    program_order,
    tail_of,
)
from smp_strategy.pipeline.barriers import BarrierSteps
from smp_strategy.pipeline.coroutine import BETWEEN_TURNS, ThreadPool
from smp_strategy.pipeline.current_program import CurrentProgram
from smp_strategy.pipeline.dist_calls.user_collectives import ReplicaCollectives
from smp_strategy.pipeline.isolation.microbatch_state import MicrobatchState
from smp_strategy.pipeline.isolation.writes import WatchedWrites
from smp_strategy.pipeline.job import Job, StepRun
from smp_strategy.pipeline.microbatch_runner import MicrobatchRunner
from smp_strategy.pipeline.off_plan import finish_off_plan
from smp_strategy.pipeline.recorder import Recorder
from smp_strategy.pipeline.recording import Recording
from smp_strategy.pipeline.schedule import Action, Plan
from smp_strategy.pipeline.stage import Stage
from smp_strategy.pipeline.wrapping.autograd_functions import refuse_in_function, watched_entrances
from smp_strategy.pipeline.wrapping.wrap_unit import call_directly

__all__ = ["Runtime"]


@final
class Runtime:
    """Executes steps on one stage.

    Args:
        private: private state of microbatches, which is told before the glue sets or deletes an attribute of a module.
        note_values: called, in a dry run, with the values that the glue hands to units and autograd Functions, and
            returns.
        note_call: called with the microbatch, each unit that the glue calls, and its arguments.

    Attributes:
        current: holder of the running program.
        collectives: collectives of the user in steps.
        barriers: runs steps whose microbatches stop at barriers.
    """

    def __init__(
        self,
        stage: Stage,
        private: MicrobatchState,
        *,
        note_values: Callable[[Any], None] | None = None,
        note_call: Callable[[int, Callee, Any, Any], None] | None = None,
    ) -> None:
        self.stage, self._private = stage, private
        self.note_values, self.note_call = note_values, note_call
        self.current, self._threads = CurrentProgram(), ThreadPool()
        self.collectives = ReplicaCollectives(stage.replicas, self.current, meets=not stage.is_dry)
        self.barriers = BarrierSteps(
            self.current, self.collectives, runner_of=self.runner_of, offloading=self._offloading, flush=self.flush
        )
        stage.activations.switched = private.of_now
        self._writes = WatchedWrites(private.touch, self.current)
        if is_host(stage.device):
            keep_freed_memory()

    def call_unit(self, unit: Callee, args: Any, kwargs: Any) -> Any:
        """Replacement for the ``forward`` of a unit, whose key is its name."""
        name = str(unit.key)
        program = self.current.interpreter
        # A recomputation in backward: the call was routed when it ran forward.
        if self.stage.activations.repeating is not None:
            return unit.function(*args, **kwargs)
        if program is None or program.enclosing is not None:
            return call_directly(unit, args, kwargs, stage=self.stage, program=program)
        if program.function:
            refuse_in_function(program.function, name)
        if self.note_values is not None:
            self.note_values((args, kwargs))
        if self.note_call is not None:
            self.note_call(program.microbatch, unit, args, kwargs)
        if program.weights is None:
            return program.unit(name, unit, args, kwargs)
        with mode_set_aside(program.weights):
            return program.unit(name, unit, args, kwargs)

    def run(self, job: Job, microbatches: Sequence[Any], plan: Plan | None) -> tuple[StepRun, Recording]:
        """Run ``job`` on every microbatch; with a loss, also backward.

        Gradients of the weighted sum of the losses are added to the ``.grad`` of this stage's parameters.

        Args:
            plan: order of actions; ``None``: program order. The stage leaves the plan when a microbatch departs from
                the path for which it was made.

        Returns:
            The result of the step, and the recording of this stage.
        """
        turns, recorder = self.runner_of(job, microbatches), Recorder(self.stage.transport)
        try:
            with ExitStack() as stack:
                stack.enter_context(watched_entrances(self.current))
                stack.enter_context(self.collectives.open())
                stack.enter_context(self.stage.streams.seeded(derive_seed(job.seed, BETWEEN_TURNS)))
                has_backward = job.loss_of is not None
                order = program_order(len(microbatches), has_backward=has_backward)
                actions = plan.stages[self.stage.number] if plan else order
                if has_backward:
                    stack.enter_context(self._offloading(microbatches, actions, follows_plan=plan is not None))
                last = max((position for position, action in enumerate(actions) if action.kind != "F"), default=None)
                early = [()] * len(actions) if job.carries_state else begun_early(actions)
                tail = tail_of(actions)
                for position, action in enumerate(actions):
                    # Gradients to which this last backward adds nothing are final: replicas may begin to sum them.
                    if position == last:
                        stack.enter_context(job.around_last())
                    self.stage.activations.offload.reach(position)
                    recorder.note(action, turns.do)
                    if turns.has_left_plan:
                        self.stage.activations.offload.leave_plan()
                        break
                    turns.prepare(early[position])
                    # Behind the tail nothing waits for this stage any more, so it may wait for the others.
                    turns.share_results(at_once=position >= tail)
                if not turns.finish():
                    in_order = plan is None or is_in_order(plan) or any(each.hands_on for each in turns.programs)
                    finish_off_plan(turns, is_in_order=in_order, improvises=self.collectives.begin_to_improvise)
            turns.agree()
            self.flush()
        except BaseException:
            turns.cancel()
            raise
        result = turns.result()
        return result, recorder.recording(left_plan=turns.has_left_plan, traffic=self.stage.activations.offload.traffic)

    def _offloading(
        self, microbatches: Sequence[Any], actions: Sequence[Action] = (), *, follows_plan: bool = False
    ) -> AbstractContextManager[None]:
        """Context in which activations of units may be offloaded."""
        # A single stage has too few actions to time transfers by them: calls are counted instead.
        uses = backward_positions(actions) if follows_plan and self.stage.num_stages > 1 else None
        batch = (leaf for leaf in flatten(microbatches)[0] if isinstance(leaf, Tensor))
        return self.stage.activations.offload.step(uses, backward_follows=is_alternating(actions), batch=batch)

    def runner_of(self, job: Job, microbatches: Sequence[Any]) -> MicrobatchRunner:
        """Make the runner of a step that begins now."""
        self.barriers.close()
        private = self._private if len(microbatches) > 1 or self.stage.activations.recomputes else None
        if private is not None:
            private.begin(job.step)
        return MicrobatchRunner(
            self.stage, microbatches, job, threads=self._threads, current=self.current, private=private
        )

    @property
    def is_in_unit(self) -> bool:
        """Whether a unit is computing, perhaps recomputed in a backward."""
        program = self.current.interpreter
        runs = program is not None and program.is_in_unit and not program.is_predicting
        return runs or self.stage.activations.repeating is not None

    def flush(self) -> None:
        """Confirm all messages that were sent."""
        if self.stage.transport is not None:
            self.stage.transport.flush()

    def close(self) -> None:
        """End the threads."""
        self.barriers.close()
        self._writes.close()
        self.collectives.close()
        self._threads.close()
        if self.stage.transport is not None:
            self.stage.transport.close()
