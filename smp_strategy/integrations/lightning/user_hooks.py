"""User hooks: module and callback hooks see the weights and gradients of all stages, and log on every rank.

A rank holds its own stage's part only. Users average weights, clip them, log norms, rescale gradients, or add averages
to checkpoints in hooks. Overridden hooks run with access to the whole model
(:mod:`smp_strategy.engine.hooks.cross_stage`). Other hooks cost nothing; neither do those of Lightning's own callbacks,
except the few that touch weights.

Module copies that callbacks made before partitioning (usually EMA weights) are found in the callbacks' attributes and
partitioned together with the module.

Inside an accumulation window, gradients of replicas and of weights tied across stages are not reduced yet, as with any
data-parallel strategy: ``on_after_backward`` sees local sums.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial, wraps
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from smp_strategy.engine.engine import Engine
from smp_strategy.errors import UnsupportedError
from smp_strategy.integrations.lightning.logging import LogRecorder
from smp_strategy.integrations.lightning.metrics import share_value
from smp_strategy.integrations.lightning.tree import Tree
from smp_strategy.model.patching import Patches

__all__ = ["UserHooks", "copies_module", "copies_of"]

_LOOPS = ("train", "validation", "test", "predict")
_MOMENTS = ("start", "end", "epoch_start", "epoch_end", "batch_start", "batch_end")
_BACKWARD = ("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step")
_LOGGING = (
    *(f"on_{loop}_{moment}" for loop in _LOOPS for moment in _MOMENTS),
    *("on_sanity_check_start", "on_sanity_check_end", *_BACKWARD, "configure_gradient_clipping"),
)
# They enclose the step, which logs by itself, or are in the midst of it.
_ENCLOSING = ("optimizer_step", "optimizer_zero_grad")
# It runs when the module is spread already, if an earlier run has left it so.
_BEGINNING = "on_fit_start"
# Their results go into the checkpoint.
_SAVING = ("on_save_checkpoint", "state_dict")
# These hooks run between the last backward and the `zero_grad` of the next batch.
_WITH_GRADIENTS = {
    *(*_BACKWARD, *_ENCLOSING, "configure_gradient_clipping"),
    *("on_train_batch_start", "on_train_batch_end", "on_train_epoch_start", "on_train_epoch_end", "on_train_end"),
}
_WITH_OLD_GRADIENTS = {"on_before_zero_grad", "optimizer_zero_grad"}
# Lightning's own callbacks that work on weights.
_COPYING = {"StochasticWeightAveraging", "WeightAveraging"}
# Callbacks that run steps in `on_fit_start`.
_RUNNING = {"LearningRateFinder", "BatchSizeFinder"}
_ON_WEIGHTS = {*_COPYING, "ModelPruning", "BaseFinetuning"}


class UserHooks:
    """Patches of the overridden hooks of a run; ``saving`` makes a context of those that are called during a save."""

    def __init__(
        self, engine: Engine, module: Any, tree: Tree, saving: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._engine = engine
        self._module = module
        self._tree = tree
        self._while_saving = saving
        self._patches = Patches()
        self._patched: set[str] = set()

    @property
    def see_gradients(self) -> bool:
        """Whether a patched hook runs while there are gradients."""
        return bool(self._patched & _WITH_GRADIENTS) or self._is_users(
            "backward", self._module, self._tree.pytorch("core.module").LightningModule
        )

    @property
    def see_old_gradients(self) -> bool:
        """Whether a patched hook runs between a step and the ``zero_grad`` of the previous gradients."""
        return bool(self._patched & _WITH_OLD_GRADIENTS)

    def install(self, callbacks: Iterable[Any]) -> None:
        """Replace the hooks of the module and of ``callbacks``, on the instances."""
        lightning_module = self._tree.pytorch("core.module").LightningModule
        callback_class = self._tree.pytorch("callbacks.callback").Callback
        self._install(self._module, lightning_module, ("on_save_checkpoint",))
        for callback in callbacks:
            self._install(callback, callback_class, _SAVING)

    def _install(self, owner: Any, kind: type, saving: Iterable[str]) -> None:
        stand_ins: list[tuple[Iterable[str], Callable[..., Any]]] = [
            (_LOGGING, self._logging),
            (_ENCLOSING[:1], partial(self._enclosing, updates=True)),
            (_ENCLOSING[1:], self._enclosing),
            (saving, self._saving),
        ]
        for names, stand_in in stand_ins:
            for name in names:
                if self._is_users(name, owner, kind):
                    self._patched.add(name)
                    self._patches.put(owner, name, stand_in(getattr(owner, name)))
        if self._engine.is_spread and not _is_among(_RUNNING, owner):
            if self._is_users(_BEGINNING, owner, kind):
                self._patches.put(owner, _BEGINNING, self._enclosing(getattr(owner, _BEGINNING)))
            elif _is_among({"ModelSummary"}, owner):
                self._patches.put(owner, _BEGINNING, self._looking_as_built(getattr(owner, _BEGINNING)))

    def remove(self) -> None:
        """Restore the hooks."""
        self._patches.give_back()
        self._patched.clear()

    def _is_users(self, name: str, owner: Any, kind: type) -> bool:
        is_overridden = self._tree.pytorch("utilities.model_helpers").is_overridden
        if not hasattr(kind, name) or not is_overridden(name, owner, parent=kind):
            return False
        if _is_among(_ON_WEIGHTS, owner):
            return True
        home = str(getattr(getattr(owner, name), "__module__", ""))
        return not home.startswith((f"{self._tree.root}.", "smp_strategy."))

    def _logging(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        recorder = LogRecorder(self._module, share=partial(share_value, self._engine))

        def run(*args: Any, **kwargs: Any) -> Any:
            def noted() -> Any:
                with recorder.notes() as notes:
                    return hook(*args, **kwargs), notes

            with recorder.installed():
                result, notes = self._engine.run_hook(noted)
            recorder.replay([notes], [1])
            return result

        return run

    def _enclosing(self, hook: Callable[..., Any], *, updates: bool = False) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            args, before = tuple(map(self._outside, args)), self._engine.num_updates
            result = self._engine.run_hook(lambda: hook(*args, **kwargs))
            if updates:
                self._agree_on_updates(self._engine.num_updates - before)
            return result

        return run

    def _agree_on_updates(self, number: int) -> None:
        """Refuse a hook that has updated the weights on some of the replicas only. Collective."""
        mesh = self._engine.mesh
        if mesh.dp == 1:
            return
        least, most = mesh.extremes(number, "the end of `optimizer_step`")
        if most != least:
            raise UnsupportedError(
                f"`optimizer_step` has updated the weights {number} times on this rank, and {least} to {most} times on "
                "the replicas: their losses, which are of different samples, have led them to different decisions. "
                "Decide by a number that is the same on all ranks, such as `self.trainer.strategy.reduce(loss)`."
            )

    def _looking_as_built(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with self._engine.saved.looking_as_built():
                return hook(*args, **kwargs)

        return run

    def _outside(self, argument: Any) -> Any:
        """``argument``; if it is a closure, one that leaves the hook: the step is no part of it."""
        if not isinstance(argument, self._tree.pytorch("loops.optimization.closure").AbstractClosure):
            return argument

        @wraps(argument)
        def closure(*args: Any, **kwargs: Any) -> Any:
            with self._engine.views.put_aside():
                return argument(*args, **kwargs)

        return closure

    def _saving(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            def collected() -> Any:
                result = hook(*args, **kwargs)
                for mapping in (result, *args):
                    if isinstance(mapping, dict):
                        _settle_in(mapping, self._engine)
                return result

            with self._while_saving():
                return self._engine.run_hook(collected)

        return run


def _settle_in(mapping: dict[str, Any], engine: Engine) -> None:
    """Collect spread tensors on the writing rank (full), or mark them as this rank's blocks (sharded)."""
    views = engine.views
    settled = views.held if engine.config.state_dict_type == "sharded" else views.collected
    for key, value in mapping.items():
        if any(isinstance(leaf, Tensor) and type(leaf) is not Tensor for leaf in pytree.tree_leaves(value)):
            mapping[key] = settled(value)


def copies_module(callback: Any) -> bool:
    """Whether ``callback`` is one of Lightning's that copy the module when training is set up."""
    return _is_among(_COPYING, callback)


def _is_among(names: set[str], owner: Any) -> bool:
    return bool(names.intersection(base.__name__ for base in type(owner).__mro__))


def copies_of(module: nn.Module, owners: Iterable[Any]) -> Iterator[nn.Module]:
    """Copies of ``module`` in the attributes of ``owners``: same type, and same parameter names and shapes."""
    for owner in owners:
        for value in vars(owner).values():
            if value is module or not isinstance(value, nn.Module):
                continue
            for part in value.modules():
                if part is not module and type(part) is type(module) and _shapes(part) == _shapes(module):
                    yield part


def _shapes(module: nn.Module) -> dict[str, Any]:
    return {name: parameter.shape for name, parameter in module.named_parameters()}
