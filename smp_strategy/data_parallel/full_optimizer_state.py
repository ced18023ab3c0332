"""What optimizers keep, whole in sight of the user's hooks, although each rank has only some of it.

``optimizer.state[p]`` goes with ``p``. Where a hook sees ``p`` whole, and those of all stages, it finds whole moments
beside it, on every rank. While hooks run, optimizers are of a class that notices when their state is asked for; only
then it is gathered, and when the hook is over each rank keeps its share of what has become of it. All ranks run the
same code on the same values, so nothing has to travel back.

Outside of hooks a script can look at it as well: until the library needs the shares.

An optimizer's own ``state_dict()`` has what this rank updates: a part, which must not pass for the whole in a file.

Code may read it, copy it and load it again (to undo an update, say). Pickling is refused, and with it ``torch.save``.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, NoReturn, final

from torch import Tensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from smp_strategy.data_parallel.optimizer_probe import with_inner
from smp_strategy.errors import UnsupportedError

__all__ = ["FullOptimizerState", "mark_own_states"]


@final
class FullOptimizerState:
    """See the module docstring.

    Args:
        optimizers: those that train the module now.
        gather: makes the whole state of an optimizer, on every rank; collective. ``None``: every rank has it.
        keep_share: cuts the state of an optimizer, which is whole, to what this rank has.
    """

    def __init__(
        self,
        optimizers: Callable[[], Iterable[Optimizer]] = tuple,
        gather: Callable[[Optimizer], Any] | None = None,
        keep_share: Callable[[Optimizer], None] = lambda optimizer: None,
    ) -> None:
        self._optimizers = optimizers
        self._gather = gather
        self._keep_share = keep_share
        self._is_open = False
        # The class that each of them really has, while it is watched.
        self._watched: dict[Optimizer, type[Optimizer]] = {}
        self._kinds: dict[type[Optimizer], type[Optimizer]] = {}
        # This rank's shares, while wholes stand in for them.
        self._shares: dict[Optimizer, Any] = {}

    @contextmanager
    def shown(self) -> Iterator[None]:
        """While this is open, the state of optimizers is whole from its first use on."""
        self._close()
        self._open()
        try:
            yield
        finally:
            self._close()

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """While this is open, inside of :meth:`shown` or not, it is this rank's share."""
        was_open = self._is_open
        self._close()
        try:
            yield
        finally:
            if was_open:
                self._open()

    def look_at(self, optimizer: Optimizer) -> Any:
        """The whole state of ``optimizer``, until the next :meth:`hidden`. Collective."""
        if self._gather is not None and optimizer not in self._shares and not self._is_open:
            self._show(optimizer)
        return optimizer.state

    def _open(self) -> None:
        self._is_open = True
        for optimizer in self._optimizers() if self._gather is not None else ():
            for member in with_inner(optimizer):
                kind = self._watched.setdefault(member, type(member))
                member.__class__ = self._watching(kind)

    def _close(self) -> None:
        self._is_open = False
        for optimizer in [*self._watched]:
            self._unwatch(optimizer)
        for optimizer, share in self._shares.items():
            self._keep_share(optimizer)
            _refill(share, vars(optimizer)["state"])
            vars(optimizer)["state"] = share
        self._shares.clear()

    def _unwatch(self, optimizer: Optimizer) -> None:
        optimizer.__class__ = self._watched.pop(optimizer)

    def _show(self, optimizer: Optimizer) -> None:
        assert self._gather is not None
        whole = self._gather(optimizer)
        self._shares[optimizer] = optimizer.state
        optimizer.state = whole

    def _watching(self, kind: type[Optimizer]) -> type[Optimizer]:
        """A class like ``kind`` that notices when its state is asked for."""
        if kind not in self._kinds:

            def state(optimizer: Optimizer) -> Any:
                self._unwatch(optimizer)
                if "state" in vars(optimizer):
                    self._show(optimizer)
                return optimizer.state

            def set_state(optimizer: Optimizer, value: Any) -> None:
                self._unwatch(optimizer)
                self._shares[optimizer] = optimizer.state
                optimizer.state = value

            own = {"state": property(state, set_state), "__module__": kind.__module__, "__doc__": kind.__doc__}
            self._kinds[kind] = type(kind.__name__, (kind,), own)
        return self._kinds[kind]


def _refill(share: Any, found: Any) -> None:
    """Let ``share`` have what ``found`` has, in the same memory where that fits."""
    for key in [each for each in share if each not in found]:
        del share[key]
    for key, kept in found.items():
        before, structure = pytree.tree_flatten(share.get(key))
        values, same = pytree.tree_flatten(kept)
        if structure == same:
            kept = pytree.tree_unflatten(list(map(_refilled, before, values)), structure)
        share[key] = kept


def _refilled(before: object, value: object) -> object:
    if not isinstance(before, Tensor) or not isinstance(value, Tensor):
        return value
    return before.copy_(value) if before.shape == value.shape and before.dtype == value.dtype else value


class _OwnState(dict[Any, Any]):
    """The state of the parameters that this rank updates, by their numbers."""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UnsupportedError(
            f"`optimizer.state_dict()` has the state of {len(self)} parameters here: what this rank updates, not the "
            "whole. To save it, call `trainer.save_checkpoint` or `accelerator.save_state` on all ranks, or "
            "`state_dict()` of the optimizer that `accelerator.prepare` has returned."
        )

    def copy(self) -> "_OwnState":
        return _OwnState(self)

    def __copy__(self) -> "_OwnState":
        return self.copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> "_OwnState":
        return _OwnState((key, deepcopy(value, memo)) for key, value in self.items())


def mark_own_states(optimizer: Optimizer) -> None:
    """From now on ``optimizer`` has the state of a part of its parameters, or of parts of them."""
    # Wrappers around another optimizer may have left `Optimizer.__init__` out.
    hooks = vars(optimizer).setdefault("_optimizer_state_dict_post_hooks", OrderedDict())
    if _mark not in hooks.values():
        optimizer.register_state_dict_post_hook(_mark)


def _mark(optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    return {**state, "state": _OwnState(state["state"])}
