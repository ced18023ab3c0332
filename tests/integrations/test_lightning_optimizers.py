"""Optimizers that see some of the parameters, and hooks that look at what they keep: numbers of plain Lightning."""

import collections

import pytest
import torch
from lightning_toy import on_ranks, quiet, toy_data, toy_module, toy_trainer
from prodigyopt import Prodigy
from schedulefree import AdamWScheduleFree
from torch.utils.data import DataLoader, Subset

from smp_strategy.errors import PeerFailedError, SMPError
from tests.unit.data_parallel.optimizers import ClipsAll, GlobalNorm, Lamb, Perturbs

STEPS, BATCH = 6, 8
PP2 = {"pipeline_parallel_degree": 2, "microbatches": 2}
IN_TURNS = {"pipeline_parallel_degree": 2, "microbatches": 4, "pipeline": "1f1b", "virtual_pipeline_degree": 2}
SDP2 = {"sharded_data_parallel_degree": 2}
REPLICAS = {"pipeline_parallel_degree": 1}
ZERO1 = {"shard_optimizer_state": True}
TP2 = {"tensor_parallel_degree": 2}
CUTS = {
    "pp2": (2, PP2),
    "pp2 in chunks": (2, IN_TURNS),
    "sdp2": (2, SDP2),
    "zero1": (2, ZERO1),
    "tp2": (2, TP2),
    "pp2 zero1": (4, PP2 | ZERO1),
    "pp2 sdp2": (4, PP2 | SDP2),
    "tp2 sdp2": (4, TP2 | SDP2),
    "sdp2 zero1": (4, SDP2 | ZERO1),
}
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def adamw(self):
    return torch.optim.AdamW(self.parameters(), lr=0.05, eps=1e-3)


def optimizer_of(module):
    return module.optimizers().optimizer


def resets(self, *_):
    """Momentum begins anew for each parameter, and the count of steps."""
    if self.global_step == 3:
        optimizer = optimizer_of(self)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                optimizer.state[parameter]["exp_avg"].zero_()
                optimizer.state[parameter]["step"].zero_()


def forgets(self, *_):
    if self.global_step == 3:
        optimizer_of(self).state = collections.defaultdict(dict)


def logs_norms(self, *_):
    """A norm over all moments, which weights then follow."""
    norm = torch.stack([kept["exp_avg"].norm() for kept in optimizer_of(self).state.values()]).norm()
    self.log("norm", norm)
    with torch.no_grad():
        for parameter in self.parameters():
            parameter.mul_(1 - 0.1 * norm)


def keeps_more(self, *_):
    """An average of each parameter beside its moments, which changes places with it."""
    state = optimizer_of(self).state
    with torch.no_grad():
        for parameter in self.parameters():
            slow = state[parameter].setdefault("slow", parameter.detach().clone())
            slow.lerp_(parameter, 0.5)
            parameter.lerp_(slow, 0.3)


def sees_state_dict(self, *_):
    state = optimizer_of(self).state_dict()["state"]
    self.log("entries", float(len(state)))
    self.log("moments", sum(kept["exp_avg_sq"].sum() for kept in state.values()))


def saves_between(self, *_):
    """The library needs each rank's share in the middle of a hook."""
    state = optimizer_of(self).state
    next(iter(state.values()))["exp_avg"].mul_(0.5)
    self.trainer.strategy.optimizer_state(optimizer_of(self))
    next(iter(optimizer_of(self).state.values()))["exp_avg"].mul_(0.5)


def normed(self):
    """Hooks before and after each step: the weights together have a fixed norm, the gradients a logged one."""
    optimizer = adamw(self)
    seen = self.seen_norms = []

    @torch.no_grad()
    def rescale(*_):
        norm = torch.stack([parameter.norm() for parameter in self.parameters()]).norm()
        for parameter in self.parameters():
            parameter.mul_(3 / norm)

    def look(*_):
        seen.append(float(torch.stack([parameter.grad.norm() for parameter in self.parameters()]).norm()))

    optimizer.register_step_pre_hook(rescale)
    optimizer.register_step_post_hook(rescale)
    optimizer.register_step_post_hook(look)
    return optimizer


def schedule_free(self):
    return AdamWScheduleFree(self.parameters(), lr=0.05, eps=1e-3)


def switches(way):
    def of(self):
        return self.optimizers() if way == "wrapped" else optimizer_of(self)

    return {
        "configure_optimizers": schedule_free,
        "on_train_epoch_start": lambda self: of(self).train(),
        "on_train_epoch_end": lambda self: of(self).train(),
        "on_validation_epoch_start": lambda self: of(self).eval(),
        "on_validation_epoch_end": lambda self: of(self).train(),
    }


HOOKS = {
    **{
        each.__name__: {"configure_optimizers": adamw, "on_train_batch_end": each}
        for each in (resets, forgets, logs_norms, keeps_more, sees_state_dict, saves_between)
    },
    "hooks of the step": {"configure_optimizers": normed},
    "an average is evaluated": switches("bare"),
    "an average is evaluated, wrapped": switches("wrapped"),
}


