"""Partition as data: costs of an assignment, and JSON."""

import json

import pytest

from smp_strategy.errors import ConfigError
from smp_strategy.model.trace.work import Work
from smp_strategy.planning.partition.partition import Partition
from smp_strategy.planning.partition.problem import HeldBytes, Score, Setting, problem_of
from smp_strategy.planning.schedule.peak_memory import Peak
from tests.unit.planning.partition.problems import chain

TIED = HeldBytes(100, 100, 200)
PARAMETERS = {"u0": {0: TIED}, "u1": {1: HeldBytes(10)}, "u2": {2: HeldBytes(20, 20, 40)}, "u3": {0: TIED}}
SCORE = Score(step_seconds=20.0, peaks=(Peak(30), Peak(5)))


def partition(*stages: int, **changes) -> Partition:
    trace, work = chain([Work(1, 1, 1)] * 4, saved=5, outputs=8)
    setting = Setting.plain(2, **{"num_microbatches": 2, **changes})
    problem = problem_of(trace, work, PARAMETERS, setting)
    stage_of = {f"u{index}": stage for index, stage in enumerate(stages)}
    return Partition.of(problem, stage_of, SCORE, schedule="1f1b", lower_bound=0.5)


def test_units_of_a_partition_carry_stage_chunk_and_costs():
    found = partition(0, 1, 1, 0)
    assert [(unit.stage, unit.chunk) for unit in found.units] == [(0, 0), (1, 1), (1, 1), (0, 2)]
    assert found.stage_of == {"u0": 0, "u1": 1, "u2": 1, "u3": 0}
    assert (found.num_stages, found.num_chunks) == (2, 3)
    assert found.cut_bytes == (8, 8)
    assert found.units[2].held == HeldBytes(20, 20, 40)


def test_a_parameter_that_units_of_a_stage_share_counts_once_and_on_two_stages_twice():
    assert [stage.held for stage in partition(0, 1, 1, 0).stages] == [TIED, HeldBytes(30, 20, 40)]
    assert [stage.held for stage in partition(0, 0, 1, 1).stages] == [
        HeldBytes(110, 100, 200),
        HeldBytes(120, 120, 240),
    ]


def test_memory_of_a_stage_is_what_it_holds_and_the_peak_of_activations():
    assert [stage.memory_bytes for stage in partition(0, 1, 1, 0).stages] == [430, 95]


def test_time_of_a_stage_is_its_work_over_its_speed():
    found = partition(0, 0, 0, 1, stage_speeds=(2.0, 1.0))
    assert [stage.seconds for stage in found.stages] == [9.0, 6.0]
    assert found.balance == pytest.approx(7.5 / 9)
    assert found.bubble == pytest.approx(1 - 15 / 40)


def test_a_partition_says_what_limits_it():
    assert partition(0, 1, 1, 1).limited_by == "time of stage 1"
    assert partition(0, 0, 0, 1, memory_weight=1.0).limited_by == "memory of stage 0"
    assert partition(0, 1, 1, 1, memory_limits=(None, 500)).limited_by == "memory of stage 1"


def test_a_partition_is_printed_in_one_line():
    found = repr(partition(0, 1, 1, 1))
    assert found.startswith("<Partition: 1 + 3 units, 1f1b, 2 microbatches, step ")
    assert found.endswith("limited by the time of stage 1>")
    assert len(found) < 120


def test_a_partition_is_optimal_if_its_cost_is_the_lower_bound():
    found = partition(0, 0, 1, 1)
    assert found.cost == pytest.approx(20 / 12)
    assert found.gap == pytest.approx(1 - 0.5 / found.cost)
    assert not found.is_optimal
    problem_free = Partition.from_json(json.dumps({**json.loads(found.to_json()), "lower_bound": found.cost}))
    assert problem_free.is_optimal


def test_a_partition_is_read_back_from_its_json(tmp_path):
    found = partition(0, 1, 1, 0, memory_limits=(None, 1000))
    assert Partition.from_json(found.to_json()) == found
    found.save(tmp_path / "deeper" / "partition.json")
    assert Partition.from_json((tmp_path / "deeper" / "partition.json").read_text()) == found


def test_files_name_what_their_numbers_mean():
    unit = json.loads(partition(0, 0, 1, 1).to_json())["units"][0]
    assert unit["held"] == {"parameter": 100, "gradient": 100, "optimizer": 200, "gathered": 0, "unreduced": 0} | {
        "updating": 0
    }
    assert unit["work"] == {"forward": 1, "input_gradient": 1, "weight_gradient": 1}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("no JSON", "no partition as `Partition.save` writes it"),
        ("[1]", "no partition as `Partition.save` writes it"),
        ('{"format": 7, "num_stages": 2}', "has format 7, but this version reads format 1 only"),
        ('{"format": 1, "num_stages": 2, "units": []}', "lacks a field or has one too many"),
    ],
)
def test_what_is_no_partition_is_refused_with_the_reason(text, reason):
    with pytest.raises(ConfigError, match=reason):
        Partition.from_json(text)
