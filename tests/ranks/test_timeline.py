"""What each stage really did when: recorded in every step, put together on all ranks."""

import json
import time
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from smp_strategy.config.config import SMPConfig
from smp_strategy.distributed import deadlock as watch
from smp_strategy.engine.engine import Engine
from smp_strategy.errors import PeerFailedError, SMPError, UnsupportedError
from smp_strategy.pipeline import recorder
from smp_strategy.pipeline.transport.transport import Transport
from smp_strategy.reports.timeline import clocks
from smp_strategy.reports.timeline.timeline import Timeline
from smp_strategy.testing import run_ranks

from .steps import Block, Net, batch

SECONDS_OF_WORK = 0.004


class Slow(Block):
    """A block whose forward takes a while, so that waiting can be told from noise."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        if type(x) is Tensor:
            self.work()
        return x + self.mlp(self.norm(x))

    def work(self) -> None:
        time.sleep(SECONDS_OF_WORK)


def chain(net: Net, x: Tensor) -> Tensor:
    for block in net.blocks:
        x = block(x)
    return x.pow(2).mean()


def engine_for(net: nn.Module, pp: int, **options: Any) -> Engine:
    engine = Engine(SMPConfig(pipeline_parallel_degree=pp, microbatches=4, **options))
    engine.attach(net)
    return engine


def slow_net() -> Net:
    torch.manual_seed(0)
    return Net(chain, Slow)


def train(engine: Engine, net: Any, steps: int = 2) -> None:
    for number in range(steps):
        engine.train_step(net.loss, batch(number), loss_of=lambda loss: loss).commit(torch.ones(()), reduce=True)


def recorded(pp: int, options: dict[str, Any], hours_apart: float = 0.0) -> Timeline:
    net = slow_net()
    with clocks_apart(hours_apart * 3600):
        engine = engine_for(net, pp, **options)
        train(engine, net)
        return engine.inspection.timeline()


@contextmanager
def clocks_apart(seconds: float):
    """Every rank's clock is so much ahead of that of the rank below."""

    rank = dist.get_rank()  # in a step that is the number of the replica

    def clock() -> float:
        return time.perf_counter() + seconds * rank

    with (
        mock.patch.object(recorder, "perf_counter", clock),
        mock.patch.object(clocks, "offsets", partial(clocks.offsets, clock=clock)),
    ):
        yield


def assert_possible(timeline: Timeline, tolerance: float) -> None:
    """No stage is through with an action before the stage that sends it what it needs."""
    stages = [{span.action: span for span in stage.spans} for stage in timeline.stages]
    for before, after in pairwise(stages):
        for action in before.keys() & after.keys():
            if action.kind == "F":
                assert after[action].end > before[action].end - tolerance
            elif action.kind != "W":
                # What the stage after this one does when it has sent the gradient may take as long as all of it here.
                assert before[action].end > after[action].start + after[action].waited - tolerance


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("pipeline", ["1f1b", "zb-h1"])
def test_all_ranks_know_when_each_stage_did_each_action_of_its_plan(pp, pipeline):
    timeline, *others = run_ranks(recorded, pp, pp, {"pipeline": pipeline})
    assert all(
        (each.stages, each.plan, each.ranks) == (timeline.stages, timeline.plan, timeline.ranks) for each in others
    )
    assert [each.rank for each in (timeline, *others)] == list(range(pp))
    assert timeline.ranks == tuple(reversed(range(pp)))
    assert timeline.step == 2
    assert not timeline.comparison.left_plan
    for actions, stage in zip(timeline.plan.stages, timeline.stages, strict=True):
        assert tuple(span.action for span in stage.spans) == actions
        times = [moment for span in stage.spans for moment in (span.start, span.end)]
        assert times == sorted(times)
        assert stage.end >= times[-1]
        assert all(-1e-6 <= span.waited <= span.end - span.start for span in stage.spans)
    assert_possible(timeline, 0.0)


def held_up(pp: int, waiting: int, working: int, waits: Path) -> Timeline:
    """The first block on stage ``working`` goes on for a while from when stage ``waiting`` waits: a file says that."""
    net = slow_net()
    engine = engine_for(net, pp, pipeline="1f1b")
    train(engine, net, 1)

    def wait(transport: Transport, receipts: Any) -> Any:
        waits.touch()
        return waiting_for(transport, receipts)

    def work(block: Slow) -> None:
        while not waits.exists():
            time.sleep(0.001)
        time.sleep(SECONDS_OF_WORK)

    waiting_for, stage = Transport.waiting_for, engine.mesh.stage
    with ExitStack() as patched:
        if stage == waiting:
            patched.enter_context(mock.patch.object(Transport, "waiting_for", wait))
        if stage == working:
            patched.enter_context(mock.patch.object(Slow, "work", work))
        train(engine, net, 1)
        return engine.inspection.timeline()


@pytest.mark.parametrize(("waiting", "action", "working"), [(3, "F0", 0), (0, "B0", 3)])
def test_waiting_is_told_from_work(waiting, action, working, tmp_path):
    timeline = run_ranks(held_up, 4, 4, waiting, working, tmp_path / "waits")[0]
    forwards = [span for stage in timeline.stages for span in stage.spans if span.action.kind == "F"]
    assert all(span.work >= SECONDS_OF_WORK for span in forwards)
    [waited] = [span.waited for span in timeline.stages[waiting].spans if str(span.action) == action]
    assert timeline.comparison.stage(waiting).waiting >= waited >= SECONDS_OF_WORK
    assert all(timeline.comparison.stage(stage).work >= 4 * SECONDS_OF_WORK for stage in range(4))


