"""``self.log`` in steps: values of all microbatches are merged and logged once per batch, on every rank.

``self.log`` in a step would write a value per microbatch, and most pipeline ranks do not have the value yet. So, while
a step runs, ``self.log`` only records: the value travels through the step's return value, and the engine turns it into
a real tensor on every rank. Afterwards the records of all microbatches are merged and logged once, the same on every
rank, so that checkpoint and early-stopping decisions agree::

    microbatch 0   log("loss", 2.0)   log("acc", 0.5)  --.
    microbatch 1   log("loss", 4.0)   log("acc", 1.0)  --+->  log("loss", 3.0)   log("acc", 0.75)

Each microbatch of a step runs in a thread of its own, with its own records. Calls of loggers and ``self.print`` are
recorded in the same way. For metric objects see :mod:`smp_strategy.integrations.lightning.metric_values`.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from numbers import Number
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torchmetrics import Metric

from smp_strategy.engine.figures.inspection import is_placed
from smp_strategy.engine.join_results import StepArgument
from smp_strategy.integrations.lightning.metric_values import NotedMetric, ShareValue
from smp_strategy.model.patching import Patches, subclass_of

__all__ = ["merge_arguments", "noting", "DirectCall", "LogRecorder", "LoggedCall", "direct_calls", "merge_calls"]


# --- loggers ---------------------------------------------------------------------------------------------------------
# Logger calls inside steps are recorded, and made after the step with real values.
#
# `self.logger.experiment.add_scalar("x", loss, step)` reads the value on rank 0 only, because other ranks have a dummy
# experiment, so rank 0 would wait for them. It would also write once per microbatch. So while a step or a hook runs,
# writing calls of a logger or its `experiment` are recorded, like `self.log`
# (`smp_strategy.integrations.lightning.logging`), and made afterwards with real values on every rank. Attributes
# that do not write (`log_dir`, `name`) are answered at once.


Noting = Callable[[Callable[..., Any], str], Callable[..., None]]

# Prefixes of the writing methods of Lightning's loggers and of their experiments.
_WRITES = ("log", "add_", "append", "extend", "track", "upload", "report", "write")
# Attribute of a patched logger that holds the recorder.
_NOTING = "_smp_noting"


@contextmanager
def noting(loggers: Iterable[Any], note: Noting) -> Iterator[None]:
    """Redirect writing calls of ``loggers`` while this is open; ``note`` replaces a method, given with its name."""
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


def _noting_class(kind: type) -> Any:
    def __getattribute__(self: Any, name: str) -> Any:
        value = kind.__getattribute__(self, name)  # type: ignore[call-arg]
        if name == "experiment":
            return _Experiment(value, vars(self)[_NOTING])
        return vars(self)[_NOTING](value, name) if callable(value) and name.startswith(_WRITES) else value

    # No second base class: assigning `__class__` requires the same object layout.
    return subclass_of(kind, __getattribute__=__getattribute__)


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


# --- records ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LoggedCall:
    """One call of ``self.log`` without its value, which travels separately as a tensor."""

    name: str
    """The key."""
    flags: tuple[Any, ...] = ()
    """Positional arguments after the value (usually ``prog_bar``)."""
    options: dict[str, Any]
    """Named arguments."""
    is_weighted: bool = False
    """Whether the value follows from a loss whose means over samples are those of the batch."""


@dataclass(frozen=True, kw_only=True)
class DirectCall:
    """One call of a logger, or of ``self.print``; its arguments travel separately."""

    name: str
    """Identifies the call among those of the step."""
    function: Callable[..., Any]
    """The function to call; each rank has its own."""


Notes = tuple[list[LoggedCall | DirectCall], list[Any]]
Call = TypeVar("Call", LoggedCall, DirectCall)


class LogRecorder:
    """Records calls of ``module.log``, ``module.print`` and the loggers during a step.

    With ``tells_size`` values are logged with the number of samples in the step: Lightning counts those of this rank's
    batch. ``share`` broadcasts the value of a metric from its stage to all stages.
    """

    def __init__(
        self, module: nn.Module, *, tells_size: bool = False, share: ShareValue = lambda metric, value: value
    ) -> None:
        self._module = module
        self._tells_size = tells_size
        self._share = share
        self._log: Callable[..., None] = module.log  # type: ignore[assignment]
        self._print: Callable[..., None] = getattr(module, "print", print)
        self._notes = threading.local()

    def __deepcopy__(self, memo: Any) -> "LogRecorder":
        return self  # a copy of the module contains this in its `log`

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Record ``module.log``, ``module.log_dict`` (which calls it) and the others while this is open."""
        # On the instance, so that a `log` that the user overrides is called at replay only. A hook around this step may
        # have patched it already.
        with Patches() as patches, noting(getattr(self._module, "loggers", ()), self._noting):
            patches.put(self._module, "log", self._note)
            patches.put(self._module, "print", self._noting(self._print, "print"))
            yield

    @contextmanager
    def notes(self) -> Iterator[Notes]:
        """The calls of this thread, and their values, while this is open."""
        self._notes.current = ([], [])
        try:
            yield self._notes.current
        finally:
            del self._notes.current

    def replay(self, notes: Sequence[Notes], sizes: Sequence[int]) -> None:
        """Log the merged records of all microbatches; their values must be real tensors."""
        for call, value in merge_calls(notes, sizes):
            size = {"batch_size": sum(sizes)} if self._tells_size else {}
            if isinstance(value, NotedMetric):
                value = value.settle(self._share)
            self._log(call.name, value, *call.flags, **{**size, **call.options})
        for function, args, kwargs in direct_calls(notes, sizes):
            function(*args, **kwargs)

    def _noting(self, function: Callable[..., Any], name: str) -> Callable[..., None]:
        def note(*args: Any, **kwargs: Any) -> None:
            current = getattr(self._notes, "current", None)
            if current is None:
                function(*args, **kwargs)
                return
            told = [leaf for leaf in (*args, *kwargs.values()) if isinstance(leaf, str)]
            current[0].append(DirectCall(name=" ".join([name, *told]), function=function))
            current[1].append(pytree.tree_map(_as_it_is_now, (args, kwargs)))

        return note

    def _note(self, name: str, value: Any, *flags: Any, **options: Any) -> None:
        current = getattr(self._notes, "current", None)
        if current is None:  # a thread of the user's own
            self._log(name, value, *flags, **options)
            return
        calls, values = current
        is_weighted = is_placed(value) and value.is_weighted
        calls.append(LoggedCall(name=name, flags=flags, options=options, is_weighted=is_weighted))
        values.append(_as_it_is_now(value))


