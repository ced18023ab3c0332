"""One microbatch on one stage: the user's program, call by call.

Each call of a unit, and each operation of the glue on placed tensors, passes through here in four moves:

1. predict what it returns (:mod:`smp_strategy.trace.oracle`),
2. record it and decide where it runs (:mod:`smp_strategy.pipeline.routing`),
3. send what another stage needs, wait for what this stage needs,
4. run it if it belongs here, and check the result against the prediction.

On every stage the program gets placed tensors back, and goes on.
"""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from smp_strategy.errors import UnsupportedError
from smp_strategy.pipeline.placed import PlacedTensor
from smp_strategy.pipeline.rng import derive_seed, seeded
from smp_strategy.pipeline.routing import Move, Placement, Router, SegmentId
from smp_strategy.pipeline.segments import Export, Import, Remote, Segment, enter, start_of_gradient
from smp_strategy.pipeline.transport import Receipt, Transport
from smp_strategy.trace.effects import apply, contents_of_object, put_back
from smp_strategy.trace.events import Event, Value
from smp_strategy.trace.oracle import (
    Callee,
    Made,
    Oracle,
    Prediction,
    Same,
    TensorSpec,
    ValueNeededError,
    is_constant,
    is_left_behind,
    is_object,
)
from smp_strategy.trace.tree import flatten

__all__ = ["Program"]

# Tags of one microbatch: value and gradient of each move.
TAGS_PER_MICROBATCH = 1 << 16


