"""Hooks that look at gradients see those of all stages, and what they log is logged on every rank.

A rank has the gradients of its own stage. ``on_after_backward`` and ``on_before_optimizer_step`` of the module and of
callbacks are where users log gradient norms or rescale gradients; those that are overridden run with the gradients of
the whole model in sight (:mod:`smp_strategy.gradient_view`). Others cost nothing.

Inside an accumulation window the gradients of replicas and of weights tied across stages are not summed yet, as with
any data-parallel strategy: ``on_after_backward`` sees what has arrived so far.
"""

from collections.abc import Callable
from typing import Any

from smp_strategy.engine import Engine
from smp_strategy.lightning.factory import Tree
from smp_strategy.lightning.logs import LogRecorder

__all__ = ["GradientHooks"]

NAMES = ("on_after_backward", "on_before_optimizer_step")


class GradientHooks:
    """Stands in for the overridden hooks of one run.

    Args:
        engine: partitions the module.
        module: the LightningModule.
        tree: the Lightning tree in use.
    """

    def __init__(self, engine: Engine, module: Any, tree: Tree) -> None:
        self._engine = engine
        self._module = module
        self._tree = tree
        self._replaced: list[tuple[Any, str]] = []

    def install(self, callbacks: list[Any]) -> None:
        """Replace the hooks of the module and of ``callbacks``, on the instances."""
        is_overridden = self._tree.pytorch("utilities.model_helpers").is_overridden
        kinds = (
            self._tree.pytorch("core.module").LightningModule,
            self._tree.pytorch("callbacks.callback").Callback,
        )
        owners = [(self._module, kinds[0]), *((callback, kinds[1]) for callback in callbacks)]
        for owner, kind in owners:
            for name in NAMES:
                if is_overridden(name, owner, parent=kind):
                    object.__setattr__(owner, name, self._with_gradients(getattr(owner, name)))
                    self._replaced.append((owner, name))

    def remove(self) -> None:
        """Give the hooks back."""
        for owner, name in self._replaced:
            object.__delattr__(owner, name)
        self._replaced.clear()

    def _with_gradients(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        recorder = LogRecorder(self._module)

        def run(*args: Any, **kwargs: Any) -> None:
            def noted() -> Any:
                with recorder.notes() as notes:
                    hook(*args, **kwargs)
                return notes

            with recorder.installed():
                notes = self._engine.with_gradients(noted)
            recorder.replay([notes], [1])

        return run
