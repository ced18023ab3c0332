"""Logger calls inside steps are recorded, and made after the step with real values.

``self.logger.experiment.add_scalar("x", loss, step)`` reads the value on rank 0 only, because other ranks have a dummy
experiment, so rank 0 would wait for them. It would also write once per microbatch. So while a step or a hook runs,
writing calls of a logger or its ``experiment`` are recorded, like ``self.log``
(:mod:`smp_strategy.integrations.lightning.logging`), and made afterwards with real values on every rank. Attributes
that do not write (``log_dir``, ``name``) are answered at once.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["merge_arguments", "noting"]

Noting = Callable[[Callable[..., Any], str], Callable[..., None]]

# Prefixes of the writing methods of Lightning's loggers and of their experiments.
_WRITES = ("log", "add_", "append", "extend", "track", "upload", "report", "write")
# Attribute of a patched logger that holds the recorder.
_NOTING = "_smp_noting"


@contextmanager
def noting(loggers: Iterable[Any], note: Noting) -> Iterator[None]:
    """Redirect writing calls of ``loggers`` while this is open.

    Args:
        loggers: the Trainer's loggers.
        note: gets a writing method and its name, and returns its replacement.
    """
    replaced = []
    for logger in loggers:
        # User code checks the logger's type, so its class is replaced by a subclass, not the object by a proxy.
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

    # No second base class: assigning `__class__` requires the same object layout.
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (kind,), {**names, "__getattribute__": __getattribute__})


class _Experiment:
    """Recording proxy of a logger's ``experiment``."""

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
    """Merge the arguments of all microbatches into those of one call; ``None`` if they cannot be merged.

    Floats are averaged, weighted by samples; tensors with an entry per sample are concatenated; everything else must be
    equal.

    Args:
        calls: nested arguments of each microbatch, with real tensors.
        sizes: number of samples of each microbatch.
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
