"""Deferred tensors: tensors whose values are in a file, or are computed from such, and are read at the first use.

A model that is loaded from pretrained files is renamed, cast, tied and adapted before it is partitioned, and none of
this needs values. So the tensors of the files are deferred: metadata is at hand, and operations that make new tensors
of deferred ones alone are noted, to be repeated when the result is needed. After the partition a rank reads the tensors
that it holds, and never the others. See [Note: deferred operations].
"""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from smp_strategy.distributed.torch_private import plain_functions
from smp_strategy.errors import UnsupportedError
from smp_strategy.model.deferred_memory import DeferredMemory, DeferredView, Known, ReadRun
from smp_strategy.model.initial_values import leave_meta

__all__ = ["DeferredTensor", "ReadRun", "defer", "lacks_values", "own_values", "read_now", "run_of", "undefer"]

# [Note: deferred operations]
# A deferred tensor is a wrapper subclass: shape, strides, dtype and device without memory. Operations arrive in
# `__torch_dispatch__`, below autograd:
#
# * a view of a deferred tensor is deferred and shares its memory, once there is some;
# * an operation that makes new tensors of deferred ones alone is noted, with the shapes that they have on the meta
#   device;
# * any other operation (one with ordinary tensors, with random numbers, or whose result Python reads) computes at once,
#   with values that are read for it and forgotten again;
# * an operation that changes a deferred tensor by numbers is noted, too: initialisers set the row of the padding token
#   to zero, say. Its views change with it. What was noted of the earlier values keeps these;
# * any other change gives the deferred tensor memory of its own for good, with all its views, since values may differ
#   between ranks until those of rank 0 are sent to all. Values that it replaces are not read before.
#
# Tensors of a checkpoint that hooks of the user may see are kept at their first use, and results are ordinary tensors.
#
# The result is that of the same operations on ordinary tensors, bit for bit, since the same operations run.
#
# A rank of a shard group needs a run of a tensor's elements. Views that are runs of their base, and casts of runs, are
# read as runs (`run_of`); for all else the whole tensor is read.

_aten: Any = torch.ops.aten
# Operations that take only metadata from their first argument.
_LIKE = frozenset(
    {
        *(_aten.empty_like.default, _aten.zeros_like.default, _aten.ones_like.default, _aten.full_like.default),
        *(_aten.rand_like.default, _aten.randn_like.default, _aten.new_empty.default, _aten.new_zeros.default),
        *(_aten.new_ones.default, _aten.new_full.default, _aten.new_empty_strided.default),
    }
)
# Views of everything, as it is.
_SAME = frozenset({_aten.detach.default, _aten.alias.default})
# Operations that replace all values of their first argument.
_REPLACING = frozenset({_aten.normal_.default, _aten.uniform_.default, _aten.copy_.default})
# Operations that compute each element from the same element of their argument.
_ELEMENTWISE = frozenset({_aten._to_copy.default, _aten.clone.default})
# Methods that reach for memory without an operation.
_OF_MEMORY = frozenset(
    {Tensor.numpy, Tensor.tolist, Tensor.data_ptr, Tensor.untyped_storage, Tensor.storage, Tensor.__array__}
)
_SET_DATA: Any = Tensor.data.__set__  # type: ignore[attr-defined]
# Attributes of a deferred tensor that an ordinary one does not have.
_OWN_ATTRIBUTES = ("_node", "_is_param")


