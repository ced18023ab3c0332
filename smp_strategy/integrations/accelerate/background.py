"""Saves that go on in the background: what has gone wrong is said at the next call, and the end waits for them."""

import warnings
from typing import Any

from torch import Tensor

from smp_strategy.checkpoint.storage.async_save import Background
from smp_strategy.distributed.rendezvous import alike
from smp_strategy.integrations.accelerate.host import Host
from smp_strategy.integrations.accelerate.session import Session

__all__ = ["BackgroundHooks"]


class BackgroundHooks(Host):
    """In front of the other hooks: what they end is needed until files are there."""

    def begin(self, session: Session, plugin: Any) -> None:
        """Nothing is being saved yet."""
        self._smp_background = Background()
        super().begin(session, plugin)

    def smp_settle(self) -> None:
        """Wait until everything that is being saved is there, and fail on all ranks if it failed on one. Collective."""
        if self.smp.config.async_save:
            with alike("saving in the background"):
                self._smp_background.wait()

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """As always; a checkpoint that could not be saved meanwhile is an error here, in the next step."""
        self._smp_background.check()
        super().backward(loss, **kwargs)

    def free_memory(self, *objects: Any) -> Any:
        """Wait for what is being saved, then let go of everything that is prepared."""
        self._smp_background.wait()
        return super().free_memory(*objects)

    def end_training(self) -> None:
        """Wait for what is being saved, then end. Collective."""
        self.smp_settle()
        super().end_training()

    def _smp_leave(self) -> None:
        try:
            self._smp_background.wait()
        except Exception as error:
            warnings.warn(f"A checkpoint was not saved: {error}", stacklevel=1)
        leave: Any = super()
        leave._smp_leave()
