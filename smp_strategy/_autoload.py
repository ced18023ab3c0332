"""Make ``Trainer(strategy="smp")`` work in a script that never imports this package.

Lightning has no entry point for strategies that is read before the first Trainer resolves its strategy. Every
Lightning process imports torch, though, and torch calls the entry points of the group ``torch.backends`` at the end
of its own import. So :func:`autoload` stands there, and installs a hook that registers "smp" as soon as Lightning's
strategy registry is imported. ``import smp_strategy`` calls it too, for processes where that mechanism is off.

Three rules, each learned from a failure:

1. Only the standard library: torch is still half imported when this runs.
2. Nothing may escape: an exception here would break ``import torch`` for the whole environment.
3. Never touch a module that is still being imported.

``SMP_AUTOLOAD=0`` switches it off. The name "smp" is then unknown to Lightning, and strategy objects work as before.
"""

import importlib.util
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

__all__ = ["autoload"]

# The module that holds the registry, and the name of the tree that it belongs to.
TREES: Final = {
    "lightning.pytorch.strategies": "lightning.pytorch",
    "pytorch_lightning.strategies": "pytorch_lightning",
}


def autoload() -> None:
    """Register "smp" with each Lightning tree that is imported, now or later. Never raises; repeating it is free."""
    # Torch imports the package to get here, so importing it and being called by torch cannot be told apart.
    if os.environ.get("SMP_AUTOLOAD", "1") == "0":
        return
    with suppress(Exception):
        if not any(isinstance(finder, RegistryFinder) for finder in sys.meta_path):
            sys.meta_path.insert(0, RegistryFinder())
        for name in TREES:
            module = sys.modules.get(name)
            if module is not None and not getattr(module.__spec__, "_initializing", False):
                register(module)


def register(module: ModuleType) -> None:
    """Put "smp" into the strategy registry of ``module``; the strategy itself is built when a Trainer asks for it."""
    registry = module.StrategyRegistry
    if "smp" in registry:
        return
    tree = TREES[module.__name__]

    def smp(**options: Any) -> Any:
        from smp_strategy.lightning import make_strategy

        return make_strategy(tree)(**options)

    registry.register("smp", smp, description="Auto-partitioned pipeline parallelism (smp_strategy)")


class RegistryFinder(MetaPathFinder):
    """Lets the usual finders find Lightning's registries, and adds "smp" once such a module has run."""

    def __init__(self) -> None:
        self._searching: set[str] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find ``name`` with the other finders; for all modules but Lightning's registries, do nothing."""
        if name not in TREES or name in self._searching:
            return None
        self._searching.add(name)  # find_spec() below asks this finder again
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._searching.discard(name)
        if spec is not None and spec.loader is not None:
            with suppress(Exception):
                _call_after_execution(spec.loader)
        return spec


def _call_after_execution(loader: Any) -> None:
    # The loader is replaced by nothing but one method of this one instance, so that everything else that asks the
    # module for its loader (inspect, importlib.resources) meets the genuine one.
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        with suppress(Exception):
            register(module)

    loader.exec_module = exec_module
