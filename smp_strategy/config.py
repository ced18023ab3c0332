"""Every option of the library, in one flat, validated, frozen value.

Names and defaults are those of SageMaker's model parallel library, so that an existing configuration can be
copied over. Each concern is a small dataclass of its own; :class:`SMPConfig` inherits them all, which keeps the
options flat for the user (``SMPStrategy(pipeline_parallel_degree=2, microbatches=8)``) and sorted for the reader.

Three rules hold for every option: a value of the wrong type or range is an error, an unknown name is an error, and
an option whose feature is not built yet is an error that says so. All mistakes are reported at once. This module
does not import torch: Hydra reads it while it composes a configuration.
"""

import dataclasses
import difflib
import os
import re
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

from smp_strategy.errors import ConfigError

__all__ = ["RestoreModule", "SMPConfig", "parse_recipe"]

Optimize = Literal["memory", "speed"]
Schedule = Literal["interleaved", "simple"]
RestoreModule = Literal["all", "rank_zero", "none"]

ENV_PREFIX = "SMP_"
ALIASES = {"partitions": "pipeline_parallel_degree"}
# Environment variables with our prefix that are not options.
NOT_OPTIONS = frozenset({"SMP_CONFIG", "SMP_AUTOLOAD", "SMP_START_TIME"})
MICROBATCHES_PER_STAGE = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """How a batch flows through the stages."""

    pipeline_parallel_degree: int | None = None
    """Number of pipeline stages; ``partitions`` is an alias. ``None``: as many as there are ranks and units."""
    microbatches: int | None = None
    """Microbatches per step. ``None``: 1 where a degree is given, 4 per stage where none is given anywhere."""
    active_microbatches: int | None = None
    """Most microbatches in flight on a rank at once; it caps activation memory. ``None``: number of stages + 2."""
    pipeline: Schedule = "interleaved"
    """``interleaved``: backward work that is ready goes first. ``simple``: all forwards, then all backwards."""
    placement_strategy: str = "cluster"
    """Rank order: ``cluster`` (= ``DPT``), ``spread`` (= ``TPD``) or a permutation of D, P, T; the right-most
    letter varies fastest."""

    def _problems(self) -> list[str]:
        found = _at_least_one(self, "pipeline_parallel_degree", "microbatches", "active_microbatches")
        found += _one_of(self, "pipeline", typing.get_args(Schedule))
        known = self.placement_strategy in ("cluster", "spread") or sorted(self.placement_strategy) == ["D", "P", "T"]
        if not known:
            found.append(
                "`placement_strategy` must be `cluster`, `spread` or a permutation of the letters D, P and T, "
                f"but is {self.placement_strategy!r}."
            )
        return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartitionOptions:
    """How units are given to stages."""

    auto_partition: bool = True
    """Let the library choose the stage of every unit."""
    default_partition: int | None = None
    """With ``auto_partition=False``: the stage of units that nobody placed."""
    optimize: Optimize = "memory"
    """What the partitioner weighs more; it sets the default of ``memory_weight``."""
    memory_weight: float | None = None
    """Weight of memory against compute time, 0 to 1. ``None``: 0.8 for ``memory``, 0.2 for ``speed``."""
    partition_file: str | None = None
    """Where the decision is written to (JSON)."""
    load_partition: bool = False
    """Read the decision from ``partition_file`` instead of making one."""
    skip_tracing: bool = False
    """Partition by parameter counts in registration order, without the dry run of the step. The step must not
    read attributes that blocks set (``block.aux_loss``): only the dry run notices."""
    trace_execution_times: bool = False
    """Measure unit times on the device instead of modelling them."""
    trace_memory_usage: bool = False
    """Measure activation memory on the device instead of modelling it."""
    restore_module: RestoreModule = "all"
    """Which ranks have an ordinary module with all weights again when a run (fit, test ...) ends. Elsewhere each rank
    keeps its own units, and using others is an error. Every run begins with the whole module on all ranks."""

    def _problems(self) -> list[str]:
        found = _one_of(self, "optimize", typing.get_args(Optimize))
        found += _one_of(self, "restore_module", typing.get_args(RestoreModule))
        weight = self.memory_weight
        if weight is not None and not (isinstance(weight, (int, float)) and 0 <= weight <= 1):
            found.append(f"`memory_weight` must be between 0 and 1, but is {weight!r}.")
        return found

    @property
    def resolved_memory_weight(self) -> float:
        """``memory_weight``, or the default that ``optimize`` implies."""
        if self.memory_weight is not None:
            return float(self.memory_weight)
        return 0.8 if self.optimize == "memory" else 0.2


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnitOptions:
    """What moves as a whole, and how it runs."""

    unit_classes: tuple[str, ...] = ()
    """Classes whose modules stay whole on one stage, by name or by qualified name."""
    compile: bool = False
    """Run each unit through ``torch.compile``; code above the units stays as it is."""

    def _problems(self) -> list[str]:
        return []


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardingOptions:
    """Sharded data parallelism (MiCS) and optimizer-state sharding."""

    sharded_data_parallel_degree: int = 1
    """Ranks over which parameters, gradients and optimizer state are sharded."""
    shard_optimizer_state: bool = False
    """Shard optimizer state and gradients only."""
    sdp_reduce_bucket_size: int = 500_000_000
    """Gradient bucket, in elements."""
    sdp_param_persistence_threshold: int = 1_000_000
    """Parameters smaller than this many elements stay replicated."""
    sdp_max_live_parameters: int = 1_000_000_000
    """Most elements gathered at once."""
    sdp_hierarchical_allgather: bool = True
    """Gather between nodes first, then inside each node."""
    sdp_gradient_clipping: float = 1.0
    """Global gradient norm that sharded data parallelism clips to."""
    delayed_parameter_initialization: bool = False
    """Build the model on the meta device; every rank materialises its own share."""

    def _problems(self) -> list[str]:
        return _at_least_one(self, "sharded_data_parallel_degree", "sdp_reduce_bucket_size")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorParallelOptions:
    """Tensor-parallel layers."""

    tensor_parallel_degree: int = 1
    """Ranks over which layers are split."""
    prescaled_batch: bool = False
    """All tensor-parallel ranks of a replica read the same batch."""

    def _problems(self) -> list[str]:
        return _at_least_one(self, "tensor_parallel_degree")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ActivationOptions:
    """Activation checkpointing and offload."""

    activation_checkpointing: str = "none"
    """Units that recompute their activations in backward."""
    offload_activations: bool = False
    """Keep checkpointed activations in host memory."""
    activation_loading_horizon: int = 4
    """How many pipeline actions ahead of their use offloaded activations are loaded."""

    def _problems(self) -> list[str]:
        return _at_least_one(self, "activation_loading_horizon")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrecisionOptions:
    """Compute precision, where the front door does not choose it."""

    fp16: bool = False
    """Train in float16 with loss scaling."""
    bf16: bool = False
    """Train in bfloat16."""
    fp16_params: bool = False
    """Create parameters in float16."""

    def _problems(self) -> list[str]:
        if self.fp16 and self.bf16:
            return ["`fp16` and `bf16` contradict each other, but both are True. Choose one."]
        return []


