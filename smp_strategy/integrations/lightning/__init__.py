"""The Lightning door: :class:`SMPStrategy`, for either of Lightning's two trees.

``lightning.pytorch`` and ``pytorch_lightning`` are the same code under two names, with classes that do not know each
other. So a strategy is made per tree, from one set of hooks; nothing here imports Lightning before a tree is named.

Reading order: ``strategy`` (what Lightning calls, in one place), then what it delegates to: ``steps`` and ``logs``
(microbatches behind one step), ``gradients``, ``data``, ``communication``, ``refusals``, ``launcher`` with
``command``, and ``environment``.
"""

from typing import TYPE_CHECKING, Any

from smp_strategy.integrations.lightning.strategy_class import make_strategy

if TYPE_CHECKING:
    from smp_strategy.integrations.lightning.strategy import StrategyHooks as SMPStrategy

__all__ = ["SMPStrategy", "make_strategy"]


def __getattr__(name: str) -> Any:
    if name == "SMPStrategy":
        return make_strategy("lightning.pytorch")
    raise AttributeError(f"module 'smp_strategy.integrations.lightning' has no attribute {name!r}")
