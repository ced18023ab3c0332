"""Deferred tensors: tensors with metadata, and with a recipe for their values.

A model that is loaded from pretrained files is renamed, cast, tied and adapted before it is partitioned, and none of
this needs values. So the tensors of the files are deferred: metadata is at hand, and operations that make new tensors
of deferred ones alone are noted, to be repeated when the result is needed. After the partition a rank reads the tensors
that it holds, and never the others. See [Note: deferred operations].

Saving is the other direction. Libraries edit a state dict (drop tied tensors, rename, split or join tensors), and write
the result. If the model is spread over ranks, the tensors of the state dict are deferred *entries*: their values are
gathered and computed later, one recipe after the other, by the ranks that write them
(:mod:`smp_strategy.checkpoint.spread_state`). See [Note: deferred entries].
"""

import copy
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from smp_strategy.distributed.torch_private import plain_functions
from smp_strategy.errors import UnsupportedError
from smp_strategy.model.initial_values import leave_meta

__all__ = [
    "DeferredTensor",
    "Known",
    "ReadRun",
    "Recipe",
    "defer",
    "entry",
    "entries_of",
    "lacks_values",
    "own_values",
    "run_of",
    "undefer",
]

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

# [Note: deferred entries]
# No rank can compute the values of an entry alone, so whatever is not noted is refused, changes as well. The recipe of
# a tensor can be pickled: one rank edits the state dict, and others write. Values are computed in host memory.
# Libraries look at storages to find tied tensors and to count bytes, so an entry and its views share an address.

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
# Memory of entries is never made, but libraries recognise tied tensors by its address.
_FIRST_ADDRESS: Final = 1 << 60
# Values with at most this many elements are cached, since Python reads them again and again.
_MOST_CACHED: Final = 1024
# Values that are needed more often are cached as well: those of a model that computes and is never partitioned.
_MOST_USES: Final = 3
_SET_DATA: Any = Tensor.data.__set__  # type: ignore[attr-defined]
# Attributes of a deferred tensor that an ordinary one does not have.
_OWN_ATTRIBUTES = ("recipe", "_is_param")


@final
class DeferredMemory:
    """Memory of a deferred tensor and its views: computed when needed, or kept for good.

    Args:
        compute: Computes the values, in new memory.
        run: Computes a run of them, if the memory is row-major.
        origin: What reads the values, if they are not computed.
        keeps: Whether the first use keeps the values, and results of operations are ordinary tensors.
        entry_bytes: Number of bytes, if the values are those of entries, which no rank has.

    Attributes:
        keeps, entry_bytes: As given.
        kept: Values that are kept for good; ``None``: they are computed when needed.
        is_changed: Whether values that are kept are no longer those that ``compute`` gives.
        history: Noted changes, as text.
    """

    def __init__(
        self,
        compute: "Callable[[Known], Tensor]",
        run: "ReadRun | None" = None,
        origin: Callable[[], Tensor] | None = None,
        *,
        keeps: bool = False,
        entry_bytes: int | None = None,
    ) -> None:
        self._compute = compute
        self._run = run
        self._origin = origin
        self.keeps = keeps
        self.entry_bytes = entry_bytes
        self.kept: Tensor | None = None
        self.is_changed = False
        self.history: list[str] = []
        self._cached: Tensor | None = None
        self._num_uses = 0
        self._changes: list[Callable[[Tensor], object]] = []
        # What noted operations read.
        self._readers: list[weakref.ref[Recipe]] = []

    def __reduce__(self) -> Any:
        """What a writer needs to compute entries."""
        return DeferredMemory, (self._compute,), {"entry_bytes": self.entry_bytes}

    @property
    def compute(self) -> "Callable[[Known], Tensor]":
        """Computes the values, without noted changes."""
        return self._compute

    def value(self, known: "Known") -> Tensor:
        """The values: those that are kept, cached or ``known``, or new ones."""
        found = self._cached if self.kept is None else self.kept
        if found is not None:
            return found
        if self not in known:
            value = self._compute(known)
            for change in self._changes:
                change(value)
            known[self] = value
            self._num_uses += 1
            # Entries are computed once, and are freed when they have been written.
            is_used_again = self._num_uses > _MOST_USES or value.numel() <= _MOST_CACHED
            if is_used_again and self.entry_bytes is None:
                self._cached = value
        return known[self]

    @property
    def origin(self) -> Callable[[], Tensor] | None:
        """Reader of these very values; ``None``: they are computed, changed, or have been handed out for good."""
        return self._origin if self.kept is None and not self._changes else None

    @property
    def is_new(self) -> bool:
        """Whether the next :meth:`value` is in memory that nothing else has."""
        return self.kept is None and self._cached is None

    @property
    def run(self) -> "ReadRun | None":
        """Reads a run of the elements alone; ``None``: all must be read, or are kept."""
        return self._run if self.kept is None and not self._changes else None

    def keep(self) -> None:
        """Keep the values for good."""
        if self.kept is None:
            self.kept, self._cached = self.value({}), None

    def read_through(self, view: "Recipe") -> "Recipe":
        """Source of an operation that is noted now: the values of ``view``, even if the memory changes."""
        read = Recipe(self, view.views, view.offset)
        self._readers.append(weakref.ref(read))
        return read

    def change_at_once(self, replaced: Tensor | None) -> None:
        """The values are about to be changed in place; all of them are, if there is memory for them: ``replaced``."""
        self._part_from_readers()
        if self.kept is None and replaced is not None:
            self.kept = replaced
        self.keep()
        self.is_changed = True

    def change_later(self, change: Callable[[Tensor], object], text: str) -> None:
        """Let ``change``, of which ``text`` tells all, change the values when they are computed; they are not kept."""
        self._part_from_readers()
        self._cached = None
        self._changes.append(change)
        self.history.append(text)

    def _part_from_readers(self) -> None:
        """Leave the values until now to a base of their own if something reads them."""
        readers = [recipe for reference in self._readers if (recipe := reference()) is not None]
        self._readers = []
        if not readers:
            return
        older = DeferredMemory(self._compute, self._run)
        older._changes, older._readers = self._changes, [weakref.ref(recipe) for recipe in readers]
        older.kept = None if self.kept is None else self.kept.clone()
        for recipe in readers:
            recipe.base = older
        self._compute, self._run, self._changes = lambda known: older.value(known).clone(), None, []


