"""Class factory: ``SMPStrategy`` for one of Lightning's two trees, with all options in its signature.

Lightning checks ``isinstance`` against its own classes, and there are two sets of them. The strategy's code therefore
inherits nothing of Lightning's, and is combined with the base class of a tree here, once per tree.

``StrategyHooks`` takes any options and suggests corrections of unknown ones. Signature and docstring name each option
with its type, default and sentence, for LightningCLI and ``help()``.
"""

import functools
from types import new_class

from smp_strategy.config.option_signature import with_option_docs, with_option_signature
from smp_strategy.integrations.lightning.strategy import StrategyHooks
from smp_strategy.integrations.lightning.tree import Tree

__all__ = ["make_strategy"]


@functools.cache
def make_strategy(root: str) -> type[StrategyHooks]:
    """The class ``SMPStrategy`` for the Lightning tree ``root``."""
    tree = Tree(root)
    base = tree.pytorch("strategies.parallel").ParallelStrategy
    where = "smp_strategy.integrations.lightning" if root == "lightning.pytorch" else "smp_strategy.pytorch_lightning"
    body = {
        "__init__": with_option_signature(StrategyHooks.__init__),
        "tree": tree,
        "__module__": where,
        "__doc__": with_option_docs(StrategyHooks.__doc__),
    }
    strategy: type[StrategyHooks] = new_class(
        "SMPStrategy", (StrategyHooks, base), exec_body=lambda names: names.update(body)
    )
    return strategy
