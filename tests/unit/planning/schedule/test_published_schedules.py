"""Published schedules: bubbles and memory of their papers."""

from collections.abc import Sequence
from itertools import product
from pathlib import Path

import pytest
import torch
from torch.distributed.pipelining import schedules as torch_schedules

from smp_strategy.model.trace.events import Trace
from smp_strategy.model.trace.work import Link, Work
from smp_strategy.pipeline.action_order import peak_microbatches
from smp_strategy.pipeline.schedule import Plan
from smp_strategy.planning.schedule.check_plan import check
from smp_strategy.planning.schedule.flow import Flow, route
from smp_strategy.planning.schedule.peak_memory import peak_saved_bytes
from smp_strategy.planning.schedule.policies import Policy
from smp_strategy.planning.schedule.published import ChunkPass, one_forward_one_backward, zero_bubble_v
from smp_strategy.planning.schedule.simulate import simulate
from smp_strategy.planning.schedule.step_graph import StepGraph
from smp_strategy.planning.schedule.steps_in_a_row import with_period
from tests.unit.planning.schedule.flows import chain

EQUAL = Work(1.0, 1.0, 1.0)
STAGES = range(2, 9)


def flow_under(policy: Policy, num_stages: int, work: Work = EQUAL, saved_bytes: int = 1) -> Flow:
    """A chain whose stages take ``work`` in all, in as many equal chunks as ``policy`` wants; each saves some bytes."""
    count = num_stages * policy.num_chunks
    trace, stage_of = chain(*(policy.stage_of_chunk(chunk, num_stages) for chunk in range(count)))
    trace = Trace([event._replace(saved_bytes=saved_bytes) for event in trace.events], trace.loss)
    return route(trace, stage_of, num_stages, dict.fromkeys(range(count), work.scaled(1 / policy.num_chunks)))


def plan_under(policy: Policy, num_stages: int, num_microbatches: int, work: Work = EQUAL) -> Plan:
    flow = flow_under(policy, num_stages, work)
    plan = simulate(flow, num_microbatches, policy, split_overhead=0.0)
    check(plan, flow, num_microbatches)
    return with_period(plan, StepGraph(flow, num_microbatches, Link.instant(), 0.0))


def waits(plan: Plan) -> list[float]:
    """How long each stage waits between its first and its last action."""
    return [times[-1][1] - times[0][0] - sum(end - start for start, end in times) for times in plan.times]


@pytest.mark.parametrize("num_stages", STAGES)
@pytest.mark.parametrize("work", [EQUAL, Work(1.0, 1.5, 0.5)])
def test_gpipe_and_1f1b_wait_for_p_minus_1_microbatches(num_stages, work):
    for num_microbatches in (1, num_stages - 1, num_stages, 2 * num_stages, 3 * num_stages + 1):
        for name in ("simple", "1f1b"):
            plan = plan_under(Policy(name), num_stages, num_microbatches, work)
            assert plan.makespan == pytest.approx((num_microbatches + num_stages - 1) * sum(work))


@pytest.mark.parametrize("num_stages", STAGES)
def test_gpipe_keeps_all_microbatches_and_1f1b_as_many_as_there_are_stages_to_come(num_stages):
    for num_microbatches in (1, num_stages, 3 * num_stages + 1):
        gpipe = plan_under(Policy("simple"), num_stages, num_microbatches)
        pipedream = plan_under(Policy("1f1b"), num_stages, num_microbatches)
        for stage in range(num_stages):
            assert peak_microbatches(gpipe.stages[stage]) == num_microbatches
            assert peak_microbatches(pipedream.stages[stage]) == min(num_microbatches, num_stages - stage)


@pytest.mark.parametrize(("num_stages", "num_chunks"), list(product(STAGES, (2, 3, 4))))
def test_interleaving_divides_the_bubble_by_the_number_of_chunks(num_stages, num_chunks):
    policy, work = Policy("1f1b", num_chunks), Work(1.0, 1.3, 0.7)
    for groups in (1, 2, 3):
        count = groups * num_stages
        plan = plan_under(policy, num_stages, count, work)
        assert plan.makespan == pytest.approx(count * sum(work) + (num_stages - 1) * sum(work) / num_chunks)
        for stage, actions in enumerate(plan.stages):
            warm_up = 2 * (num_stages - stage - 1) + (num_chunks - 1) * num_stages
            first_backward = next(position for position, action in enumerate(actions) if action.kind == "B")
            assert first_backward == min(count * num_chunks, warm_up + 1)
            assert most_live(actions) == first_backward


