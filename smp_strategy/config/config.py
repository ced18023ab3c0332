"""Configuration of the library: all options in one flat, validated, frozen dataclass.

Each concern is a small dataclass of its own, in :mod:`smp_strategy.config.options`,
:mod:`smp_strategy.config.activation_options`, :mod:`smp_strategy.config.precision_options` and, for checkpoints, here.
:class:`SMPConfig` inherits them all, which keeps the options flat for the user
(``SMPStrategy(pipeline_parallel_degree=2, microbatches=8)``) and sorted for the reader.

A value of the wrong type or range is an error, and so is an unknown name. All mistakes are reported at once. This
module does not import torch: Hydra reads it while it composes a configuration.
"""

import dataclasses
import difflib
import logging
import os
import typing
from collections.abc import Collection, Mapping
from typing import Any, Final, Literal, Self, Unpack

from smp_strategy.config.activation_options import ActivationOptions
from smp_strategy.config.foreign_words import meant_option
from smp_strategy.config.keywords import OptionKeywords
from smp_strategy.config.options import (
    PartitionOptions,
    PipelineOptions,
    ReportOptions,
    RestoreModule,
    Schedule,
    ShardingOptions,
    TensorParallelOptions,
    TraceOptions,
    UnitOptions,
)
from smp_strategy.config.parsing import as_dict, as_tuple, one_of, wrong_types
from smp_strategy.config.precision_options import PrecisionOptions
from smp_strategy.config.recipe import MICROBATCHES_PER_STAGE
from smp_strategy.config.sagemaker_options import read_sagemaker, render_sagemaker
from smp_strategy.config.variables import ALIASES, options_in, resolve_aliases, told_by_origin
from smp_strategy.errors import ConfigError

__all__ = [
    "CheckpointOptions",
    "RestoreModule",
    "SMPConfig",
    "Schedule",
    "StateDictType",
    "option_types",
    "unknown_option",
]

StateDictType = Literal["full", "sharded"]

_LOG: Final = logging.getLogger("smp_strategy")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """Form and time of writing checkpoints. Both forms are read under any layout, independent of these options."""

    state_dict_type: StateDictType = "full"
    """Form of checkpoints. ``full``: one ordinary file, as a single process writes it. ``sharded``: a directory in the
    format of ``torch.distributed.checkpoint``, to which each rank writes its shards."""
    async_save: bool = False
    """Write files in the background: training stops only for the copy to host memory."""
    checkpoint_weights_only: bool = True
    """Load only tensors and plain values, so that no file can run code. ``False``: load any pickled object of the full
    form; use it only for files that you trust. ``trainer.fit(..., weights_only=)`` takes precedence."""

    def _problems(self) -> list[str]:
        return one_of(self, "state_dict_type", typing.get_args(StateDictType))


