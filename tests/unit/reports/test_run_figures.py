"""Figures of a run from the counts of its ranks."""

import pytest

from smp_strategy.planning.layouts.cluster import device_named
from smp_strategy.reports.run_figures import RankFigures, combine

GIB = 2**30


def test_samples_of_replicas_add_up_and_are_counted_once():
    leads = RankFigures(seconds=2.0, steps=4, samples=32, tokens=320, memory=GIB)
    follows = leads._replace(counts=False)
    found = combine([leads, follows, leads, follows])
    assert found["smp/step_seconds"] == 0.5
    assert found["smp/samples_per_second"] == 32.0
    assert found["smp/tokens_per_second"] == 320.0


def test_the_slowest_rank_decides_the_time():
    found = combine([RankFigures(seconds=1.0, steps=1, samples=8), RankFigures(seconds=2.0, steps=1, samples=8)])
    assert found["smp/samples_per_second"] == 8.0
    assert "smp/tokens_per_second" not in found


def test_arithmetic_is_that_of_a_device():
    leads = RankFigures(seconds=2.0, steps=1, samples=8, flops=8e12)
    found = combine([leads, leads._replace(counts=False)], peak_flops=4e12)
    assert found["smp/tflops_per_device"] == 2.0
    assert found["smp/mfu"] == 0.5
    assert "smp/mfu" not in combine([leads])


def test_waiting_is_a_mean_over_the_ranks():
    busy = RankFigures(seconds=4.0, steps=2, pass_seconds=3.0, idle_seconds=0.3, message_seconds=0.2)
    idle = busy._replace(idle_seconds=1.5, message_seconds=1.0, gather_seconds=0.4)
    found = combine([busy, idle])
    assert found["smp/bubble"] == pytest.approx(0.3)
    assert found["smp/message_wait_seconds"] == pytest.approx(0.3)
    assert found["smp/gather_wait_seconds"] == pytest.approx(0.1)


def test_memory_is_that_of_the_fullest_rank_beside_its_prediction():
    ranks = [RankFigures(seconds=1.0, steps=1, memory=amount * GIB, predicted=3 * GIB - amount) for amount in (1, 2)]
    found = combine(ranks)
    assert found["smp/memory_gib"] == 2.0
    assert found["smp/memory_predicted_gib"] == (3 * GIB - 2) / GIB


def test_without_a_step_there_are_no_figures():
    assert combine([RankFigures()]) == {}


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA A10G", None),
        ("", None),
    ],
)
def test_the_peak_is_that_of_the_data_sheet(name, peak):
    found = device_named(name)
    assert (found and found.peak_flops) == peak
