"""Manual optimization: training steps that run backward and step their optimizers themselves.

The user's code runs once per microbatch, but its backward and optimizer steps concern the whole batch. Each of them is
a *barrier*: the microbatches run up to it one after the other, it is executed once, then all resume. At a backward, the
losses are weighted by samples and the gradients added to ``.grad`` in the order of the microbatches, which gives the
numbers of a single process.

[Note: hidden gradients] Between barriers, code that read or changed ``.grad`` would do so once per microbatch, and with
the gradients of a single stage only. So while a microbatch runs, ``.grad`` is a guarded tensor, whose use is an error
that names the alternatives.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor, nn

from smp_strategy.data_parallel.holdings import Holdings
from smp_strategy.data_parallel.reduction import Reduction
from smp_strategy.data_parallel.sharded_module import ShardedModule
from smp_strategy.engine.deferred_loss import ForwardStep, deferring_loss
from smp_strategy.engine.unit_calls import UnitCalls
from smp_strategy.errors import UnsupportedError
from smp_strategy.model.guarded_tensors import Guard, placeholder, watch
from smp_strategy.pipeline.barriers import Barrier
from smp_strategy.pipeline.job import Job, StepRun
from smp_strategy.tensor_parallel.sharded_tensor.parts import put_together

__all__ = ["HiddenGradients", "ManualSteps"]


@final
class HiddenGradients:
    """Hides the gradients of ``parameters``, and shows them for a while; see [Note: hidden gradients]."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._guard = _HiddenGradient()
        self._real: list[tuple[nn.Parameter, Tensor, Tensor]] = []

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Context in which gradients are hidden."""
        self._hide()
        try:
            yield
        finally:
            self._show()

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Context inside of :meth:`hidden` in which gradients are visible."""
        self._show()
        try:
            yield
        finally:
            self._hide()

    def _hide(self) -> None:
        for parameter in self._parameters:
            if parameter.grad is not None:
                gradient = parameter.grad
                hidden = placeholder(gradient.size(), gradient.dtype, gradient.device)
                watch(hidden, self._guard)
                self._real.append((parameter, gradient, hidden))
                parameter.grad = hidden

    def _show(self) -> None:
        for parameter, gradient, hidden in self._real:
            if parameter.grad is hidden:  # else the user has set it to None
                parameter.grad = gradient
        self._real.clear()


class _HiddenGradient(Guard):
    """Guard of what stands for a gradient."""

    can_lift = False

    def refusal(self, operation: str) -> UnsupportedError:
        return UnsupportedError(
            f"`{operation}` of a gradient in a training step, which runs once per microbatch and on every stage. Call "
            "`self.clip_gradients(optimizer, ...)` or `optimizer.zero_grad()`, or look at gradients in the hook "
            "`on_before_optimizer_step`."
        )


