"""``SMPStrategy`` for scripts that write ``import pytorch_lightning``."""

from typing import TYPE_CHECKING

from smp_strategy.integrations.lightning import make_strategy

if TYPE_CHECKING:
    from smp_strategy.integrations.lightning.strategy import StrategyHooks as SMPStrategy
else:
    SMPStrategy = make_strategy("pytorch_lightning")

__all__ = ["SMPStrategy"]
