"""Cache of plans: one for every path that steps take, and every number of microbatches."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, final, get_args

from smp_strategy.config.config import SMPConfig
from smp_strategy.model.trace.events import Trace
from smp_strategy.pipeline.microbatch_order import TurnRule
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

# A step that never repeats a path or a size of batch must not fill the memory.
MOST_PLANS = 256


def policy_of(partition: Partition) -> Policy:
    """The policy that ``partition`` was made for."""
    names = {name: name for name in get_args(PolicyName)}
    return Policy(names[partition.schedule], partition.chunks_per_stage, partition.active_microbatches)


class StepOrder(NamedTuple):
    """The order of work of one step."""

    plan: Plan | None = None
    """``None``: program order, as no path is known yet, or microbatches depend on each other."""
    gate: int | None = None
    """After how many events a microbatch waits for those before it to end, if it does."""
    expected: Sequence[object] | None = None
    """Signatures of the events that the plan was made for."""


@final
class PlanCache:
    """See the module docstring.

    Args:
        config: all options.
        partition: where units are, and under which policy.
        costs: how long calls take.
        report: told the first timetable of a training step, where there are several stages.
        agree: makes a trace the same on all ranks that split layers between them. Their parts, hence their costs, may
            differ, but they must keep one order.

    Attributes:
        turn_rules: of kinds of steps in which microbatches depend on each other.
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
        self.turn_rules: dict[str, TurnRule] = {}
        # The latest trace of each kind of step.
        self._traces: dict[str, Trace] = {}
        self._plans: dict[tuple[int, int], Plan] = {}

    def order_of(self, kind: str, num_microbatches: int) -> StepOrder:
        """The order of work of the next step.

        Args:
            kind: steps of one kind probably take the same path.
            num_microbatches: of its batch.
        """
        plan, rule = self.of(kind, num_microbatches), self.turn_rules.get(kind)
        if plan is None:
            return StepOrder()
        gate = None
        if rule is not None:
            if rule.gate is None or rule.path != self._traces[kind].names:
                return StepOrder()
            gate = rule.gate
        if kind == "train" and not self._is_reported and len(plan.stages) > 1:
            self._report(timetable(plan))
            self._is_reported = True
        return StepOrder(plan, gate, self._traces[kind].path)

    def learn(self, kind: str, trace: Trace) -> None:
        """A step of ``kind`` has taken the path of ``trace``: the next one is planned for it."""
        if kind not in self._traces or self._traces[kind].signature != trace.signature:
            self._traces[kind] = self._agree(trace)

    def of(self, kind: str, num_microbatches: int) -> Plan | None:
        """The order of work for the next step of ``kind``; ``None`` where no path is known."""
        trace = self._traces.get(kind)
        return None if trace is None else self.plan(trace, num_microbatches)

    def plan(self, trace: Trace, num_microbatches: int) -> Plan:
        """The order of work for steps that take the path of ``trace``."""
        key = (trace.signature, num_microbatches)
        if key not in self._plans:
            if len(self._plans) >= MOST_PLANS:
                self._plans.clear()
            partition = self._partition
            flow = self._costs.flow(trace, partition.stage_of, partition.num_stages, partition.treatments)
            plan = self._best(flow, num_microbatches)
            check(plan, flow, num_microbatches)
            self._plans[key] = plan
        return self._plans[key]

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