_CONCERNS = (
    PipelineOptions,
    PartitionOptions,
    UnitOptions,
    ShardingOptions,
    TensorParallelOptions,
    ActivationOptions,
    PrecisionOptions,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SMPConfig(
    PipelineOptions,
    PartitionOptions,
    UnitOptions,
    ShardingOptions,
    TensorParallelOptions,
    ActivationOptions,
    PrecisionOptions,
):
    """All options together; construction validates them and raises one :class:`ConfigError` for all mistakes."""

    def __post_init__(self) -> None:
        # Configuration files have lists only, and OmegaConf lists of its own.
        object.__setattr__(self, "unit_classes", _as_tuple(self.unit_classes))
        problems = _wrong_types(self)
        if not problems:
            for concern in _CONCERNS:
                problems += concern._problems(self)
            problems += _not_built(self)
            problems += self._contradictions()
        if problems:
            raise ConfigError(problems)

    def _contradictions(self) -> list[str]:
        found = []
        if self.load_partition and not self.partition_file:
            found.append("`load_partition` needs `partition_file`, but no file is named.")
        if self.auto_partition and self.default_partition is not None:
            found.append(
                f"`default_partition` ({self.default_partition}) contradicts `auto_partition=True`. "
                "Set `auto_partition=False` to place modules by hand."
            )
        return found

    @classmethod
    def from_options(cls, **options: Any) -> Self:
        """Build a config from keyword arguments, aliases and the ``SMP_*`` environment; arguments win.

        Raises:
            ConfigError: unknown names (with the nearest known one) and every other mistake, together.
        """
        problems: list[str] = []
        merged = _resolve_aliases(_from_environment(problems), problems)
        merged.update(_resolve_aliases(options, problems))
        known = {field.name for field in dataclasses.fields(cls)}
        for name in sorted(set(merged) - known):
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean `{near[0]}`?" if near else f" Known options: {', '.join(sorted(known))}."
            problems.append(f"`{name}` is not an option.{hint}")
        try:
            config = cls(**{name: value for name, value in merged.items() if name in known})
        except ConfigError as error:
            problems += error.problems
        if problems:
            raise ConfigError(problems)
        return config

    def num_microbatches(self, num_stages: int) -> int:
        """Microbatches that a full batch is cut into, for ``num_stages`` pipeline stages."""
        if self.microbatches is not None:
            return self.microbatches
        return 1 if self.pipeline_parallel_degree is not None else MICROBATCHES_PER_STAGE * num_stages

    def max_active_microbatches(self, num_stages: int) -> int:
        """Most microbatches in flight on a rank (SageMaker's default: stages + 2)."""
        return self.active_microbatches if self.active_microbatches is not None else num_stages + 2


_RECIPE_PART = re.compile(r"(pp|tp|sdp|mb|zero)(\d+)|(mics)(\d+)x(\d+)")
_RECIPE_NAMES = {
    "pp": "pipeline_parallel_degree",
    "tp": "tensor_parallel_degree",
    "sdp": "sharded_data_parallel_degree",
    "mb": "microbatches",
}


def parse_recipe(name: str) -> dict[str, Any]:
    """Read options off a short name: ``pp2``, ``pp4_mb16``, ``pp2_sdp2``, ``tp2_pp2``, ``mics2x2``, ``zero1``.

    A name with ``pp`` and without ``mb`` gets 4 microbatches per stage. ``micsAxB`` shards over A ranks and
    replicates B times; B follows from the world size and is only a reminder for the reader.

    Raises:
        ConfigError: a part that is not understood, or one that stands twice.
    """
    options: dict[str, Any] = {}
    for part in name.split("_"):
        match = _RECIPE_PART.fullmatch(part)
        if match is None or match[1] == "zero" and match[2] != "1":
            raise ConfigError(
                f"`smp={name}`: the part {part!r} is not understood. "
                "Parts are ppN, tpN, sdpN, micsNxM, zero1 and mbN, joined by `_`, e.g. pp2_mb8."
            )
        if match[3]:
            key, value = "sharded_data_parallel_degree", int(match[4])
        elif match[1] == "zero":
            key, value = "shard_optimizer_state", True
        else:
            key, value = _RECIPE_NAMES[match[1]], int(match[2])
        if key in options:
            raise ConfigError(f"`smp={name}`: `{key}` is given twice.")
        options[key] = value
    if "pipeline_parallel_degree" in options:
        options.setdefault("microbatches", MICROBATCHES_PER_STAGE * options["pipeline_parallel_degree"])
    return options


# Options whose feature is still to come. An entry disappears in the commit that builds the feature.
_NOT_BUILT = {
    "auto_partition": "placing units by hand",
    "load_partition": "reading a partition from a file",
    "trace_execution_times": "measured unit times",
    "trace_memory_usage": "measured activation memory",
    "sharded_data_parallel_degree": "sharded data parallelism",
    "shard_optimizer_state": "optimizer-state sharding",
    "sdp_reduce_bucket_size": "sharded data parallelism",
    "sdp_param_persistence_threshold": "sharded data parallelism",
    "sdp_max_live_parameters": "sharded data parallelism",
    "sdp_hierarchical_allgather": "sharded data parallelism",
    "sdp_gradient_clipping": "sharded data parallelism",
    "delayed_parameter_initialization": "delayed parameter initialization",
    "tensor_parallel_degree": "tensor parallelism",
    "prescaled_batch": "tensor parallelism",
    "activation_checkpointing": "activation checkpointing",
    "offload_activations": "activation offload",
    "activation_loading_horizon": "activation offload",
    "fp16": "fp16 training",
    "bf16": "the `bf16` option (use the front door's precision setting)",
    "fp16_params": "fp16 parameters",
}


def _not_built(config: SMPConfig) -> list[str]:
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    return [
        f"`{name}={getattr(config, name)!r}` asks for {feature}, which is not built yet. Leave the option out."
        for name, feature in _NOT_BUILT.items()
        if getattr(config, name) != defaults[name]
    ]


def _wrong_types(config: SMPConfig) -> list[str]:
    found = []
    for name, hint in typing.get_type_hints(SMPConfig).items():
        value = getattr(config, name)
        if not _fits(value, hint):
            shown = getattr(hint, "__name__", None) if isinstance(hint, type) else str(hint).replace("typing.", "")
            found.append(f"`{name}` must be {shown}, but is {value!r} ({type(value).__name__}).")
    return found


def _as_tuple(value: Any) -> Any:
    """``value``, or the tuple of its items if it is a list."""
    is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes | tuple)
    return tuple(value) if is_list else value


