"""Costs of calls under recomputation and offload, and the changed trace."""

import pytest

from smp_strategy.activations.policy import KEEP, ActivationPolicy
from smp_strategy.model.trace.device_model import HostLink, Machine
from smp_strategy.model.trace.events import Event, Trace, Value
from smp_strategy.model.trace.work import Effort, Efforts, Link, SavedBytes, StorageBytes, Work
from smp_strategy.planning.activation_budget.call_costs import REPEAT_SECONDS, call_costs, treated

# A FLOP takes a second, and so does a byte.
MACHINE = Machine(1.0, 1.0, 0.0, Link.instant(), HostLink(10.0, is_beside=False))
MEMORIES = (
    StorageBytes(100, "input"),
    StorageBytes(30, "product"),
    StorageBytes(8, "product", is_saved=False),
    StorageBytes(400, "other"),
)
KEPT = SavedBytes(MEMORIES, again=Effort(flops=6, other_bytes=2), cheap=Effort(other_bytes=2))
WORK = Work(20.0, 20.0, 20.0)
ALL, CHEAP = ActivationPolicy(recompute="all"), ActivationPolicy(recompute="cheap")


def event(number: int = 1, name: str = "list.0", **changes) -> Event:
    """A call whose forward is modelled as 10 seconds, of which 8 have to be done again."""
    before, after = Value(number - 1, 100, requires_grad=True), Value(number, 100, requires_grad=True)
    effort = Efforts(forward=Effort(flops=8, other_bytes=2))
    return Event("unit", name, (before,), (after,), effort, 530, kept=KEPT)._replace(**changes)


def costs(policy: ActivationPolicy, **changes) -> tuple[float, ...]:
    min_bytes = changes.pop("min_bytes", 0)
    return tuple(call_costs(event(**changes), policy, WORK, MACHINE, min_bytes))


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (KEEP, (530, 0, 0, 0.0, 0.0)),
        # Measured, a forward takes twice as long as modelled.
        (ALL, (100, 430, 0, 16.0, 0.0)),
        (CHEAP, (138, 400, 0, 4.0, 0.0)),
        (ActivationPolicy(offload=True), (0, 0, 530, 0.0, 53.0)),
        (ActivationPolicy(recompute="all", offload=True), (0, 430, 100, 16.0, 10.0)),
        (ActivationPolicy(recompute="cheap", offload=True), (38, 400, 100, 4.0, 10.0)),
    ],
)
def test_a_treatment_costs_time_and_spares_bytes(policy, expected):
    assert costs(policy) == pytest.approx(expected)


def test_small_memories_stay_on_the_device():
    assert costs(ActivationPolicy(offload=True), min_bytes=50)[:3] == (30, 0, 500)


def test_what_was_measured_counts():
    assert costs(ALL, saved_bytes=600)[:2] == (100, 500)
    assert costs(ActivationPolicy(offload=True), saved_bytes=600)[:3] == (70, 0, 530)


def test_a_call_without_backward_has_nothing_to_spare():
    assert costs(ALL, saved_bytes=0, kept=SavedBytes()) == (0, 0, 0, 0.0, 0.0)


def test_a_call_that_nobody_has_looked_into_keeps_its_inputs_and_is_done_again_as_a_whole():
    assert costs(ALL, kept=SavedBytes()) == (100, 530, 0, 20.0, 0.0)


@pytest.mark.parametrize(("is_beside", "expected"), [(False, 3.0), (True, 0.0)])
def test_python_per_kernel_is_hidden_where_a_device_computes_beside_it(is_beside, expected):
    kernels = int(3.0 / REPEAT_SECONDS)
    watched = KEPT._replace(again=KEPT.again._replace(kernels=kernels))
    machine = MACHINE._replace(host=HostLink(10.0, is_beside=is_beside))
    costs = call_costs(event(kept=watched), ALL, WORK, machine)
    assert costs.again_seconds == pytest.approx(16.0 + expected)


def test_copies_beside_the_computation_take_no_time_of_their_own():
    beside = MACHINE._replace(host=HostLink(10.0, is_beside=True))
    assert call_costs(event(), ActivationPolicy(offload=True), WORK, beside).copy_seconds == 0.0


def chain(*names: str) -> Trace:
    return Trace([event(number, name) for number, name in enumerate(names, start=1)], len(names))


def under(policy: ActivationPolicy, trace: Trace, stage_of: dict[str, int] | None = None) -> list[tuple[int, int]]:
    names = [each.name for each in trace.events]
    work = dict.fromkeys(range(len(names)), WORK)
    found, _ = treated(trace, work, dict.fromkeys(names, policy), stage_of or {}, machine=MACHINE)
    return [(each.saved_bytes, each.again_bytes) for each in found.events]


def test_what_is_computed_again_is_waited_for_like_input_gradients_and_not_split():
    _, times = treated(chain("a", "b"), {0: WORK, 1: WORK}, {"a": ALL}, {}, machine=MACHINE)
    assert times == {0: Work(20.0, 56.0, 0.0), 1: WORK}


def test_copies_back_are_waited_for_like_input_gradients_if_there_are_any():
    work = {0: Work(20.0, 0.0, 20.0), 1: WORK}
    away = ActivationPolicy(offload=True)
    _, times = treated(chain("a", "b"), work, {"a": away, "b": away}, {}, machine=MACHINE)
    assert times == {0: Work(73.0, 0.0, 73.0), 1: Work(73.0, 73.0, 20.0)}


def test_without_treatments_nothing_changes():
    trace = chain("a", "b")
    assert treated(trace, {0: WORK}, {"a": KEEP}, {}, machine=MACHINE) == (trace, {0: WORK})


def test_of_a_group_the_first_inputs_are_kept_and_all_comes_back_at_once():
    trace = chain("list.0", "list.1", "list.2")
    together = ActivationPolicy(recompute="all", group=None)
    assert under(together, trace) == [(100, 430), (0, 960), (0, 1490)]
    assert under(ActivationPolicy(recompute="all", group=2), trace) == [(100, 430), (0, 960), (100, 430)]


def test_a_group_ends_where_the_stage_or_the_list_does():
    together = ActivationPolicy(recompute="all", group=None)
    alone = [(100, 430)] * 2
    assert under(together, chain("list.0", "list.1"), {"list.0": 0, "list.1": 1}) == alone
    assert under(together, chain("list.0", "other.0")) == alone
