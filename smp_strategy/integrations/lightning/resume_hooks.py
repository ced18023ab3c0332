"""The strategy's hooks for going on with a run: what it adds to a checkpoint, and what it does with that."""

from collections.abc import Mapping
from typing import Any, Final

from smp_strategy.checkpoint.edited import EditedState
from smp_strategy.config.config import SMPConfig
from smp_strategy.engine.engine import Engine
from smp_strategy.integrations.lightning.collectives import CommunicationHooks
from smp_strategy.integrations.lightning.resume import KEY, Resumption

__all__ = ["CHECKPOINT_KEY", "ResumeHooks"]

# Where the engine's own state stands in a checkpoint; plain Lightning passes over both.
CHECKPOINT_KEY: Final = "smp_strategy"
_GRADIENTS: Final = "gradients"


class ResumeHooks(CommunicationHooks):
    """See the module's docstring."""

    config: SMPConfig
    _engine: Engine | None
    _resumption: Resumption | None = None
    _has_stepped: bool = True  # under manual optimization: an optimizer has used the gradients of the last batch

    @property
    def engine(self) -> Engine:
        """The engine of the module that is being trained; exists from ``setup`` on."""
        raise NotImplementedError

    @property
    def _trainer(self) -> Any:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    @property
    def _is_accumulating(self) -> bool:
        """Whether the next batches add to the gradients of the last ones."""
        if self._resumption is None or self._resumption.is_over:
            return False
        if not self._trainer.lightning_module.automatic_optimization:
            return not self._has_stepped
        return bool(self._trainer.fit_loop._should_accumulate())

    def _add_own_state(self, checkpoint: dict[str, Any]) -> None:
        """Add what plain Lightning passes over; on global rank 0 it is complete. Collective."""
        own: dict[str, Any] = {**self.engine.state_dict(), "layout": self.engine.mesh.shape.degrees}
        if self._resumption is not None and "callbacks" in checkpoint:  # more than weights
            own[KEY] = self._resumption.collected(self._trainer)
            if self._is_accumulating and self.config.state_dict_type == "sharded":
                checkpoint[_GRADIENTS] = self.engine.held_state((), gradients=True).get(_GRADIENTS, {})
            elif self._is_accumulating:
                checkpoint[_GRADIENTS] = self.engine.full_gradients()
        checkpoint[CHECKPOINT_KEY] = own

    def _load_own_state(self, checkpoint: Mapping[str, Any]) -> None:
        """Go on with it; Lightning's counters have been read."""
        own = checkpoint.get(CHECKPOINT_KEY)
        if own is None:
            return
        self.engine.load_state(own)
        if self._resumption is not None and KEY in own:
            self._resumption.read(own, self._trainer)
        if _GRADIENTS in checkpoint:
            self.engine.load_stored_gradients(EditedState({_GRADIENTS: checkpoint[_GRADIENTS]}))

    def on_train_start(self) -> None:
        """Go on with the data and the random numbers of an earlier run. See [Note: going on]."""
        if self._resumption is not None:
            own = self._resumption.training_starts(self._trainer, lambda: self.engine.load_gradients({}))
            if own is not None:
                self.engine.load_state(dict(own))  # a trial of validation has counted its batches

    def on_train_end(self) -> None:
        """Lightning lets go of the data."""
        if self._resumption is not None:
            self._resumption.training_ends(self._trainer)
