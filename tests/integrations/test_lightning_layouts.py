"""A checkpoint of either form, saved under one layout, goes on under any other: weights, optimizer state, training."""

import copy
import dataclasses

import pytest
import torch
from lightning.pytorch import Callback
from lightning_toy import FEATURES, on_ranks, toy_data, toy_module, toy_trainer
from torch import nn
from torch.utils.data import DataLoader, Subset

STEPS, SAVED, BATCH = 4, 2, 8
FORMS = ("full", "sharded")
# Whose gradients are added in the order of one process: training is the same bit for bit.
IN_ORDER = ("single", "pp2", "pp4")
LAYOUTS = {
    "single": (1, {"pipeline_parallel_degree": 1, "microbatches": 4}),
    "pp2": (2, {"pipeline_parallel_degree": 2, "microbatches": 4}),
    "pp4": (4, {"pipeline_parallel_degree": 4, "microbatches": 4}),
    "sdp2": (2, {"sharded_data_parallel_degree": 2}),
    "sdp4": (4, {"sharded_data_parallel_degree": 4}),
    "mics2x2": (4, {"sharded_data_parallel_degree": 2}),
    "tp2": (2, {"tensor_parallel_degree": 2, "tensor_parallel": {"net.0": "column", "net.3": "row"}}),
    "pp2_sdp2": (4, {"pipeline_parallel_degree": 2, "sharded_data_parallel_degree": 2, "microbatches": 2}),
    "zero1": (2, {"shard_optimizer_state": True}),
    "tp2_pp2": (
        4,
        {
            **{"tensor_parallel_degree": 2, "tensor_parallel": {"net.0": "column", "net.3": "row"}},
            **{"pipeline_parallel_degree": 2, "microbatches": 2},
        },
    ),
}


def epoch_of_one_step(self):
    """This replica's share of the batch of the epoch."""
    data, epoch = toy_data(STEPS * BATCH), self.trainer.current_epoch
    readers, reader = self.trainer.strategy.distributed_sampler_kwargs.values()
    size = BATCH // readers
    first = epoch * BATCH + reader * size
    return DataLoader(Subset(data, range(first, first + size)), batch_size=size)


def module():
    """Sizes that divide into pieces unevenly, a parameter of one element, one that is frozen, a buffer."""
    made = toy_module(train_dataloader=epoch_of_one_step)
    made.net = nn.Sequential(
        *(nn.Linear(FEATURES, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 15)),
        *(nn.PReLU(), nn.Linear(15, 9), nn.Tanh(), nn.Linear(9, 4)),
    )
    made.net[5].bias.requires_grad_(False)
    made.register_buffer("scale", torch.arange(3.0))
    return made


def states(trainer):
    """On global rank 0, as one process has them, and as they are now."""
    engine = trainer.strategy.engine
    return copy.deepcopy(
        (dict(engine.saved.full_state_dict()), engine.saved.full_optimizer_state(trainer.optimizers[0]))
    )


class Saving(Callback):
    """Both forms, and what has to be in them."""

    def __init__(self, folder):
        self.folder = folder

    def on_train_epoch_end(self, trainer, pl_module):
        strategy = trainer.strategy
        if trainer.current_epoch + 1 == SAVED:
            truth = states(trainer)
            if trainer.is_global_zero:
                torch.save(truth, self.folder / "truth.pt")
            for form in FORMS:
                strategy.config = dataclasses.replace(strategy.config, state_dict_type=form)
                trainer.save_checkpoint(self.folder / f"{form}.ckpt")


class Looking(Callback):
    """What is there when the first step after a checkpoint has updated nothing yet."""

    found = None

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if self.found is None:
            self.found = states(trainer)


def fit(folder, smp, callback, *, epochs=STEPS, checkpoint=None):
    trainer = toy_trainer(
        folder,
        smp={"pipeline_parallel_degree": 1, **smp},
        max_epochs=epochs,
        use_distributed_sampler=False,
        reload_dataloaders_every_n_epochs=1,
        callbacks=[callback],
        limit_val_batches=0,
    )
    trained = module()
    trainer.fit(trained, ckpt_path=checkpoint)
    return trainer, trained


def save(folder, smp):
    fit(folder, smp, Saving(folder), epochs=SAVED)


def resume(folder, smp):
    """From both forms, one after the other."""
    results = []
    for form in FORMS:
        looking = Looking()
        trainer, trained = fit(folder, smp, looking, checkpoint=folder / f"{form}.ckpt")
        end = {name: each.detach().clone() for name, each in trained.state_dict().items()}
        results.append((looking.found, trainer.global_step, end))
    return results


def uninterrupted(folder):
    return fit(folder, LAYOUTS["single"][1], Callback())[1].state_dict()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of a layout's checkpoints, which are written when they are first asked for."""
    known = {}

    def folder_of(layout):
        if layout not in known:
            known[layout] = tmp_path_factory.mktemp(layout)
            ranks, smp = LAYOUTS[layout]
            on_ranks(save, ranks, known[layout], smp)
        return known[layout]

    return folder_of


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """The weights at the end of a run in one process."""
    return on_ranks(uninterrupted, 1, tmp_path_factory.mktemp("whole"))[0]


def assert_same(found, expected):
    leaves, structure = torch.utils._pytree.tree_flatten(expected)
    mine, own = torch.utils._pytree.tree_flatten(found)
    assert own == structure
    for each, value in zip(mine, leaves, strict=True):
        assert torch.equal(each, value) if isinstance(value, torch.Tensor) else each == value


# Not in one order, or the pairs of a thinned grid were those of a layout with itself.
@pytest.mark.dear
@pytest.mark.parametrize("after", [*list(LAYOUTS)[1:], "single"])
@pytest.mark.parametrize("before", LAYOUTS)
def test_a_run_goes_on_under_another_layout(before, after, saved, whole_run):
    folder = saved(before)
    weights, optimizer = torch.load(folder / "truth.pt", weights_only=True)
    ranks, smp = LAYOUTS[after]
    for found, steps, end in on_ranks(resume, ranks, folder, smp)[0]:
        assert_same(found[0], weights)
        assert_same(found[1], optimizer)
        assert steps == STEPS
        for name, value in whole_run.items():
            if {before, after} <= {*IN_ORDER}:
                assert torch.equal(end[name], value), name
            else:
                torch.testing.assert_close(end[name], value, rtol=1e-4, atol=1e-5, msg=name)
