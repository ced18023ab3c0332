"""Deferred tensors: tensors whose values are in a file, or are computed from such, and are read at the first use.

A model that is loaded from pretrained files is renamed, cast, tied and adapted before it is partitioned, and none of
this needs values. So the tensors of the files are deferred: metadata is at hand, and operations that make new tensors
of deferred ones alone are noted, to be repeated when the result is needed. After the partition a rank reads the tensors
that it holds, and never the others. See [Note: deferred operations].
"""

import copy
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from smp_strategy.model.meta_tensors import leave_meta

__all__ = ["DeferredTensor", "ReadRun", "defer", "own_values", "read_now", "run_of", "undefer"]

# [Note: deferred operations]
# A deferred tensor is a wrapper subclass: shape, strides, dtype and device without memory. Operations arrive in
# `__torch_dispatch__`, below autograd:
#
# * a view of a deferred tensor is deferred and shares its memory, once there is some;
# * an operation that makes a new tensor of deferred ones alone is noted, with the shape that it has on the meta device;
# * any other operation (one with ordinary tensors, with random numbers, or whose result Python reads) computes at once,
#   with values that are read for it and forgotten again;
# * an operation that changes a deferred tensor gives it memory of its own for good, with all its views. What was noted
#   of the earlier values is computed before.
#
# The result is that of the same operations on ordinary tensors, bit for bit, since the same operations run.
#
# A rank of a shard group needs a run of a tensor's elements. Views that are runs of their base, and casts of runs, are
# read as runs (`run_of`); for all else the whole tensor is read.

# Results with at most this many elements are kept: Python reads them again and again.
_MOST_KEPT = 1024
_aten: Any = torch.ops.aten
# Operations that take only metadata from their first argument.
_LIKE = frozenset(
    {
        *(_aten.empty_like.default, _aten.zeros_like.default, _aten.ones_like.default, _aten.full_like.default),
        *(_aten.rand_like.default, _aten.randn_like.default, _aten.new_empty.default, _aten.new_zeros.default),
        *(_aten.new_ones.default, _aten.new_full.default, _aten.new_empty_strided.default),
    }
)
# Operations that compute each element from the same element of their argument.
_ELEMENTWISE = frozenset({_aten._to_copy.default, _aten.clone.default})
# Methods that reach for memory without an operation.
_OF_MEMORY = frozenset(
    {Tensor.numpy, Tensor.tolist, Tensor.data_ptr, Tensor.untyped_storage, Tensor.storage, Tensor.__array__}
)
_SET_DATA: Any = Tensor.data.__set__  # type: ignore[attr-defined]
# Attributes of a deferred tensor that an ordinary one does not have.
_OWN_ATTRIBUTES = ("_node", "_is_param")


@final
class _Base:
    """Memory of a deferred tensor and its views: computed when needed, or kept for good."""

    def __init__(self, compute: "Callable[[_Known], Tensor]", run: "ReadRun | None" = None) -> None:
        self._compute = compute
        # Computes a run of the elements alone, if the memory is row-major.
        self._run = run
        self.kept: Tensor | None = None
        # Noted operations that read these values.
        self._readers: list[weakref.ref[_Base]] = []

    def value(self, known: "_Known") -> Tensor:
        """The values: those that are kept or ``known``, or new ones."""
        if self.kept is not None:
            return self.kept
        if self not in known:
            known[self] = self._compute(known)
            if known[self].numel() <= _MOST_KEPT:
                self.kept = known[self]
        return known[self]

    @property
    def run(self) -> "ReadRun | None":
        """Reads a run of the elements alone; ``None``: all must be read, or are kept."""
        return self._run if self.kept is None else None

    def keep(self) -> None:
        """Keep the values for good."""
        if self.kept is None:
            self.kept = self.value({})

    def read_by(self, reader: "_Base") -> None:
        """Let ``reader`` compute before the values change."""
        self._readers.append(weakref.ref(reader))

    def change(self) -> None:
        """The values are about to be changed in place."""
        readers, self._readers = self._readers, []
        for reference in readers:
            if (reader := reference()) is not None:
                reader.keep()
        self.keep()


# Values that one evaluation has found already; several operations may read the same base.
_Known = dict[_Base, Tensor]
# Reads the elements from the first number to the second, in row-major order, into new memory of one dim.
ReadRun = Callable[[int, int], Tensor]


@final
class _Node:
    """Values of a deferred tensor: those of a base, or a view of them that begins at ``offset``, if that is known."""

    def __init__(self, base: _Base, views: tuple[Callable[[Tensor], Tensor], ...] = (), offset: int | None = 0) -> None:
        self.base = base
        self.views = views
        self.offset = offset

    def value(self, known: "_Known") -> Tensor:
        """The values, which share memory with those of the base."""
        found = self.base.value(known)
        for view in self.views:
            found = view(found)
        return found


