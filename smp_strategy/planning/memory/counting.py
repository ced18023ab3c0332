"""Measured memory of this rank: bytes of storages, with shared storage counted once and absent tensors not at all.

Sharded parameters are counted by what spreads them: between uses the parameters themselves have no values, and gathered
values come and go.
"""

from collections.abc import Iterable
from typing import Any, final

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from smp_strategy.data_parallel.parameter_pieces import ShardedGradient
from smp_strategy.data_parallel.sharded_module import ShardedModule
from smp_strategy.distributed.mesh import ProcessMesh
from smp_strategy.model.guarded_tensors import in_plain_sight
from smp_strategy.model.ownership import home_of
from smp_strategy.planning.memory.sharded import RankMemory

__all__ = ["count"]


def count(
    module: nn.Module,
    optimizers: Iterable[Optimizer],
    mesh: ProcessMesh,
    spread: ShardedModule | None = None,
    *,
    copies: int = 0,
) -> RankMemory:
    """Bytes that this rank holds now, between steps.

    Args:
        module: Whole module; tensors of other stages are absent.
        optimizers: Optimizers of the module.
        mesh: Mesh with the place of this rank.
        spread: Sharded parameters; ``None``: there are none.
        copies: Bytes of half-precision copies of parameters.
    """
    counted, spread = _CountedStorages(), spread or ShardedModule.none()
    elsewhere = {id(parameter) for parameter in spread.parameters}
    # Inside of hooks, operations on guarded tensors are redirected; counting needs the tensors themselves.
    with in_plain_sight():
        parameters = [parameter for parameter in module.parameters() if _is_here(parameter)]
        return RankMemory(
            rank=mesh.rank,
            stage=mesh.stage,
            parameters=counted.add(each for each in parameters if id(each) not in elsewhere)
            + spread.held_bytes
            + copies,
            gathered=spread.most_gathered_bytes,
            gradients=counted.add(_in_memory(parameter.grad) for parameter in parameters),
            optimizer=sum(counted.add(pytree.tree_leaves(list(each.state.values()))) for each in optimizers),
            buffers=counted.add(each for each in module.buffers() if _is_here(each)),
        )


def _in_memory(gradient: Tensor | None) -> Tensor | None:
    return gradient.piece if isinstance(gradient, ShardedGradient) else gradient


def _is_here(tensor: Tensor) -> bool:
    home = home_of(tensor)
    return home is None or home.is_here


@final
class _CountedStorages:
    """Set of storages that are counted already."""

    def __init__(self) -> None:
        self._seen: set[tuple[str, int]] = set()

    def add(self, leaves: Iterable[Any]) -> int:
        """Bytes of the storages of tensors in ``leaves`` that were not counted before."""
        total = 0
        for leaf in leaves:
            if isinstance(leaf, Tensor) and not leaf.is_meta:
                storage = leaf.untyped_storage()
                key = (str(leaf.device), storage.data_ptr())
                if key not in self._seen:
                    self._seen.add(key)
                    total += storage.nbytes()
        return total
