"""The beginning of a run: its ranks meet, compare their settings, and join the process group.

The Trainer's arguments are those that change numbers or the number of steps. What only one rank may do by right
(logging, progress bars, folders) is not among them.
"""

from typing import Any, Final

import torch.distributed as dist

from smp_strategy.engine.lifecycle.first_meeting import FirstMeeting
from smp_strategy.engine.lifecycle.run_lifecycle import (
    begin_run,
    ensure_group,
    note_settings,
    of_fields,
    of_options,
    of_process,
)
from smp_strategy.errors import DoorWords
from smp_strategy.integrations.lightning.environment import backend_for
from smp_strategy.integrations.lightning.tree import Tree

__all__ = ["WORDS", "compare_steps", "join_group", "meet_first", "settings_of_run", "settings_of_steps"]

WORDS: Final = DoorWords(
    in_hook="in a hook of Lightning",
    first_pass="in `setup` or `configure_model` of the LightningModule",
    save_model="`trainer.save_checkpoint` or `model.save_pretrained`",
    save_all="`trainer.save_checkpoint`",
    whole_state="",
    on_one="if trainer.is_global_zero: ",
    on_one_saves="`if trainer.is_global_zero: trainer.save_checkpoint(...)`",
    tell="`self.log` or `self.print`",
    clip="`gradient_clip_val`",
    average="`self.log(..., sync_dist=True)`",
    end_of_run="`trainer.fit`",
)
_COMPARING: Final = "a comparison of the ranks' settings, at the beginning of a run"
# Scripts may change these between two steps.
_OF_STEPS: Final = ("gradient_clip_val", "gradient_clip_algorithm", "accumulate_grad_batches")
_OF_TRAINER: Final = (
    *("max_epochs", "min_epochs", "max_steps", "min_steps", "num_nodes", "fast_dev_run", "overfit_batches"),
    *("limit_train_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches"),
    *("val_check_interval", "check_val_every_n_epoch", "num_sanity_val_steps"),
    *("reload_dataloaders_every_n_epochs", "precision"),
)


def settings_of_run(trainer: Any, tree: Tree) -> dict[str, str]:
    """Settings at the beginning of `fit`, `validate`, `test` or `predict`, by their names in the user's script."""
    strategy, module = trainer.strategy, trainer.lightning_module
    return {
        "the call": f"`trainer.{trainer.state.fn.value}`",
        "`Trainer(devices)`": str(len(strategy.parallel_devices or ())),
        **of_fields(trainer, (*_OF_TRAINER, *_OF_STEPS), "`Trainer({})`"),
        "`Trainer(use_distributed_sampler)`": str(trainer._accelerator_connector.use_distributed_sampler),
        **of_options(strategy.config, "`{}` of SMPStrategy"),
        **of_fields(strategy, ("process_group_backend", "timeout"), "`{}` of SMPStrategy"),
        "`automatic_optimization` of the module": str(module.automatic_optimization),
        **of_process(tree.root.split(".")[0]),
    }


def settings_of_steps(trainer: Any) -> dict[str, object]:
    """Settings that may change between two steps, the length of an epoch among them; plain values."""
    found: dict[str, object] = {f"`Trainer({name})`": getattr(trainer, name) for name in _OF_STEPS}
    number, most = trainer.num_training_batches, trainer.max_steps
    if most > 0:  # an epoch may have more than are trained on
        number = min(number, most * trainer.accumulate_grad_batches)
    return {**found, "the number of batches of an epoch": number}


def compare_steps(trainer: Any) -> None:
    """Compare the settings of the steps, when training begins. Collective."""
    settings = {name: str(value) for name, value in settings_of_steps(trainer).items()}
    note_settings(settings).compare("the beginning of training")


def meet_first(trainer: Any, settings: dict[str, str]) -> dist.Store | None:
    """Compare ``settings`` before there is a process group; returns the store for it.

    ``None``: there is one, or there are no other ranks.
    """
    strategy = trainer.strategy
    environment, launcher = strategy.cluster_environment, strategy.launcher
    num_ranks = strategy.num_nodes * len(strategy.parallel_devices or ())
    # MPI has a rendezvous of its own.
    if dist.is_initialized() or num_ranks == 1 or strategy.process_group_backend == "mpi":
        return None
    rank, address = environment.global_rank(), (environment.main_address, environment.main_port)
    lost = str if launcher is None else launcher.lost
    return FirstMeeting(address, rank, num_ranks, timeout=strategy.timeout, lost=lost).compare(settings)


def join_group(strategy: Any, settings: dict[str, str], store: dist.Store | None) -> None:
    """Join the process group, and compare ``settings`` if there was no first meeting. Collective."""
    backend = strategy.process_group_backend or backend_for(strategy.parallel_devices or [])
    given = {"timeout": strategy.timeout, "store": store}
    options = {name: value for name, value in given.items() if value is not None}
    distributed = strategy.tree.fabric("utilities.distributed")
    distributed._init_dist_connection(strategy.cluster_environment, backend, **options)
    ensure_group(strategy.root_device.type, backend)
    begin_run(WORDS)
    if store is None:
        note_settings(settings).compare(_COMPARING)
