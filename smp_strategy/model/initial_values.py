"""Deferred initialisation of meta-device models, with values that do not depend on the layout.

A module that was built on the meta device still has its initialisers, though its constructor has returned. They are
called in the order of constructors, inner modules first:

1. ``reset_parameters()`` (or ``_reset_parameters()``) of every module that has one, as PyTorch's own layers do;
2. ``_init_weights(module)`` of the nearest enclosing model that has such a method (those of Hugging Face, and many
   others), for every module. It also fills computed buffers of such models: rotary tables, position numbers.

The set of tensors that a rank fills differs between layouts, but their values must not. So each module's own tensors
are filled apart from all others: every initialiser that may reach them, its own and those of the modules around it (a
container that scales the weights of its blocks), runs with a random stream seeded by the run's seed and the module's
name, while all other tensors are on the meta device, where nothing can happen to them. A tied tensor belongs to the
module that is registered first.

In layers that have been split, tensors are parts already. Initialisers still see whole layers: a whole tensor is filled
for a moment, and its part is kept.

A rehearsal finds out which tensors will be filled, before any has memory: everything is on the meta device, and a
dispatch mode records the tensors that each operation changes.
"""

import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from smp_strategy.distributed.torch_private import swap_contents
from smp_strategy.errors import UnsupportedError
from smp_strategy.model.rng import begin_at, derive_seed, seeded
from smp_strategy.model.trace.snapshot import Snapshot
from smp_strategy.model.trace.tensor_spec import storage_of

__all__ = ["Initialisers", "places_of", "leave_meta", "ordinary", "unset", "without_memory", "zero_values"]


@final
@dataclass(frozen=True, eq=False)
class TensorSlot:
    """Place where a tensor is registered."""

    owner: str
    """Qualified name of the module."""
    tensors: dict[str, Any]
    """Dict of the module's parameters or buffers."""
    key: str
    """Key in that dict."""

    @property
    def name(self) -> str:
        return f"{self.owner}.{self.key}" if self.owner else self.key


def places_of(root: nn.Module) -> dict[Tensor, list[TensorSlot]]:
    """Every parameter and buffer of ``root`` in order of registration, with all its slots (tied ones have several)."""
    found: dict[Tensor, list[TensorSlot]] = {}
    for owner, module in root.named_modules():
        for tensors in _registered(module):
            for key, tensor in tensors.items():
                if tensor is not None:
                    found.setdefault(tensor, []).append(TensorSlot(owner, tensors, key))
    return found


