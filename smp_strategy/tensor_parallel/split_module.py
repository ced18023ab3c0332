"""``SplitModule``: a module with split layers during a run, as the engine uses it.

The whole module may return on some ranks first and on others later. Ranks that have it already take part with their
parts again, and keep the whole.

Code written for whole layers (initialisers, set-up code between runs) asks modules for their classes and sizes, and
parameters for their shapes: both can look for a while as they were before the split.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self, final

from torch import Tensor, nn

from smp_strategy.distributed.door_words import door_words
from smp_strategy.distributed.tensor_group import TensorGroup
from smp_strategy.errors import UnsupportedError
from smp_strategy.model.guarded_tensors import Guard, in_plain_sight, placeholder, unwatch, watch
from smp_strategy.model.parameter_parts import ParameterParts
from smp_strategy.model.shard_layout import Cut
from smp_strategy.tensor_parallel.plan.observed_pairs import ObservedLayers
from smp_strategy.tensor_parallel.plan.plan import LayerBlock, SplitReport
from smp_strategy.tensor_parallel.plan.resolve import hook_problem

__all__ = ["SplitModule", "UnsplitViews"]


_MISSING = object()


@final
class UnsplitViews:
    """Recorded classes and attributes of ``modules``; create it before their layers are split."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._before = [(module, type(module), dict(vars(module))) for module in modules]
        self._changes: list[tuple[nn.Module, tuple[type, type], dict[str, tuple[Any, Any]]]] = []

    def compare(self) -> None:
        """Record the changes that the split has made; only these are switched later."""
        for module, kind, before in self._before:
            after = dict(vars(module))
            names = [
                name for name in {**before, **after} if before.get(name, _MISSING) is not after.get(name, _MISSING)
            ]
            if names or type(module) is not kind:
                attributes = {name: (before.get(name, _MISSING), after.get(name, _MISSING)) for name in names}
                self._changes.append((module, (kind, type(module)), attributes))
        self._before = []

    @contextmanager
    def dense(self) -> Iterator[None]:
        """Context in which modules look as before the split."""
        self._show(0)
        try:
            yield
        finally:
            self._show(1)

    def _show(self, which: int) -> None:
        for module, kinds, attributes in self._changes:
            module.__class__ = kinds[which]
            _fill(vars(module), {name: values[which] for name, values in attributes.items()})


def _fill(attributes: dict[str, Any], values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if value is _MISSING:
            attributes.pop(name, None)
        else:
            attributes[name] = value


@final
@dataclass(frozen=True, eq=False)
class SplitModule:
    """A module with split layers."""

    parts: ParameterParts
    """The split parameters."""
    report: SplitReport
    """How each layer was split, or why not."""
    appearance: UnsplitViews
    """Classes and sizes of its modules before the split."""
    watched: ObservedLayers
    """Observations of the traced step."""
    blocks: tuple[LayerBlock, ...]
    """Layers that are split together."""
    _undo: list[Callable[[], object]] = field(repr=False)

    @classmethod
    def none(cls) -> Self:
        """No split layers: this rank has all of each."""
        whole = ParameterParts({}, TensorGroup(None))
        return cls(whole, SplitReport((), 1), UnsplitViews(()), ObservedLayers(), (), [])

    @property
    def cuts(self) -> Mapping[nn.Parameter, Cut]:
        return self.parts.cuts

    def hook_problem(self, modules: Mapping[str, nn.Module]) -> str | None:
        """Problem of a hook registered after the split; ``modules`` by all of their names."""
        problems = (hook_problem(block, modules) for block in self.blocks)
        return next((problem for problem in problems if problem is not None), None)

    @contextmanager
    def whole_sizes(self) -> Iterator[None]:
        """Context in which split parameters have the sizes from before the split; uses of their values are refused."""
        values: dict[Any, Tensor] = {}
        guard = _WholeSizes()
        for parameter in self.cuts:
            with in_plain_sight():
                values[parameter] = parameter.data
                shape = tuple(self.parts.whole_shape(parameter))
                parameter.data = placeholder(shape, parameter.dtype, parameter.device)
            watch(parameter, guard)
        try:
            yield
        finally:
            for parameter, value in values.items():
                unwatch(parameter)
                with in_plain_sight():
                    parameter.data = value

    def to_dense(self) -> None:
        """Make all layers whole again, in place. Collective, on ranks where they are split; gradients are dropped."""
        while self._undo:
            self._undo.pop()()

    @contextmanager
    def in_parts(self) -> Iterator[None]:
        """Context in which values are this rank's parts, even if layers are whole already."""
        wholes: dict[nn.Parameter, Tensor] = {}
        if not self._undo:  # dense again
            wholes = {parameter: parameter.data for parameter in self.cuts}
            for parameter, whole in wholes.items():
                parameter.data = self.parts.part(parameter, whole)
        try:
            yield
        finally:
            for parameter, whole in wholes.items():
                parameter.data = whole


@final
class _WholeSizes(Guard):
    @property
    def can_lift(self) -> bool:
        """Never: values are parts, in memory of their own."""
        return False

    def describe(self, tensor: Tensor) -> str:
        return f"Parameter({list(tensor.shape)}, split over ranks)"

    def refusal(self, operation: str) -> UnsupportedError:
        """Error for an operation that needs values."""
        words = door_words()
        return UnsupportedError(
            f"`{operation}` needs the values of a parameter that the last run has left split over ranks "
            f"(`tensor_parallel_degree`). Compute with it in a step, or {words.in_hook}; to have the whole model after "
            'a run, set `restore_module="all"`.'
        )
