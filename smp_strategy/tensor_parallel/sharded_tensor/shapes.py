"""Rules for local operations on a tensor that is cut along a dim.

An operation is *local* if it maps parts of its input to parts of its result: a sum over another dim, a transposition, a
reshape that keeps the elements of a part together. Rules are functions of sizes and arguments::

    rule(split, arguments) -> Local(arguments for the part, cut of the result), or None: not local

so they can be read and tested without ranks. Sizes in arguments are those of the whole tensor.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

__all__ = ["RULES", "Arguments", "Local", "Split", "broadcast", "reshaped"]


@final
@dataclass(frozen=True)
class Split:
    """Sizes of a tensor in parts."""

    size: tuple[int, ...]
    """Sizes of the whole tensor."""
    dim: int
    """Dim that is cut; not negative."""
    lengths: tuple[int, ...]
    """Lengths of the ranks' parts along it."""
    rank: int
    """Rank of the part in question."""

    @property
    def length(self) -> int:
        """Length of the whole tensor along the cut dim."""
        return self.size[self.dim]

    @property
    def mine(self) -> int:
        """Length of the part along the cut dim."""
        return self.lengths[self.rank]

    @property
    def from_end(self) -> int:
        """The cut dim counted from the end, as broadcasting does: 1 for the last one."""
        return len(self.size) - self.dim

    def index(self, dim: int) -> int:
        """``dim`` as a number that is not negative."""
        return dim % len(self.size)


class Local(NamedTuple):
    """Call on the part, and split of its result."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dim: int
    """Cut dim of the results."""
    lengths: tuple[int, ...]


class Arguments(NamedTuple):
    """Arguments after the tensor."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def get(self, position: int, name: str, default: Any = None) -> Any:
        return self.args[position] if len(self.args) > position else self.kwargs.get(name, default)

    def sizes(self, name: str) -> tuple[int, ...] | None:
        """The arguments as one tuple, if they are sizes or dims only; otherwise ``None``.

        They may be given as a sequence or one by one.
        """
        found = self.args or (self.kwargs.get(name),)
        if len(found) == 1 and isinstance(found[0], Sequence):
            found = tuple(found[0])
        is_all = len(self.kwargs) == (not self.args)
        return found if is_all and all(isinstance(each, int) for each in found) else None

    def local(self, split: Split, dim: int | None = None, lengths: Sequence[int] | None = None) -> Local:
        """The same arguments for the part."""
        return Local(
            self.args,
            dict(self.kwargs),
            split.dim if dim is None else dim,
            split.lengths if lengths is None else tuple(lengths),
        )


Rule = Callable[[Split, Arguments], Local | None]


def _anywhere(split: Split, arguments: Arguments) -> Local | None:
    return arguments.local(split)


def _over_other_dims(keepdim: int = 1) -> Rule:
    """Rule for reductions over given dims other than the cut one; ``keepdim`` is the position of that argument."""

    def rule(split: Split, arguments: Arguments) -> Local | None:
        dims = arguments.get(0, "dim", arguments.kwargs.get("axis"))
        if isinstance(dims, bool) or not isinstance(dims, int | tuple | list):
            return None
        over = {split.index(dim) for dim in ([dims] if isinstance(dims, int) else dims)}
        if split.dim in over or not over:
            return None
        removed = 0 if arguments.get(keepdim, "keepdim", False) else sum(dim < split.dim for dim in over)
        return arguments.local(split, split.dim - removed)

    return rule


def _spread(split: Split, arguments: Arguments) -> Local | None:
    # Torch warns about empty parts.
    return _over_other_dims(2)(split, arguments) if all(split.lengths) else None


def _flip(split: Split, arguments: Arguments) -> Local | None:
    dims = arguments.sizes("dims")
    return None if dims is None or split.dim in map(split.index, dims) else arguments.local(split)


def _norm(split: Split, arguments: Arguments) -> Local | None:
    over = arguments.get(0, "normalized_shape")
    return arguments.local(split) if split.from_end > len(over) else None


def _linear(split: Split, arguments: Arguments) -> Local | None:
    return arguments.local(split) if split.from_end > 1 else None


def _embedding(split: Split, arguments: Arguments) -> Local | None:
    changes_weights = arguments.get(2, "max_norm") is not None
    return None if changes_weights or arguments.get(5, "sparse", False) else arguments.local(split)


def _matmul(split: Split, arguments: Arguments) -> Local | None:
    other = arguments.get(0, "other")
    if len(other.shape) > 2 or split.from_end == 1:
        return None
    return arguments.local(split)


