"""Odds and ends of steps: empty batches, evaluation in between, clipping without gradients."""

import ctypes
import threading
import time
from contextlib import nullcontext
from datetime import timedelta
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from smp_strategy.config.config import SMPConfig
from smp_strategy.engine.engine import Engine
from smp_strategy.errors import ConfigError, PeerFailedError
from smp_strategy.testing import run_ranks
from tests.parity.models import Text, batch_for


def run_with_evaluation(evaluate: bool) -> list[float]:
    torch.manual_seed(0)
    model = Text(dropout=0.5)
    engine = Engine(SMPConfig(pipeline_parallel_degree=2, microbatches=2))
    engine.attach(model)
    losses = []
    for step in range(3):
        losses.append(engine.train_step(model.loss, batch_for("text", step, 4), loss_of=lambda loss: loss).loss.item())
        if evaluate:
            engine.eval_step(model.loss, batch_for("text", step, 4))
    return losses


def test_evaluation_does_not_change_the_random_numbers_of_training():
    assert run_ranks(run_with_evaluation, 2, True) == run_ranks(run_with_evaluation, 2, False)


def plan_after_evaluation(pp: int, schedule: dict[str, Any]) -> tuple[Any, Any]:
    model = Text()
    engine = Engine(SMPConfig(pipeline_parallel_degree=pp, microbatches=4, **schedule))
    engine.attach(model)
    model.eval()
    with torch.no_grad():
        engine.eval_step(model.loss, batch_for("text", 0, 8))
    model.train()
    engine.train_step(model.loss, batch_for("text", 1, 8), loss_of=lambda loss: loss)
    plan = engine.inspection.explain().plan
    assert plan is not None
    return plan.stages, plan.times


@pytest.mark.parametrize("schedule", [{"pipeline": "interleaved"}, {"pipeline": "zb-h1"}], ids=str)
@pytest.mark.parametrize("pp", [2, 4])
def test_all_ranks_follow_one_timetable_also_where_steps_are_first_seen_after_the_model_was_spread(pp, schedule):
    plan, *others = run_ranks(plan_after_evaluation, pp, pp, schedule)
    assert others == [plan] * (pp - 1)


def run_clip_without_gradients(norm_type: float) -> Tensor:
    model = Text()
    engine = Engine(SMPConfig(pipeline_parallel_degree=2, microbatches=2))
    engine.attach(model)
    engine.train_step(model.loss, batch_for("text", 0, 4), loss_of=lambda loss: loss)
    empty = engine.clip_grad_norm_([], 1.0, norm_type)
    return torch.stack([empty, engine.clip_grad_norm_(model.parameters(), 1.0, norm_type)])


def test_the_norm_of_no_gradients_is_zero():
    for norm_type in (2.0, float("inf")):
        for found in run_ranks(run_clip_without_gradients, 2, norm_type):
            assert found.tolist() == [0.0, 0.0]


class OwnSizes(nn.Module):
    """Depends on the rank, as if it were made for this rank's data."""

    def __init__(self, what: str) -> None:
        super().__init__()
        is_other = dist.get_rank() == 1
        self.first = nn.Linear(4, 5 if is_other and what == "a size" else 4)
        self.second = nn.Linear(4, 4).requires_grad_(not (is_other and what == "freezing"))
        if is_other and what == "a module":
            self.third = nn.Linear(4, 4)


def run_different_models(what: str) -> None:
    Engine(SMPConfig(pipeline_parallel_degree=1)).attach(OwnSizes(what))


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("a size", r"rank 0 has `first\.weight` \(of shape \[4, 4\], .*\), rank 1 has .* \(of shape \[5, 4\], "),
        ("a module", r"rank 0 has `nothing` .*, rank 1 has `third\.weight` "),
        ("freezing", r"rank 0 has `second\.weight` \(.*, trained\), rank 1 has `second\.weight` \(.*, not trained\)"),
    ],
)
def test_ranks_with_different_models_are_told_before_they_begin(what, told):
    with pytest.raises(RuntimeError, match=rf"Ranks have different models: where {told}"):
        run_ranks(run_different_models, 2, what)


def run_empty_batch() -> list[Tensor | None]:
    model = Text()
    engine = Engine(SMPConfig(pipeline_parallel_degree=2, microbatches=2))
    engine.attach(model)
    result = engine.train_step(
        lambda batch: model(batch["tokens"]).sum(), batch_for("text", 0, 0), loss_of=lambda loss: loss
    )
    result.commit(torch.ones(()), reduce=True)
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.filterwarnings("ignore:`microbatches` is 2, but the batch has too few samples:UserWarning")
def test_an_empty_batch_has_gradients_of_zero():
    for gradients in run_ranks(run_empty_batch, 2):
        assert gradients
        assert not any(gradient.any() for gradient in gradients if gradient is not None)


