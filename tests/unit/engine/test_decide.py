"""What is decided on: costs of calls."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smp_strategy.config.config import SMPConfig
from smp_strategy.distributed.mesh_shape import MeshShape
from smp_strategy.planning.costs import Costs, _by_stage, find_costs, measuring_device
from smp_strategy.planning.profiling.profiler import relative_speeds
from tests.unit.planning.profiling.surveyed import CPU, survey


def test_a_stage_is_as_fast_as_its_slowest_rank_unless_speeds_are_given():
    config = SMPConfig(pipeline_parallel_degree=2, stage_speeds=(1.0, 3.0))
    costs = find_costs(config, CPU, (), None, MeshShape(pp=2, dp=2))
    assert costs.stage_speeds == (1.0, 3.0)
    # Stage 1 is on ranks 0 and 2, stage 0 on ranks 1 and 3.
    assert _by_stage((1.0, 0.5, 0.8, 0.7), MeshShape(pp=2, dp=2)) == (0.5, 0.8)


def test_ranks_that_differ_by_less_than_a_tenth_are_alike():
    assert relative_speeds([100.0, 91.0]) == ()
    assert relative_speeds([50.0, 100.0]) == (0.5, 1.0)
    assert relative_speeds([0.0, 100.0]) == ()  # it could not be measured somewhere


def test_units_are_measured_where_the_step_runs_unless_the_options_say_otherwise():
    cuda = torch.device("cuda", 1)
    assert measuring_device(SMPConfig(), cuda) == cuda
    assert measuring_device(SMPConfig(trace_device="cpu", trace_memory_usage=True), cuda) == CPU


def test_a_unit_that_can_only_be_run_for_real_has_costs_too():
    class Selects(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)[x.sum(-1) > 0]

    model = nn.Sequential(nn.Linear(4, 4), Selects(4, 4), nn.Linear(4, 4))
    found = survey(model, lambda x: F.relu(model(x)).sum(), torch.ones(3, 4), num_stages=2)
    assert found.trace is not None
    selecting: Any = next(event for event in found.trace.events if event.name == "1")
    assert selecting.effort.forward.flops == 2 * 3 * 4 * 4
    assert selecting.effort.weight_gradient.flops == 2 * 3 * 4 * 4
    assert selecting.saved_bytes > 0
    assert Costs.modelled(CPU).work([selecting])[0].forward > 0
