"""The timetables of a run: one for every path that steps take, and every number of microbatches."""

from collections.abc import Mapping
from typing import final

from smp_strategy.config import SMPConfig
from smp_strategy.errors import ConfigError
from smp_strategy.pipeline.check import check
from smp_strategy.pipeline.policies import Policy
from smp_strategy.pipeline.routing import route
from smp_strategy.pipeline.schedule import Plan
from smp_strategy.pipeline.simulate import simulate
from smp_strategy.trace.events import Trace
from smp_strategy.trace.machine import Machine, modelled_work

__all__ = ["Timetables", "policy_of"]

# A step that never repeats a path or a size of batch must not fill the memory.
MOST_PLANS = 256


def policy_of(config: SMPConfig) -> Policy:
    """The policy that the options ask for."""
    if config.pipeline == "auto":
        raise ConfigError("`pipeline=auto` is not built yet. Name a schedule.")
    chunks = config.virtual_pipeline_degree or (2 if config.pipeline == "zb-v" else 1)
    return Policy(config.pipeline, chunks, config.active_microbatches)


@final
class Timetables:
    """See the module docstring.

    Args:
        policy: how work is ordered.
        stage_of: stage of each unit.
        num_stages: number of stages.
        machine: what the stages compute on.
    """

    def __init__(self, policy: Policy, stage_of: Mapping[str, int], num_stages: int, machine: Machine) -> None:
        self._policy = policy
        self._stage_of = stage_of
        self._num_stages = num_stages
        self._machine = machine
        self._plans: dict[tuple[int, int], Plan] = {}

    def plan(self, trace: Trace, num_microbatches: int) -> Plan:
        """The order of work for steps that take the path of ``trace``."""
        key = (trace.signature, num_microbatches)
        if key not in self._plans:
            if len(self._plans) >= MOST_PLANS:
                self._plans.clear()
            flow = route(trace, self._stage_of, self._num_stages, modelled_work(trace.events, self._machine))
            plan = simulate(flow, num_microbatches, self._policy, self._machine.link)
            check(plan, flow, num_microbatches)
            self._plans[key] = plan
        return self._plans[key]
