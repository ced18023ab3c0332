"""``SMPStrategy`` and ``SMPMonitor`` for scripts that write ``import pytorch_lightning``."""

from typing import TYPE_CHECKING

from smp_strategy.integrations.lightning import make_monitor, make_strategy

if TYPE_CHECKING:
    from smp_strategy.integrations.lightning.monitor_callback import MonitorHooks as SMPMonitor
    from smp_strategy.integrations.lightning.strategy import StrategyHooks as SMPStrategy
else:
    SMPMonitor = make_monitor("pytorch_lightning")
    SMPStrategy = make_strategy("pytorch_lightning")

__all__ = ["SMPMonitor", "SMPStrategy"]
