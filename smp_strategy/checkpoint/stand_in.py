"""Stand-ins: tensors without values that remember how their values are made.

Libraries save a model in two steps: they edit a state dict (drop tied tensors, rename, split or join tensors), and
write the result. The first step needs names, shapes and dtypes only. So it runs on :class:`StandIn` tensors, and each
tensor that is to be written then has a :data:`Recipe`: an entry of the original state dict, or the result of operations
on such entries. The values are gathered and computed later, one recipe after the other, by whoever writes them
(:mod:`smp_strategy.checkpoint.spread_state`).

A recipe can be pickled, so that one rank edits the state dict and others write.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from smp_strategy.checkpoint.storage.write_plan import LocalTensorInfo
from smp_strategy.distributed.torch_private import disabled_torch_function
from smp_strategy.errors import UnsupportedError

__all__ = ["DeferredOperation", "DeferredResult", "EntryRecipe", "Recipe", "StandIn", "entries_of", "value_of"]

# Stand-ins have no storage, but libraries recognise tied tensors by it.
_FIRST_ADDRESS: Final = 1 << 60


@final
@dataclass(frozen=True)
class EntryRecipe:
    """Entry of the original state dict."""

    name: str


@final
@dataclass(frozen=True, eq=False)
class DeferredOperation:
    """Operation of torch that is yet to be done. Several results may refer to it."""

    packet: str
    """Name of the operator, such as ``split``."""
    overload: str
    arguments: tuple[Any, ...]
    """Arguments, with a :data:`Recipe` in place of each stand-in."""
    options: Mapping[str, Any]

    def run(self, values: Mapping[str, Tensor], done: "dict[DeferredOperation, list[Any]]") -> list[Any]:
        """All results, flat."""
        if self not in done:
            arguments, options = pytree.tree_map_only(
                _RECIPES, lambda recipe: _made(recipe, values, done), (self.arguments, dict(self.options))
            )
            operator = getattr(getattr(torch.ops.aten, self.packet), self.overload)
            done[self] = pytree.tree_leaves(operator(*arguments, **options))
        return done[self]


@final
@dataclass(frozen=True, eq=False)
class DeferredResult:
    """One of the results of an operation."""

    operation: DeferredOperation
    number: int


Recipe: TypeAlias = EntryRecipe | DeferredResult
_RECIPES: Final = (EntryRecipe, DeferredResult)


def entries_of(recipe: Recipe) -> frozenset[str]:
    """Names of the entries that ``recipe`` needs."""
    return frozenset(_entries(recipe))


def _entries(recipe: Recipe) -> Iterator[str]:
    if isinstance(recipe, EntryRecipe):
        yield recipe.name
        return
    operation = recipe.operation
    for leaf in pytree.tree_leaves((operation.arguments, dict(operation.options))):
        if isinstance(leaf, _RECIPES):
            yield from _entries(leaf)


def value_of(
    recipe: Recipe, values: Mapping[str, Tensor], done: dict[DeferredOperation, list[Any]] | None = None
) -> Tensor:
    """Value that ``recipe`` describes.

    Args:
        recipe: Recipe of a stand-in.
        values: Values of the entries that it needs.
        done: Results of operations that other recipes share; it is added to.
    """
    with torch.no_grad():
        return _made(recipe, values, {} if done is None else done)


def _made(recipe: Recipe, values: Mapping[str, Tensor], done: dict[DeferredOperation, list[Any]]) -> Tensor:
    if isinstance(recipe, EntryRecipe):
        return values[recipe.name]
    made: Tensor = recipe.operation.run(values, done)[recipe.number]
    return made


class _NoStorage:
    """Storage of stand-ins: an address of its own, and the size that it would have.

    Args:
        size: Number of bytes.
    """

    def __init__(self, size: int) -> None:
        self._size = size

    def data_ptr(self) -> int:
        """Address, by which libraries tell storages apart."""
        return _FIRST_ADDRESS + id(self)

    def nbytes(self) -> int:
        """Number of bytes."""
        return self._size


@final
class StandIn(Tensor):
    """Tensor on the meta device with a recipe. Operations on it give stand-ins, and views share its storage.

    Libraries look at devices and storages to find tied tensors and to count bytes, so it looks like one on the host.

    Args:
        info: Shape and dtype.
        recipe: Recipe of its values.

    Attributes:
        recipe: As given.
    """

    recipe: Recipe
    _storage: _NoStorage

    __torch_function__ = disabled_torch_function  # type: ignore[assignment]

    def __new__(cls, info: LocalTensorInfo, recipe: Recipe) -> "StandIn":
        """A tensor of this class, which has no memory."""
        return _stand_in(torch.empty(info.shape, dtype=info.dtype, device="meta"), recipe)

    @property
    def info(self) -> LocalTensorInfo:
        """Shape and dtype."""
        return LocalTensorInfo(tuple(self.shape), self.dtype)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The host, where values are computed."""
        return torch.device("cpu")

    def untyped_storage(self) -> Any:
        """A storage that tells this stand-in and its views from others."""
        return self._storage

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        """Text form, without values."""
        return f"StandIn({list(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func._schema.is_mutable or func.namespace != "aten":
            raise UnsupportedError(
                f"`{func}` changes, or looks at, a weight while the model is being saved, but no rank has it there. "
                "Save `accelerator.get_state_dict(model)` instead, which gathers the model."
            )
        # Values are computed in host memory.
        options = {name: value for name, value in (kwargs or {}).items() if name != "device"}
        storages: dict[int, _NoStorage] = {}
        bare = pytree.tree_map_only(StandIn, lambda each: _without_recipe(each, storages), (args, options))
        result = func(*bare[0], **bare[1])
        arguments, named = pytree.tree_map_only(StandIn, lambda each: each.recipe, (args, options))
        packet, _, overload = func.__name__.partition(".")
        operation = DeferredOperation(packet, overload or "default", arguments, named)
        leaves, form = pytree.tree_flatten(result)
        made = [
            _stand_in(leaf, DeferredResult(operation, number), storages.get(leaf.untyped_storage()._cdata))
            if isinstance(leaf, Tensor)
            else leaf
            for number, leaf in enumerate(leaves)
        ]
        return pytree.tree_unflatten(made, form)


def _stand_in(meta: Tensor, recipe: Recipe, storage: _NoStorage | None = None) -> StandIn:
    """Stand-in with the shape and the strides of ``meta``, on which further operations may depend."""
    made: StandIn = torch.Tensor._make_subclass(StandIn, meta)
    made.recipe = recipe
    made._storage = _NoStorage(meta.numel() * meta.dtype.itemsize) if storage is None else storage
    return made


def _without_recipe(tensor: StandIn, storages: dict[int, _NoStorage]) -> Tensor:
    """Ordinary tensor on the meta device; ``storages`` remembers whose storage its own one is."""
    bare = torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device="meta")
    storages[bare.untyped_storage()._cdata] = tensor._storage
    return bare
