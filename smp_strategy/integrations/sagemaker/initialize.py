"""``smp.init`` and ``smp.shutdown``: process group, configuration, and what is replaced in PyTorch during a run."""

import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from smp_strategy.config.config import SMPConfig
from smp_strategy.config.sagemaker_options import read_sagemaker
from smp_strategy.distributed.agreement.common_settings import of_options, of_process, shown
from smp_strategy.distributed.agreement.ledger import Ledger
from smp_strategy.distributed.agreement.topics import SETTINGS
from smp_strategy.distributed.crash_report import keep_short
from smp_strategy.distributed.door_words import OF_SAGEMAKER, speak
from smp_strategy.distributed.failure import begin_run
from smp_strategy.distributed.process_groups import carry_host_tensors
from smp_strategy.errors import SMPError
from smp_strategy.integrations.sagemaker.run_state import (
    RunState,
    begin_current,
    current_run,
    end_current,
    is_initialized,
)
from smp_strategy.integrations.sagemaker.sm_variables import given_parameters, set_launch_variables
from smp_strategy.integrations.sagemaker.unwrapped_calls import GlobalClipping, refuse_unwrapped

__all__ = ["choose_device", "ensure_process_group", "init", "shutdown"]


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
    begin_run()
    speak(OF_SAGEMAKER)
    parameters = {f"the parameter `{name}`": shown(value) for name, value in given.parameters.items()}
    options = of_options(SMPConfig.from_sagemaker_options(given.options), "the option `{}`")
    Ledger().note(SETTINGS, {**parameters, **options, **of_process()}).compare("`smp.init`")
    run = RunState(given, device)
    begin_current(run)
    run.at_end += [GlobalClipping().remove, refuse_unwrapped(run)]


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
    if dist.is_initialized():
        carry_host_tensors(kind)
        return
    shares = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) > max(torch.accelerator.device_count(), 1)
    own = dist.Backend.default_device_backend_map.get(kind, "gloo")
    backend = "gloo" if kind == "cpu" or shares else f"cpu:gloo,{kind}:{own}"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
