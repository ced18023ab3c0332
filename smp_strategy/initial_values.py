"""Initial values from what modules bring along, for any part of a model, the same whichever parts there are.

A module that was built on the meta device knows how its tensors are to be initialised, though its constructor has
returned. In the order in which constructors would have done it, inner modules first:

1. ``reset_parameters()`` (or ``_reset_parameters()``) of every module that has one, as PyTorch's own layers do;
2. ``_init_weights(module)`` of the nearest enclosing model that has such a method (those of Hugging Face, and many
   others), for every module. It also fills computed buffers of such models: rotary tables, position numbers.

Which tensors get their values together differs from layout to layout, but their values must not:

* An initialiser may reach beyond its own module (a container that scales the weights of its blocks). It runs for
  every part again, and all tensors that do not belong to the part are on the meta device meanwhile: what is done to
  them is lost.
* Every draw of random numbers has a seed of its own, made of the run's seed, the qualified name of the module whose
  initialiser draws, and the number of the draw. Draws for tensors on the meta device count as well.

So nothing depends on what else is initialised, on which rank, and in which order. While initialisers run, each
operation is looked at to learn what it changes: what no initialiser has touched has no value.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from smp_strategy.errors import UnsupportedError
from smp_strategy.pipeline.rng import begin_at, derive_seed, seeded

__all__ = ["Initialisers", "Place", "places_of"]


@final
@dataclass(frozen=True)
class Place:
    """Where a tensor is registered first; it may have other names as well."""

    owner: str
    """Qualified name of the module."""
    tensors: dict[str, Any]
    """The module's parameters or buffers."""
    key: str

    @property
    def name(self) -> str:
        """Qualified name of the tensor."""
        return f"{self.owner}.{self.key}" if self.owner else self.key


def places_of(root: nn.Module) -> dict[Tensor, Place]:
    """Every parameter and buffer of ``root``, each once, in order of registration."""
    found: dict[Tensor, Place] = {}
    for owner, module in root.named_modules():
        for tensors in _registered(module):
            for key, tensor in tensors.items():
                if tensor is not None:
                    found.setdefault(tensor, Place(owner, tensors, key))
    return found


