"""Scaled losses in every layout: the weights, norms and scales of one process with PyTorch's scaler.

In some steps one element of one parameter's gradient overflows: one rank has it, and all have to skip.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from smp_strategy.engine.engine import Engine
from smp_strategy.engine.updates.grad_scaler import GradScaler
from smp_strategy.engine.updates.loss_scale import ScalingRules
from smp_strategy.pipeline.microbatch import split
from smp_strategy.testing import run_ranks
from tests.ranks.test_tensor_parallel_engine import Setting, Text, batch_of, engine_for

STEPS, WINDOW, ACCUMULATED = 7, 2, 2
# In a step's second batch and on one replica only.
OVERFLOWS = {1, 2, 5}


class Overflowing(torch.autograd.Function):
    """Makes the first element of a gradient infinite where it is told to."""

    @staticmethod
    def forward(ctx: Any, gain: Tensor, told: Tensor) -> Tensor:
        ctx.save_for_backward(told)
        return gain.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        [told] = ctx.saved_tensors
        grad = grad.clone()
        grad[0] = torch.where(told.max() > 0, math.inf, grad[0])
        return grad, None


class Gain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(16))

    def forward(self, hidden: Tensor, told: Tensor) -> Tensor:
        return hidden * Overflowing.apply(self.gain, told)


class Overflows(Text):
    """Overflows in its first unit but one, or in the last but one."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.gain = Gain()
        self.place = place

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        hidden = self.embed(batch["tokens"])
        if self.place == "first":
            hidden = self.gain(hidden, batch["told"])
        for block in self.blocks:
            hidden = block(hidden)
        if self.place == "last":
            hidden = self.gain(hidden, batch["told"])
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), batch["labels"].flatten())


def batch_for(step: int, accumulated: int, replica: int) -> dict[str, Tensor]:
    batch = batch_of(ACCUMULATED * step + accumulated, replica)
    overflows = step in OVERFLOWS and accumulated == 1 and replica == 0
    return {**batch, "told": torch.full((4,), float(overflows))}


def built(place: str) -> tuple[Overflows, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    torch.manual_seed(0)
    model = Overflows(place)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def one_process(setting: Setting, place: str) -> Any:
    model, optimizer, scheduler = built(place)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=WINDOW)
    scales, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        for accumulated in range(ACCUMULATED):
            for replica in range(setting.dp):
                parts, _ = split(batch_for(step, accumulated, replica), setting.microbatches)
                for part in parts:
                    loss = model.loss(part) / (setting.microbatches * setting.dp * ACCUMULATED)
                    scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.3).item())
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() >= before:
            scheduler.step()
        scales.append(scaler.get_scale())
    return scales, norms, model.state_dict(), optimizer.state_dict()


def train(setting: Setting, place: str) -> Any:
    model, optimizer, scheduler = built(place)
    engine: Engine = engine_for(setting, model, optimizer)
    scaler = GradScaler(ScalingRules(init_scale=2.0**10, window=WINDOW), engine.unscale)
    scales, norms, states = [], [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        for accumulated in range(ACCUMULATED):
            batch, is_last = batch_for(step, accumulated, engine.mesh.dp_rank), accumulated == ACCUMULATED - 1
            factor = scaler.get_scale() / ACCUMULATED
            result = engine.train_step(
                model.loss,
                batch,
                loss_of=lambda loss: loss,
                factor=factor,
                continues=accumulated > 0,
                reduces=is_last,
            )
            loss = torch.zeros((), requires_grad=True)
            scaler.scale(loss / ACCUMULATED).backward()
            result.commit(loss.grad, reduce=is_last)
        scaler.unscale_(optimizer)
        norms.append(engine.clip_grad_norm_(list(model.parameters()), 0.3).item())
        engine.begin_update(optimizer)
        scaler.step(optimizer)
        engine.end_update(optimizer)
        scaler.update()
        if not scaler.has_skipped(optimizer):
            scheduler.step()
        scales.append(scaler.get_scale())
        states.append(scaler.has_skipped(optimizer))
    state = engine.saved.full_state_dict(), engine.saved.full_optimizer_state(optimizer)
    engine.close()
    return scales, norms, states, state


PLACES = (("first",), ("last",))
SHARDED, DEALT_OUT = ("sharded_data_parallel_degree", 2), ("shard_optimizer_state", True)
LAYOUTS = {
    "one rank": Setting(1),
    "pp2": Setting(1, pp=2),
    "pp4": Setting(1, pp=4),
    "pp2 zbh1": Setting(1, pp=2, options=(("pipeline", "zb-h1"),)),
    "dp2": Setting(1, dp=2),
    "sdp2": Setting(1, dp=2, options=(SHARDED,)),
    "zero1": Setting(1, dp=2, options=(DEALT_OUT,)),
    "t2": Setting(2),
    "pp2 dp2": Setting(1, pp=2, dp=2),
    "pp2 sdp2": Setting(1, pp=2, dp=2, options=(SHARDED,)),
    "pp2 zero1": Setting(1, pp=2, dp=2, options=(DEALT_OUT,)),
    "sdp2 zero1": Setting(1, dp=4, options=(SHARDED, DEALT_OUT)),
    "t2 pp2": Setting(2, pp=2),
    "t2 sdp2": Setting(2, dp=2, options=(SHARDED,)),
    "t2 zero1": Setting(2, dp=2, options=(DEALT_OUT,)),
}


# Stages make a difference between the places; otherwise all ranks have both.
@pytest.mark.dear
@pytest.mark.parametrize(
    ("name", "place"),
    [
        (name, place)
        for number, (name, setting) in enumerate(LAYOUTS.items())
        for place in (("first", "last") if setting.pp > 1 and setting.dp == setting.tp == 1 else PLACES[number % 2])
    ],
)
def test_all_ranks_skip_what_one_process_skips(name, place):
    setting = LAYOUTS[name]
    scales, norms, weights, state = one_process(setting, place)
    ranks = run_ranks(train, setting.ranks, setting, place)
    for found_scales, found_norms, skipped, _ in ranks:
        assert found_scales == scales
        assert found_norms == pytest.approx(norms, rel=1e-5, nan_ok=True)
        assert [step for step, is_skipped in enumerate(skipped) if is_skipped] == sorted(OVERFLOWS)
    exact = setting.tp == setting.dp == 1
    tolerance = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 1e-5, "atol": 1e-6}
    found, found_state = ranks[0][-1]
    torch.testing.assert_close(found, weights, **tolerance)
    torch.testing.assert_close(found_state, state, **tolerance)


def test_the_scale_of_one_process_goes_down_and_up():
    scales, *_ = one_process(Setting(1), "first")
    assert scales == [2.0**10, 2.0**9, 2.0**8, 2.0**8, 2.0**9, 2.0**8, 2.0**8]
