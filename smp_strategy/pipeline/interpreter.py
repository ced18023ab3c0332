"""Interpreter of the user's program: one microbatch on one stage, call by call.

Each call of a unit, and each operation of the glue on placed tensors, passes through here in four moves, numbered alike
in the code:

1. predict its result (:mod:`smp_strategy.model.trace.shape_inference`),
2. record it and choose its stage (:mod:`smp_strategy.pipeline.routing`),
3. send the values that another stage needs, wait for those that this stage needs
   (:mod:`smp_strategy.pipeline.local_graph`),
4. run it if it belongs here, and check the result against the prediction (:mod:`smp_strategy.pipeline.outcome`).

The program gets placed tensors back on every stage. If a result cannot be predicted, its stage runs the call first and
describes the result to the others, which wait for the description.
"""

import functools
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Literal, final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from smp_strategy.activations.policy import ActivationPolicy
from smp_strategy.activations.unit_wrapper import UnitCall
from smp_strategy.distributed.torch_modes import NOTHING
from smp_strategy.distributed.torch_private import is_under_transform
from smp_strategy.errors import UnsupportedError
from smp_strategy.model.trace.events import Event, Value
from smp_strategy.model.trace.exposed_attributes import STATE, StaleTensor, put_state, state_of
from smp_strategy.model.trace.object_contents import CONTENTS
from smp_strategy.model.trace.parametrize_cache import CachedWeights
from smp_strategy.model.trace.prediction import Callee, Prediction, Unpredictable, ValueNeededError
from smp_strategy.model.trace.pytree import flatten_call, unflatten_call
from smp_strategy.model.trace.tensor_spec import TensorSpec
from smp_strategy.pipeline.batch_loss.loss_weights import ProgramTerms
from smp_strategy.pipeline.batch_loss.sample_watch import SampleWatch
from smp_strategy.pipeline.current_program import CurrentProgram
from smp_strategy.pipeline.isolation.carried_objects import with_changes
from smp_strategy.pipeline.isolation.draws import ProgramDraws
from smp_strategy.pipeline.isolation.global_rng import GlobalGenerators
from smp_strategy.pipeline.local_graph import LocalGraph
from smp_strategy.pipeline.outcome import CallOutcome, InterpretedCall, assemble, made_tensors
from smp_strategy.pipeline.placed_tensor import PlacedTensor
from smp_strategy.pipeline.program_trace import ProgramTrace
from smp_strategy.pipeline.routing import Placement, Router, SegmentId
from smp_strategy.pipeline.segments import cut_off
from smp_strategy.pipeline.shared_tensors.aliasing import follow_changes, place_plain, share_memory, take_change
from smp_strategy.pipeline.shared_tensors.arguments import CallArguments, refuse_hidden, refuse_transform
from smp_strategy.pipeline.shared_tensors.kept_tensors import across_microbatches, call_with_known, without_others
from smp_strategy.pipeline.shared_tensors.replicated_tensors import (
    becomes_placed,
    is_plain,
    must_run_everywhere,
    refuse_changed_plain,
)
from smp_strategy.pipeline.stage import Stage
from smp_strategy.pipeline.transport.transport import Receipt
from smp_strategy.pipeline.unpredictable import MESSAGE, decode, encode, observed
from smp_strategy.pipeline.wrapping.wrap_unit import wrap_unit

__all__ = ["MicrobatchInterpreter"]


