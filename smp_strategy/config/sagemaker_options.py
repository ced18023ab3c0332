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

import difflib
import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from smp_strategy.errors import ConfigError

__all__ = ["SageMakerConfig", "read_sagemaker", "render_sagemaker"]

# Options of version 1 that have the same name and meaning here.
_SAME: Final = frozenset(
    {
        *("pipeline_parallel_degree", "microbatches", "active_microbatches", "pipeline", "optimize", "memory_weight"),
        *("placement_strategy", "auto_partition", "default_partition", "load_partition", "partition_file"),
        *("tensor_parallel_degree", "prescaled_batch", "offload_activations", "activation_loading_horizon"),
        *("shard_optimizer_state", "fp16_params", "fp16", "bf16", "skip_tracing"),
        *("delayed_parameter_initialization", "sharded_data_parallel_degree", "sdp_reduce_bucket_size"),
        *("sdp_param_persistence_threshold", "sdp_max_live_parameters", "sdp_hierarchical_allgather"),
        "sdp_gradient_clipping",
    }
)
# Options of version 1 that have no effect here, with the reason.
_NOTED: Final = {
    "ddp": "replicas are averaged whenever there are several (`ddp_reduction` chooses how)",
    "ddp_port": "the launcher chooses the port (MASTER_PORT)",
    "ddp_dist_backend": "the backend follows the device",
    "deterministic_server": "ranks always work in the same order",
    "static_mode": "the order of calls is recorded anyway",
    "fast_mode": "values always go straight to the stage that uses them",
    "contiguous": "it is about TensorFlow",
    "horovod": "replicas are averaged by PyTorch's collectives",
}
# Options of version 2 that have no effect here, with the reason.
_NOTED_V2: Final = {
    "fsdp_cache_flush_warnings": "it is about FSDP",
    "allow_empty_shards": "shards may always be empty",
    "random_seed": "initial values are equal on all ranks; set the seed with `torch.manual_seed`",
}
_V2: Final = frozenset(
    {
        *("hybrid_shard_degree", "sm_activation_offloading", "context_parallel_degree", "expert_parallel_degree"),
        *_NOTED_V2,
    }
)
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
    given: Mapping[str, Any] | str | os.PathLike[str] | None, *, world_size: int | None = None
) -> SageMakerConfig:
    """Translate a configuration of SageMaker's library.

    Args:
        given: ``distribution`` of an estimator, ``parameters``, or the path of a JSON file with one of them; ``None``:
            all defaults.
        world_size: Number of ranks, which ``hybrid_shard_degree=0`` needs; ``None``: that of the launcher, if known.

    Raises:
        ConfigError: The configuration contradicts itself, or has names that SageMaker's library does not know; lists
            all mistakes.
    """
    notes: list[str] = []
    parameters = _parameters(given, notes)
    if "partitions" in parameters:
        stages = parameters.pop("partitions")
        if parameters.setdefault("pipeline_parallel_degree", stages) != stages:
            raise ConfigError(
                f"`partitions` ({stages}) and `pipeline_parallel_degree` ({parameters['pipeline_parallel_degree']}) "
                "are the same, but they differ. Leave one of them out."
            )
    is_v2 = not _V2.isdisjoint(parameters)
    translate = _translate_v2 if is_v2 else _translate_v1
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
    if not {"smdistributed", "modelparallel", "dataparallel"} & given.keys():
        return dict(given)
    inner = given.get("smdistributed", given)
    model = dict(inner.get("modelparallel") or {})
    data = dict(inner.get("dataparallel") or {})
    if model.get("enabled") and data.get("enabled"):
        raise ConfigError("`modelparallel` and `dataparallel` are both enabled, which exclude each other. Choose one.")
    if data.get("enabled"):
        return _of_data_parallel(data, notes)
    if not model.get("enabled", False):
        raise ConfigError('`modelparallel` is not enabled: set `"enabled": True` beside its `parameters`.')
    launcher = dict(given.get("mpi") or given.get("torch_distributed") or {})
    if launcher:
        number = launcher.get("processes_per_host", "N")
        notes.append(
            f"`{'mpi' if 'mpi' in given else 'torch_distributed'}` has no effect: the launcher starts the processes "
            f"(`torchrun --nproc-per-node={number}`)."
        )
    return _parameters(model.get("parameters"), notes)


