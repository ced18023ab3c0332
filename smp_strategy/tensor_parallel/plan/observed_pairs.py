"""Observation of linear layers in one step: pairs that can be split, and readers of their weights.

If all readers of a linear layer's output are elementwise, and their result goes to another linear layer only, the first
can be split by columns and the second by rows without any effect on the code between. Several first layers may meet on
the way (``silu(gate(x)) * up(x)``), if they are equally wide.

Every operation is intercepted. A value is *on the way* from one or more first layers. An operation that is not known to
be elementwise, that combines it with a tensor of more than one element, or that reads its shape, disqualifies the
layers it comes from. So does a value that still exists when the step is over: code has kept it, and may read it later.
A layer must behave the same in all of its calls.

A weight that is read by other code than its layer's (a head that multiplies by the table of an embedding) must stay
whole, too: that code would mistake a part for the whole. A cast copy of a weight, with which a unit computes in half
precision, counts as the weight: making it is no read, but reading it is.
"""

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from smp_strategy.distributed.torch_private import native_functions
from smp_strategy.model.guarded_tensors import HARMLESS
from smp_strategy.model.trace.pytree import given_to
from smp_strategy.tensor_parallel.plan.plan import LayerBlock, SplitKind, linear_sizes

__all__ = ["Pair", "ObservedLayers", "pair_blocks", "read_by_others", "watch"]

_ELEMENTWISE_NAMES = (
    "relu relu_ relu6 gelu silu mish elu selu celu leaky_relu hardtanh hardswish hardsigmoid softplus softsign "
    "logsigmoid tanhshrink threshold tanh sigmoid tanh_ sigmoid_ dropout dropout_ alpha_dropout feature_dropout "
    "exp log1p erf sin cos sqrt rsqrt square abs neg clamp clamp_min clamp_max pow "
    "add add_ sub sub_ mul mul_ div div_ true_divide rsub __add__ __radd__ __iadd__ __sub__ __rsub__ __isub__ __mul__ "
    "__rmul__ __imul__ __truediv__ __rtruediv__ __itruediv__ __pow__ __neg__ "
    "to float half bfloat16 double contiguous clone type_as"
)
_ELEMENTWISE = frozenset(
    function
    for name in _ELEMENTWISE_NAMES.split()
    for home in (F, torch, Tensor, native_functions, torch.special)
    if callable(function := getattr(home, name, None))
)
# Metadata reads that depend neither on a value's content nor on its width.
_HARMLESS = frozenset(
    getter.__get__
    for name in ("dtype", "device", "requires_grad", "is_cuda", "is_nested", "ndim", "layout", "is_leaf", "grad_fn")
    if (getter := getattr(Tensor, name, None)) is not None and hasattr(getter, "__get__")
) | {Tensor.dim, Tensor.is_floating_point, Tensor.is_complex, torch.is_floating_point, Tensor.__hash__}
# Reads of a weight that do not count: also its size, which matches the activations that it meets.
_NO_READS = _HARMLESS | HARMLESS
_CASTS = frozenset({Tensor.to, Tensor.half, Tensor.bfloat16, Tensor.float, Tensor.double})


@final
@dataclass(frozen=True)
class Pair:
    """First layers, all of which go into a second one."""

    columns: tuple[str, ...]
    row: str


@final
@dataclass(frozen=True)
class ObservedLayers:
    """Observations of one step."""

    pairs: tuple[Pair, ...] = ()
    readers: Mapping[int, frozenset[str]] = field(default_factory=dict)
    """Modules whose code has read a parameter, by its ``id``."""

    def after(self, before: "ObservedLayers") -> "ObservedLayers":
        """Observations for repeating a split made after ``before``: its pairs, and the readers from both."""
        keys = self.readers.keys() | before.readers.keys()
        none = frozenset[str]()
        return ObservedLayers(
            before.pairs, {key: self.readers.get(key, none) | before.readers.get(key, none) for key in keys}
        )


def watch(modules: Mapping[str, nn.Module], run_step: Callable[[], Any]) -> ObservedLayers:
    """Run the step once and observe it.

    Args:
        modules: All modules by qualified name.
        run_step: Computes the loss with them; called once, without gradients.
    """
    mode = _Watch(modules)
    handles = [
        handle
        for name, module in mode.first_names.items()
        for handle in (
            module.register_forward_pre_hook(lambda *_, name=name: mode.running.append(name), prepend=True),
            module.register_forward_hook(lambda *_: mode.leave(), always_call=True),
        )
    ]
    # The fast path of PyTorch's transformers calls no layers.
    has_short_cut = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad(), mode:
            result = run_step()
    finally:
        torch.backends.mha.set_fastpath_enabled(has_short_cut)
        for handle in handles:
            handle.remove()
    mode.spoil_what_is_left(result)
    return ObservedLayers(tuple(mode.pairs()), {key: frozenset(found) for key, found in mode.readers.items()})


def read_by_others(modules: Mapping[str, nn.Module], run_step: Callable[[], Any]) -> set[int]:
    """The ``id`` of each parameter that is read by other code than that of its module."""
    readers = watch(modules, run_step).readers.items()
    return {key for key, names in readers if any(key not in _own(modules[name]) for name in names)}


def _own(module: nn.Module) -> set[int]:
    return {id(parameter) for parameter in module.parameters(recurse=False)}


