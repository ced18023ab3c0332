"""Keys of SageMaker's configuration: their values, and those that have no effect here.

One table per dict that a configuration contains. A key that is in no table is refused, and so is a value that its key
does not take: SageMaker's library would fail later, or read it in a way of its own (any text is true, say).
"""

import difflib
import math
import sys
from collections.abc import Collection, Mapping
from typing import Any, Final, NamedTuple

from smp_strategy.errors import ConfigError

__all__ = ["DATA", "DISTRIBUTION", "LAUNCHER", "LAUNCHERS", "LIBRARIES", "MODEL", "V1", "V2", "Key", "checked"]

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
    **dict.fromkeys(("pipeline_parallel_degree", "microbatches", "active_microbatches"), _DEGREE),
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