class Bookkeeper(Text):
    """A module whose step leaves its marks everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))
        self.calls, self.losses, self.by_kind = 0, [], {"train": []}

    def step(self, batch: dict[str, Tensor]) -> Tensor:
        loss = self.loss(batch)
        self.calls += 1
        self.losses.append(loss.detach())
        self.by_kind["last"] = loss.detach()
        self.latest = loss.detach()
        self.steps += 1
        return loss


def run_bookkeeper() -> tuple[int, int, float, list[str]]:
    torch.manual_seed(0)
    model = Bookkeeper()
    engine = Engine(SMPConfig(pipeline_parallel_degree=2, microbatches=2))
    engine.attach(model)
    for step in range(3):
        engine.train_step(model.step, batch_for("text", step, 4), loss_of=lambda loss: loss)
    return model.calls, len(model.losses), model.steps.item(), sorted(model.by_kind)


def test_the_dry_run_leaves_no_marks_on_the_module():
    for found in run_ranks(run_bookkeeper, 2):
        assert found == (6, 6, 6.0, ["last", "train"])


def run_with_a_stuck_rank(read_alone: bool) -> float:
    model = Text()
    engine = Engine(SMPConfig(pipeline_parallel_degree=2, microbatches=2), timeout=timedelta(seconds=2))
    engine.attach(model)

    def step(batch: dict[str, Tensor]) -> Tensor:
        loss = model.loss(batch)
        if read_alone and rank == 1 and number:
            loss.item()  # the stage that has the value does not take part
        return loss

    rank, started = dist.get_rank(), time.monotonic()
    for number in range(2):
        if number and not read_alone and dist.get_rank() == 0:
            time.sleep(5)
            return 0.0
        started = time.monotonic()
        with pytest.raises(PeerFailedError) if number else nullcontext():
            engine.train_step(step, batch_for("text", number, 4), loss_of=lambda loss: loss)
    return time.monotonic() - started


@pytest.mark.parametrize("read_alone", [False, True])
def test_no_wait_for_another_rank_outlasts_the_timeout(read_alone):
    assert max(run_ranks(run_with_a_stuck_rank, 2, read_alone)) < 10


class OutsideError(Exception):
    """Raised by another thread in whatever code is running."""


class Struck(nn.Linear):
    """Is interrupted on rank 0 at its first call, which is one of a dry run."""

    struck: ClassVar[set[int]] = set()

    def forward(self, x: Tensor) -> Tensor:
        if dist.get_rank() == 0 and not Struck.struck:
            Struck.struck.add(1)
            thread = ctypes.c_ulong(threading.get_ident())
            ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(OutsideError))
        return super().forward(x)


def run_interrupted() -> str:
    model = nn.Sequential(*(Struck(4, 4) for _ in range(4)))
    engine = Engine(SMPConfig(pipeline_parallel_degree=2, microbatches=2))
    engine.attach(model)
    try:
        engine.train_step(lambda x: model(x).square().mean(), torch.ones(4, 4), loss_of=lambda loss: loss)
    except OutsideError as error:
        return type(error).__name__
    return "nothing"


def test_an_error_that_another_thread_raises_in_a_dry_run_ends_the_run_with_its_name():
    assert run_ranks(run_interrupted, 2) == ["OutsideError"] * 2


def check_options_with_the_degree_that_is_chosen(options: dict[str, Any]) -> str:
    try:
        Engine(SMPConfig(**options)).attach(Text())
    except ConfigError as error:
        return str(error)
    return "not refused"


def test_options_that_do_not_fit_the_number_of_stages_are_refused_also_where_it_is_chosen():
    options = {"pipeline": "simple", "active_microbatches": 7}
    for message in run_ranks(check_options_with_the_degree_that_is_chosen, 2, options):
        assert "`active_microbatches` (7) contradicts `pipeline=simple`, where all 8 microbatches are" in message


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(torch.tanh(self.first(x))))


def chain_of_ties() -> nn.Sequential:
    torch.manual_seed(0)
    pairs = nn.Sequential(Pair(), Pair(), Pair())
    pairs[1].first.weight = pairs[0].first.weight
    pairs[2].second.weight = pairs[1].second.weight
    return pairs


def run_chain_of_ties() -> dict[str, Tensor]:
    model = chain_of_ties()
    config = SMPConfig(pipeline_parallel_degree=3, microbatches=1, unit_classes=("Pair",))
    engine = Engine(config, timeout=timedelta(seconds=20))
    engine.attach(model)
    result = engine.train_step(lambda x: model(x).square().mean(), torch.ones(2, 4), loss_of=lambda loss: loss)
    result.commit(torch.ones(()), reduce=True)
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def test_a_stage_may_share_one_weight_with_the_stage_before_and_another_with_the_stage_after():
    model = chain_of_ties()
    model(torch.ones(2, 4)).square().mean().backward()
    plain = {name: parameter.grad for name, parameter in model.named_parameters()}
    found = run_ranks(run_chain_of_ties, 3)
    assert set().union(*found) == set(plain)
    assert all(torch.equal(gradient, plain[name]) for gradients in found for name, gradient in gradients.items())
