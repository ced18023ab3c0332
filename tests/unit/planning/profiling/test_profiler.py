"""Distributed profiler: kinds of calls, their assignment to ranks, measured costs."""

import itertools
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from smp_strategy.model.trace.device_model import Machine, modelled_work, with_measured_bytes, work_of
from smp_strategy.model.trace.work import Work
from smp_strategy.planning.profiling import profiler
from smp_strategy.planning.profiling.profiler import MeasuringOptions, Sample, assign, measure, relative_speeds
from tests.parity.models import Text, batch_for
from tests.unit.planning.profiling.surveyed import CPU, survey


def test_the_most_expensive_kind_goes_first_to_whoever_has_least_to_do():
    costs = {"a": 5.0, "b": 4.0, "c": 3.0, "d": 3.0}
    assert assign([costs, costs]) == {"a": 0, "b": 1, "c": 1, "d": 0}
    assert assign([costs]) == dict.fromkeys("abcd", 0)


def test_a_kind_is_measured_by_a_rank_that_has_met_it():
    assert assign([{"a": 2.0, "b": 1.0}, {"b": 1.0, "other": 9.0}]) == {"a": 0, "b": 1}


class Needy(nn.Linear):
    """Takes something from around it that is there only while the model runs."""

    around: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.around[-1]


class Around(Text):
    def __init__(self) -> None:
        super().__init__()
        self.head = Needy(16, 32)

    def loss(self, batch):
        Needy.around.append(1.0)
        try:
            return super().loss(batch)
        finally:
            Needy.around.clear()


def test_a_unit_that_cannot_run_alone_is_named_and_keeps_its_modelled_time_on_the_measured_scale():
    model, machine = Around(), Machine.nominal("cpu")
    found = survey(model, model.loss, batch_for("text", 0, 4))
    measured = measure(found.calls, found.trace.events, machine, MeasuringOptions(device=CPU))
    assert measured.notes == ("`head` is not measured but modelled: IndexError: list index out of range.",)
    assert set(measured.work) == set(measured.saved_bytes) == {"embed", "norm", *(f"blocks.{i}" for i in range(6))}
    events = found.trace.events
    modelled, used = modelled_work(events, machine), work_of(events, machine, measured)
    for position, event in enumerate(events):
        known = measured.work.get(event.name) if event.kind == "unit" else None
        assert used[position] == (known or modelled[position].scaled(measured.scale))
    assert measured.scale > 0
    assert any(event.name == "head" for event in events)


def test_units_built_alike_are_measured_once():
    model = Text()
    found = survey(model, model.loss, batch_for("text", 0, 4))
    measured = measure(found.calls, found.trace.events, Machine.nominal("cpu"), MeasuringOptions(device=CPU))
    assert len({measured.work[f"blocks.{i}"] for i in range(6)}) == 1
    assert measured.rank_speeds == ()


class Times(NamedTuple):
    first: float
    second: float


@dataclass
class Options:
    name: str
    times: Times


class Sleeps(nn.Linear):
    """Numbered; its options are not numbers or text themselves."""

    def __init__(self, number: int, options: object) -> None:
        super().__init__(16, 16)
        self.number, self.options, self.itself = number, options, [self]
        self.itself.append(self.itself)


class Repeats(nn.Linear):
    def __init__(self, count: int) -> None:
        super().__init__(16, 16)
        self.count = count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.count):
            x = super().forward(x)
        return x