_CONCERNS = (
    PipelineOptions,
    PartitionOptions,
    TraceOptions,
    UnitOptions,
    ShardingOptions,
    TensorParallelOptions,
    ActivationOptions,
    PrecisionOptions,
    CheckpointOptions,
    ReportOptions,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SMPConfig(
    PipelineOptions,
    PartitionOptions,
    TraceOptions,
    UnitOptions,
    ShardingOptions,
    TensorParallelOptions,
    ActivationOptions,
    PrecisionOptions,
    CheckpointOptions,
    ReportOptions,
):
    """All options together; construction validates them and raises one :class:`ConfigError` for all mistakes."""

    def __post_init__(self) -> None:
        # Configuration files have lists instead of tuples, and OmegaConf has its own list type.
        for name in ("unit_classes", "memory_limit", "stage_speeds", "activation_checkpointing"):
            object.__setattr__(self, name, as_tuple(getattr(self, name)))
        words: Any = self.activation_checkpointing
        if isinstance(words, bool):  # refused with the words that it has
            object.__setattr__(self, "activation_checkpointing", str(words).lower())
        object.__setattr__(self, "tensor_parallel", as_dict(self.tensor_parallel))
        if isinstance(self.partition_file, str):
            object.__setattr__(self, "partition_file", os.path.expanduser(self.partition_file))
        problems = wrong_types(self, typing.get_type_hints(SMPConfig))
        if not problems:
            for concern in _CONCERNS:
                problems += concern._problems(self)
            problems += self._contradictions()
        if problems:
            raise ConfigError(problems)

    def _contradictions(self) -> list[str]:
        found = []
        if self.load_partition and not self.partition_file:
            found.append("`load_partition` needs `partition_file`, but no file is named.")
        if self.load_partition and not self.auto_partition:
            found.append(
                "`load_partition=True` contradicts `auto_partition=False`: one takes the partition from a file, the "
                "other from the modules. Leave one of them out."
            )
        if self.auto_partition and self.default_partition is not None:
            found.append(
                f"`default_partition` ({self.default_partition}) contradicts `auto_partition=True`. "
                "Set `auto_partition=False` to place modules by hand."
            )
        if self.activation_checkpointing == "auto":
            found += self._problems_of_choice()
        if self.pipeline_parallel_degree is not None:
            found += self._problems_with(self.pipeline_parallel_degree)
        return found

    def _problems_of_choice(self) -> list[str]:
        """Options that contradict `activation_checkpointing=auto`."""
        found = [
            f"`{name}={getattr(self, name)!r}` contradicts `activation_checkpointing=auto`, which decides that for "
            "each unit. Leave one of them out."
            for name in ("checkpoint_strategy", "selective_checkpointing")
            if getattr(self, name) != getattr(SMPConfig, name)
        ]
        if self.skip_tracing:
            found.append(
                "`skip_tracing=True` contradicts `activation_checkpointing=auto`: without tracing nobody knows what "
                "units keep. Leave one of them out."
            )
        return found

    def check(self, num_stages: int) -> None:
        """Validate the options that depend on the number of stages.

        Raises:
            ConfigError: some options do not fit ``num_stages`` stages.
        """
        problems = self._problems_with(num_stages)
        if problems:
            raise ConfigError(problems)

    def _problems_with(self, num_stages: int) -> list[str]:
        found = super()._problems_with(num_stages) + self._problems_of_gathering(num_stages)
        active, needed = self.active_microbatches, self.num_microbatches(num_stages)
        if self.pipeline == "simple" and active is not None and active < needed:
            found.append(
                f"`active_microbatches` ({active}) contradicts `pipeline=simple`, where all {needed} microbatches are "
                "in flight before the first backward. Leave it out, or choose another schedule."
            )
        return found

    @classmethod
    def from_options(cls, **options: Unpack[OptionKeywords]) -> Self:
        """Build a config from keyword arguments, aliases and the ``SMP_*`` environment; arguments win.

        Raises:
            ConfigError: unknown names (with the nearest known one) and every other mistake, together.
        """
        problems: list[str] = []
        given = resolve_aliases(options, problems)
        merged = options_in(os.environ, option_types(), problems)
        with told_by_origin(options, os.environ, _defaults()):
            return cls._of_known({**merged, **given}, problems)

    @classmethod
    def from_variables(cls, environ: Mapping[str, str]) -> Self:
        """Build a config from the environment variables ``environ`` alone.

        Raises:
            ConfigError: variables that name no option, and every other mistake, together.
        """
        problems: list[str] = []
        with told_by_origin({}, environ, _defaults()):
            return cls._of_known(options_in(environ, option_types(), problems), problems)

    @classmethod
    def from_sagemaker(
        cls, given: Mapping[str, Any] | str | os.PathLike[str] | None, *, world_size: int | None = None
    ) -> Self:
        """Build a config from a configuration of SageMaker's library, with its defaults; ``SMP_*`` variables win.

        What it maps to, and what has no effect here, goes to the log ``smp_strategy``.

        Args:
            given: ``distribution`` of an estimator, its ``parameters`` (of version 1 or 2), or a JSON file's path.
            world_size: number of ranks, if the launcher has not said it yet (``hybrid_shard_degree=0``).

        Raises:
            ConfigError: unknown parameters, contradictions, and every other mistake, together.
        """
        read = read_sagemaker(given, world_size=world_size)
        config = cls.from_sagemaker_options(read.options)
        for line in (*read.notes, render_sagemaker(read.options)):
            _LOG.info(line)
        return config

    @classmethod
    def from_sagemaker_options(cls, options: Mapping[str, Any]) -> Self:
        """Build a config from translated options of SageMaker's library; ``SMP_*`` variables win.

        Raises:
            ConfigError: unknown names, and every other mistake, together.
        """
        problems: list[str] = []
        merged = {**resolve_aliases(options, problems), **options_in(os.environ, option_types(), problems)}
        return cls._of_known(merged, problems)

    @classmethod
    def _of_known(cls, merged: Mapping[str, Any], problems: list[str]) -> Self:
        """Build a config from options whose names may be unknown; ``problems`` were found before."""
        known = {field.name for field in dataclasses.fields(cls)}
        problems += [unknown_option(name) for name in sorted(set(merged) - known)]
        try:
            config = cls(**{name: value for name, value in merged.items() if name in known})
        except ConfigError as error:
            problems += error.problems
        if problems:
            raise ConfigError(problems)
        return config

    @property
    def restored_on(self) -> RestoreModule:
        """Ranks that get the whole module at the end of a run."""
        if self.restore_module is not None:
            return self.restore_module
        return "none" if self.delayed_parameter_initialization else "all"

    @property
    def stream_dim(self) -> int | None:
        """Dimension of activations that is split over a tensor-parallel group between split regions, if any."""
        if self.optimize == "memory":
            return 1
        # Ranks that read different samples keep them apart between split regions.
        return None if self.prescaled_batch else 0

    def num_microbatches(self, num_stages: int) -> int:
        """Number of microbatches of a full batch, for ``num_stages`` pipeline stages."""
        if self.microbatches is not None:
            return self.microbatches
        return MICROBATCHES_PER_STAGE * num_stages if num_stages > 1 else 1


def _defaults() -> dict[str, Any]:
    return {field.name: field.default for field in dataclasses.fields(SMPConfig)}


def option_types() -> dict[str, Any]:
    """Type of every option."""
    return typing.get_type_hints(SMPConfig)


def unknown_option(name: str, others: Collection[str] = ()) -> str:
    """Error text for the unknown option ``name``, with what it means elsewhere, or else the nearest known one."""
    known = [*option_types(), *ALIASES, *others]
    if meant := meant_option(name, known):
        return f"`{name}` is not an option. {meant}"
    near = difflib.get_close_matches(name, known, n=1)
    hint = f" Did you mean `{near[0]}`?" if near else f" Known options: {', '.join(sorted(known))}."
    return f"`{name}` is not an option.{hint}"
