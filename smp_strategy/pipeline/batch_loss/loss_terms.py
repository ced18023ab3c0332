"""Terms of a loss whose mean is over a number of elements that differs between microbatches, and their weights.

The loss of a batch is not the mean of its microbatches' losses if these are means over different numbers of elements.
Let a term have the sum S_i and the count C_i in microbatch i, which has n_i of the N samples. Losses of microbatches
are added up with the weights n_i / N, so with

    S_i / (C n_i / N)    instead of    S_i / C_i        (C: sum of all C_i)

the sum is S / C, the loss of the batch. ``C n_i / N`` is the *fair share* of microbatch i in C. Where every C_i is its
fair share nothing changes, not a bit.

Three kinds of calls are terms, if their count depends on the batch alone:

* ``cross_entropy`` and ``nll_loss``, whose count is that of the labels that are not ignored, or the sum of their class
  weights;
* other means, of what a mask has selected (``loss[mask].mean()``, ``mse_loss(x[mask], y[mask])``);
* the product or quotient of a tensor with a sum over the batch (``(loss * mask).sum() / mask.sum()``).
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor

from smp_strategy.pipeline.batch_loss.batch_record import BatchRecord, BatchValue
from smp_strategy.pipeline.placed_ops import operation_name
from smp_strategy.pipeline.placed_tensor import PlacedTensor

__all__ = [
    "PRODUCTS",
    "QUOTIENTS",
    "Divisor",
    "MeanOver",
    "Problem",
    "Selected",
    "Term",
    "as_sum",
    "is_mean",
    "selection_by",
    "term_of",
]

_ENTROPIES = (F.cross_entropy, F.nll_loss)
_MEANS = ("mean", "nanmean")
_WITH_REDUCTION = frozenset(
    each
    for name in dir(F)
    if callable(each := getattr(F, name)) and (name.endswith("_loss") or name.endswith(("entropy", "_logits", "div")))
)
QUOTIENTS = ("div", "div_", "true_divide", "true_divide_", "divide", "__truediv__", "__itruediv__")
PRODUCTS = (
    "mul",
    "mul_",
    "multiply",
    "__mul__",
    "__rmul__",
    "__imul__",
    "dot",
    "vdot",
    "inner",
    "matmul",
    "__matmul__",
    "__rmatmul__",
)
_SUMS: dict[str, Callable[..., Any]] = {"mean": torch.sum, "nanmean": torch.nansum}


class Selected(NamedTuple):
    """How the elements of a placed tensor were selected."""

    by: BatchValue | None
    """Mask, or indices that follow from one; ``None``: by something that is not of the batch."""


class Problem(NamedTuple):
    """A call on the way to the loss whose count is not known for the other microbatches."""

    call: str
    reason: str


@final
@dataclass(frozen=True)
class MeanOver:
    """A mean over elements of which the batch alone tells the number."""

    count: Callable[..., Any]
    """Returns the number of elements, from values of ``over``."""
    over: tuple[Any, ...]
    """Arguments of ``count``; recorded ones are computed for each microbatch."""
    measured: Callable[[Sequence[Any], dict[str, Any]], Any]
    """Returns something proportional to the number, from the arguments of the real call."""

    def count_in(self, record: BatchRecord, microbatch: int) -> Any:
        values = [record.value(each, microbatch) if isinstance(each, BatchValue) else each for each in self.over]
        return self.count(*values)


@final
@dataclass(frozen=True)
class Divisor:
    """A factor or divisor that a sum or mean over the samples has gone into."""

    place: int
    """Number of the argument."""
    value: BatchValue


Term = MeanOver | Divisor


def term_of(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    record: BatchRecord,
    selections: dict[int, Selected],
) -> Term | Problem | None:
    """Find out whether a call of the glue is a term; ``selections`` are by the number of the selected value."""
    name = operation_name(function)
    if name in QUOTIENTS or name in PRODUCTS:
        return _divisor(name, args, record)
    if function in _ENTROPIES:
        return _entropy(function, name, args, kwargs, record, selections)
    if is_mean(function, args, kwargs):
        return _mean(name, [*args, *kwargs.values()], record, selections)
    return None


def is_mean(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a call takes a mean."""
    if operation_name(function) in _MEANS:
        return True
    return function in _WITH_REDUCTION and _reduction(function, args, kwargs) in ("mean", "batchmean")


def _divisor(name: str, args: Sequence[Any], record: BatchRecord) -> Term | Problem | None:
    is_quotient = name in QUOTIENTS
    for place in (1,) if is_quotient else (0, 1):
        found = record.find(args[place]) if len(args) > place else None
        if found is None or not found.facts.reduces:
            continue
        if not found.facts.is_whole or (found.facts.degree > 0 and not is_quotient):
            return None
        if not found.is_known:
            return Problem(name, "the number by which it divides is not made of the batch alone")
        return Divisor(place, found)
    return None