def _fits(value: object, hint: Any) -> bool:
    if typing.get_origin(hint) is Literal:
        return isinstance(value, str)  # the range check names the choices
    if typing.get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(isinstance(item, str) for item in value)
    if isinstance(hint, type):
        if hint is int:
            return isinstance(value, int) and not isinstance(value, bool)
        if hint is float:
            return isinstance(value, (int, float)) and not isinstance(value, bool)
        return isinstance(value, hint)
    return any(_fits(value, choice) for choice in typing.get_args(hint))


def _at_least_one(config: object, *names: str) -> list[str]:
    values = {name: getattr(config, name) for name in names}
    return [
        f"`{name}` must be at least 1, but is {value}."
        for name, value in values.items()
        if value is not None and value < 1
    ]


def _one_of(config: object, name: str, choices: tuple[str, ...]) -> list[str]:
    value = getattr(config, name)
    return [] if value in choices else [f"`{name}` must be one of {', '.join(choices)}, but is {value!r}."]


def _resolve_aliases(options: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    resolved = dict(options)
    for alias, name in ALIASES.items():
        if alias not in resolved:
            continue
        value = resolved.pop(alias)
        if resolved.setdefault(name, value) != value:
            problems.append(f"`{alias}` ({value}) is an alias of `{name}` ({resolved[name]}), but they differ.")
    return resolved


def _from_environment(problems: list[str]) -> dict[str, Any]:
    """Options from ``SMP_CONFIG`` (a recipe name) and ``SMP_<OPTION>`` variables; the latter win."""
    options: dict[str, Any] = {}
    if os.environ.get("SMP_CONFIG"):
        try:
            options.update(parse_recipe(os.environ["SMP_CONFIG"]))
        except ConfigError as error:
            problems += error.problems
    hints = typing.get_type_hints(SMPConfig)
    for variable in sorted(os.environ):
        if not variable.startswith(ENV_PREFIX) or variable in NOT_OPTIONS:
            continue
        name = ALIASES.get(variable[len(ENV_PREFIX) :].lower(), variable[len(ENV_PREFIX) :].lower())
        if name in hints:
            options[name] = _parse(os.environ[variable], hints[name])
        else:
            problems.append(f"The environment variable {variable} names no option of smp_strategy. Unset it.")
    return options


def _parse(text: str, hint: Any) -> Any:
    """The value that ``text`` stands for under ``hint``; text that does not parse is left for the type check."""
    if typing.get_origin(hint) is tuple:
        return tuple(item.strip() for item in text.split(",") if item.strip())
    choices = typing.get_args(hint) or (hint,)
    if type(None) in choices and text.lower() in ("", "none", "null"):
        return None
    if bool in choices:
        return {"true": True, "1": True, "false": False, "0": False}.get(text.lower(), text)
    for kind in (int, float):
        if kind in choices:
            try:
                return kind(text)
            except ValueError:
                return text
    return text