Views: TypeAlias = tuple[Callable[[Tensor], Tensor], ...]
# Reads the elements from the first number to the second, in row-major order, into new memory of one dim.
ReadRun: TypeAlias = Callable[[int, int], Tensor]


@final
class Recipe:
    """Values of a deferred tensor: those of a base, or a view of them that begins at ``offset``, if that is known."""

    def __init__(self, base: DeferredMemory, views: Views = (), offset: int | None = 0) -> None:
        self.base = base
        self.views = views
        self.offset = offset

    def value(self, known: "Known") -> Tensor:
        """The values, which share memory with those of the base."""
        found = self.base.value(known)
        for view in self.views:
            found = view(found)
        return found


@final
@dataclass(frozen=True, eq=False)
class _Operation:
    """Operation of torch that is yet to be done. Several results may refer to it."""

    function: Any
    operands: Sequence[Any]
    """Flat arguments, with recipes in the place of deferred tensors."""
    structure: Any
    """Structure of the arguments."""

    def __reduce__(self) -> Any:
        arguments = pytree.tree_unflatten(self.operands, self.structure)
        return _restored, (self.function.overloadpacket.__name__, self.function._overloadname, arguments)

    def __call__(self, operands: Sequence[Any]) -> Any:
        args, kwargs = pytree.tree_unflatten(operands, self.structure)
        return self.function(*args, **kwargs)

    def view(self, number: int | None, base: Tensor) -> Tensor:
        """Result ``number`` of a view of ``base``, which is the first operand."""
        return _numbered(self([base, *self.operands[1:]]), number)


def _restored(packet: str, overload: str, arguments: Any) -> _Operation:
    return _Operation(getattr(getattr(_aten, packet), overload), *pytree.tree_flatten(arguments))


def _numbered(results: Any, number: int | None) -> Tensor:
    found: Tensor = results if number is None else results[number]
    return found


@final
@dataclass(frozen=True, eq=False)
class _Result:
    """Values that are one of the results of an operation; without a number, the only one."""

    operation: _Operation
    number: int | None

    def __call__(self, known: "Known") -> Tensor:
        operation = self.operation
        if operation not in known:
            values = [each.value(known) if isinstance(each, Recipe) else each for each in operation.operands]
            with torch.no_grad():
                known[operation] = operation(values)
        return _numbered(known[operation], self.number)


@final
@dataclass(frozen=True)
class _EntryValues:
    """Values of an entry of a state dict, which are known when it is written."""

    name: str

    def __call__(self, known: "Known") -> Tensor:
        if self.name not in known:
            raise _refused("Tensor.__reduce_ex__")
        found: Tensor = known[self.name]
        return found


# What one evaluation has found already; several operations may read the same base. Entries are there by their names.
Known: TypeAlias = dict[DeferredMemory | _Operation | str, Any]


