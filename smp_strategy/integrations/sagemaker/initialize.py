"""``smp.init`` and ``smp.shutdown``: process group, configuration, and what is replaced in PyTorch during a run.

Parameters of wrapped models in PyTorch's own calls: gradient clipping, and optimizers that are not wrapped.

``torch.nn.utils.clip_grad_norm_`` clips by the norm over the gradients of all ranks: a rank has those of its own part
only, so PyTorch's function would clip each rank by a norm of its own. An optimizer that was not wrapped is refused: its
gradients would not be final.

Environment variables of SageMaker's containers: parameters, hosts, and the ranks that ``mpirun`` gives.

SageMaker's toolkit passes the ``parameters`` of an estimator as ``SM_HP_MP_PARAMETERS``, and as ``mp_parameters`` among
all hyperparameters in ``SM_HPS``. It starts one process per device with MPI. Hosts stand in ``SM_HOSTS``.
Hyperparameters (``SM_HP_*``), data channels (``SM_CHANNEL_*``) and ``SM_MODEL_DIR`` are read by scripts themselves.
"""

import functools
import json
import os
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from types import SimpleNamespace
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from smp_strategy.config.config import SMPConfig
from smp_strategy.config.mpi_variables import ranks_of_mpi
from smp_strategy.config.sagemaker_options import read_sagemaker
from smp_strategy.engine.lifecycle.crash_report import keep_short
from smp_strategy.engine.lifecycle.run_lifecycle import (
    begin_run,
    ensure_group,
    note_settings,
    of_fields,
    of_options,
    of_process,
)
from smp_strategy.engine.updates.optimizer_steps import trains
from smp_strategy.errors import ConfigError, DoorWords, SMPError, UnsupportedError
from smp_strategy.integrations.sagemaker.run_state import (
    RunState,
    begin_current,
    current_run,
    end_current,
    is_initialized,
)
from smp_strategy.model.patching import Patches

__all__ = [
    "WORDS",
    "choose_device",
    "ensure_process_group",
    "given_parameters",
    "init",
    "set_launch_variables",
    "shutdown",
]

WORDS: Final = DoorWords(
    in_hook="after `model.cpu()` on all ranks",
    first_pass="before `smp.DistributedModel`",
    save_model="`smp.save_checkpoint(path, tag, partial=False)` or `model.state_dict()`",
    save_all="`smp.save_checkpoint`",
    whole_state=", or `state_dict()` of the optimizer that `smp.DistributedOptimizer` has returned",
    on_one="if smp.rank() == 0: ",
    on_one_saves="`if smp.rank() == 0: smp.save_checkpoint(...)`",
    tell="`StepOutput.reduce_mean()` outside of the step",
    clip="`optimizer.clip_master_grads`",
    average="`torch.distributed.all_reduce(value)`",
    end_of_run="the run",
)


def init(config: Mapping[str, Any] | str | os.PathLike[str] | None = None) -> None:
    """Begin a run. Collective.

    Parameters that the launcher gives (``SM_HP_MP_PARAMETERS``) take precedence over ``config``, and ``SMP_<OPTION>``
    variables over both. Until a model is wrapped another call begins again: in a training container the import of
    Transformers' TrainingArguments makes the first one. The launcher is ``torchrun`` or ``mpirun``; a process that was
    started alone is the only rank.

    Args:
        config: SageMaker's parameters, or the path of a JSON file with them.

    Raises:
        ConfigError: a mistake in the configuration, or degrees that do not fit the number of ranks.
        SMPError: a run has begun already, with a model.
    """
    if is_initialized():
        if current_run().models:
            raise SMPError(
                "`smp.init` was called before, and a model is wrapped. Call `smp.shutdown()` to begin another run."
            )
        end_current()
    keep_short()
    device = choose_device()
    ensure_process_group(device)
    given = read_sagemaker(config, launched=given_parameters(os.environ), world_size=dist.get_world_size())
    begin_run(WORDS)
    parameters = of_fields(SimpleNamespace(**given.parameters), given.parameters, "the parameter `{}`")
    options = of_options(SMPConfig.from_sagemaker_options(given.options), "the option `{}`")
    note_settings({**parameters, **options, **of_process()}).compare("`smp.init`")
    run = RunState(given, device)
    begin_current(run)
    run.at_end += [_clip_globally(), _refuse_unwrapped(run)]


def shutdown() -> None:
    """End the run. Models keep their state as it is; the default process group stays."""
    end_current()


def choose_device() -> torch.device:
    """Device of this rank, which becomes the current one."""
    set_launch_variables(os.environ)
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    number = int(os.environ.get("LOCAL_RANK", 0)) % torch.accelerator.device_count()
    torch.accelerator.set_device_index(number)
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    return torch.device(accelerator.type, number)


