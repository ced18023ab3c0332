"""DINO, whose teacher begins equal to its student and follows it in the step, and a normalizing flow."""

import copy

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from program_checks import alone, assert_alike, on_ranks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

FEATURES, WIDTH, BATCH = 16, 12, 4
SDP2 = {"sharded_data_parallel_degree": 2}
# The teacher moves, and the center is averaged, once per microbatch.
PP2 = {"pipeline_parallel_degree": 2, "microbatches": 1}


class Dino(L.LightningModule):
    """As in the authors' code: two views, centered and sharpened targets, momentum through ``data``."""

    def __init__(self):
        super().__init__()
        self.student = nn.Sequential(
            *(nn.Linear(FEATURES, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()),
            *(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU(), nn.Linear(WIDTH, 8)),
        )
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.register_buffer("center", torch.zeros(1, 8))

    def training_step(self, batch, batch_idx):
        views = [batch[0], batch[0].flip(1)]
        self.follow(0.9 + 0.01 * batch_idx)
        with torch.no_grad():
            targets = [self.teacher(view) for view in views]
        scores = [F.log_softmax(self.student(view) / 0.1, dim=-1) for view in views]
        terms = [
            -(F.softmax((target - self.center) / 0.04, dim=-1) * score).sum(-1).mean()
            for number, target in enumerate(targets)
            for other, score in enumerate(scores)
            if number != other
        ]
        self.update_center(torch.cat(targets))
        loss = sum(terms) / len(terms)
        self.log("loss", loss, sync_dist=True)
        return loss

    @torch.no_grad()
    def follow(self, momentum):
        for student, teacher in zip(self.student.parameters(), self.teacher.parameters(), strict=True):
            teacher.data.mul_(momentum).add_((1 - momentum) * student.detach().data)

    @torch.no_grad()
    def update_center(self, targets):
        self.center.mul_(0.9).add_(self.all_gather(targets).flatten(0, -2).mean(0, keepdim=True), alpha=0.1)

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", F.mse_loss(self.student(batch[0]), self.teacher(batch[0])), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.student.parameters(), lr=0.01, eps=1e-3)


class Coupling(nn.Module):
    """Affine coupling layer, as in the tutorials of Lightning."""

    def __init__(self, flips):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2 * FEATURES))
        self.scaling = nn.Parameter(torch.zeros(FEATURES))
        self.register_buffer("mask", ((torch.arange(FEATURES) + flips) % 2).float())

    def forward(self, z, ldj):
        s, t = self.network(z * self.mask).chunk(2, dim=1)
        factor = self.scaling.exp()
        s, t = torch.tanh(s / factor) * factor * (1 - self.mask), t * (1 - self.mask)
        z = (z + t) * torch.exp(s)
        ldj += s.sum(dim=1)
        return z, ldj


class Flow(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.flows = nn.ModuleList(Coupling(number) for number in range(4))

    def likelihood(self, x):
        z, ldj = x, torch.zeros(x.shape[0], device=self.device)
        for flow in self.flows:
            z, ldj = flow(z, ldj)
        prior = torch.distributions.Normal(0.0, 1.0)
        return -(ldj + prior.log_prob(z).sum(dim=1)).mean()

    def training_step(self, batch, batch_idx):
        return self.likelihood(batch[0])

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.likelihood(batch[0]), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01, eps=1e-3)


MODULES = {"dino": Dino, "flow": Flow}


def train(name, folder, smp=None):
    from smp_strategy import SMPStrategy

    torch.manual_seed(1)
    module = MODULES[name]()
    generator = torch.Generator().manual_seed(2)
    data = TensorDataset(torch.randn(4 * BATCH, FEATURES, generator=generator))
    loader = DataLoader(data, batch_size=BATCH)
    if smp == SDP2:
        loader = DataLoader(data, batch_size=BATCH // 2, sampler=DistributedSampler(data, shuffle=False))
    trainer = L.Trainer(
        use_distributed_sampler=False,
        **{"accelerator": "cpu", "devices": 1 if smp is None else 2, "max_epochs": 2, "default_root_dir": folder},
        **dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False),
        strategy="auto" if smp is None else SMPStrategy(**smp, restore_module="all"),
    )
    trainer.fit(module, loader, loader)
    logged = {key: value.item() for key, value in trainer.callback_metrics.items()}
    return logged, {key: value.detach().clone() for key, value in module.state_dict().items()}


@pytest.mark.parametrize("smp", [PP2, SDP2], ids=["pp2", "sdp2"])
@pytest.mark.parametrize("name", MODULES)
def test_it_trains_as_in_one_process(name, smp, tmp_path):
    expected = alone(train, name, tmp_path)
    for found in on_ranks(train, 2, name, tmp_path, smp):
        assert_alike(found, expected)