@final
class _NoStorage:
    """Storage of entries: an address of its own, and the size that it would have."""

    def __init__(self, memory: DeferredMemory) -> None:
        self._memory = memory

    def data_ptr(self) -> int:
        """Address, by which libraries tell storages apart."""
        return _FIRST_ADDRESS + id(self._memory)

    def nbytes(self) -> int:
        """Number of bytes."""
        assert self._memory.entry_bytes is not None
        return self._memory.entry_bytes


class DeferredTensor(Tensor):
    """Tensor without values. Make one by :func:`defer` or :func:`entry`.

    Attributes:
        recipe: Recipe of the values.
    """

    recipe: Recipe

    @staticmethod
    def __new__(cls, like: Tensor, device: torch.device, recipe: Recipe) -> "DeferredTensor":
        made: DeferredTensor = Tensor._make_wrapper_subclass(
            cls, like.size(), strides=like.stride(), dtype=like.dtype, device=device
        )
        made.recipe = recipe
        return made

    @property
    def is_kept(self) -> bool:
        """Whether the values are in memory for good, because something has changed or wanted them."""
        return self.recipe.base.kept is not None

    @property
    def is_changed(self) -> bool:
        """Whether the values are in memory and no longer those of the file."""
        return self.recipe.base.is_changed

    @property
    def origin(self) -> Callable[[], Tensor] | None:
        """Reader of these very values; ``None``: they are a part of others, computed, changed or handed out."""
        return None if self.recipe.views else self.recipe.base.origin

    @property
    def history(self) -> tuple[str, ...]:
        """Noted changes by numbers, as text; equal where the values will be."""
        return tuple(self.recipe.base.history)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        first = args[0] if args else None
        if func in _OF_MEMORY and isinstance(first, DeferredTensor):
            if first.recipe.base.entry_bytes is not None:
                return _of_entry(func, first)
            first.recipe.base.keep()
            with torch.no_grad():
                return func(first.recipe.value({}), *args[1:], **(kwargs or {}))
        if func == _SET_DATA:
            return _set_data(args[0], args[1])
        with plain_functions():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        leaves, structure = pytree.tree_flatten((args, kwargs))
        if _are_entries(leaves):
            return _computed_from_entries(func, args, kwargs)
        if func in _LIKE:
            return func(_meta(args[0]), *args[1:], **{**kwargs, "device": kwargs.get("device") or args[0].device})
        if func not in _SAME:
            _keep(func, leaves)
        if func._schema.is_mutable:
            return _changed(func, args, kwargs, leaves, structure)
        if isinstance(args[0], DeferredTensor) and _is_view(func) and (func in _SAME or not args[0].recipe.base.keeps):
            return _viewed(func, leaves, structure)
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
    return DeferredTensor(like, device, Recipe(memory))


def entry(name: str, shape: Sequence[int], dtype: torch.dtype) -> DeferredTensor:
    """Deferred entry ``name`` of a state dict, whose values are gathered when it is written."""
    like = torch.empty(shape, dtype=dtype, device="meta")
    return DeferredTensor(
        like, torch.device("cpu"), Recipe(DeferredMemory(_EntryValues(name), entry_bytes=like.nbytes))
    )


def entries_of(recipe: Recipe) -> frozenset[str]:
    """Names of the entries that ``recipe`` needs. Its values are ``recipe.value`` of a dict with those of each."""
    compute = recipe.base.compute
    if isinstance(compute, _EntryValues):
        return frozenset({compute.name})
    assert isinstance(compute, _Result)
    return frozenset().union(*(entries_of(each) for each in compute.operation.operands if isinstance(each, Recipe)))


def own_values(tensor: DeferredTensor) -> Tensor:
    """Values of ``tensor`` in memory that nothing else has, with its strides."""
    recipe = tensor.recipe
    with torch.inference_mode(False), torch.no_grad():
        value = recipe.value({})
        is_new = recipe.base.is_new and value.untyped_storage().nbytes() == value.nbytes
        if is_new and value.stride() == tensor.stride() and value.device == tensor.device:
            return value
        own = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        return own.copy_(value)


def run_of(tensor: DeferredTensor, start: int, stop: int) -> Tensor:
    """Elements of ``tensor`` from number ``start`` to ``stop`` in row-major order; others are read only if need be."""
    with torch.inference_mode(False), torch.no_grad():
        run = _run_of(tensor)
        return tensor.recipe.value({}).reshape(-1)[start:stop] if run is None else run(start, stop)


def lacks_values(tensor: Tensor) -> bool:
    """Whether ``tensor`` has no values in memory that count: it is on the meta device, or as it is in its file."""
    return tensor.is_meta or (isinstance(tensor, DeferredTensor) and not tensor.is_changed)


