"""``tp_register``: classes with a user-defined split twin.

A twin is a module class that computes on parts what the registered class computes as a whole::

    @smp_strategy.tp_register(SplitMixer, init_hook, forward_hook, return_hook)
    class Mixer(nn.Module): ...

When a ``Mixer`` is split, a ``SplitMixer`` is built with the arguments of the ``Mixer``, converted by ``init_hook``; if
its constructor has an argument ``group``, it gets the :class:`~smp_strategy.distributed.tensor_group.TensorGroup`. It
must name its parameters and buffers as the ``Mixer`` does, and gets their values: whole for equal shapes, this rank's
part if it is shorter along one dim. In calls, ``forward_hook`` converts the arguments into those of the twin, and
``return_hook`` its result into that of the ``Mixer``. A twin with a method ``from_dense`` works like the layers of this
package: ``from_dense(layer, group)`` splits the layer in place.

The ``Mixer`` itself stays the same object, with its names and hooks; its class becomes one that calls the twin. Both
share their dicts of parameters and buffers, so values put there (gathered weights, fake tensors) are seen by both.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, TypeVar, final

import torch
from torch import Tensor, nn

from smp_strategy.distributed.tensor_group import TensorGroup
from smp_strategy.errors import ConfigError
from smp_strategy.model.shard_layout import Cut
from smp_strategy.tensor_parallel.layers.base import CannotSplit
from smp_strategy.tensor_parallel.plan.plan import LayerBlock, SplitKind

__all__ = ["check_classes", "registered_blocks", "tp_register", "tp_register_with_module"]

_TWIN = "_smp_twin"
_CALL = "_smp_built_with"

Class = TypeVar("Class", bound=type[nn.Module])
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class _Construction(NamedTuple):
    """Arguments that a module was built with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@final
@dataclass(frozen=True)
class _Registration:
    """Registration of a class."""

    dist_module: type[nn.Module]
    init_hook: Callable[..., Arguments] | None
    forward_hook: Callable[..., Arguments] | None
    return_hook: Callable[[Any], Any] | None


def tp_register(
    dist_module: type[nn.Module],
    init_hook: Callable[..., Arguments] | None = None,
    forward_hook: Callable[..., Arguments] | None = None,
    return_hook: Callable[[Any], Any] | None = None,
) -> Callable[[Class], Class]:
    """Class decorator that registers the split twin of a class; see the module docstring.

    Args:
        dist_module: The twin.
        init_hook: Converts the constructor's arguments into those of the twin, as ``(args, kwargs)``; ``None``:
            they are the same.
        forward_hook: The same for ``forward``.
        return_hook: Converts the result of the twin into that of the class; ``None``: it is the same.
    """

    def register(kind: Class) -> Class:
        tp_register_with_module(kind, dist_module, init_hook, forward_hook, return_hook)
        return kind

    return register


def tp_register_with_module(
    module_class: type[nn.Module],
    dist_module: type[nn.Module],
    init_hook: Callable[..., Arguments] | None = None,
    forward_hook: Callable[..., Arguments] | None = None,
    return_hook: Callable[[Any], Any] | None = None,
) -> None:
    """Register the split twin of an existing class; before its modules are built.

    Args:
        module_class: The class.
        dist_module, init_hook, forward_hook, return_hook: See :func:`tp_register`.

    Raises:
        ConfigError: One of the two is not a module class.
    """
    check_classes(module_class, dist_module)
    setattr(module_class, _TWIN, _Registration(dist_module, init_hook, forward_hook, return_hook))
    _watch_creation(module_class)


def check_classes(module_class: object, dist_module: object) -> None:
    """Refuse a registration of something that is no class of modules.

    Raises:
        ConfigError: One of the two is not.
    """
    for what, kind in (("module_class", module_class), ("dist_module", dist_module)):
        if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
            raise ConfigError(f"`{what}` must be a class of modules, but is {kind!r}.")


def registered_blocks(modules: Mapping[str, nn.Module]) -> Iterator[LayerBlock]:
    """Blocks of the modules of registered classes; of nested ones the outermost."""
    inside: tuple[str, ...] = ()
    for name, module in modules.items():
        # Not inherited: a subclass computes something else.
        registration = vars(type(module)).get(_TWIN)
        if registration is None or name.startswith(inside or ("\0",)):
            continue
        inside = (*inside, f"{name}.")
        source = f"registered: {registration.dist_module.__name__}"
        yield LayerBlock(name, source, {name: SplitKind("layer", split_by=functools.partial(_split, registration))})


