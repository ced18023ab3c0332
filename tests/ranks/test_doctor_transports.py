"""The transports that ``smp doctor`` tries, between two ranks."""

from smp_strategy.engine.commands.doctor import Tried, measured_transports
from smp_strategy.testing import run_ranks


def test_both_transports_of_the_host_are_measured_alike_on_both_ranks():
    first, second = run_ranks(measured_transports, 2)
    assert first == second
    assert [name for name, *_ in first] == ["shared_memory", "gloo"]
    for _, rate, reason in map(Tried._make, first):
        assert 1e6 < rate < 1e12
        assert reason == ""
