"""Optimizer state of a parameter, converted between the whole parameter and the piece that a rank updates.

``optimizer.state[parameter]`` is a mapping, possibly with lists or mappings in it. Of its tensors some have one value
per element and are cut like the parameter (moments); others are scalars (numbers of steps), which are equal on all
ranks and are copied, with everything that is no tensor. Other tensors (the rows of Adafactor) cannot be cut::

    parameter 5 x 7             piece of 12 elements
    mean      5 x 7     <->     mean       12
    step      ()        <->     step       ()

Shapes tell which is which, unless there is one element only. Then names decide, for which a twin of the optimizer is
probed: for a stand-in of seven elements a moment has seven.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, NoReturn, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from smp_strategy.data_parallel.optimizer_probe import take_step, twin_of, with_inner
from smp_strategy.distributed.door_words import door_words
from smp_strategy.errors import UnsupportedError

__all__ = [
    "cut_state",
    "has_one_per_element",
    "kept_per_element",
    "FullOptimizerState",
    "mark_own_states",
]


_STAND_IN = 7
# Some entries appear later than in the first step: an average over every fifth, say.
NUM_STEPS = 12


def kept_per_element(optimizer: Optimizer, parameter: Tensor) -> dict[str, bool]:
    """Whether each state tensor, by name, has one value per element.

    The result holds for all parameters with the same options, number of dims and dtype. Only for optimizers that can
    update pieces (:mod:`smp_strategy.data_parallel.optimizer_checks`).
    """
    stand_in = nn.Parameter(torch.ones(_STAND_IN, dtype=parameter.dtype))
    twin = twin_of(optimizer, parameter, stand_in)
    for _ in range(NUM_STEPS):
        stand_in.grad = torch.ones_like(stand_in)
        take_step(twin)
    named = _named(twin.state.get(stand_in, {}))
    return {name: leaf.shape == stand_in.shape for name, leaf in named if isinstance(leaf, Tensor)}


def cut_state(
    state: Any, shape: Sequence[int], cut: Callable[[Tensor], Tensor], per_element: Mapping[str, bool]
) -> Any:
    """State of a piece, cut from that of the whole parameter.

    Args:
        state: State of the whole parameter; it is not changed.
        shape: Shape of the parameter.
        cut: Returns the piece of a tensor of this shape, which may have other strides than the parameter: some states
            are copies of gradients.
        per_element: Result of :func:`kept_per_element`.

    Raises:
        UnsupportedError: a tensor has neither one value per element nor one at all.
    """

    def changed(name: str, leaf: object) -> object:
        if isinstance(leaf, Tensor) and has_one_per_element(name, leaf, shape, per_element):
            return cut(leaf).clone()  # it must not keep the whole alive
        return leaf

    _, structure = pytree.tree_flatten(state)
    return pytree.tree_unflatten([changed(name, leaf) for name, leaf in _named(state)], structure)


def has_one_per_element(name: str, leaf: Tensor, shape: Sequence[int], per_element: Mapping[str, bool]) -> bool:
    """Whether a state tensor of a parameter, or of a piece of one, has a value for each of its elements.

    Args:
        name: Name of the tensor in the state.
        leaf: The tensor.
        shape: Shape of the parameter, or of the piece.
        per_element: Result of :func:`kept_per_element`; used if shapes do not tell.

    Raises:
        UnsupportedError: it has neither one value per element nor one at all.
    """
    # A tensor of unknown name that has dims is a moment rather than a number of steps.
    if tuple(leaf.shape) == tuple(shape) and (leaf.numel() != 1 or per_element.get(name, leaf.ndim > 0)):
        return True
    if leaf.numel() != 1:
        raise UnsupportedError(
            f"The optimizer's state has `{name}` of shape {list(leaf.shape)} for what is of shape {list(shape)}. "
            "Pieces of parameters (`sharded_data_parallel_degree`) need one value per element. Use "
            "`shard_optimizer_state=True` with an optimizer that keeps something else; if it does not, this state "
            "is of another model or of another optimizer."
        )
    return False


def _named(state: Any) -> list[tuple[str, object]]:
    """Leaves of ``state``, named by their path: ``mean``, ``averages.0``."""
    found, _ = pytree.tree_flatten_with_path(state)
    return [
        (".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path), leaf) for path, leaf in found
    ]


# --- full state for hooks --------------------------------------------------------------------------------------------
# Full optimizer state for the user's hooks, although each rank holds a part of it.
#
# `optimizer.state[p]` goes with `p`: a hook that sees `p` whole, and the parameters of all stages, also finds whole
# moments, on every rank. While hooks run, optimizers have a class that notices access to their state; only then it is
# gathered, and after the hook each rank keeps its share of the possibly changed state. All ranks run the same code on
# the same values, so nothing is sent back. Scripts can look at the state outside of hooks as well, until the library
# needs the shares.
#
# An optimizer's own `state_dict()` contains the state that this rank updates: a part, which must not pass for the whole
# in a file. Code may read it, copy it and load it again (to undo an update, say). Pickling is refused, and with it
# `torch.save`.


@final
class FullOptimizerState:
    """Shows optimizers with their full state while hooks run.

    Args:
        optimizers: Returns the optimizers that train the module now.
        gather: Gathers the full state of an optimizer on every rank; collective. ``None``: every rank has it.
        keep_share: Reduces the full state of an optimizer to this rank's share.
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
        # Real class of each optimizer that is watched.
        self._watched: dict[Optimizer, type[Optimizer]] = {}
        self._kinds: dict[type[Optimizer], type[Optimizer]] = {}
        # This rank's shares of states that are shown in full.
        self._shares: dict[Optimizer, Any] = {}

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Context in which the state of optimizers is full from its first use on."""
        self._close()
        self._open()
        try:
            yield
        finally:
            self._close()

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Context in which it is this rank's share, inside of :meth:`shown` or not."""
        was_open = self._is_open
        self._close()
        try:
            yield
        finally:
            if was_open:
                self._open()

    def look_at(self, optimizer: Optimizer) -> Any:
        """Full state of ``optimizer``, until the next :meth:`hidden`. Collective."""
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
        """Subclass of ``kind`` that notices access to its state."""
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
    """Copy the content of ``found`` into ``share``, in place where it fits."""
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
    """State of the parameters that this rank updates, by their numbers; cannot be pickled."""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        words = door_words()
        raise UnsupportedError(
            f"`optimizer.state_dict()` has the state of {len(self)} parameters here: what this rank updates, not the "
            f"whole. To save it, call {words.save_all} on all ranks{words.whole_state}."
        )

    def copy(self) -> "_OwnState":
        return _OwnState(self)

    def __copy__(self) -> "_OwnState":
        return self.copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> "_OwnState":
        return _OwnState((key, deepcopy(value, memo)) for key, value in self.items())


def mark_own_states(optimizer: Optimizer) -> None:
    """Make the ``state_dict()`` of ``optimizer``, whose state is a part of the whole, refuse to be pickled."""
    # Wrappers around another optimizer may have left `Optimizer.__init__` out.
    hooks = vars(optimizer).setdefault("_optimizer_state_dict_post_hooks", OrderedDict())
    if _mark not in hooks.values():
        optimizer.register_state_dict_post_hook(_mark)


def _mark(optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    return {**state, "state": _OwnState(state["state"])}
