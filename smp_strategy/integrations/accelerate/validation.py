"""Validation of unsupported options and objects, when the Accelerator is made or an object is prepared."""

import os
from collections.abc import Iterable, Mapping
from typing import Any

from accelerate.utils import DDPCommunicationHookType, DistributedType, DynamoBackend
from torch import nn
from torch.optim import Optimizer

from smp_strategy.config.config import SMPConfig
from smp_strategy.errors import ConfigError, SMPError, UnsupportedError

__all__ = [
    "prepared_elsewhere",
    "problems_of_accelerator",
    "problems_of_base",
    "refuse_compiled",
    "refuse_foreign",
    "second_model",
]

_INSTEAD = {
    "dp_replicate_size": "leave it out: processes that are left over by the other degrees are replicas",
    "dp_shard_size": "set `sharded_data_parallel_degree`",
    "tp_size": "set `tensor_parallel_degree`",
    "tp_handler": "set `tensor_parallel_degree`",
}
_OTHERS = {
    "FSDP": ("FSDP", "`sharded_data_parallel_degree` of SMPPlugin shards parameters"),
    "DEEPSPEED": ("DeepSpeed", "`sharded_data_parallel_degree` and `shard_optimizer_state` of SMPPlugin do its part"),
    "MEGATRON_LM": (
        "Megatron-LM",
        "`pipeline_parallel_degree` and `tensor_parallel_degree` of SMPPlugin do its part",
    ),
}


def problems_of_base(given: Mapping[str, Any]) -> list[str]:
    """List problems with ``given`` values for the fields of Accelerate's own ``ParallelismConfig``."""
    found = []
    for name, value in sorted(given.items()):
        if value is None or (name.endswith("_size") and value == 1):
            continue
        instead = _INSTEAD.get(name, "leave it out: context and sequence parallelism are not offered")
        found.append(f"`{name}={value!r}` asks Accelerate itself for parallelism, not SMPPlugin. Instead, {instead}.")
    return found


def problems_of_accelerator(accelerator: Any, config: SMPConfig) -> list[str]:
    """List other settings of the Accelerator that contradict the plugin."""
    found = []
    state = accelerator.state
    kind = state.distributed_type
    for name, (title, instead) in _OTHERS.items():
        # On CPUs Accelerate passes over such a plugin, and only the environment tells that one was given.
        if kind == DistributedType[name] or os.environ.get(f"ACCELERATE_USE_{name}", "false").lower() == "true":
            found.append(
                f"SMPPlugin and {title} both distribute the model. Leave the {title} plugin out, and ACCELERATE_USE_"
                f"{name} out of the environment; {instead}."
            )
    if kind == DistributedType.XLA:
        found.append(f"SMPPlugin runs on CPUs and GPUs, but Accelerate has chosen {kind.value}. Choose other devices.")
    if state.dynamo_plugin is not None and state.dynamo_plugin.backend != DynamoBackend.NO:
        found.append(
            f"`dynamo_backend={state.dynamo_plugin.backend.value.lower()}` compiles the model as a whole, of which "
            "every rank has a part. Leave it out and set `compile=True` in SMPPlugin, which compiles each unit."
        )
    handler = accelerator.ddp_handler
    if handler is not None and handler.comm_hook != DDPCommunicationHookType.NO:
        found.append(
            f"`DistributedDataParallelKwargs(comm_hook={handler.comm_hook.value})` is about gradients of PyTorch's "
            "DDP, which is not in use. Leave it out, and set `reduce_dtype` in SMPPlugin to send gradients in half "
            "precision."
        )
    if accelerator.scaler_handler is not None and (config.fp16 or config.fp16_params):
        found.append(
            "`GradScalerKwargs` is about `mixed_precision=fp16` of Accelerate, but the losses are scaled for `fp16` of "
            "SMPPlugin. Leave it out, and set `init_scale`, `scale_factor` or `scale_window` in SMPPlugin."
        )
    found += _problems_of_precision(state.mixed_precision, accelerator.device.type, config)
    return found


def _problems_of_precision(mixed_precision: str, device_type: str, config: SMPConfig) -> list[str]:
    if mixed_precision == "fp8":
        return ["`mixed_precision=fp8` is not offered by SMPPlugin. Use 'bf16'."]
    own = [name for name in ("fp16", "bf16", "fp16_params") if getattr(config, name)]
    if mixed_precision != "no" and own:
        return [
            f"`mixed_precision={mixed_precision}` of Accelerate and `{own[0]}=True` of SMPPlugin both choose in what "
            "the model computes. Leave one of them out."
        ]
    if mixed_precision == "fp16" and device_type == "cpu":
        return ["`mixed_precision=fp16` does nothing on a CPU in Accelerate. Use 'bf16', or `fp16=True` in SMPPlugin."]
    asked = config.scaling_asked
    if asked and mixed_precision != "fp16" and not (config.fp16 or config.fp16_params):
        return [f"{' and '.join(asked)} has no effect: nothing computes in float16. Set `fp16=True`, or leave it out."]
    return []


def refuse_compiled(model: nn.Module) -> None:
    """Raise if ``model`` is compiled as a whole."""
    if hasattr(model, "_orig_mod"):
        raise ConfigError(
            "The model is compiled as a whole (`torch.compile(model)`), but every rank has a part of it. Prepare the "
            "model itself, and set `compile=True` in SMPPlugin, which compiles each unit."
        )


def refuse_foreign(model: nn.Module, optimizers: Iterable[Optimizer]) -> None:
    """Raise if ``optimizers`` train anything that is not a part of ``model``."""
    own = {id(parameter) for parameter in model.parameters()}
    for optimizer in optimizers:
        trained = [each for group in optimizer.param_groups for each in group["params"]]
        foreign = [list(each.shape) for each in trained if id(each) not in own]
        if foreign:
            shown = ", ".join(map(str, foreign[:3])) + (" ..." if len(foreign) > 3 else "")
            raise ConfigError(
                f"{type(optimizer).__name__} trains {len(foreign)} of {len(trained)} parameters that the prepared "
                f"{type(model).__name__} does not have (of shapes {shown}). They would not be averaged over replicas, "
                "nor saved. Make them a part of the model (a criterion with parameters can be a submodule), build the "
                "optimizer for the model that is prepared, or leave this optimizer unprepared."
            )


def second_model(model: nn.Module, first: nn.Module) -> UnsupportedError:
    """Error about a second trained model in one Accelerator."""
    kinds = type(model).__name__, type(first).__name__
    which = "another" if kinds[0] == kinds[1] else "a"
    return UnsupportedError(
        f"This Accelerator already spreads a {kinds[1]}, and {which} {kinds[0]} is prepared: there can be one such "
        "model. Put modules that are trained together into one `nn.Module`, or prepare each of them, with its "
        "optimizer, with an Accelerator of its own (`Accelerator().prepare(...)`); freeze one that is not trained, or "
        "call `prepare_model(..., evaluation_mode=True)` for it, so that every rank keeps the whole of it; or call "
        "`accelerator.free_memory()` when the first one is done with."
    )


def prepared_elsewhere(model: nn.Module) -> SMPError:
    """Error about a model that another Accelerator has prepared."""
    return SMPError(
        f"This {type(model).__name__} was prepared by another Accelerator, which still spreads it. Go on with that "
        "one, or call its `free_memory()` first."
    )