class DeferredTensor(Tensor):
    """Tensor whose values are read at the first use. Make one by :func:`defer`."""

    _node: DeferredView

    @staticmethod
    def __new__(cls, like: Tensor, device: torch.device, node: DeferredView) -> "DeferredTensor":
        made: DeferredTensor = Tensor._make_wrapper_subclass(
            cls, like.size(), strides=like.stride(), dtype=like.dtype, device=device
        )
        made._node = node
        return made

    @property
    def is_kept(self) -> bool:
        """Whether the values are in memory for good, because something has changed or wanted them."""
        return self._node.base.kept is not None

    @property
    def is_changed(self) -> bool:
        """Whether the values are in memory and no longer those of the file."""
        return self._node.base.is_changed

    @property
    def origin(self) -> Callable[[], Tensor] | None:
        """Reader of these very values; ``None``: they are a part of others, computed, changed or handed out."""
        return None if self._node.views else self._node.base.origin

    @property
    def history(self) -> tuple[str, ...]:
        """Noted changes by numbers, as text; equal where the values will be."""
        return tuple(self._node.base.history)

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
        with plain_functions():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if func in _LIKE:
            return func(_meta(args[0]), *args[1:], **{**kwargs, "device": kwargs.get("device") or args[0].device})
        leaves, structure = pytree.tree_flatten((args, kwargs))
        if func not in _SAME:
            _keep(func, leaves)
        if func._schema.is_mutable:
            return _changed(func, args, kwargs, leaves, structure)
        if isinstance(args[0], DeferredTensor) and _is_view(func) and (func in _SAME or not args[0]._node.base.keeps):
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
    like: Tensor,
    device: torch.device,
    read: Callable[[], Tensor],
    read_run: ReadRun | None = None,
    *,
    keeps: bool = False,
) -> DeferredTensor:
    """Deferred tensor with the metadata of ``like``, on ``device``.

    Args:
        like: Tensor on the meta device.
        device: Device of the values.
        read: Reads the values, into new memory on every call.
        read_run: Reads some of the elements, if that is possible; ``like`` must be row-major then.
        keeps: Whether the first use keeps the values, and results of operations are ordinary tensors: for code of the
            user that does not know of deferred ones.
    """
    memory = DeferredMemory(lambda known: read(), read_run, read, keeps=keeps)
    return DeferredTensor(like, device, DeferredView(memory))


def own_values(tensor: DeferredTensor) -> Tensor:
    """Values of ``tensor`` in memory that nothing else has, with its strides."""
    node = tensor._node
    with torch.inference_mode(False), torch.no_grad():
        value = node.value({})
        is_new = node.base.is_new and value.untyped_storage().nbytes() == value.nbytes
        if is_new and value.stride() == tensor.stride() and value.device == tensor.device:
            return value
        own = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        return own.copy_(value)


def run_of(tensor: DeferredTensor, start: int, stop: int) -> Tensor:
    """Elements of ``tensor`` from number ``start`` to ``stop`` in row-major order; others are read only if need be."""
    with torch.inference_mode(False), torch.no_grad():
        run = _run_of(tensor)
        return tensor._node.value({}).reshape(-1)[start:stop] if run is None else run(start, stop)


def lacks_values(tensor: Tensor) -> bool:
    """Whether ``tensor`` has no values in memory that count: it is on the meta device, or as it is in its file."""
    return tensor.is_meta or (isinstance(tensor, DeferredTensor) and not tensor.is_changed)


def undefer(tensor: DeferredTensor, *, read: bool = False) -> Tensor:
    """Make ``tensor`` an ordinary one, in place: with its values if they have changed, else on the meta device.

    Args:
        tensor: Tensor to change.
        read: Whether it gets its values in any case.

    Returns:
        Tensor with the values: a deferred one, or ``tensor`` itself.
    """
    source = DeferredTensor(_meta(tensor), tensor.device, tensor._node)
    has_values, is_parameter = read or tensor.is_changed, isinstance(tensor, nn.Parameter)
    leave_meta(tensor, own_values(tensor) if has_values else _meta(tensor))
    tensor.__class__ = nn.Parameter if is_parameter else Tensor  # type: ignore[assignment]
    for name in _OWN_ATTRIBUTES:
        vars(tensor).pop(name, None)
    return tensor if has_values else source


def read_now(root: nn.Module) -> None:
    """Give all deferred tensors of ``root`` their values, in place."""
    for tensor in (*root.parameters(), *root.buffers()):
        if isinstance(tensor, DeferredTensor):
            undefer(tensor, read=True)


def _meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def _run_of(tensor: DeferredTensor) -> ReadRun | None:
    """Reads runs of ``tensor``, which is a run of its base; ``None``: it is none, or the base reads no runs."""
    node = tensor._node
    read, offset = node.base.run, node.offset
    if read is None or offset is None or not tensor.is_contiguous():
        return None
    return lambda start, stop: read(offset + start, offset + stop)


