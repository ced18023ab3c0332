"""Cost model of a step: options and measurements."""

import pytest
import torch

from smp_strategy.config.config import SMPConfig
from smp_strategy.distributed.mesh_shape import MeshShape
from smp_strategy.model.trace.device_model import Measured
from smp_strategy.model.trace.events import Event, Trace, Value
from smp_strategy.model.trace.work import Work
from smp_strategy.planning import costs
from smp_strategy.planning.costs import Costs, find_costs
from smp_strategy.planning.schedule.simulate import SPLIT_OVERHEAD

CPU = torch.device("cpu")
TRACE = Trace([Event("unit", "block", (), (Value(0, 4, True),))], 0)


def found(monkeypatch: pytest.MonkeyPatch, measured: Measured, **options: object) -> Costs:
    monkeypatch.setattr(costs, "measure", lambda *args: measured)
    config = SMPConfig(pipeline_parallel_degree=2, trace_execution_times=True, **options)  # type: ignore[arg-type]
    return find_costs(config, CPU, [], TRACE, MeshShape(pp=2, dp=1))


def measured() -> Measured:
    return Measured(
        work={"block": Work(1.0, 2.0, 3.0)},
        saved_bytes={},
        split_overhead=0.2,
        rank_of={"block": 0},
    )


def test_a_measured_unit_counts_as_it_was_measured(monkeypatch):
    assert found(monkeypatch, measured(), pipeline="auto").work(TRACE.events) == {0: Work(1.0, 2.0, 3.0)}


def test_what_a_split_costs_is_measured_with_the_times(monkeypatch):
    assert found(monkeypatch, measured()).split_overhead == 0.2
    assert Costs.modelled(CPU).split_overhead == SPLIT_OVERHEAD
