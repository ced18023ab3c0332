"""Hooks that average, clip, log, copy and swap weights do what they do in one process."""

import copy
from importlib import import_module

import pytest
import torch
from lightning_toy import FEATURES, NEWER, metrics_of, on_ranks, quiet, toy_loader, toy_module, toy_trainer
from torch import nn

MICROBATCHES, BATCH = 4, 8
callbacks = import_module(f"{NEWER}.callbacks")


def smp(degree, **options):
    return {"pipeline_parallel_degree": degree, "microbatches": MICROBATCHES, **options}


def train(folder, smp_options, module, *user_callbacks, epochs=2, resume=None):
    """In one process with the microbatches as batches, if the statistics of batches matter."""
    plain = smp_options is None and any(isinstance(part, nn.BatchNorm1d) for part in module.modules())
    trainer = toy_trainer(
        folder,
        smp=smp_options,
        max_epochs=epochs,
        callbacks=list(user_callbacks),
        accumulate_grad_batches=MICROBATCHES if plain else 1,
    )
    size = BATCH // MICROBATCHES if plain else BATCH
    loader = toy_loader(shuffle=False, batch_size=size)
    trainer.fit(module, loader, toy_loader(shuffle=False, batch_size=size), ckpt_path=resume)
    trainer.save_checkpoint(folder / "end.ckpt")
    return trainer


def deeper(norm=nn.LayerNorm, **overrides):
    """Six units."""
    module = toy_module(**overrides)
    module.net = nn.Sequential(
        nn.Linear(FEATURES, 16), norm(16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16),
        nn.LayerNorm(16), nn.Linear(16, 4),
    )  # fmt: skip
    return module


def parameters_of(module):
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def assert_same(found, expected, rtol=1e-5, atol=1e-6):
    assert list(found) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=rtol, atol=atol, msg=lambda text, name=name: name + text)


# Lightning's own callbacks


def average(folder, smp_options, kind, resume):
    made = {
        "EMA": lambda: callbacks.EMAWeightAveraging(decay=0.8),
        "mean": lambda: callbacks.WeightAveraging(use_buffers=False),
        "SWA": lambda: callbacks.StochasticWeightAveraging(swa_lrs=0.02, swa_epoch_start=2),
        "SWA with statistics": lambda: callbacks.StochasticWeightAveraging(swa_lrs=0.02, swa_epoch_start=2),
    }[kind]
    module = deeper(nn.LayerNorm if kind == "SWA" else nn.BatchNorm1d)
    trainer = train(folder, smp_options, module, made(), epochs=4)
    metrics = metrics_of(trainer)
    metrics.pop("train_loss_step")  # of a microbatch in one process
    if resume:
        module = deeper(nn.BatchNorm1d)
        train(folder, smp_options, module, made(), epochs=6, resume=folder / "end.ckpt")
    return metrics, module.state_dict(), torch.load(folder / "end.ckpt", weights_only=False)


@pytest.mark.dear
@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("kind", ["EMA", "mean", "SWA", "SWA with statistics"])
def test_lightnings_averages_are_those_of_one_process(kind, pp, tmp_path):
    resume = not kind.startswith("SWA")
    with quiet():
        metrics, weights, checkpoint = average(tmp_path / "one", None, kind, resume)
    for found in on_ranks(average, pp, tmp_path / "smp", smp(pp), kind, resume):
        assert found[0] == pytest.approx(metrics, rel=1e-4)
        assert_same(found[1], weights)
    for key in ("state_dict", "current_model_state", "averaging_state"):
        assert (key in checkpoint) == (key in found[2])
        if key in checkpoint:
            assert_same(found[2][key], checkpoint[key])
    if not resume:
        [mine], [plain] = ([v for k, v in c["callbacks"].items() if "Stochastic" in k] for c in (found[2], checkpoint))
        assert_same(mine["average_model_state"], plain["average_model_state"])
        assert mine["n_averaged"] == plain["n_averaged"] > 0


# Averages by hand


class CopyOfTheModule(callbacks.Callback):
    """A deep copy that is swapped in for validation."""

    def __init__(self, when):
        self.when = when

    def start(self, trainer, pl_module):
        self.average = copy.deepcopy(pl_module)

    def on_fit_start(self, trainer, pl_module):
        if self.when == "on_fit_start":
            self.start(trainer, pl_module)

    def on_train_start(self, trainer, pl_module):
        if self.when == "on_train_start":
            self.start(trainer, pl_module)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        with torch.no_grad():
            for mean, current in zip(self.average.parameters(), pl_module.parameters(), strict=True):
                mean.mul_(0.9).add_(current, alpha=0.1)

    def swap(self, pl_module):
        for mean, current in zip(self.average.parameters(), pl_module.parameters(), strict=True):
            kept = current.data.clone()
            current.data.copy_(mean.data)
            mean.data.copy_(kept)

    def on_validation_start(self, trainer, pl_module):
        if hasattr(self, "average"):
            self.swap(pl_module)

    def on_validation_end(self, trainer, pl_module):
        if hasattr(self, "average"):
            self.swap(pl_module)

    def result(self):
        return parameters_of(self.average)