def _keep(func: Any, leaves: list[Any]) -> None:
    """Keep the values of those that are kept at their first use. Loading a module tensor by tensor keeps none."""
    if func is _aten.copy_.default and not isinstance(leaves[0], DeferredTensor):
        return
    for leaf in leaves:
        if isinstance(leaf, DeferredTensor) and leaf._node.base.keeps:
            leaf._node.base.keep()


def _is_view(func: Any) -> bool:
    return any(each.alias_info is not None for each in func._schema.returns)


def _viewed(func: Any, base: DeferredTensor, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Deferred views of ``base``."""
    node = base._node
    if func in _SAME:
        return DeferredTensor(_meta(base), base.device, DeferredView(node.base, node.views, node.offset))

    def view(number: int | None, tensor: Tensor) -> Tensor:
        found = func(tensor, *args, **kwargs)
        made: Tensor = found if number is None else found[number]
        return made

    def viewed(number: int | None, shape: Tensor) -> DeferredTensor:
        # Views of another dtype count other elements, and a complex view may be a conjugate.
        is_known = node.offset is not None and func is not _aten.as_strided.default
        is_known = is_known and shape.dtype == base.dtype and not shape.is_complex()
        offset = (node.offset or 0) + int(shape.storage_offset()) if is_known else None
        return DeferredTensor(shape, base.device, DeferredView(node.base, (*node.views, partial(view, number)), offset))

    shapes = func(_meta(base), *args, **kwargs)
    if isinstance(shapes, Tensor):
        return viewed(None, shapes)
    return type(shapes)(viewed(number, shape) for number, shape in enumerate(shapes))


def _noted(func: Any, leaves: list[Any], structure: Any) -> Any:
    """Deferred results of an operation; ``None``: it must be computed at once."""
    given = [leaf for leaf in leaves if isinstance(leaf, DeferredTensor)]
    has_others = len(given) < sum(isinstance(leaf, Tensor) for leaf in leaves)
    if has_others or all(each.is_kept for each in given) or torch.Tag.nondeterministic_seeded in func.tags:
        return None
    args, kwargs = _meta_arguments(leaves, structure)
    device = kwargs.get("device") or given[0].device
    try:
        shapes = func(*args, **{**kwargs, "device": torch.device("meta")} if "device" in kwargs else kwargs)
    except (RuntimeError, TypeError):  # its shape depends on values, or it knows no meta device
        return None
    if isinstance(shapes, Tensor):
        operands = _operands(leaves)
        run = _noted_run(func, leaves, operands, kwargs) if shapes.is_contiguous() else None
        return DeferredTensor(
            shapes, device, DeferredView(DeferredMemory(partial(_replayed, func, operands, structure, None), run))
        )
    if not isinstance(shapes, tuple | list) or not all(isinstance(each, Tensor) for each in shapes):
        return None
    return type(shapes)(
        DeferredTensor(
            shape, device, DeferredView(DeferredMemory(partial(_replayed, func, _operands(leaves), structure, number)))
        )
        for number, shape in enumerate(shapes)
    )


def _meta_arguments(leaves: list[Any], structure: Any) -> Any:
    return pytree.tree_unflatten([_meta(x) if isinstance(x, Tensor) else x for x in leaves], structure)


def _operands(leaves: list[Any]) -> list[Any]:
    """The same with what a noted operation reads in the place of deferred tensors."""
    return [leaf._node.base.read_through(leaf._node) if isinstance(leaf, DeferredTensor) else leaf for leaf in leaves]


def _noted_run(func: Any, leaves: list[Any], operands: list[Any], kwargs: dict[str, Any]) -> ReadRun | None:
    """Computes runs of the result of an operation, if that is row-major."""
    if func not in _ELEMENTWISE or _run_of(leaves[0]) is None:
        return None
    source = DeferredTensor(_meta(leaves[0]), leaves[0].device, operands[0])
    options = {name: value for name, value in kwargs.items() if name != "memory_format"}
    return lambda start, stop: func(run_of(source, start, stop), **options)


def _replayed(func: Any, operands: Sequence[Any], structure: Any, number: int | None, known: Known) -> Tensor:
    values = [each.value(known) if isinstance(each, DeferredView) else each for each in operands]
    args, kwargs = pytree.tree_unflatten(values, structure)
    with torch.no_grad():
        result = func(*args, **kwargs)
    made: Tensor = result if number is None else result[number]
    return made


def _computed(func: Any, leaves: list[Any], structure: Any) -> Any:
    known: Known = {}
    values = [leaf._node.value(known) if isinstance(leaf, DeferredTensor) else leaf for leaf in leaves]
    args, kwargs = pytree.tree_unflatten(values, structure)
    return func(*args, **kwargs)


def _changed(func: Any, args: Any, kwargs: dict[str, Any], leaves: list[Any], structure: Any) -> Any:
    """Result of an operation that changes some of its arguments in place."""
    changed: list[Any] = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            changed += pytree.tree_leaves(args[number] if number < len(args) else kwargs.get(argument.name))
    if torch.Tag.inplace_view in func.tags and any(isinstance(each, DeferredTensor) for each in changed):
        raise UnsupportedError(
            f"`{func.overloadpacket.__name__}` of a tensor of a pretrained model whose values are not read yet: its "
            "shape cannot change in place. Assign the result of the same operation without `_`, as a new parameter or "
            "as `.data`."
        )
    if len(changed) == 1 and args and args[0] is changed[0] and _is_change_noted(func, leaves, structure):
        return changed[0]
    for tensor in changed:
        if isinstance(tensor, DeferredTensor):
            replaced = _is_replaced(func, leaves, structure) and tensor is leaves[0]
            tensor._node.base.change_at_once(
                torch.empty_like(_meta(tensor), device=tensor.device) if replaced else None
            )
    result = _computed(func, leaves, structure)
    return changed[0] if isinstance(result, Tensor) and len(changed) == 1 else result


def _is_replaced(func: Any, leaves: list[Any], structure: Any) -> bool:
    """Whether an operation replaces all values of the first of ``leaves`` and its base by ordinary ones."""
    if func not in _REPLACING or not isinstance(leaves[0], DeferredTensor) or leaves[0]._node.views:
        return False
    return not any(isinstance(each, DeferredTensor) for each in leaves[1:]) and _is_possible(func, leaves, structure)


def _is_possible(func: Any, leaves: list[Any], structure: Any) -> bool:
    """Whether an operation is right for the meta device; if it is wrong, computing it will tell."""
    args, kwargs = _meta_arguments(leaves, structure)
    try:
        func(*args, **kwargs)
    except (RuntimeError, TypeError):
        return False
    return True


def _is_change_noted(func: Any, leaves: list[Any], structure: Any) -> bool:
    """Note an operation that changes the first of ``leaves`` alone; ``False``: it must be computed at once."""
    tensor, *others = leaves
    if not isinstance(tensor, DeferredTensor) or tensor.is_kept:
        return False
    if not all(_can_be_noted(each, tensor.device) for each in others):
        return False
    if torch.Tag.nondeterministic_seeded in func.tags or not _is_possible(func, leaves, structure):
        return False
    node, copies = tensor._node, [each.clone() if isinstance(each, Tensor) else each for each in others]
    views = node.views

    def change(value: Tensor) -> None:
        for view in views:
            value = view(value)
        _replayed(func, [value, *copies], structure, None, {})

    numbers = [each.item() if isinstance(each, Tensor) else each for each in copies]
    node.base.change_later(change, f"{func}{numbers}")
    return True


def _can_be_noted(leaf: Any, device: torch.device) -> bool:
    """Whether a change on ``device`` can remember an argument until it is repeated: a number is one, on all ranks."""
    if not isinstance(leaf, Tensor):
        return True
    # Only values tell whether an index or a mask is right, and an error must be raised at once.
    is_number = leaf.is_floating_point() or leaf.is_complex()
    return type(leaf) in (Tensor, nn.Parameter) and leaf.device == device and leaf.ndim == 0 and is_number


def _set_data(tensor: Tensor, data: Tensor) -> None:
    """``tensor.data = data``, one of which is deferred."""
    if not isinstance(tensor, DeferredTensor):
        assert isinstance(data, DeferredTensor)
        _SET_DATA(tensor, own_values(data))
        return
    if isinstance(data, DeferredTensor):
        node = data._node
    else:
        node = DeferredView(DeferredMemory(lambda known: data.detach()))
        node.base.change_at_once(data.detach())
    with plain_functions():
        _SET_DATA(tensor, DeferredTensor(_meta(data), data.device, node))
    tensor._node = node