def undefer(tensor: DeferredTensor, *, read: bool = False) -> Tensor:
    """Make ``tensor`` an ordinary one, in place: with its values if they have changed, else on the meta device.

    Returns:
        Tensor with the values: a deferred one, or ``tensor`` itself.
    """
    source = DeferredTensor(_meta(tensor), tensor.device, tensor.recipe)
    has_values, is_parameter = read or tensor.is_changed, isinstance(tensor, nn.Parameter)
    leave_meta(tensor, own_values(tensor) if has_values else _meta(tensor))
    tensor.__class__ = nn.Parameter if is_parameter else Tensor  # type: ignore[assignment]
    for name in _OWN_ATTRIBUTES:
        vars(tensor).pop(name, None)
    return tensor if has_values else source


def _meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def _run_of(tensor: DeferredTensor) -> ReadRun | None:
    """Reads runs of ``tensor``, which is a run of its base; ``None``: it is none, or the base reads no runs."""
    recipe = tensor.recipe
    read, offset = recipe.base.run, recipe.offset
    if read is None or offset is None or not tensor.is_contiguous():
        return None
    return lambda start, stop: read(offset + start, offset + stop)


def _keep(func: Any, leaves: list[Any]) -> None:
    """Keep the values of those that are kept at their first use. Loading a module tensor by tensor keeps none."""
    if func is _aten.copy_.default and not isinstance(leaves[0], DeferredTensor):
        return
    for leaf in leaves:
        if isinstance(leaf, DeferredTensor) and leaf.recipe.base.keeps:
            leaf.recipe.base.keep()


def _is_view(func: Any) -> bool:
    return any(each.alias_info is not None for each in func._schema.returns)


def _viewed(func: Any, leaves: list[Any], structure: Any) -> Any:
    """Deferred views of the first of ``leaves``."""
    base = leaves[0]
    recipe: Recipe = base.recipe
    if func in _SAME:
        return DeferredTensor(_meta(base), base.device, Recipe(recipe.base, recipe.views, recipe.offset))
    operation = _Operation(func, [None, *leaves[1:]], structure)

    def viewed(number: int | None, shape: Tensor) -> DeferredTensor:
        # Views of another dtype count other elements, and a complex view may be a conjugate.
        is_known = recipe.offset is not None and func is not _aten.as_strided.default
        is_known = is_known and shape.dtype == base.dtype and not shape.is_complex()
        offset = (recipe.offset or 0) + int(shape.storage_offset()) if is_known else None
        view = partial(operation.view, number)
        return DeferredTensor(shape, base.device, Recipe(recipe.base, (*recipe.views, view), offset))

    return _each(viewed, operation([_meta(base), *leaves[1:]]))


def _each(made: Callable[[int | None, Tensor], DeferredTensor], shapes: Any) -> Any:
    """``made`` of each result of an operation and its number."""
    if isinstance(shapes, Tensor):
        return made(None, shapes)
    return type(shapes)(made(number, shape) for number, shape in enumerate(shapes))


def _noted(func: Any, leaves: list[Any], structure: Any) -> Any:
    """Deferred results of an operation; ``None``: it must be computed at once."""
    given = [leaf for leaf in leaves if isinstance(leaf, DeferredTensor)]
    are_entries = _are_entries(leaves)
    has_others = len(given) < sum(isinstance(leaf, Tensor) for leaf in leaves) and not are_entries
    if has_others or all(each.is_kept for each in given) or torch.Tag.nondeterministic_seeded in func.tags:
        return None
    args, kwargs = _meta_arguments(leaves, structure)
    device = kwargs.get("device") or given[0].device
    try:
        shapes = func(*args, **{**kwargs, "device": torch.device("meta")} if "device" in kwargs else kwargs)
    except (RuntimeError, TypeError):  # its shape depends on values, or it knows no meta device
        return None
    are_many = isinstance(shapes, tuple | list)
    if not all(isinstance(each, Tensor) for each in (shapes if are_many else [shapes])):
        return None
    # What it reads in the place of deferred tensors.
    operands = [
        leaf.recipe.base.read_through(leaf.recipe) if isinstance(leaf, DeferredTensor) else leaf for leaf in leaves
    ]
    operation = _Operation(func, operands, structure)

    def noted(number: int | None, shape: Tensor) -> DeferredTensor:
        is_run = number is None and shape.is_contiguous()
        run = _noted_run(func, leaves, operands, kwargs) if is_run else None
        entry_bytes = shape.nbytes if are_entries else None
        memory = DeferredMemory(_Result(operation, number), run, entry_bytes=entry_bytes)
        return DeferredTensor(shape, device, Recipe(memory))

    return _each(noted, shapes)


