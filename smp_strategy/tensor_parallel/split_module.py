"""``SplitLayerSet``: the split layers of a module during a run, as the engine uses them.

The whole module may return on some ranks first and on others later. Ranks that have it already take part with their
parts again, and keep the whole.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import final

from torch import Tensor, nn

from smp_strategy.model.shard_layout import Cut
from smp_strategy.tensor_parallel.group import TensorGroup
from smp_strategy.tensor_parallel.parameter_parts import ParameterParts
from smp_strategy.tensor_parallel.plan.hooks import hook_problem
from smp_strategy.tensor_parallel.plan.observed_pairs import ObservedLayers
from smp_strategy.tensor_parallel.plan.split_report import SplitReport
from smp_strategy.tensor_parallel.split import SplitModule
from smp_strategy.tensor_parallel.whole_sizes import whole_sizes

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

    def whole_sizes(self) -> AbstractContextManager[None]:
        """Context in which split parameters have the sizes from before the split, and no values."""
        return whole_sizes(self.parts)

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
