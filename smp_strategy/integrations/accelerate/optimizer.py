"""Optimizer and scheduler wrappers for partitioned models.

A prepared optimizer makes gradients final (reduced and unscaled) before its step, and distributes new values after it.
Unprepared optimizers step without a wrapper, and need final gradients, too. Accelerate ignores them: under its own data
parallelism gradients are final after backward. Here they become final on demand, so a global PyTorch hook before each
optimizer step of the process serves unprepared ones.

The scheduler wrapper makes as many steps at a time as there are replicas, not processes.
"""

from collections.abc import Callable, Iterable
from typing import Any, final

from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from smp_strategy.engine.engine import Engine
from smp_strategy.engine.saving.saved_models.shared_states import on_every_rank
from smp_strategy.engine.updates.grad_scaler import GradScaler
from smp_strategy.engine.updates.optimizer_steps import evaluated_first, switch_mode, updating
from smp_strategy.errors import UnsupportedError
from smp_strategy.integrations.accelerate.no_sync import refuse_step_without_sync
from smp_strategy.integrations.accelerate.session import Session

__all__ = ["SMPOptimizer", "SMPScheduler", "UnpreparedOptimizers", "is_optimizer", "leave_file", "unwrapped"]


class SMPOptimizer(AcceleratedOptimizer):  # type: ignore[misc]  # published without type information
    """Accelerate's optimizer wrapper, for ranks that have a part of the parameters."""

    def __init__(
        self,
        optimizer: Optimizer,
        session: Session,
        *,
        device_placement: bool,
        scaler: GradScaler | None,
        number: int = 0,
    ) -> None:
        super().__init__(optimizer, device_placement=device_placement, scaler=scaler)
        self.smp, self._number = session, number

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step, if this call ends an accumulation window."""
        if not (self.gradient_state.sync_gradients and self.smp.has_engine):
            return super().step(closure)
        refuse_step_without_sync(self.smp)
        self.smp.main_calls.update()
        closure = evaluated_first(closure, self.optimizer)
        engine = self.smp.engine
        with engine.views.put_aside():
            engine.reduce_gradients()
            if self.scaler is not None:
                self.scaler.ensure_unscaled(self.optimizer)
            monitor = engine.inspection.monitor
            if self.scaler is None and monitor is not None and monitor.searches:
                self._is_overflow = engine.unscale(self.optimizer, 1.0).has_overflowed
                if self._is_overflow:
                    return None
        with updating(engine, self.optimizer):
            return super().step(closure)

    def train(self) -> None:
        """Switch to training weights, for optimizers that also keep averaged ones. Collective if weights change."""
        self._switch("train", super().train)

    def eval(self) -> None:
        """Switch to averaged weights. Collective if weights change."""
        self._switch("eval", super().eval)

    def _switch(self, mode: str, switch: Callable[[], None]) -> None:
        engine = self.smp.engine if self.smp.has_engine else None
        switch_mode(engine, self.optimizer, mode, switch, self.smp.main_calls.together)

    @property
    def state(self) -> Any:
        """Full optimizer state, valid until the next call of the library. Collective."""
        if not self.smp.has_engine:
            return self.optimizer.state
        return self.smp.engine.views.states.look_at(self.optimizer)

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    def state_dict(self) -> dict[str, Any]:
        """Return the full optimizer state on every rank. Collective."""
        if not self.smp.has_engine:
            return super().state_dict()
        with self.smp.main_calls.together(("optimizer.state_dict", self._number), "optimizer.state_dict"):
            return on_every_rank(self.smp.engine.saved.full_optimizer_state(self.optimizer))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load this rank's shard of a full optimizer state."""
        if not self.smp.has_engine:
            super().load_state_dict(state_dict)
        else:
            self.smp.engine.saved.load_optimizer_state(self.optimizer, state_dict)


def unwrapped(optimizers: Iterable[Any]) -> list[Optimizer]:
    """Return the user's optimizers inside Accelerate's wrappers."""
    found = []
    for optimizer in optimizers:
        while isinstance(optimizer, AcceleratedOptimizer):
            optimizer = optimizer.optimizer
        found.append(optimizer)
    return found