@final
class ManualSteps:
    """Runs manual steps, and the actions that their code asks for."""

    def __init__(self, calls: UnitCalls) -> None:
        self._calls = calls
        self._reduction: Reduction | None = None
        self._sharded = ShardedModule.none()
        self._hidden: HiddenGradients | None = None
        self._weights: Sequence[float] = ()

    def begin(self, holdings: Holdings, reduction: Reduction) -> None:
        """Set up for the partitioned model."""
        self._reduction = reduction
        self._sharded = holdings.sharded
        self._hidden = HiddenGradients(holdings.parameters)

    def run(self, job: Job, microbatches: Sequence[Any]) -> StepRun:
        assert self._calls.runtime is not None
        assert self._hidden is not None
        self._weights = job.weights
        self._sharded.begin_pass()
        with self._hidden.hidden():
            result = self._calls.runtime.barriers.run(job, microbatches)
        self._sharded.stop_at("the end of the step")
        self._sharded.end_pass()
        assert self._reduction is not None
        self._reduction.buffers.may_change()
        self._reduction.buffers.meet()
        return result

    def forward(
        self,
        job: Job,
        microbatches: Sequence[Any],
        sizes: tuple[int, ...],
        noted: Callable[[], AbstractContextManager[None]],
    ) -> ForwardStep:
        """Run a step forward and pause it until its backward, in a context ``noted``. Its losses are not weighted."""
        runtime = self._calls.runtime
        assert runtime is not None
        program = deferring_loss(job.step, self._once_in_step, runtime.stage.make_real)
        job = replace(job, step=program, weights=[1.0] * len(microbatches))
        self._sharded.begin_pass()
        outputs, pause = runtime.barriers.run_to_barrier(job, list(enumerate(microbatches)))
        self._sharded.stop_at("the end of the forward")
        self._sharded.end_pass()

        def backward(losses: list[Any], retain_graph: bool) -> None:
            assert self._calls.runtime is not None
            self._calls.runtime.barriers.backward(losses, 1.0, retain_graph=retain_graph)

        @contextmanager
        def around() -> Iterator[None]:
            with noted(), self._around_backward():
                yield

        return ForwardStep(put_together(outputs), sizes, pause, backward, around)

    def _once_in_step(self, name: str, act: Callable[[list[Any]], Any], value: Any) -> Any:
        assert self._calls.runtime is not None
        return self._calls.runtime.barriers.once(Barrier(name, act, value), also_dry=False)

    @contextmanager
    def _around_backward(self) -> Iterator[None]:
        assert self._reduction is not None
        self._reduction.begin_backward()
        with self._sharded.training(sums=False):
            yield

    @property
    def is_in_step(self) -> bool:
        """Whether code of a step, dry or not, is the caller."""
        return self._calls.runtime is not None and self._calls.runtime.current.is_in_step

    def once(self, name: str, act: Callable[[list[Any]], Any], value: Any = None, *, also_dry: bool = False) -> Any:
        """In the code of a step: wait for all microbatches, then run ``act`` once for the batch.

        Args:
            name: Name of the action, for messages. Microbatches that wait for different actions are an error.
            act: Action on the ``value`` of each microbatch. Meanwhile ``.grad`` is the real gradient of this rank.
            also_dry: Whether to run it in a dry run, too.

        Returns:
            Result of ``act``, in all microbatches. Outside of a step it runs at once.
        """
        runtime, hidden = self._calls.runtime, self._hidden
        if runtime is None or not runtime.current.is_in_step:
            return act([value])

        def with_gradients(values: list[Any]) -> Any:
            if hidden is None:
                return act(values)
            self._sharded.stop_at(name)
            with hidden.shown():
                result = act(values)
            self._sharded.begin_pass()
            return result

        return runtime.barriers.once(Barrier(name, with_gradients, value), also_dry=also_dry)

    def backward(self, losses: Sequence[Tensor], factor: float, *, retain_graph: bool = False) -> None:
        """In an action of :meth:`once`: add ``factor`` times the gradient of the mean loss to ``.grad``."""
        assert self._calls.runtime is not None
        with self._around_backward():
            self._calls.runtime.barriers.backward(losses, factor, retain_graph=retain_graph)

    def mean(self, values: Sequence[Any]) -> Tensor:
        """In an action of :meth:`once`: mean over the batch of one number per microbatch, real everywhere."""
        assert self._calls.runtime is not None
        real = [torch.as_tensor(value).reshape(()) for value in self._calls.runtime.stage.make_real(list(values))]
        stacked = torch.stack(real)
        return (stacked * stacked.new_tensor(self._weights)).sum()

    def over_replicas(self, value: Tensor) -> Tensor:
        """Mean of ``value`` over the replicas. Collective."""
        self._sharded.let_go()
        return value if self._reduction is None else self._reduction.over_replicas(value)

    def reduce_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sum the gradients of ``parameters`` over stages and average them over replicas; collective."""
        if self._reduction is not None:
            self._reduction.reduce_some(parameters)
