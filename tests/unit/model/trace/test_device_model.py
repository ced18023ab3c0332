"""From counts to seconds."""

import pytest

from smp_strategy.model.trace.device_model import Machine, modelled_work
from smp_strategy.model.trace.events import Event
from smp_strategy.model.trace.work import Effort, Efforts, Link, Work

MACHINE = Machine(100.0, 10.0, 0.5, Link.instant())


def test_a_product_takes_arithmetic_or_memory_whichever_takes_longer():
    assert MACHINE.seconds(Effort(flops=1000, product_bytes=10)) == 10.0
    assert MACHINE.seconds(Effort(flops=10, product_bytes=1000)) == 100.0


def test_other_kernels_and_their_starts_come_on_top():
    assert MACHINE.seconds(Effort(1000, 10, other_bytes=20, kernels=4)) == 10.0 + 2.0 + 2.0


def test_events_have_work_by_position():
    event = Event("unit", "a", (), (), Efforts(Effort(100), Effort(200), Effort(300)))
    assert modelled_work([Event("read", "item", (), ()), event], MACHINE) == {0: Work(), 1: Work(1.0, 2.0, 3.0)}


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_nominal_machines_compute_faster_than_they_move_bytes_and_those_faster_than_they_send(device_type):
    machine = Machine.nominal(device_type)
    assert machine.flops_per_second > machine.bytes_per_second > machine.link.bytes_per_second
