"""Manual optimization: several optimizers, accumulation by hand, schedulers and clipping inside of the step."""

import re

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning_toy import CLASSES, FEATURES, on_ranks, quiet, toy_data, toy_module, toy_trainer
from torch import nn
from torch.utils.data import DataLoader, Subset

from smp_strategy.errors import PeerFailedError, UnsupportedError
from smp_strategy.pipeline.microbatch import split

STEPS, BATCH = 6, 8


def blocks(inputs, outputs):
    layers = (nn.Linear(inputs, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, outputs))
    return nn.Sequential(*layers)


def gan_parts(self):
    self.automatic_optimization = False
    self.generator, self.discriminator = blocks(FEATURES, FEATURES), blocks(FEATURES, 1)
    del self.net


def gan_optimizers(self):
    optimizers = [torch.optim.AdamW(part.parameters(), lr=0.02) for part in (self.generator, self.discriminator)]
    return optimizers, [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) for optimizer in optimizers]


def gan_step(self, batch, batch_idx):
    """Lightning's own example, on vectors."""
    real, _ = batch
    optimizer_g, optimizer_d = self.optimizers()
    noise = real.flip(1)

    def adversarial_loss(verdict, target):
        return nn.functional.binary_cross_entropy_with_logits(verdict, target)

    self.toggle_optimizer(optimizer_g)
    self.generated = self.generator(noise)
    valid = torch.ones(real.size(0), 1)
    g_loss = adversarial_loss(self.discriminator(self.generator(noise)), valid)
    self.log("g_loss", g_loss, prog_bar=True)
    self.manual_backward(g_loss)
    optimizer_g.step()
    optimizer_g.zero_grad()
    self.untoggle_optimizer(optimizer_g)

    self.toggle_optimizer(optimizer_d)
    real_loss = adversarial_loss(self.discriminator(real), valid)
    fake = torch.zeros(real.size(0), 1)
    fake_loss = adversarial_loss(self.discriminator(self.generated.detach()), fake)
    d_loss = (real_loss + fake_loss) / 2
    self.log("d_loss", d_loss, prog_bar=True)
    self.manual_backward(d_loss)
    self.clip_gradients(optimizer_d, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
    optimizer_d.step()
    optimizer_d.zero_grad()
    self.untoggle_optimizer(optimizer_d)
    for scheduler in self.lr_schedulers():
        scheduler.step()


GAN = (gan_parts, {"training_step": gan_step, "configure_optimizers": gan_optimizers})


def classifier(self):
    self.automatic_optimization = False
    self.net = nn.Sequential(*blocks(FEATURES, 16), nn.Tanh(), nn.Linear(16, CLASSES))


def tied_classifier(self):
    classifier(self)
    self.net[4].weight = self.net[2].weight


def sgd(self):
    return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def accumulating_step(self, batch, batch_idx):
    optimizer = self.optimizers()
    loss = self.loss(batch)
    self.manual_backward(loss / 2)
    if (batch_idx + 1) % 2 == 0:
        optimizer.step()
        optimizer.zero_grad()
    self.log("loss", loss)
    return loss


def two_losses_step(self, batch, batch_idx):
    """The second loss shares its first layers with the first one."""
    optimizer = self.optimizers()
    inputs, targets = batch
    hidden = self.net[1](self.net[0](inputs))
    logits = self.net[2:](hidden)
    optimizer.zero_grad()
    self.manual_backward(nn.functional.cross_entropy(logits, targets), retain_graph=True)
    self.manual_backward(hidden.pow(2).mean() + logits.logsumexp(1).mean())
    optimizer.step()
    return {"loss": hidden.detach().mean(), "logits": logits.detach()}


def again_after_the_step(self, batch, batch_idx):
    """A second pass with the new weights, and its own optimizer step without zero_grad in between."""
    optimizer = self.optimizers(use_pl_optimizer=False)
    optimizer.zero_grad()
    for _ in range(2):
        loss = self.loss(batch)
        self.manual_backward(loss)
        optimizer.step()
    self.log("loss", loss)


def two_halves(self):
    return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.net[:3], self.net[3:])]


def toggling_and_reading_step(self, batch, batch_idx):
    """The dry run ends at the value that it does not have, while weights are toggled."""
    for optimizer in self.optimizers():
        self.toggle_optimizer(optimizer)
        loss = self.loss(batch)
        if loss > 0:
            loss = loss * 2
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.untoggle_optimizer(optimizer)
    assert all(parameter.requires_grad for parameter in self.parameters())


def toggle_model_step(self, batch, batch_idx):
    for optimizer in self.optimizers():
        with optimizer.toggle_model(sync_grad=batch_idx % 2 == 1):
            self.manual_backward(self.loss(batch))
            if batch_idx % 2 == 1:
                optimizer.step()
                optimizer.zero_grad()