class Shadows(CopyOfTheModule):
    """The other common way: a dict of tensors, and parameters that point to them during validation."""

    def start(self, trainer, pl_module):
        self.shadow = {name: p.data.clone() for name, p in pl_module.named_parameters() if p.requires_grad}

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        for name, parameter in pl_module.named_parameters():
            if parameter.requires_grad:
                self.shadow[name] = ((1.0 - 0.9) * parameter.data + 0.9 * self.shadow[name]).clone()

    def on_validation_start(self, trainer, pl_module):
        self.backup = {}
        for name, parameter in pl_module.named_parameters():
            if hasattr(self, "shadow"):
                self.backup[name] = parameter.data
                parameter.data = self.shadow[name]

    def on_validation_end(self, trainer, pl_module):
        for name, parameter in pl_module.named_parameters():
            if name in self.backup:
                parameter.data = self.backup[name]
        self.backup = {}

    def result(self):
        return {name: tensor.clone() for name, tensor in self.shadow.items()}


class ForEach(CopyOfTheModule):
    """With the operations on lists."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        torch._foreach_lerp_(
            [p.detach() for p in self.average.parameters()], [p.detach() for p in pl_module.parameters()], 0.1
        )


def by_hand(folder, smp_options, kind, when):
    callback = kind(when)
    module = deeper()
    trainer = train(folder, smp_options, module, callback)
    return metrics_of(trainer), parameters_of(module), callback.result()


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("when", ["on_fit_start", "on_train_start"])
@pytest.mark.parametrize("kind", [CopyOfTheModule, Shadows, ForEach])
def test_averages_by_hand_are_those_of_one_process(kind, when, pp, tmp_path):
    with quiet():
        metrics, weights, averages = by_hand(tmp_path / "one", None, kind, when)
    for found in on_ranks(by_hand, pp, tmp_path / "smp", smp(pp), kind, when):
        assert found[0] == pytest.approx(metrics, rel=1e-4)
        assert_same(found[1], weights, rtol=1e-4, atol=1e-5)
        assert_same(found[2], averages, rtol=1e-4, atol=1e-5)


# Teacher and student in one module


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.student = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)


def distil(self, batch, batch_idx):
    with torch.no_grad():
        target = self.net.teacher(batch[0]).softmax(-1)
    return nn.functional.cross_entropy(self.net.student(batch[0] + 0.1), target + nn.functional.one_hot(batch[1], 4))


def teachers_loss(self, batch):
    return self.net.teacher(batch[0]).square().mean()


def follow(self, outputs, batch, batch_idx):
    for t, s in zip(self.net.teacher.parameters(), self.net.student.parameters(), strict=True):
        t.data.mul_(0.9).add_(s.data, alpha=1 - 0.9)


def follow_in_parts(self, outputs, batch, batch_idx):
    with torch.no_grad():
        for t, s in zip(self.net.teacher.parameters(), self.net.student.parameters(), strict=True):
            t.copy_(0.9 * t + 0.1 * s)
            t.view(-1)[0] = s.sum()


def momentum(folder, smp_options, hook):
    module = toy_module(
        training_step=distil,
        on_train_batch_end=hook,
        loss=lambda self, batch: self.net.teacher(batch[0]).square().mean(),
    )
    torch.manual_seed(1)
    module.net = Pair()
    trainer = toy_trainer(folder, smp=smp_options, max_epochs=2)
    trainer.fit(module, toy_loader(shuffle=False), toy_loader(shuffle=False))
    return metrics_of(trainer), module.state_dict()


@pytest.mark.dear
@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("hook", [follow, follow_in_parts])
def test_a_teacher_follows_its_student_across_stages(hook, pp, tmp_path):
    with quiet():
        metrics, weights = momentum(tmp_path, None, hook)
    for found in on_ranks(momentum, pp, tmp_path, smp(pp), hook):
        assert found[0] == pytest.approx(metrics, rel=1e-4)
        assert_same(found[1], weights, rtol=1e-4, atol=1e-5)


# Clipping, norms, vectors


def clip(self, outputs, batch, batch_idx):
    for parameter in self.parameters():
        parameter.data.clamp_(-0.1, 0.1)


def clip_after_the_step(self, epoch, batch_idx, optimizer, optimizer_closure):
    optimizer.step(closure=optimizer_closure)
    with torch.no_grad():
        for parameter in self.parameters():
            parameter.clamp_(-0.1, 0.1)


def log_norms(self):
    self.log("norm", sum(parameter.norm() for parameter in self.parameters()))
    self.log("largest", max(parameter.abs().max().item() for parameter in self.parameters()))
    vector = nn.utils.parameters_to_vector(self.parameters())
    self.log("vector", vector.norm())
    self.log_dict({f"mean/{name}": parameter.detach().mean() for name, parameter in self.named_parameters()})
    if vector.std() > 0.01:
        nn.utils.vector_to_parameters(0.99 * vector, self.parameters())
    with torch.no_grad():
        self.net[0].weight[0] = 0.5
        self.net[3].bias += self.net[7].weight.sum()


def clip_gradients_by_hand(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
    self.log("before", torch.stack([p.grad.norm() for p in self.parameters()]).norm())
    self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
    self.log("after", torch.stack([p.grad.norm() for p in self.parameters()]).norm())


def look_at_several_results(self):
    for name, parameter in self.named_parameters():
        weight = parameter.detach()
        largest, places = weight.max(dim=0)
        low, high = torch.aminmax(weight)
        spread, mean = torch.std_mean(weight)
        self.log_dict({f"{name}/low": low, f"{name}/high": high, f"{name}/spread": spread, f"{name}/mean": mean})
        self.log_dict({f"{name}/largest": largest.sum(), f"{name}/places": places.float().mean()})
        if weight.dim() == 2:
            self.log(f"{name}/spectrum", torch.linalg.svd(weight, full_matrices=False).S[0])
        first, second = weight.tensor_split(2)
        first.mul_(0.9)
        second += largest.max()


CHANGES = {
    "clipping": {"on_train_batch_end": clip},
    "clipping after the step": {"optimizer_step": clip_after_the_step},
    "norms": {"on_train_epoch_end": log_norms},
    "several results": {"on_train_epoch_end": look_at_several_results},
    "gradients": {"configure_gradient_clipping": clip_gradients_by_hand},
}


def change(folder, smp_options, name):
    module = deeper(**CHANGES[name])
    trainer = toy_trainer(folder, smp=smp_options, max_epochs=2)
    trainer.fit(module, toy_loader(shuffle=False), toy_loader(shuffle=False))
    return metrics_of(trainer), parameters_of(module)


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("name", CHANGES)
def test_weights_are_changed_and_logged_as_in_one_process(name, pp, tmp_path):
    with quiet():
        metrics, weights = change(tmp_path, None, name)
    for found in on_ranks(change, pp, tmp_path, smp(pp), name):
        assert found[0] == pytest.approx(metrics, rel=1e-4)
        assert_same(found[1], weights, rtol=1e-4, atol=1e-5)


# Calls of the model in hooks


def sample(self):
    with torch.no_grad():
        drawn = self.net(torch.ones(2, FEATURES))
    self.log("sample", drawn.sum() + self.net[0].bias.sum())
    self.drawn = float(drawn.max())


def call_in_hook(folder, smp_options):
    module = toy_module(on_validation_epoch_end=sample)
    trainer = toy_trainer(folder, smp=smp_options, max_epochs=2)
    trainer.fit(module, toy_loader(shuffle=False), toy_loader(shuffle=False))
    return metrics_of(trainer), module.drawn


@pytest.mark.dear
@pytest.mark.parametrize("pp", [2, 4])
def test_hooks_may_call_the_model(pp, tmp_path):
    with quiet():
        metrics, drawn = call_in_hook(tmp_path, None)
    for found in on_ranks(call_in_hook, pp, tmp_path, smp(pp)):
        assert found[0] == pytest.approx(metrics, rel=1e-5)
        assert found[1] == pytest.approx(drawn, rel=1e-5)


# Hooks that not all ranks run


def on_rank_zero(self):
    if self.trainer.is_global_zero:
        print(sum(float(parameter.norm()) for parameter in self.parameters()))


def gradients_on_rank_zero(self, optimizer):
    if self.trainer.is_global_zero:
        self.net[0].weight.grad.mul_(self.net[4].weight.grad.norm())


@pytest.mark.parametrize(
    "hook", [{"on_train_epoch_end": on_rank_zero}, {"on_before_optimizer_step": gradients_on_rank_zero}]
)
def test_a_hook_that_uses_weights_on_one_rank_only_ends_soon_and_says_why(hook, tmp_path):
    with pytest.raises(RuntimeError, match="same code"):
        on_ranks(fit_for_a_while, 2, tmp_path, hook, timeout=60)


def fit_for_a_while(folder, hook):
    toy_trainer(folder, smp=smp(2), max_epochs=1).fit(toy_module(**hook), toy_loader())


# Outside of hooks


def use_in_a_loader(folder):
    module = toy_module()
    used = []

    def collate(samples):
        if used:  # not before the first step
            module.net[0].weight.norm()
            module.net[4].weight.norm()
        used.append(1)
        return torch.utils.data.default_collate(samples)

    toy_trainer(folder, smp=smp(2), max_epochs=1).fit(module, toy_loader(collate_fn=collate))


def test_a_use_of_absent_weights_elsewhere_is_refused_by_name(tmp_path):
    with pytest.raises(RuntimeError, match=r"`net\.\d\.weight`, which are on stage \d"):
        on_ranks(use_in_a_loader, 2, tmp_path)
