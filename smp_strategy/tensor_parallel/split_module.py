"""``SplitLayerSet``: the split layers of a module during a run, as the engine uses them.

The whole module may return on some ranks first and on others later. Ranks that have it already take part with their
parts again, and keep the whole.

Whole sizes of split parameters between runs, for set-up code that looks at shapes and has no use for values.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Self, final

from torch import Tensor, nn

from smp_strategy.distributed.door_words import door_words
from smp_strategy.distributed.tensor_group import TensorGroup
from smp_strategy.errors import UnsupportedError
from smp_strategy.model.guarded_tensors import Guard, in_plain_sight, placeholder, unwatch, watch
from smp_strategy.model.parameter_parts import ParameterParts
from smp_strategy.model.shard_layout import Cut
from smp_strategy.tensor_parallel.plan.observed_pairs import ObservedLayers
from smp_strategy.tensor_parallel.plan.plan import SplitReport
from smp_strategy.tensor_parallel.plan.resolve import hook_problem
from smp_strategy.tensor_parallel.split import SplitModule, UnsplitViews

__all__ = ["SplitLayerSet"]


@final
class SplitLayerSet:
    """The split layers of a module.

    Args:
        module: The split module.
        group: Ranks that have the parts.

    Attributes:
        parts: The split parameters.
        report: How each layer was split, or why not.
        watched: Observations of the traced step.
    """

    def __init__(self, module: SplitModule, group: TensorGroup) -> None:
        self._module = module
        self.parts = ParameterParts(module.cuts, group)
        self.report: SplitReport = module.report
        self.watched: ObservedLayers = module.watched
        self._is_dense = False

    @classmethod
    def none(cls) -> Self:
        """No split layers: this rank has all of each."""
        return cls(SplitModule({}, SplitReport((), 1), UnsplitViews(()), ObservedLayers(), (), []), TensorGroup(None))

    @property
    def cuts(self) -> Mapping[nn.Parameter, Cut]:
        """Cuts of the split parameters."""
        return self.parts.cuts

    def hook_problem(self, modules: Mapping[str, nn.Module]) -> str | None:
        """Problem of a hook registered after the split; ``modules`` by all of their names."""
        problems = (hook_problem(block, modules) for block in self._module.blocks)
        return next((problem for problem in problems if problem is not None), None)

    def looking_dense(self) -> AbstractContextManager[None]:
        """Context in which modules have the classes and sizes from before the split; values stay parts."""
        return self._module.appearance.dense()

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
        if not self._is_dense:
            self._module.to_dense()
            self._is_dense = True

    @contextmanager
    def in_parts(self) -> Iterator[None]:
        """Context in which values are this rank's parts, even if layers are whole already."""
        wholes: dict[nn.Parameter, Tensor] = {}
        if self._is_dense:
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
        """Shape of the whole ``tensor``."""
        return f"Parameter({list(tensor.shape)}, split over ranks)"

    def refusal(self, operation: str) -> UnsupportedError:
        """Error for an operation that needs values."""
        words = door_words()
        return UnsupportedError(
            f"`{operation}` needs the values of a parameter that the last run has left split over ranks "
            f"(`tensor_parallel_degree`). Compute with it in a step, or {words.in_hook}; to have the whole model after "
            'a run, set `restore_module="all"`.'
        )