def with_plateau(self):
    optimizer = sgd(self)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    return [optimizer], [scheduler]


def plateau_step(self, batch, batch_idx):
    optimizer, scheduler = self.optimizers(), self.lr_schedulers()
    loss = self.loss(batch)
    optimizer.zero_grad()
    self.manual_backward(loss)
    optimizer.step()
    scheduler.step(loss.detach())


CASES = {
    "GAN": GAN,
    "accumulation": (classifier, {"training_step": accumulating_step, "configure_optimizers": sgd}),
    "two losses": (classifier, {"training_step": two_losses_step, "configure_optimizers": sgd}),
    "a second step": (classifier, {"training_step": again_after_the_step, "configure_optimizers": sgd}),
    "values": (classifier, {"training_step": toggling_and_reading_step, "configure_optimizers": two_halves}),
    "a second step, tied": (
        tied_classifier,
        {"training_step": again_after_the_step, "configure_optimizers": sgd},
    ),
    "toggle_model": (classifier, {"training_step": toggle_model_step, "configure_optimizers": two_halves}),
    "plateau": (classifier, {"training_step": plateau_step, "configure_optimizers": with_plateau}),
}


def fit(folder, name, smp, options, train_dataloader=None, batch_size=BATCH):
    prepare, overrides = CASES[name]
    if train_dataloader is not None:
        overrides = {**overrides, "train_dataloader": train_dataloader}
    module = toy_module(**overrides)
    torch.manual_seed(1)
    prepare(module)
    trainer = toy_trainer(folder, smp=smp, max_steps=-1, max_epochs=1, **options)
    loader = None if train_dataloader else DataLoader(toy_data(STEPS * BATCH), batch_size=batch_size)
    trainer.fit(module, loader)
    assert not {"toggle_optimizer", "untoggle_optimizer", "clip_gradients"}.intersection(vars(module))
    trainer.save_checkpoint(folder / "end.ckpt")
    found = torch.load(folder / "end.ckpt", weights_only=True)
    return {
        "weights": found["state_dict"],
        "global_step": trainer.global_step,
        "rates": [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups],
        "logged": {key: float(value) for key, value in trainer.callback_metrics.items()},
    }


def assert_same(expected, found, tolerance):
    assert found["global_step"] == expected["global_step"]
    assert found["rates"] == expected["rates"]
    assert found["logged"] == pytest.approx(expected["logged"], rel=1e-5)
    assert list(found["weights"]) == list(expected["weights"])
    for key, value in expected["weights"].items():
        if tolerance:
            torch.testing.assert_close(found["weights"][key], value, rtol=tolerance, atol=tolerance, msg=key)
        else:
            assert torch.equal(found["weights"][key], value), key


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_at_one_microbatch_the_weights_are_those_of_plain_lightning(name, pp, tmp_path):
    with quiet():
        expected = fit(tmp_path / "one", name, None, {})
    smp = {"pipeline_parallel_degree": pp, "microbatches": 1}
    for found in on_ranks(fit, pp, tmp_path / "smp", name, smp, {}):
        assert_same(expected, found, 1e-6 if "tied" in name else 0.0)


# The discriminator runs in several segments of a stage: sums within a microbatch are taken in another order. So are
# those over stages.
TOLERANCE = {"GAN": 1e-5, "a second step, tied": 1e-6}


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_with_microbatches_the_weights_are_those_of_one_stage(name, pp, tmp_path):
    one = {"pipeline_parallel_degree": 1, "microbatches": 4}
    expected = on_ranks(fit, 1, tmp_path / "one", name, one, {})[0]
    for found in on_ranks(fit, pp, tmp_path / "smp", name, {**one, "pipeline_parallel_degree": pp}, {}):
        assert_same(expected, found, TOLERANCE.get(name, 0.0))


def gan_by_hand(microbatches):
    """What manual optimization over microbatches means, in plain PyTorch."""
    module = toy_module(**GAN[1])
    torch.manual_seed(1)
    gan_parts(module)
    (opt_g, opt_d), schedulers = gan_optimizers(module)
    bce = nn.functional.binary_cross_entropy_with_logits
    for real, _ in DataLoader(toy_data(STEPS * BATCH), batch_size=BATCH):
        parts, sizes = split(real, microbatches)
        generated = [module.generator(part.flip(1)) for part in parts]
        for fake, size in zip(generated, sizes, strict=True):
            loss = bce(module.discriminator(fake), torch.ones(size, 1))
            (loss * (size / BATCH)).backward()
        opt_d.zero_grad()  # toggled: the discriminator gets no gradients
        opt_g.step()
        opt_g.zero_grad()
        for part, fake, size in zip(parts, generated, sizes, strict=True):
            loss = bce(module.discriminator(part), torch.ones(size, 1))
            loss = (loss + bce(module.discriminator(fake.detach()), torch.zeros(size, 1))) / 2
            (loss * (size / BATCH)).backward()
        torch.nn.utils.clip_grad_norm_(module.discriminator.parameters(), 0.5)
        opt_d.step()
        opt_d.zero_grad()
        for scheduler in schedulers:
            scheduler.step()
    return module.state_dict()


