"""SageMaker's configuration, translated into options: the ``parameters`` of its model parallel library.

Three forms are read: the ``distribution`` of an estimator, its ``parameters`` alone, and a path to a JSON file with
either. Names are those of version 1 of SageMaker's library, or those of version 2 (``hybrid_shard_degree``), which has
no pipeline. The names that this package has, too, keep their meaning. The differences are:

* Where this package has other defaults, a configuration of SageMaker gets SageMaker's: one stage, ``optimize=memory``,
  ``prescaled_batch=False``, and for sharded data parallelism ``sdp_param_persistence_threshold=1000000`` and
  ``sdp_gradient_clipping=1.0``.
* Options that belong to SageMaker's own backend or launcher have no effect here, and a note says so.
* Options without effect, such as ``sdp_reduce_bucket_size`` without sharding, are errors in this package. SageMaker's
  library ignores them, so they are left out.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from smp_strategy.config.sagemaker_keys import (
    DATA,
    DISTRIBUTION,
    LAUNCHER,
    LAUNCHERS,
    LIBRARIES,
    MODEL,
    V1,
    V2,
    Key,
    checked,
)
from smp_strategy.errors import ConfigError

__all__ = ["SageMakerConfig", "read_sagemaker", "render_sagemaker"]

_SHARDING: Final = {"sdp_param_persistence_threshold": 1_000_000, "sdp_gradient_clipping": 1.0}


class SageMakerConfig(NamedTuple):
    """A configuration of SageMaker's library, and what it means here."""

    parameters: dict[str, Any]
    """The parameters as given, under their canonical names."""
    options: dict[str, Any]
    """Options of this package."""
    notes: list[str]
    """Sentences about parameters that have another form here, or no effect."""


def read_sagemaker(
    given: Mapping[str, Any] | str | os.PathLike[str] | None, *, launched: Any = None, world_size: int | None = None
) -> SageMakerConfig:
    """Translate a configuration of SageMaker's library.

    Args:
        given: ``distribution`` of an estimator, ``parameters``, or the path of a JSON file with one of them; ``None``:
            all defaults.
        launched: The same of the launcher, which takes precedence.
        world_size: Number of ranks, which ``hybrid_shard_degree=0`` needs; ``None``: that of the launcher, if known.

    Raises:
        ConfigError: The configuration contradicts itself, or has keys or values that SageMaker's library does not
            know; lists all mistakes.
    """
    notes: list[str] = []
    parameters = {**_canonical(_parameters(given, notes)), **_canonical(_parameters(launched, notes))}
    is_v2 = any(name in V2 and name not in V1 for name in parameters)
    keys, translate = (V2, _translate_v2) if is_v2 else (V1, _translate_v1)
    parameters = checked(parameters, keys, "`parameters`")
    notes += [f"`{name}` has no effect: {keys[name].reason}." for name in parameters if keys[name].reason]
    problems: list[str] = []
    options = translate(parameters, notes, problems, world_size)
    if problems:
        raise ConfigError(problems)
    return SageMakerConfig(parameters, options, notes)


def render_sagemaker(options: Mapping[str, Any]) -> str:
    """Sentence that shows the options that a configuration maps to."""
    shown = ", ".join(f"{name}={value}" for name, value in options.items() if value is not None)
    return f"SageMaker's configuration maps to: {shown}."


def _parameters(given: Any, notes: list[str]) -> dict[str, Any]:
    """Parameters in a configuration of any form."""
    if given is None:
        return {}
    if isinstance(given, str | os.PathLike):
        return _parameters(_read(Path(given)), notes)
    if not isinstance(given, Mapping):
        raise ConfigError(
            "SageMaker's configuration must be a dict (`distribution` of an estimator, or its `parameters`) or the "
            f"path of a JSON file, but is {given!r}."
        )
    if not any(name in given for name in ("smdistributed", *LIBRARIES, *LAUNCHERS)):
        return dict(given)
    has_level = "smdistributed" in given
    outer = checked(given, {**(DISTRIBUTION if has_level else LIBRARIES), **LAUNCHERS}, "`distribution`")
    for name in LAUNCHERS.keys() & outer.keys():
        number = checked(outer[name], LAUNCHER, f"`{name}`").get("processes_per_host", "N")
        notes.append(
            f"`{name}` has no effect: the launcher starts the processes (`torchrun --nproc-per-node={number}`)."
        )
    inner = checked(outer["smdistributed"], LIBRARIES, "`smdistributed`") if has_level else outer
    model = checked(inner.get("modelparallel", {}), MODEL, "`modelparallel`")
    data = checked(inner.get("dataparallel", {}), DATA, "`dataparallel`")
    if model.get("enabled") and data.get("enabled"):
        raise ConfigError("`modelparallel` and `dataparallel` are both enabled, which exclude each other. Choose one.")
    if data.get("enabled"):
        if "custom_mpi_options" in data:
            notes.append("`custom_mpi_options` has no effect: the launcher starts the processes.")
        # Replicas only, with `ddp_reduction=auto`: hierarchical between nodes, where its library refuses a single one.
        return {"ddp": True}
    if not model.get("enabled", False):
        raise ConfigError('`modelparallel` is not enabled: set `"enabled": True` beside its `parameters`.')
    inside = model.get("parameters", {})
    inside = _read(Path(inside)) if isinstance(inside, str | os.PathLike) else inside
    return checked(inside, {**V1, **V2, "partitions": Key()}, "`parameters`")


