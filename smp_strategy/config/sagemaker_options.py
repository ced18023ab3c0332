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
import math
import os
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from smp_strategy.errors import ConfigError

__all__ = ["SageMakerConfig", "read_sagemaker", "render_sagemaker", "V1", "V2"]


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
    both = [_parameters(given, notes), _parameters(launched, notes)]
    is_v2 = any(name in V2 and name not in V1 for each in both for name in each)
    keys, translate = (V2, _translate_v2) if is_v2 else (V1, _translate_v1)
    parameters: dict[str, Any] = {}
    for each in both:
        parameters.update(_canonical(checked(each, keys, "`parameters`")))
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
    if isinstance(given, str | os.PathLike):
        given = _read(given, "SageMaker's configuration")
    if given is None:
        return {}
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
    inside = _read(inside, "`parameters`") if isinstance(inside, str | os.PathLike) else inside
    return checked(inside, {**V1, **V2}, "`parameters`")


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


def _read(path: str | os.PathLike[str], what: str) -> Any:
    try:
        return json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{what} cannot be read from {path}: {error}. Give a JSON file, or the dict itself."
        ) from error


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


# --- keys ------------------------------------------------------------------------------------------------------------
# Keys of SageMaker's configuration: their values, and those that have no effect here.
#
# One table per dict that a configuration contains. A key that is in no table is refused, and so is a value that its key
# does not take: SageMaker's library would fail later, or read it in a way of its own (any text is true, say).


_ANY_SIZE: Final = sys.maxsize


class Key(NamedTuple):
    """A key."""

    values: Any = None
    """``bool``, ``str``, ``dict``, a ``range`` of whole numbers, ``float`` for a number above 0, or a tuple of words;
    ``None``: the option of this name checks its value."""
    reason: str | None = None
    """Why it has no effect here; ``None``: it has one."""


_FLAG: Final = Key(bool)
_DEGREE: Final = Key(range(1, _ANY_SIZE))

V1: Final[Mapping[str, Key]] = {
    **dict.fromkeys(("partitions", "pipeline_parallel_degree", "microbatches", "active_microbatches"), _DEGREE),
    **dict.fromkeys(("tensor_parallel_degree", "sharded_data_parallel_degree"), _DEGREE),
    **dict.fromkeys(("pipeline", "optimize", "memory_weight", "placement_strategy", "partition_file"), Key()),
    **dict.fromkeys(("auto_partition", "load_partition", "prescaled_batch", "offload_activations"), _FLAG),
    **dict.fromkeys(("shard_optimizer_state", "fp16_params", "fp16", "bf16", "skip_tracing"), _FLAG),
    **dict.fromkeys(("delayed_parameter_initialization", "sdp_hierarchical_allgather", "use_times"), _FLAG),
    **dict.fromkeys(("default_partition", "sdp_param_persistence_threshold"), Key(range(_ANY_SIZE))),
    **dict.fromkeys(("sdp_reduce_bucket_size", "sdp_max_live_parameters", "activation_loading_horizon"), _DEGREE),
    "sdp_gradient_clipping": Key(float),
    "ddp": Key(bool, "replicas are averaged whenever there are several (`ddp_reduction` chooses how)"),
    "ddp_port": Key(range(2**16), "the launcher chooses the port (MASTER_PORT)"),
    "ddp_dist_backend": Key(("auto", "nccl"), "the backend follows the device"),
    "deterministic_server": Key(bool, "ranks always work in the same order"),
    "static_mode": Key(bool, "the order of calls is recorded anyway"),
    "fast_mode": Key(bool, "values always go straight to the stage that uses them"),
    "contiguous": Key(bool, "it is about TensorFlow"),
    "horovod": Key(bool, "replicas are averaged by PyTorch's collectives"),
    "checkpoint_attentions": Key(bool, "`smp.set_activation_checkpointing` says which modules are checkpointed"),
    "_match_weights": Key(bool, "split layers keep the weights of the model"),
    "_fp32_grad_accumulation": Key(bool, "gradients of half precision always add up in float32"),
}
V2: Final[Mapping[str, Key]] = {
    "hybrid_shard_degree": Key(range(_ANY_SIZE)),
    "tensor_parallel_degree": _DEGREE,
    "context_parallel_degree": _DEGREE,
    "expert_parallel_degree": _DEGREE,
    "sm_activation_offloading": _FLAG,
    "activation_loading_horizon": _DEGREE,
    "fsdp_cache_flush_warnings": Key(bool, "it is about FSDP"),
    "allow_empty_shards": Key(bool, "shards may always be empty"),
    "random_seed": Key(
        range(_ANY_SIZE), "initial values are equal on all ranks; set the seed with `torch.manual_seed`"
    ),
}
LIBRARIES: Final = {"modelparallel": Key(dict), "dataparallel": Key(dict)}
LAUNCHERS: Final = {"mpi": Key(dict), "torch_distributed": Key(dict)}
LAUNCHER: Final = {"enabled": _FLAG, "processes_per_host": _DEGREE, "custom_mpi_options": Key(str)}
DISTRIBUTION: Final = {"smdistributed": Key(dict)}
MODEL: Final = {"enabled": _FLAG, "parameters": Key()}
DATA: Final = {"enabled": _FLAG, "custom_mpi_options": Key(str)}


def checked(given: Any, keys: Mapping[str, Key], where: str) -> dict[str, Any]:
    """A dict whose keys are known and whose values are among those that they take; flags may be 0 and 1.

    Args:
        given: From a configuration.
        keys: Known keys.
        where: Name of the dict, for messages.

    Raises:
        ConfigError: It is no dict, or has such mistakes; lists all of them.
    """
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where} must be a dict, but is {given!r}. Known keys: {', '.join(keys)}.")
    problems = [_unknown(name, keys, where) for name in given if name not in keys]
    problems += [
        f"`{name}` must be {_described(keys[name].values)}, but is {value!r}. Correct it, or leave it out."
        for name, value in given.items()
        if name in keys and not _takes(keys[name].values, value)
    ]
    if problems:
        raise ConfigError(problems)
    return {name: bool(value) if keys[name].values is bool else value for name, value in given.items()}


def _takes(values: Any, value: Any) -> bool:
    if values is None:
        return True
    if values is bool:
        return isinstance(value, int) and value in (0, 1)
    if values is dict:
        return isinstance(value, Mapping)
    if isinstance(value, bool):
        return False
    if isinstance(values, range):
        return isinstance(value, int) and value in values
    if values is float:
        return isinstance(value, int | float) and 0 < value < math.inf
    return isinstance(value, str) and (values is str or value in values)


def _described(values: Any) -> str:
    if isinstance(values, range):
        end = "on" if values.stop == _ANY_SIZE else f"to {values.stop - 1}"
        return f"a whole number from {values.start} {end}"
    words = {bool: "True or False", str: "a text", dict: "a dict", float: "a number above 0"}
    return " or ".join(values) if isinstance(values, tuple) else words[values]


def _unknown(name: Any, known: Collection[str], where: str) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.7) if isinstance(name, str) else []
    hint = f" Did you mean `{near[0]}`?" if near else f" Known: {', '.join(sorted(known))}."
    return f"`{name}` is no key of {where}.{hint}"
