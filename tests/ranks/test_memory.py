"""What ranks hold, counted, beside what was predicted."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim

from smp_strategy.config.config import SMPConfig
from smp_strategy.data_parallel.flat_layout import UnitLayout
from smp_strategy.data_parallel.flat_unit import FlatUnit
from smp_strategy.data_parallel.gather_schedule import MOST_REDUCING
from smp_strategy.engine.engine import Engine
from smp_strategy.planning.memory.counting import count
from smp_strategy.planning.memory.sharded import most_gathered, most_unreduced
from smp_strategy.reports.memory_report import MemoryReport, memory_report
from smp_strategy.testing import run_ranks
from tests.parity.models import MODELS, batch_for
from tests.ranks.sharded_models import Model, Skips, UsedTwice, batch
from tests.ranks.sharded_training import Setting, Sharded, train_sharded

STEP_COUNTER = 4


def made(name: str) -> tuple[Any, optim.Optimizer]:
    torch.manual_seed(0)
    model = MODELS[name]()
    return model, optim.AdamW(model.parameters())


def reports(
    name: str, options: dict[str, Any], seen: bool = False, summed: bool = False
) -> tuple[MemoryReport, MemoryReport]:
    """Before the first step, or between the last one's backward and update if ``summed``; and after the last one."""
    model, optimizer = made(name)
    engine = Engine(SMPConfig(**options))
    engine.gradients_are_seen = seen
    engine.attach(model, [optimizer])
    before = memory_report(count(model, [optimizer], engine.mesh), engine.partition)
    for step in range(2):
        result = engine.train_step(model.loss, batch_for(name, step, 4), loss_of=lambda loss: loss)
        model.zero_grad()
        result.commit(torch.ones(()), reduce=True)
        if step and summed:
            before = engine.inspection.memory_report()
        engine.begin_update(optimizer)
        optimizer.step()
        engine.end_update(optimizer)
    after = engine.inspection.memory_report()
    engine.close()
    return before, after