def _canonical(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters under one name each."""
    found = dict(parameters)
    if "partitions" in found:
        stages = found.pop("partitions")
        if found.setdefault("pipeline_parallel_degree", stages) != stages:
            raise ConfigError(
                f"`partitions` ({stages}) and `pipeline_parallel_degree` ({found['pipeline_parallel_degree']}) are the "
                "same, but they differ. Leave one of them out."
            )
    return found


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"SageMaker's configuration cannot be read from {path}: {error}") from error


def _translate_v1(
    parameters: Mapping[str, Any], notes: list[str], problems: list[str], world_size: int | None
) -> dict[str, Any]:
    options = {"pipeline_parallel_degree": 1, "microbatches": 1, "optimize": "memory"}
    options.update({name: value for name, value in parameters.items() if not V1[name].reason})
    if options.pop("use_times", False):
        options["trace_execution_times"] = True
    problems += _contradictions(parameters)
    if options.get("auto_partition") is False:
        options.setdefault("default_partition", 0)
    elif options.get("default_partition", 0) == 0:
        options.pop("default_partition", None)  # SageMaker's default, which has no effect there either
    _leave_out(options, "default_partition", options.get("auto_partition") is False, notes)
    is_sharded = options.get("sharded_data_parallel_degree", 1) != 1
    _leave_out(options, "sdp_", is_sharded, notes)
    if is_sharded:
        options = {**_SHARDING, **options}
        if "sdp_max_live_parameters" in options:
            options["sdp_gather"] = "use"
    is_split = options.get("tensor_parallel_degree", 1) != 1
    if is_split:
        options.setdefault("prescaled_batch", False)
    _leave_out(options, "prescaled_batch", is_split, notes)
    _leave_out(options, "activation_loading_horizon", bool(options.get("offload_activations")), notes)
    return options


def _contradictions(parameters: Mapping[str, Any]) -> list[str]:
    """Combinations that SageMaker's library refuses."""
    found = []
    ddp = parameters.get("ddp", False)
    if ddp and parameters.get("horovod"):
        found.append("`ddp` and `horovod` are both True, which exclude each other. Leave one of them out.")
    found += [
        f"`{name}` needs `ddp`, which is not True. Set it, or leave `{name}` out."
        for name in ("ddp_port", "ddp_dist_backend")
        if name in parameters and not ddp
    ]
    if "ddp" in parameters and not ddp:
        found += [
            f"`{name}` ({parameters[name]}) needs replicas that are averaged, but `ddp` is False. Set `ddp` to True."
            for name in ("tensor_parallel_degree", "sharded_data_parallel_degree")
            if parameters.get(name, 1) != 1
        ]
    return found


def _translate_v2(
    parameters: Mapping[str, Any], notes: list[str], problems: list[str], world_size: int | None
) -> dict[str, Any]:
    tp = parameters.get("tensor_parallel_degree", 1)
    options: dict[str, Any] = {"pipeline_parallel_degree": 1, "tensor_parallel_degree": tp}
    degree = parameters.get("hybrid_shard_degree", 0)
    if degree == 0:
        started = world_size or _ranks_of_launcher()
        if not started:
            problems.append(
                "`hybrid_shard_degree` 0 shards over all ranks, whose number is not known here. Give `world_size`, or "
                "the degree."
            )
        degree = max(started // tp, 1)
        notes.append(f"`hybrid_shard_degree` 0 shards over all ranks: `sharded_data_parallel_degree` is {degree}.")
    options["sharded_data_parallel_degree"] = degree
    for name, why in (
        ("context_parallel_degree", "sequences are not split over ranks"),
        ("expert_parallel_degree", "experts are not split over ranks"),
    ):
        if parameters.get(name, 1) != 1:
            problems.append(f"`{name}` must be 1, but is {parameters[name]}: {why} here.")
    if "activation_loading_horizon" in parameters:
        options["activation_loading_horizon"] = parameters["activation_loading_horizon"]
    if parameters.get("sm_activation_offloading"):
        options["offload_activations"] = True
        if "activation_loading_horizon" in parameters:
            notes.append(
                "`activation_loading_horizon` counts layers in version 2 of SageMaker's library, but calls of units "
                "here, which are layers if there is one stage."
            )
    _leave_out(options, "activation_loading_horizon", "offload_activations" in options, notes)
    return options


def _ranks_of_launcher() -> int:
    text = os.environ.get("WORLD_SIZE", "0")
    if not text.isdecimal():
        raise ConfigError(
            f"WORLD_SIZE must be the number of ranks, but is {text!r}. The launcher sets it (`torchrun`)."
        )
    return int(text)


def _leave_out(options: dict[str, Any], prefix: str, is_used: bool, notes: list[str]) -> None:
    if is_used:
        return
    for name in [each for each in options if each.startswith(prefix)]:
        del options[name]
        notes.append(f"`{name}` has no effect: what it is about is off.")
