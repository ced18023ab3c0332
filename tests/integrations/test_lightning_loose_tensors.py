"""Tensors that an optimizer trains and no module has: never trained in silence."""

import pytest
import torch
from lightning_toy import error_of, on_ranks, toy_loader, toy_module, toy_trainer
from torch import nn
from torch.nn.utils import parametrizations

PP2 = {"pipeline_parallel_degree": 2, "microbatches": 2}


def with_a_loose_tensor(folder, smp):
    scale = torch.ones(1, requires_grad=True)
    module = toy_module(
        training_step=lambda self, batch, number: nn.functional.cross_entropy(self.net(batch[0]) * scale, batch[1]),
        configure_optimizers=lambda self: torch.optim.SGD([*self.parameters(), scale], lr=0.1),
    )
    return error_of(lambda: toy_trainer(folder, smp=smp, max_epochs=1).fit(module, toy_loader()))


def with_a_block_of_later(folder, smp):
    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 1:
            self.more = nn.Linear(4, 4)
            self.trainer.optimizers[0].add_param_group({"params": list(self.more.parameters())})

    def training_step(self, batch, batch_idx):
        out = self.net(batch[0])
        return nn.functional.cross_entropy(self.more(out) if batch_idx else out, batch[1])

    module = toy_module(
        on_train_batch_start=on_train_batch_start,
        training_step=training_step,
        configure_optimizers=lambda self: torch.optim.SGD(self.parameters(), lr=0.1),
    )
    return error_of(lambda: toy_trainer(folder, smp=smp, max_epochs=1).fit(module, toy_loader()))


def test_a_tensor_of_no_module_is_refused_before_training(tmp_path):
    for ranks, smp in ((2, PP2), (2, {"pipeline_parallel_degree": 1})):
        for error in on_ranks(with_a_loose_tensor, ranks, tmp_path, smp):
            assert "SGD trains 1 tensor (shape [1]) that the module does not have" in error


def test_a_block_that_comes_later_is_refused_by_name(tmp_path):
    for error in on_ranks(with_a_block_of_later, 2, tmp_path, PP2):
        assert "`more.weight` and 1 more, which the module did not have in its first step" in error


def with_a_norm_of_later(folder, smp, norm, takes_off):
    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 1:
            takes_off(self.net[2]) if takes_off else norm(self.net[2])

    module = toy_module(on_train_batch_start=on_train_batch_start)
    if takes_off:
        norm(module.net[2])
    return error_of(lambda: toy_trainer(folder, smp=smp, max_epochs=1).fit(module, toy_loader()))


TP2 = {"tensor_parallel_degree": 2, "tensor_parallel": {"net.2": "column", "net.4": "row"}}
OF_WEIGHT = {
    "new parameters": (PP2, parametrizations.weight_norm, None, "makes a new parameter of `net.2.weight`"),
    "an older norm": (PP2, nn.utils.spectral_norm, None, "SpectralNorm was put on `net.2` after the first step"),
    "an older norm that goes": (
        *(PP2, nn.utils.spectral_norm, nn.utils.remove_spectral_norm),
        "SpectralNorm was to be removed from a Linear after the first step",
    ),
    "a split layer": (TP2, parametrizations.spectral_norm, None, "`weight` of a Linear cannot be replaced"),
    "one tensor": (PP2, parametrizations.spectral_norm, None, "nothing"),
}


@pytest.mark.parametrize("kind", OF_WEIGHT)
def test_a_norm_of_a_weight_that_comes_or_goes_later_is_adopted_or_refused_by_name(kind, tmp_path):
    smp, norm, takes_off, said = OF_WEIGHT[kind]
    for error in on_ranks(with_a_norm_of_later, 2, tmp_path, smp, norm, takes_off):
        assert said in error
