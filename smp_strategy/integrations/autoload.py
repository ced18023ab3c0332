"""Autoload: ``Trainer(strategy="smp")`` and Accelerate layouts work in scripts that never import this package.

Lightning reads no entry point for strategies before the first Trainer resolves its strategy, and Accelerate has none at
all. But their processes import torch, which calls the entry points of the group ``torch.backends`` at the end of its
import. :func:`autoload` is such an entry point. It installs an import hook that registers "smp" when Lightning's
strategy registry is imported, and that passes modules of Accelerate to
:mod:`smp_strategy.integrations.accelerate.launch`, and those that load pretrained models to
:mod:`smp_strategy.engine.pretrained`, when they are imported. ``import smp_strategy`` calls it, too, for
processes in which torch's mechanism is off.

In a rank that Lightning's launcher of this package has started, imports go on with fewer garbage collections: see
:func:`collect_rarely`.

Three rules, each learned from a failure:

1. Only the standard library: torch is still half imported when this runs.
2. No exception may escape: it would break ``import torch`` for the whole environment.
3. Never touch a module that is still being imported.

``SMP_AUTOLOAD=0`` switches it off. Then Lightning does not know the name "smp", and Accelerate only layouts given in
the script; strategy and plugin objects work as before.
"""

import gc
import importlib.util
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

import smp_strategy.config.special_paths  # noqa: F401  (as early as can be)

__all__ = ["LAUNCHER", "RARELY", "autoload"]

# Environment variable of ranks that Lightning's launcher has started: process id of rank 0, and the pipe in which it
# announces a regular end; then the garbage collector's first threshold, once `collect_rarely` has raised it.
LAUNCHER: Final = "SMP_LAUNCHER"
# Raised threshold: new objects, less those freed, before a collection.
RARELY: Final = 100_000

# Module of the strategy registry: name of its Lightning tree.
TREES: Final = {
    "lightning.pytorch.strategies": "lightning.pytorch",
    "pytorch_lightning.strategies": "pytorch_lightning",
}
# Modules of Fabric's strategy registries, in which "smp" says that there is no such strategy.
FABRIC: Final = ("lightning.fabric.strategies", "lightning_fabric.strategies")
# Imported module of Accelerate: module to patch then, `accelerate.accelerator` being incomplete any earlier.
ACCELERATE: Final = {
    "accelerate.launchers": "accelerate.accelerator",
    "accelerate.utils.launch": "accelerate.utils.launch",
    "accelerate.commands.config.config_args": "accelerate.commands.config.config_args",
}
# Prefix of strategies that are a recipe: ``smp_pp2_sdp2``.
_RECIPE: Final = "smp_"
# Modules that load pretrained models and make their adapters.
PRETRAINED: Final = ("transformers.modeling_utils", "peft.tuners.tuners_utils", "peft.peft_model")


def autoload() -> None:
    """Register with the modules above, now if they are imported, else when they are. Never raises; idempotent."""
    # Torch imports the package before it calls this, so one variable switches off both ways to get here.
    if os.environ.get("SMP_AUTOLOAD", "1") == "0":
        return
    with suppress(Exception):
        if not any(isinstance(finder, RegistryFinder) for finder in sys.meta_path):
            sys.meta_path.insert(0, RegistryFinder())
            collect_rarely()
        for name in (*TREES, *FABRIC, *ACCELERATE, *PRETRAINED):
            module = sys.modules.get(name)
            if module is not None and not getattr(module.__spec__, "_initializing", False):
                _meet(module)


def collect_rarely() -> None:
    """Raise the garbage collector's first threshold in a rank of Lightning's launcher, until its strategy starts.

    The imports of Lightning make half a million objects that stay, and collections that find nothing take a fifth of
    their time, while rank 0 waits for this rank.
    """
    given = os.environ.get(LAUNCHER, "")
    if given.startswith(f"{os.getppid()}:"):  # not in a process that such a rank starts
        os.environ[LAUNCHER] = f"{given}:{gc.get_threshold()[0]}"
        gc.set_threshold(RARELY)