@final
class MicrobatchInterpreter:
    """Interprets the calls of one microbatch on one stage.

    Args:
        seed: seed of its random streams; unused if ``generators`` are given.
        generators: global random generators that it draws from, as all stages do; ``None``: streams of its own.
        pause: hands control to the scheduler, with the receives that the program waits for.
        expected: signatures of the events that the plan was made for; ``None`` without a plan.
        current: holder of the running program, which takes over operations on tensors of ended programs.

    Attributes:
        program_trace: trace of the calls that it makes.
        graph: real tensors of this microbatch on this stage.
        terms: terms of the loss that get weights, or what watches a dry run; ``None``: there is nothing of that.
        weights: mode of the glue that code of units does without, if there is one.
        hands_on: whether it may write to weights, which later microbatches read.
    """

    def __init__(
        self,
        stage: Stage,
        *,
        microbatch: int,
        seed: int = 0,
        generators: GlobalGenerators | None = None,
        pause: Callable[[Sequence[Receipt]], None] = lambda receipts: None,
        expected: Sequence[object] | None = None,
        current: CurrentProgram | None = None,
    ) -> None:
        self.microbatch = microbatch
        router = functools.partial(Router, stage.stage_of, stage.num_stages)
        self.program_trace = ProgramTrace(router, expected, stage.latest)
        graph = self.graph = LocalGraph(stage, microbatch, pause)
        self.cached = CachedWeights(lambda: graph.current, graph.cross)
        self.is_dry_run, self.closed, self.is_predicting = stage.is_dry, False, False
        # The running unit, for real or dry.
        self.enclosing: nn.Module | None = None
        # The running autograd Function of the glue.
        self.function = ""
        self.asked: ActivationPolicy | None = None
        self._current = current or CurrentProgram()
        self.terms: ProgramTerms | SampleWatch | None = None
        self.weights: TorchFunctionMode | None = None
        self.hands_on = False
        self._stage, self._shape_inference = stage.number, stage.shape_inference
        self._make_known, self._with_weights, self._glue = stage.make_known, stage.with_weights, stage.glue
        self._reads_refused, self.parameters_refused = stage.reads_refused, stage.parameters_refused
        self._activations, self._exposed, self._rehearsal = stage.activations, stage.exposed, stage.rehearsal
        self._carried, self._compares_inputs = stage.carried, stage.compares_inputs
        self._arguments = CallArguments(self, self.program_trace, stage.number, stage.exposed)
        self._draws = ProgramDraws(stage.streams, seed, generators)

    @property
    def computes_here(self) -> bool:
        """Whether there are values; false in a dry run."""
        return self._stage >= 0

    @property
    def is_in_unit(self) -> bool:
        """Whether code of a unit is running, perhaps recomputed in a backward."""
        return self.enclosing is not None or self._activations.repeating is not None

    def close(self) -> None:
        """Release everything at the end of the step, except the tensors that the user keeps."""
        self.closed = True
        self.graph.close()
        self.cached.clear()
        self._arguments.clear()

    def lives_on(self, tensor: PlacedTensor) -> int:
        """The stage that made ``tensor``."""
        return self.program_trace.home(tensor.value)

    def check_current(self, tensor: PlacedTensor) -> None:
        """Bring ``tensor`` up to date, or refuse it if its memory was changed through a view on another stage."""
        if tensor.version != tensor.memory.version:
            follow_changes(tensor, self.program_trace, self._stage)

    def bring(self, spec: TensorSpec, stages: Iterable[int], tensor: Tensor | None) -> PlacedTensor:
        """Make a placed tensor for a tensor that exists already on ``stages``; elsewhere it is ``None``."""
        value, home = self.program_trace.given(spec, stages)
        placed = PlacedTensor(self, value, spec, home)
        if tensor is not None:
            placed.origin = placed.current = (self.graph.current, tensor)
        return placed

    def unit(self, name: str, callee: Callee, args: Any, kwargs: Any) -> Any:
        # Attributes that other code reads go in as one more argument, and come out in it: [Note: exposed attributes].
        if callee.exposed:
            before = state_of(callee.exposed)
            state = {label: without_others(value, self) for label, value in before.items()}
            callee, kwargs = callee.with_state(), {**kwargs, STATE: state}
        if torch.is_grad_enabled():
            result = with_changes(self._call("unit", name, callee, args, kwargs), (args, kwargs))
        else:
            # In a dry run a unit fills the user's caches with fake tensors: lent containers are emptied at the end.
            call = functools.partial(self._call, "unit", name)
            lend = None if self.computes_here else self._arguments.lend
            result = self._carried.call(call, name, callee, args, kwargs, self.graph.real, lend)
        if callee.exposed:
            # What an earlier microbatch has left there, and this call has not replaced, goes back as it was.
            put_state(callee.exposed, {k: before[k] if isinstance(v, StaleTensor) else v for k, v in state.items()})
        return result

    def operation(self, name: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Apply an operation of the glue."""
        # A tensor kept beyond its step hands its operation to this closed program; the running one takes it over.
        if self.closed:
            program = self._current.interpreter
            if program is not None:
                return program.operation(name, function, args, kwargs)
            return call_with_known(function, args, kwargs, self._make_known)
        self._refuse_others()
        refuse_hidden(name, self)
        return self._call("op", name, Callee(function, function), args, kwargs)

    def read(self, name: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Give values to Python code: every stage receives them and computes ``function`` from them."""
        if self.closed:
            program = self._current.interpreter
            if program is not None:
                return program.read(name, function, args, kwargs)
            return call_with_known(function, args, kwargs, self._make_known)
        self._refuse_others()
        refuse_hidden(name, self)
        if not self.computes_here and self._rehearsal is None:
            raise ValueNeededError(name)
        if self._reads_refused:
            raise UnsupportedError(f"`{name}` reads a value in a step. {self._reads_refused}")
        leaves, structure = flatten_call(args, kwargs)
        placed, _ = self._arguments.open(leaves)
        self._exchange(
            self.program_trace.place(Event("read", name, tuple([each.value for each in placed]), ())), placed
        )
        real = self.graph.real if self._rehearsal is None else self._rehearsal.real
        args, kwargs = unflatten_call([real(leaf) for leaf in leaves], structure)
        return function(*args, **kwargs)

    def _refuse_others(self) -> None:
        """Refuse code of another microbatch that has only tensors of this one."""
        running = self._current.interpreter
        if running is not None and running is not self:
            raise across_microbatches(self.microbatch, running.microbatch)

    def hook_gradient(self, tensor: PlacedTensor, hook: Callable[[Tensor], Any]) -> RemovableHandle:
        """Call ``hook`` with the gradient of ``tensor`` on the stage that made it."""
        if tensor.origin is None or self.lives_on(tensor) != self._stage:
            return RemovableHandle(OrderedDict())
        return tensor.origin[1].register_hook(hook)

    # Calls

    def _call(self, kind: Literal["unit", "op"], name: str, callee: Callee, args: Any, kwargs: Any) -> Any:
        if self.terms is None:
            return self._interpret(kind, name, callee, args, kwargs)
        return self.terms.call(self._interpret, len(self.program_trace.events), kind, name, callee, args, kwargs)

    def _interpret(self, kind: Literal["unit", "op"], name: str, callee: Callee, args: Any, kwargs: Any) -> Any:
        if is_under_transform():
            refuse_transform(name)
        leaves, structure = flatten_call(args, kwargs)
        # `specs`: the leaves with metadata for tensors, which is all that a prediction depends on.
        placed, specs = self._arguments.open(leaves)
        if kind == "op" and not placed:
            # All of them were kept from earlier steps, and every stage has their values by now.
            args, kwargs = unflatten_call(leaves, structure)
            return callee.function(*args, **kwargs)
        call = InterpretedCall(kind, name, callee, leaves, structure, placed)
        # [1] Predict. First by memory: most calls repeat one that was predicted before.
        prediction = self._shape_inference.recall(callee, specs, structure)
        if prediction is None:
            prediction = self._predict(call, specs)
        if isinstance(prediction, Unpredictable):
            return self._call_unpredicted(call, prediction)
        # The call changes tensors in place that every stage has. If it runs on one stage only, the others' copies would
        # keep their old values: so all stages run it, or the tensor becomes a placed one.
        if prediction.changed:
            plain = [position for position in prediction.changed if is_plain(leaves[position])]
            if plain and must_run_everywhere(call, prediction, plain):
                return self.read(name, callee.function, args, kwargs)
            plain = [each for each in plain if becomes_placed(call, prediction, each, self._glue)]
            trace, computes = self.program_trace, self.computes_here
            placed += [place_plain(leaves[each], self, trace, self.graph, computes=computes) for each in plain]
        # On all stages, also those that will not run it: the count seeds later operations.
        if prediction.random and kind == "op":
            self._draws.count_operation()
        # Attributes and contents of objects, which go in with a call, are those of this stage. Later microbatches find
        # what earlier ones have left: only the stage that computes with it has the newest value.
        if self._compares_inputs and not self.microbatch and STATE not in kwargs and CONTENTS not in kwargs:
            self._carried.note_tensors(name, leaves, but=prediction.changed)
        # [2] Record and route. Nothing may be sent before: the trace refuses microbatches with too many moves.
        event, placement = self.program_trace.call(kind, name, tuple([each.value for each in placed]), prediction)
        if self._rehearsal is not None:
            position, module = len(self.program_trace.events), callee.module
            self._rehearsal.note(self.microbatch, position, name, placement, leaves, module)
        # [3] Exchange. Here the coroutine may pause, and other microbatches run.
        if placement.moves:
            self._exchange(placement, placed)
        # [4] Run, on one stage only; the others go on with the prediction at once.
        ran = self._run(call, prediction.random, prediction.changed) if self._stage in placement.stages else None
        if prediction.random:
            self._draws.follow(placement.stages, leaves)
        return self._hand_out(call, prediction, placement.segments[0], event.outputs, ran)

    def _call_unpredicted(self, call: InterpretedCall, why: Unpredictable) -> Any:
        """Make a call whose result is not known before: its stage describes it to the others. Collective over them."""
        if not self.computes_here:
            raise ValueNeededError(f"{call.name}: {why.reason}")
        if call.kind == "op":
            self._draws.count_operation()
        trace, ran, prediction = self.program_trace, None, None
        message, position = trace.value(MESSAGE), len(trace.events)
        event = Event(call.kind, call.name, tuple([tensor.value for tensor in call.placed]), (message,))
        placement = trace.place(event, is_whole=False)
        self._exchange(placement, call.placed)
        (segment,) = placement.segments
        note = PlacedTensor(self, message, MESSAGE, segment)
        if self._stage in placement.stages:
            ran, prediction = observed(call, self._run, self.graph, counts=self.is_dry_run)
            note.origin = note.current = (self.graph.current, encode(call.name, prediction))
        self._draws.follow(placement.stages, call.leaves)
        self._exchange(trace.place(Event("read", "description", (message,), ()), is_whole=False), [note])
        if prediction is None:
            assert note.origin is not None
            prediction = decode(note.origin[1], call.name, why)
        refuse_changed_plain(call, prediction)
        values = [trace.value(spec) for spec in (*prediction.made, *prediction.changed.values())]
        trace.complete(position, values, prediction)
        return self._hand_out(call, prediction, segment, values, ran)

    def _hand_out(
        self,
        call: InterpretedCall,
        prediction: Prediction,
        segment: SegmentId,
        values: Sequence[Value],
        ran: CallOutcome | None,
    ) -> Any:
        """Assemble the result that the program gets, on every stage."""
        # The usual call on the stages that did not run it: one new tensor and nothing else.
        if ran is None and prediction.is_plain:
            return PlacedTensor(self, values[0], prediction.made[0], segment)
        leaves = call.leaves
        constants: Sequence[Any] = prediction.outputs
        results = [PlacedTensor(self, v, spec, segment) for v, spec in zip(values, prediction.made, strict=False)]
        for result, alias in zip(results, prediction.aliases, strict=True):
            if alias is not None:
                source = results[alias.made] if alias.leaf is None else leaves[alias.leaf]
                share_memory(result, source, alias)
        if ran is not None:
            constants, tensors = made_tensors(call.name, prediction, ran.inputs, ran.output)
            for result, tensor in zip(results, tensors, strict=True):
                # A dry run has no backward: cutting the history frees it at once.
                real = cut_off(tensor) if self.is_dry_run else tensor
                result.origin = result.current = (self.graph.current, real)
        for (position, spec), value in zip(prediction.changed.items(), values[len(results) :], strict=True):
            here = None if ran is None else (self.graph.current, ran.inputs[position])
            if isinstance(leaves[position], PlacedTensor):
                take_change(leaves[position], value, spec, segment, here)
                continue
            # A tensor that every stage has, and keeps: all of them read the new values, and copy them.
            changed = PlacedTensor(self, value, spec, segment)
            changed.origin = changed.current = here
            self.read("copy_", Tensor.copy_, (leaves[position], changed), {})
        return assemble(prediction, results, leaves, constants)

    def _run(self, call: InterpretedCall, random: bool, changed: Collection[int] = ()) -> CallOutcome:
        # Before the inputs are taken: a microbatch that has begun early pauses in here.
        self.graph.begin_work()
        inputs = [self.graph.real(leaf) for leaf in call.leaves]
        args, kwargs = unflatten_call(inputs, call.structure)
        function, module = call.callee.runs, call.callee.module
        seeded = self._draws.seeded(call.kind, len(self.program_trace.events)) if random else None
        noting = NOTHING if self._exposed is None or module is None else self._exposed.noting(call.name, module)
        if call.kind == "unit" and module is not None:
            is_compiled = call.callee.compiled is not None
            about = UnitCall(call.name, module, self.microbatch, seeded, self.asked, changed, is_compiled)
            function = wrap_unit(function, about, with_weights=self._with_weights, activations=self._activations)
        self.enclosing = module
        try:
            with NOTHING if seeded is None else seeded(), noting:
                return CallOutcome(inputs, function(*args, **kwargs))
        finally:
            self.enclosing = None

    def _predict(self, call: InterpretedCall, specs: list[Any]) -> Prediction | Unpredictable:
        self.enclosing, self.is_predicting = call.callee.module, True
        try:
            if not self.computes_here and call.kind == "unit":
                self._arguments.lend(specs)
            # A dry run also looks for what the unit leaves in attributes, and the unit must not find marks there
            # ([Note: marks]).
            if self.computes_here or self._exposed is None or call.callee.module is None:
                return self._shape_inference.predict(call.callee, specs, call.structure)
            with self._exposed.unmarked(call.name, call.callee.module):
                return self._shape_inference.predict(call.callee, specs, call.structure, survey=self._exposed)
        finally:
            self.enclosing, self.is_predicting = None, False

    def _exchange(self, placement: Placement, placed: Sequence[PlacedTensor]) -> None:
        # A dry run (stage -1) has no tensors to send, and a rehearsal only pauses where a message would have to come.
        if placement.moves and self.computes_here:
            self.graph.exchange(placement, placed)
        elif self._rehearsal is not None:
            self._rehearsal.exchange(self.microbatch, placement)