class DeferredTensor(Tensor):
    """Tensor whose values are read at the first use. Make one by :func:`defer`."""

    _node: _Node

    @staticmethod
    def __new__(cls, like: Tensor, device: torch.device, node: _Node) -> "DeferredTensor":
        made: DeferredTensor = Tensor._make_wrapper_subclass(
            cls, like.size(), strides=like.stride(), dtype=like.dtype, device=device
        )
        made._node = node
        return made

    @property
    def is_kept(self) -> bool:
        """Whether the values are in memory for good, because something has changed or wanted them."""
        return self._node.base.kept is not None

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        first = args[0] if args else None
        if func in _OF_MEMORY and isinstance(first, DeferredTensor):
            first._node.base.keep()
            with torch.no_grad():
                return func(first._node.value({}), *args[1:], **(kwargs or {}))
        if func == _SET_DATA:
            return _set_data(args[0], args[1])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if func in _LIKE:
            return func(_meta(args[0]), *args[1:], **{**kwargs, "device": kwargs.get("device") or args[0].device})
        leaves, structure = pytree.tree_flatten((args, kwargs))
        if func._schema.is_mutable:
            return _change(func, args, kwargs, leaves, structure)
        if isinstance(args[0], DeferredTensor) and _is_view(func):
            return _viewed(func, args[0], args[1:], kwargs)
        noted = _noted(func, leaves, structure)
        return _computed(func, leaves, structure) if noted is None else noted

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            with torch.no_grad():
                copied = self.clone()
            if isinstance(self, nn.Parameter):
                copied = nn.Parameter(copied, self.requires_grad)
            others = {key: value for key, value in vars(self).items() if key not in _OWN_ATTRIBUTES}
            vars(copied).update(copy.deepcopy(others, memo))
            memo[id(self)] = copied
        found: Tensor = memo[id(self)]
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        value = own_values(self)
        ordinary = nn.Parameter(value, self.requires_grad) if isinstance(self, nn.Parameter) else value
        return ordinary.__reduce_ex__(protocol)

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        if self.is_kept:
            return repr(own_values(self))
        return f"DeferredTensor({list(self.shape)}, {self.dtype}, not read yet)"


def defer(
    like: Tensor, device: torch.device, read: Callable[[], Tensor], read_run: ReadRun | None = None
) -> DeferredTensor:
    """Deferred tensor with the metadata of ``like``, on ``device``.

    Args:
        like: Tensor on the meta device.
        device: Device of the values.
        read: Reads the values, into new memory on every call.
        read_run: Reads some of the elements, if that is possible; ``like`` must be row-major then.
    """
    return DeferredTensor(like, device, _Node(_Base(lambda known: read(), read_run)))


def own_values(tensor: DeferredTensor) -> Tensor:
    """Values of ``tensor`` in memory that nothing else has, with its strides."""
    node = tensor._node
    with torch.inference_mode(False), torch.no_grad():
        value = node.value({})
        is_new = node.base.kept is None and value.untyped_storage().nbytes() == value.nbytes
        if is_new and value.stride() == tensor.stride() and value.device == tensor.device:
            return value
        own = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        return own.copy_(value)


def run_of(tensor: DeferredTensor, start: int, stop: int) -> Tensor:
    """Elements of ``tensor`` from number ``start`` to ``stop`` in row-major order; others are read only if need be."""
    with torch.inference_mode(False), torch.no_grad():
        run = _run_of(tensor)
        return tensor._node.value({}).reshape(-1)[start:stop] if run is None else run(start, stop)


def undefer(tensor: DeferredTensor) -> Tensor:
    """Make ``tensor`` an ordinary one, in place: on the meta device, or with its values if these are kept.

    Returns:
        Tensor with the values: a deferred one, or ``tensor`` itself.
    """
    source = DeferredTensor(_meta(tensor), tensor.device, tensor._node)
    is_kept, is_parameter = tensor.is_kept, isinstance(tensor, nn.Parameter)
    leave_meta(tensor, own_values(tensor) if is_kept else _meta(tensor))
    tensor.__class__ = nn.Parameter if is_parameter else Tensor  # type: ignore[assignment]
    for name in _OWN_ATTRIBUTES:
        vars(tensor).pop(name, None)
    return tensor if is_kept else source


def read_now(root: nn.Module) -> None:
    """Give all deferred tensors of ``root`` their values, in place."""
    for tensor in (*root.parameters(), *root.buffers()):
        if isinstance(tensor, DeferredTensor):
            tensor._node.base.keep()
            undefer(tensor)


def _meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def _run_of(tensor: DeferredTensor) -> ReadRun | None:
    """Reads runs of ``tensor``, which is a run of its base; ``None``: it is none, or the base reads no runs."""
    node = tensor._node
    read, offset = node.base.run, node.offset
    if read is None or offset is None or not tensor.is_contiguous():
        return None
    return lambda start, stop: read(offset + start, offset + stop)


