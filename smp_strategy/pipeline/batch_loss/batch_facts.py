"""Facts about tensors that a step computes from its batch: how they cover the samples, and how they grow with them.

They follow from the operations alone. A sum over all samples grows with the batch (degree 1), a mean does not
(degree 0), and a quotient of two sums does not either. A part for some of the samples only (``labels[0]``) says nothing
about the batch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor

__all__ = ["RANDOM", "Facts", "facts_of", "reduction_of"]

RANDOM = frozenset(
    {
        *("rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial", "poisson", "dropout"),
        *("rand_like", "randn_like", "randint_like", "binomial", "rrelu", "gumbel_softmax"),
        *("random_", "uniform_", "normal_", "bernoulli_", "exponential_", "geometric_", "cauchy_", "log_normal_"),
    }
)
"""Names of operations that draw random numbers."""

_SUMS = ("sum", "nansum", "count_nonzero")
_MEANS = ("mean", "nanmean")
_QUOTIENTS = ("div", "true_divide", "divide", "floor_divide", "__truediv__", "__floordiv__")
_SAME_SHAPE_VIEWS = ("view", "reshape", "flatten", "view_as", "reshape_as")
_PARTS = ("select", "narrow", "unbind", "split", "chunk", "tensor_split", "__iter__", "split_with_sizes")


@final
@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about a tensor."""

    dim: int | None = None
    """Dim of the samples; ``None``: there is none of its own."""
    is_whole: bool = True
    """Whether it has the values of all samples, or a number for all of them together."""
    degree: float = 0.0
    """Power of the number of samples with which its values grow."""
    reduces: bool = False
    """Whether a sum or mean over all samples has gone into it."""
    selects: bool = False
    """Whether its size depends on values of the batch."""


def reduction_of(name: str) -> str:
    """``"sum"`` or ``"mean"`` for an operation that reduces; else empty."""
    return "sum" if name in _SUMS else "mean" if name in _MEANS else ""


def facts_of(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], given: Sequence[tuple[Tensor, Facts]], made: Tensor
) -> Facts:
    """Facts about the result of an operation."""
    source, facts = max(given, key=lambda each: each[0].ndim)
    all_facts = [each for _, each in given]
    rule = _RULES.get(name)
    if rule is not None:
        found = rule(name, args, kwargs, source, facts, made)
        is_whole = found.is_whole and all(each.is_whole for each in all_facts)
        return replace(found, is_whole=is_whole, selects=found.selects or any(each.selects for each in all_facts))
    degree = max((each.degree for each in all_facts), key=abs)
    if name in ("mul", "__mul__", "__rmul__", "multiply"):
        degree = sum(each.degree for each in all_facts)
    if name in _QUOTIENTS:
        degree = _degree_of_quotient(args, given)
    if name in ("reciprocal", "__rtruediv__", "__rdiv__"):
        degree = -degree
    return Facts(
        dim=facts.dim if made.ndim == source.ndim else None,
        is_whole=all(each.is_whole for each in all_facts),
        degree=degree,
        reduces=any(each.reduces for each in all_facts),
        selects=any(each.selects for each in all_facts),
    )


def _degree_of_quotient(args: Sequence[Any], given: Sequence[tuple[Tensor, Facts]]) -> float:
    of = {id(tensor): facts.degree for tensor, facts in given}
    above, below = (of.get(id(each), 0.0) for each in args[:2])
    return above - below


def _reduced(name: str, args: Any, kwargs: Any, source: Tensor, facts: Facts, made: Tensor) -> Facts:
    degree = facts.degree + (reduction_of(name) == "sum")
    if made.ndim == 0:
        return Facts(is_whole=facts.is_whole, degree=degree, reduces=True)
    dims = kwargs.get("dim", args[1] if len(args) > 1 else None)
    reduced = [dims] if isinstance(dims, int) else list(dims or ())
    if facts.dim is None or not all(isinstance(each, int) for each in reduced):
        return replace(facts, dim=None, is_whole=False)
    reduced = [each % source.ndim for each in reduced]
    if facts.dim in reduced:  # one number for each column, say: a part of the samples as far as is known here
        return replace(facts, dim=None, is_whole=False)
    kept = bool(kwargs.get("keepdim", args[2] if len(args) > 2 else False))
    return replace(facts, dim=facts.dim if kept else facts.dim - sum(each < facts.dim for each in reduced))


