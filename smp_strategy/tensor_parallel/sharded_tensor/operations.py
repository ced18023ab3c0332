"""Dispatch of operations on split tensors: on each part by itself, with a small exchange, or after gathering.

Operations are identified by name, which is the same for ``torch.add``, ``Tensor.add`` and ``aten::add``.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import _reduction as _Reduction
from torch.utils import _pytree as pytree

from smp_strategy.distributed.torch_private import parse_to
from smp_strategy.errors import UnsupportedError
from smp_strategy.model.trace.pytree import leaves_of
from smp_strategy.tensor_parallel import autograd_collectives as functions
from smp_strategy.tensor_parallel.autograd_collectives import ReplicatedWeights
from smp_strategy.tensor_parallel.region_rng import RegionRng
from smp_strategy.tensor_parallel.sharded_tensor import cross_entropy as loss
from smp_strategy.tensor_parallel.sharded_tensor.parts import Along, InParts, part_of
from smp_strategy.tensor_parallel.sharded_tensor.shapes import RULES, Arguments, broadcast

__all__ = ["operate"]

_OPERATORS = (
    *("add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift"),
    *("eq", "ne", "lt", "le", "gt", "ge", "invert", "neg", "pos", "abs"),
)
_RANDOM = frozenset({"dropout", "native_dropout", "bernoulli", "rand_like", "randn_like", "normal", "uniform"})
_ELEMENTWISE = _RANDOM | {
    *(f"__{prefix}{name}__" for name in _OPERATORS for prefix in ("", "r", "i")),
    *("add", "sub", "subtract", "rsub", "mul", "multiply", "div", "divide", "true_divide", "floor_divide", "fmod"),
    *("remainder", "pow", "float_power", "square", "sqrt", "rsqrt", "reciprocal", "exp", "exp2", "expm1", "log"),
    *("log2", "log10", "log1p", "abs", "absolute", "neg", "negative", "positive", "sign", "sgn", "floor", "ceil"),
    *("round", "trunc", "frac", "clamp", "clip", "clamp_min", "clamp_max", "maximum", "minimum", "fmax", "fmin"),
    *("where", "masked_fill", "lerp", "addcmul", "addcdiv", "atan2", "hypot", "copysign", "xlogy", "nan_to_num"),
    *("sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "erf", "erfc", "erfinv", "lgamma"),
    *("sigmoid", "relu", "relu6", "gelu", "silu", "mish", "elu", "selu", "celu", "leaky_relu", "softplus"),
    *("softsign", "tanhshrink", "hardtanh", "hardsigmoid", "hardswish", "hardshrink", "softshrink", "logsigmoid"),
    *("threshold", "logit", "eq", "ne", "lt", "le", "gt", "ge", "equal_to", "not_equal", "less", "less_equal"),
    *("greater", "greater_equal", "isnan", "isinf", "isfinite", "isclose", "logical_not", "logical_and"),
    *("logical_or", "logical_xor", "bitwise_not", "bitwise_and", "bitwise_or", "bitwise_xor", "copy", "fill", "zero"),
}
_COLLECTIVES = ("torch.distributed", "torch._ops.c10d", "torch._ops._c10d")
_NEW = frozenset({"new_empty", "new_zeros", "new_ones", "new_full", "new_tensor"})
_SAME_SIZE = {"view_as": "view", "reshape_as": "reshape", "expand_as": "expand"}


def operate(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call ``func``, at least one of whose arguments is split."""
    kind = name if name.startswith("__") else name.rstrip("_")
    if kwargs.get("out") is None:
        # Each returns `NotImplemented` for calls that it cannot do.
        for way in (_special, _elementwise, _by_rule):
            if (result := way(kind, name, func, args, kwargs)) is not NotImplemented:
                return result
    return _with_the_whole(name, func, args, kwargs)


