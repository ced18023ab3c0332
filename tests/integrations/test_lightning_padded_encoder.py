"""``nn.TransformerEncoder`` with a padding mask has the values of one process in all positions, also in validation."""

import pytest
import torch
from lightning_toy import on_ranks, shared_loader, toy_module, toy_trainer
from torch import nn

LAYOUTS = {
    "pp2": {"pipeline_parallel_degree": 2, "microbatches": 2},
    "sdp2": {"sharded_data_parallel_degree": 2},
    "tp2": {"tensor_parallel_degree": 2},
    "replicas": {"pipeline_parallel_degree": 1},
}


class Padded(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.embed = nn.Linear(8, 8)
        count, num = (4, 1) if kind == "units" else (1, 4)
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.encoders = nn.ModuleList(nn.TransformerEncoder(layer, num, norm=nn.LayerNorm(8)) for _ in range(count))
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        steps = x[:, None] * torch.linspace(0.5, 1, 5)[None, :, None]
        padding = torch.arange(5) > (x[:, :1].abs() * 3).long().clamp(0, 3)
        if self.kind == "placed":  # values and mask are on one stage
            steps = self.embed(steps)
            padding = padding.logical_and(steps[..., 0] < 100)
        for encoder in self.encoders:
            steps = encoder(steps, src_key_padding_mask=padding)
        return self.head(steps).mean(1)


def train(folder, smp, kind):
    def validation_step(self, batch, batch_idx):
        self.log("found", self.loss(batch), sync_dist=True)

    module = toy_module(validation_step=validation_step)
    torch.manual_seed(0)
    module.net = Padded(kind)
    trainer = toy_trainer(folder, smp=smp, max_epochs=1, use_distributed_sampler=False)
    trainer.fit(module, shared_loader(trainer, smp), shared_loader(trainer, smp))
    values = {name: value.clone() for name, value in module.state_dict().items()}
    return {**values, "found": trainer.callback_metrics["found"]}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["plain", "placed", "units"])
def test_padded_positions_are_those_of_one_process(tmp_path, kind, layout):
    (expected,) = on_ranks(train, 1, tmp_path, None, kind)
    for found in on_ranks(train, 2, tmp_path, LAYOUTS[layout], kind):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
