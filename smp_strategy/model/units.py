"""Units: the modules that the partition places as a whole.

A *unit* is placed on one stage, computes there and has no values elsewhere. Everything above the units (the model's own
``forward``, the training step) is glue and runs on every stage. Units must be small enough to balance and large
enough that the glue between them stays cheap; a transformer block is the right size.

Rules, in order:

1. A module that the user marks with :func:`unit` or names in ``unit_classes`` stays whole, as does one whose class the
   model declares indivisible (``_no_split_modules`` of Hugging Face models), and PyTorch's own composite layers
   (``nn.TransformerEncoderLayer``, ``nn.MultiheadAttention`` ...).
2. A module that holds a module which the user has marked or named, or a list of blocks somewhere below it (an
   ``nn.ModuleList`` or ``nn.Sequential`` of at least two modules with children of their own) is glue; the rules apply
   to its children. Only the outermost lists count, unless
   they yield fewer blocks than there are stages: then the lists inside their blocks are opened as well.
3. Any other module with parameters, or with batch statistics, is a unit (embedding, final norm, head, block). A
   module with constant buffers only (a mask, a rotary table) is glue: computing it everywhere is cheaper than sending
   it.

A model without any list of blocks is opened down to its layers. A mere list or dict of modules or parameters is never a
unit. Where the user places modules by hand, a unit with parts on several stages is opened until every part is on one.
"""

import difflib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar, final

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from smp_strategy.errors import ConfigError

__all__ = ["Unit", "choose_units", "has_state", "unit"]

_MARK = "_smp_unit"

_INDIVISIBLE = (
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
    nn.MultiheadAttention,
    nn.RNNBase,
)
_DISTRIBUTED = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel")


_LISTS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)

Target = TypeVar("Target", nn.Module, type[nn.Module])


@final
@dataclass(frozen=True)
class Unit:
    """A module that is placed as a whole."""

    name: str
    """Qualified name in the root module."""
    module: nn.Module

    @property
    def tensors(self) -> list[Tensor]:
        """Parameters and buffers of the unit, each once."""
        return [*self.module.parameters(), *self.module.buffers()]


def unit(target: Target) -> Target:
    """Mark a module, or every module of a class, as indivisible: whole on one stage. Returns ``target``.

    Use it where code reaches into a module in ways that cannot be split (a C++ extension between two of its layers,
    say), on an instance or as a decorator of a class::

        self.fused = smp_strategy.unit(FusedStack(...))
    """
    setattr(target, _MARK, True)
    return target


def choose_units(
    root: nn.Module,
    num_stages: int = 1,
    unit_classes: Sequence[str] = (),
    *,
    stage_of: Callable[[str], int | None] | None = None,
) -> list[Unit]:
    """Choose the units of ``root``; they are in order of registration.

    Args:
        root: Whole module, e.g. a LightningModule.
        num_stages: Number of stages that the units should fill; it limits how deeply nested lists are opened.
        unit_classes: Classes of indivisible modules, by name or by qualified name (``package.module.Class``).
        stage_of: Stage that a module is placed on by hand, by name.

    Raises:
        ConfigError: the model has no module of a class in ``unit_classes``, a module that distributes itself, or one
            that must stay whole with parts on several stages.
    """
    _refuse_wrappers(root)
    indivisible = _Indivisible(root, unit_classes)
    units = _by_rules(root, num_stages, indivisible)
    if stage_of is None:
        return units
    return _without_doubles(part for unit in units for part in _divided(unit, stage_of, indivisible))


def _by_rules(root: nn.Module, num_stages: int, indivisible: "_Indivisible") -> list[Unit]:
    units: list[Unit] = []
    for depth in range(1, 8):
        units = _without_doubles(_visit("", root, depth, indivisible))
        if len(units) >= num_stages:
            break
        if not any(_has_blocks(unit.module, indivisible) for unit in units):
            return _without_doubles(_layers(root, indivisible))
    return units


def _refuse_wrappers(root: nn.Module) -> None:
    for name, module in root.named_modules():
        kinds = [kind.__name__ for kind in type(module).__mro__ if kind.__name__ in _DISTRIBUTED]
        if kinds:
            raise ConfigError(
                f"`{name or type(root).__name__}` is a {kinds[0]}, which distributes what the strategy distributes "
                "already. Give the strategy the module inside of it."
            )


def _visit(name: str, module: nn.Module, depth: int, indivisible: "_Indivisible") -> Iterator[Unit]:
    if not has_state(module):
        return
    if (
        name
        and not _is_mere_list(module)
        and (indivisible.holds(module) or not (depth and _is_opened(module, indivisible)))
    ):
        yield Unit(name, module)
        return
    # Below a list, one level of nesting is used up.
    inner = depth - 1 if _is_block_list(module) else depth
    for child_name, child in module.named_children():
        yield from _visit(f"{name}.{child_name}" if name else child_name, child, inner, indivisible)


