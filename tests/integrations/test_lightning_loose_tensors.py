"""Tensors that an optimizer trains and no module has: never trained in silence."""

import torch
from lightning_toy import error_of, on_ranks, toy_loader, toy_module, toy_trainer
from torch import nn

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
