"""The model's own ``state_dict`` and ``load_state_dict``, where ranks have parts of it.

Scripts save with ``accelerator.save(accelerator.unwrap_model(model).state_dict(), path)`` or with ``save_pretrained``,
and load with ``model.load_state_dict(...)``, on all ranks. So these two are replaced on the instance that is prepared.
As long as the model is whole they do what they always do. Once it is spread the first one collects the whole state
dict, and of what is given to the second one each rank takes its share.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from smp_strategy.errors import UnsupportedError
from smp_strategy.model.patching import Patches

__all__ = ["StateCalls"]


@final
class StateCalls:
    """See the module docstring.

    Args:
        model: whole until now.
        is_spread: whether this rank lacks some of it.
        collect: gives the whole state dict. Collective. Like ``load`` it puts this one :meth:`aside`.
        load: takes this rank's share of a whole state dict; gives the names that are missing in it, and unexpected.

    Attributes:
        model: as given.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        is_spread: Callable[[], bool],
        collect: Callable[[], Mapping[str, Any]],
        load: Callable[..., tuple[list[str], list[str]]],
    ) -> None:
        self.model = model
        self._is_spread = is_spread
        self._collect = collect
        self._load = load
        self._own_state_dict, self._own_load_state_dict = model.state_dict, model.load_state_dict
        self._collected: Mapping[str, Any] | None = None
        self._is_aside = False
        self._stand_ins = Patches()
        self._stand_ins.replace(model, self._state_dict, "state_dict")
        self._stand_ins.replace(model, self._load_state_dict, "load_state_dict")

    def remove(self) -> None:
        """Give the model its own methods back."""
        self._stand_ins.give_back()

    @contextmanager
    def collected(self, state: Mapping[str, Any]) -> Iterator[None]:
        """In here ``state``, which all ranks have collected together, is the answer; each rank may ask for itself."""
        self._collected = OrderedDict(state)  # who asks may take something out of it
        self._collected._metadata = getattr(state, "_metadata", OrderedDict())  # type: ignore[attr-defined]
        try:
            yield
        finally:
            self._collected = None

    @contextmanager
    def aside(self) -> Iterator[None]:
        """In here the model does what it always does: parts are collected, or loaded."""
        before, self._is_aside = self._is_aside, True
        try:
            yield
        finally:
            self._is_aside = before

    def _state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        # With `keep_vars` the parameters themselves are wanted, and not their values.
        if keep_vars or self._is_aside or args or not self._is_spread():
            options = {"destination": destination, "prefix": prefix, "keep_vars": keep_vars}
            return self._own_state_dict(*args, **({} if args else options))
        state = self._collect() if self._collected is None else self._collected
        found: Any = OrderedDict() if destination is None else destination
        found.update({prefix + name: value for name, value in state.items()})
        if destination is None:
            found._metadata = getattr(state, "_metadata", OrderedDict())
        return found

    def _load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        if self._is_aside or not self._is_spread():
            return self._own_load_state_dict(state_dict, strict=strict, assign=assign)
        if assign:
            raise UnsupportedError(
                "`load_state_dict(assign=True)` would replace parameters, which are spread over the ranks. Leave "
                "`assign` out: values are copied into them."
            )
        return _IncompatibleKeys(*self._load(state_dict, strict=strict))
