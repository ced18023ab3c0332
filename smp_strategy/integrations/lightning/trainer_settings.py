"""Settings of a run under Lightning that all its ranks must have alike.

The Trainer's arguments are those that change numbers or the number of steps. What only one rank may do by right
(logging, progress bars, folders) is not among them.
"""

from typing import Any, Final

from smp_strategy.distributed.agreement.common_settings import of_fields, of_options, of_process, shown
from smp_strategy.integrations.lightning.tree import Tree

__all__ = ["settings_of_run", "settings_of_steps"]

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
        "`Trainer(devices)`": shown(len(strategy.parallel_devices or ())),
        **of_fields(trainer, (*_OF_TRAINER, *_OF_STEPS), "`Trainer({})`"),
        "`Trainer(use_distributed_sampler)`": shown(trainer._accelerator_connector.use_distributed_sampler),
        **of_options(strategy.config, "`{}` of SMPStrategy"),
        **of_fields(strategy, ("process_group_backend", "timeout"), "`{}` of SMPStrategy"),
        "`automatic_optimization` of the module": shown(module.automatic_optimization),
        **of_process(tree.root.split(".")[0]),
    }


def settings_of_steps(trainer: Any) -> dict[str, object]:
    """Settings that may change between two steps, the length of an epoch among them; plain values."""
    found: dict[str, object] = {f"`Trainer({name})`": getattr(trainer, name) for name in _OF_STEPS}
    number, most = trainer.num_training_batches, trainer.max_steps
    if most > 0:  # an epoch may have more than are trained on
        number = min(number, most * trainer.accumulate_grad_batches)
    return {**found, "the number of batches of an epoch": number}