def _watch_creation(kind: type[nn.Module]) -> None:
    """Make modules of ``kind`` remember their constructor's arguments."""
    original = vars(kind).get("__init__")
    if getattr(original, _TWIN, False):
        return
    build = kind.__init__

    @functools.wraps(build)
    def init(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        # Before `nn.Module.__init__`, which leaves other attributes alone; only for the object's own class.
        if type(self) is kind:
            object.__setattr__(self, _CALL, _Construction(args, kwargs))
        build(self, *args, **kwargs)

    setattr(init, _TWIN, True)
    kind.__init__ = init  # type: ignore[method-assign]


def _split(registration: _Registration, layer: nn.Module, group: TensorGroup) -> nn.Module:
    from_dense = getattr(registration.dist_module, "from_dense", None)
    if from_dense is not None:
        split: nn.Module = from_dense(layer, group)
        return split
    return _Twinned.from_dense(layer, group, registration)


class _Twinned(nn.Module):
    """A module that delegates its calls to a twin."""

    group: TensorGroup
    cuts: dict[str, Cut]

    @classmethod
    def from_dense(cls, layer: nn.Module, group: TensorGroup, registration: _Registration) -> nn.Module:
        """Build the twin of ``layer``, and make ``layer`` call it.

        Raises:
            CannotSplit: The twin does not fit.
        """
        dense = type(layer)
        call = vars(layer).get(_CALL)
        if call is None:
            raise CannotSplit(f"it was built before its class {dense.__name__} was registered")
        hook = registration.init_hook
        args, kwargs = call if hook is None else hook(*call.args, **call.kwargs)
        if "group" in inspect.signature(registration.dist_module.__init__).parameters:
            kwargs = {**kwargs, "group": group}
        # The twin's initial values are discarded, and must not advance the random generators.
        with torch.random.fork_rng(devices=[]):
            twin = registration.dist_module(*args, **kwargs)
        cuts = _cuts(layer, twin, group)
        for name, parameter in layer.named_parameters():
            if name in cuts:
                parameter.data = cuts[name].part(parameter.data, group.rank)
                parameter.grad = None
        theirs = dict(twin.named_modules())
        for name, part in layer.named_modules():
            if name in theirs:
                theirs[name]._parameters, theirs[name]._buffers = part._parameters, part._buffers
        layer.__class__ = type(f"Split{dense.__name__}", (_Twinned, dense), {"forward": _Twinned.forward})
        vars(layer).update({_TWIN: (twin, registration), "group": group, "cuts": cuts, "_smp_dense": dense})
        return layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Result of the twin."""
        twin, registration = vars(self)[_TWIN]
        twin.train(self.training)
        if registration.forward_hook is not None:
            args, kwargs = registration.forward_hook(*args, **kwargs)
        result = twin(*args, **kwargs)
        return result if registration.return_hook is None else registration.return_hook(result)

    def to_dense(self) -> Self:
        """Make the module whole again, in place; all ranks of the group call it."""
        for name, cut in self.cuts.items():
            parameter = self.get_parameter(name)
            lengths = [cut.length_of(rank) for rank in range(self.group.size)]
            whole = self.group.gather(parameter.data, cut.dim, lengths)
            parameter.data = cut.join(whole.split(lengths, cut.dim))
            parameter.grad = None
        dense = vars(self)["_smp_dense"]
        for name in (_TWIN, "group", "cuts", "_smp_dense"):
            del vars(self)[name]
        self.__class__ = dense
        return self


def _cuts(layer: nn.Module, twin: nn.Module, group: TensorGroup) -> dict[str, Cut]:
    """Cuts of the parameters of ``layer``, derived from the twin's shapes."""
    for what in ("parameters", "buffers"):
        mine = dict(getattr(layer, f"named_{what}")())
        theirs = dict(getattr(twin, f"named_{what}")())
        if mine.keys() != theirs.keys():
            odd = sorted(mine.keys() ^ theirs.keys())
            raise CannotSplit(f"the {what} {odd} are of {type(layer).__name__} or {type(twin).__name__} only")
        uneven = [name for name in mine if what == "buffers" and mine[name].shape != theirs[name].shape]
        if uneven:
            raise CannotSplit(f"the buffer {uneven[0]} of {type(twin).__name__} has another shape")
    cuts = {}
    for name, parameter in layer.named_parameters():
        cut = _cut(parameter, twin.get_parameter(name), group)
        if isinstance(cut, str):
            raise CannotSplit(f"the parameter {name} of {type(twin).__name__} {cut}")
        if cut is not None:
            cuts[name] = cut
    return cuts


def _cut(whole: Tensor, part: Tensor, group: TensorGroup) -> Cut | str | None:
    if whole.shape == part.shape:
        return None
    shorter = [dim for dim in range(whole.ndim) if part.ndim == whole.ndim and part.shape[dim] < whole.shape[dim]]
    longer = part.ndim != whole.ndim or any(a > b for a, b in zip(part.shape, whole.shape, strict=True))
    if longer or len(shorter) != 1:
        return f"has the shape {tuple(part.shape)}, which is no part of {tuple(whole.shape)} along one dim"
    (dim,) = shorter
    if whole.shape[dim] < group.size:
        return f"cannot be cut: {whole.shape[dim]} elements for {group.size} ranks"
    cut = Cut.evenly(dim, whole.shape[dim], group.size)
    if cut.length_of(group.rank) != part.shape[dim]:
        mine = cut.length_of(group.rank)
        return f"has {part.shape[dim]} of {whole.shape[dim]} elements along dim {dim}, but this rank's part is {mine}"
    return cut
