"""Lightning's ``BaseFinetuning`` under ``sharded_data_parallel_degree``: layers are unfrozen during the run."""

import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from lightning_toy import on_ranks, quiet, toy_data, toy_module, toy_trainer
from torch.utils.data import DataLoader, Subset

BATCH = 8
LAYOUTS = {
    "2 shards": (2, {"pipeline_parallel_degree": 1, "sharded_data_parallel_degree": 2}),
    "2 shards of 2 stages": (4, {"pipeline_parallel_degree": 2, "microbatches": 2, "sharded_data_parallel_degree": 2}),
}


class Thaw(BaseFinetuning):
    """A layer more in each epoch."""

    def freeze_before_training(self, pl_module):
        self.freeze(list(pl_module.net)[:4])

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch:
            self.unfreeze_and_add_param_group([pl_module.net[4 - 2 * epoch]], optimizer, lr=0.02)


def of_trained(self):
    return torch.optim.AdamW([each for each in self.parameters() if each.requires_grad], lr=0.05, eps=1e-3)


def thawed(folder, smp):
    def train_dataloader(self):
        mesh = getattr(self.trainer.strategy, "mesh", None)
        if mesh is None:
            return DataLoader(toy_data(), batch_size=2 * BATCH)
        mine = [index for index in range(len(toy_data())) if index // BATCH % mesh.dp == mesh.dp_rank]
        return DataLoader(Subset(toy_data(), mine), batch_size=BATCH)

    module = toy_module(train_dataloader=train_dataloader, configure_optimizers=of_trained)
    options = {"max_epochs": 3, "use_distributed_sampler": False, "callbacks": [Thaw()]}
    trainer = toy_trainer(folder, smp=smp, **options)
    trainer.fit(module)
    trainer.save_checkpoint(folder / "end.ckpt")
    return torch.load(folder / "end.ckpt", weights_only=False)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layers_that_are_unfrozen_during_the_run_have_the_weights_and_state_of_one_process(layout, tmp_path):
    ranks, smp = LAYOUTS[layout]
    with quiet():
        before = {name: value.clone() for name, value in toy_module().state_dict().items()}
        expected = thawed(tmp_path / "one", None)
    found = on_ranks(thawed, ranks, tmp_path / "smp", smp)[0]
    [mine], [theirs] = found["optimizer_states"], expected["optimizer_states"]
    assert mine["param_groups"] == theirs["param_groups"]
    assert len(theirs["param_groups"]) == 3
    for name, value in expected["state_dict"].items():
        assert not torch.equal(value, before[name])
        torch.testing.assert_close(found["state_dict"][name], value, rtol=1e-5, atol=1e-6, msg=name)
    for number, state in theirs["state"].items():
        for key, value in state.items():
            torch.testing.assert_close(mine["state"][number][key], value, rtol=1e-4, atol=1e-6, msg=key)