def _is_view(func: Any) -> bool:
    return any(each.alias_info is not None for each in func._schema.returns)


def _viewed(func: Any, base: DeferredTensor, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Deferred views of ``base``."""
    node = base._node

    def view(number: int | None, tensor: Tensor) -> Tensor:
        found = func(tensor, *args, **kwargs)
        made: Tensor = found if number is None else found[number]
        return made

    def viewed(number: int | None, shape: Tensor) -> DeferredTensor:
        # Views of another dtype count other elements, and a complex view may be a conjugate.
        is_known = node.offset is not None and func is not _aten.as_strided.default
        is_known = is_known and shape.dtype == base.dtype and not shape.is_complex()
        offset = (node.offset or 0) + int(shape.storage_offset()) if is_known else None
        return DeferredTensor(shape, base.device, _Node(node.base, (*node.views, partial(view, number)), offset))

    shapes = func(_meta(base), *args, **kwargs)
    if isinstance(shapes, Tensor):
        return viewed(None, shapes)
    return type(shapes)(viewed(number, shape) for number, shape in enumerate(shapes))


def _noted(func: Any, leaves: list[Any], structure: Any) -> DeferredTensor | None:
    """Deferred result of an operation; ``None``: it must be computed at once."""
    given = [leaf for leaf in leaves if isinstance(leaf, DeferredTensor)]
    has_others = len(given) < sum(isinstance(leaf, Tensor) for leaf in leaves)
    if has_others or all(each.is_kept for each in given) or torch.Tag.nondeterministic_seeded in func.tags:
        return None
    args, kwargs = pytree.tree_unflatten([_meta(x) if isinstance(x, Tensor) else x for x in leaves], structure)
    device = kwargs.get("device") or given[0].device
    try:
        shape = func(*args, **{**kwargs, "device": torch.device("meta")} if "device" in kwargs else kwargs)
    except (RuntimeError, TypeError):  # its shape depends on values, or it knows no meta device
        return None
    if not isinstance(shape, Tensor):
        return None
    nodes = [leaf._node if isinstance(leaf, DeferredTensor) else leaf for leaf in leaves]
    base = _Base(partial(_replayed, func, nodes, structure), _noted_run(func, given, shape, kwargs))
    for each in given:
        each._node.base.read_by(base)
    return DeferredTensor(shape, device, _Node(base))


def _noted_run(func: Any, given: list[DeferredTensor], shape: Tensor, kwargs: dict[str, Any]) -> ReadRun | None:
    """Computes runs of the result of an operation."""
    if func not in _ELEMENTWISE or not shape.is_contiguous() or _run_of(given[0]) is None:
        return None
    source = DeferredTensor(_meta(given[0]), given[0].device, given[0]._node)
    options = {name: value for name, value in kwargs.items() if name != "memory_format"}
    return lambda start, stop: func(run_of(source, start, stop), **options)


def _replayed(func: Any, nodes: Sequence[Any], structure: Any, known: _Known) -> Tensor:
    args, kwargs = pytree.tree_unflatten([x.value(known) if isinstance(x, _Node) else x for x in nodes], structure)
    result: Tensor = func(*args, **kwargs)
    return result


def _computed(func: Any, leaves: list[Any], structure: Any) -> Any:
    known: _Known = {}
    values = [leaf._node.value(known) if isinstance(leaf, DeferredTensor) else leaf for leaf in leaves]
    args, kwargs = pytree.tree_unflatten(values, structure)
    return func(*args, **kwargs)


def _change(func: Any, args: Any, kwargs: dict[str, Any], leaves: list[Any], structure: Any) -> Any:
    """Result of an operation that changes some of its arguments in place."""
    changed: list[Any] = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            changed += pytree.tree_leaves(args[number] if number < len(args) else kwargs.get(argument.name))
    for tensor in changed:
        if isinstance(tensor, DeferredTensor):
            tensor._node.base.change()
    result = _computed(func, leaves, structure)
    return changed[0] if isinstance(result, Tensor) and len(changed) == 1 else result


def _set_data(tensor: Tensor, data: Tensor) -> None:
    """``tensor.data = data``, one of which is deferred."""
    if not isinstance(tensor, DeferredTensor):
        assert isinstance(data, DeferredTensor)
        _SET_DATA(tensor, own_values(data))
        return
    if isinstance(data, DeferredTensor):
        node = data._node
    else:
        node = _Node(_Base(lambda known: data.detach()))
        node.base.keep()
    with torch._C.DisableTorchFunctionSubclass():
        _SET_DATA(tensor, DeferredTensor(_meta(data), data.device, node))
    tensor._node = node