def _as_it_is_now(value: Any) -> Any:
    """Copy of a value, since the step may change a tensor in place or update a metric after logging it."""
    if isinstance(value, Metric):
        return NotedMetric.now(value)
    return value.detach().clone() if isinstance(value, Tensor) else value


def merge_calls(notes: Sequence[Notes], sizes: Sequence[int]) -> Iterator[tuple[LoggedCall, Any]]:
    """Yield one call per logged key and occurrence, in the order of first appearance; ``sizes`` count samples."""
    for members in _grouped(LoggedCall, notes, sizes):
        call = members[0][0]
        weights, batch_size = _weights(members, total=sum(sizes))
        options = {**call.options, "batch_size": batch_size} if batch_size is not None else call.options
        value = _merge_values([value for _, value, _ in members], weights, call.options.get("reduce_fx", "mean"))
        yield replace(call, options=options), value


def _grouped(kind: type[Call], notes: Sequence[Notes], sizes: Sequence[int]) -> Iterable[list[tuple[Call, Any, int]]]:
    """Groups of matching calls across microbatches, with value and microbatch size, in the order of appearance."""
    # The k-th call with a key in a microbatch matches the k-th one in the others.
    groups: dict[tuple[str, int], list[tuple[Call, Any, int]]] = {}
    for (calls, values), size in zip(notes, sizes, strict=True):
        seen: dict[str, int] = {}
        for call, value in zip(calls, values, strict=True):
            if isinstance(call, kind):
                occurrence = seen[call.name] = seen.get(call.name, -1) + 1
                groups.setdefault((call.name, occurrence), []).append((call, value, size))
    return groups.values()


def direct_calls(notes: Sequence[Notes], sizes: Sequence[int]) -> Iterator[tuple[Callable[..., Any], Any, Any]]:
    """Yield the calls of loggers with their arguments: one for all microbatches if these can be merged."""
    for members in _grouped(DirectCall, notes, sizes):
        merged = merge_arguments([value for _, value, _ in members], [size for _, _, size in members])
        for call, value, _ in members if merged is None else [(members[0][0], merged, 0)]:
            yield call.function, *value


def _weights(members: Sequence[tuple[LoggedCall, Any, int]], *, total: int) -> tuple[list[int], int | None]:
    """The weight of each microbatch, and the batch size of the merged value (``None``: not given)."""
    by_samples = [size for _, _, size in members]
    given = [call.options.get("batch_size") for call, _, _ in members]
    if None in given:
        return by_samples, None
    # A constant means the whole batch; a size computed in the step counts this microbatch.
    if all(batch_size == total for batch_size in given):
        return by_samples, total
    if any(call.is_weighted for call, _, _ in members):
        return by_samples, sum(given)  # type: ignore[arg-type]
    return given, sum(given)  # type: ignore[return-value, arg-type]


def _merge_values(values: list[Any], weights: Sequence[int], reduce_fx: Any) -> Any:
    if all(isinstance(value, NotedMetric) for value in values):
        return NotedMetric.merged(values)
    if len(values) == 1 or not isinstance(values[0], Tensor | Number):
        return values[0]
    if all(isinstance(value, StepArgument) for value in values):
        return values[0]  # the index of the batch
    name = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "")
    if name != "sum" and not isinstance(values[0], Tensor) and all(value == values[0] for value in values):
        return values[0]  # a learning rate: no rounding
    stacked = torch.stack([torch.as_tensor(value).reshape(()) for value in values])
    if name in ("sum", "min", "max"):
        return getattr(stacked, name)()
    if name not in ("mean", "avg"):
        return reduce_fx(stacked)
    if not stacked.is_floating_point():
        stacked = stacked.to(torch.get_default_dtype())
    weight = torch.tensor(weights, dtype=stacked.dtype, device=stacked.device)
    return (stacked * weight).sum() / weight.sum()
