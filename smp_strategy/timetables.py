"""The timetables of a run: one for every path that steps take, and every number of microbatches."""

from typing import final, get_args

from smp_strategy.config import SMPConfig
from smp_strategy.costs import Costs
from smp_strategy.partitioner.partition import Partition
from smp_strategy.pipeline.check import check
from smp_strategy.pipeline.policies import Policy, PolicyName
from smp_strategy.pipeline.routing import Flow
from smp_strategy.pipeline.schedule import Plan
from smp_strategy.pipeline.search import search
from smp_strategy.pipeline.simulate import simulate
from smp_strategy.planning import policies_of
from smp_strategy.trace.events import Trace

__all__ = ["Timetables", "policy_of"]

# A step that never repeats a path or a size of batch must not fill the memory.
MOST_PLANS = 256


def policy_of(partition: Partition) -> Policy:
    """The policy that ``partition`` was made for."""
    names = {name: name for name in get_args(PolicyName)}
    return Policy(names[partition.schedule], partition.chunks_per_stage, partition.active_microbatches)


@final
class Timetables:
    """See the module docstring.

    Args:
        config: all options.
        partition: where units are, and under which policy.
        costs: how long calls take.
    """

    def __init__(self, config: SMPConfig, partition: Partition, costs: Costs) -> None:
        self._config = config
        self._partition = partition
        self._costs = costs
        self._plans: dict[tuple[int, int], Plan] = {}

    def plan(self, trace: Trace, num_microbatches: int) -> Plan:
        """The order of work for steps that take the path of ``trace``."""
        key = (trace.signature, num_microbatches)
        if key not in self._plans:
            if len(self._plans) >= MOST_PLANS:
                self._plans.clear()
            flow = self._costs.flow(trace, self._partition.stage_of, self._partition.num_stages)
            plan = self._best(flow, num_microbatches)
            check(plan, flow, num_microbatches)
            self._plans[key] = plan
        return self._plans[key]

    def _best(self, flow: Flow, num_microbatches: int) -> Plan:
        policy, link = policy_of(self._partition), self._costs.machine.link
        if self._config.pipeline != "auto":
            return simulate(flow, num_microbatches, policy, link, thorough=True)
        allowed = policies_of(self._config, self._partition.num_stages, len(self._partition.units))
        alike = [each for each in allowed if each.layout == policy.layout]
        free = [
            None if stage.memory_limit is None else stage.memory_limit - stage.held.total
            for stage in self._partition.stages
        ]
        active = self._config.active_microbatches
        return search(flow, num_microbatches, alike, link, most_bytes=free, active_microbatches=active).plan