def is_optimizer(candidate: Any) -> bool:
    """Whether ``candidate`` is an optimizer, the user's or Accelerate's wrapper."""
    return isinstance(unwrapped([candidate])[0], Optimizer)


def leave_file(optimizer: Any) -> None:
    """Copy loaded optimizer state out of a memory-mapped file, which may be overwritten later."""
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.device.type == "cpu":
                state[name] = value.clone()


@final
class UnpreparedOptimizers:
    """Serves optimizers that the script has not prepared, by global step hooks, until :meth:`end`.

    ``check`` is called with every optimizer of the process that is about to step, ``begins`` for one that trains the
    model. Only a prepared optimizer undoes a scaling of gradients.
    """

    def __init__(
        self,
        model: nn.Module,
        engine: Engine,
        prepared: Callable[[], Iterable[Optimizer]],
        is_scaled: Callable[[], bool],
        check: Callable[[Optimizer], None],
        begins: Callable[[], None],
    ) -> None:
        self._parameters = {id(parameter) for parameter in model.parameters()}
        self._engine = engine
        self._prepared = prepared
        self._is_scaled = is_scaled
        self._check, self._begins = check, begins
        self._handles = [
            register_optimizer_step_pre_hook(self._begin),
            register_optimizer_step_post_hook(self._end),
        ]

    def end(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _begin(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._check(optimizer)
        if not self._concerns(optimizer):
            return
        name = type(optimizer).__name__
        if self._is_scaled():
            raise UnsupportedError(
                f"{name} steps without being prepared, but gradients are multiplied by the scale of the loss. Prepare "
                "it: `optimizer = accelerator.prepare(optimizer)`."
            )
        if len(args) > 1 or kwargs.get("closure") is not None:  # the first argument is the optimizer itself
            raise UnsupportedError(
                f"{name} steps with a closure without being prepared, and gradients of a closure are not final. "
                "Prepare it: `optimizer = accelerator.prepare(optimizer)`."
            )
        if self._engine.config.shard_optimizer_state and callable(getattr(optimizer, "eval", None)):
            raise UnsupportedError(
                f"{name} changes weights in `eval()` and `train()` without being prepared, of which the ranks would "
                "not hear that do not keep its state (`shard_optimizer_state=True`). Prepare it: `optimizer = "
                "accelerator.prepare(optimizer)`."
            )
        self._begins()
        self._engine.reduce_gradients()
        self._engine.begin_update(optimizer)

    def _end(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._concerns(optimizer):
            self._engine.end_update(optimizer)

    def _concerns(self, optimizer: Optimizer) -> bool:
        if self._engine.partition is None or any(optimizer is each for each in self._prepared()):
            return False
        return any(id(each) in self._parameters for group in optimizer.param_groups for each in group["params"])


class SMPScheduler(AcceleratedScheduler):  # type: ignore[misc]  # published without type information
    """Accelerate's scheduler wrapper, which steps by replicas.

    An optimizer step covers the batches of all replicas. Accelerate steps the scheduler once for each of them, but
    counts processes.
    """

    def __init__(
        self, scheduler: Any, optimizers: Any, session: Session, *, step_with_optimizer: bool, split_batches: bool
    ) -> None:
        super().__init__(scheduler, optimizers, step_with_optimizer=step_with_optimizer, split_batches=split_batches)
        self.smp = session

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step once for each batch of the optimizer's step."""
        moves = self.step_with_optimizer and self.gradient_state.sync_gradients and not self.split_batches
        if not moves or any(optimizer.step_was_skipped for optimizer in self.optimizers):
            super().step(*args, **kwargs)  # once, or not at all
            return
        for _ in range(self.smp.num_data_ranks):
            # OneCycleLR raises beyond its total number of steps, and batches may be left over at the end.
            total = getattr(self.scheduler, "total_steps", None)
            if total is None or self.scheduler._step_count <= total:
                self.scheduler.step(*args, **kwargs)
