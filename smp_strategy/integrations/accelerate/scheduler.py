"""The scheduler wrapper: as many steps at a time as there are replicas, not processes."""

from typing import Any

from accelerate.scheduler import AcceleratedScheduler

from smp_strategy.integrations.accelerate.session import Session

__all__ = ["SMPScheduler"]


class SMPScheduler(AcceleratedScheduler):  # type: ignore[misc]  # published without type information
    """What Accelerate wraps schedulers in.

    A step of the optimizer goes over the batches of all replicas, so Accelerate moves the scheduler once for each of
    these, and counts processes.

    Args:
        scheduler: the user's.
        optimizers: one, or a list of those that must have stepped.
        session: of the Accelerator.
        step_with_optimizer, split_batches: as the Accelerator has them.
    """

    def __init__(
        self, scheduler: Any, optimizers: Any, session: Session, *, step_with_optimizer: bool, split_batches: bool
    ) -> None:
        super().__init__(scheduler, optimizers, step_with_optimizer=step_with_optimizer, split_batches=split_batches)
        self.smp = session

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Move once for each batch that the optimizer's step was about."""
        moves = self.step_with_optimizer and self.gradient_state.sync_gradients and not self.split_batches
        if not moves or any(optimizer.step_was_skipped for optimizer in self.optimizers):
            super().step(*args, **kwargs)  # once, or not at all
            return
        for _ in range(self.smp.num_data_ranks):
            # OneCycleLR refuses more steps than it was made for, and batches may be left over at the end.
            total = getattr(self.scheduler, "total_steps", None)
            if total is None or self.scheduler._step_count <= total:
                self.scheduler.step(*args, **kwargs)
