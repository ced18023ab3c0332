"""Recomputation and offload of stages over their memory limit, against brute force."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smp_strategy.activations.policy import KEEP, ActivationPolicy
from smp_strategy.model.trace.device_model import HostLink, Machine
from smp_strategy.model.trace.events import Event, Trace, Value
from smp_strategy.model.trace.work import Effort, Efforts, Link, SavedBytes, StorageBytes, Work
from smp_strategy.pipeline.schedule import Plan
from smp_strategy.planning.activation_budget.allocate import ActivationPlan, Microbatch, relieve
from smp_strategy.planning.schedule.flow import Flow
from smp_strategy.planning.schedule.peak_memory import peak_saved_bytes
from smp_strategy.planning.schedule.policies import Policy
from smp_strategy.planning.schedule.simulate import simulate

MACHINE = Machine(1.0, 1.0, 0.0, Link.instant(), HostLink(8.0, is_beside=False))


def unit(number: int, inputs: int, products: int, others: int, seconds: float) -> tuple[Event, Work]:
    """A unit whose forward is done again as a whole, a quarter of it cheap."""
    before = (Value(number - 1, inputs, requires_grad=True),) if number else ()
    memories = (StorageBytes(inputs, "input"), StorageBytes(products, "product"), StorageBytes(others, "other"))
    effort = Effort(flops=3, other_bytes=1)
    kept = SavedBytes(memories, effort, Effort(other_bytes=1))
    made = (Value(number, 8, requires_grad=True),)
    saved = inputs + products + others
    event = Event("unit", f"u{number}", before, made, Efforts(effort), saved, kept=kept)
    return event, Work(seconds, seconds, seconds)


def microbatch(units: list[tuple[Event, Work]], cut: int | None) -> Microbatch:
    """On two stages, the second of which begins with unit ``cut``, or on one."""
    events = [event for event, _ in units]
    return Microbatch(
        trace=Trace(events, len(events) - 1),
        work={position: work for position, (_, work) in enumerate(units)},
        stage_of={event.name: int(cut is not None and number >= cut) for number, event in enumerate(events)},
        num_stages=1 if cut is None else 2,
    )


def simulating(policy: str):
    def run(flow: Flow) -> Plan:
        return simulate(flow, 4, Policy(policy))

    return run


@st.composite
def problems(draw: st.DrawFn) -> tuple[ActivationPlan, Microbatch, list[int | None]]:
    size = st.integers(1, 12)
    count = draw(st.integers(2, 4))
    units = [
        unit(number, draw(size), draw(size), draw(st.integers(10, 40)), float(draw(st.integers(1, 4))))
        for number in range(count)
    ]
    cut = draw(st.one_of(st.none(), st.integers(1, count - 1)))
    names = [event.name for event, _ in units]
    fixed = {draw(st.sampled_from(names)): ActivationPolicy(recompute="all")} if draw(st.booleans()) else {}
    relief = ActivationPlan(
        machine=MACHINE,
        fixed=fixed,
        free=frozenset(names).difference(fixed),
        may_offload=draw(st.booleans()) and cut is None,
        may_keep_products=draw(st.booleans()),
        horizon=1,
    )
    room = [draw(st.integers(30, 300)) for _ in range(1 if cut is None else 2)]
    return relief, microbatch(units, cut), room


@settings(max_examples=60)
@given(problems(), st.sampled_from(["1f1b", "simple"]))
def test_no_choice_that_fits_leads_to_a_faster_step(problem, policy):
    relief, program, room = problem
    found = relieve(relief, program, room, simulating(policy))
    fitting = []
    free = sorted(relief.free)
    for picked in itertools.product(relief.choices, repeat=len(free)):
        flow = relief.flow(program, {**relief.fixed, **dict(zip(free, picked, strict=True))})
        plan = simulating(policy)(flow)
        if all(peak <= most for peak, most in zip(peak_saved_bytes(plan, flow, relief.horizon), room, strict=True)):
            fitting.append(plan.makespan)
    fits = all(peak.total <= most for peak, most in zip(found.peaks, room, strict=True))
    if relief.may_offload:  # what is on its way to the host and back is estimated
        assert not fits or found.plan.makespan >= min(fitting) * (1 - 1e-9)
        return
    assert fits == bool(fitting)
    if fits:
        assert found.plan.makespan == pytest.approx(min(fitting))


UNITS = [unit(number, 4, 6, 30, 2.0) for number in range(4)]


def relieved(room: int, **changes):
    free = frozenset(event.name for event, _ in UNITS)
    relief = ActivationPlan(machine=MACHINE, **{"free": free, **changes})
    return relieve(relief, microbatch(UNITS, None), [room], simulating("1f1b"))


def test_where_everything_fits_nothing_is_treated():
    assert relieved(160).activation_policies == {}


def test_the_cheap_part_is_computed_again_first():
    found = relieved(140)
    assert set(found.activation_policies.values()) == {ActivationPolicy(recompute="cheap")}
    assert len(found.activation_policies) == 1


def test_if_nothing_fits_as_little_is_kept_as_can_be():
    found = relieved(1)
    assert found.activation_policies == {event.name: ActivationPolicy(recompute="all") for event, _ in UNITS}


def test_only_units_that_are_free_change():
    fixed = {"u0": ActivationPolicy(recompute="all"), "u1": KEEP}
    found = relieved(1, free=frozenset({"u2"}), fixed=fixed)
    assert found.activation_policies == {"u0": fixed["u0"], "u2": ActivationPolicy(recompute="all")}


def test_a_unit_that_is_called_twice_counts_twice():
    twice = [
        *UNITS,
        (UNITS[0][0]._replace(inputs=UNITS[3][0].outputs, outputs=(Value(4, 8, requires_grad=True),)), UNITS[0][1]),
    ]
    free = frozenset(event.name for event, _ in UNITS)
    found = relieve(ActivationPlan(machine=MACHINE, free=free), microbatch(twice, None), [150], simulating("1f1b"))
    assert found.peaks[0].total <= 150
    assert found.activation_policies
