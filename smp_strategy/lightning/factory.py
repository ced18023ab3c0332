"""Combine our hooks with the base classes of one Lightning tree.

Lightning checks ``isinstance`` against its own classes, and there are two sets of them. The hooks are therefore plain
mixins that inherit nothing at run time, and the classes that Lightning sees are put together here, once per tree.
"""

import functools
from importlib import import_module
from types import new_class
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from smp_strategy.lightning.strategy import SMPHooks

__all__ = ["Tree", "make_strategy"]

_FABRIC: Final = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}


class Tree:
    """The modules of one Lightning tree.

    Args:
        root: ``lightning.pytorch`` or ``pytorch_lightning``.
    """

    def __init__(self, root: str) -> None:
        self.root = root

    def pytorch(self, name: str) -> Any:
        """The module ``name`` of this tree, e.g. ``trainer.states``."""
        return import_module(f"{self.root}.{name}")

    def fabric(self, name: str) -> Any:
        """The module ``name`` of the Fabric that belongs to this tree, e.g. ``utilities.distributed``."""
        return import_module(f"{_FABRIC[self.root]}.{name}")


@functools.cache
def make_strategy(root: str) -> "type[SMPHooks]":
    """The class ``SMPStrategy`` for the Lightning tree ``root``."""
    from smp_strategy.lightning.strategy import SMPHooks

    tree = Tree(root)
    base = tree.pytorch("strategies.parallel").ParallelStrategy
    where = "smp_strategy.lightning" if root == "lightning.pytorch" else "smp_strategy.pytorch_lightning"
    body = {"tree": tree, "__module__": where, "__doc__": SMPHooks.__doc__}
    strategy: type[SMPHooks] = new_class("SMPStrategy", (SMPHooks, base), exec_body=lambda names: names.update(body))
    return strategy
