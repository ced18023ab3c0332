"""What each stage holds of the model.

Until the partition is decided every rank holds the whole model. Then a rank lets go of the units of other stages:
their parameters keep name, shape, dtype, device and identity (optimizers and hooks go on referring to them), but no
values, and an accidental use is an error (:mod:`smp_strategy.stage_tensors`). They get no gradient and so no optimizer
state.

A parameter can be held by several stages: one that two units share (tied weights) by the stages of both, one that
the glue has or computes with by all. The lowest of these stages counts it in norms and saves it.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import final

import torch
from torch import Tensor, nn

from smp_strategy.stage_tensors import StageTensor, home_of
from smp_strategy.units import Unit

__all__ = ["Ownership"]


@final
class Ownership:
    """Which stages hold which parameter and buffer.

    Args:
        root: the whole module.
        units: its units.
        stage_of: stage of each unit, by name.
        num_stages: number of stages.
        used_by_glue: parameters of units that code above the units computes with.
    """

    def __init__(
        self,
        root: nn.Module,
        units: Sequence[Unit],
        stage_of: Mapping[str, int],
        num_stages: int,
        *,
        used_by_glue: Iterable[nn.Parameter] = (),
    ) -> None:
        self._root = root
        self.stage_of = stage_of
        everywhere = frozenset(range(num_stages))
        holders: dict[int, frozenset[int]] = {}
        for unit in units:
            for tensor in unit.tensors:
                holders[id(tensor)] = holders.get(id(tensor), frozenset()) | {stage_of[unit.name]}
        holders.update((id(parameter), everywhere) for parameter in used_by_glue)
        self._holders: dict[int, frozenset[int]] = holders
        self._everywhere = everywhere
        # Buffers may be replaced by assignment during training, parameters keep their identity.
        self._by_name = {name: self.holders(tensor) for name, tensor in _named_tensors(root)}

    def holders(self, tensor: Tensor) -> frozenset[int]:
        """Stages that hold ``tensor``."""
        return self._holders.get(id(tensor), self._everywhere)

    def saver(self, name: str) -> int:
        """The stage that saves the parameter, buffer or extra state ``name``."""
        if name in self._by_name:
            return min(self._by_name[name])
        # Extra state of a module goes with the tensors of that module; of a module without any, with the first stage.
        prefix = name.rpartition(".")[0] + "."
        stages = [min(holders) for other, holders in self._by_name.items() if other.startswith(prefix)]
        return stages[0] if stages else 0

    def is_held(self, name: str, stage: int) -> bool:
        """Whether ``stage`` holds the parameter or buffer ``name``; extra state is everywhere."""
        return stage in self._by_name.get(name, self._everywhere)

    def shared(self) -> dict[frozenset[int], list[nn.Parameter]]:
        """Parameters that several stages hold, by the set of these stages; the same order on every rank."""
        found: dict[frozenset[int], list[nn.Parameter]] = {}
        for _, parameter in sorted(self._root.named_parameters()):
            if len(self.holders(parameter)) > 1:
                found.setdefault(self.holders(parameter), []).append(parameter)
        return found

    def local_parameters(self, stage: int) -> list[nn.Parameter]:
        """Parameters that ``stage`` holds, in order of registration."""
        return [parameter for parameter in self._root.parameters() if stage in self.holders(parameter)]

    def release(self, stage: int) -> None:
        """Let go of everything that ``stage`` does not hold."""
        with torch.inference_mode(False), torch.no_grad():
            for name, tensor in _named_tensors(self._root):
                if stage not in self.holders(tensor) and home_of(tensor) is None:
                    StageTensor.send_away(tensor, name, self.holders(tensor), stage)


def _named_tensors(root: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and buffers under all their names, non-persistent buffers included."""
    return [
        *root.named_parameters(remove_duplicate=False),
        *root.named_buffers(remove_duplicate=False),
    ]