def size(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def test_before_the_first_step_every_rank_holds_the_model_and_nothing_is_predicted():
    for before, _ in run_ranks(reports, 2, "text", {"pipeline_parallel_degree": 2}):
        assert [each.amounts["parameters"] for each in before.ranks] == [size(made("text")[0])] * 2
        assert [each.stage for each in before.ranks] == [1, 0]
        assert before.predicted == ()
        assert {each.gradients + each.optimizer for each in before.ranks} == {0}


@pytest.mark.parametrize("name", ["text", "text, tied", "weights in the glue", "vit"])
def test_the_stages_of_a_pipeline_hold_what_was_predicted_for_them(name):
    (_, report), (_, other) = run_ranks(reports, 2, name, {"pipeline_parallel_degree": 2, "microbatches": 2})
    assert report.ranks == other.ranks
    assert report.predicted == other.predicted
    assert [each.rank for each in report.ranks] == [0, 1]
    for each in report.ranks:
        held = report.predicted[each.stage]
        found = (each.parameters, each.gathered, each.gradients, each.optimizer)
        assert found == (held.parameter, 0, held.gradient, held.optimizer)
    assert sum(each.parameters for each in report.ranks) >= size(made(name)[0])


def test_stages_share_out_the_units_and_both_have_the_parameters_of_the_glue():
    (_, report), _ = run_ranks(reports, 2, "text", {"pipeline_parallel_degree": 2, "microbatches": 2})
    model = made("text")[0]
    held = size(model) + model.position.nbytes
    assert sum(each.parameters for each in report.ranks) == sum(each.gradients for each in report.ranks) == held
    num_parameters = len(list(model.parameters())) + 1
    assert sum(each.optimizer for each in report.ranks) == 2 * held + STEP_COUNTER * num_parameters


@pytest.mark.parametrize(("world", "pp"), [(2, 1), (4, 2), (4, 1)])
def test_replicas_that_share_the_state_hold_their_parts_of_it_and_the_fullest_what_was_predicted(world, pp):
    options = {"pipeline_parallel_degree": pp, "microbatches": pp, "shard_optimizer_state": True}
    (_, report), *_ = run_ranks(reports, world, "text", options)
    for stage, held in enumerate(report.predicted):
        ranks = [each for each in report.ranks if each.stage == stage]
        assert {each.parameters for each in ranks} == {held.parameter}
        assert max(each.optimizer for each in ranks) == held.optimizer
        num_parameters = (sum(each.optimizer for each in ranks) - 2 * held.parameter) / STEP_COUNTER
        assert num_parameters == int(num_parameters) > 0
        # Replicas let go of the gradients that others apply.
        assert sum(each.gradients for each in ranks) == held.gradient


def test_replicas_whose_gradients_the_user_looks_at_keep_all_of_them():
    options = {"pipeline_parallel_degree": 1, "shard_optimizer_state": True}
    (_, report), _ = run_ranks(reports, 2, "text", options, True)
    assert {each.gradients for each in report.ranks} == {report.predicted[0].gradient}


@pytest.mark.parametrize("threshold", [0, 300])
@pytest.mark.parametrize("name", ["text", "text, tied", "weights in the glue"])
@pytest.mark.parametrize(("world", "pp", "degree"), [(2, 1, 2), (4, 1, 2), (4, 2, 2)])
def test_ranks_of_a_shard_group_hold_their_shards_and_the_fullest_what_was_predicted(
    world, pp, degree, name, threshold
):
    options = {"pipeline_parallel_degree": pp, "microbatches": pp, "sharded_data_parallel_degree": degree}
    options["sdp_param_persistence_threshold"] = threshold
    (before, report), *_ = run_ranks(reports, world, name, options)
    assert {each.parameters for each in before.ranks} == {size(made(name)[0])}
    for stage, held in enumerate(report.predicted):
        ranks = [each for each in report.ranks if each.stage == stage]
        assert len(ranks) == world // pp
        assert {each.parameters for each in ranks} == {held.parameter}
        assert {each.gathered for each in ranks} == {held.gathered}
        assert {each.gradients for each in ranks} == {held.gradient}
        assert max(each.optimizer for each in ranks) == held.optimizer
        assert (held.gathered > 0) == (name != "weights in the glue"), "whose loss looks at every parameter"


@pytest.mark.parametrize("precision", ["bf16", "fp16_params"])
@pytest.mark.parametrize("name", ["text", "text, tied"])
@pytest.mark.parametrize(
    ("world", "options"),
    [
        (2, {"pipeline_parallel_degree": 2, "microbatches": 2}),
        (2, {"pipeline_parallel_degree": 1, "sharded_data_parallel_degree": 2}),
        (2, {"pipeline_parallel_degree": 1, "sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 300}),
        (4, {"pipeline_parallel_degree": 2, "microbatches": 2, "sharded_data_parallel_degree": 2}),
        (4, {"pipeline_parallel_degree": 1, "sharded_data_parallel_degree": 2, "shard_optimizer_state": True}),
    ],
    ids=["pp2", "sdp2", "sdp2, small stay", "pp2 sdp2", "mics, dealt out"],
)
def test_half_precision_takes_the_memory_that_was_predicted(world, options, name, precision):
    (summed, report), *_ = run_ranks(reports, world, name, {**options, precision: True}, False, True)
    for stage, held in enumerate(report.predicted):
        ranks = [each for each in report.ranks if each.stage == stage]
        assert {each.parameters for each in ranks} == {held.parameter}
        assert {each.gathered for each in ranks} == {held.gathered}
        if "shard_optimizer_state" not in options:
            # Sums are rounded for the update and stay so.
            assert max(each.gradients for each in summed.ranks if each.stage == stage) == held.gradient
        assert max(each.optimizer for each in ranks) == held.optimizer


GATHERS = [(1, 2, "step"), (2, 4, "use"), (2, 4, "step"), (1, 2, "use")]


@pytest.mark.parametrize(("pp", "world", "gather"), GATHERS)
def test_whether_units_are_gathered_once_or_for_each_use_is_predicted(pp, world, gather):
    options = {"pipeline_parallel_degree": pp, "microbatches": 2, "sharded_data_parallel_degree": 2}
    (_, report), *_ = run_ranks(reports, world, "text", {**options, "sdp_gather": gather})
    # Of several stages it is not known which units they will have, so all get room for the largest.
    room = [max(each.gathered for each in report.ranks if each.stage == stage) for stage in range(pp)]
    predicted = [held.gathered for held in report.predicted]
    assert max(room) == max(predicted)
    if gather == "step" or pp == 1:
        assert room == predicted


@pytest.mark.parametrize(("pp", "name"), [(1, "text"), (1, "text, tied"), (2, "text")])
def test_replicas_of_a_shard_group_hold_a_part_of_the_state_for_their_shards_each(pp, name):
    options = {"pipeline_parallel_degree": pp, "microbatches": pp, "sharded_data_parallel_degree": 2}
    world = 4 * pp
    (_, plain), *_ = run_ranks(reports, world, name, options)
    (_, report), *_ = run_ranks(reports, world, name, {**options, "shard_optimizer_state": True})
    for stage, held in enumerate(report.predicted):
        ranks = [each for each in report.ranks if each.stage == stage]
        alike = [each for each in plain.ranks if each.stage == stage]
        assert {each.parameters for each in ranks} == {held.parameter}
        assert max(each.optimizer for each in ranks) == held.optimizer
        assert held.optimizer < 0.6 * plain.predicted[stage].optimizer
        # In the meantime there was the group's sum, which is as large as the shard.
        assert all(each.gradients < held.gradient < 2 * each.gradients for each in ranks)
        assert max(each.parameters for each in ranks) < 1.05 * max(each.parameters for each in alike)


def layouts(kind: type[Model], setting: Setting) -> dict[str, UnitLayout]:
    return {name: unit.layout for name, unit in Sharded(kind, setting).units.items()}


CALLS = {
    Model: ["first", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "head"],
    Skips: ["first", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "head"],
    UsedTwice: ["first", *(f"blocks.{number}" for number in (0, 1, 2, 1, 3, 1)), "head"],
}


@pytest.mark.parametrize("most_live", [None, 800, 600])
@pytest.mark.parametrize("kind", CALLS)
def test_the_most_that_was_gathered_at_once_was_predicted(kind, most_live):
    setting = Setting(2, 2, most_live=most_live)
    known = run_ranks(layouts, 2, kind, setting)[0]
    expected = most_gathered([[name] for name in CALLS[kind]], known, most_live)
    assert [4 * report.most_numel for report in run_ranks(train_sharded, 2, kind, setting)] == [expected] * 2


def unreduced_bytes(units: Iterable[FlatUnit]) -> int:
    """Whole gradients that parameters have, and those in buffers that are being reduced."""
    found = 0
    for unit in units:
        found += sum(each.grad.nbytes for each in unit.parameters if type(each.grad) is Tensor)
        found += sum(buffer.layout.full_bytes for buffer in unit._buffers if buffer.gradients._reducing is not None)
    return found


def seen_unreduced(kind: type[Model]) -> tuple[int, dict[str, UnitLayout]]:
    """The most at a time in some steps, whenever a gradient has arrived or is about to be reduced."""
    sharded, peaks = Sharded(kind, Setting(2, 2)), [0]

    def look(*_: object) -> None:
        peaks[0] = max(peaks[0], unreduced_bytes(sharded.units.values()))

    for parameter in sharded.model.parameters():
        parameter.register_post_accumulate_grad_hook(look)
    for step in range(3):
        sharded.model(batch(2 * step + dist.get_rank())).backward()
        sharded.uses.end_pass()
        sharded.step()
    sharded.weights()
    return peaks[0], {name: unit.layout for name, unit in sharded.units.items()}


@pytest.mark.parametrize("kind", CALLS)
def test_no_more_whole_gradients_were_there_than_was_predicted(kind):
    for seen, known in run_ranks(seen_unreduced, 2, kind):
        expected = most_unreduced([[name] for name in CALLS[kind]], known, MOST_REDUCING)
        # What parameters have is not padded yet, of two units at most.
        padding = max(layout.full_bytes - plain_bytes(layout) for layout in known.values())
        assert expected - 2 * padding <= seen <= expected


def plain_bytes(layout: UnitLayout) -> int:
    return sum(flat.itemsize * slot.entry.numel for flat in layout.flats for slot in flat.slots)


def limited(limit: int | None) -> tuple[list[float], list[str], int, MemoryReport]:
    """Losses of some steps, reports, most gathered elements for prefetching, and memory."""
    model, optimizer = made("text")
    said: list[str] = []
    config = SMPConfig(pipeline_parallel_degree=1, sharded_data_parallel_degree=2, memory_limit=limit)
    engine = Engine(config, report=said.append)
    engine.attach(model, [optimizer])
    losses = []
    for step in range(3):
        result = engine.train_step(model.loss, batch_for("text", step, 4), loss_of=lambda loss: loss)
        assert result.loss is not None
        losses.append(result.loss.item())
        model.zero_grad()
        result.commit(torch.ones(()), reduce=True)
        engine.begin_update(optimizer)
        optimizer.step()
        engine.end_update(optimizer)
    report, most_live = engine.inspection.memory_report(), engine._parts.config.sdp_max_live_parameters
    engine.close()
    return losses, said, most_live, report


def test_a_limit_of_memory_lowers_what_shards_gather_and_keep():
    losses, said, everything, free = run_ranks(limited, 2, None)[0]
    assert not any("memory limit" in text for text in said)
    for other, texts, most_live, report in run_ranks(limited, 2, 130_000):
        assert other == losses
        # A block alone, and no other beside it; with padding.
        largest = 1152
        assert most_live == largest < everything
        assert {each.gathered for each in report.ranks} == {4 * largest}
        assert all(each.gathered > 4 * largest for each in free.ranks)
        assert report.predicted[0].gathered == 4 * largest
        told = [text for text in texts if f"`sdp_max_live_parameters={largest}`" in text]
        assert len(told) == 1
        assert "compute activations again" in told[0]
