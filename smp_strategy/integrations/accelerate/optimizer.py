"""The optimizer wrapper: gradients are made final before a step, and new values travel after it."""

from collections.abc import Callable, Iterable
from typing import Any

from accelerate.optimizer import AcceleratedOptimizer
from torch.optim import Optimizer

from smp_strategy.data_parallel.closures import evaluated_once
from smp_strategy.data_parallel.optimizer_modes import has_to_switch
from smp_strategy.data_parallel.step_hooks import hooks_around_step
from smp_strategy.distributed.rendezvous import meet
from smp_strategy.integrations.accelerate.no_sync import refuse_step_without_sync
from smp_strategy.integrations.accelerate.session import Session
from smp_strategy.integrations.accelerate.shared_states import on_every_rank
from smp_strategy.precision.grad_scaler import GradientScaler

__all__ = ["SMPOptimizer", "unwrapped"]


class SMPOptimizer(AcceleratedOptimizer):  # type: ignore[misc]  # published without type information
    """What Accelerate wraps optimizers in, for ranks that have a part of the parameters.

    Args:
        optimizer: the user's.
        session: of the Accelerator.
        device_placement: whether to move what the optimizer has saved to the device.
        scaler: scales losses, where anything computes in float16.
    """

    def __init__(
        self, optimizer: Optimizer, session: Session, *, device_placement: bool, scaler: GradientScaler | None
    ) -> None:
        super().__init__(optimizer, device_placement=device_placement, scaler=scaler)
        self.smp = session

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step, if this call ends an accumulation window."""
        if not (self.gradient_state.sync_gradients and self.smp.has_engine):
            return super().step(closure)
        refuse_step_without_sync(self.smp)
        if closure is not None:
            once = evaluated_once(closure, self.optimizer)
            # What it computes must be final before the optimizer looks at it.
            result = once()
            closure = evaluated_once(lambda: result, self.optimizer)
        engine = self.smp.engine
        with engine.views.put_aside():
            engine.reduce_gradients()
            if self.scaler is not None and not self.scaler.has_unscaled(self.optimizer):
                self.scaler.unscale_(self.optimizer)
        in_sight = engine.run_hook if engine.divides_updates else None
        with hooks_around_step(self.optimizer, in_sight), engine.views.put_aside():
            engine.begin_update(self.optimizer)
            returned = super().step(closure)
            engine.end_update(self.optimizer)
        return returned

    def train(self) -> None:
        """What optimizers have that keep an average of the weights beside them: go on with those to be trained."""
        self._switch("train", super().train)

    def eval(self) -> None:
        """Put the average in the place of the weights."""
        self._switch("eval", super().eval)

    def _switch(self, mode: str, switch: Callable[[], None]) -> None:
        """Collective, if there is anything to change."""
        if not has_to_switch(self.optimizer, mode):
            return
        if not self.smp.has_engine:
            switch()
            return
        meet(f"optimizer.{mode}")
        with self.smp.engine.changing_weights(self.optimizer):
            switch()

    @property
    def state(self) -> Any:
        """What the optimizer keeps, as one process has it, until the next call of the library. Collective then."""
        if not self.smp.has_engine:
            return self.optimizer.state
        return self.smp.engine.views.states.look_at(self.optimizer)

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    def state_dict(self) -> dict[str, Any]:
        """All of the optimizer's state as one process has it, on every rank. Collective."""
        if not self.smp.has_engine:
            return super().state_dict()
        meet("optimizer.state_dict")
        return on_every_rank(self.smp.engine.full_optimizer_state(self.optimizer))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take this rank's share of the state of one process."""
        if not self.smp.has_engine:
            super().load_state_dict(state_dict)
        else:
            self.smp.engine.load_optimizer_state(self.optimizer, state_dict)


def unwrapped(optimizers: Iterable[Any]) -> list[Optimizer]:
    """The user's optimizers inside of Accelerate's wrappers."""
    found = []
    for optimizer in optimizers:
        while isinstance(optimizer, AcceleratedOptimizer):
            optimizer = optimizer.optimizer
        found.append(optimizer)
    return found
