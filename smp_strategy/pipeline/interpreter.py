"""One microbatch on one stage: the user's program, call by call.

Each call of a unit, and each operation of the glue on placed tensors, passes through here in four moves:

1. predict what it returns (:mod:`smp_strategy.model.trace.shape_inference`),
2. record it and decide where it runs (:mod:`smp_strategy.pipeline.routing`),
3. send what another stage needs, wait for what this stage needs (:mod:`smp_strategy.pipeline.local_graph`),
4. run it if it belongs here, and check the result against the prediction (:mod:`smp_strategy.pipeline.outcome`).

On every stage the program gets placed tensors back, and goes on. Where a result cannot be predicted, its stage runs
the call first and describes the result to the others, who wait for that.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from smp_strategy.activations.policy import ActivationPolicy
from smp_strategy.activations.unit_wrapper import UnitCall
from smp_strategy.distributed.torch_modes import NOTHING
from smp_strategy.errors import UnsupportedError
from smp_strategy.model.trace.events import Event, Value
from smp_strategy.model.trace.exposed_attributes import STATE, StaleTensor, put_state, state_of
from smp_strategy.model.trace.parametrize_cache import CachedWeights
from smp_strategy.model.trace.prediction import (
    Callee,
    Prediction,
    Unpredictable,
    ValueNeededError,
)
from smp_strategy.model.trace.pytree import flatten_call, unflatten_call
from smp_strategy.model.trace.side_effects import Changed, apply_changes, contents_of_objects, put_back
from smp_strategy.model.trace.tensor_spec import TensorSpec
from smp_strategy.pipeline.aliasing import follow_change, place_plain
from smp_strategy.pipeline.arguments import CallArguments
from smp_strategy.pipeline.draws import ProgramDraws
from smp_strategy.pipeline.global_rng import GlobalGenerators
from smp_strategy.pipeline.kept_tensors import call_with_known, without_others
from smp_strategy.pipeline.local_graph import LocalGraph
from smp_strategy.pipeline.microbatch_order import Gate
from smp_strategy.pipeline.outcome import CallOutcome, InterpretedCall, assemble, made_tensors
from smp_strategy.pipeline.placed_tensor import PlacedTensor
from smp_strategy.pipeline.record import ProgramTrace
from smp_strategy.pipeline.replicated_tensors import is_plain, must_run_everywhere, refuse_changed_plain
from smp_strategy.pipeline.routing import Placement, SegmentId
from smp_strategy.pipeline.segments import cut_off
from smp_strategy.pipeline.stage_context import StageContext
from smp_strategy.pipeline.unpredictable import UnpredictableCalls
from smp_strategy.pipeline.wrap_unit import wrap_unit

__all__ = ["MicrobatchInterpreter"]


@final
class MicrobatchInterpreter:
    """The calls of one microbatch, seen from one stage.

    Args:
        context: of all programs of this stage.
        microbatch: its number in the step.
        seed: where its random numbers derive from, unless ``generators`` are given.
        generators: it draws from the global ones, as all stages do; ``None``: from streams of its own.
        gate: where it waits for others, if it does.
        record: of the calls that it will make.
        graph: the real tensors of this microbatch on this stage.
    """

    def __init__(
        self,
        context: StageContext,
        *,
        microbatch: int,
        seed: int,
        generators: GlobalGenerators | None,
        gate: Gate | None,
        record: ProgramTrace,
        graph: LocalGraph,
    ) -> None:
        self.microbatch = microbatch
        self.graph = graph
        self.is_survey = context.leftovers is not None or context.rehearsal is not None
        self._leftovers = context.leftovers
        self.record = record
        self.cached = CachedWeights(lambda: graph.current, graph.cross)
        self.closed = False
        # The unit that runs just now, for real or dry.
        self.enclosing: nn.Module | None = None
        self.is_predicting = False
        # The autograd Function of the glue that runs just now.
        self.function = ""
        # What the glue asks for the units that it calls just now.
        self._asked: ActivationPolicy | None = None
        self._gate = gate
        self._rehearsal = context.rehearsal
        self._stage = context.stage
        self._oracle = context.oracle
        self._current = context.current
        self._share = context.share
        self._with_weights = context.with_weights
        self._activations = context.activations
        self._reads_refused = context.reads_refused
        self._arguments = CallArguments(self, record, context.stage, context.leftovers)
        self._draws = ProgramDraws(context.streams, seed, generators)
        self._unpredictable = UnpredictableCalls(
            context.stage, record, graph, exchange=self._exchange, run=self._run, follow=self._draws.follow
        )
        # Containers in objects that a dry run lends to units, with what was in them.
        self._lent: list[tuple[Any, Any]] = []

    @property
    def computes_here(self) -> bool:
        """Whether there are values at all: a dry run has none."""
        return self._stage >= 0

    @property
    def is_in_unit(self) -> bool:
        """Whether code of a unit runs just now, perhaps once more in a backward."""
        return self.enclosing is not None or self._activations.repeating is not None

    def close(self) -> None:
        """End of the step: nothing of this program stays in memory but the tensors that the user keeps."""
        self.closed = True
        self.graph.close()
        self.cached.clear()
        self._arguments.clear()
        put_back(self._lent[::-1])
        self._lent.clear()

    def lives_on(self, tensor: PlacedTensor) -> int:
        """The stage that made ``tensor``."""
        return self.record.home(tensor.value)

    def check_current(self, tensor: PlacedTensor) -> None:
        """Refuse a result whose memory was changed through a view on another stage."""
        if tensor.is_stale:
            follow_change(tensor, self.record, self._stage)

    def bring(self, spec: TensorSpec, stages: Iterable[int], tensor: Tensor | None) -> PlacedTensor:
        """A placed tensor that exists already.

        Args:
            spec: its metadata.
            stages: who holds it.
            tensor: it, on these stages; ``None`` elsewhere.
        """
        value, home = self.record.given(spec, stages)
        placed = PlacedTensor(self, value, spec, home)
        if tensor is not None:
            placed.origin = placed.current = (self.graph.current, tensor)
        return placed

    @contextmanager
    def recomputing(self, treatment: ActivationPolicy) -> Iterator[None]:
        """Units that are called in here are treated so, unless more is to be done with them anyway."""
        before, self._asked = self._asked, treatment
        try:
            yield
        finally:
            self._asked = before

    def unit(self, name: str, callee: Callee, args: Any, kwargs: Any) -> Any:
        """Call a unit."""
        if callee.exposed:
            before = state_of(callee.exposed)
            state = {label: without_others(value, self) for label, value in before.items()}
            callee, kwargs = callee.with_state(), {**kwargs, STATE: state}
        result = self._call("unit", name, callee, args, kwargs)
        if isinstance(result, Changed):
            result = apply_changes(result, (args, kwargs))
        if callee.exposed:
            put_state(callee.exposed, {k: before[k] if isinstance(v, StaleTensor) else v for k, v in state.items()})
        if self._gate is not None:
            self._gate.reach(len(self.record.events))
        return result

    def operation(self, name: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Apply an operation of the glue."""
        if self.closed:
            program = self._current.interpreter
            if program is not None:
                return program.operation(name, function, args, kwargs)
            return call_with_known(function, args, kwargs, self._share)
        self._refuse_hidden(name)
        result = self._call("op", name, Callee(function, function), args, kwargs)
        if self._gate is not None:
            self._gate.reach(len(self.record.events))
        return result

    def read(self, name: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Let Python code see values: every stage gets them and computes ``function`` from them."""
        if self.closed:
            program = self._current.interpreter
            if program is not None:
                return program.read(name, function, args, kwargs)
            return call_with_known(function, args, kwargs, self._share)
        self._refuse_hidden(name)
        if not self.computes_here and self._rehearsal is None:
            raise ValueNeededError(name)
        if self._reads_refused:
            raise UnsupportedError(f"`{name}` reads a value in a step. {self._reads_refused}")
        leaves, structure = flatten_call(args, kwargs)
        placed, _ = self._arguments.open(leaves)
        self._exchange(self.record.place(Event("read", name, _values(placed), ())), placed)
        real = self.graph.real if self._rehearsal is None else self._rehearsal.real
        args, kwargs = unflatten_call([real(leaf) for leaf in leaves], structure)
        result = function(*args, **kwargs)
        if self._gate is not None:
            self._gate.reach(len(self.record.events))
        return result

    def hook_gradient(self, tensor: PlacedTensor, hook: Callable[[Tensor], Any]) -> RemovableHandle:
        """Call ``hook`` with the gradient of ``tensor`` on the stage that made it."""
        if tensor.origin is None or self.lives_on(tensor) != self._stage:
            return RemovableHandle(OrderedDict())
        return tensor.origin[1].register_hook(hook)

    # Calls

    def _call(self, kind: Literal["unit", "op"], name: str, callee: Callee, args: Any, kwargs: Any) -> Any:
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise UnsupportedError(
                f"`{name}` is called under a transform of torch.func (grad, vmap ...) in code above the units. Move "
                "the transform into an nn.Module that belongs to a unit."
            )
        leaves, structure = flatten_call(args, kwargs)
        placed, given = self._arguments.open(leaves)
        if kind == "op" and not placed:
            # All of them were kept from earlier steps, and are known everywhere by now.
            args, kwargs = unflatten_call(leaves, structure)
            return callee.function(*args, **kwargs)
        call = InterpretedCall(kind, name, callee, leaves, structure, placed)
        prediction = self._oracle.recall(callee, given, structure)
        if prediction is None:
            prediction = self._predict(call, given)
        if isinstance(prediction, Unpredictable):
            return self._call_and_tell(call, prediction)
        if prediction.changed:
            plain = [position for position in prediction.changed if is_plain(leaves[position])]
            if plain and must_run_everywhere(name, leaves, prediction, plain):
                return self.read(name, callee.function, args, kwargs)
            placed += [
                place_plain(leaves[position], self, self.record, self.graph, computes=self.computes_here)
                for position in plain
            ]
        if prediction.random and kind == "op":
            self._draws.count_operation()
        event, placement = self.record.call(kind, name, _values(placed), prediction)
        if self._rehearsal is not None:
            self._rehearsal.note(self.microbatch, len(self.record.events), name, placement, leaves)
        if placement.moves:
            self._exchange(placement, placed)
        ran = self._run(call, prediction.random, prediction.changed) if self._stage in placement.stages else None
        if prediction.random:
            self._draws.follow(placement.stages, leaves)
        return self._hand_out(call, prediction, placement.segments[0], event.outputs, ran)

    def _call_and_tell(self, call: InterpretedCall, why: Unpredictable) -> Any:
        """A call with a result that cannot be predicted: its stage runs it, and the others wait for the description."""
        if not self.computes_here:
            raise ValueNeededError(f"{call.name}: {why.reason}")
        if call.kind == "op":
            self._draws.count_operation()
        described = self._unpredictable.call(self, call)
        refuse_changed_plain(call.name, call.leaves, described.prediction)
        values = described.complete(self.record)
        return self._hand_out(call, described.prediction, described.segment, values, described.ran)

    def _hand_out(
        self,
        call: InterpretedCall,
        prediction: Prediction,
        segment: SegmentId,
        values: Sequence[Value],
        ran: CallOutcome | None,
    ) -> Any:
        """What the program goes on with, on every stage."""
        if ran is None and prediction.is_plain:
            return PlacedTensor(self, values[0], prediction.made[0], segment)
        leaves = call.leaves
        constants: Sequence[Any] = prediction.outputs
        results = [PlacedTensor(self, v, spec, segment) for v, spec in zip(values, prediction.made, strict=False)]
        for result, alias in zip(results, prediction.aliases, strict=True):
            if alias is not None:
                source = results[alias.made] if alias.leaf is None else leaves[alias.leaf]
                result.share(source, is_view=alias.is_view)
        if ran is not None:
            constants, tensors = made_tensors(call.name, prediction, ran.inputs, ran.output)
            for result, tensor in zip(results, tensors, strict=True):
                real = cut_off(tensor) if self.is_survey else tensor
                result.origin = result.current = (self.graph.current, real)
        for (position, spec), value in zip(prediction.changed.items(), values[len(results) :], strict=True):
            leaves[position].changed_in_place(value, spec, segment)
            here = None if ran is None else (self.graph.current, ran.inputs[position])
            leaves[position].origin = leaves[position].current = here
        return assemble(prediction, results, leaves, constants)

    def _run(self, call: InterpretedCall, random: bool, changed: Collection[int] = ()) -> CallOutcome:
        self.graph.begin_work()
        inputs = [self.graph.real(leaf) for leaf in call.leaves]
        args, kwargs = unflatten_call(inputs, call.structure)
        function, module = call.callee.runs, call.callee.module
        seeded = self._draws.seeded(call.kind, len(self.record.events)) if random else None
        noting = NOTHING
        if self._leftovers is not None and module is not None:
            noting = self._leftovers.noting(call.name, module)
        if call.kind == "unit" and module is not None:
            is_compiled = call.callee.compiled is not None
            about = UnitCall(call.name, module, self.microbatch, seeded, self._asked, changed, is_compiled)
            function = wrap_unit(function, about, with_weights=self._with_weights, activations=self._activations)
        self.enclosing = module
        try:
            with NOTHING if seeded is None else seeded(), noting:
                return CallOutcome(inputs, function(*args, **kwargs))
        finally:
            self.enclosing = None

    def _predict(self, call: InterpretedCall, given: list[Any]) -> Prediction | Unpredictable:
        self.enclosing, self.is_predicting = call.callee.module, True
        try:
            if not self.computes_here and call.kind == "unit":
                self._lent += contents_of_objects(given)
            if self.computes_here or self._leftovers is None or call.callee.module is None:
                return self._oracle.predict(call.callee, given, call.structure)
            with self._leftovers.unmarked(call.name, call.callee.module):
                return self._oracle.predict(call.callee, given, call.structure, survey=self._leftovers)
        finally:
            self.enclosing, self.is_predicting = None, False

    def _refuse_hidden(self, name: str) -> None:
        """Refuse what a call does with a placed tensor that has come into it unseen."""
        if self.enclosing is None and not self.is_predicting:
            return
        where = "an operation" if self.enclosing is None else f"a unit ({type(self.enclosing).__name__})"
        raise UnsupportedError(
            f"`{name}` inside {where} meets a placed tensor, which came there in an object or an attribute. Give it as "
            "an argument: bare, or in a tuple, list, dict or dataclass."
        )

    def _exchange(self, placement: Placement, placed: Sequence[PlacedTensor]) -> None:
        if placement.moves and self.computes_here:
            self.graph.exchange(placement, placed)
        elif self._rehearsal is not None:
            self._rehearsal.exchange(self.microbatch, placement)


def _values(placed: Sequence[PlacedTensor]) -> tuple[Value, ...]:
    return tuple([tensor.value for tensor in placed])
