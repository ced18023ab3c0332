"""Public methods of the model that call its units: ``model.compute_loss(batch)``, ``model.encoder(x)``.

A public method that calls units becomes a step of its own, like a call of the model. The first call detects this by a
probe: the method is aborted at its first unit, its changes to the model are undone, and it starts again as a step. All
other methods run as usual.

Submodules that the script calls directly remain. A rank may have their values and compute with them, but no other rank
would learn of the gradients: backward through them is refused.
"""

import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from smp_strategy.distributed.rng_state import capture, generators_of, restore
from smp_strategy.engine.engine import Engine
from smp_strategy.errors import UnsupportedError
from smp_strategy.model.patching import Patches
from smp_strategy.model.trace.pytree import flatten_output
from smp_strategy.model.trace.snapshot import Snapshot
from smp_strategy.model.trace.undo_variables import variables_restored

__all__ = ["ModelMethods"]


class _StepNeededError(BaseException):
    """Aborts a probed method at its first unit. A ``BaseException``, since user code may catch all others."""

    def __init__(self, with_gradients: bool) -> None:
        super().__init__()
        self.with_gradients = with_gradients


@final
class ModelMethods:
    """Replacement of public methods of the model.

    Args:
        run: runs a step, given name and callable of the method, its arguments, and the grad mode of its first unit.
        is_inside: whether a step is running, or other code that may call units.
    """

    def __init__(
        self,
        model: nn.Module,
        engine: Engine,
        run: Callable[[str, Callable[..., Any], Any, bool], Any],
        is_inside: Callable[[], bool],
    ) -> None:
        self._model = model
        self._engine = engine
        self._run = run
        self._is_inside = is_inside
        # Methods known to call units, by name and grad mode; value: whether gradients were enabled at the first unit.
        self._steps: dict[tuple[str, bool], bool] = {}
        self._is_probing = False

    def install(self, patches: Patches) -> None:
        """Replace the public methods."""
        for name in _public_methods(type(self._model)):
            if name not in vars(self._model):
                patches.replace(self._model, partial(self._call, name, getattr(self._model, name)), name)
        self._engine.watch_calls_outside(self._outside)

    def _call(self, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._is_probing or self._is_inside() or self._engine.views.is_open:
            return method(*args, **kwargs)
        way = name, torch.is_grad_enabled()
        if way not in self._steps:
            try:
                with self._probing(method):
                    return method(*args, **kwargs)
            except _StepNeededError as needed:
                self._steps[way] = needed.with_gradients
        return self._run(name, method, (args, kwargs), self._steps[way])

    @contextmanager
    def _probing(self, method: Callable[..., Any]) -> Iterator[None]:
        """Context of a probe; undoes all changes if the method is aborted."""
        generators = generators_of(self._engine.device)
        state = capture(generators, python=False, numpy=False)
        self._is_probing = True
        with ExitStack() as stack:
            stack.enter_context(Snapshot(modules=self._model.modules()))
            stack.enter_context(variables_restored(self._model.modules(), method))
            try:
                yield
            except _StepNeededError:
                restore(state, generators)
                raise
            except BaseException:
                stack.pop_all()
                raise
            finally:
                self._is_probing = False
            stack.pop_all()

    def _outside(self, unit: str, call: Callable[[], Any]) -> Any:
        if self._is_inside() or self._engine.views.is_open:
            return call()
        if self._is_probing:
            raise _StepNeededError(torch.is_grad_enabled())
        if self._engine.partition is not None and self._engine.mesh.pp > 1:
            raise _alone(unit, "is called")
        result = call()
        if torch.is_grad_enabled() and any(each.requires_grad for each in self._model.get_submodule(unit).parameters()):
            for leaf in flatten_output(result)[0]:
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    leaf.register_hook(partial(_refuse, unit))
        return result


def _refuse(unit: str, gradient: Tensor) -> None:
    raise _alone(unit, "gets a gradient from a call")


def _alone(unit: str, what: str) -> UnsupportedError:
    return UnsupportedError(
        f"`{unit}` {what} outside of the prepared model, of which it is a part: ranks that hold another part, or read "
        "other samples, would not take part. Call the model itself, or a method of it, with an argument that says "
        "what is to be computed, if need be."
    )


def _public_methods(kind: type) -> list[str]:
    """Names of public methods of the user's classes, in the same order on all ranks."""
    own = [each for each in kind.__mro__ if issubclass(each, nn.Module) and not each.__module__.startswith("torch.")]
    found = {name: value for each in reversed(own) for name, value in vars(each).items()}
    functions = [name for name, value in found.items() if isinstance(value, types.FunctionType)]
    return [name for name in functions if not name.startswith("_") and not hasattr(nn.Module, name)]
