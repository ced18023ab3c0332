"""What a step costs, as the options and the measurement say."""

import pytest
import torch

from smp_strategy import costs
from smp_strategy.config import SMPConfig
from smp_strategy.costs import Costs, find_costs
from smp_strategy.mesh_shape import MeshShape
from smp_strategy.pipeline.simulate import SPLIT_OVERHEAD
from smp_strategy.trace.events import Event, Trace, Value
from smp_strategy.trace.measured import Measured
from smp_strategy.trace.work import Work

CPU = torch.device("cpu")
TRACE = Trace([Event("unit", "block", (), (Value(0, 4, True),))], 0)


def found(monkeypatch: pytest.MonkeyPatch, measured: Measured, **options: object) -> Costs:
    monkeypatch.setattr(costs, "measure", lambda *args: measured)
    config = SMPConfig(pipeline_parallel_degree=2, trace_execution_times=True, **options)  # type: ignore[arg-type]
    return find_costs(config, CPU, [], TRACE, MeshShape(pp=2, dp=1))


def measured(*, ranks_share_cores: bool) -> Measured:
    return Measured(
        work={"block": Work(1.0, 2.0, 3.0)},
        saved_bytes={},
        split_overhead=0.2,
        rank_of={"block": 0},
        ranks_share_cores=ranks_share_cores,
    )


def test_nothing_is_gained_by_splits_where_ranks_share_cores(monkeypatch):
    crowded = found(monkeypatch, measured(ranks_share_cores=True), pipeline="auto")
    assert crowded.work(TRACE.events) == {0: Work(1.0, 5.0, 0.0)}
    assert "share cores" in crowded.render()
    alone = found(monkeypatch, measured(ranks_share_cores=False), pipeline="auto")
    assert alone.work(TRACE.events) == {0: Work(1.0, 2.0, 3.0)}
    assert "share cores" not in alone.render()


def test_who_asks_for_splits_gets_them_also_where_ranks_share_cores(monkeypatch):
    asked = found(monkeypatch, measured(ranks_share_cores=True), pipeline="zb-h1")
    assert asked.work(TRACE.events) == {0: Work(1.0, 2.0, 3.0)}


def test_what_a_split_costs_is_measured_with_the_times(monkeypatch):
    assert found(monkeypatch, measured(ranks_share_cores=False)).split_overhead == 0.2
    assert Costs.modelled(CPU).split_overhead == SPLIT_OVERHEAD
