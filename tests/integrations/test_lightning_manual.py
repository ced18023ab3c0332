"""Manual optimization: several optimizers, accumulation by hand, schedulers and clipping inside of the step."""

import pytest
import torch
from lightning_toy import CLASSES, FEATURES, on_ranks, quiet, toy_data, toy_module, toy_trainer
from torch import nn
from torch.utils.data import DataLoader

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
    "plateau": (classifier, {"training_step": plateau_step, "configure_optimizers": with_plateau}),
}


def fit(folder, name, smp, options):
    prepare, overrides = CASES[name]
    module = toy_module(**overrides)
    torch.manual_seed(1)
    prepare(module)
    trainer = toy_trainer(folder, smp=smp, max_steps=-1, max_epochs=1, **options)
    trainer.fit(module, DataLoader(toy_data(STEPS * BATCH), batch_size=BATCH))
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
        assert_same(expected, found, 0.0)


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_with_microbatches_the_weights_are_those_of_one_stage(name, pp, tmp_path):
    one = {"pipeline_parallel_degree": 1, "microbatches": 4}
    expected = on_ranks(fit, 1, tmp_path / "one", name, one, {})[0]
    for found in on_ranks(fit, pp, tmp_path / "smp", name, {**one, "pipeline_parallel_degree": pp}, {}):
        assert_same(expected, found, 0.0)
