"""Full state dicts from the model's own ``state_dict`` and ``load_state_dict``.

Scripts save with ``accelerator.save(accelerator.unwrap_model(model).state_dict(), path)`` or with ``save_pretrained``,
and load with ``model.load_state_dict(...)``, on all ranks. So these two methods are replaced on the prepared instance.
While the model is whole they behave as usual. Once it is partitioned the first gathers the full state dict, and the
second takes this rank's shard of its argument.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from smp_strategy.errors import UnsupportedError
from smp_strategy.model.patching import Patches

__all__ = ["StateDictCalls"]


@final
class StateDictCalls:
    """Replacement of ``state_dict`` and ``load_state_dict`` of one model.

    Args:
        model: whole until now.
        is_partitioned: whether this rank lacks a part of it.
        collect: returns the full state dict. Collective. Like ``load`` it calls the methods :meth:`aside`.
        load: loads this rank's shard of a full state dict; returns the missing and the unexpected names.

    Attributes:
        model: as given.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        is_partitioned: Callable[[], bool],
        collect: Callable[[], Mapping[str, Any]],
        load: Callable[..., tuple[list[str], list[str]]],
    ) -> None:
        self.model = model
        self._is_partitioned = is_partitioned
        self._collect = collect
        self._load = load
        self._own_state_dict, self._own_load_state_dict = model.state_dict, model.load_state_dict
        self._collected: Mapping[str, Any] | None = None
        self._is_aside = False
        self._patches = Patches()
        self._patches.replace(model, self._state_dict, "state_dict")
        self._patches.replace(model, self._load_state_dict, "load_state_dict")

    def remove(self) -> None:
        """Restore the model's own methods."""
        self._patches.give_back()

    @contextmanager
    def collected(self, state: Mapping[str, Any]) -> Iterator[None]:
        """Context in which ``state``, gathered by all ranks together, is the result; each rank may ask for it alone."""
        self._collected = OrderedDict(state)  # a copy: callers may remove entries
        self._collected._metadata = getattr(state, "_metadata", OrderedDict())  # type: ignore[attr-defined]
        try:
            yield
        finally:
            self._collected = None

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Context in which the model's own methods run: shards are gathered, or loaded."""
        before, self._is_aside = self._is_aside, True
        try:
            yield
        finally:
            self._is_aside = before

    def _state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        # `keep_vars` asks for the parameters themselves, and not for their values.
        if keep_vars or self._is_aside or args or not self._is_partitioned():
            options = {"destination": destination, "prefix": prefix, "keep_vars": keep_vars}
            return self._own_state_dict(*args, **({} if args else options))
        state = self._collect() if self._collected is None else self._collected
        found: Any = OrderedDict() if destination is None else destination
        found.update({prefix + name: value for name, value in state.items()})
        if destination is None:
            found._metadata = getattr(state, "_metadata", OrderedDict())
        return found

    def _load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        if self._is_aside or not self._is_partitioned():
            return self._own_load_state_dict(state_dict, strict=strict, assign=assign)
        if assign:
            raise UnsupportedError(
                "`load_state_dict(assign=True)` would replace parameters, which are spread over the ranks. Leave "
                "`assign` out: values are copied into them."
            )
        return _IncompatibleKeys(*self._load(state_dict, strict=strict))