def broadcast(sizes: Sequence[Sequence[int]]) -> tuple[int, ...] | None:
    """Broadcast size of ``sizes``; ``None``: they do not fit."""
    found = [1] * max(map(len, sizes))
    for size in sizes:
        for place in range(-len(size), 0):
            if size[place] != found[place] and size[place] != 1:
                if found[place] != 1:
                    return None
                found[place] = size[place]
    return tuple(found)


def reshaped(split: Split, size: Sequence[int]) -> tuple[int, tuple[int, ...]] | None:
    """Cut dim and lengths after a reshape to ``size`` (which may have one ``-1``); ``None``: not local."""
    sizes = _complete(split.size, size)
    before, behind = math.prod(split.size[: split.dim]), math.prod(split.size[split.dim + 1 :])
    if not math.prod(split.size):
        return None
    found = None
    for dim, length in enumerate(sizes):
        unit = math.prod(sizes[dim + 1 :])
        if math.prod(sizes[:dim]) != before or any(each * behind % unit for each in split.lengths):
            continue
        if length * unit == split.length * behind and (found is None or length > 1):
            found = dim, tuple(each * behind // unit for each in split.lengths)
            if length > 1:
                break
    return found


def _complete(old: Sequence[int], new: Sequence[int]) -> list[int]:
    known = math.prod(each for each in new if each != -1)
    return [math.prod(old) // max(known, 1) if each == -1 else each for each in new]


def _reshape(split: Split, arguments: Arguments) -> Local | None:
    size = arguments.sizes("shape") or arguments.sizes("size")
    if size is None or (found := reshaped(split, size)) is None:
        return None
    dim, lengths = found
    local = _complete(split.size, size)
    local[dim] = lengths[split.rank]
    return Local((tuple(local),), {}, dim, lengths)


def _flatten(split: Split, arguments: Arguments) -> Local | None:
    start, end = split.index(arguments.get(0, "start_dim", 0)), split.index(arguments.get(1, "end_dim", -1))
    size = (*split.size[:start], math.prod(split.size[start : end + 1]), *split.size[end + 1 :])
    found = reshaped(split, size)
    return None if found is None else arguments.local(split, *found)


def _unflatten(split: Split, arguments: Arguments) -> Local | None:
    at, sizes = arguments.get(0, "dim"), arguments.get(1, "sizes")
    if not isinstance(at, int) or split.index(at) == split.dim:
        return None
    return arguments.local(split, split.dim + (len(sizes) - 1) * (split.index(at) < split.dim))


def _transpose(first: int | None = None, second: int | None = None) -> Rule:
    def rule(split: Split, arguments: Arguments) -> Local | None:
        if len(split.size) < 2:
            return arguments.local(split)
        one = arguments.get(0, "dim0", arguments.kwargs.get("axis0")) if first is None else first
        other = arguments.get(1, "dim1", arguments.kwargs.get("axis1")) if second is None else second
        one, other = split.index(one), split.index(other)
        return arguments.local(split, {one: other, other: one}.get(split.dim, split.dim))

    return rule


def _permute(split: Split, arguments: Arguments) -> Local | None:
    dims = arguments.sizes("dims")
    return None if dims is None else arguments.local(split, [split.index(dim) for dim in dims].index(split.dim))


def _reverse(split: Split, arguments: Arguments) -> Local | None:
    return arguments.local(split, split.from_end - 1)


def _unsqueeze(split: Split, arguments: Arguments) -> Local | None:
    at = arguments.get(0, "dim") % (len(split.size) + 1)
    return arguments.local(split, split.dim + (at <= split.dim))


def _squeeze(split: Split, arguments: Arguments) -> Local | None:
    dims = arguments.get(0, "dim", range(len(split.size)))
    given = {split.index(dim) for dim in ([dims] if isinstance(dims, int) else dims)}
    removed = sorted(dim for dim in given if split.size[dim] == 1)
    if split.dim in removed:
        return None
    # Explicit dims: a part may have length 1 where the whole has not.
    return Local((tuple(removed),), {}, split.dim - sum(dim < split.dim for dim in removed), split.lengths)


def _expand(split: Split, arguments: Arguments) -> Local | None:
    size = arguments.sizes("size")
    if size is None or size[-split.from_end] not in (-1, split.length):
        return None
    local = list(size)
    local[-split.from_end] = split.mine
    return Local((tuple(local),), {}, len(size) - split.from_end, split.lengths)


def _along_other_dim(position: int, default: int | None = None, *, removes: bool = False) -> Rule:
    """Rule for operations along one dim, given at ``position``, other than the cut one."""

    def rule(split: Split, arguments: Arguments) -> Local | None:
        dim = arguments.get(position, "dim", default)
        if not isinstance(dim, int) or isinstance(dim, bool) or split.index(dim) == split.dim:
            return None
        return arguments.local(split, split.dim - (removes and split.index(dim) < split.dim))

    return rule


def _getitem(split: Split, arguments: Arguments) -> Local | None:
    index = arguments.args[0] if isinstance(arguments.args[0], tuple) else (arguments.args[0],)
    used = [_num_dims(each) for each in index]
    if any(count is None for count in used):
        return None
    missing = len(split.size) - sum(count or 0 for count in used)
    if not any(each is Ellipsis for each in index):
        index, used = (*index, Ellipsis), [*used, 0]
    at = next(number for number, each in enumerate(index) if each is Ellipsis)
    full = (*index[:at], *[slice(None)] * missing, *index[at + 1 :])
    return _full_getitem(split, full)


def _num_dims(index: Any) -> int | None:
    """Number of dims of the tensor that an index consumes; ``None``: an index of another kind."""
    if index is None or index is Ellipsis:
        return 0
    if isinstance(index, Tensor) and type(index) is Tensor:
        return index.dim() if index.dtype in (torch.bool, torch.uint8) else 1
    return 1 if isinstance(index, int | slice) and not isinstance(index, bool) else None


def _full_getitem(split: Split, index: tuple[Any, ...]) -> Local | None:
    dim, at, before = 0, None, 0
    for number, each in enumerate(index):
        count = _num_dims(each) or 0
        if dim <= split.dim < dim + count:
            at = number
        dim += count
        if at is None:
            before += isinstance(each, slice) or each is None
    if at is None or not isinstance(index[at], slice) or index[at].indices(split.length) != (0, split.length, 1):
        return None
    places = [number for number, each in enumerate(index) if isinstance(each, Tensor)]
    if places:
        # Integers beside tensors count as indices; the indexed dims come first unless all indices are adjacent.
        places = [number for number, each in enumerate(index) if isinstance(each, Tensor | int)]
        tensors = [each for each in index if isinstance(each, Tensor)]
        if places[-1] - places[0] >= len(places) or places[0] < at < places[-1]:
            return None
        if places[0] < at:
            ranks = [1 if each.dtype in (torch.bool, torch.uint8) else each.dim() for each in tensors]
            before += max(ranks)
    full = (*index[:at], slice(None), *index[at + 1 :])
    return Local((full,), {}, before, split.lengths)


RULES: dict[str, Rule] = {
    **dict.fromkeys(("detach", "alias", "clone", "contiguous", "zeros_like", "ones_like"), _anywhere),
    **dict.fromkeys(("full_like", "empty_like", "float", "half", "bfloat16", "double"), _anywhere),
    **dict.fromkeys(("bool", "int", "long", "_to_copy"), _anywhere),
    **dict.fromkeys(("sum", "mean", "amax", "amin", "max", "min", "prod", "all", "any"), _over_other_dims()),
    **dict.fromkeys(("argmax", "argmin", "logsumexp", "nansum", "median"), _over_other_dims()),
    **dict.fromkeys(("var", "std"), _spread),
    **dict.fromkeys(("softmax", "log_softmax", "cumsum", "cumprod"), _along_other_dim(0)),
    "flip": _flip,
    "embedding": _embedding,
    **dict.fromkeys(("layer_norm", "rms_norm"), _norm),
    "linear": _linear,
    **dict.fromkeys(("matmul", "__matmul__", "mm"), _matmul),
    **dict.fromkeys(("view", "reshape"), _reshape),
    "flatten": _flatten,
    "unflatten": _unflatten,
    **dict.fromkeys(("transpose", "swapaxes", "swapdims"), _transpose()),
    **dict.fromkeys(("mT", "mH"), _transpose(-2, -1)),
    "t": _transpose(0, 1),
    "permute": _permute,
    "T": _reverse,
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    "expand": _expand,
    "__getitem__": _getitem,
    **dict.fromkeys(("narrow", "index_select"), _along_other_dim(0)),
    **dict.fromkeys(("split", "chunk", "tensor_split"), _along_other_dim(1, 0)),
    "topk": _along_other_dim(1, -1),
    **dict.fromkeys(("sort", "argsort"), _along_other_dim(0, -1)),
    **dict.fromkeys(("unbind",), _along_other_dim(0, 0, removes=True)),
    "select": _along_other_dim(0, removes=True),
}
"""Rules by name of the operation."""
