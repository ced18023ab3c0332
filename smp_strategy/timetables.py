"""The timetables of a run: one for every path that steps take, and every number of microbatches."""

from typing import final

from smp_strategy.config import SMPConfig
from smp_strategy.partition.partition import Partition
from smp_strategy.pipeline.schedule import Plan
from smp_strategy.planning import Costs, plan_of
from smp_strategy.trace.events import Trace
from smp_strategy.trace.machine import Machine

__all__ = ["Timetables"]

# A step that never repeats a path or a size of batch must not fill the memory.
MOST_PLANS = 256


@final
class Timetables:
    """See the module docstring.

    Args:
        config: all options.
        partition: where the units are.
        machine: what the stages compute on.
    """

    def __init__(self, config: SMPConfig, partition: Partition, machine: Machine) -> None:
        self._config = config
        self._partition = partition
        self._machine = machine
        self._plans: dict[tuple[int, int], Plan] = {}

    def plan(self, trace: Trace, num_microbatches: int) -> Plan:
        """The order of work for steps that take the path of ``trace``."""
        key = (trace.signature, num_microbatches)
        if key not in self._plans:
            if len(self._plans) >= MOST_PLANS:
                self._plans.clear()
            costs = Costs.modelled(trace, self._machine)
            self._plans[key] = plan_of(self._config, costs, self._partition, num_microbatches)
        return self._plans[key]