@final
class Program:
    """The calls of one microbatch, seen from one stage.

    Args:
        microbatch: its number in the step.
        seed: where its random numbers derive from.
        stage: this rank's stage; -1 for a dry run that computes nothing.
        router: the routing state of this microbatch.
        oracle: predicts results.
        transport: carries values between stages; ``None`` where there is only one.
        pause: hands control to the scheduler; called with the receives that the program waits for, or with none
            where it is about to compute while it was only meant to get ready.
        expected: signatures of the events that the plan was made for; ``None`` where there is no plan.
    """

    def __init__(
        self,
        *,
        microbatch: int,
        seed: int,
        stage: int,
        router: Router,
        oracle: Oracle,
        transport: Transport | None,
        pause: Callable[[Sequence[Receipt]], None],
        expected: Sequence[object] | None = None,
    ) -> None:
        self.microbatch = microbatch
        self.record: list[tuple[Event, Placement]] = []
        self.segments = [Segment(0)]
        self.glue = Segment(-1)
        self.closed = False
        # Whether it took another path than the plan was made for.
        self.left_plan = False
        self._expected = expected
        # The unit that runs just now, for real or dry.
        self.enclosing: nn.Module | None = None
        self.is_predicting = False
        self._worked = False
        self._begun = False
        self._seed = seed
        self._stage = stage
        self._router = router
        self._oracle = oracle
        self._transport = transport
        self._pause = pause
        self._num_values = 0
        # Containers in objects that a dry run lent to units, with what was in them.
        self._lent: list[tuple[Any, Any]] = []

    @property
    def computes_here(self) -> bool:
        """Whether this is a real run (not a dry one)."""
        return self._stage >= 0

    def end(self) -> None:
        """The user's code is through."""
        self.left_plan |= self._expected is not None and len(self.record) < len(self._expected)

    def close(self) -> None:
        """End of the step: tensors of this program can no longer be used, and nothing of it stays in memory."""
        self.closed = True
        put_back(self._lent[::-1])
        self._lent.clear()
        self.segments.clear()
        self.glue.exports.clear()
        self._pause = _ended

    def lives_on(self, tensor: PlacedTensor) -> int:
        """The stage that made ``tensor``."""
        return self._router.home(tensor.value.id)

    def check_current(self, tensor: PlacedTensor) -> None:
        """Refuse a result whose memory was changed through a view on another stage."""
        if tensor.is_stale:
            self._refresh(tensor)

    def bring(self, spec: TensorSpec, stages: Collection[int], tensor: Tensor | None) -> PlacedTensor:
        """A placed tensor that exists already.

        Args:
            spec: its metadata.
            stages: who holds it.
            tensor: it, on these stages; ``None`` elsewhere.
        """
        placed = PlacedTensor(self, self._new_value(spec), spec, SegmentId(min(stages), 0))
        self._router.settle(placed.value, stages)
        if tensor is not None:
            placed.origin = placed.current = (self.segments[-1].index, tensor)
        return placed

    def unit(self, name: str, callee: Callee, args: Any, kwargs: Any) -> Any:
        """Call a unit, whose function is :func:`~smp_strategy.trace.effects.watched`."""
        try:
            result, changes = self._call("unit", name, callee, args, kwargs)
        except ValueNeededError as error:
            raise UnsupportedError(
                f"The shapes that unit `{name}` returns depend on tensor values ({error}), so the other stages "
                "cannot know them."
            ) from error
        apply(changes, (args, kwargs))
        return result

    def operation(self, name: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Apply an operation of the glue."""
        self._refuse_inside_unit(name)
        try:
            return self._call("op", name, Callee(function, function), args, kwargs)
        except ValueNeededError:
            # The shape of the result depends on values: let every stage compute it from the values.
            result = self.read(name, function, args, kwargs)
            if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves(result)):
                raise UnsupportedError(
                    f"The shape of what `{name}` returns depends on tensor values and its result needs a gradient. "
                    "Move the operation into an nn.Module that belongs to a unit."
                ) from None
            return result

    def read(self, name: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Let Python code see values: every stage gets them and computes ``function`` from them."""
        self._refuse_inside_unit(name)
        if not self.computes_here:
            raise ValueNeededError(name)
        leaves, structure = flatten((args, kwargs))
        placement = self._place(Event("read", name, self._values(leaves), ()))
        self._exchange(placement, leaves)
        real = [self._real(leaf) for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(real, structure)
        return function(*args, **kwargs)

    def _call(self, kind: Any, name: str, callee: Callee, args: Any, kwargs: Any) -> Any:
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise UnsupportedError(
                f"`{name}` is called under a transform of torch.func (grad, vmap ...) in code above the units. Move "
                "the transform into an nn.Module that belongs to a unit."
            )
        leaves, structure = flatten((args, kwargs))
        inputs = self._values(leaves)
        prediction = self._predict(callee, leaves, structure)
        self._refuse_changed_plain_tensors(name, leaves, prediction)
        made = [output.spec for output in prediction.outputs if isinstance(output, Made)]
        made_values = [self._new_value(spec) for spec in made]
        changed_values = {position: self._new_value(spec) for position, spec in prediction.changed.items()}
        placement = self._place(
            Event(
                kind,
                name,
                inputs,
                (*made_values, *changed_values.values()),
                prediction.flops,
                prediction.traffic,
                prediction.saved_bytes,
            )
        )
        self._exchange(placement, leaves)
        (segment,) = placement.segments
        results = [PlacedTensor(self, value, spec, segment) for value, spec in zip(made_values, made, strict=True)]
        for result, alias in zip(results, prediction.aliases, strict=True):
            if alias is not None:
                source = results[alias.made] if alias.leaf is None else leaves[alias.leaf]
                result.share(source, is_view=alias.is_view)
        real_inputs: list[Any] | None = None
        constants: Sequence[Any] = prediction.outputs
        if self._stage in placement.stages:
            real_inputs, constants = self._run(name, callee, prediction, leaves, structure, results)
        for position, value in changed_values.items():
            leaves[position].changed_in_place(value, prediction.changed[position], segment)
            here = None if real_inputs is None else (self.segments[-1].index, real_inputs[position])
            leaves[position].origin = leaves[position].current = here
        return _assemble(prediction, results, leaves, constants)

    def _predict(self, callee: Callee, leaves: list[Any], structure: Any) -> Prediction:
        given = [leaf.spec if isinstance(leaf, PlacedTensor) else leaf for leaf in leaves]
        self.enclosing, self.is_predicting = callee.module, True
        try:
            if not self.computes_here and callee.module is not None:
                self._lent += [found for leaf in given if is_object(leaf) for found in contents_of_object(leaf)]
            return self._oracle.predict(callee, given, structure, leave_marks=not self.computes_here)
        finally:
            self.enclosing, self.is_predicting = None, False

    def _refuse_inside_unit(self, name: str) -> None:
        if self.enclosing is not None:
            raise UnsupportedError(
                f"`{name}` inside a unit ({type(self.enclosing).__name__}) meets a placed tensor, which came there in "
                "an object or an attribute. Give it to the unit as an argument: bare, or in a tuple, list, dict or "
                "dataclass."
            )

    def _place(self, event: Event) -> Placement:
        placement = self._router.place(event)
        if placement.moves and 2 * placement.moves[-1].number >= TAGS_PER_MICROBATCH:
            raise UnsupportedError(
                f"A microbatch moves more than {TAGS_PER_MICROBATCH // 2} tensors between stages. Move loops that "
                "cross stages (text generation, say) out of the step."
            )
        position = len(self.record)
        self.record.append((event, placement))
        if self._expected is not None and not self.left_plan:
            self.left_plan = position >= len(self._expected) or event.signature != self._expected[position]
        return placement

    def _values(self, leaves: list[Any]) -> tuple[Value, ...]:
        if any(map(is_left_behind, leaves)):
            raise UnsupportedError(
                "Code above the units uses a tensor that a unit did not return, but left in an attribute of itself, in "
                "an object that it was given, or in a variable around it (by a hook on one of its parts, say). Other "
                "stages do not have it: return it from the unit's forward."
            )
        placed = [leaf for leaf in leaves if isinstance(leaf, PlacedTensor)]
        for leaf in placed:
            if leaf.program is not self or self.closed:
                raise UnsupportedError(
                    f"A tensor of microbatch {leaf.program.microbatch} is used "
                    + ("after its step ended" if leaf.program.closed else f"in microbatch {self.microbatch}")
                    + ". Return it from the step or log it, and use the result."
                )
            if leaf.is_stale:
                self._refresh(leaf)
        return tuple(leaf.value for leaf in placed)

    def _refresh(self, tensor: PlacedTensor) -> None:
        """Follow a change that was made through a view: the memory has it already, other stages' copies do not."""
        assert tensor.memory.changed is not None
        changed, where, family = tensor.memory.changed
        if where != tensor.born:
            raise UnsupportedError(
                f"A tensor of shape {list(tensor.spec.size)} shares its memory with one that was changed in place on "
                f"stage {where.stage}, but stands itself on stage {tensor.born.stage} or was made earlier there, so "
                "the change does not reach it. Use an operation that returns a new tensor."
            )
        spec = tensor.spec
        if family == tensor.family:
            spec = dataclasses.replace(spec, requires_grad=spec.requires_grad or changed.requires_grad)
        value = self._new_value(spec)
        inputs = (tensor.value, changed) if family == tensor.family else (tensor.value,)
        placement = self._place(Event("op", "alias", inputs, (value,)))
        assert not placement.moves, "views and their base are on one stage"
        tensor.refresh(value, spec)
        if where.stage == self._stage:
            assert tensor.origin is not None
            _compare("alias", spec, tensor.origin[1])
        else:
            tensor.origin = tensor.current = None

    def _new_value(self, spec: TensorSpec) -> Value:
        self._num_values += 1
        return Value(self._num_values - 1, spec.nbytes, spec.requires_grad)

    def _refuse_changed_plain_tensors(self, name: str, leaves: list[Any], prediction: Prediction) -> None:
        for position in prediction.changed:
            leaf = leaves[position]
            if not isinstance(leaf, PlacedTensor) or leaf.memory.is_plain:
                raise UnsupportedError(
                    f"`{name}` changes a tensor in place that exists on every stage (shape "
                    f"{list(leaf.shape)}), but runs on one stage only. Use an operation that returns a "
                    "new tensor, or move the code into an nn.Module that belongs to a unit."
                )

    # Exchange between stages

    def _exchange(self, placement: Placement, leaves: list[Any]) -> None:
        if not self.computes_here or not placement.moves:
            return
        placed = {leaf.value.id: leaf for leaf in leaves if isinstance(leaf, PlacedTensor)}
        waiting: list[tuple[Move, PlacedTensor, Receipt]] = []
        for move in placement.moves:
            tensor = placed[move.value.id]
            if move.source.stage == self._stage:
                self._send(move, tensor)
            elif move.target.stage == self._stage:
                assert self._transport is not None
                receipt = self._transport.receive(tensor.spec, move.source.stage, self._tag(move))
                waiting.append((move, tensor, receipt))
        if waiting:
            self._wait_for(waiting)

    def _send(self, move: Move, tensor: PlacedTensor) -> None:
        assert self._transport is not None
        assert tensor.origin is not None
        segment, real = tensor.origin
        self._worked = True
        self._transport.send(real, tensor.spec, move.target.stage, self._tag(move))
        if real.requires_grad:
            export = self.segments[segment].export(tensor.value.id, real)
            export.uses.append(Remote(move.target.stage, self._tag(move), tensor.spec))

    def _wait_for(self, waiting: list[tuple[Move, PlacedTensor, Receipt]]) -> None:
        if self._worked:
            self.segments.append(Segment(len(self.segments)))
            self._worked = False
        segment = self.segments[-1]
        assert segment.index == waiting[0][0].target.number, "the segments of the run and of the rule have diverged"
        self._begun = True
        self._pause([receipt for _, _, receipt in waiting])
        for move, tensor, receipt in waiting:
            real = receipt.wait()
            if tensor.spec.requires_grad:
                record = Import(tensor.value.id, Remote(move.source.stage, self._tag(move), tensor.spec))
                segment.imports.append(record)
                real = enter(real, record)
            tensor.origin = tensor.current = (segment.index, real)

    def _tag(self, move: Move) -> int:
        # Even for the value; the gradient on the way back has the next odd number.
        return self.microbatch * TAGS_PER_MICROBATCH + 2 * move.number

    # Running what belongs here

    def _run(
        self,
        name: str,
        callee: Callee,
        prediction: Prediction,
        leaves: list[Any],
        structure: Any,
        results: list[PlacedTensor],
    ) -> tuple[list[Any], list[Any]]:
        """Fill in ``results``; return the real inputs and outputs."""
        if not self._begun:
            self._begun = True
            self._pause([])
        self._worked = True
        real_inputs = [self._real(leaf) for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(real_inputs, structure)
        self.enclosing = callee.module
        try:
            if prediction.random:
                device = next((r.spec.device for r in results), torch.device("cpu"))
                with seeded(derive_seed(self._seed, len(self.record)), device):
                    output = callee.function(*args, **kwargs)
            else:
                output = callee.function(*args, **kwargs)
        finally:
            self.enclosing = None
        flat, _ = flatten(output)
        real = [leaf for leaf, predicted in zip(flat, prediction.outputs, strict=False) if isinstance(predicted, Made)]
        agree = len(flat) == len(prediction.outputs) and all(
            _agrees(leaf, predicted, real_inputs) for leaf, predicted in zip(flat, prediction.outputs, strict=True)
        )
        if not agree:
            raise UnsupportedError(
                f"`{name}` returned {_shown(flat)} where its dry run returned {_shown(prediction.outputs)}: what it "
                "returns depends on tensor values or on the state of an object, so other stages cannot know it."
            )
        for result, tensor in zip(results, real, strict=True):
            if result.spec.requires_grad and not tensor.requires_grad:
                # A path without weights, as in a block that skips itself by chance: the gradient ends here.
                tensor = start_of_gradient(tensor)
            _compare(name, result.spec, tensor)
            result.origin = result.current = (self.segments[-1].index, tensor)
        return real_inputs, flat

    def _real(self, leaf: Any) -> Any:
        """The tensor that the current segment works on."""
        if isinstance(leaf, PlacedTensor):
            return self._local(leaf)
        if isinstance(leaf, Tensor) and leaf.requires_grad and leaf.grad_fn is not None:
            return self._enter(self.glue.export(id(leaf), leaf))
        return leaf

    def _local(self, placed: PlacedTensor) -> Tensor:
        assert placed.current is not None
        assert placed.origin is not None
        segment, tensor = placed.current
        if segment != self.segments[-1].index:
            origin_segment, origin = placed.origin
            if tensor.requires_grad:
                tensor = self._enter(self.segments[origin_segment].export(placed.value.id, origin))
            placed.current = (self.segments[-1].index, tensor)
        return tensor

    def _enter(self, export: Export) -> Tensor:
        record = Import(export.value, None)
        export.uses.append(record)
        self.segments[-1].imports.append(record)
        return enter(export.tensor, record)


def _ended(receipts: Sequence[Receipt]) -> None:
    raise AssertionError("a program was resumed after its step")


def _agrees(found: Any, predicted: Any, inputs: Sequence[Any]) -> bool:
    """Whether an output is of the kind that the other stages expect."""
    if isinstance(predicted, Made):
        return isinstance(found, Tensor)
    if isinstance(predicted, Same):
        return found is inputs[predicted.leaf]
    if is_constant(predicted):
        return type(found) is type(predicted) and (found == predicted or found != found)
    return True


def _shown(outputs: Sequence[Any]) -> str:
    kinds = [_kind(leaf) for leaf in outputs]
    return kinds[0] if len(kinds) == 1 else f"{len(kinds)} values ({', '.join(kinds)})"


def _kind(leaf: Any) -> str:
    if isinstance(leaf, Same):
        return "one of its arguments"
    return repr(leaf) if is_constant(leaf) else "a tensor" if isinstance(leaf, Tensor | Made) else type(leaf).__name__


def _compare(name: str, spec: TensorSpec, tensor: Tensor) -> None:
    found = TensorSpec.of(tensor)
    same = (found.size, found.dtype, found.requires_grad) == (spec.size, spec.dtype, spec.requires_grad)
    if not same:
        raise UnsupportedError(
            f"`{name}` returned {found}, but other stages expect {spec} from its dry run: what it returns depends on "
            "tensor values or on the state of an object."
        )


def _assemble(prediction: Prediction, results: list[PlacedTensor], leaves: list[Any], constants: Sequence[Any]) -> Any:
    fresh = iter(results)
    flat = []
    for output, constant in zip(prediction.outputs, constants, strict=True):
        if isinstance(output, Made):
            flat.append(next(fresh))
        elif isinstance(output, Same):
            flat.append(leaves[output.leaf])
        else:
            flat.append(constant)
    return pytree.tree_unflatten(flat, prediction.structure)
