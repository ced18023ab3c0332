"""State that the hooks of one Accelerator share: options, place in the process mesh, engine, replaced calls.

Scripts ask for the number of processes, and prepare data loaders, before the model is known. Therefore the degrees are
fixed here from the options and the world size alone, and the engine is created when a model is prepared.

An Accelerator gets the hooks by a change of its class in the middle of its own construction (see
:mod:`smp_strategy.integrations.accelerate.plugin`). No ``__init__`` of a hook runs, so hooks create their state in
:meth:`HookBase.begin`.
"""

import dataclasses
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Final, final

import torch
import torch.distributed as dist
from accelerate import Accelerator

from smp_strategy.config.config import SMPConfig
from smp_strategy.engine.data_ranks import DataGroups
from smp_strategy.engine.degrees import shape_with
from smp_strategy.engine.engine import Engine
from smp_strategy.engine.engine_parts import unset
from smp_strategy.engine.hooks.run_hook import refuse_history
from smp_strategy.engine.lifecycle.main_process_calls import MainProcessCalls
from smp_strategy.engine.lifecycle.run_lifecycle import begin_run, of_fields, of_options, of_process
from smp_strategy.engine.model_calls.model_calls import ModelCalls
from smp_strategy.engine.saving.async_saves import AsyncSaves
from smp_strategy.engine.saving.saved_models.pretrained_calls import PretrainedCalls, StateDictCalls
from smp_strategy.engine.updates.grad_scaler import GradScaler
from smp_strategy.errors import DoorWords, SMPError

__all__ = ["WORDS", "HookBase", "Session", "settings_of_accelerator", "settings_of_plugin"]

WORDS: Final = DoorWords(
    in_hook="in `accelerator.smp.with_weights(lambda: ...)` on all ranks",
    first_pass="before `accelerator.prepare`, or before the Trainer gets it",
    save_model="`model.save_pretrained` or `accelerator.get_state_dict(model)`",
    save_all="`accelerator.save_state`",
    whole_state=", or `state_dict()` of the optimizer that `accelerator.prepare` has returned",
    on_one="if accelerator.is_main_process: ",
    on_one_saves="`if accelerator.is_main_process: accelerator.save_state()`",
    tell="`accelerator.log` or `accelerator.print`",
    clip="`accelerator.clip_grad_norm_`",
    average='`accelerator.reduce(value, "mean")`',
    end_of_run="`accelerator.end_training()`",
)
# Settings that all ranks must have alike: those that change numbers or the number of steps.
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


