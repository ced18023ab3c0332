"""Combine our hooks with the base classes of one Lightning tree.

Lightning checks ``isinstance`` against its own classes, and there are two sets of them. The hooks are therefore plain
mixins that inherit nothing at run time, and the classes that Lightning sees are put together here, once per tree.
"""

import functools
from types import new_class

from smp_strategy.integrations.lightning.strategy import SMPHooks
from smp_strategy.integrations.lightning.tree import Tree

__all__ = ["make_strategy"]


@functools.cache
def make_strategy(root: str) -> type[SMPHooks]:
    """The class ``SMPStrategy`` for the Lightning tree ``root``."""
    tree = Tree(root)
    base = tree.pytorch("strategies.parallel").ParallelStrategy
    where = "smp_strategy.integrations.lightning" if root == "lightning.pytorch" else "smp_strategy.pytorch_lightning"
    body = {"tree": tree, "__module__": where, "__doc__": SMPHooks.__doc__}
    strategy: type[SMPHooks] = new_class("SMPStrategy", (SMPHooks, base), exec_body=lambda names: names.update(body))
    return strategy
