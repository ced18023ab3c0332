"""SIGTERM ends training on all ranks before the same step, whichever rank gets it."""

import os
import signal
from importlib import import_module

import pytest
import torch.distributed as dist
from lightning_toy import NEWER, OLDER, on_ranks, toy_loader, toy_module, toy_trainer

LAYOUTS = {
    "pp2": {"pipeline_parallel_degree": 2, "microbatches": 2},
    "two replicas": {"pipeline_parallel_degree": 1, "microbatches": 1},
}


def ended(folder, root, smp, victim, moment, batch=1, **options):
    """Steps that each rank has done, and those in the checkpoint that is saved of the exception."""

    def stop(module, *given):
        # The hook's `batch_idx` is its last argument.
        if dist.get_rank() == victim and given[-1] == batch:
            os.kill(os.getpid(), signal.SIGTERM)

    module = toy_module(root, **{moment: stop})
    checkpoint = import_module(f"{root}.callbacks").ModelCheckpoint(folder, filename="ended", save_on_exception=True)
    trainer = toy_trainer(folder, root, smp=smp, callbacks=[checkpoint], enable_checkpointing=True, **options)
    exceptions = import_module(f"{root}.utilities.exceptions")
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(exceptions.SIGTERMException):
        trainer.fit(module, toy_loader(batch_size=4), toy_loader(shuffle=False))
    assert signal.getsignal(signal.SIGTERM) == handler
    return trainer.global_step, sorted(path.name for path in folder.glob("*.ckpt"))


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_ranks_stop_before_the_same_step(layout, victim, tmp_path):
    found = on_ranks(ended, 2, tmp_path, NEWER, LAYOUTS[layout], victim, "on_train_batch_end")
    # The signal comes in step 1; before step 2 all are told, and look at it before step 3.
    assert [steps for steps, _ in found] == [3, 3]
    assert len(found[0][1]) == 1


def test_it_is_noticed_in_validation(tmp_path):
    everything = {"num_sanity_val_steps": -1}
    found = on_ranks(ended, 2, tmp_path, NEWER, LAYOUTS["pp2"], 1, "on_validation_batch_end", **everything)
    # In the sanity check, before training.
    assert [steps for steps, _ in found] == [0, 0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_follows_training_where_the_signal_comes_in_the_last_step(layout, tmp_path):
    options = {"batch": 3, "limit_train_batches": 4, "limit_val_batches": 0, "max_epochs": 1}
    found = on_ranks(ended, 2, tmp_path, NEWER, LAYOUTS[layout], 1, "on_train_batch_end", **options)
    assert [steps for steps, _ in found] == [4, 4]


def test_nothing_follows_training_where_the_signal_comes_in_the_last_validation(tmp_path):
    options = {"batch": 0, "limit_train_batches": 4, "limit_val_batches": 1, "num_sanity_val_steps": 0, "max_epochs": 1}
    found = on_ranks(ended, 2, tmp_path, NEWER, LAYOUTS["pp2"], 1, "on_validation_batch_end", **options)
    assert [steps for steps, _ in found] == [4, 4]


def test_in_the_other_tree(tmp_path):
    found = on_ranks(ended, 2, tmp_path, OLDER, LAYOUTS["pp2"], 1, "on_train_batch_end")
    assert [steps for steps, _ in found] == [3, 3]
