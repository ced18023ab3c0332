"""Optimizers that do more than steps, and steps of models whose gradients come from elsewhere, against one process."""

import contextlib
import copy

import pytest
import torch
from accelerate.local_sgd import LocalSGD
from accelerate_checks import (
    MICROBATCHES,
    adamw,
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
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from smp_strategy import SMPError, UnsupportedError
from smp_strategy.errors import ConfigError
from tests.unit.data_parallel.optimizers import GlobalNorm

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


def held_back(smp, way):
    """Of each two batches the gradients of the first wait, in the ways that scripts have."""
    accelerator = fresh_accelerator(smp)
    model = toy()
    model, optimizer = accelerator.prepare(model, adamw(model))
    for number, batch in enumerate(batches()):
        held = model.no_sync() if way == "model" else accelerator.no_sync(model)
        with held if number % 2 == 0 else contextlib.nullcontext():
            accelerator.backward(loss_inside(model, mine(accelerator, batch)) / 2)
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    return whole_state(accelerator)


@pytest.mark.parametrize("smp", [PP2, SDP2], ids=["pp2", "sdp2"])
@pytest.mark.parametrize("way", ["model", "accelerator"])
def test_no_sync_accumulates(way, smp):
    model = toy()
    plain_loop(model, adamw(model), batches(), window=2)
    assert_same(on_ranks(held_back, 2, smp, way)[0], model.state_dict(), **CLOSE)


def local_sgd(smp):
    accelerator = fresh_accelerator(smp)
    model = toy()
    model, optimizer = accelerator.prepare(model, adamw(model))
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2) as local:
        for batch in batches():
            accelerator.backward(loss_inside(model, mine(accelerator, batch)))
            optimizer.step()
            optimizer.zero_grad()
            local.step()
    return whole_state(accelerator)


def steps_without_sync():
    accelerator = fresh_accelerator(ZERO1)
    model = toy()
    model, optimizer = accelerator.prepare(model, adamw(model))
    with pytest.raises(UnsupportedError, match=r"Leave it out, .* `gradient_accumulation_steps`"):
        LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2).__enter__()
    copied = copy.deepcopy(model)
    with copied.no_sync():
        copied(**batches()[0])["loss"].backward()
    with model.no_sync():
        accelerator.backward(loss_inside(model, mine(accelerator, batches()[0])))
        with pytest.raises(UnsupportedError, match="steps inside of `no_sync`"):
            optimizer.step()
    accelerator.free_memory()
    assert not hasattr(model, "no_sync")


def test_local_sgd_of_one_replica_and_of_several():
    model = toy()
    plain_loop(model, adamw(model), batches())
    assert_same(on_ranks(local_sgd, 2, PP2)[0], model.state_dict(), **CLOSE)
    on_ranks(steps_without_sync, 2)


def moved_on(average, shadow, model):
    """Two averages of weights: PyTorch's, of a copy of the model, and one by hand; and the norm of the gradients."""
    average.update_parameters(model)
    with torch.no_grad():
        for old, new in zip(shadow, model.parameters(), strict=True):
            old.mul_(0.9).add_(new, alpha=0.1)
    return torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()


def averages_of(model):
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    return average, [parameter.detach().clone() for parameter in model.parameters()]


def averaged(smp):
    accelerator = fresh_accelerator(smp)
    model = toy()
    model, optimizer = accelerator.prepare(model, adamw(model))
    average, shadow = averages_of(accelerator.unwrap_model(model))
    norms = []
    for batch in batches():
        accelerator.backward(loss_inside(model, mine(accelerator, batch)))
        if accelerator.num_processes > 1:
            accelerator.smp.with_weights(lambda: None)  # makes gradients final, which is done once
        optimizer.step()
        with torch.no_grad():
            norms.append(accelerator.smp.with_weights(lambda: moved_on(average, shadow, model)))
        optimizer.zero_grad()
    average.update_parameters(model)  # reads weights, so all ranks gather them
    with pytest.raises(UnsupportedError, match="without a history"):
        accelerator.smp.with_weights(lambda: sum(each.square().sum() for each in model.parameters()))
    return list(average.module.state_dict().values()), shadow, norms, average(**batches()[0])["loss"].detach()