def _special(kind: str, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    first = args[0] if args else None
    if kind in ("cat", "concat", "concatenate", "stack"):
        return _joined(kind, func, args, kwargs)
    if not isinstance(first, InParts):
        return NotImplemented
    arguments = Arguments(args[1:], kwargs)
    if kind == "cross_entropy":
        return _cross_entropy(*args, **kwargs)
    if kind == "argmax":
        return _argmax(first, arguments)
    if kind in ("sum", "mean") and name == kind:
        return _total(kind, first, arguments)
    if kind in ("to", "cpu", "cuda"):
        return _moved(kind, func, first, arguments)
    if kind in _NEW:
        return func(first.part, *args[1:], **kwargs)
    if kind == "type":
        return _remade(func(first.part, *args[1:], **kwargs), first, first.along, [first])
    if kind == "type_as":
        other = arguments.get(0, "other")
        return first.to(other.device, other.dtype)
    if kind in _SAME_SIZE:
        return getattr(first, _SAME_SIZE[kind])(arguments.get(0, "other").shape)
    return NotImplemented


def _elementwise(kind: str, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """On each part by itself; sizes are those of the whole except for broadcasting."""
    operands = [leaf for leaf in (*args, *kwargs.values()) if isinstance(leaf, Tensor)]
    splits = [operand for operand in operands if isinstance(operand, InParts)]
    if kind not in _ELEMENTWISE or not splits or (_changes_first(name) and not isinstance(args[0], InParts)):
        return NotImplemented
    size = broadcast([operand.cutting.size if isinstance(operand, InParts) else operand.shape for operand in operands])
    if size is None:
        return NotImplemented  # the operation itself reports the error best
    # The operand whose split the result gets; in place, the one that is changed.
    among = splits[:1] if _changes_first(name) else splits
    like = next((each for each in among if size[-each.cutting.from_end] == each.cutting.length), None)
    if like is None:
        return NotImplemented
    from_end, length = like.cutting.from_end, like.cutting.length

    def local(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        own = leaf.cutting.size if isinstance(leaf, InParts) else leaf.shape
        if len(own) < from_end or (own[-from_end] == 1 and length != 1):
            return _read_alike(leaf, like)
        return part_of(leaf, Along(like.along.group, len(own) - from_end, like.along.lengths))

    parts = [local(leaf) for leaf in args], {key: local(leaf) for key, leaf in kwargs.items()}
    is_drawn = kind in _RANDOM and not (kind == "dropout" and not Arguments(args, kwargs).get(2, "training", True))
    with _own_numbers(like) if is_drawn else contextlib.nullcontext():
        result = func(*parts[0], **parts[1])
    return _remade(result, like, Along(like.along.group, len(size) - from_end, like.along.lengths), among)


def _by_rule(kind: str, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """On each part by itself, if there is a rule."""
    first = args[0] if args else None
    rule = RULES.get(name)
    if rule is None or not isinstance(first, InParts):
        return NotImplemented
    if kwargs.get("device", first.device) not in (None, first.device):
        return NotImplemented
    if _any_split(args[1:]) or _any_split(kwargs.values()):
        return NotImplemented
    local = rule(first.cutting, Arguments(args[1:], kwargs))
    if local is None:
        return NotImplemented
    named = {key: _read_alike(leaf, first) for key, leaf in local.kwargs.items()}
    result = func(first.part, *(_read_alike(leaf, first) for leaf in local.args), **named)
    return _remade(result, first, Along(first.along.group, local.dim, local.lengths), [first])


def _with_the_whole(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Gather the parts first."""
    if isinstance(kwargs.get("out"), InParts):
        raise UnsupportedError(f"`{name}(..., out=...)` into a split tensor. Use what the operation returns.")
    if name.startswith("set "):
        raise UnsupportedError(f"`{name[4:]}` of a split tensor is set. Use an operation that returns a new tensor.")
    if str(getattr(func, "__module__", "")).startswith(_COLLECTIVES):
        raise UnsupportedError(f"`{name}` of a split tensor. Say what is meant: `x.whole()`, or `x.part` of this rank.")
    if _changes_first(name) and _any_split(leaf for leaf in args[:1] if isinstance(leaf, (list, tuple))):
        raise UnsupportedError(f"`{name}` would change split tensors in a list. Put them together first: `x.whole()`.")
    wholes: dict[int, Tensor] = {}

    def whole(leaf: InParts) -> Tensor:
        if id(leaf) not in wholes:
            wholes[id(leaf)] = leaf.whole()
        return wholes[id(leaf)]

    given, named = pytree.tree_map_only(InParts, whole, (args, kwargs))
    result = func(*given, **named)
    if not (_changes_first(name) and isinstance(args[0], InParts)):
        return result
    if given[0].shape != args[0].shape:
        raise UnsupportedError(f"`{name}` would change the size of a split tensor. Use what returns a new one.")
    args[0].part.copy_(part_of(given[0], args[0].along))
    args[0].changed()
    return args[0] if result is given[0] else result


def _changes_first(name: str) -> bool:
    if name.startswith("__"):
        return name == "__setitem__" or (name[2] == "i" and name in _ELEMENTWISE and name != "__invert__")
    return name.endswith("_")


def _any_split(values: Iterable[Any]) -> bool:
    return any(isinstance(leaf, InParts) for leaf in leaves_of(list(values)))


def _read_alike(leaf: Any, like: InParts) -> Any:
    """A whole tensor that each rank reads for its part: its gradients are summed."""
    if isinstance(leaf, InParts):
        leaf = leaf.whole()
    if not (isinstance(leaf, Tensor) and leaf.requires_grad and torch.is_grad_enabled()):
        return leaf
    group = like.along.group
    copies = group.recall(ReplicatedWeights)
    copied = None if copies is None else copies.of(leaf)
    return functions.copy(leaf, group) if copied is None else copied


@contextlib.contextmanager
def _own_numbers(like: InParts) -> Iterator[None]:
    """Context with random numbers of this rank; afterwards all ranks draw the same again."""
    randomness = RegionRng(like.along.group)
    randomness.enter(like.part, like)
    try:
        yield
    finally:
        randomness.leave()


def _remade(result: Any, like: InParts, along: Along, arguments: Sequence[InParts] = ()) -> Any:
    """Results of parts as split tensors; a part that was changed in place gives its split tensor."""

    def remade(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or isinstance(leaf, InParts):
            return leaf
        for argument in arguments:
            if leaf is argument.part:
                return argument.changed()
        base = like if leaf._is_view() and leaf.requires_grad else None
        return type(like).of(leaf, along, base)

    return remade(result) if isinstance(result, Tensor) else pytree.tree_map(remade, result)


def _joined(kind: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    arguments = Arguments(args, kwargs)
    tensors, dim = arguments.get(0, "tensors"), arguments.get(1, "dim", 0)
    like = next((each for each in tensors if isinstance(each, InParts)), None)
    if like is None or not isinstance(dim, int) or any(each.dim() != like.dim() for each in tensors):
        return NotImplemented
    dim %= like.dim() + (kind == "stack")
    after = like.along.dim + (kind == "stack" and dim <= like.along.dim)
    if dim == after or any(each.shape[like.along.dim] != like.cutting.length for each in tensors):
        return NotImplemented
    return _remade(func([part_of(each, like.along) for each in tensors], dim), like, like.along._replace(dim=after))


def _cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    assert isinstance(input, InParts)
    num_dims = input.dim()
    is_usual = target.shape == (*input.shape[:1], *input.shape[2:])[: max(num_dims - 1, 0)]
    if (
        input.along.dim != min(num_dims - 1, 1)
        or not is_usual
        or target.dtype not in (torch.int64, torch.uint8)
        or isinstance(target, InParts)
        or (weight is not None and (isinstance(weight, InParts) or weight.requires_grad))
    ):
        return NotImplemented
    if size_average is not None or reduce is not None:
        reduction = _Reduction.legacy_get_string(size_average, reduce)
    return loss.cross_entropy(
        input.part.movedim(input.along.dim, -1),
        target,
        input.along.group,
        input.along.lengths,
        weight=weight,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )


def _argmax(split: InParts, arguments: Arguments) -> Any:
    dim, keepdim = arguments.get(0, "dim"), arguments.get(1, "keepdim", False)
    is_exact = split.is_floating_point() or split.dtype in (torch.uint8, torch.int8, torch.int16, torch.int32)
    if dim is None or split.cutting.index(dim) != split.along.dim or not is_exact:
        return NotImplemented
    found = loss.argmax(split.part.movedim(dim, -1), split.along.group, split.along.lengths)
    return found.unsqueeze(dim) if keepdim else found


def _total(kind: str, split: InParts, arguments: Arguments) -> Any:
    dim, keepdim = arguments.get(0, "dim"), arguments.get(1, "keepdim", False)
    if isinstance(dim, torch.dtype) or arguments.kwargs.get("axis") is not None:
        return NotImplemented
    given = range(split.dim()) if dim is None or dim == () or dim == [] else [dim] if isinstance(dim, int) else dim
    over = sorted(split.cutting.index(each) for each in given)
    if split.along.dim not in over:
        return NotImplemented
    part = split.part.to(arguments.kwargs.get("dtype") or split.dtype)
    if kind == "mean" and not part.is_floating_point():
        return NotImplemented
    found = functions.add_up(part.sum(over, keepdim), split.along.group)
    return found if kind == "sum" else found / (split.numel() // max(found.numel(), 1))


def _moved(kind: str, func: Callable[..., Any], split: InParts, arguments: Arguments) -> Any:
    """``to``: another dtype is local to each part; another device needs the whole, as there may be no group for it."""
    args = arguments.args
    if kind == "to":
        if args and isinstance(args[0], Tensor):
            args = (args[0].device, args[0].dtype, *args[1:])
        options = {key: value for key, value in arguments.kwargs.items() if key not in ("copy", "other")}
        device = parse_to(*args[:2], **options)[0] if "other" not in arguments.kwargs else None
    else:
        device = torch.device(arguments.get(0, "device", kind)) if kind == "cuda" else torch.device("cpu")
    here = split.device
    if device is not None and (device.type != here.type or device.index not in (None, here.index)):
        return NotImplemented
    part = func(split.part, *args, **arguments.kwargs)
    return _remade(part, split, split.along, [split])
