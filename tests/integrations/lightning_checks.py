"""What is asked of every layout under Lightning: the checkpoint of one process, which either goes on with.

The same cases, whether state, parameters or layers are dealt out.
"""

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning_toy import on_ranks, quiet, toy_data, toy_loader, toy_module, toy_trainer
from torch.utils.data import DataLoader, Subset

STEPS, BATCH = 6, 8
NO_HOOKS = {"on_train_batch_start": LightningModule.on_train_batch_start}


def scale_gradients(self, optimizer):
    norm = torch.stack([parameter.grad.norm() for parameter in self.parameters()]).norm()
    self.log("norm", norm)
    for parameter in self.parameters():
        parameter.grad.mul_(0.5)


def by_hand(self, batch, batch_idx):
    optimizer = self.optimizers()
    optimizer.zero_grad()
    self.manual_backward(self.loss(batch))
    self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
    optimizer.step()


def manual(self):
    return False


def muon(self):
    matrices = [parameter for parameter in self.parameters() if parameter.ndim == 2]
    return torch.optim.Muon(matrices, lr=0.02)


CASES = {
    "nothing that looks at gradients": (NO_HOOKS, {}),
    "clipping by norm": (NO_HOOKS, {"gradient_clip_val": 0.5}),
    "clipping by value": (NO_HOOKS, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "accumulation": (NO_HOOKS, {"accumulate_grad_batches": 2}),
    "whole matrices": ({**NO_HOOKS, "configure_optimizers": muon}, {}),
    "mixed precision": (NO_HOOKS, {"precision": "bf16-mixed"}),
    "a hook that changes gradients": ({"on_before_optimizer_step": scale_gradients}, {}),
    "manual optimization": ({"training_step": by_hand, "automatic_optimization": property(manual)}, {}),
}


def fit(folder, name, smp, epochs=1, checkpoint=None):
    """Train on this replica's share of each batch; plain Lightning gets the batches of all replicas."""
    overrides, options = CASES[name]

    def train_dataloader(self):
        data = toy_data(STEPS * BATCH)
        if getattr(self.trainer.strategy, "mesh", None) is None:
            return DataLoader(data, batch_size=2 * BATCH)
        readers, reader = self.trainer.strategy.distributed_sampler_kwargs.values()
        size = 2 * BATCH // readers
        mine = [index for index in range(len(data)) if index // size % readers == reader]
        return DataLoader(Subset(data, mine), batch_size=size)

    module = toy_module(train_dataloader=train_dataloader, **overrides)
    trainer = toy_trainer(folder, smp=smp, max_epochs=epochs, use_distributed_sampler=False, **options)
    trainer.fit(module, ckpt_path=checkpoint)
    trainer.save_checkpoint(folder / "end.ckpt")
    engine = getattr(trainer.strategy, "engine", None)
    numbers = {id(parameter): number for number, parameter in enumerate(module.parameters())}
    kept = {numbers[id(parameter)] for parameter in trainer.optimizers[0].state}
    norm = trainer.callback_metrics.get("norm")
    seen = engine is not None and engine.gradients_are_seen
    return torch.load(folder / "end.ckpt", weights_only=False), kept, seen, None if norm is None else norm.item()


def assert_close(found, expected):
    for key, value in expected["state_dict"].items():
        torch.testing.assert_close(found["state_dict"][key], value, rtol=1e-5, atol=1e-6, msg=key)
    [mine], [theirs] = found["optimizer_states"], expected["optimizer_states"]
    assert mine["param_groups"] == theirs["param_groups"]
    assert list(mine["state"]) == list(theirs["state"])
    for number, state in theirs["state"].items():
        assert list(mine["state"][number]) == list(state)
        for key, value in state.items():
            torch.testing.assert_close(mine["state"][number][key], value, rtol=1e-4, atol=1e-6, msg=key)


def assert_resumed(folder, before, after, *, ranks=2):
    """What a run with options ``before`` has saved, one with ``after`` goes on with; ``None``: one process."""

    def run(smp, name, epochs, checkpoint=None):
        args = folder / name, "accumulation", smp, epochs, checkpoint
        if smp is not None:
            return on_ranks(fit, ranks, *args)[0][0]
        with quiet():
            return fit(*args)[0]

    expected = run(None, "one", 2)
    run(before, "first", 1)
    assert_close(run(after, "second", 2, folder / "first" / "end.ckpt"), expected)


def averaged(folder, smp):
    def train_dataloader(self):
        return DataLoader(toy_data(STEPS * BATCH), batch_size=BATCH)

    module = toy_module(train_dataloader=train_dataloader, **NO_HOOKS)
    average = EMAWeightAveraging(decay=0.5)
    trainer = toy_trainer(folder, smp=smp, max_epochs=1, use_distributed_sampler=False, callbacks=[average])
    trainer.fit(module)
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def assert_averages(folder, smp):
    with quiet():
        expected = averaged(folder / "one", None)
    for found in on_ranks(averaged, 2, folder / "smp", smp):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)


def run_after_run(folder, smp):
    """What is tested, trained and predicted after a run that has left the module where ``restore_module`` says."""
    module = toy_module(train_dataloader=lambda self: toy_loader())
    trainer = toy_trainer(folder, smp=smp, max_epochs=1, use_distributed_sampler=False)
    trainer.fit(module)
    [tested] = trainer.test(module, toy_loader(shuffle=False), verbose=False)
    toy_trainer(folder, smp=smp, max_epochs=1, use_distributed_sampler=False).fit(module)
    predicted = toy_trainer(folder, smp=smp, use_distributed_sampler=False).predict(module, toy_loader(shuffle=False))
    return tested, torch.cat(predicted)


def assert_goes_on(folder, ranks, smp, where):
    """A run goes on with what another has left, ``where`` that has left the module or on all ranks."""
    (tested, predicted), expected = (
        on_ranks(run_after_run, ranks, folder / each, {**smp, "restore_module": each})[0] for each in (where, "all")
    )
    assert tested == expected[0]
    assert torch.equal(predicted, expected[1])
