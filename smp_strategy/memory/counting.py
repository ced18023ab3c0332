"""What this rank holds, counted: memory that tensors share counts once, and what stands for absent tensors not at all.

Parameters that are spread over a shard group are counted by who spreads them: between uses they have no values, and
what is gathered comes and goes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from smp_strategy.memory.amounts import RankMemory
from smp_strategy.mesh import ProcessMesh
from smp_strategy.sharding.flat_unit import FlatUnit
from smp_strategy.stage_tensors import home_of, in_plain_sight

__all__ = ["NothingSpread", "Spread", "SpreadUnits", "count"]


class Spread(Protocol):
    """What this rank holds of parameters that are spread over a shard group."""

    @property
    def parameters(self) -> Iterable[nn.Parameter]:
        """Those parameters."""

    @property
    def resting_bytes(self) -> int:
        """Of values that are there between uses."""

    @property
    def most_gathered_bytes(self) -> int:
        """Of values that came and went, at most at a time."""

    @property
    def gradient_bytes(self) -> int:
        """Of this rank's share of the gradients."""


@final
@dataclass(frozen=True)
class NothingSpread:
    """No parameter is spread."""

    parameters: Sequence[nn.Parameter] = ()
    resting_bytes: int = 0
    most_gathered_bytes: int = 0
    gradient_bytes: int = 0


@final
@dataclass(frozen=True, kw_only=True)
class SpreadUnits:
    """Parameters in flat buffers. Asked between steps, when nothing is gathered."""

    units: Sequence[FlatUnit]
    parameters: Sequence[nn.Parameter]
    """All that are in those buffers."""
    most_gathered_bytes: int

    @property
    def resting_bytes(self) -> int:
        """Of values that are there between uses."""
        return sum(unit.held_bytes for unit in self.units)

    @property
    def gradient_bytes(self) -> int:
        """Of this rank's share of the gradients."""
        return sum(shard.nbytes for unit in self.units for shard in unit.gradient_shards)


def count(module: nn.Module, optimizers: Iterable[Optimizer], spread: Spread, mesh: ProcessMesh) -> RankMemory:
    """What this rank holds now, between steps.

    Args:
        module: all of it, of which this rank may have a part.
        optimizers: what trains it.
        spread: what is known of parameters that are spread.
        mesh: where this rank stands.
    """
    counted = _Counted()
    elsewhere = {id(parameter) for parameter in spread.parameters}
    # Of tensors that hooks look at just now operations arrive elsewhere; memory is looked at here.
    with in_plain_sight():
        parameters = [each for each in module.parameters() if id(each) not in elsewhere and _is_here(each)]
        return RankMemory(
            rank=mesh.rank,
            stage=mesh.stage,
            parameters=spread.resting_bytes + counted.add(parameters),
            gathered=spread.most_gathered_bytes,
            gradients=spread.gradient_bytes + counted.add(each.grad for each in parameters),
            optimizer=sum(counted.add(pytree.tree_leaves(list(each.state.values()))) for each in optimizers),
            buffers=counted.add(each for each in module.buffers() if _is_here(each)),
        )


def _is_here(tensor: Tensor) -> bool:
    home = home_of(tensor)
    return home is None or home.is_here


@final
class _Counted:
    """Memory that was counted already."""

    def __init__(self) -> None:
        self._seen: set[tuple[str, int]] = set()

    def add(self, leaves: Iterable[Any]) -> int:
        """Bytes of the memory behind those of ``leaves`` that are tensors, less what was counted before."""
        total = 0
        for leaf in leaves:
            if isinstance(leaf, Tensor) and not leaf.is_meta:
                storage = leaf.untyped_storage()
                key = (str(leaf.device), storage.data_ptr())
                if key not in self._seen:
                    self._seen.add(key)
                    total += storage.nbytes()
        return total
