"""Modules as templates and tutorials of Lightning have them: configured by objects, with metrics, a GAN, a teacher."""

import functools

import lightning as L
import pytest
import torch
from program_checks import alone, assert_alike, on_ranks
from test_torchvision import COUNT, PP2, SDP2, loader_of
from torch import nn
from torchmetrics import MaxMetric, MeanMetric
from torchmetrics.classification.accuracy import Accuracy

FEATURES, CLASSES = 16, 3


class Dense(nn.Module):
    """The network of the template."""

    def __init__(self, width=16):
        super().__init__()
        self.model = nn.Sequential(
            nn.Linear(FEATURES, width),
            nn.LayerNorm(width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.LayerNorm(width),
            nn.ReLU(),
            nn.Linear(width, CLASSES),
        )

    def forward(self, x):
        return self.model(x.view(x.shape[0], -1))


class Template(L.LightningModule):
    """As in lightning-hydra-template: `net`, and partial optimizers, are hyperparameters."""

    def __init__(self, net, optimizer, scheduler, compile):
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.net = net
        self.criterion = nn.CrossEntropyLoss()
        self.train_acc = Accuracy(task="multiclass", num_classes=CLASSES)
        self.val_acc = Accuracy(task="multiclass", num_classes=CLASSES)
        self.train_loss, self.val_loss, self.val_acc_best = MeanMetric(), MeanMetric(), MaxMetric()

    def forward(self, x):
        return self.net(x)

    def on_train_start(self):
        self.val_loss.reset()
        self.val_acc.reset()
        self.val_acc_best.reset()

    def model_step(self, batch):
        x, y = batch
        logits = self.forward(x)
        loss = self.criterion(logits, y)
        return loss, torch.argmax(logits, dim=1), y

    def training_step(self, batch, batch_idx):
        loss, preds, targets = self.model_step(batch)
        self.train_loss(loss)
        self.train_acc(preds, targets)
        self.log("train/loss", self.train_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("train/acc", self.train_acc, on_step=False, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        loss, preds, targets = self.model_step(batch)
        self.val_loss(loss)
        self.val_acc(preds, targets)
        self.log("val/loss", self.val_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("val/acc", self.val_acc, on_step=False, on_epoch=True, prog_bar=True)

    def on_validation_epoch_end(self):
        self.val_acc_best(self.val_acc.compute())
        self.log("val/acc_best", self.val_acc_best.compute(), sync_dist=True, prog_bar=True)

    def setup(self, stage):
        if self.hparams.compile and stage == "fit":
            self.net = torch.compile(self.net)

    def configure_optimizers(self):
        optimizer = self.hparams.optimizer(params=self.trainer.model.parameters())
        scheduler = self.hparams.scheduler(optimizer=optimizer)
        plan = {"scheduler": scheduler, "monitor": "val/loss", "interval": "epoch", "frequency": 1}
        return {"optimizer": optimizer, "lr_scheduler": plan}


class Adversaries(L.LightningModule):
    """The GAN of Lightning's tutorial: two optimizers, by hand."""

    def __init__(self):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.LeakyReLU(0.2), nn.Linear(16, FEATURES), nn.Tanh())
        self.discriminator = nn.Sequential(nn.Linear(FEATURES, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))

    def adversarial_loss(self, found, wanted):
        return nn.functional.binary_cross_entropy_with_logits(found, wanted)

    def training_step(self, batch):
        real, _ = batch
        first, second = self.optimizers()
        noise = real[:, :4].type_as(real)
        valid, fake = torch.ones(len(real), 1).type_as(real), torch.zeros(len(real), 1).type_as(real)
        self.toggle_optimizer(first)
        loss = self.adversarial_loss(self.discriminator(self.generator(noise)), valid)
        self.log("g_loss", loss, prog_bar=True, on_step=False, on_epoch=True, sync_dist=True)
        self.manual_backward(loss)
        first.step()
        first.zero_grad()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        of_real = self.adversarial_loss(self.discriminator(real), valid)
        of_fake = self.adversarial_loss(self.discriminator(self.generator(noise).detach()), fake)
        loss = (of_real + of_fake) / 2
        self.log("d_loss", loss, prog_bar=True, on_step=False, on_epoch=True, sync_dist=True)
        self.manual_backward(loss)
        second.step()
        second.zero_grad()
        self.untoggle_optimizer(second)

    def configure_optimizers(self):
        make = functools.partial(torch.optim.Adam, lr=0.01, betas=(0.5, 0.999), eps=1e-3)
        return [make(self.generator.parameters()), make(self.discriminator.parameters())], []


class Distilled(L.LightningModule):
    """A student of a frozen teacher that it carries along."""

    def __init__(self, student, teacher):
        super().__init__()
        self.save_hyperparameters(ignore=["student", "teacher"])
        self.student, self.teacher = student, teacher.requires_grad_(False).eval()

    def training_step(self, batch, batch_idx):
        x, y = batch
        with torch.no_grad():
            wanted = self.teacher(x)
        logits = self.student(x)
        soft = nn.functional.kl_div(
            (logits / 2).log_softmax(-1), (wanted / 2).log_softmax(-1), log_target=True, reduction="batchmean"
        )
        loss = 0.5 * nn.functional.cross_entropy(logits, y) + 0.5 * 4 * soft
        self.log_dict({"soft": soft, "loss": loss}, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.student.parameters(), lr=0.1)


def template():
    return Template(
        Dense(),
        functools.partial(torch.optim.Adam, lr=0.01, eps=1e-3),
        functools.partial(torch.optim.lr_scheduler.ReduceLROnPlateau, mode="min", factor=0.1, patience=0),
        compile=False,
    )


MODULES = {"template": template, "gan": Adversaries, "teacher": lambda: Distilled(Dense(), Dense(32))}


def train(name, folder, smp=None):
    from smp_strategy import SMPStrategy

    torch.manual_seed(1)
    module = MODULES[name]()
    generator = torch.Generator().manual_seed(2)
    data = torch.utils.data.TensorDataset(
        torch.randn(2 * COUNT, FEATURES, generator=generator), torch.arange(2 * COUNT) % CLASSES
    )
    loader = loader_of(data, smp)
    trainer = L.Trainer(
        use_distributed_sampler=False,
        **{"accelerator": "cpu", "devices": 1 if smp is None else 2, "max_epochs": 3, "default_root_dir": folder},
        **dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False),
        strategy="auto" if smp is None else SMPStrategy(**smp, restore_module="all"),
        callbacks=[L.pytorch.callbacks.EarlyStopping("val/loss", patience=5)] if name == "template" else None,
    )
    trainer.fit(module, loader, loader)
    logged = {key: value.item() for key, value in trainer.callback_metrics.items()}
    weights = {key: value.detach().clone() for key, value in module.state_dict().items()}
    if name == "template":
        trainer.save_checkpoint(folder / "last.ckpt")
        again = Template.load_from_checkpoint(folder / "last.ckpt", weights_only=False)
        assert all(map(torch.equal, again.net.state_dict().values(), module.net.state_dict().values()))
    return logged, weights


@pytest.mark.parametrize("smp", [PP2, SDP2], ids=["pp2", "sdp2"])
@pytest.mark.parametrize("name", MODULES)
def test_it_trains_as_in_one_process(name, smp, tmp_path):
    expected = alone(train, name, tmp_path)
    for found in on_ranks(train, 2, name, tmp_path, smp):
        assert_alike(found, expected)