def fit(folder, name, smp):
    def loader(self):
        data, strategy = toy_data(STEPS * BATCH), self.trainer.strategy
        if smp is None:
            return DataLoader(data, batch_size=BATCH)
        readers, reader = strategy.distributed_sampler_kwargs.values()
        size = BATCH // readers
        return DataLoader(Subset(data, [i for i in range(len(data)) if i // size % readers == reader]), batch_size=size)

    module = toy_module(train_dataloader=loader, val_dataloader=loader, **HOOKS[name])
    trainer = toy_trainer(folder, smp=smp, max_epochs=2, use_distributed_sampler=False, num_sanity_val_steps=0)
    trainer.fit(module)
    weights = {key: value.clone() for key, value in module.state_dict().items()}
    logged = {key: value for key, value in trainer.callback_metrics.items() if key in ("norm", "entries", "moments")}
    return weights, logged, getattr(module, "seen_norms", [])


# Each hook under two layouts, each layout with two hooks.
PAIRS = [(name, [*CUTS][(number + shift) % len(CUTS)]) for number, name in enumerate(HOOKS) for shift in (0, 4)]


@pytest.mark.parametrize(("name", "cut"), PAIRS)
def test_hooks_see_what_optimizers_keep_as_in_one_process(name, cut, tmp_path):
    ranks, smp = CUTS[cut]
    with quiet():
        expected = fit(tmp_path, name, None)
    for found in on_ranks(fit, ranks, tmp_path, name, smp):
        torch.testing.assert_close(found, expected, **CLOSE)


def error_of(folder, make, smp, overrides):
    def loader(self):
        return DataLoader(toy_data(16), batch_size=8)

    module = toy_module(train_dataloader=loader, configure_optimizers=lambda self: make(self.parameters()), **overrides)
    try:
        toy_trainer(folder, smp=smp, max_epochs=1, limit_val_batches=0).fit(module)
    except PeerFailedError:
        return ""
    except SMPError as error:
        return f"{module.trainer.global_step} steps: {error}"
    return "not refused"


def told(ranks, *arguments):
    found = {text for text in on_ranks(error_of, ranks, *arguments) if text}
    assert len(found) == 1, found
    return found.pop()


@pytest.mark.parametrize(
    ("make", "cut", "options"),
    [
        (ClipsAll, "pp2", "With `pipeline_parallel_degree` (2) each"),
        (Prodigy, "pp2 in chunks", "With `pipeline_parallel_degree` (2) each"),
        (Perturbs, "zero1", "With `shard_optimizer_state` (True) each"),
        (GlobalNorm, "pp2 zero1", "With `pipeline_parallel_degree` (2) and `shard_optimizer_state` (True) each"),
        (Prodigy, "sdp2", "`sharded_data_parallel_degree` (2) cuts"),
        (GlobalNorm, "tp2", "`tensor_parallel_degree` splits"),
    ],
)
def test_optimizers_that_relate_parameters_are_refused_before_a_step(make, cut, options, tmp_path):
    ranks, smp = CUTS[cut]
    text = told(ranks, tmp_path, make, smp, {})
    assert text.startswith("0 steps: ")
    assert options in text
    assert make.__name__ in text
    # Nobody is sent from one refusal into the next.
    assert "Use `shard_optimizer_state" not in text


@pytest.mark.parametrize("make", [Prodigy, GlobalNorm])
def test_replicas_that_update_everything_may_have_any_optimizer(make, tmp_path):
    assert on_ranks(error_of, 2, tmp_path, make, REPLICAS, {}) == ["not refused"] * 2


@pytest.mark.parametrize("cut", ["pp2", "pp2 zero1"])
def test_norms_of_single_parameters_stay_allowed_where_parameters_stay_whole(cut, tmp_path):
    ranks, smp = CUTS[cut]
    assert on_ranks(error_of, ranks, tmp_path, Lamb, smp, {}) == ["not refused"] * ranks


class InTwoSteps(torch.optim.SGD):
    def first_step(self):
        raise AssertionError("it is called once per microbatch")


def two_steps(self, batch, batch_idx):
    self.manual_backward(self.loss(batch))
    self.optimizers().first_step()


@pytest.mark.parametrize("cut", ["pp2", "sdp2"])
def test_steps_in_several_parts_are_refused_under_manual_optimization(cut, tmp_path):
    ranks, smp = CUTS[cut]
    overrides = {"training_step": two_steps, "automatic_optimization": False}
    assert "`first_step` of InTwoSteps in a step" in told(ranks, tmp_path, InTwoSteps, smp, overrides)


def one_rank_looks(self, *_):
    if self.trainer.is_global_zero:
        len(optimizer_of(self).state)


def test_a_hook_that_looks_on_one_rank_is_told(tmp_path):
    overrides = {"on_train_batch_end": one_rank_looks}
    texts = on_ranks(error_of, 2, tmp_path, torch.optim.AdamW, PP2, overrides)
    assert any("optimizer.state" in text for text in texts), texts