def pair_blocks(modules: Mapping[str, nn.Module], pairs: Iterable[Pair]) -> list[LayerBlock]:
    """Blocks of the ``pairs`` that are worth it.

    A pair that gets narrower in between (an adapter) has little to compute, and as much to send as any.
    """
    found = []
    for pair in pairs:
        sizes = [linear_sizes(modules[name]) for name in pair.columns]
        if any(size is not None and size[1] < size[0] for size in sizes):
            continue
        parents = {name.rpartition(".")[0] for name in (*pair.columns, pair.row)}
        layers = {
            **dict.fromkeys(pair.columns, SplitKind("column", looks_whole=True)),
            pair.row: SplitKind("row", looks_whole=True),
        }
        found.append(LayerBlock(min(parents, key=len), "found in the step", layers))
    return found


class _Watch(TorchFunctionMode):
    """Intercepts every operation."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        super().__init__()
        seen: set[int] = set()
        self.first_names: dict[str, nn.Module] = {}
        for name, module in modules.items():
            if id(module) not in seen:
                seen.add(id(module))
                self.first_names[name] = module
        linears = {name: layer for name, layer in self.first_names.items() if _is_plain(layer)}
        # A weight shared by two layers identifies neither.
        counts = Counter(id(layer.weight) for layer in linears.values())
        self._name_of = {id(layer.weight): name for name, layer in linears.items() if counts[id(layer.weight)] == 1}
        self._widths = {name: (layer.in_features, layer.out_features) for name, layer in linears.items()}
        self._parameters = {id(p) for module in self.first_names.values() for p in module.parameters(recurse=False)}
        self._origins: dict[int, tuple[weakref.ref[Tensor], frozenset[str]]] = {}
        self._copies: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._spoilt: set[str] = set()
        self._into: dict[str, set[str]] = {}
        self._from: dict[str, set[frozenset[str]]] = {}
        self.running: list[str] = []
        self.readers: dict[int, set[str]] = {}

    def leave(self) -> None:
        """The innermost running module has returned."""
        self.running.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        read = [leaf for leaf in pytree.tree_leaves(given_to(func, args, kwargs)) if isinstance(leaf, Tensor)]
        of_weight = self._weight(args[0]) if func in _CASTS else None
        if func not in _NO_READS and of_weight is None:
            for key in filter(None, map(self._weight, read)):
                self.readers.setdefault(key, set()).add(self.running[-1] if self.running else "")
        origins = [self._origin(tensor) for tensor in read]
        result = func(*args, **kwargs)
        if of_weight is not None:
            self._copies[id(result)] = (weakref.ref(result), of_weight)
        elif func is F.linear:
            self._note_linear(args, kwargs, result)
        elif any(origins):
            self._note(func, read, origins, result)
        return result

    def _origin(self, tensor: Tensor) -> frozenset[str]:
        reference, sources = self._origins.get(id(tensor), (None, frozenset[str]()))
        return sources if reference is not None and reference() is tensor else frozenset()

    def _weight(self, tensor: Tensor) -> int | None:
        """The ``id`` of the parameter that ``tensor`` is, or is a copy of."""
        if id(tensor) in self._parameters:
            return id(tensor)
        reference, key = self._copies.get(id(tensor), (None, None))
        return key if reference is not None and reference() is tensor else None

    def _note_linear(self, args: Any, kwargs: Any, result: Tensor) -> None:
        inputs = kwargs.get("input", args[0] if args else None)
        weight = kwargs.get("weight", args[1] if len(args) > 1 else None)
        others = [leaf for leaf in (weight, kwargs.get("bias", args[2] if len(args) > 2 else None)) if leaf is not None]
        for other in others:
            self._spoilt |= self._origin(other)
        sources = self._origin(inputs)
        key = None if weight is None else self._weight(weight)
        name = None if key is None else self._name_of.get(key)
        if name is None:
            self._spoilt |= sources
            return
        self._from.setdefault(name, set()).add(sources)
        for source in sources:
            self._into.setdefault(source, set()).add(name)
        self._mark(result, frozenset({name}))

    def _note(self, func: Any, read: list[Tensor], origins: list[frozenset[str]], result: Any) -> None:
        sources = frozenset[str]().union(*origins)
        if func in _HARMLESS:
            return
        widths = {self._widths[source][1] for source in sources}
        whole = [tensor for tensor, origin in zip(read, origins, strict=True) if not origin and tensor.numel() != 1]
        shapes = {tensor.shape for tensor, origin in zip(read, origins, strict=True) if origin}
        if func not in _ELEMENTWISE or whole or len(widths) > 1 or len(shapes) > 1 or not isinstance(result, Tensor):
            self._spoilt |= sources
            return
        self._mark(result, sources)

    def _mark(self, tensor: Tensor, sources: frozenset[str]) -> None:
        self._origins[id(tensor)] = (weakref.ref(tensor), sources)

    def spoil_what_is_left(self, result: Any) -> None:
        """Disqualify layers whose values still exist: code that has kept them may read them."""
        gc.collect()
        for reference, sources in self._origins.values():
            if reference() is not None:
                self._spoilt |= sources

    def pairs(self) -> list[Pair]:
        found: list[Pair] = []
        taken: set[str] = set()
        for row, origins in self._from.items():
            (sources, *others) = origins
            if others or not sources or row in taken or sources & (self._spoilt | taken):
                continue
            goes_only_there = all(self._into[source] == {row} for source in sources)
            if goes_only_there and all(self._widths[source][1] == self._widths[row][0] for source in sources):
                found.append(Pair(tuple(sorted(sources)), row))
                taken |= {*sources, row}
        return found


def _is_plain(layer: nn.Module) -> TypeGuard[nn.Linear]:
    is_own = layer._parameters.get("weight") is not None  # a computed weight may change when it is read
    return is_own and isinstance(layer, nn.Linear) and type(layer).forward is nn.Linear.forward