KINDS = {
    "tuples": [Sleeps(number, (0.1, number // 3)) for number in range(6)],
    "named tuples": [Sleeps(number, Times(0.1, number // 3)) for number in range(6)],
    "dataclasses": [Sleeps(number, Options("a", Times(0.1, number // 3))) for number in range(6)],
    "dictionaries": [Sleeps(number, {"times": [number // 3]}) for number in range(6)],
    "functions": [Sleeps(number, F.gelu if number < 3 else F.relu) for number in range(6)],
    "classes": [Sleeps(number, nn.GELU if number < 3 else nn.ReLU) for number in range(6)],
    "dtypes": [Sleeps(number, torch.half if number < 3 else torch.float) for number in range(6)],
    "counts of operations": [Repeats(1 + number // 3) for number in range(6)],
}


@pytest.mark.parametrize("kinds", KINDS)
def test_units_of_other_options_are_measured_one_by_one(kinds, monkeypatch):
    times = itertools.count(1)
    monkeypatch.setattr(profiler, "measure_alone", lambda *args, **options: Sample(Work(next(times), 0, 0), 0, 0.0))
    model = Text()
    model.blocks = nn.ModuleList(KINDS[kinds])
    found = survey(model, model.loss, batch_for("text", 0, 4))
    measured = measure(found.calls, found.trace.events, Machine.nominal("cpu"), MeasuringOptions(device=CPU))
    first, *_, last = of_units = [measured.work[f"blocks.{number}"] for number in range(6)]
    assert of_units == [first] * 3 + [last] * 3
    assert first != last


@pytest.mark.parametrize("times", [True, False])
def test_only_what_was_asked_for_is_measured(times):
    model = Text()
    found = survey(model, model.loss, batch_for("text", 0, 4))
    options = MeasuringOptions(device=CPU, times=times, memory=not times)
    measured = measure(found.calls, found.trace.events, Machine.nominal("cpu"), options)
    assert bool(measured.work) == times
    assert bool(measured.saved_bytes) != times
    # On the CPU the model is right about bytes.
    assert with_measured_bytes(found.trace, measured) == found.trace
    if not times:
        assert work_of(found.trace.events, Machine.nominal("cpu"), measured) == modelled_work(
            found.trace.events, Machine.nominal("cpu")
        )


def test_a_unit_that_waits_does_not_make_the_code_above_the_units_slow(monkeypatch):
    model, machine = Text(), Machine.nominal("cpu")
    found = survey(model, model.loss, batch_for("text", 0, 4))
    events = found.trace.events
    modelled = modelled_work(events, machine)
    alone = {event.name: modelled[i] for i, event in enumerate(events) if event.kind == "unit"}

    def timed(call, *args, **options):
        """Kernels take twice as long as modelled; all units but one also wait for a second."""
        work = alone[call.unit].scaled(2)
        return Sample(work if call.unit == "embed" else work._replace(forward=work.forward + 1), 0)

    monkeypatch.setattr(profiler, "measure_alone", timed)
    measured = measure(found.calls, events, machine, MeasuringOptions(device=CPU))
    work = work_of(events, machine, measured)
    above = [i for i, event in enumerate(events) if event.kind == "op"]
    assert above
    for i in above:
        assert work[i] == pytest.approx(modelled[i].scaled(2))
    assert all(sum(work[i]) > 1 for i, event in enumerate(events) if event.name == "head")


def test_losses_of_splits_and_how_much_times_differ_are_shares_of_all_times(monkeypatch):
    sample = Sample(Work(1.0, 2.0, 1.0), 0, split_seconds=0.6, spread_seconds=0.2)
    monkeypatch.setattr(profiler, "measure_alone", lambda *args, **options: sample)
    model = Text()
    found = survey(model, model.loss, batch_for("text", 0, 4))
    measured = measure(found.calls, found.trace.events, Machine.nominal("cpu"), MeasuringOptions(device=CPU))
    assert measured.split_overhead == pytest.approx(0.6 / (2.0 + 1.0))
    assert measured.spread == pytest.approx(0.2 / (1.0 + 2.0 + 1.0))


@pytest.mark.parametrize(
    ("speeds", "relative"),
    [
        ([4.0, 1.0], (1.0, 0.25)),
        ([1.0, 0.95], ()),  # as different as clocks and neighbours make them
        ([0.0, 0.5, 0.5], ()),  # one could not tell
        ([0.0, 0.0], ()),
    ],
)
def test_ranks_of_different_speed_are_compared_with_the_fastest(speeds, relative):
    assert relative_speeds(speeds) == relative
