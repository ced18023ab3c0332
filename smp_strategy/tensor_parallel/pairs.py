"""Pairs of linear layers, recognised by watching the step: linear, elementwise operations, linear.

If all that reads the output of a linear layer is elementwise, and all that reads the result is another linear layer,
the first one can be split by columns and the second by rows, and nobody notices: what lies between works on parts just
as well. Several first layers may meet on the way (``silu(gate(x)) * up(x)``), if they are equally wide.

The step runs once while every operation is looked at. A value is *on the way* from one or more first layers; an
operation that is not known to be elementwise, that mixes it with a tensor which is not a mere number, or that asks for
its shape, spoils the layers that it comes from. So does what still exists when the step is over: somebody has kept it,
and may read it later. A layer has to be the same in all of its calls.
"""

import gc
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from smp_strategy.tensor_parallel.plan import Block, How

__all__ = ["Pair", "find_pairs", "pair_blocks"]

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
    for home in (F, torch, Tensor, torch._C._nn, torch.special)
    if callable(function := getattr(home, name, None))
)
# Asked about a value, but not about what is in it, nor how wide it is.
_HARMLESS = frozenset(
    getter.__get__
    for name in ("dtype", "device", "requires_grad", "is_cuda", "is_nested", "ndim", "layout", "is_leaf", "grad_fn")
    if (getter := getattr(Tensor, name, None)) is not None and hasattr(getter, "__get__")
) | {Tensor.dim, Tensor.is_floating_point, Tensor.is_complex, torch.is_floating_point, Tensor.__hash__}


@final
@dataclass(frozen=True)
class Pair:
    """First layers, all of which go into a second one."""

    columns: tuple[str, ...]
    row: str


def find_pairs(modules: Mapping[str, nn.Module], run_step: Callable[[], Any]) -> list[Pair]:
    """The pairs among the linear layers of ``modules``, by qualified name, as ``run_step`` uses them.

    Args:
        modules: all modules by qualified name.
        run_step: computes the loss; it is run once, without gradients.
    """
    linears = {
        name: module
        for name, module in modules.items()
        if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
    }
    watch = _Watch(linears)
    with torch.no_grad(), watch:
        result = run_step()
    watch.spoil_what_is_left(result)
    return watch.pairs()


def pair_blocks(modules: Mapping[str, nn.Module], pairs: Iterable[Pair]) -> list[Block]:
    """Blocks of ``pairs``."""
    found = []
    for pair in pairs:
        parents = {name.rpartition(".")[0] for name in (*pair.columns, pair.row)}
        layers = {**dict.fromkeys(pair.columns, How("column")), pair.row: How("row")}
        found.append(Block(min(parents, key=len), "found in the step", layers))
    return found


class _Watch(TorchFunctionMode):
    """Looks at every operation."""

    def __init__(self, linears: Mapping[str, nn.Linear]) -> None:
        super().__init__()
        self._name_of = {id(layer.weight): name for name, layer in linears.items()}
        # The weight of two layers is that of none: they are tied.
        counts: dict[int, int] = {}
        for layer in linears.values():
            counts[id(layer.weight)] = counts.get(id(layer.weight), 0) + 1
        self._name_of = {key: name for key, name in self._name_of.items() if counts[key] == 1}
        self._widths = {name: (layer.in_features, layer.out_features) for name, layer in linears.items()}
        self._origins: dict[int, tuple[weakref.ref[Tensor], frozenset[str]]] = {}
        self._spoilt: set[str] = set()
        self._into: dict[str, set[str]] = {}
        self._from: dict[str, set[frozenset[str]]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        read = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        origins = [self._origin(tensor) for tensor in read]
        result = func(*args, **kwargs)
        if func is F.linear:
            self._note_linear(args, kwargs, result)
        elif any(origins):
            self._note(func, read, origins, result)
        return result

    def _origin(self, tensor: Tensor) -> frozenset[str]:
        reference, sources = self._origins.get(id(tensor), (None, frozenset[str]()))
        return sources if reference is not None and reference() is tensor else frozenset()

    def _note_linear(self, args: Any, kwargs: Any, result: Tensor) -> None:
        inputs = kwargs.get("input", args[0] if args else None)
        weight = kwargs.get("weight", args[1] if len(args) > 1 else None)
        others = [leaf for leaf in (weight, kwargs.get("bias", args[2] if len(args) > 2 else None)) if leaf is not None]
        for other in others:
            self._spoilt |= self._origin(other)
        sources = self._origin(inputs)
        name = self._name_of.get(id(weight))
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
        """Whoever has kept a value that is on the way may read it."""
        gc.collect()
        for reference, sources in self._origins.values():
            if reference() is not None:
                self._spoilt |= sources

    def pairs(self) -> list[Pair]:
        """What has been found."""
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
