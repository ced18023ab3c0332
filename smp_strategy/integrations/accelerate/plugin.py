"""SMPPlugin: the options as a ``ParallelismConfig``, and the point where an Accelerator gets our hooks.

Accelerate has no registry of strategies. But ``Accelerator(parallelism_config=...)``, and so
``TrainingArguments(parallelism_config=...)``, takes a ``ParallelismConfig`` and calls its ``_validate_accelerator`` in
the middle of ``Accelerator.__init__``. At that time the processes are known and nothing is prepared yet, so two things
happen there:

* The process group, which is Accelerate's, gets a backend for host tensors, which ranks exchange too.
* The class of the Accelerator, which may be a subclass by the user, is replaced by one with our hooks in front. The
  object exists already, so it cannot be replaced itself. The new class keeps name and module, so code that asks for
  them sees no difference.

Accelerate's own degrees (``tp_size`` ...) stay 1, because they switch on code of its own.
"""

import dataclasses
import functools
import os
import sys
from datetime import timedelta
from typing import Any, TypeVar, Unpack

import torch
import torch.distributed as dist
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import PartialState

from smp_strategy.config.config import SMPConfig
from smp_strategy.config.option_signature import with_option_docs, with_option_signature
from smp_strategy.engine.lifecycle.crash_report import keep_short
from smp_strategy.engine.lifecycle.run_lifecycle import ensure_group, note_settings
from smp_strategy.engine.pretrained import set_deferring
from smp_strategy.errors import ConfigError
from smp_strategy.integrations.accelerate.collectives import CollectiveHooks
from smp_strategy.integrations.accelerate.data import LoaderHooks
from smp_strategy.integrations.accelerate.launch import patch_state
from smp_strategy.integrations.accelerate.own_options import (
    LossInModel,
    LossReduction,
    PluginKeywords,
    TrainingOutputs,
    take_own,
)
from smp_strategy.integrations.accelerate.save_state import StateFolderHooks
from smp_strategy.integrations.accelerate.session import Session, settings_of_plugin
from smp_strategy.integrations.accelerate.training import TrainingHooks
from smp_strategy.integrations.accelerate.validation import problems_of_accelerator, problems_of_base
from smp_strategy.model.patching import subclass_of

__all__ = ["AcceleratorHooks", "SMPPlugin", "join_group", "taken_over"]


def join_group(device: torch.device, timeout: timedelta | None) -> None:
    """Make sure that the default process group exists and carries host tensors.

    Accelerate makes groups for the accelerator alone (``nccl``), but ranks exchange host tensors as well. A script
    with a single process has no group; it gets one of size 1. One that a launcher has started beside others is refused.
    """
    if not dist.is_initialized():
        started = os.environ.get("WORLD_SIZE", "1")
        if int(started) > 1:
            raise ConfigError(
                f"{started} processes were started, but Accelerate has found no accelerator for them, and each would "
                "train alone. Use Accelerator(cpu=True), ACCELERATE_USE_CPU=true, or `use_cpu: true` in the file of "
                "`accelerate launch` together with `smp_config`, to train on CPUs."
            )
    ensure_group(device.type, "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:gloo", timeout=timeout)


class AcceleratorHooks(TrainingHooks, LoaderHooks, CollectiveHooks, StateFolderHooks):
    """All hooks of an Accelerator."""


def taken_over(accelerator: Any) -> AcceleratorHooks:
    """Return ``accelerator`` itself, after adding our hooks to its class."""
    if not isinstance(accelerator, AcceleratorHooks):
        stock: Any = type(accelerator)
        accelerator.__class__ = _with_hooks(stock)
    hooks: AcceleratorHooks = accelerator
    return hooks


@functools.cache
def _with_hooks(stock: Any) -> Any:
    return subclass_of(stock, AcceleratorHooks)


Class = TypeVar("Class", bound=type)


def _with_options(plugin: Class) -> Class:
    """Turn ``plugin`` into a dataclass with all option fields added."""
    for option in dataclasses.fields(SMPConfig):
        plugin.__annotations__[option.name] = option.type
        setattr(plugin, option.name, option.default)
    dataclasses.dataclass(init=False, repr=False, eq=False)(plugin)
    plugin.__init__ = with_option_signature(plugin.__init__)  # type: ignore[misc]
    plugin.__doc__ = with_option_docs(plugin.__doc__)
    return plugin