def most_live(actions: Sequence) -> int:
    """Most segments that have been forward and not backward."""
    live = [0]
    for action in actions:
        live.append(live[-1] + {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind])
    return max(live)


@pytest.mark.parametrize("num_stages", STAGES)
@pytest.mark.parametrize("work", [EQUAL, Work(1.0, 1.2, 0.8), Work(1.2, 1.0, 0.8), Work(1.0, 2.0, 1.0)])
def test_zero_bubble_shortens_the_wait_of_1f1b_by_the_weight_gradients(num_stages, work):
    """ZB-H1 needs TW <= TB for that, ZB-H2 enough microbatches to fill the pipeline."""
    forward, backward, weight = work
    for count in (2 * num_stages - 1, 2 * num_stages, 4 * num_stages):
        first = plan_under(Policy("zb-h1"), num_stages, count, work)
        assert max(waits(first)) <= (num_stages - 1) * (forward + backward - weight) + 1e-6
        assert [peak_microbatches(first.stages[stage]) for stage in range(num_stages)] == [num_stages] * num_stages
        second = plan_under(Policy("zb-h2"), num_stages, count, work)
        assert max(waits(second)) <= (num_stages - 1) * (forward + backward - 2 * weight) + 1e-6
        assert max(peak_microbatches(second.stages[stage]) for stage in range(num_stages)) == 2 * num_stages - 1


@pytest.mark.parametrize("num_stages", STAGES)
def test_in_a_row_no_stage_waits_under_zb_h2_and_1f1b_takes_as_long_as_alone(num_stages):
    """arXiv:2401.10241, figure 3: ZB-H2 has no bubble where stages do not wait for each other's optimizers."""
    for count in (2 * num_stages - 1, 2 * num_stages, 4 * num_stages):
        plan = plan_under(Policy("zb-h2"), num_stages, count)
        assert plan.period == pytest.approx(3 * count)
        assert plan.makespan == pytest.approx(3 * count + num_stages - 1)
        for policy in (Policy("simple"), Policy("1f1b")):
            plan = plan_under(policy, num_stages, count)
            assert plan.period == pytest.approx(plan.makespan)
            assert plan.overlap == pytest.approx(0.0)


@pytest.mark.parametrize("num_stages", STAGES)
def test_zb_v_waits_for_its_first_input_only_and_keeps_what_1f1b_keeps_on_its_first_stage(num_stages):
    policy = Policy("zb-v", 2)
    for count in (2 * num_stages - 1, 2 * num_stages, 4 * num_stages):
        plan = plan_under(policy, num_stages, count)
        # Half a unit of time per chunk: down the V to the stage that turns.
        assert plan.makespan == pytest.approx(3 * count + (num_stages - 1) / 2)
        # Between two stages whose chunks are in step there is room for half a unit, once per step.
        assert max(waits(plan)) <= 0.5 + 1e-6
        for actions in plan.stages[1:]:
            assert most_live(actions) <= 2 * num_stages
        # Both chunks of the stage at the turn are one segment.
        assert most_live(plan.stages[0]) <= num_stages


@pytest.mark.parametrize("work", [Work(1.0, 0.6, 1.4), Work(0.5, 1.5, 1.0), Work(1.5, 0.5, 0.5), Work(1.0, 1.0, 0.1)])
@pytest.mark.parametrize("num_stages", [2, 3, 4, 6])
def test_zero_bubble_is_never_slower_than_1f1b(num_stages, work):
    """Whatever the passes take, with few microbatches and with so many that splits cost more than waits."""
    flow = flow_under(Policy(), num_stages, work)
    for count, link in product((1, 3, num_stages, 3 * num_stages, 40), (Link.instant(), Link(0.2, 100.0))):
        usual = simulate(flow, count, Policy("1f1b"), link).makespan
        for policy in (Policy("zb-h1"), Policy("zb-h2")):
            # What is not a thousandth faster is not taken.
            assert simulate(flow, count, policy, link).makespan <= usual * 1.001