def _registered(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    return module._parameters, module._buffers


@final
@dataclass(frozen=True)
class _Entry:
    name: str
    module: nn.Module
    reset: Callable[[], Any] | None
    """Its own initialiser."""
    model: nn.Module | None
    """Nearest enclosing model that has ``_init_weights``."""


@final
class Initialisers:
    """Initialisers of a module and its submodules.

    Args:
        root: Whole module.
        seed: Seed of the run, the same on all ranks.
        device: Device of the values.
    """

    def __init__(self, root: nn.Module, seed: int, device: torch.device) -> None:
        self._modules = list(root.modules())
        self._entries = {entry.name: entry for entry in _inner_first("", root, None, set())}
        self._seed = seed
        self._device = device
        self._places = places_of(root)
        # Slot in which a tensor is filled: of several the first that the rehearsal saw filled.
        self._filled_at = {tensor: places[0] for tensor, places in self._places.items()}
        self._stand_ins = {tensor: _on_meta(tensor) for tensor in self._places}
        self._filled_by: dict[str, list[Tensor]] = {}

    def rehearse(self) -> "InitializerTrace":
        """Run all initialisers on the meta device.

        Raises:
            UnsupportedError: an initialiser fails.
        """
        own, by_models = _Changes(), _Changes()
        filled: dict[Tensor, int] = {}
        with self._shapes_only(), Snapshot(modules=self._modules):
            # One for each slot, which shows in which of them a tied tensor is filled.
            stand_ins = {place: _on_meta(tensor) for tensor, places in self._places.items() for place in places}
            for place, stand_in in stand_ins.items():
                place.tensors[place.key] = stand_in
            with own, _AskedForMeta(own):
                self._reset(self._entries.values())
            with by_models, _AskedForMeta(by_models):
                self._let_models_initialise(self._entries.values())
            for tensor, places in self._places.items():
                found = [place for place in places if any(c.include(stand_ins[place], place) for c in (own, by_models))]
                if found and tensor.is_meta:
                    self._filled_at[tensor] = found[0]
                    self._filled_by.setdefault(found[0].owner, []).append(tensor)
                    filled[tensor] = sum(stand_ins[place]._version for place in places)
            touched = {place for place, stand_in in stand_ins.items() if by_models.include(stand_in, place)}
        return InitializerTrace(filled, self._passed_over(touched))

    def _passed_over(self, touched: set[TensorSlot]) -> list[str]:
        """Names of parameters on a real device that Hugging Face has left uninitialised, as if on the meta device."""
        delayed = {
            self._entries[places[0].owner].model
            for tensor, places in self._places.items()
            if tensor.is_meta and places[0] in touched and isinstance(tensor, nn.Parameter)
        }
        return [
            place.name
            for tensor, (place, *_) in self._places.items()
            if place in touched and isinstance(tensor, nn.Parameter) and not tensor.is_meta and not tensor._version
            if not hasattr(tensor, "_is_hf_initialized")
            if (model := self._entries[place.owner].model) in delayed and hasattr(model, "initialize_weights")
        ]

    def run(self, tensors: Collection[Tensor], take_part: Callable[[Tensor, Tensor], None]) -> list[Tensor]:
        """Fill ``tensors`` by the initialisers, and nothing else of the module; call after :meth:`rehearse`.

        Args:
            tensors: Tensors to fill.
            take_part: Copies a part of a whole tensor, the second argument, into a tensor that has been split.

        Returns:
            Tensors that were not completely filled.

        Raises:
            UnsupportedError: an initialiser fails.
        """
        meant = set(tensors)
        partial: list[Tensor] = []
        with self._shapes_only():
            for owner in dict.fromkeys(self._filled_at[tensor].owner for tensor in tensors):
                for tensor, whole in self._fill(owner, meant).items():
                    if _has_unset(whole):
                        partial.append(tensor)
                    if whole is not tensor:
                        take_part(tensor, whole)
        return partial

    def _fill(self, owner: str, meant: set[Tensor]) -> dict[Tensor, Tensor]:
        """Fill the tensors in ``meant`` that ``owner`` has, whole.

        Its other tensors are filled, too, because the same stream is drawn from, but thrown away.
        """
        wholes = {tensor: self._whole(tensor, is_meant=tensor in meant) for tensor in self._filled_by[owner]}
        own = {whole: self._filled_at[tensor] for tensor, whole in wholes.items()}
        before = {place: place.tensors[place.key] for place in own.values()}
        for whole, place in own.items():
            place.tensors[place.key] = whole
        begin_at(derive_seed(self._seed, *owner.encode()), self._device)
        around = [self._entries[name] for name in _with_all_around(owner)]
        self._reset(around)
        self._let_models_initialise(around)
        for tensor, place in own.items():
            _take_over(tensor, place)
            place.tensors[place.key] = before[place]
        return {tensor: whole for tensor, whole in wholes.items() if tensor in meant}

    def _whole(self, tensor: Tensor, *, is_meant: bool) -> Tensor:
        stand_in = self._stand_ins[tensor]
        if is_meant:
            return tensor if tensor.shape == stand_in.shape else unset(stand_in, self._device)
        return torch.empty_like(stand_in, device=self._device)

    def _reset(self, entries: Iterable[_Entry]) -> None:
        for entry in entries:
            if entry.reset is not None:
                _call(entry, entry.reset)

    def _let_models_initialise(self, entries: Iterable[_Entry]) -> None:
        for entry in entries:
            if entry.model is not None:
                _call(entry, getattr(entry.model, _OF_MODELS), entry.module)

    @contextmanager
    def _shapes_only(self) -> Iterator[None]:
        """Put all tensors of the module on the meta device, and restore the random generators afterwards."""
        tensors_of = [tensors for module in self._modules for tensors in _registered(module)]
        before = [(tensors, dict(tensors)) for tensors in tensors_of]
        for tensors, known in before:
            tensors.update({key: self._stand_in(tensor) for key, tensor in known.items() if tensor is not None})
        try:
            with torch.no_grad(), seeded(0, self._device):
                yield
        finally:
            for tensors, known in before:
                tensors.update(known)

    def _stand_in(self, tensor: Tensor) -> Tensor:
        return self._stand_ins[tensor] if tensor in self._stand_ins else _on_meta(tensor)


@final
@dataclass(frozen=True)
class InitializerTrace:
    """Result of a rehearsal of the initialisers."""

    filled: dict[Tensor, int]
    """Tensors on the meta device that they fill, and how often, by version counters."""
    passed_over: list[str]
    """Names of parameters that were made on a real device by a constructor that does not ask where (``torch.Tensor(n)``
    does not), of a Hugging Face model on the meta device, where such models initialise nothing."""


@final
class _Changes(TorchDispatchMode):
    """Records the storages that operations change."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._changed: set[int] = set()

    def include(self, tensor: Tensor, place: TensorSlot) -> bool:
        """Whether an operation has changed ``tensor`` or a view of it, or another tensor is in its slot now."""
        return storage_of(tensor) in self._changed or place.tensors.get(place.key) is not tensor

    def note(self, tensor: Tensor) -> None:
        self._changed.add(storage_of(tensor))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for number, name in _changed_arguments(func):
            changed = args[number] if number < len(args) else kwargs.get(name)
            for leaf in pytree.tree_leaves(changed):
                if isinstance(leaf, Tensor):
                    self.note(leaf)
        return func(*args, **kwargs)


@final
class _AskedForMeta(TorchFunctionMode):
    """Records reads of ``is_meta`` in ``torch.nn.init`` as changes.

    Some of PyTorch's initialisers (``trunc_normal_``, ``orthogonal_`` ...) return at once for a tensor on the meta
    device, so no operation shows that they would fill it. The question for the device does.
    """

    def __init__(self, changes: _Changes) -> None:
        super().__init__()
        self._changes = changes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _IS_META and sys._getframe(1).f_globals.get("__name__") == nn.init.__name__:
            self._changes.note(args[0])
        return func(*args, **(kwargs or {}))


def _changed_arguments(func: Any) -> Iterator[tuple[int, str]]:
    """Positions and names of the arguments that ``func`` changes in place."""
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield number, argument.name


_OWN = ("reset_parameters", "_reset_parameters")
_OF_MODELS = "_init_weights"
_IS_META: Any = Tensor.is_meta.__get__  # type: ignore[attr-defined]


def _inner_first(name: str, module: nn.Module, model: nn.Module | None, seen: set[nn.Module]) -> Iterator[_Entry]:
    """Every module once, by the first of its names."""
    if module in seen:
        return
    seen.add(module)
    if _num_needed(getattr(module, _OF_MODELS, None)) == 1:
        model = module
    # peft chooses the values of adapters when they are made, and then by other rules than those of the model around.
    adapters = getattr(module, "adapter_layer_names", ())
    for child_name, child in module.named_children():
        if child_name not in adapters:
            yield from _inner_first(f"{name}.{child_name}" if name else child_name, child, model, seen)
    yield _Entry(name, module, _own_initialiser(module), model)


def _own_initialiser(module: nn.Module) -> Callable[[], Any] | None:
    for name in _OWN:
        method = getattr(module, name, None)
        if _num_needed(method) == 0:
            return method
    return None


def _num_needed(method: Any) -> int | None:
    """Number of required arguments; ``None`` if ``method`` is no function."""
    if not callable(method):
        return None
    parameters = inspect.signature(method).parameters.values()
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return sum(each.default is inspect.Parameter.empty and each.kind not in variadic for each in parameters)


def _call(entry: _Entry, method: Callable[..., Any], *args: Any) -> None:
    try:
        method(*args)
    except Exception as error:
        raise UnsupportedError(
            f"`{method.__qualname__}` cannot initialise `{entry.name or type(entry.module).__name__}` "
            f"({type(error).__name__}: {error}). With `delayed_parameter_initialization` it must change tensors in "
            "place and must not look at values, since it runs with some or all of them on the meta device. Or build "
            'this part on a real device: `with torch.device("cpu"): ...`.'
        ) from error


def _take_over(tensor: Tensor, place: TensorSlot) -> None:
    """Copy the values of a new tensor that an initialiser has registered instead of filling ``tensor``."""
    new = place.tensors.get(place.key)
    if new is tensor:
        return
    if new is None or new.shape != tensor.shape:
        raise UnsupportedError(
            f"An initialiser has replaced `{place.name}`, of shape {list(tensor.shape)}, by something else. With "
            "`delayed_parameter_initialization` shapes must be those of the constructor."
        )
    if not new.is_meta:
        tensor.copy_(new)


def _with_all_around(name: str) -> Iterator[str]:
    """``a.b``, ``a`` and the root."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""


def _on_meta(tensor: Tensor) -> Tensor:
    empty = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


# --- materialising ---------------------------------------------------------------------------------------------------
# Materialise meta tensors in place: they get memory and keep identity, class, attributes and hooks.
#
# Assigning `data` cannot give memory to a meta tensor, because the device differs. Optimizers, tied modules and
# recurrent layers (by weak references) hold the object itself, so its implementation is swapped instead.


@contextmanager
def ordinary() -> Iterator[None]:
    """Tensors made in here are no inference tensors, even if the first step is one of evaluation."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def leave_meta(tensor: Tensor, values: Tensor) -> None:
    """Give ``tensor`` the memory of ``values``, to which there must be no other reference."""
    values.requires_grad_(tensor.requires_grad)
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        setattr(values, hooks, getattr(tensor, hooks))
    # The last step of `torch.utils.swap_tensors`, which exchanges class and attributes as well, and refuses tensors
    # with weak references. Here references, weak ones too, must keep meaning the same object.
    swap_contents(tensor, values)


def unset(tensor: Tensor, device: torch.device, *, marks: bool = True) -> Tensor:
    """Memory for ``tensor``; with ``marks`` filled with NaN where the dtype has it, so that gaps can be found."""
    values = torch.empty_like(tensor, device=device, requires_grad=False)
    if not marks:
        return values
    return values.fill_(torch.nan) if _can_be_nan(values) else values.zero_()


def _has_unset(tensor: Tensor) -> bool:
    """Whether a part of ``tensor`` is still unset; ``False`` for dtypes without NaN."""
    # `amin` passes NaN on and needs no memory.
    return _can_be_nan(tensor) and tensor.numel() > 0 and bool(tensor.detach().amin().isnan())


def without_memory(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor like ``tensor``, strides included, that has no memory on ``device``."""
    values = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
    values.untyped_storage().resize_(0)
    return values


@contextmanager
def zero_values(tensors: Iterable[Tensor], device: torch.device) -> Iterator[None]:
    """In here ``tensors`` are zero on ``device``; parameters have no more memory than one element."""
    values = {}
    with ordinary():
        for tensor in tensors:
            # Buffers may be changed in place, so each element needs memory of its own.
            size = () if isinstance(tensor, nn.Parameter) else tensor.shape
            values[tensor] = torch.zeros(size, dtype=tensor.dtype, device=device).expand(tensor.shape)
            leave_meta(tensor, values[tensor])
    try:
        yield
    finally:
        with ordinary():
            for tensor, value in values.items():
                leave_meta(tensor, value)  # `value` has been the meta tensor since the first swap


def _can_be_nan(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.element_size() > 1
