"""Contexts and calls for models that are being created: stages, split layers, delayed values, checkpoints."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Final, TypeVar

import torch
from torch import nn
from torch.utils import checkpoint as torch_checkpoint

import smp_strategy
from smp_strategy.engine.module_marks import check_classes
from smp_strategy.errors import ConfigError, UnsupportedError
from smp_strategy.integrations.sagemaker import nn as own_layers
from smp_strategy.integrations.sagemaker.nn.transformer_layers import own_initialisation
from smp_strategy.integrations.sagemaker.run_state import current_run, is_initialized

__all__ = [
    "checkpoint",
    "delay_param_initialization",
    "model_creation",
    "partition",
    "register_parameter",
    "set_activation_checkpointing",
    "set_partition",
    "set_tensor_parallelism",
    "tensor_parallelism",
    "tp_register",
    "tp_register_with_module",
]

# Options of SageMaker's own split layers.
_LAYER_OPTIONS: Final = frozenset(
    {
        *("fused_softmax", "fused_bias_gelu", "fused_dropout", "attention_in_fp32", "query_key_layer_scaling"),
        *("fp32_residual_addition", "zero_init", "distribute_embedding", "use_alibi", "alibi_bias_max"),
        *("flash_attention", "distributed_init", "optimize"),
    }
)

_LAYERS: Final = frozenset(getattr(own_layers, name) for name in own_layers.__all__ if name != "huggingface")

Module = TypeVar("Module", bound=nn.Module)
Class = TypeVar("Class", bound=type[nn.Module])


def partition(index: int) -> AbstractContextManager[None]:
    """Context that places all modules created in it on stage ``index``; ignored with ``auto_partition``."""
    return nullcontext() if _is_ignored("smp.partition") else smp_strategy.partition(index)


def set_partition(module: Module, index: int) -> Module:
    """Place ``module`` and everything that it holds now on stage ``index``; ignored with ``auto_partition``.

    Raises:
        UnsupportedError: the first step has decided on the partition.
    """
    _refuse_late("smp.set_partition", module)
    return module if _is_ignored("smp.set_partition") else smp_strategy.set_partition(module, index)


def set_activation_checkpointing(
    module: Module, preserve_rng_state: bool = True, pack_args_as_tuple: bool = False, strategy: str = "each"
) -> Module:
    """Checkpoint ``module``: see :func:`smp_strategy.activations.selection.set_activation_checkpointing`.

    Raises:
        UnsupportedError: the first step has decided on the partition.
    """
    _refuse_late("smp.set_activation_checkpointing", module)
    return smp_strategy.set_activation_checkpointing(module, preserve_rng_state, pack_args_as_tuple, strategy)


def tp_register(
    dist_module: type[nn.Module],
    init_hook: Callable[..., Any] | None = None,
    forward_hook: Callable[..., Any] | None = None,
    return_hook: Callable[[Any], Any] | None = None,
) -> Callable[[Class], Class]:
    """Class decorator that registers a class as :func:`tp_register_with_module` does."""

    def register(kind: Class) -> Class:
        tp_register_with_module(kind, dist_module, init_hook, forward_hook, return_hook)
        return kind

    return register


def tp_register_with_module(
    module_cls: type[nn.Module],
    dist_module: type[nn.Module],
    init_hook: Callable[..., Any] | None = None,
    forward_hook: Callable[..., Any] | None = None,
    return_hook: Callable[[Any], Any] | None = None,
) -> None:
    """Register the split twin of an existing class; see :mod:`smp_strategy.tensor_parallel.plan.registry`.

    If the twin is a layer of ``smp.nn``, which SageMaker's library puts in the place of a layer with values of its own,
    the layer stays and is split in place, and the hooks are not called.
    """
    check_classes(module_cls, dist_module)
    if dist_module not in _LAYERS:
        smp_strategy.tp_register_with_module(module_cls, dist_module, init_hook, forward_hook, return_hook)
    else:
        tell = current_run().note if is_initialized() else warnings.warn
        tell(
            f"`{module_cls.__name__}` is not replaced by `smp.nn.{dist_module.__name__}`: it keeps its layers, which "
            "are split in place."
        )


def tensor_parallelism(enabled: bool = True, **tp_config: Any) -> AbstractContextManager[None]:
    """Context that enables or disables the split of all modules created in it. The innermost wins.

    Args:
        enabled: whether they are split.
        tp_config: options of SageMaker's own layers, which have no effect: a module's own code computes.
    """
    _note_layer_options(tp_config, "smp.tensor_parallelism")
    return _split(enabled)


def set_tensor_parallelism(module: Module, enabled: bool = True, **tp_config: Any) -> Module:
    """Enable or disable the split of ``module`` and everything that it contains now; returns ``module``.

    Args:
        module: a part of the model.
        enabled: whether it is split.
        tp_config: as of :func:`tensor_parallelism`.
    """
    _note_layer_options(tp_config, "smp.set_tensor_parallelism")
    return smp_strategy.set_tensor_parallelism(module, enabled)


@contextmanager
def model_creation(
    tensor_parallelism: bool = False, dtype: torch.dtype | None = None, **tp_config: Any
) -> Iterator[None]:
    """Context that creates a model: its split, dtype and delayed values.

    Args:
        tensor_parallelism: whether the modules created in it are split.
        dtype: dtype of parameters; ``None``: the default one.
        tp_config: as of :func:`tensor_parallelism`.
    """
    _note_layer_options(tp_config, "smp.model_creation")
    default = torch.get_default_dtype()
    with ExitStack() as stack:
        if tensor_parallelism:
            stack.enter_context(_split(True))
        if current_run().config.delayed_parameter_initialization:
            stack.enter_context(delay_param_initialization())
        if dtype is not None:
            torch.set_default_dtype(dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(default)


@contextmanager
def _split(enabled: bool) -> Iterator[None]:
    with smp_strategy.tensor_parallelism(enabled), own_initialisation() if enabled else nullcontext():
        yield


@contextmanager
def delay_param_initialization(enabled: bool = True) -> Iterator[None]:
    """Context in which parameters get no memory. Each rank initialises those of its own part in the first step."""
    if not enabled:
        yield
        return
    with torch.device("meta"):
        yield


def register_parameter(module: nn.Module, param: nn.Parameter) -> None:
    """Declare a parameter that ``module`` uses and does not have; no effect: uses are found by the dry run."""
    if not isinstance(param, nn.Parameter):
        raise ConfigError(f"`param` must be a parameter, but is of type {type(param).__name__}.")


def checkpoint(module: nn.Module, *args: Any, preserve_rng_state: bool = True) -> Any:
    """``module(*args)`` of which only the inputs are kept; backward computes the rest again."""
    if not isinstance(module, nn.Module):
        raise ConfigError(
            f"`checkpoint` takes a module, but got {module!r}. Use `torch.utils.checkpoint` for functions."
        )
    return torch_checkpoint.checkpoint(module, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state)


def _refuse_late(call: str, module: nn.Module) -> None:
    models = current_run().models if is_initialized() else ()
    if any(model.partitioned and any(part is module for part in model.module.modules()) for model in models):
        raise UnsupportedError(
            f"`{call}` is called after the first step, which has decided where modules run and what they keep. Call it "
            "before."
        )


def _is_ignored(call: str) -> bool:
    """Whether a placement by hand has no effect, as in SageMaker's library."""
    if not (is_initialized() and current_run().config.auto_partition):
        return False
    current_run().note(f"`{call}` has no effect: the partition is chosen automatically. Set `auto_partition` to False.")
    return True


def _note_layer_options(given: dict[str, Any], call: str) -> None:
    if unknown := sorted(set(given) - _LAYER_OPTIONS):
        raise ConfigError(f"`{call}` got unknown arguments: {', '.join(unknown)}.")
    if given and is_initialized():
        current_run().note(
            f"{', '.join(f'`{name}`' for name in sorted(given))} of `{call}` have no effect: they are about layers "
            "that SageMaker's library puts in the place of a model's own, which compute here."
        )