# --- against the tables of torch.distributed.pipelining -------------------------------------------------------------


class Stub:
    """As much of a stage as the constructors of torch's schedules look at."""

    is_first = is_last = has_backward = False
    submod = torch.nn.Identity()
    device = torch.device("cpu")

    def __init__(self, rank: int, num_ranks: int, number: int, count: int) -> None:
        self.group_rank, self.group_size, self.stage_index, self.num_stages = rank, num_ranks, number, count
        self.group = None
        self.stage_index_to_group_rank: dict[int, int] = {}


def torch_table(schedule: type, numbers: list[list[int]], num_microbatches: int, rank: int) -> list[ChunkPass]:
    stages = [Stub(rank, len(numbers), number, sum(map(len, numbers))) for number in numbers[rank]]
    table = schedule(stages, num_microbatches).pipeline_order[rank]
    names = {"F": "F", "B": "B", "I": "I", "W": "W"}
    return [
        ChunkPass(
            names[action.computation_type.value], numbers[rank].index(action.stage_index), action.microbatch_index
        )
        for action in table
        if action is not None
    ]


@pytest.mark.parametrize(("num_stages", "num_chunks"), list(product((2, 3, 4), (2, 3))))
def test_interleaved_tables_are_those_of_torch(num_stages, num_chunks):
    numbers = [[chunk * num_stages + rank for chunk in range(num_chunks)] for rank in range(num_stages)]
    for rank, count in product(range(num_stages), (num_stages, 2 * num_stages)):
        theirs = torch_table(torch_schedules.ScheduleInterleaved1F1B, numbers, count, rank)
        assert one_forward_one_backward(rank, num_stages, count, num_chunks) == theirs


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_zb_v_tables_are_those_of_torch(num_stages):
    numbers = [[rank, 2 * num_stages - 1 - rank] for rank in range(num_stages)]
    for rank, count in product(range(num_stages), (1, num_stages, 2 * num_stages, 9)):
        theirs = torch_table(torch_schedules.ScheduleZBVZeroBubble, numbers, count, rank)
        assert zero_bubble_v(rank, num_stages, count) == theirs


# --- the page about schedules ---------------------------------------------------------------------------------------

PAGE = Path(__file__).parents[4] / "docs" / "schedules.md"


def drawn(policy: Policy, num_stages: int, num_microbatches: int) -> str:
    """A timetable with a column per unit of time."""
    plan = plan_under(policy, num_stages, num_microbatches)
    lines = []
    for stage, (actions, times) in enumerate(zip(plan.stages, plan.times, strict=True)):
        cells = ["  "] * round(plan.makespan)
        for action, (start, end) in zip(actions, times, strict=True):
            cells[round(start) : round(end)] = [str(action)] * (round(end) - round(start))
        lines.append(f"stage {stage}   {' '.join(cells)}".rstrip())
    return "\n".join(lines)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_the_page_shows_the_timetables_that_are_made(name):
    assert drawn(Policy(name), 3, 5) in PAGE.read_text()


def test_the_page_states_the_numbers_of_four_stages_and_eight_microbatches():
    rows = []
    policies = [Policy("simple"), Policy("interleaved"), Policy("1f1b"), Policy("1f1b", 2), Policy("1f1b", 4)]
    for policy in [*policies, Policy("zb-h1"), Policy("zb-h2"), Policy("zb-v", 2)]:
        plan = plan_under(policy, 4, 8)
        flow = flow_under(policy, 4, saved_bytes=60 // policy.num_chunks)
        peaks = " ".join(f"{peak / 60:g}" for peak in peak_saved_bytes(plan, flow))
        rows.append(f"| `{policy}` | {plan.makespan:g} | {plan.bubble:.0%} | {plan.period:g} | {peaks} |")
    assert "\n".join(rows) in PAGE.read_text()
