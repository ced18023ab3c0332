"""In a step, Accelerate's states and the environment count replicas."""

import os

from accelerate.state import PartialState

from smp_strategy.pipeline.dist_calls.process_counts import counting_replicas


def test_processes_are_replicas_in_the_context_only(monkeypatch):
    monkeypatch.setattr(PartialState, "_shared_state", {"num_processes": 8, "process_index": 5, "device": "cpu"})
    monkeypatch.setenv("WORLD_SIZE", "8")
    with counting_replicas(2):
        assert PartialState._shared_state == {"num_processes": 2, "process_index": 5, "device": "cpu"}
        assert os.environ["WORLD_SIZE"] == "2"
    assert PartialState._shared_state["num_processes"] == 8
    assert os.environ["WORLD_SIZE"] == "8"


def test_nothing_is_made_that_was_not_there(monkeypatch):
    monkeypatch.setattr(PartialState, "_shared_state", {})
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with counting_replicas(1):
        assert PartialState._shared_state == {}
        assert "WORLD_SIZE" not in os.environ