@final
class Session:
    """Shared state of the hooks of one Accelerator. The default process group must exist.

    Attributes:
        config: the options, with the number of stages filled in: without any degree, all ranks.
        shape: degrees and rank order.
        syncs_blocked: nesting depth of ``no_sync``.
        calls: replaced calls of the partitioned model; ``None`` until one is prepared.
        state_calls, pretrained_calls: replaced ``state_dict`` of all prepared models, and ``save_pretrained``.
        background: asynchronous saves.
        scaler: loss scaler, if anything computes in float16.
        main_calls: tells other ranks what the main process does alone.
        read_weights: gathers the full state dict on this rank; ``None``: not all ranks can take part now.
    """

    def __init__(self, config: SMPConfig, device: torch.device, *, timeout: timedelta | None = None) -> None:
        self.config = _with_degree(config, dist.get_world_size())
        self._chosen = unset(config)
        self.device = device
        self.rank = dist.get_rank()
        assert self.config.pipeline_parallel_degree is not None
        self.shape = shape_with(self.config, self.config.pipeline_parallel_degree)
        self.timeout = timeout
        self.syncs_blocked = 0
        self.calls: ModelCalls | None = None
        self.state_calls: list[StateDictCalls] = []
        self.pretrained_calls: list[PretrainedCalls] = []
        self.scaler: GradScaler | None = None
        self.background = AsyncSaves()
        self.main_calls = MainProcessCalls()
        self.read_weights: Callable[[], Mapping[str, Any] | None] = lambda: None
        self._engine: Engine | None = None
        self._data_groups: DataGroups | None = None

    @property
    def engine(self) -> Engine:
        """Engine of the partitioned model; exists once a model is prepared."""
        if self._engine is None:
            raise SMPError("There is no pipeline before a model is prepared: call `accelerator.prepare(model, ...)`.")
        return self._engine

    @property
    def has_engine(self) -> bool:
        """Whether a model is prepared."""
        return self._engine is not None

    def begin_engine(self, config: SMPConfig, left: Engine | None) -> Engine:
        """Take on an engine for a model that is being prepared: a new one, or the one that ``left`` it spread."""
        if self._engine is not left:
            self._close_engine()
        begin_run(WORDS)
        self._engine = left or Engine(
            config,
            report=self._report,
            device=self.device,
            timeout=self.timeout,
            defaults=self._chosen,
        )
        return self._engine

    def with_weights(self, function: Callable[[], Any]) -> Any:
        """Call ``function`` with all weights and gradients unsharded, as in a single process. Collective.

        For code that reads or changes the parameters of the model between steps: weight averages, norms, ties.

        Returns:
            The result of ``function``, with real tensors on every rank.

        Raises:
            UnsupportedError: the result might be expected to carry gradients.
        """
        if self._engine is None:
            return function()
        with self.main_calls.together(meeting="accelerator.smp.with_weights"):
            self._engine.reduce_gradients()
            found = self._engine.run_hook(function)
        refuse_history(found, "with_weights")
        return found

    def figures(self) -> dict[str, float]:
        """Figures of the monitor since the last call; none without one. Collective if there is one."""
        if self._engine is None or self._engine.inspection.monitor is None:
            return {}
        return self._engine.inspection.figures(None if self.scaler is None else self.scaler.get_scale())

    @property
    def data_groups(self) -> DataGroups:
        """Process groups of the data ranks. Created at the first access, which is collective."""
        if self._data_groups is None:
            self._data_groups = DataGroups(self.data_ranks(), "`accelerator.gather` or its like", timeout=self.timeout)
        return self._data_groups

    @property
    def num_data_ranks(self) -> int:
        """Number of ranks that read samples of their own; scripts see this as the number of processes."""
        return self._reader_of(self.rank)[0]

    @property
    def data_rank(self) -> int:
        """Index of the data rank whose samples this rank reads."""
        return self._reader_of(self.rank)[1]

    def data_ranks(self) -> list[list[int]]:
        """Global ranks that read the same samples, for each data rank; the first of each pipeline comes first."""
        found: list[list[int]] = [[] for _ in range(self.num_data_ranks)]
        for rank in range(self.shape.world_size):
            found[self._reader_of(rank)[1]].append(rank)
        return found

    def _reader_of(self, rank: int) -> tuple[int, int]:
        return self.shape.reader_of(rank, is_joint=self.config.prescaled_batch)

    def _report(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)

    def settle(self) -> None:
        """Wait for asynchronous saves; if one failed on any rank, raise on all. Collective."""
        if self.config.async_save:
            self.background.wait_together()

    def close(self) -> None:
        """Close the engine, if there is one, and drop all process groups; the module stays as it is."""
        self._close_engine()
        self._data_groups = None

    def let_go(self) -> None:
        """Forget the engine without closing it: a module left partitioned may still need it."""
        self._engine = None

    def _close_engine(self) -> None:
        if self._engine is not None:
            self._engine.close()
        self._engine = None


def _with_degree(config: SMPConfig, world_size: int) -> SMPConfig:
    """Fill in the number of stages: the world size, or 1 if another degree is given."""
    if config.pipeline_parallel_degree is not None:
        return config
    others = config.shard_optimizer_state or config.sharded_data_parallel_degree * config.tensor_parallel_degree > 1
    degree = 1 if others else world_size
    return dataclasses.replace(config, pipeline_parallel_degree=degree, microbatches=config.num_microbatches(degree))


class HookBase(Accelerator):  # type: ignore[misc]  # published without type information
    """Base class of the hooks: an Accelerator with a :class:`Session`."""

    smp: Session

    def begin(self, session: Session, plugin: Any) -> None:
        """Called once, as soon as the processes are known. Subclasses create their state here."""
        self.smp = session


def settings_of_plugin(plugin: Any, handler: Any, args: Any | None) -> dict[str, str]:
    """Settings known when an Accelerator begins to be made, perhaps by a Trainer with ``TrainingArguments``."""
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
