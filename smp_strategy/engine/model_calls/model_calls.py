"""Calls of the prepared model: the script passes a whole batch, and the engine runs it in microbatches.

``forward`` is replaced on the instance, so the model keeps its class, its attributes and its hooks, which see whole
batches. The mode of a call depends on the possible uses of its result:

- without gradients: a forward of all microbatches;
- with a loss in the result: forward and backward of the microbatches in the order of the schedule; the loss hands over
  the gradients when the script calls backward;
- with gradients otherwise: a forward of all microbatches that keeps their activations; backward runs when the script
  calls it on any function of the result.

A dry run of one microbatch, once for each way in which the script calls the model, tells the mode by the result.

[Note: predicted backward] A call of the model computes gradients, but the script says only later by which factor they
are scaled, whether they are accumulated, and whether they are the last before an optimizer step. Right predictions give
the additions of a single process, in number and order; wrong ones give the same sums with other rounding. Scripts
repeat themselves, so the observed values of one call are the prediction for the next.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from smp_strategy.engine.deferred_loss import ForwardStep
from smp_strategy.engine.engine import Engine
from smp_strategy.engine.model_calls.loss_use import Repetition, UndecidedCall
from smp_strategy.engine.model_calls.model_inputs import NAME, ModelInputs, with_share_of_items
from smp_strategy.engine.model_calls.model_methods import ModelMethods
from smp_strategy.engine.model_calls.model_outputs import (
    InputGradients,
    Packed,
    gradients_come_later,
    is_differentiable,
    joined,
    loss_in,
    pack,
    replace_loss,
    with_loss,
)
from smp_strategy.engine.own_samples import OwnSamples
from smp_strategy.errors import UnsupportedError
from smp_strategy.model.patching import Patches
from smp_strategy.model.samples import Samples, find_samples

__all__ = ["CallOptions", "BackwardPrediction", "ModelCalls"]


@final
class BackwardPrediction:
    """Prediction of factor, accumulation and reduction of the next backward. See [Note: predicted backward].

    Args:
        scale: loss scale that is applied beside the script's own factors (float16).
        window: number of calls whose gradients are probably accumulated; the first guess for the divisor of losses.
        syncs: whether the script marks this call's gradients as the last of the window.
    """

    def __init__(self, scale: Callable[[], float], window: Callable[[], int], syncs: Callable[[], bool]) -> None:
        self._scale = scale
        self._window = window
        self._syncs = syncs
        self._seen: dict[int, float] = {}
        self._zeroes_between = False

    def factor(self) -> float:
        """Predicted factor of the loss in its backward."""
        window = self._window()
        return self._scale() * self._seen.get(window, 1 / window)

    def continues(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Whether gradients will be added to existing ones."""
        return not self._zeroes_between and _have_gradients(parameters)

    def reduces(self) -> bool:
        """Whether replicas will average the gradients when they are handed over."""
        return self._syncs()

    def learn(self, grad_output: Tensor, factor: float, parameters: Sequence[nn.Parameter], *, had: bool) -> None:
        """Record an actual backward before gradients are added to ``parameters``, which may have ``had`` some when the
        model was called.
        """
        given = grad_output.item()
        if given and given != grad_output.new_tensor(factor).item():
            self._seen[self._window()] = given / self._scale()
        if had:
            self._zeroes_between = not _have_gradients(parameters)


def _have_gradients(parameters: Sequence[nn.Parameter]) -> bool:
    return any(parameter.grad is not None for parameter in parameters)


# Methods that call the model repeatedly; caches between these calls stay inside the step.
_WHOLE = ("generate",)
_OUTSIDE = (
    "Set `loss_in_model=False` in SMPPlugin: then backward runs when the script calls it, for any function of what the "
    "model returns."
)


class ModelCall(NamedTuple):
    """Arguments of a call of the model, in containers, so that two arguments are not taken for two samples."""

    args: dict[int, Any]
    kwargs: dict[str, Any]


class CallOptions(NamedTuple):
    """Options about losses, see :class:`~smp_strategy.integrations.accelerate.plugin.SMPPlugin`."""

    loss_in_model: str | bool = "auto"
    loss_reduction: str = "mean"
    training_outputs: str = "all"