@pytest.mark.parametrize("pp", [2, 4])
def test_clocks_that_are_hours_apart_are_aligned(pp):
    timeline = run_ranks(recorded, pp, pp, {"pipeline": "1f1b"}, 3.0)[0]
    assert timeline.comparison.seconds < 60
    assert_possible(timeline, 0.003)


def recorded_with_another_path(pp: int) -> tuple[Timeline, Timeline]:
    """The second step takes the path of the first, the third another one from its third microbatch on."""
    net = slow_net()

    def step(batch: dict[str, Tensor]) -> Tensor:
        x, calls[0] = batch["x"], calls[0] + 1
        for number, block in enumerate(net.blocks):
            x = block(x)
            if branches and number == 2 and calls[0] > 2:
                x = net.blocks[0](x)
        return x.pow(2).mean()

    engine = engine_for(net, pp)
    found = []
    for number, branches in enumerate((False, False, True)):  # noqa: B007  (`step` reads it)
        calls = [0]
        engine.train_step(step, batch(number), loss_of=lambda loss: loss).commit(torch.ones(()), reduce=True)
        found.append(engine.inspection.timeline())
    return found[1], found[2]


@pytest.mark.parametrize("pp", [2, 4])
def test_what_a_microbatch_did_off_the_plan_is_missing_and_said_to_be(pp):
    kept, left = run_ranks(recorded_with_another_path, pp, pp)[0]
    assert not kept.comparison.left_plan
    comparison = left.comparison
    assert comparison.left_plan
    for stage in comparison.left_plan:
        ran = [span.action for span in left.stages[stage].spans]
        assert (*ran, *comparison.missing(stage)) == left.plan.stages[stage]
        assert f"Stage {stage} has left its plan" in str(left)
    assert any(comparison.missing(stage) for stage in comparison.left_plan)
    assert 'class="off"' in left.to_html()
    assert "off the plan" in [event["name"] for event in json.loads(left.to_json())["traceEvents"]]


def asked_early(pp: int) -> list[str]:
    net, said = slow_net(), []
    engine = engine_for(net, pp, skip_tracing=True)

    def ask() -> None:
        try:
            engine.inspection.timeline()
            said.append("known")
        except SMPError as error:
            said.append(str(error))

    def step(batch: dict[str, Tensor]) -> Tensor:
        if asks:
            ask()
        return net.loss(batch)

    ask()
    for number, asks in enumerate((False, False, True)):  # noqa: B007  (`step` reads it)
        engine.train_step(step, batch(number), loss_of=lambda loss: loss)
        ask()
    return said


@pytest.mark.parametrize("pp", [1, 2])
def test_what_is_not_known_yet_is_an_error_that_says_when_it_is(pp):
    for early, without_plan, known, *inside, after in run_ranks(asked_early, pp, pp):
        assert "There is no timeline yet" in early
        assert without_plan == early
        assert (known, after) == ("known", "known")
        assert len(inside) == 4
        assert all("asked for inside of a step" in message for message in inside)


def asked_under_manual_optimization() -> str:
    net = slow_net()
    engine = engine_for(net, 2)
    engine.manual_step(net.loss, batch(0))
    with pytest.raises(SMPError) as found:
        engine.inspection.timeline()
    return str(found.value)


def test_manual_optimization_has_no_timetable_and_no_timeline():
    for message in run_ranks(asked_under_manual_optimization, 2):
        assert "under manual optimization none does" in message


def asked_on_one_rank() -> tuple[str, float]:
    watch.PATIENCE_SECONDS, watch.PAUSE_SECONDS = 0.5, 0.2  # type: ignore[misc]
    net = slow_net()
    engine = engine_for(net, 2)
    train(engine, net)
    started = time.monotonic()
    try:
        if dist.get_rank() == 0:
            engine.inspection.timeline()
        train(engine, net)
    except (UnsupportedError, PeerFailedError) as error:
        return str(error), time.monotonic() - started
    return "no error", 0.0


def test_a_timeline_that_only_some_ranks_ask_for_ends_with_an_error_soon():
    found = run_ranks(asked_on_one_rank, 2)
    assert all(seconds < 20 for _, seconds in found)
    assert any("wait for each other for ever" in message for message, _ in found)
    assert all(message != "no error" for message, _ in found)


def after_the_run(pp: int) -> tuple[int, int]:
    net = slow_net()
    engine = engine_for(net, pp)
    train(engine, net)
    engine.eval_step(net.loss, batch(5))
    engine.detach()
    after = engine.inspection.timeline().step
    engine.attach(net)
    train(engine, net, 1)
    return after, engine.inspection.timeline().step


def test_it_is_known_after_evaluation_and_after_the_run_and_the_latest_step_counts():
    assert run_ranks(after_the_run, 2, 2) == [(2, 3)] * 2


def profiled(profiles: bool) -> tuple[set[str], int]:
    net = slow_net()
    engine = engine_for(net, 2, pipeline="1f1b")
    train(engine, net)
    with mock.patch.object(recorder, "record_function", wraps=recorder.record_function) as ranges:
        if not profiles:
            train(engine, net, 1)
            return set(), ranges.call_count
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
            train(engine, net, 1)
    return {event.name for event in profile.events()}, ranges.call_count


def test_a_profiler_shows_the_actions_by_name():
    for names, _ in run_ranks(profiled, 2, True):
        assert {f"{kind}{number}" for kind in "FB" for number in range(4)} <= names


def test_without_a_profiler_no_range_of_it_is_entered():
    assert run_ranks(profiled, 2, False) == [(set(), 0)] * 2