def _registered(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    return module._parameters, module._buffers


@final
@dataclass(frozen=True)
class _Entry:
    name: str
    module: nn.Module
    model: nn.Module | None
    """The nearest one around it that initialises modules."""


@final
class Initialisers:
    """What gives the tensors of a module their values.

    Args:
        root: the whole module.
        seed: the same on all ranks.
        device: where values are made.
    """

    def __init__(self, root: nn.Module, seed: int, device: torch.device) -> None:
        self._modules = list(root.modules())
        self._entries = list(_inner_first("", root, None, set()))
        self._seed = seed
        self._device = device
        self._places = places_of(root)
        self._stand_ins = {tensor: _on_meta(tensor) for tensor in self._places}

    def run(self, tensors: Iterable[Tensor]) -> set[Tensor]:
        """Let initialisers fill ``tensors``, and nothing else of the module.

        Args:
            tensors: parameters and buffers; on those that are on the meta device it is only tried.

        Returns:
            Those that they have changed.

        Raises:
            UnsupportedError: an initialiser fails.
        """
        meant = {tensor: self._places[tensor] for tensor in tensors}
        around = {name for place in meant.values() for name in _with_all_around(place.owner)}
        entries = [entry for entry in self._entries if entry.name in around]
        draws = _Draws(self._seed, self._device)
        with torch.inference_mode(False), torch.no_grad(), seeded(0, self._device), self._alone(meant), draws:
            for entry in entries:
                reset = _own_initialiser(entry.module)
                if reset is not None:
                    draws.begin(f"{entry.name}:own")
                    _call(entry, reset)
            for entry in entries:
                if entry.model is not None:
                    draws.begin(f"{entry.name}:model")
                    _call(entry, getattr(entry.model, _OF_MODELS), entry.module)
            replaced = {tensor for tensor, place in meant.items() if _taken_over(tensor, place)}
        return replaced | {tensor for tensor in meant if draws.has_changed(tensor)}

    @contextmanager
    def _alone(self, meant: dict[Tensor, Place]) -> Iterator[None]:
        """In here the module has ``meant``, each in its first place, and of everything else the shape only."""
        others: list[tuple[dict[str, Any], str, Tensor]] = []
        for module in self._modules:
            for tensors in _registered(module):
                for key, tensor in tensors.items():
                    if tensor is not None and not _is_meant(meant.get(tensor), tensor, tensors, key):
                        others.append((tensors, key, tensor))
        for tensors, key, tensor in others:
            tensors[key] = self._stand_ins[tensor] if tensor in self._stand_ins else _on_meta(tensor)
        try:
            yield
        finally:
            for tensors, key, tensor in others:
                tensors[key] = tensor


@final
class _Draws(TorchDispatchMode):
    """Seeds every draw of random numbers, and notes which memory operations change."""

    def __init__(self, seed: int, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._run_seed = seed
        self._device = device
        self._stream = b""
        self._number = 0
        self._changed: set[int] = set()

    def begin(self, stream: str) -> None:
        """What is drawn from now on belongs to ``stream``."""
        self._stream, self._number = stream.encode(), 0
        begin_at(derive_seed(self._run_seed, *self._stream), self._device)

    def has_changed(self, tensor: Tensor) -> bool:
        """Whether an operation has changed it, or a view of it."""
        return tensor.untyped_storage()._cdata in self._changed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._number += 1
            begin_at(derive_seed(self._run_seed, *self._stream, self._number), self._device)
        for number, name in _changed_arguments(func):
            changed = args[number] if number < len(args) else kwargs.get(name)
            tensors = [leaf for leaf in pytree.tree_leaves(changed) if isinstance(leaf, Tensor)]
            self._changed.update(tensor.untyped_storage()._cdata for tensor in tensors)
        return func(*args, **kwargs)


def _changed_arguments(func: Any) -> Iterator[tuple[int, str]]:
    """Which arguments ``func`` changes in place, by position and name."""
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield number, argument.name


_OWN = ("reset_parameters", "_reset_parameters")
_OF_MODELS = "_init_weights"


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
    yield _Entry(name, module, model)


def _own_initialiser(module: nn.Module) -> Callable[[], Any] | None:
    for name in _OWN:
        method = getattr(module, name, None)
        if _num_needed(method) == 0:
            return method
    return None


def _num_needed(method: Any) -> int | None:
    """How many arguments it must be given; ``None`` if it is no function."""
    if not callable(method):
        return None
    parameters = inspect.signature(method).parameters.values()
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return sum(each.default is inspect.Parameter.empty and each.kind not in variadic for each in parameters)


def _is_meant(place: Place | None, tensor: Tensor, tensors: dict[str, Any], key: str) -> bool:
    """Whether what stands there is for initialisers: a tied tensor in its first place only, when it is in earnest."""
    return place is not None and (tensor.is_meta or (place.tensors is tensors and place.key == key))


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


def _taken_over(tensor: Tensor, place: Place) -> bool:
    """Whether an initialiser has registered a new tensor instead of filling ``tensor``, which then gets its values."""
    new = place.tensors.get(place.key)
    if new is tensor:
        return False
    if new is None or new.shape != tensor.shape:
        raise UnsupportedError(
            f"An initialiser has replaced `{place.name}`, of shape {list(tensor.shape)}, by something else. With "
            "`delayed_parameter_initialization` shapes must be those of the constructor."
        )
    place.tensors[place.key] = tensor
    if not tensor.is_meta and not new.is_meta:
        tensor.copy_(new)
    return not new.is_meta or tensor.is_meta


def _with_all_around(name: str) -> Iterator[str]:
    """``a.b``, ``a`` and the root."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""


def _on_meta(tensor: Tensor) -> Tensor:
    empty = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