def test_one_stage_has_the_weights_of_the_same_loops_by_hand(tmp_path):
    smp = {"pipeline_parallel_degree": 1, "microbatches": 4}
    found = on_ranks(fit, 1, tmp_path, "GAN", smp, {})[0]["weights"]
    for key, value in gan_by_hand(4).items():
        assert torch.equal(found[key], value), key


def fit_share(folder, name, smp):
    """Train on this replica's share of each batch."""

    def train_dataloader(self):
        mesh = self.trainer.strategy.mesh
        mine = [index for index in range(STEPS * BATCH) if index // BATCH % mesh.dp == mesh.dp_rank]
        return DataLoader(Subset(toy_data(STEPS * BATCH), mine), batch_size=BATCH)

    return fit(folder, name, smp, {"use_distributed_sampler": False}, train_dataloader)


@pytest.mark.parametrize("name", CASES)
def test_two_replicas_have_the_weights_of_one_process_with_batches_of_both(name, tmp_path):
    with quiet():
        expected = fit(tmp_path / "one", name, None, {}, batch_size=2 * BATCH)
    smp = {"pipeline_parallel_degree": 2, "microbatches": 2}
    for found in on_ranks(fit_share, 4, tmp_path / "smp", name, smp):
        assert found["global_step"] == expected["global_step"]
        for key, value in expected["weights"].items():
            torch.testing.assert_close(found["weights"][key], value, rtol=1e-4, atol=1e-5)


def test_mixed_precision_has_the_weights_of_plain_lightning(tmp_path):
    with quiet():
        expected = fit(tmp_path / "one", "GAN", None, {"precision": "bf16-mixed"})
    smp = {"pipeline_parallel_degree": 2, "microbatches": 1}
    for found in on_ranks(fit, 2, tmp_path / "smp", "GAN", smp, {"precision": "bf16-mixed"}):
        assert_same(expected, found, 0.0)


class Watching(Callback):
    """Counts hooks and looks at gradients."""

    def __init__(self):
        self.seen = []

    def on_before_backward(self, trainer, module, loss):
        self.seen.append(("before backward", round(float(loss), 4)))

    def on_after_backward(self, trainer, module):
        self.seen.append(("after backward", module.net[0].weight.grad is not None))

    def on_before_optimizer_step(self, trainer, module, optimizer):
        norms = [parameter.grad.norm() for parameter in module.parameters()]
        module.log("norm", torch.stack(norms).norm())
        self.seen.append(("before step", round(float(torch.stack(norms).norm()), 4), trainer.global_step))


def watch(folder, smp):
    callback = Watching()
    found = fit(folder, "plateau", smp, {"callbacks": [callback]})
    return callback.seen, found["logged"]


@pytest.mark.parametrize("pp", [2, 4])
def test_hooks_run_once_per_batch_and_see_all_gradients(pp, tmp_path):
    with quiet():
        expected, logged = watch(tmp_path / "one", None)
    smp = {"pipeline_parallel_degree": pp, "microbatches": 4}
    for seen, also_logged in on_ranks(watch, pp, tmp_path / "smp", smp):
        assert [name for name, *_ in seen] == [name for name, *_ in expected]
        assert seen == [(name, *(pytest.approx(value, abs=2e-4) for value in values)) for name, *values in expected]
        assert also_logged == pytest.approx(logged, rel=1e-4)


def refusal(folder, step, microbatches, **overrides):
    module = toy_module(training_step=step, configure_optimizers=sgd, **overrides)
    classifier(module)
    trainer = toy_trainer(folder, smp={"pipeline_parallel_degree": 2, "microbatches": microbatches}, max_epochs=1)
    try:
        trainer.fit(module, DataLoader(toy_data(BATCH), batch_size=BATCH))
    except UnsupportedError as error:
        return str(error)
    except PeerFailedError:
        return ""
    return "not refused"


FIRST = toy_data(BATCH).tensors[0][0]


def is_first(batch):
    return torch.equal(batch[0][0], FIRST)


def unlike_barriers(self, batch, batch_idx):
    loss = self.loss(batch)
    if is_first(batch):
        self.optimizers().zero_grad()
    self.manual_backward(loss)


def ends_early(self, batch, batch_idx):
    if is_first(batch):
        return
    self.manual_backward(self.loss(batch))


def with_closure(self, batch, batch_idx):
    self.optimizers().step(lambda: self.manual_backward(self.loss(batch)))


def plain_backward(self, batch, batch_idx):
    self.loss(batch).backward()


def clips_itself(self, batch, batch_idx):
    self.manual_backward(self.loss(batch))
    nn.utils.clip_grad_norm_(self.parameters(), 1.0)


def graph_of_the_graph(self, batch, batch_idx):
    self.manual_backward(self.loss(batch), create_graph=True)


def different_clipping(self, batch, batch_idx):
    self.manual_backward(self.loss(batch))
    self.clip_gradients(self.optimizers(), gradient_clip_val=float(batch[0].sum().abs()))


REFUSED = {
    unlike_barriers: "Microbatch . calls .* where microbatch 0 calls .*: .*`microbatches=1`",
    ends_early: "Microbatch . (has ended|calls `manual_backward`) where microbatch 0",
    with_closure: r"`optimizer.step\(closure\)` under manual",
    plain_backward: r"`backward` of a placed tensor .*self.manual_backward\(loss\)",
    clips_itself: r"of a gradient in a training step.*self.clip_gradients",
    graph_of_the_graph: "`manual_backward` with create_graph is not supported",
    different_clipping: "`clip_gradients` is done once for the batch, but its microbatches give it different arguments",
}


@pytest.mark.parametrize("step", REFUSED, ids=lambda step: step.__name__)
def test_what_cannot_be_done_once_is_refused_with_the_remedy(step, tmp_path):
    messages = {message for message in on_ranks(refusal, 2, tmp_path, step, 4) if message}
    assert len(messages) == 1, messages
    assert re.search(REFUSED[step], messages.pop(), re.DOTALL)


def test_paths_may_differ_at_one_microbatch(tmp_path):
    assert on_ranks(refusal, 2, tmp_path, unlike_barriers, 1) == ["not refused"] * 2


def twice(self, batch, batch_idx):
    loss = self.loss(batch)
    self.manual_backward(loss)
    self.manual_backward(loss)


def test_a_second_backward_without_retain_graph_is_the_error_of_one_process(tmp_path):
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        on_ranks(refusal, 2, tmp_path, twice, 2)


def zeroes(self, optimizer):
    optimizer.zero_grad()


def refusal_in_a_hook(folder):
    return refusal(folder, plain_step, 2, on_before_optimizer_step=zeroes)


def plain_step(self, batch, batch_idx):
    self.manual_backward(self.loss(batch))
    self.optimizers().step()


def test_a_hook_that_sees_gradients_cannot_call_what_is_done_once(tmp_path):
    messages = {message for message in on_ranks(refusal_in_a_hook, 2, tmp_path) if message}
    assert len(messages) == 1, messages
    assert "`zero_grad` of optimizer 0 is called in a hook that sees gradients" in messages.pop()


# Schedulers in hooks


def halved(self):
    optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
    return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def on_a_plateau(self):
    optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
    return [optimizer], [torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)]