def _entropy(
    function: Callable[..., Any],
    name: str,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    record: BatchRecord,
    selections: dict[int, Selected],
) -> Term | Problem | None:
    given = _bound(function, args, kwargs)
    if _reduction(function, args, kwargs) != "mean":
        return None
    target, weight = given["target"], given.get("weight")
    ignored = given.get("ignore_index", -100)
    varies = weight is not None or ignored != -100
    if isinstance(target, PlacedTensor) or isinstance(weight, PlacedTensor):
        if varies:
            return Problem(name, "its labels or class weights are not of the batch alone")
        return _mean(name, [given["input"], target], record, selections)
    if target.is_floating_point():
        return _mean(name, [given["input"], target], record, selections)
    found = record.find(target)
    if found is None:
        return Problem(name, "its labels are not of the batch") if varies else None
    if found.entry < 0:
        return Problem(name, "its labels are not made by operations on tensors of the batch alone")
    if not found.facts.is_whole:
        return None  # of one sample
    count, more = (_num_labels, (ignored,)) if weight is None else (_weight_of_labels, (ignored, weight))

    def measured(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return count(args[1] if len(args) > 1 else kwargs["target"], *more)

    return MeanOver(count, (found, *more), measured)


def _mean(
    name: str, given: Sequence[Any], record: BatchRecord, selections: dict[int, Selected]
) -> Term | Problem | None:
    for each in given:
        by: BatchValue | None = None
        if isinstance(each, PlacedTensor):
            selected = selections.get(each.value.id)
            if selected is None:
                continue
            if selected.by is None:
                return Problem(name, "what it is taken over is selected by values of the model")
            by = selected.by
        elif isinstance(each, Tensor):
            by = record.find(each)
            by = by if by is not None and by.facts.selects else None
        if by is not None and not by.facts.is_whole and by.entry >= 0:
            return None  # of one sample
        if by is not None and by.is_known:
            return MeanOver(_num_selected, (by,), _num_elements)
        if by is not None:
            return Problem(name, "what it is taken over is not selected by tensors of the batch alone")
    return Problem(name, "how many values are NaN is not known beforehand") if name == "nanmean" else None


def _reduction(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    if "reduction" in kwargs:
        return str(kwargs["reduction"])
    if kwargs.get("reduce") is not None or kwargs.get("size_average") is not None:
        return "none" if kwargs.get("reduce") is False else "sum" if kwargs.get("size_average") is False else "mean"
    parameters = _signature(function).parameters
    if "reduction" not in parameters:
        return ""
    place = list(parameters).index("reduction")
    return str(args[place]) if len(args) > place else str(parameters["reduction"].default)


def _bound(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    return _signature(function).bind(*args, **kwargs).arguments


_signature = functools.lru_cache(maxsize=128)(inspect.signature)


def _num_elements(args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    return max(each.numel() for each in (*args, *kwargs.values()) if isinstance(each, Tensor))


def _num_labels(target: Tensor, ignored: int) -> Tensor:
    return (target != ignored).sum()


def _weight_of_labels(target: Tensor, ignored: int, weight: Tensor) -> Tensor:
    kept = target[target != ignored]
    return weight[kept].double().sum()


def _num_selected(selector: Tensor) -> Any:
    return selector.sum() if selector.dtype in (torch.bool, torch.uint8) else len(selector)


def selection_by(
    function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], record: BatchRecord
) -> Selected | None:
    """How the call of ``function`` selects elements of placed tensors, if it does so by values."""
    name = operation_name(function)
    if name in ("nonzero", "argwhere", "unique"):
        return Selected(None)
    if name not in ("__getitem__", "masked_select"):
        return None
    index = args[1] if len(args) > 1 else kwargs.get("mask")
    for each in index if isinstance(index, tuple) else (index,):
        found = record.find(each) if isinstance(each, Tensor) else None
        if found is not None and found.facts.selects:
            return Selected(found)
        if isinstance(each, Tensor) and each.dtype in (torch.bool, torch.uint8):
            return Selected(found)
    return None


def as_sum(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call ``function``, a mean, as the sum."""
    name = operation_name(function)
    if name in _SUMS:
        return _SUMS[name](args[0])
    parameters = list(_signature(function).parameters)
    place = parameters.index("reduction")
    if len(args) > place:
        return function(*args[:place], "sum", *args[place + 1 :], **kwargs)
    return function(*args, **{**kwargs, "reduction": "sum", "size_average": None, "reduce": None})