def ensure_process_group(device: torch.device) -> None:
    """Make the default process group if there is none. It carries tensors of the host in any case."""
    kind = device.type
    shares = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) > max(torch.accelerator.device_count(), 1)
    own = dist.Backend.default_device_backend_map.get(kind, "gloo")
    backend = "gloo" if kind == "cpu" or shares else f"cpu:gloo,{kind}:{own}"
    ensure_group(kind, backend, is_launched="RANK" in os.environ)


def _clip_globally() -> Callable[[], None]:
    """Replace PyTorch's function, until the function that is returned is called."""
    patches, replaced = Patches(), _around(torch.nn.utils.clip_grad_norm_)
    for place in (torch.nn.utils, torch.nn.utils.clip_grad):
        patches.put(place, "clip_grad_norm_", replaced)
    return patches.give_back


def _around(original: Any) -> Any:
    @functools.wraps(original)
    def clip_grad_norm_(
        parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0, *args: Any, **kwargs: Any
    ) -> Any:
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        known = {id(each) for each in given}
        for optimizer in current_run().optimizers if is_initialized() else ():
            engine = optimizer.model.engine
            own = any(id(each) in known for each in optimizer.model.module.parameters())
            if own and engine.partition is not None:
                optimizer.make_final()
                return engine.clip_grad_norm_(given, max_norm, float(norm_type))  # type: ignore[arg-type]
        return original(given, max_norm, norm_type, *args, **kwargs)

    return clip_grad_norm_


def _refuse_unwrapped(run: RunState) -> Callable[[], None]:
    """Refuse steps of optimizers that are not wrapped, until the function that is returned is called."""

    def check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if run.shape.world_size == 1 or any(optimizer in (each, each.optimizer) for each in run.optimizers):
            return
        for model in run.models:
            if model.partitioned and trains(optimizer, model.module):
                name = type(optimizer).__name__
                raise UnsupportedError(
                    f"{name} steps without being wrapped, but its gradients are not final and its parameters are "
                    "spread over the ranks. Wrap it: `optimizer = smp.DistributedOptimizer(optimizer)`."
                )

    return register_optimizer_step_pre_hook(check).remove


_PARAMETERS, _ALL = "SM_HP_MP_PARAMETERS", "SM_HPS"
# The toolkit's port.
_PORT: Final = "7777"


def given_parameters(environ: Mapping[str, str]) -> Any:
    """Parameters that the launcher gives: a dict, the path of a JSON file, or ``None``."""
    text = environ.get(_PARAMETERS, "").strip()
    if not text:
        all_given = _json_in(environ, _ALL, {})
        if not isinstance(all_given, Mapping):
            raise ConfigError(f"{_ALL} must be a dict as JSON, but is {environ[_ALL]!r}. SageMaker's toolkit sets it.")
        return _parsed(all_given.get("mp_parameters") or None)
    return _parsed(text)


def _parsed(given: Any) -> Any:
    """Parameters that may be text: JSON or a path."""
    if not isinstance(given, str) or not given.startswith(("{", '"')):
        return given
    try:
        return json.loads(given)
    except ValueError as error:
        raise ConfigError(f"{_PARAMETERS} must be a dict as JSON, or the path of a JSON file: {error}.") from error


def set_launch_variables(environ: MutableMapping[str, str]) -> None:
    """Set the variables of ``torchrun`` where ``mpirun`` has started the ranks."""
    found = ranks_of_mpi(environ)
    if "RANK" in environ or not found:
        return
    environ.update(found)
    environ.setdefault("LOCAL_WORLD_SIZE", environ.get("SM_NUM_GPUS", "1"))
    hosts = _json_in(environ, "SM_HOSTS", [])
    if not hosts and "MASTER_ADDR" not in environ and int(environ["WORLD_SIZE"]) > int(environ["LOCAL_WORLD_SIZE"]):
        raise ConfigError(
            f"`mpirun` has started {environ['WORLD_SIZE']} processes on several machines "
            f"({environ['LOCAL_WORLD_SIZE']} on this one), but not said where they meet. Set MASTER_ADDR to the "
            "address of rank 0 for all of them."
        )
    environ.setdefault("MASTER_ADDR", hosts[0] if hosts else "127.0.0.1")
    environ.setdefault("MASTER_PORT", _PORT)


def _json_in(environ: Mapping[str, str], name: str, default: Any) -> Any:
    try:
        return json.loads(environ.get(name, "").strip() or "null") or default
    except ValueError as error:
        raise ConfigError(f"{name} must be JSON, as SageMaker's toolkit sets it: {error}.") from error
