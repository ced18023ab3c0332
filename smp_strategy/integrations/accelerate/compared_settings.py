"""Settings of an Accelerator, and of a Trainer of Transformers, that all ranks must have alike.

They are those that change numbers or the number of steps, not folders, logging or what only the main process does.
"""

from typing import Any, Final

from smp_strategy.engine.run_lifecycle import of_fields, of_options, of_process

__all__ = ["settings_of_accelerator", "settings_of_plugin"]

_OWN: Final = ("loss_in_model", "loss_reduction", "training_outputs")
_OF_ACCELERATOR: Final = ("gradient_accumulation_steps", "mixed_precision", "step_scheduler_with_optimizer")
_OF_LOADERS: Final = ("split_batches", "dispatch_batches", "even_batches", "use_seedable_sampler")
_OF_ARGUMENTS: Final = (
    *("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"),
    *("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "optim", "optim_args"),
    *("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_ratio", "warmup_steps", "max_grad_norm", "num_train_epochs"),
    *("max_steps", "bf16", "fp16", "bf16_full_eval", "fp16_full_eval", "tf32", "label_smoothing_factor"),
    *("dataloader_drop_last", "train_sampling_strategy", "group_by_length", "remove_unused_columns"),
    *("gradient_checkpointing", "eval_strategy", "eval_steps", "eval_delay", "eval_on_start", "save_strategy"),
    *("save_steps", "load_best_model_at_end", "metric_for_best_model", "average_tokens_across_devices"),
    *("ignore_data_skip", "neftune_noise_alpha", "auto_find_batch_size", "full_determinism"),
)


def settings_of_plugin(plugin: Any, handler: Any, args: Any | None) -> dict[str, str]:
    """Settings known when an Accelerator begins to be made.

    Args:
        plugin: The :class:`~smp_strategy.integrations.accelerate.plugin.SMPPlugin`.
        handler: ``InitProcessGroupKwargs``, if the user has given them.
        args: ``TrainingArguments``, if a Trainer of Transformers makes it.
    """
    return {
        **of_options(plugin.config, "`{}` of SMPPlugin"),
        **of_fields(plugin, _OWN, "`{}` of SMPPlugin"),
        **of_fields(handler, ("timeout",), "`InitProcessGroupKwargs({})`"),
        **({} if args is None else of_fields(args, _OF_ARGUMENTS, "`TrainingArguments({})`")),
        **of_process("accelerate", *([] if args is None else ["transformers"])),
    }


def settings_of_accelerator(accelerator: Any) -> dict[str, str]:
    """Settings of an Accelerator that prepares a model."""
    return {
        **of_fields(accelerator, _OF_ACCELERATOR, "`Accelerator({})`"),
        **of_fields(accelerator.dataloader_config, _OF_LOADERS, "`DataLoaderConfiguration({})`"),
    }