def _meet(module: ModuleType) -> None:
    try:
        register(module)
    except Exception as error:
        # Lightning and Accelerate's launcher report the unknown "smp" and `smp_config`; a plain script would not.
        if os.environ.get("ACCELERATE_USE_SMP"):
            print(f"smp_strategy cannot be chosen by ACCELERATE_USE_SMP here: {error!r}", file=sys.stderr)


def register(module: ModuleType) -> None:
    """Register with ``module``, one of the modules above, which has just been imported."""
    if module.__name__ in TREES:
        register_strategy(module)
        return
    if module.__name__ in FABRIC:
        refuse_fabric(module)
        return
    if module.__name__ in PRETRAINED:
        from smp_strategy.engine import pretrained

        pretrained.patch(module)
        return
    from smp_strategy.integrations.accelerate.launch import patch

    patch(sys.modules[ACCELERATE[module.__name__]])


def register_strategy(module: ModuleType) -> None:
    """Add "smp" to the strategy registry of ``module``; the strategy class is made when a Trainer asks for it."""
    registry = module.StrategyRegistry
    if "smp" in registry:
        return
    tree = TREES[module.__name__]

    def smp(**options: Any) -> Any:
        from smp_strategy.integrations.lightning import make_strategy

        return make_strategy(tree)(**options)

    registry.register("smp", smp, description="Auto-partitioned pipeline parallelism (smp_strategy)")
    registry.__class__ = _with_recipes(type(registry))


def _with_recipes(registry: Any) -> Any:
    """Subclass of a registry's class that knows ``smp_<recipe>`` as well: there are too many to register each."""

    def contains(self: Any, name: object) -> bool:
        return dict.__contains__(self, name) or _is_recipe(name)

    def missing(self: Any, name: str) -> dict[str, Any]:
        from smp_strategy.config.recipe import parse_recipe

        if not _is_recipe(name):
            raise KeyError(name)
        options = parse_recipe(name.removeprefix(_RECIPE), f"strategy={_RECIPE}")
        return {**self["smp"], "strategy_name": name, "init_params": options}

    def available_strategies(self: Any) -> list[str]:
        return StrategyNames(self)

    methods = {"__contains__": contains, "__missing__": missing, "available_strategies": available_strategies}
    return type(registry.__name__, (registry,), {**methods, "__module__": registry.__module__})


def _is_recipe(name: object) -> bool:
    return isinstance(name, str) and name.startswith(_RECIPE)


class StrategyNames(list[str]):
    """Names of strategies; that of any recipe is among them."""

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or _is_recipe(name)


def refuse_fabric(module: ModuleType) -> None:
    """Let ``Fabric(strategy="smp")`` say that there is no such strategy, and what to use."""

    def smp(**options: Any) -> Any:
        from smp_strategy.errors import UnsupportedError

        raise UnsupportedError(
            '`Fabric(strategy="smp")`: there is no strategy for Fabric. Use `Trainer(strategy="smp")` of Lightning, or '
            "Accelerate, whose scripts have loops of their own, too: docs/accelerate.md."
        )

    if "smp" not in module.STRATEGY_REGISTRY:
        module.STRATEGY_REGISTRY.register("smp", smp, description="not for Fabric (smp_strategy)")


class RegistryFinder(MetaPathFinder):
    """Import hook: calls :func:`register` after one of the modules above has been executed."""

    def __init__(self) -> None:
        self._searching: set[str] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find one of the modules above with the other finders; ``None`` for any other module."""
        if name not in (*TREES, *FABRIC, *ACCELERATE, *PRETRAINED) or name in self._searching:
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
    # One method is patched on the loader's instance, so that other users of the loader (inspect, importlib.resources)
    # get the genuine object.
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        _meet(module)

    loader.exec_module = exec_module