def _of_data_parallel(data: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """Parameters of SageMaker's data parallel library, which has none: ``enabled`` and options of its launcher."""
    unknown = sorted(data.keys() - {"enabled", "custom_mpi_options"})
    if unknown:
        raise ConfigError(
            f"`dataparallel` has {', '.join(f'`{name}`' for name in unknown)}, but SageMaker's data parallel library "
            "knows `enabled` and `custom_mpi_options` only. Leave the rest out."
        )
    if "custom_mpi_options" in data:
        notes.append("`custom_mpi_options` has no effect: the launcher starts the processes.")
    # Replicas only, with `ddp_reduction=auto`: hierarchical between nodes, where its library refuses a single one.
    return {"ddp": True}


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"SageMaker's configuration cannot be read from {path}: {error}") from error


def _translate_v1(
    parameters: Mapping[str, Any], notes: list[str], problems: list[str], world_size: int | None
) -> dict[str, Any]:
    options = {"pipeline_parallel_degree": 1, "microbatches": 1, "optimize": "memory"}
    options.update({name: value for name, value in parameters.items() if name in _SAME})
    _note(parameters, _NOTED, notes)
    if parameters.get("use_times"):
        options["trace_execution_times"] = True
    problems += _contradictions(parameters)
    problems += [_unknown(name, {*_SAME, *_NOTED, "use_times"}) for name in parameters if not _is_known_v1(name)]
    if options.get("auto_partition") is False:
        options.setdefault("default_partition", 0)
    _leave_out(options, "sdp_", options.get("sharded_data_parallel_degree", 1) != 1, notes)
    if options.get("sharded_data_parallel_degree", 1) != 1:
        options = {**_SHARDING, **options}
    if options.get("tensor_parallel_degree", 1) != 1:
        options.setdefault("prescaled_batch", False)
    _leave_out(options, "prescaled_batch", options.get("tensor_parallel_degree", 1) != 1, notes)
    _leave_out(options, "activation_loading_horizon", bool(options.get("offload_activations")), notes)
    return options


def _is_known_v1(name: str) -> bool:
    return name in _SAME or name in _NOTED or name == "use_times"


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
    if parameters.get("ddp_dist_backend", "auto") not in ("auto", "nccl"):
        found.append(f"`ddp_dist_backend` must be auto or nccl, but is {parameters['ddp_dist_backend']!r}.")
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
        started = world_size or int(os.environ.get("WORLD_SIZE", 0))
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
    if parameters.get("sm_activation_offloading"):
        options["offload_activations"] = True
        if "activation_loading_horizon" in parameters:
            notes.append(
                "`activation_loading_horizon` counts layers in version 2 of SageMaker's library, but calls of units "
                "here, which are layers if there is one stage."
            )
            options["activation_loading_horizon"] = parameters["activation_loading_horizon"]
    known = {"tensor_parallel_degree", "activation_loading_horizon", *_V2}
    problems += [_unknown(name, known) for name in parameters if name not in known]
    _note(parameters, _NOTED_V2, notes)
    return options


def _note(parameters: Mapping[str, Any], reasons: Mapping[str, str], notes: list[str]) -> None:
    notes += [f"`{name}` has no effect: {reasons[name]}." for name in parameters if name in reasons]


def _leave_out(options: dict[str, Any], prefix: str, is_used: bool, notes: list[str]) -> None:
    if is_used:
        return
    for name in [each for each in options if each.startswith(prefix)]:
        del options[name]
        notes.append(f"`{name}` has no effect: what it is about is off.")


def _unknown(name: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f" Did you mean `{near[0]}`?" if near else f" Known parameters: {', '.join(sorted(known))}."
    return f"`{name}` is no parameter of SageMaker's model parallel library.{hint}"