class _ResultKind(NamedTuple):
    """Properties of the result of one kind of call."""

    has_loss: bool
    """Whether there is a loss with gradients."""
    is_differentiable: bool
    """Whether any result has gradients."""
    has_others: bool
    """Whether there are results with gradients beside the loss."""


@final
class ModelCalls:
    """Replacement of ``forward``, ``generate`` and public methods of the prepared model.

    Args:
        check: called before each call of the model, with whether it is a training call.
        own_forward: instance attribute ``forward`` of ``model`` before it was prepared, if any.
    """

    def __init__(
        self,
        model: nn.Module,
        engine: Engine,
        options: CallOptions,
        prediction: BackwardPrediction,
        check: Callable[[bool], None],
        own_forward: Callable[..., Any] | None,
        pass_by: Callable[..., None],
    ) -> None:
        self.model = model
        self._engine = engine
        self._options = options
        self._prediction = prediction
        self._check, self._pass_by = check, pass_by
        self._inner: Callable[..., Any] = model.forward
        # Callable of the next step, and whether its result may have gradients.
        self._called, self._has_gradients = self._inner, True
        self._methods = ModelMethods(model, engine, self._call_method, lambda: self._is_inside)
        self._own_forward = own_forward
        self._patches = Patches()
        self._is_inside = False
        self._name = "forward"
        # Kinds of calls, with a number each, and the properties of their results.
        self._kinds: dict[Any, int] = {}
        self._result_kinds: dict[Any, _ResultKind] = {}
        # Whether calls train on other results than their loss, as far as a backward has told.
        self._trains_outside: dict[Any, bool] = {}

    # On the instance

    def install(self) -> None:
        """Replace the methods of the model."""
        self._patches.replace(self.model, self._call)
        for name in _WHOLE:
            if callable(getattr(self.model, name, None)):
                method = functools.partial(self._run_whole, getattr(self.model, name))
                self._patches.replace(self.model, method, name)
        if self._engine.mesh.shape.world_size > 1:
            self._methods.install(self._patches)

    def remove(self) -> None:
        """Restore the methods of the model."""
        self._patches.give_back()
        vars(self.model).pop("forward", None)  # with autocast around it
        if self._own_forward is not None:
            vars(self.model)["forward"] = self._own_forward

    # Calls

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        # Inside a step this is the engine calling the model for one microbatch.
        if self._is_inside:
            return self._inner(*args, **kwargs)
        call = ModelCall(dict(enumerate(args)), kwargs)
        self._pass_with_others()
        self._check(torch.is_grad_enabled() and self.model.training)
        if not torch.is_grad_enabled():
            return self._evaluate(call)
        way = self._way_of(call)
        inputs = ModelInputs(call, self._samples_of(call), self._engine.mesh, reads_alone=self._own_samples is not None)
        kind = self._find_kind(inputs, way)
        is_inside = self._options.loss_in_model is not False and not self._trains_outside.get(way)
        if kind.has_loss and self.model.training and is_inside:
            return self._train(inputs, way, kind)
        return self._forward(inputs) if kind.is_differentiable else self._evaluate(inputs.call)

    def _pass_with_others(self) -> None:
        """Pass a place, if others take part in this call. See [Note: rounds]."""
        trains = torch.is_grad_enabled()
        if trains or not self._is_whole_here:
            self._pass_by(if_first=not trains)

    @property
    def _is_whole_here(self) -> bool:
        shape = self._engine.mesh.shape
        return shape.pp * shape.tp * shape.dp_shard == 1

    def _call_method(self, name: str, method: Callable[..., Any], call: Any, with_gradients: bool) -> Any:
        """Run a method that calls parts of the model; ``with_gradients``: whether its first unit had gradients."""
        self._called, self._name, self._has_gradients = method, name, with_gradients
        try:
            return self._call(*call[0], **call[1])
        finally:
            self._called, self._name, self._has_gradients = self._inner, "forward", True

    def _evaluate(self, call: Any) -> Any:
        if self._called is not self._inner and self._own_samples is None:
            # The result may belong to all samples together, such as an accuracy.
            return self._run_whole(self._called, *call.args.values(), **call.kwargs)
        number = self._kinds.setdefault(self._way_of(call), len(self._kinds))
        with self._inside() as around:
            step = self._step(around, call)
            result = self._engine.eval_step(step, call, kind=f"evaluation {number}")
        merged = joined([packed.result for packed in result.outputs], result.sizes, sums=self._adds_up)
        return self._own(merged, call, result.sizes)

    def _train(self, inputs: ModelInputs, way: Any, kind: _ResultKind) -> Any:
        call, options = inputs.call, self._options
        prediction, parameters = self._prediction, self._engine.local_model.holdings.parameters
        factor, sums = prediction.factor(), self._adds_up
        had = any(parameter.grad is not None for parameter in parameters)
        with self._inside() as around:
            step = self._step(around, call, inputs, only_loss=options.training_outputs == "loss")
            before = self._engine.state_before(step) if self._is_undecided(way, kind) else None
            result = self._engine.train_step(
                step,
                call,
                loss_of=_loss_of,
                factor=factor,
                continues=prediction.continues(parameters),
                reduces=prediction.reduces(),
                sums=sums,
            )
        if result.loss is None:
            if before is None:
                raise UnsupportedError(
                    f"The model has returned no loss, but did so when it was called like this before. {_OUTSIDE}"
                )
            self._trains_outside[way] = True
            before.restore()
            return self._forward(inputs)

        def commit(grad_output: Tensor) -> None:
            prediction.learn(grad_output, factor, parameters, had=had)
            result.commit(grad_output, reduce=False)

        ready = InputGradients(inputs.tensors, inputs.gradients() if inputs else [], factor)
        if before is not None and any(len(packed.places) > 1 for packed in result.outputs):

            def forward() -> ForwardStep:
                with self._inside():
                    return self._engine.forward_step(step, call)

            merged = UndecidedCall(
                result,
                [1.0 if sums else size / sum(result.sizes) for size in result.sizes],
                commit=commit,
                inputs=inputs,
                ready=ready,
                repetition=Repetition(forward, before),
                combine=None if self._own_samples is None else self._own_samples.averaged,
                learn=functools.partial(self._learn, way),
            ).result()
        else:
            merged = with_loss(result.outputs, result.sizes, result.loss, commit, remedy=_OUTSIDE, inputs=ready)
        return self._own(merged, call, result.sizes)

    def _learn(self, way: Any, is_outside: bool) -> None:
        """Note what a backward has reached; other results are not forgotten."""
        self._trains_outside[way] = is_outside or self._trains_outside.get(way, False)

    def _is_undecided(self, way: Any, kind: _ResultKind) -> bool:
        """Whether it is unknown if the script trains on other results than the loss."""
        options = self._options
        is_open = options.loss_in_model == "auto" and options.training_outputs == "all"
        return is_open and kind.has_others and way not in self._trains_outside

    def _forward(self, inputs: ModelInputs) -> Any:
        call = inputs.call
        with self._inside() as around:
            step = self._engine.forward_step(self._step(around, call, inputs), call)
        combine = None if self._own_samples is None else self._own_samples.averaged
        result = gradients_come_later(step, inputs, sums=self._adds_up, combine=combine)
        return self._own(result, call, step.sizes)

    @property
    def _adds_up(self) -> bool:
        """Whether a loss in the model is a sum over samples."""
        return self._options.loss_reduction == "sum"

    @property
    def _own_samples(self) -> OwnSamples | None:
        """Selector of this rank's samples, if the ranks of a tensor-parallel group read samples of their own."""
        is_joint = self._engine.config.prescaled_batch or self._engine.mesh.tp == 1
        return None if is_joint else OwnSamples(self._engine.mesh)

    def _own(self, result: Any, call: Any, sizes: Sequence[int]) -> Any:
        own = self._own_samples
        return result if own is None else own.of(result, self._samples_of(call).number, sum(sizes))

    def _samples_of(self, call: Any) -> Samples:
        return find_samples(call, self._engine.known())

    def _run_whole(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a method that calls the model many times, as one step with a single microbatch."""
        if self._is_inside:
            return method(*args, **kwargs)
        if self._is_whole_here and self._engine.partition is not None:
            with self._inside() as around:
                return self._engine.call_whole(lambda: around(lambda: method(*args, **kwargs)))
        self._pass_with_others()
        name = getattr(method, "__name__", "method")
        number = self._kinds.setdefault(
            (name, *self._way_of(ModelCall(dict(enumerate(args)), kwargs))), len(self._kinds)
        )
        try:
            with self._inside() as around:
                result = self._engine.eval_step(
                    lambda _: around(lambda: method(*args, **kwargs)),
                    None,
                    kind=f"{name} {number}",
                    is_joint=True,
                    inputs=(args, kwargs),
                )
        except UnsupportedError as error:
            error.add_note(f"This happened in `{name}`. If it works with a cache, try `use_cache=False`.")
            raise
        return result.outputs[0]

    def _find_kind(self, inputs: ModelInputs, way: Any) -> _ResultKind:
        """Find the properties of the result for ``inputs`` by a dry run; all ranks come here for the same calls."""
        if way in self._result_kinds:
            return self._result_kinds[way]
        found: list[_ResultKind] = []

        def step_with(around: Callable[..., Any]) -> Callable[[Any], Any]:
            step = self._step(around, inputs.call, inputs)

            def looked_at(microbatch: Any) -> Any:
                packed = step(microbatch)
                loss = loss_in(packed.result)
                has_loss = loss is not None and loss.requires_grad
                found.append(_ResultKind(has_loss, is_differentiable(packed), len(packed.places) > has_loss))
                return packed

            return looked_at

        with self._inside() as around:
            for _ in range(2):  # the first one may skip the dry run, for instance if the partition is given
                if not found:
                    self._engine.look(step_with(around), inputs.call, loss_of=_loss_of)
        if not found:
            # The model reads values, which a dry run does not have.
            trains = bool(inputs) or any(parameter.requires_grad for parameter in self.model.parameters())
            trains = trains and self._has_gradients
            return _ResultKind(has_loss=trains, is_differentiable=trains, has_others=trains)
        self._result_kinds[way] = found[-1]
        return found[-1]

    def _way_of(self, call: Any) -> Any:
        """Key of calls that take the same path and return the same kind of result."""
        args, kwargs = call.args.values(), call.kwargs
        named = ((name, _described(value)) for name, value in sorted(kwargs.items()))
        is_trained = any(parameter.requires_grad for parameter in self.model.parameters())
        return self._name, self.model.training, is_trained, tuple(map(_described, args)), tuple(named)

    # Inside of steps

    def _step(
        self, around: Callable[..., Any], call: Any, inputs: ModelInputs | None = None, *, only_loss: bool = False
    ) -> Callable[[Any], Packed]:
        adds_up, called = self._adds_up, self._called
        # Each rank has samples of its own: their sums are averaged over the ranks, as those of processes are.
        num_sums = self._engine.mesh.tp if adds_up and self._own_samples is not None else 1

        def step(microbatch: Any) -> Packed:
            args, kwargs = microbatch if inputs is None else inputs.begin(microbatch)
            if not adds_up and NAME in kwargs:
                kwargs = with_share_of_items(kwargs, microbatch, self._samples_of(call))
            result = around(lambda: called(*args.values(), **kwargs))
            if num_sums > 1 and (loss := loss_in(result)) is not None:
                result = replace_loss(result, loss / num_sums)
            return pack(result, only_loss=only_loss)

        return step

    @contextmanager
    def _inside(self) -> Iterator[Callable[[Callable[[], Any]], Any]]:
        """Context of a step; yields a wrapper for the calls of the model in it.

        Autocast of the script applies to forward only: around the whole step it would reach the backward passes.
        """
        kind = self._engine.device.type  # not that of parameters, which may be on the meta device
        is_on, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        cache = torch.is_autocast_cache_enabled()

        def around(function: Callable[[], Any]) -> Any:
            if not is_on:
                return function()
            with torch.autocast(kind, dtype, cache_enabled=cache):
                return function()

        self._is_inside = True
        try:
            with torch.autocast(kind, enabled=False):
                yield around
        finally:
            self._is_inside = False


def _loss_of(packed: Packed) -> Tensor | None:
    return loss_in(packed.result)


def _described(value: Any) -> Any:
    if isinstance(value, Tensor):
        return type(value).__qualname__, value.requires_grad
    return value if value is None or isinstance(value, (bool, str)) else type(value).__qualname__
