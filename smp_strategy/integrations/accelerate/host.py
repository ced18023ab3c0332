"""What the hooks of the Accelerate door stand on: an Accelerator with a :class:`Session`.

An Accelerator becomes one of ours in the middle of its construction, by another class (see
:mod:`smp_strategy.integrations.accelerate.accelerator`). So no ``__init__`` of ours runs; what hooks need is made in
:meth:`begin`.
"""

from typing import Any

from accelerate import Accelerator

from smp_strategy.integrations.accelerate.session import Session

__all__ = ["Host"]


class Host(Accelerator):  # type: ignore[misc]  # published without type information
    """Base of all hooks.

    Attributes:
        smp: options, this rank's place, and the engine.
    """

    smp: Session

    def begin(self, session: Session, plugin: Any) -> None:
        """Called once, when only the processes are known. Hooks extend it with what they need.

        Args:
            session: becomes :attr:`smp`.
            plugin: the :class:`~smp_strategy.integrations.accelerate.plugin.SMPPlugin`.
        """
        self.smp = session

    def check_even(self, training: bool) -> None:
        """Called before each call of the model; see the hooks of data loaders."""
        raise NotImplementedError
