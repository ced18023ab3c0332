"""Calls of loggers inside steps: noted, and made once the values are known.

``self.logger.experiment.add_scalar("x", loss, step)`` reads a value on rank 0 only: on the other ranks Lightning hands
out a dummy, and rank 0 would wait for them. And it would write as often as there are microbatches. So while a step or
a hook runs, what writes through a logger or its ``experiment`` is only noted, like ``self.log`` (:mod:`.logs`), and
is called afterwards with real values on every rank. What does not write (``log_dir``, ``name``) is answered at once.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["merge_arguments", "noting"]

Noting = Callable[[Callable[..., Any], str], Callable[..., None]]

# How the writing methods of the loggers that Lightning knows, and of their experiments, begin.
_WRITES = ("log", "add_", "append", "extend", "track", "upload", "report", "write")
# Where a logger's stand-in finds who takes notes.
_NOTING = "_smp_noting"


@contextmanager
def noting(loggers: Iterable[Any], note: Noting) -> Iterator[None]:
    """While this is open, calls that write through ``loggers`` go to what ``note`` makes of them.

    Args:
        loggers: the Trainer's.
        note: gets a writing method and its name, and returns what is called in its place.
    """
    replaced = []
    for logger in loggers:
        # Users ask for the logger's type, so it is the class that is replaced and not the object.
        if _NOTING not in vars(logger):
            replaced.append((logger, type(logger)))
            vars(logger)[_NOTING] = note
            logger.__class__ = _noting_class(type(logger))
    try:
        yield
    finally:
        for logger, kind in replaced:
            logger.__class__ = kind
            del vars(logger)[_NOTING]


def _noting_class(kind: type) -> type:
    def __getattribute__(self: Any, name: str) -> Any:
        value = kind.__getattribute__(self, name)  # type: ignore[call-arg]
        if name == "experiment":
            return _Experiment(value, vars(self)[_NOTING])
        return vars(self)[_NOTING](value, name) if callable(value) and name.startswith(_WRITES) else value

    # No second base class: the objects of the new class must be laid out like those of the old one.
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (kind,), {**names, "__getattribute__": __getattribute__})


class _Experiment:
    """Stands in for a logger's ``experiment``, whatever that is."""

    def __init__(self, real: Any, note: Noting) -> None:
        self._real = real
        self._note = note

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._real)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._real, name)
        return self._note(value, name) if callable(value) and name.startswith(_WRITES) else value

    def __getitem__(self, key: Any) -> Any:
        return _Experiment(self._real[key], self._note)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._note(self._real.__setitem__, "__setitem__")(key, value)


def merge_arguments(calls: Sequence[Any], sizes: Sequence[int]) -> Any | None:
    """One call's arguments made of those of the microbatches; ``None`` if they do not go together.

    Numbers with a fraction are averaged, weighted by samples; tensors with an entry per sample are put together;
    everything else must be equal.

    Args:
        calls: a nest of arguments per microbatch, with real tensors.
        sizes: samples of each microbatch.
    """
    flat = [pytree.tree_flatten(arguments) for arguments in calls]
    structure = flat[0][1]
    if any(other != structure for _, other in flat):
        return None
    merged = [_merge_leaves(column, sizes) for column in zip(*(leaves for leaves, _ in flat), strict=True)]
    if any(result is None for result in merged):
        return None
    return pytree.tree_unflatten([result[0] for result in merged if result], structure)


def _merge_leaves(leaves: Sequence[Any], sizes: Sequence[int]) -> tuple[Any] | None:
    first = leaves[0]
    if all(isinstance(leaf, Tensor) for leaf in leaves):
        if all(leaf.ndim and len(leaf) == size for leaf, size in zip(leaves, sizes, strict=True)):
            return (torch.cat(list(leaves)),)
        if all(leaf.ndim == 0 and leaf.is_floating_point() for leaf in leaves):
            weights = torch.tensor(sizes, dtype=first.dtype, device=first.device)
            return ((torch.stack(list(leaves)) * weights).sum() / weights.sum(),)
        return (first,) if all(leaf.shape == first.shape and torch.equal(leaf, first) for leaf in leaves) else None
    if any(type(leaf) is not type(first) for leaf in leaves) or isinstance(first, Tensor):
        return None
    if all(leaf is first or leaf == first for leaf in leaves):
        return (first,)
    if isinstance(first, float):
        return (sum(leaf * size for leaf, size in zip(leaves, sizes, strict=True)) / sum(sizes),)
    return None