def logging_step(self, batch, batch_idx):
    loss = self.loss(batch)
    self.log("loss", loss, on_epoch=True)
    self.manual_backward(loss)
    self.optimizers().step()
    self.optimizers().zero_grad()


def next_rate(self, *args):
    self.lr_schedulers().step()


def next_rate_on_a_plateau(self):
    self.lr_schedulers().step(self.trainer.callback_metrics["loss_epoch"])


SCHEDULES = [
    (halved, "on_train_epoch_end", next_rate),
    (halved, "on_train_batch_end", next_rate),
    (on_a_plateau, "on_train_epoch_end", next_rate_on_a_plateau),
]


def fit_with_schedule(folder, smp, optimizers, hook, method):
    module = toy_module(training_step=logging_step, configure_optimizers=optimizers, **{hook: method})
    module.automatic_optimization = False
    trainer = toy_trainer(folder, smp=smp, max_epochs=3)
    trainer.fit(module, DataLoader(toy_data(2 * BATCH), batch_size=BATCH))
    trainer.save_checkpoint(folder / "end.ckpt")
    weights = torch.load(folder / "end.ckpt", weights_only=True)["state_dict"]
    return trainer.optimizers[0].param_groups[0]["lr"], weights


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: f"{schedule[2].__name__} {schedule[1]}")
def test_schedulers_may_be_stepped_in_hooks(schedule, pp, tmp_path):
    with quiet():
        rate, expected = fit_with_schedule(tmp_path / "one", None, *schedule)
    assert rate < 0.1
    for found, weights in on_ranks(
        fit_with_schedule, pp, tmp_path / "smp", {"pipeline_parallel_degree": pp, "microbatches": 1}, *schedule
    ):
        assert found == rate
        assert all(torch.equal(weights[key], value) for key, value in expected.items())
