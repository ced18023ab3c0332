"""Counts of a rank by a clock that the test sets."""

from types import SimpleNamespace

import torch

from smp_strategy.engine.figures.nonfinite import FlagRecord, first_cause
from smp_strategy.engine.figures.step_monitor import StepMonitor, num_tokens
from smp_strategy.engine.model_calls.model_calls import ModelCall
from smp_strategy.model.trace.events import Event, Trace
from smp_strategy.model.trace.work import Effort, Efforts
from smp_strategy.pipeline.job import StepRun
from smp_strategy.pipeline.recording import Recorded, Recording, Span
from smp_strategy.pipeline.schedule import Action, Plan

STAGE_OF = {"a": 0, "b": 0, "c": 1}


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def run(flops=0):
    effort = Efforts(Effort(flops), Effort(flops), Effort(flops))
    return StepRun([None, None], [torch.ones(()), None], Trace([Event("unit", "a", (), (), effort)]))


def test_time_runs_from_step_to_step_and_stands_still_in_between():
    clock = Clock()
    monitor = StepMonitor(clock=clock)
    clock.now += 5.0  # before the first step
    monitor.begin_step(1, [torch.zeros(2, 3), torch.zeros(2, 3)], (2, 2))
    clock.now += 1.0
    monitor.begin_step(2, [torch.zeros(2, 3), torch.zeros(2, 3)], (2, 2))
    clock.now += 1.0
    monitor.interrupt()
    clock.now += 50.0  # of evaluation
    monitor.begin_step(3, [torch.zeros(2, 3)], (2,))
    clock.now += 2.0
    found = monitor.take(gathered=1.5)
    assert (found.seconds, found.steps, found.samples, found.tokens) == (4.0, 3, 10, None)
    assert found.gather_seconds == 1.5
    clock.now += 3.0  # the time since the last figures belongs to the next ones
    monitor.begin_step(4, [torch.zeros(2, 3)], (2,))
    found = monitor.take(gathered=2.0)
    assert (found.seconds, found.steps, found.samples, found.gather_seconds) == (3.0, 1, 2, 0.5)


def test_tokens_are_those_of_the_first_integer_matrix():
    ids, mask = torch.zeros(2, 5, dtype=torch.int64), torch.ones(2, 7, dtype=torch.int64)
    assert num_tokens([{"input_ids": ids, "attention_mask": mask}] * 3) == 30
    assert num_tokens([ModelCall({}, {"input_ids": ids})]) == 10
    assert num_tokens([(torch.zeros(2, 5), torch.zeros(2, dtype=torch.int64))]) is None
    monitor = StepMonitor()
    monitor.begin_step(1, [ids, ids], (2, 2))
    monitor.begin_step(2, [ids], (2,))
    assert monitor.take(gathered=0.0).tokens == 30


def test_waiting_counts_messages_and_the_wait_at_the_end():
    spans = (Span(Action("F", 0), 1.0, 2.0, 0.25), Span(Action("B", 0), 2.0, 4.0, 0.5))
    monitor = StepMonitor()
    monitor.begin_step(1, [torch.zeros(2, 3)], (2,))
    monitor.end_step(run(), Recording(spans, 5.0))
    found = monitor.take(gathered=0.0)
    assert (found.pass_seconds, found.idle_seconds, found.message_seconds) == (4.0, 1.75, 0.75)


def test_operations_follow_the_number_of_samples():
    monitor = StepMonitor()
    monitor.begin_step(1, [torch.zeros(2, 3)] * 2, (2, 2))
    monitor.end_step(run(flops=10), Recording((), 0.0))
    monitor.begin_step(2, [torch.zeros(1, 3)], (1,))
    monitor.end_step(run(flops=10), Recording((), 0.0))
    assert monitor.take(gathered=0.0).flops == 30 / 2 * 4 + 30 / 2


def test_a_step_is_traced_once_and_a_warning_names_one_that_cannot_be(tmp_path):
    told, saved = [], []
    monitor = StepMonitor(trace_steps=[2, 3], tell=told.append)
    monitor.trace_folder = tmp_path
    timeline = SimpleNamespace(save=saved.append)
    recorded = [Recorded(number, Plan(((),), ((),)), Recording((), 0.0)) for number in range(3)]
    for number, latest in ((1, recorded[1]), (2, recorded[2]), (3, recorded[2]), (4, recorded[2])):
        monitor.begin_step(number, [torch.zeros(2, 3)], (2,))
        for _ in range(2):  # an evaluation may follow
            monitor.save_trace(latest, lambda: timeline)
    assert saved == [tmp_path / "step-2.json"]
    assert len(told) == 1
    assert "Training step 3, which is in `trace_steps`, has no trace, because it ran without a timetable" in told[0]


def test_the_cause_is_the_first_unit_in_forward():
    found = [FlagRecord(4, 1, "loss", ""), FlagRecord(4, 1, "output", "c"), FlagRecord(4, 1, "output", "b")]
    found.append(FlagRecord(4, 0, "gradient", "a"))
    assert first_cause(found, STAGE_OF) == "the output of unit `b` (stage 0) in microbatch 1 of training step 4"


def test_the_cause_is_the_loss_if_all_outputs_are_finite():
    said = first_cause([FlagRecord(4, 1, "loss", ""), FlagRecord(4, 1, "gradient", "c")], STAGE_OF)
    assert said == "the loss of microbatch 1 of training step 4; the outputs of all units are finite"


def test_the_cause_lies_behind_the_last_gradient_in_backward():
    found = [FlagRecord(4, 1, "gradient", "a"), FlagRecord(4, 1, "gradient", "b"), FlagRecord(4, 2, "gradient", "c")]
    assert first_cause(found, STAGE_OF).startswith("the backward of unit `c` (stage 1) in microbatch 1 of")
    assert first_cause(found[-1:], STAGE_OF).startswith("the backward of the loss, in microbatch 2 of")
    assert first_cause([], STAGE_OF).startswith("the gradients of weights;")
