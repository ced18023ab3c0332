"""The split layers of a module from the first step of a run to its end, as the engine meets them.

Where only some ranks get the whole module back, others may get it later. Those that have it by then take part with
their parts again, and keep the whole.
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

__all__ = ["SplitLayerSet"]


@final
class SplitLayerSet:
    """See the module docstring.

    Args:
        module: whose layers are split, just now.
        group: the ranks that have the parts.

    Attributes:
        parts: what is split.
        report: what became of each layer.
        watched: what was seen in the step before.
    """

    def __init__(self, module: SplitModule, group: TensorGroup) -> None:
        self._module = module
        self.parts = ParameterParts(module.cuts, group)
        self.report: SplitReport = module.report
        self.watched: ObservedLayers = module.watched
        self._is_dense = False

    @property
    def cuts(self) -> Mapping[nn.Parameter, Cut]:
        """How parameters are divided."""
        return self.parts.cuts

    def hook_problem(self, modules: Mapping[str, nn.Module]) -> str | None:
        """What a hook would see that has come since layers were split; ``modules`` by all of their names."""
        problems = (hook_problem(block, modules) for block in self._module.blocks)
        return next((problem for problem in problems if problem is not None), None)

    def looking_dense(self) -> AbstractContextManager[None]:
        """In here modules have the classes and the sizes that they had before; their values stay parts."""
        return self._module.appearance.dense()

    def to_dense(self) -> None:
        """Make all layers whole again, in place. Collective, on ranks where they are split; gradients are dropped."""
        if not self._is_dense:
            self._module.to_dense()
            self._is_dense = True

    @contextmanager
    def in_parts(self) -> Iterator[None]:
        """In here, values are this rank's parts, also where layers are whole already."""
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
