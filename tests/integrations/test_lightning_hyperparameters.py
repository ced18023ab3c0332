"""Networks and optimizers among the hyperparameters of a checkpoint: they have the values of the run, on any layout."""

import functools
from importlib import import_module

import pytest
import torch
from lightning_toy import NEWER, on_ranks, quiet, toy_loader, toy_trainer
from torch import nn

lightning, callbacks = import_module(NEWER), import_module(f"{NEWER}.callbacks")
LAYOUTS = {
    "pp2": {"pipeline_parallel_degree": 2, "microbatches": 2},
    "sdp2": {"sharded_data_parallel_degree": 2},
    "tp2": {"tensor_parallel_degree": 2},
    "zero1": {"pipeline_parallel_degree": 1, "shard_optimizer_state": True},
    "pp2-sharded": {"pipeline_parallel_degree": 2, "microbatches": 2, "state_dict_type": "sharded"},
    "sdp2-sharded": {"sharded_data_parallel_degree": 2, "state_dict_type": "sharded"},
}


class Scaled(nn.Module):
    """A loss with a parameter, and with a buffer that is in no state dict."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("unsaved", torch.full((1,), 3.0), persistent=False)

    def forward(self, outputs, targets):
        return nn.functional.cross_entropy(outputs * self.scale, targets) + 0 * self.unsaved


class Given(lightning.LightningModule):
    """Made of its arguments, as configs make it, and saves them."""

    def __init__(self, net, parts, optimizer):
        super().__init__()
        self.save_hyperparameters()
        self.net, self.head, self.loss = net, parts["head"][0], parts["loss"].func

    def training_step(self, batch, batch_idx):
        return self.loss(self.head(self.net(batch[0])), batch[1])

    def configure_optimizers(self):
        return self.hparams.optimizer


class Saving(callbacks.Callback):
    def __init__(self, path):
        self.path = path

    def on_train_epoch_end(self, trainer, pl_module):  # the module is spread
        trainer.save_checkpoint(self.path)


def train(folder, smp):
    torch.manual_seed(0)
    layers = (nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh())
    net, head, loss = nn.Sequential(*layers), nn.Linear(8, 4), Scaled()
    parameters = [*net.parameters(), *head.parameters(), *loss.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=0.05, eps=1e-3)
    module = Given(net, {"head": [head], "loss": functools.partial(loss)}, optimizer)
    trainer = toy_trainer(
        folder, smp=smp, max_epochs=1, callbacks=[Saving(folder / "x.ckpt")], use_distributed_sampler=False
    )
    trainer.fit(module, toy_loader(shuffle=False))


def hyper_parameters(path):
    content = torch.load(path / "meta.pt" if path.is_dir() else path, weights_only=False)
    return content["hyper_parameters"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_networks_and_optimizers_among_hyperparameters_are_saved_as_by_one_process(tmp_path, layout):
    plain, spread = tmp_path / "plain", tmp_path / "spread"
    with quiet():
        train(plain, None)
        on_ranks(train, 2, spread, LAYOUTS[layout])
        expected, found = (hyper_parameters(folder / "x.ckpt") for folder in (plain, spread))
    modules = [(each["net"], each["parts"]["head"][0], each["parts"]["loss"].func) for each in (found, expected)]
    for mine, theirs in zip(*modules, strict=True):
        assert [type(part) for part in mine.modules()] == [type(part) for part in theirs.modules()]
        assert [sorted(vars(part)) for part in mine.modules()] == [sorted(vars(part)) for part in theirs.modules()]
        assert [type(each) for each in mine.parameters()] == [type(each) for each in theirs.parameters()]
        torch.testing.assert_close(mine.state_dict(), theirs.state_dict())
        torch.testing.assert_close(dict(mine.named_buffers()), dict(theirs.named_buffers()))
    assert found["optimizer"].param_groups[0]["params"][0] is found["net"][0].weight
    torch.testing.assert_close(found["optimizer"].state_dict(), expected["optimizer"].state_dict())
    if "sharded" not in layout:
        with quiet():
            module = Given.load_from_checkpoint(spread / "x.ckpt", weights_only=False)
        saved = torch.load(spread / "x.ckpt", weights_only=False)["state_dict"]
        torch.testing.assert_close(dict(module.state_dict()), dict(saved), rtol=0, atol=0)
