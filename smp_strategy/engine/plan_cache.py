"""Plan cache: one schedule for each path that steps take and each number of microbatches."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, final, get_args

from smp_strategy.config.config import SMPConfig
from smp_strategy.model.trace.events import Trace
from smp_strategy.pipeline.schedule import Plan
from smp_strategy.planning.costs import Costs
from smp_strategy.planning.partition.partition import Partition
from smp_strategy.planning.planner import policies_of
from smp_strategy.planning.schedule.check_plan import check
from smp_strategy.planning.schedule.flow import Flow
from smp_strategy.planning.schedule.policies import Policy, PolicyName
from smp_strategy.planning.schedule.search import Losses, search
from smp_strategy.planning.schedule.simulate import simulate
from smp_strategy.planning.schedule.step_graph import StepGraph
from smp_strategy.planning.schedule.steps_in_a_row import with_period
from smp_strategy.reports.explain.text import timetable

__all__ = ["PlanCache", "StepOrder", "policy_of"]

# Bound of the cache: steps may never repeat a path or a batch size.
MOST_PLANS = 256


def policy_of(partition: Partition) -> Policy:
    """Scheduling policy that ``partition`` was made for."""
    names = {name: name for name in get_args(PolicyName)}
    return Policy(names[partition.schedule], partition.chunks_per_stage, partition.active_microbatches)


class StepOrder(NamedTuple):
    """Schedule of a step."""

    plan: Plan | None = None
    """Plan; ``None``: program order, because no path is known yet or microbatches depend on each other."""
    expected: Sequence[object] | None = None
    """Signatures of the events that the plan was made for."""


@final
class PlanCache:
    """Plans of a module's steps, by path and number of microbatches.

    Args:
        report: Called with the first timetable of a training step, if there are several stages.
        agree: Makes a trace equal on all ranks of a tensor-parallel group. Their parts, hence their costs, may differ,
            but their order must be the same.

    Attributes:
        carried: Kinds of steps whose microbatches hand state on, which run one after the other, and names of the state.
    """

    def __init__(
        self,
        config: SMPConfig,
        partition: Partition,
        costs: Costs,
        report: Callable[[str], None],
        agree: Callable[[Trace], Trace] = lambda trace: trace,
    ) -> None:
        self._config = config
        self._partition = partition
        self._costs = costs
        self._report = report
        self._agree = agree
        self._is_reported = False
        self.carried: dict[str, tuple[str, ...]] = {}
        # The latest trace of each kind of step.
        self._traces: dict[str, Trace] = {}
        self._plans: dict[tuple[int, int], Plan] = {}

    def order_of(self, kind: str, num_microbatches: int) -> StepOrder:
        """Schedule of the next step."""
        plan = None if kind in self.carried else self.of(kind, num_microbatches)
        if plan is None:
            return StepOrder()
        if kind == "train" and not self._is_reported and len(plan.stages) > 1:
            self._report(timetable(plan))
            self._is_reported = True
        return StepOrder(plan, self._traces[kind].path)

    def learn(self, kind: str, trace: Trace) -> None:
        """Record that a step of ``kind`` took the path of ``trace``: the next one is planned for it."""
        if kind not in self._traces or self._traces[kind].signature != trace.signature:
            self._traces[kind] = self._agree(trace)

    def of(self, kind: str, num_microbatches: int) -> Plan | None:
        """Plan for the next step of ``kind``; ``None`` if no path is known."""
        trace = self._traces.get(kind)
        return None if trace is None else self.plan(trace, num_microbatches)

    def plan(self, trace: Trace, num_microbatches: int) -> Plan:
        """Plan for steps that take the path of ``trace``."""
        key = (trace.signature, num_microbatches)
        if key not in self._plans:
            if len(self._plans) >= MOST_PLANS:
                self._plans.clear()
            partition = self._partition
            flow = self._costs.flow(trace, partition.stage_of, partition.num_stages, partition.activation_policies)
            plan = self._best(flow, num_microbatches)
            check(plan, flow, num_microbatches)
            self._plans[key] = plan
        return self._plans[key]

    def bubble(self, num_microbatches: int, schedule: PolicyName | None = None) -> float | None:
        """Simulated idle share of a training step with another number of microbatches, or another schedule.

        ``None``: no path is known, or microbatches do not take turns.
        """
        trace, partition = self._traces.get("train"), self._partition
        if trace is None or "train" in self.carried:
            return None
        policy = policy_of(partition)
        if schedule is not None:
            policy = policy._replace(name=schedule)
        flow = self._costs.flow(trace, partition.stage_of, partition.num_stages, partition.activation_policies)
        link, split = self._costs.machine.link, self._costs.split_overhead
        return simulate(flow, num_microbatches, policy, link, split_overhead=split).bubble

    def _best(self, flow: Flow, num_microbatches: int) -> Plan:
        policy, link = policy_of(self._partition), self._costs.machine.link
        losses = Losses(self._costs.split_overhead, self._costs.spread)
        if self._config.pipeline != "auto":
            plan = simulate(flow, num_microbatches, policy, link, split_overhead=losses.split, thorough=True)
            return with_period(plan, StepGraph(flow, num_microbatches, link, losses.split))
        allowed = policies_of(self._config, self._partition.num_stages, len(self._partition.units))
        alike = [each for each in allowed if each.layout == policy.layout]
        free = [
            None if stage.memory_limit is None else stage.memory_limit - stage.held.total
            for stage in self._partition.stages
        ]
        return search(
            flow,
            num_microbatches,
            alike,
            link,
            most_bytes=free,
            active_microbatches=self._config.active_microbatches,
            losses=losses,
            horizon=self._config.activation_loading_horizon,
        ).plan