@pytest.mark.parametrize(("smp", "ranks"), [(PP2, 2), (SDP2, 2), (PP2 | SDP2, 4)], ids=["pp2", "sdp2", "pp2 sdp2"])
def test_averages_of_weights(smp, ranks):
    model = toy()
    optimizer = adamw(model)
    (average, shadow), norms = averages_of(model), []
    for batch in batches():
        loss_inside(model, batch).backward()
        optimizer.step()
        norms.append(moved_on(average, shadow, model))
        optimizer.zero_grad()
    average.update_parameters(model)
    expected = list(average.module.state_dict().values()), shadow, norms, average(**batches()[0])["loss"].detach()
    for found in on_ranks(averaged, ranks, smp):
        torch.testing.assert_close(found, expected, **CLOSE)


def halved(optimizer, model, smp):
    """Momentum is halved by a script between steps, and a norm of it read; both go on with one process' numbers."""
    norm = torch.stack([kept["exp_avg"].norm() for kept in optimizer.state.values()]).norm()
    for kept in optimizer.state.values():
        kept["exp_avg"].mul_(0.5)

    def decay():
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.lerp_(optimizer.state[parameter]["exp_avg"], 0.1)

    decay() if smp is None else smp.with_weights(decay)
    return float(norm)


def rescaled(optimizer, model):
    @torch.no_grad()
    def rescale(*_):
        norm = torch.stack([parameter.norm() for parameter in model.parameters()]).norm()
        for parameter in model.parameters():
            parameter.mul_(3 / norm)

    optimizer.register_step_post_hook(rescale)


def looked_at(smp):
    accelerator = fresh_accelerator(smp)
    model = toy()
    optimizer = adamw(model)
    rescaled(optimizer, model)
    model, optimizer = accelerator.prepare(model, optimizer)
    norms = []
    for batch in batches():
        accelerator.backward(loss_inside(model, mine(accelerator, batch)))
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            norms.append(halved(optimizer, model, accelerator.smp))
    return norms, whole_state(accelerator)


@pytest.mark.parametrize(
    ("smp", "ranks"), [(PP2, 2), (SDP2, 2), (ZERO1, 2), (PP2 | SDP2, 4)], ids=["pp2", "sdp2", "zero1", "pp2 sdp2"]
)
def test_scripts_see_what_optimizers_keep_and_hooks_of_steps_see_weights(smp, ranks):
    model = toy()
    optimizer, norms = adamw(model), []
    rescaled(optimizer, model)
    for batch in batches():
        loss_inside(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        norms.append(halved(optimizer, model, None))
    results = on_ranks(looked_at, ranks, smp)
    assert_same(results[0][1], model.state_dict(), **CLOSE)
    for found, _ in results:
        assert found == pytest.approx(norms, rel=1e-4)


def related(smp):
    accelerator = fresh_accelerator(smp)
    model = toy()
    model, optimizer = accelerator.prepare(model, GlobalNorm(model.parameters()))
    with pytest.raises(ConfigError, match="GlobalNorm cannot update"):
        accelerator.backward(loss_inside(model, mine(accelerator, batches()[0])))


@pytest.mark.parametrize("smp", [PP2, SDP2, ZERO1], ids=["pp2", "sdp2", "zero1"])
def test_optimizers_that_relate_parameters_are_refused(smp):
    on_ranks(related, 2, smp)


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


def plateau(smp, averages):
    """Learning rates of each epoch, by a scheduler that looks at the validation loss of this process's samples."""
    accelerator = fresh_accelerator(smp)
    model = toy()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    rates = []
    for losses in ((4.0, 4.0), (3.0, 4.5), (2.9, 4.4), (2.95, 4.6)):  # falls on one replica before it does on the other
        for batch in batches():
            accelerator.backward(loss_inside(model, mine(accelerator, batch)))
            optimizer.step()
            optimizer.zero_grad()
        loss = torch.tensor(losses[accelerator.process_index])
        scheduler.step(accelerator.reduce(loss, "mean") if averages else loss)
        rates.append(optimizer.param_groups[0]["lr"])
    accelerator.end_training()
    return rates


def error_of_plateau(smp):
    with pytest.raises(SMPError) as caught:
        plateau(smp, False)
    return str(caught.value)


@pytest.mark.dear
@pytest.mark.parametrize("smp", [{"microbatches": 2}, SDP2], ids=["dp2", "sdp2"])
def test_a_scheduler_that_looks_at_samples_of_one_process_is_refused(smp):
    alone = {"pipeline_parallel_degree": 1, **smp}
    for error in on_ranks(error_of_plateau, 2, alone):
        assert "`lr` of parameter group 0 is 0.5 on rank 0, 0.25 on rank 1" in error
        assert 'average the value over all ranks before (`accelerator.reduce(value, "mean")`)' in error
    assert on_ranks(plateau, 2, alone, True) == [[0.5, 0.5, 0.5, 0.25]] * 2