@_with_options
class SMPPlugin(ParallelismConfig):  # type: ignore[misc]  # published without type information
    """Pipeline, sharded data and tensor parallelism for scripts with Accelerate.

    Example::

        accelerator = Accelerator(parallelism_config=SMPPlugin(pipeline_parallel_degree=2, microbatches=8))

    Without any degree all processes are stages of one pipeline.

    Args:
        loss_in_model: whether models compute their loss: ``auto`` looks at their results, and at what the first
            backward reaches. If they do, forward and backward of the microbatches alternate during the call of the
            model, and only the loss has gradients. With
            ``False`` backward runs when the script calls it, for any function of the results; the activations of all
            microbatches are in memory then.
        loss_reduction: reduction of a loss in the model over its samples. Losses of microbatches are averaged, weighted
            by samples (``mean``), or added up (``sum``). See also
            :mod:`smp_strategy.engine.model_calls.model_inputs`.
        training_outputs: results of a training call with a loss that every rank gets: ``all``, or only the ``loss``,
            which saves sending logits of a large vocabulary.
        options: the fields of :class:`~smp_strategy.config.config.SMPConfig`, with the ``SMP_*`` environment as
            defaults.

    Attributes:
        config: the validated options.

    Raises:
        ConfigError: an option is unknown, wrong or contradicts another; lists all of them.
    """

    loss_in_model: LossInModel = "auto"
    loss_reduction: LossReduction = "mean"
    training_outputs: TrainingOutputs = "all"

    def __init__(self, **options: Unpack[PluginKeywords]) -> None:
        given: dict[str, Any] = dict(options)
        base_names = {field.name for field in dataclasses.fields(ParallelismConfig)}
        base = {name: given.pop(name) for name in base_names.intersection(given)}
        problems = problems_of_base(base)
        own, wrong = take_own(given, os.environ)
        problems += wrong
        try:
            self.config = SMPConfig.from_options(**given)
        except ConfigError as error:
            problems += error.problems
        if problems:
            raise ConfigError(problems)
        super().__init__()
        if problems := problems_of_base({name: getattr(self, name) for name in base_names if name.endswith("_size")}):
            raise ConfigError(problems)
        for field in dataclasses.fields(self.config):
            setattr(self, field.name, getattr(self.config, field.name))
        # Now, not with the Accelerator: scripts of `transformers.Trainer` load the model, and make the process group,
        # before there is one.
        patch_state(PartialState)
        set_deferring(self.config.delayed_parameter_initialization)
        self.loss_in_model, self.loss_reduction, self.training_outputs = own

    def __repr__(self) -> str:
        return f"SMPPlugin({', '.join(f'{name}={value!r}' for name, value in self.to_json().items())})"

    def to_json(self) -> dict[str, Any]:
        """Return the options that differ from their defaults; Transformers stores them with the training arguments."""
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in _BASE_NAMES and getattr(self, field.name) != field.default
        }

    def get_device_mesh(self, device_type: str | None = None) -> None:
        """Return ``None``, which keeps Accelerate's own device mesh code off."""

    def _validate_accelerator(self, accelerator: Any) -> None:
        """Add our hooks to the Accelerator; called by its ``__init__``. Collective."""
        keep_short()
        problems = problems_of_accelerator(accelerator, self.config)
        if problems:
            raise ConfigError(problems)
        timeout: timedelta | None = getattr(accelerator.init_handler, "timeout", None)
        join_group(accelerator.device, timeout)
        assert dist.is_initialized()
        trainer = None
        if "transformers.trainer" in sys.modules:  # which takes seconds to import; without it there is no Trainer
            from smp_strategy.integrations.accelerate.hf_trainer import adopt, trainer_above

            trainer = trainer_above()
        settings = settings_of_plugin(self, accelerator.init_handler, getattr(trainer, "args", None))
        doing = "a comparison of the ranks' settings, when an Accelerator is made"
        note_settings(settings).compare(doing)
        session = Session(self.config, accelerator.device, timeout=timeout)
        taken_over(accelerator).begin(session, self)
        if trainer is not None:
            adopt(trainer, session)


_BASE_NAMES = frozenset(field.name for field in dataclasses.fields(ParallelismConfig))