def _meta_arguments(leaves: list[Any], structure: Any) -> Any:
    return pytree.tree_unflatten([_meta(x) if isinstance(x, Tensor) else x for x in leaves], structure)


def _noted_run(func: Any, leaves: list[Any], operands: list[Any], kwargs: dict[str, Any]) -> ReadRun | None:
    """Computes runs of the result of an operation, if that is row-major."""
    if func not in _ELEMENTWISE or _run_of(leaves[0]) is None:
        return None
    source = DeferredTensor(_meta(leaves[0]), leaves[0].device, operands[0])
    options = {name: value for name, value in kwargs.items() if name != "memory_format"}
    return lambda start, stop: func(run_of(source, start, stop), **options)


def _computed(func: Any, leaves: list[Any], structure: Any) -> Any:
    known: Known = {}
    values = [leaf.recipe.value(known) if isinstance(leaf, DeferredTensor) else leaf for leaf in leaves]
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
            tensor.recipe.base.change_at_once(
                torch.empty_like(_meta(tensor), device=tensor.device) if replaced else None
            )
    result = _computed(func, leaves, structure)
    return changed[0] if isinstance(result, Tensor) and len(changed) == 1 else result


def _is_replaced(func: Any, leaves: list[Any], structure: Any) -> bool:
    """Whether an operation replaces all values of the first of ``leaves`` and its base by ordinary ones."""
    if func not in _REPLACING or not isinstance(leaves[0], DeferredTensor) or leaves[0].recipe.views:
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
    recipe, copies = tensor.recipe, [each.clone() if isinstance(each, Tensor) else each for each in others]
    operation, views = _Operation(func, [None, *copies], structure), recipe.views

    def change(value: Tensor) -> None:
        for view in views:
            value = view(value)
        with torch.no_grad():
            operation([value, *copies])

    numbers = [each.item() if isinstance(each, Tensor) else each for each in copies]
    recipe.base.change_later(change, f"{func}{numbers}")
    return True


def _can_be_noted(leaf: Any, device: torch.device) -> bool:
    """Whether a change on ``device`` can remember an argument until it is repeated: a number is one, on all ranks."""
    if not isinstance(leaf, Tensor):
        return True
    # Only values tell whether an index or a mask is right, and an error must be raised at once.
    is_number = leaf.is_floating_point() or leaf.is_complex()
    return type(leaf) in (Tensor, nn.Parameter) and leaf.device == device and leaf.ndim == 0 and is_number


def _are_entries(leaves: Sequence[Any]) -> bool:
    return any(isinstance(leaf, DeferredTensor) and leaf.recipe.base.entry_bytes is not None for leaf in leaves)


def _computed_from_entries(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Noted results, or views, of an operation on entries; see [Note: deferred entries]."""
    options = {name: value for name, value in kwargs.items() if name != "device"}
    leaves, structure = pytree.tree_flatten((args, options))
    found = None
    if not func._schema.is_mutable and func.namespace == "aten":
        is_view = isinstance(leaves[0], DeferredTensor) and _is_view(func)
        found = (_viewed if is_view else _noted)(func, leaves, structure)
    if found is None:
        raise _refused(func)
    return found


def _of_entry(func: Any, tensor: DeferredTensor) -> Any:
    """Result of a method that reaches for the memory of an entry."""
    storage = _NoStorage(tensor.recipe.base)
    if func is Tensor.untyped_storage:
        return storage
    if func is Tensor.data_ptr:
        return storage.data_ptr() + (tensor.recipe.offset or 0) * tensor.dtype.itemsize
    raise _refused(func.__name__)


def _refused(use: object) -> UnsupportedError:
    return UnsupportedError(
        f"`{use}` changes, or looks at, a weight while the model is being saved, but no rank has it there. "
        "Save `accelerator.get_state_dict(model)` instead, which gathers the model."
    )


def _set_data(tensor: Tensor, data: Tensor) -> None:
    """``tensor.data = data``, one of which is deferred."""
    if not isinstance(tensor, DeferredTensor):
        assert isinstance(data, DeferredTensor)
        _SET_DATA(tensor, own_values(data))
        return
    if isinstance(data, DeferredTensor):
        recipe = data.recipe
    else:
        recipe = Recipe(DeferredMemory(lambda known: data.detach()))
        recipe.base.change_at_once(data.detach())
    with plain_functions():
        _SET_DATA(tensor, DeferredTensor(_meta(data), data.device, recipe))
    tensor.recipe = recipe