def _viewed(name: str, args: Any, kwargs: Any, source: Tensor, facts: Facts, made: Tensor) -> Facts:
    is_kept = facts.dim == 0 and made.ndim > 0 and made.shape[0] == source.shape[0]
    return facts if is_kept else replace(facts, dim=None)


def _swapped(name: str, args: Any, kwargs: Any, source: Tensor, facts: Facts, made: Tensor) -> Facts:
    if facts.dim is None:
        return facts
    pair = [each for each in (*args[1:], *kwargs.values()) if isinstance(each, int)] or [0, 1]
    first, second = (each % source.ndim for each in pair[:2]) if source.ndim > 1 else (0, 0)
    return replace(facts, dim={first: second, second: first}.get(facts.dim, facts.dim))


def _permuted(name: str, args: Any, kwargs: Any, source: Tensor, facts: Facts, made: Tensor) -> Facts:
    dims = kwargs.get("dims", args[1] if len(args) == 2 else args[1:])
    order = [each % source.ndim for each in dims]
    return replace(facts, dim=None if facts.dim is None else order.index(facts.dim))


def _taken(name: str, args: Any, kwargs: Any, source: Tensor, facts: Facts, made: Tensor) -> Facts:
    """Parts along a dim, the first one by default; of the samples' own dim they are not whole."""
    numbers = [each for each in args[1:] if isinstance(each, int)]
    dim = kwargs.get("dim", 0 if name in ("unbind", "__iter__") else numbers[0] if name in ("select", "narrow") else 0)
    if name in ("unbind", "split", "chunk", "tensor_split", "split_with_sizes") and "dim" not in kwargs:
        place = 1 if name == "unbind" else 2
        dim = args[place] if len(args) > place else 0
    if facts.dim is None or not isinstance(dim, int) or dim % source.ndim == facts.dim:
        return replace(facts, dim=None, is_whole=False)
    drops = made.ndim < source.ndim and dim % source.ndim < facts.dim
    return replace(facts, dim=facts.dim - drops)


def _indexed(name: str, args: Any, kwargs: Any, source: Tensor, facts: Facts, made: Tensor) -> Facts:
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    if any(isinstance(each, Tensor) for each in index):
        has_mask = any(isinstance(each, Tensor) and each.dtype in (torch.bool, torch.uint8) for each in index)
        return replace(facts, dim=None, selects=facts.selects or has_mask)
    # Without a dim of their own, the samples may be in any; a row may then be that of one sample.
    own = 0 if facts.dim is None else facts.dim
    position = dim = 0
    for entry in _entries_of(index, source.ndim):
        if entry is not None and position == own and entry != slice(None):
            return replace(facts, dim=None, is_whole=False)
        if entry is not None and position == own:
            return replace(facts, dim=None if facts.dim is None else dim)
        dim += entry is None or isinstance(entry, slice)
        position += entry is not None
    return facts


def _selected(name: str, args: Any, kwargs: Any, source: Tensor, facts: Facts, made: Tensor) -> Facts:
    return replace(facts, dim=None, selects=True)


def _entries_of(index: Sequence[Any], ndim: int) -> list[Any]:
    """``index`` with an entry for each dim, and ``None`` for new ones."""
    has_ellipsis = any(each is Ellipsis for each in index)
    missing, found = ndim - sum(each is not None for each in index) + has_ellipsis, list[Any]()
    for each in index:
        found += [slice(None)] * missing if each is Ellipsis else [each]
    return found if has_ellipsis else found + [slice(None)] * missing


_Rule = Callable[[str, Any, Any, Tensor, Facts, Tensor], Facts]
_RULES: Mapping[str, _Rule] = {
    **dict.fromkeys((*_SUMS, *_MEANS), _reduced),
    **dict.fromkeys(_SAME_SHAPE_VIEWS, _viewed),
    **dict.fromkeys(("T", "mT", "t", "transpose", "swapaxes", "swapdims"), _swapped),
    "permute": _permuted,
    **dict.fromkeys(_PARTS, _taken),
    "__getitem__": _indexed,
    **dict.fromkeys(("masked_select", "nonzero", "argwhere", "unique"), _selected),
}
