"""Optimizers that do more than steps, and steps of models whose gradients come from elsewhere, against one process."""

import pytest
import torch
from accelerate_checks import (
    MICROBATCHES,
    assert_same,
    batches,
    fresh_accelerator,
    loss_inside,
    mine,
    on_ranks,
    plain_loop,
    toy,
    whole_state,
)

from smp_strategy import SMPError, UnsupportedError

PP2 = {"pipeline_parallel_degree": 2, "microbatches": MICROBATCHES}
SDP2 = {"sharded_data_parallel_degree": 2, "microbatches": MICROBATCHES // 2}
ZERO1 = {"shard_optimizer_state": True, "microbatches": MICROBATCHES // 2}
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


class ScheduleFree(torch.optim.Optimizer):
    """SGD that trains one point and evaluates another, an average (Defazio et al. 2024), as `schedulefree` does it."""

    def __init__(self, params, lr=0.3, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "train_mode": False})

    @torch.no_grad()
    def eval(self):
        for group in self.param_groups:
            if group["train_mode"]:
                self._move(group, 1 - 1 / group["beta"])
            group["train_mode"] = False

    @torch.no_grad()
    def train(self):
        for group in self.param_groups:
            if not group["train_mode"]:
                self._move(group, 1 - group["beta"])
            group["train_mode"] = True

    def _move(self, group, weight):
        for parameter in group["params"]:
            state = self.state[parameter]
            if "z" in state:
                parameter.lerp_(end=state["z"], weight=weight)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if not group["train_mode"]:
                raise RuntimeError("call `train` first")
            group["k"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    z = self.state[parameter].setdefault("z", parameter.clone())
                    parameter.lerp_(end=z, weight=1 / group["k"])
                    parameter.add_(parameter.grad, alpha=group["lr"] * (group["beta"] * (1 - 1 / group["k"]) - 1))
                    z.sub_(parameter.grad, alpha=group["lr"])


def schedule_free(smp):
    accelerator = fresh_accelerator(smp)
    model = toy()
    model, optimizer = accelerator.prepare(model, ScheduleFree(model.parameters()))
    seen, evaluation = [], batches()[0]
    for epoch in range(2):
        optimizer.eval()
        model.eval()
        with torch.no_grad():
            seen.append(model(evaluation["inputs"])["logits"])
        model.train()
        for batch in batches():
            optimizer.train()
            accelerator.backward(loss_inside(model, mine(accelerator, batch)))
            optimizer.step()
            optimizer.zero_grad()
        if epoch == 0:
            trained = whole_state(accelerator)
    optimizer.eval()
    saved = accelerator.get_state_dict(model)
    state = optimizer.state_dict()
    return seen, trained, saved, state


@pytest.mark.parametrize(
    ("smp", "ranks"),
    [(PP2, 2), (SDP2, 2), (ZERO1, 2), (PP2 | SDP2, 4)],
    ids=["pp2", "sdp2", "zero1", "pp2 sdp2"],
)
def test_optimizers_that_swap_weights_for_an_average(smp, ranks):
    model = toy()
    optimizer = ScheduleFree(model.parameters())
    expected = []
    for epoch in range(2):
        optimizer.eval()
        with torch.no_grad():
            expected.append(model(batches()[0]["inputs"])["logits"])
        optimizer.train()
        plain_loop(model, optimizer, batches())
        if epoch == 0:
            at_half = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer.eval()
    results = on_ranks(schedule_free, ranks, smp)
    _, trained, saved, state = results[0]
    assert_same(trained, at_half, **CLOSE)
    assert_same(saved, model.state_dict(), **CLOSE)
    for number, each in optimizer.state_dict()["state"].items():
        torch.testing.assert_close(state["state"][number]["z"], each["z"], **CLOSE)
    for seen, *_ in results:
        torch.testing.assert_close(seen, expected, **CLOSE)


def on_one_rank():
    accelerator = fresh_accelerator(PP2)
    model = toy()
    model, optimizer = accelerator.prepare(model, ScheduleFree(model.parameters()))
    optimizer.train()
    accelerator.backward(loss_inside(model, batches()[0]))
    optimizer.step()
    call = optimizer.eval if accelerator.is_main_process else accelerator.wait_for_everyone
    with pytest.raises(SMPError, match=r"optimizer\.eval"):
        call()


def unprepared():
    accelerator = fresh_accelerator(ZERO1)
    model = toy()
    model, optimizer = accelerator.prepare(model), ScheduleFree(model.parameters())
    optimizer.train()
    accelerator.backward(loss_inside(model, batches()[0]))
    with pytest.raises(UnsupportedError, match="without being prepared"):
        optimizer.step()


def test_unprepared_optimizers_that_nobody_follows_are_refused():
    on_ranks(unprepared, 2)


def test_all_ranks_switch_together():
    on_ranks(on_one_rank, 2)