def _layers(root: nn.Module, indivisible: "_Indivisible") -> Iterator[Unit]:
    """The outermost modules with parameters of their own."""

    def visit(name: str, module: nn.Module) -> Iterator[Unit]:
        own = _owns_state(module)
        if name and has_state(module) and not _is_mere_list(module) and (own or indivisible.holds(module)):
            yield Unit(name, module)
            return
        for child_name, child in module.named_children():
            yield from visit(f"{name}.{child_name}" if name else child_name, child)

    yield from visit("", root)


def _divided(unit: Unit, stage_of: Callable[[str], int | None], indivisible: "_Indivisible") -> Iterator[Unit]:
    """Open ``unit`` until each part is on one stage."""
    whole = stage_of(unit.name)
    parts = unit.module.named_modules(prefix=unit.name, remove_duplicate=False)
    strays = [(name, part) for name, part in parts if has_state(part) and stage_of(name) != whole]
    is_on_one_stage = not any(_owns_state(part) for _, part in strays)
    if is_on_one_stage and not _is_mere_list(unit.module):
        yield unit
        return
    reason = indivisible.reason(unit.module)
    if not is_on_one_stage and reason is not None:
        stray, _ = strays[0]
        raise ConfigError(
            f"`{unit.name}` must stay whole on one stage ({reason}), but `{stray}` in it is placed on stage "
            f"{stage_of(stray)} and `{unit.name}` itself {'nowhere' if whole is None else f'on stage {whole}'}. "
            "Place the whole of it."
        )
    for name, child in unit.module.named_children():
        if has_state(child):
            yield from _divided(Unit(f"{unit.name}.{name}", child), stage_of, indivisible)


def _is_mere_list(module: nn.Module) -> bool:
    """Whether ``module`` only holds modules or parameters: without a ``forward`` it cannot run as a whole."""
    return isinstance(module, _LISTS) and type(module).forward is nn.Module.forward


def _without_doubles(units: Iterable[Unit]) -> list[Unit]:
    """Keep a module that is registered twice (a shared head, say) once, under its first name."""
    seen: dict[int, Unit] = {}
    for unit in units:
        seen.setdefault(id(unit.module), unit)
    return list(seen.values())


def _is_opened(module: nn.Module, indivisible: "_Indivisible") -> bool:
    """Whether the units are to be found inside of ``module``."""
    marked = any(indivisible.is_asked_for(part) for part in module.modules() if part is not module)
    return marked or _has_blocks(module, indivisible)


def _has_blocks(module: nn.Module, indivisible: "_Indivisible") -> bool:
    return any(_is_block_list(child) for child in module.modules()) and not indivisible.holds(module)


def _is_block_list(module: nn.Module) -> bool:
    if not isinstance(module, (nn.ModuleList, nn.Sequential)):
        return False
    # A place in the list may be empty: `children` leaves these out.
    # Not the truth of a module: a compiled one has none.
    blocks = [child for child in module.children() if any(True for _ in child.children()) and has_state(child)]
    return len(blocks) >= 2


class _Indivisible:
    """Modules that must stay whole."""

    def __init__(self, root: nn.Module, unit_classes: Sequence[str]) -> None:
        self._by_user = frozenset(unit_classes)
        self._by_model: set[str] = set()
        found: set[str] = set()
        for module in root.modules():
            self._by_model.update(getattr(module, "_no_split_modules", None) or ())
            found |= _class_names(module)
        missing = sorted(self._by_user - found)
        if missing:
            near = difflib.get_close_matches(missing[0], found, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"`unit_classes` names {missing}, but the model has no module of such a class.{hint}")

    def holds(self, module: nn.Module) -> bool:
        return self.reason(module) is not None

    def is_asked_for(self, module: nn.Module) -> bool:
        """Whether the user has named ``module``, or its class."""
        return getattr(module, _MARK, False) or not self._by_user.isdisjoint(_class_names(module))

    def reason(self, module: nn.Module) -> str | None:
        """Reason not to open ``module``; ``None``: there is none."""
        if isinstance(module, _INDIVISIBLE):
            return f"a {type(module).__name__} of PyTorch"
        if getattr(module, _MARK, False):
            return "marked with `unit`"
        if type(module).__name__ in self._by_model:
            return f"{type(module).__name__} is one of the model's `_no_split_modules`"
        return None if self._by_user.isdisjoint(_class_names(module)) else "one of `unit_classes`"


def _class_names(module: nn.Module) -> set[str]:
    kinds = type(module).__mro__
    return {kind.__name__ for kind in kinds} | {f"{kind.__module__}.{kind.__qualname__}" for kind in kinds}


def has_state(module: nn.Module) -> bool:
    """Whether ``module`` has parameters or batch statistics, its own or those of a part of it."""
    has_parameters = next(module.parameters(), None) is not None
    return has_parameters or any(isinstance(child, _NormBase) for child in module.modules())


def _owns_state(module: nn.Module) -> bool:
    return next(module.parameters(recurse=False), None) is not None or isinstance(module, _NormBase)
