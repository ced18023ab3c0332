"""Make ``Trainer(strategy="smp")``, and layouts for Accelerate, work in a script that never imports this package.

Lightning has no entry point for strategies that is read before the first Trainer resolves its strategy, and Accelerate
has none at all. Every process of theirs imports torch, though, and torch calls the entry points of the group
``torch.backends`` at the end of its own import. So :func:`autoload` stands there, and installs a hook that registers
"smp" as soon as Lightning's strategy registry is imported, and that hands modules of Accelerate to
:mod:`smp_strategy.integrations.accelerate.launch` as soon as they are. ``import smp_strategy`` calls it too, for
processes where that mechanism is off.

Three rules, each learned from a failure:

1. Only the standard library: torch is still half imported when this runs.
2. Nothing may escape: an exception here would break ``import torch`` for the whole environment.
3. Never touch a module that is still being imported.

``SMP_AUTOLOAD=0`` switches it off. The name "smp" is then unknown to Lightning, and Accelerate knows of no layout that
the script does not give; strategy and plugin objects work as before.
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

import smp_strategy.config.start_folder  # noqa: F401  (as early as can be)

__all__ = ["autoload"]

# The module that holds the registry, and the name of the tree that it belongs to.
TREES: Final = {
    "lightning.pytorch.strategies": "lightning.pytorch",
    "pytorch_lightning.strategies": "pytorch_lightning",
}
# What is imported of Accelerate, and what is changed then: its accelerator imports torch, and is not ready before.
ACCELERATE: Final = {
    "accelerate.launchers": "accelerate.accelerator",
    "accelerate.utils.launch": "accelerate.utils.launch",
    "accelerate.commands.config.config_args": "accelerate.commands.config.config_args",
}


def autoload() -> None:
    """Meet the modules above when they are imported, now or later. Never raises; repeating it is free."""
    # Torch imports the package to get here, so importing it and being called by torch cannot be told apart.
    if os.environ.get("SMP_AUTOLOAD", "1") == "0":
        return
    with suppress(Exception):
        if not any(isinstance(finder, RegistryFinder) for finder in sys.meta_path):
            sys.meta_path.insert(0, RegistryFinder())
        for name in (*TREES, *ACCELERATE):
            module = sys.modules.get(name)
            if module is not None and not getattr(module.__spec__, "_initializing", False):
                _meet(module)


def _meet(module: ModuleType) -> None:
    try:
        register(module)
    except Exception as error:
        # Lightning will not know "smp", and Accelerate's launcher not `smp_config`: both say so. A script would not.
        if os.environ.get("ACCELERATE_USE_SMP"):
            print(f"smp_strategy cannot be chosen by ACCELERATE_USE_SMP here: {error!r}", file=sys.stderr)


def register(module: ModuleType) -> None:
    """Do what is to be done now that ``module``, one of those above, has been imported."""
    if module.__name__ in TREES:
        register_strategy(module)
        return
    from smp_strategy.integrations.accelerate.launch import patch

    patch(sys.modules[ACCELERATE[module.__name__]])


def register_strategy(module: ModuleType) -> None:
    """Put "smp" into the strategy registry of ``module``; the strategy itself is built when a Trainer asks for it."""
    registry = module.StrategyRegistry
    if "smp" in registry:
        return
    tree = TREES[module.__name__]

    def smp(**options: Any) -> Any:
        from smp_strategy.integrations.lightning import make_strategy

        return make_strategy(tree)(**options)

    registry.register("smp", smp, description="Auto-partitioned pipeline parallelism (smp_strategy)")


class RegistryFinder(MetaPathFinder):
    """Lets the usual finders find the modules above, and calls :func:`register` once such a module has run."""

    def __init__(self) -> None:
        self._searching: set[str] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find ``name`` with the other finders; for all modules but those above, do nothing."""
        if name not in (*TREES, *ACCELERATE) or name in self._searching:
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
        _meet(module)

    loader.exec_module = exec_module
