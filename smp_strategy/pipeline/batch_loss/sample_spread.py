"""How the samples of a microbatch are spread over a tensor of the glue, and whether its elements mix them.

A loss counts each sample for itself if it adds up numbers of single samples. It does not if it computes with several
samples at once: with products of samples (``x @ y.T``), with functions of a sum over samples (a class mean, a
correlation), or with functions that look along the samples (``logsumexp(0)``). Both follow from shapes and operations:
a tensor has *dims of samples*, and a tensor that has lost them in a sum is *mixed*. Sums, views and scaling are linear,
so a mixed tensor may go through them up to the loss.

Rules are for operations that are known to do so. Where one is not known, nothing is claimed of its result.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, final

import torch
import torch.nn.functional as F
from torch import Tensor

from smp_strategy.pipeline.batch_loss.sample_order import are_numbers, change_of_order, entries_of

__all__ = ["Mixing", "Spread", "spread_of", "unit_spread_of"]


@final
@dataclass(frozen=True, slots=True)
class Spread:
    """How samples are spread over a tensor."""

    dims: frozenset[int] = frozenset()
    """Dims along which there are samples; with two of them, each element belongs to a pair."""
    mixed: Literal["", "sum", "pairs"] = ""
    """What its elements are: of one sample, sums over samples, or products and differences of two samples."""
    trains: bool = False
    """Whether it has a gradient."""
    origin: str = ""
    """Call that has made pairs, for messages."""
    num: int = 0
    """Number of samples along a dim, if each has one place there; else 0."""
    order: str | None = ""
    """Which samples are along that dim: empty for those of the microbatch in their order; ``None``: unknown."""


@final
class Mixing(Exception):
    """An operation computes with several samples at once."""

    def __init__(self, what: str, origin: str = "") -> None:
        super().__init__(what)
        self.what, self.origin = what, origin


Of = Callable[[Any], Spread | None]
"""Spread of a tensor; ``None``: nothing is known, or it has no samples."""

_ADDITIONS = frozenset(
    {
        *("add", "sub", "subtract", "rsub", "neg", "negative", "positive", "where", "masked_fill", "dropout", "add_"),
        *("sub_", "__add__", "__radd__", "__iadd__", "__sub__", "__rsub__", "__isub__", "__neg__", "masked_fill_"),
        *("to", "float", "double", "half", "bfloat16", "type", "type_as", "clone", "contiguous", "detach"),
        *("nan_to_num", "requires_grad_", "cpu", "cuda", "tril", "triu", "real", "conj", "resolve_conj", "data"),
    }
)
_PRODUCTS = frozenset({"mul", "multiply", "__mul__", "__rmul__", "__imul__", "mul_"})
_QUOTIENTS = frozenset({"div", "div_", "true_divide", "divide", "__truediv__", "__itruediv__"})
_SUMS = frozenset({"sum", "mean", "nansum", "nanmean", "cumsum"})
_SAME = ("view", "reshape", "flatten", "unflatten", "squeeze", "view_as", "reshape_as", "ravel")
_SWAPS = ("t", "T", "mT", "H", "mH", "transpose", "swapaxes", "swapdims")
_EXPANDS = ("expand", "expand_as", "broadcast_to", "repeat", "tile", "flip", "roll")
_PIECES = ("chunk", "split", "tensor_split", "split_with_sizes", "narrow", "index_select", "gather", "take_along_dim")
_WITH_ADDEND = ("addmm", "baddbmm", "addmv")
_MATRICES = frozenset({"matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "linear", "mv", "dot", "inner", "einsum"})
_MATRICES |= {*_WITH_ADDEND}
_OF_IMAGES = ("conv", "conv_transpose", "max_pool", "avg_pool", "adaptive_max_pool", "adaptive_avg_pool")
_DIMS_STAY = (
    *("embedding", "one_hot", "pad", "interpolate", "layer_norm", "group_norm", "pixel_shuffle"),
    *(f"{kind}{num}d" for kind in _OF_IMAGES for num in (1, 2, 3)),
)
_VIEWS = frozenset(
    {*_SAME, *_SWAPS, *_EXPANDS, *_PIECES, "unsqueeze", "permute", "movedim", "moveaxis", "masked_select"}
)
_VIEWS |= {"select", "unbind", "__iter__", "__getitem__", "repeat_interleave", "cat", "concat", "concatenate", "stack"}
_JOINS = frozenset({"cat", "concat", "concatenate", "stack"})
_SCATTERS = ("index_add", "index_add_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_")
_DIAGONALS = frozenset({"diag", "diagonal", "trace"})
_LINEAR = _ADDITIONS | _SUMS | _VIEWS | _DIAGONALS
# Functions that look along a dim, with the place of the dim among the arguments and its default.
_ALONG: Mapping[str, tuple[int, int | None]] = {
    **dict.fromkeys(("softmax", "log_softmax", "logsumexp", "prod", "amax", "amin", "max", "min", "median"), (1, None)),
    **dict.fromkeys(("std", "var", "std_mean", "var_mean", "cummax", "cumprod", "logcumsumexp"), (1, None)),
    **dict.fromkeys(("norm", "linalg_norm", "vector_norm", "linalg_vector_norm", "quantile"), (2, None)),
    **dict.fromkeys(("sort", "argsort"), (1, -1)),
    **dict.fromkeys(("topk", "kthvalue", "diff"), (2, -1)),
    **{"normalize": (2, 1), "cosine_similarity": (2, 1), "gumbel_softmax": (4, -1)},
}
_OF_ALL = frozenset({"pdist", "corrcoef", "cov", "matrix_norm", "linalg_matrix_norm", "svd", "linalg_svd"})
_OF_ALL |= {"svdvals", "linalg_svdvals"}


def spread_of(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], made: Tensor, of: Of, number: int = 0
) -> Spread | None:
    """Spread of the result of an operation of the glue.

    Raises:
        Mixing: it computes with several samples at once.
    """
    given = [(each, spread) for each in _tensors((*args, *kwargs.values())) if (spread := of(each)) is not None]
    if not given:
        return None
    others = _have_other_samples(name, args, kwargs, given)
    if made.requires_grad:
        _refuse_mixed(name, args, kwargs, given, of)
        if others and name not in _LINEAR:
            raise Mixing("computes with each sample and another one")
    found = _rule(name)(name, args, kwargs, made, of)
    if found is not None:
        num, order = max(spread.num for _, spread in given), _order(name, args, kwargs, given, number)
        found = replace(found, num=num, order=order)
    if found is None or not made.requires_grad:
        # Numbers without a gradient are constants of the loss: a running mean, a mask.
        return None if found is None else replace(found, mixed="", trains=False)
    kinds = {found.mixed, *(spread.mixed for _, spread in given)} | ({"sum"} if others else set())
    if name in _DIAGONALS:
        kinds -= {"pairs"}
    mixed: Literal["", "sum", "pairs"] = "pairs" if "pairs" in kinds or len(found.dims) > 1 else "sum"
    origin = next((spread.origin for _, spread in given if spread.origin), "") if mixed == "pairs" else ""
    return replace(found, mixed=mixed if len(found.dims) > 1 or kinds - {""} else "", trains=True, origin=origin)


def unit_spread_of(made: Tensor, given: Sequence[tuple[Tensor, Spread]]) -> Spread | None:
    """Spread of a result of a unit, which keeps its samples apart, from its arguments with a spread."""
    dims = [(each, next(iter(spread.dims))) for each, spread in given if len(spread.dims) == 1]
    for each, dim in sorted(dims, key=lambda pair: pair[0].shape != made.shape):
        is_kept = made.ndim > dim and made.shape[dim] == each.shape[dim]
        if is_kept or (dim == 0 and made.ndim and each.shape[0] and made.shape[0] % each.shape[0] == 0):
            orders = {spread.order for _, spread in given}
            order = orders.pop() if len(orders) == 1 else None
            num = max(spread.num for _, spread in given)
            return Spread(frozenset({dim}), trains=made.requires_grad, num=num, order=order)
    return None


def _have_other_samples(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], given: Sequence[tuple[Tensor, Spread]]
) -> bool:
    """Whether an operation on elements, or a join along another dim, puts different samples together."""
    if name in _JOINS:
        dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
        if name == "stack" or any(dim % each.ndim in spread.dims for each, spread in given):
            return False
    elif _rule(name) not in (_broadcast, _loss, _compared):
        return False
    orders = {spread.order for _, spread in given if spread.dims}
    return len(orders) > 1 and None not in orders


def _order(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], given: Sequence[tuple[Tensor, Spread]], number: int
) -> str | None:
    """Which samples are along the dim of samples of a result."""
    orders = {spread.order for _, spread in given}
    order = orders.pop() if len(orders) == 1 else None
    source, spread = given[0]
    if name in _JOINS and len(given) > 1:
        return order if name == "stack" or source.ndim == 1 else None
    if len(spread.dims) != 1:
        return order
    (dim,) = spread.dims
    change = change_of_order(name, args, kwargs, source, dim, number)
    if not change:
        return order if change == "" else None
    # A place is one sample only where there are as many places as samples.
    return change if order == "" and spread.num == source.shape[dim] else None


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    for each in values:
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, (tuple, list)):
            yield from (item for item in each if isinstance(item, Tensor))


def _refuse_mixed(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], given: Sequence[tuple[Tensor, Spread]], of: Of
) -> None:
    """Refuse functions of mixed tensors that are not linear, and those that look along the samples."""
    training = [(each, spread) for each, spread in given if spread.trains]
    mixed = [spread for _, spread in training if spread.mixed]
    if name in _OF_ALL and any(spread.dims for _, spread in training):
        raise Mixing("computes with all samples of its argument at once")
    if name in _ALONG:
        for each, spread in training:
            if spread.dims & _dims_along(name, args, kwargs, each):
                raise Mixing("looks along the samples")
    if name in _SUMS and any(spread.mixed == "pairs" for spread in mixed):
        source, spread = training[0]
        if spread.dims & _dims_of_sum(args, kwargs, source):
            raise Mixing("adds up pairs of samples", spread.origin)
        return
    if not mixed or _is_linear(name, args, len(training), of):
        return
    pairs = next((spread for spread in mixed if spread.mixed == "pairs"), None)
    if pairs is not None:
        raise Mixing("computes with pairs of samples", pairs.origin)
    raise Mixing("is not linear, and computes with a sum or mean over the samples")


def _is_linear(name: str, args: Sequence[Any], num_training: int, of: Of) -> bool:
    """Whether an operation is linear in its mixed arguments, or not known."""
    if name in _PRODUCTS or name in _MATRICES:
        return num_training < 2
    if name in _QUOTIENTS:
        below = of(args[1]) if len(args) > 1 else None
        return below is None or not below.trains
    return name in _LINEAR or not any(hasattr(space, name) for space in (torch, Tensor, F, torch.linalg))


def _dims_along(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], source: Tensor) -> frozenset[int]:
    place, default = _ALONG[name]
    if name in ("max", "min") and len(args) > 1 and isinstance(args[1], Tensor):
        return frozenset()
    dims = kwargs.get("dim", args[place] if len(args) > place else default)
    if isinstance(dims, bool) or dims is None:
        return frozenset(() if name in ("softmax", "log_softmax") else range(source.ndim))
    given = [dims] if isinstance(dims, int) else list(dims)
    return frozenset(each % source.ndim for each in given if isinstance(each, int) and source.ndim)


def _dims_of_sum(args: Sequence[Any], kwargs: Mapping[str, Any], source: Tensor) -> frozenset[int]:
    dims = kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else None))
    given = [dims] if isinstance(dims, int) else [*args[1:]] if are_numbers(args[1:]) else list(dims or ())
    numbers = [each % source.ndim for each in given if isinstance(each, int) and not isinstance(each, bool)]
    return frozenset(numbers if numbers and source.ndim else range(source.ndim))


# Rules for dims. Each returns what is known of the result, without regard to gradients.


def _broadcast(name: str, args: Any, kwargs: Any, made: Tensor, of: Of) -> Spread | None:
    """Rule of operations on elements, with broadcasting."""
    dims = set[int]()
    for each in _tensors((*args, *kwargs.values())):
        spread, shift = of(each), made.ndim - each.ndim
        if spread is None:
            continue
        if shift < 0 or any(size not in (1, made.shape[dim + shift]) for dim, size in enumerate(each.shape)):
            return None
        dims |= {dim + shift for dim in spread.dims}
    return Spread(frozenset(dims))


def _summed(name: str, args: Any, kwargs: Any, made: Tensor, of: Of) -> Spread | None:
    """Rule of sums, and of other operations that drop dims."""
    source = next(each for each in _tensors((*args, *kwargs.values())) if of(each) is not None)
    spread = of(source)
    assert spread is not None
    if name == "cumsum" or made.shape == source.shape:
        return spread
    reduced = _dims_of_sum(args, kwargs, source) if name in _SUMS else _dims_along(name, args, kwargs, source)
    is_kept = made.ndim == source.ndim
    dims = {dim if is_kept else dim - sum(each < dim for each in reduced) for dim in spread.dims - reduced}
    return Spread(frozenset(dims), mixed="sum" if spread.dims & reduced else "")


def _reshaped(name: str, args: Any, kwargs: Any, made: Tensor, of: Of) -> Spread | None:
    source, spread = args[0], of(args[0])
    if spread is None or not made.numel():
        return None
    dims = set[int]()
    for dim in spread.dims:
        before = math.prod(source.shape[:dim])
        if made.ndim > dim and made.shape[dim] == source.shape[dim] and math.prod(made.shape[:dim]) == before:
            dims.add(dim)
            continue
        ends = [math.prod(made.shape[: each + 1]) for each in range(made.ndim)]
        # Its elements are `before` blocks apart: the first dim of the result that goes beyond them has the samples.
        found = next((each for each, end in enumerate(ends) if end > before), None)
        if found is None:
            return None
        dims.add(found)
    return Spread(frozenset(dims))


def _swapped(name: str, args: Any, kwargs: Any, made: Tensor, of: Of) -> Spread | None:
    source, spread = args[0], of(args[0])
    if spread is None or source.ndim < 2:
        return spread
    pair = [each for each in (*args[1:], *kwargs.values()) if isinstance(each, int)]
    pair = pair if len(pair) == 2 else [-2, -1] if name in ("mT", "mH") else [0, 1]
    first, second = (each % source.ndim for each in pair)
    if name == "T" and source.ndim > 2:
        return Spread(frozenset(source.ndim - 1 - dim for dim in spread.dims))
    return Spread(frozenset({first: second, second: first}.get(dim, dim) for dim in spread.dims))


def _permuted(name: str, args: Any, kwargs: Any, made: Tensor, of: Of) -> Spread | None:
    source, spread = args[0], of(args[0])
    order = kwargs.get("dims", args[1] if len(args) == 2 else args[1:])
    if spread is None:
        return None
    places = [each % source.ndim for each in order]
    return Spread(frozenset(places.index(dim) for dim in spread.dims))


def _unsqueezed(name: str, args: Any, kwargs: Any, made: Tensor, of: Of) -> Spread | None:
    spread = of(args[0])
    added = kwargs.get("dim", args[1] if len(args) > 1 else 0) % made.ndim
    return None if spread is None else Spread(frozenset(dim + (dim >= added) for dim in spread.dims))


def _kept(name: str, args: Any, kwargs: Any, made: Tensor, of: Of) -> Spread | None:
    """Rule of operations that keep the order of dims, perhaps with new ones in front."""
    spread = of(args[0])
    shift = made.ndim - args[0].ndim
    return None if spread is None or shift < 0 else Spread(frozenset(dim + shift for dim in spread.dims))


def _stays(name: str, args: Any, kwargs: Any, made: Tensor, of: Of) -> Spread | None:
    """Rule of operations that keep the samples in their dim, and change others."""
    source = next(each for each in _tensors((*args, *kwargs.values())) if of(each) is not None)
    spread = of(source)
    assert spread is not None
    is_kept = all(dim < made.ndim and made.shape[dim] == source.shape[dim] for dim in spread.dims)
    return Spread(spread.dims) if is_kept else None


def _compared(name: str, args: Any, kwargs: Any, made: Tensor, of: Of) -> Spread | None:
    """Rule of similarities and distances along a dim of two tensors that are broadcast against each other."""
    along = kwargs.get("dim", args[2] if len(args) > 2 else 1) if name == "cosine_similarity" else -1
    first, second = args[:2] if len(args) > 1 else list(_tensors(tuple(kwargs.values())))[:2]
    ndim, dims = max(first.ndim, second.ndim), set[int]()
    for each in (first, second):
        spread = of(each)
        dims |= {dim + ndim - each.ndim for dim in (() if spread is None else spread.dims)}
    along %= ndim
    return Spread(frozenset(dim - (dim > along) for dim in dims if dim != along))


def _selected(name: str, args: Any, kwargs: Any, made: Tensor, of: Of) -> Spread | None:
    spread = of(args[0])
    dim = kwargs.get("dim", args[1] if len(args) > 1 and isinstance(args[1], int) else 0) % args[0].ndim
    if spread is None or dim in spread.dims:
        return None  # of one sample
    return Spread(frozenset(each - (each > dim) for each in spread.dims))


def _indexed(name: str, args: Any, kwargs: Any, made: Tensor, of: Of) -> Spread | None:
    source, spread = args[0], of(args[0])
    if spread is None or len(args) < 2:
        return None
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    if any(isinstance(each, (Tensor, list)) for each in index):
        return Spread(frozenset({0}) if made.ndim else frozenset())
    places, position, dim = dict[int, int](), 0, 0
    for each in entries_of(index, source.ndim):
        if isinstance(each, slice):
            places[dim] = position
        dim += each is not None
        position += each is None or isinstance(each, slice)
    if not all(each in places for each in spread.dims):
        return None  # of one sample
    return Spread(frozenset(places[each] for each in spread.dims))


def _joined(name: str, args: Any, kwargs: Any, made: Tensor, of: Of) -> Spread | None:
    parts = list(_tensors(args[:1] or list(kwargs.values())))
    dims = frozenset[int]().union(*(spread.dims for each in parts if (spread := of(each)) is not None))
    if name != "stack":
        return Spread(dims)
    added = kwargs.get("dim", args[1] if len(args) > 1 else 0) % made.ndim
    return Spread(frozenset(dim + (dim >= added) for dim in dims))


def _scattered(name: str, args: Any, kwargs: Any, made: Tensor, of: Of) -> Spread | None:
    """Rule of sums over rows with one number: means of classes, if each row is a sample."""
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    source = args[3] if len(args) > 3 else kwargs.get("src", kwargs.get("source"))
    spread = None if source is None else of(source)
    if spread is None or source is None or not isinstance(dim, int) or spread.dims != {dim % source.ndim}:
        return None
    return Spread(mixed="sum") if source.shape[dim] == spread.num else None


def _diagonal(name: str, args: Any, kwargs: Any, made: Tensor, of: Of) -> Spread | None:
    spread = of(args[0])
    if spread is None or len(args) + len(kwargs) > 1 or args[0].ndim != 2:
        return None
    return Spread(frozenset({0}) if made.ndim else frozenset(), mixed="" if made.ndim else "sum")


def _multiplied(name: str, args: Any, kwargs: Any, made: Tensor, of: Of) -> Spread | None:
    """Rule of products of matrices, and of distances between rows."""
    if name == "einsum":
        return _einsum(args, of)
    given = args[1:3] if name in _WITH_ADDEND else args[:2]
    if len(given) < 2 or not all(isinstance(each, Tensor) and each.ndim for each in given):
        return None
    first, second = reversed(given) if name == "__rmatmul__" else given
    are_rows = name in ("linear", "inner", "cdist")  # the last dims of both go away
    num_batch = made.ndim - (first.ndim > 1) - (second.ndim > 1)
    dims, is_summed = set[int](), False
    for each, is_left in ((first, True), (second, False)):
        spread = of(each)
        for dim in () if spread is None else spread.dims:
            if each.ndim > 1 and dim == each.ndim - (2 if is_left or are_rows else 1):
                dims.add(num_batch if is_left else made.ndim - 1)
            elif dim >= each.ndim - 2:
                is_summed = True
            else:
                dims.add(dim + num_batch - (each.ndim - 2))
    return Spread(frozenset(dims), mixed="sum" if is_summed else "")


def _einsum(args: Any, of: Of) -> Spread | None:
    if not args or not isinstance(args[0], str) or "." in args[0]:
        return None
    terms, _, result = args[0].replace(" ", "").partition("->")
    operands = args[1] if isinstance(args[1], (tuple, list)) else args[1:]
    labels = set[str]()
    for term, each in zip(terms.split(","), operands, strict=False):
        spread = of(each)
        labels |= {term[dim] for dim in (spread.dims if spread is not None else ()) if dim < len(term)}
    is_summed = any(label not in result for label in labels)
    return Spread(frozenset(result.index(label) for label in labels if label in result), "sum" if is_summed else "")


def _loss(name: str, args: Any, kwargs: Any, made: Tensor, of: Of) -> Spread | None:
    """Rule of the losses of torch: means or sums, or a number for each sample."""
    if not made.ndim:
        return Spread(mixed="sum")
    source = next(_tensors((*args, *kwargs.values())))
    if made.shape == source.shape:
        return _broadcast(name, args[:1], {}, made, of)
    spread = of(source)  # cross_entropy, whose second dim goes away
    if spread is None or 1 in spread.dims:
        return None
    return Spread(frozenset(dim - (dim > 1) for dim in spread.dims))


_Rule = Callable[[str, Any, Any, Tensor, Of], Spread | None]
_RULES: Mapping[str, _Rule] = {
    **dict.fromkeys(_SUMS, _summed),
    **dict.fromkeys(_ALONG, _summed),
    **dict.fromkeys(("normalize", "softmax", "log_softmax", "gumbel_softmax"), _broadcast),
    **dict.fromkeys(_SAME, _reshaped),
    **dict.fromkeys(_SWAPS, _swapped),
    **dict.fromkeys((*_EXPANDS, *_PIECES, "repeat_interleave"), _kept),
    **dict.fromkeys(("select", "unbind", "__iter__"), _selected),
    **dict.fromkeys(("__getitem__", "masked_select"), _indexed),
    **dict.fromkeys(("cat", "concat", "concatenate", "stack"), _joined),
    **dict.fromkeys(_DIAGONALS, _diagonal),
    **dict.fromkeys(_SCATTERS, _scattered),
    **dict.fromkeys((*_MATRICES, "cdist"), _multiplied),
    **dict.fromkeys(_DIMS_STAY, _stays),
    **dict.fromkeys(("cosine_similarity", "pairwise_distance"), _compared),
    **{"permute": _permuted, "unsqueeze": _unsqueezed},
}


def _rule(name: str) -> _Rule:
    if name.endswith("_loss") or name.endswith(("entropy", "_logits")) or name == "kl_div":
        return _loss
    return _RULES.get(name, _broadcast)
