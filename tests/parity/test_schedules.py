"""Every schedule gives the weights of one process that accumulates over the same microbatches, bit for bit."""

import pytest

from smp_strategy.testing import run_ranks

from .test_pipeline import assert_same, one_process, run_pipeline

SCHEDULES = {
    "simple": {"pipeline": "simple"},
    "1f1b": {"pipeline": "1f1b"},
    "1f1b, 2 chunks": {"pipeline": "1f1b", "virtual_pipeline_degree": 2},
    "interleaved, 2 chunks": {"pipeline": "interleaved", "virtual_pipeline_degree": 2},
    "zb-h1": {"pipeline": "zb-h1"},
    "zb-h2": {"pipeline": "zb-h2"},
    "zb-v": {"pipeline": "zb-v"},
    "auto": {"pipeline": "auto"},
}


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_weights_are_those_of_one_process_under_every_schedule(schedule, pp):
    expected, _ = one_process("gpt2", 5, samples=10)
    options = {"pipeline_parallel_degree": pp, "microbatches": 5, **SCHEDULES[schedule]}
    results = run_ranks(run_pipeline, pp, "gpt2", options, 10)
    assert_same(expected, results[0][0])
