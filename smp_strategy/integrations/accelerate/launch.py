"""Patches of Accelerate that let a configuration file or the environment choose a layout, without code.

:mod:`smp_strategy.integrations.autoload` passes a module of Accelerate to :func:`patch` as soon as that module has
been imported.

========================= ==========================================================================================
``Accelerator.__init__``  takes ``SMPPlugin()`` if ``ACCELERATE_USE_SMP`` is true and no other plugin is given
``PartialState.__init__`` lets ranks meet before their process group, where they use this package
``ClusterConfig``         has one more field, ``smp_config``, which Accelerate would refuse as an unknown key
``prepare_*_env``         pass that field to the processes of ``accelerate launch``; on CPUs, start them
========================= ==========================================================================================

Without a selection each of them behaves as in Accelerate. The launcher's functions are replaced in the modules that
define them, before others import them by name, so ``accelerate launch``, ``accelerate-launch`` and
``python -m accelerate.commands.launch`` behave alike.

Accelerate launches several processes by ``torchrun`` for GPUs only; for CPUs it needs MPI, and without MPI it starts a
single process. So CPU processes are started by ``torchrun`` here, and told to use the CPU.
"""

import functools
import inspect
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import make_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from smp_strategy.config.variables import SELECTED, is_selected
from smp_strategy.errors import ConfigError
from smp_strategy.integrations.accelerate.launch_options import LaunchOptions, check_processes

__all__ = ["patch", "patch_state"]

# Options of torchrun that Accelerate's own options, and its `prepare_multi_gpu_env`, leave in the arguments.
TORCHRUN_OPTIONS = (
    "nproc_per_node",
    "nnodes",
    "node_rank",
    "master_addr",
    "master_port",
    "rdzv_endpoint",
    "rdzv_backend",
    "rdzv_conf",
    "max_restarts",
    "monitor_interval",
    "role",
    "tee",
    "log_dir",
)
TORCHRUN_SWITCHES = ("standalone", "module", "no_python")
_PLUGIN = "smp_strategy.integrations.accelerate.plugin"


def patch(module: ModuleType) -> None:
    """Patch ``module``, which :mod:`smp_strategy.integrations.autoload` names; a second call does nothing."""
    changes: dict[str, Callable[[Any], None]] = {
        "accelerate.accelerator": _patch_accelerator,
        "accelerate.utils.launch": _patch_preparation,
        "accelerate.commands.config.config_args": _patch_config,
    }
    if not hasattr(module, "_smp_strategy"):
        module._smp_strategy = True  # type: ignore[attr-defined]
        changes[module.__name__](module)


# --- in every process -------------------------------------------------------------------------------------------------


def patch_state(state: Any) -> None:
    """Patch ``state``, the class ``PartialState``, which makes the process group; a second call does nothing.

    The Trainer and many scripts make one before the Accelerator. A group of the script's own stays as it is.
    """
    original = state.__init__
    if hasattr(original, "_smp_strategy"):
        return

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **options: Any) -> None:
        is_ours = is_selected(os.environ) or _PLUGIN in sys.modules
        if is_ours and not {"init_method", "store"} & options.keys():
            from smp_strategy.engine.lifecycle.first_meeting import init_method

            options["init_method"] = init_method()
        original(self, *args, **options)

    __init__._smp_strategy = True  # type: ignore[attr-defined]
    state.__init__ = __init__


def _patch_accelerator(module: Any) -> None:
    patch_state(module.PartialState)
    original = module.Accelerator.__init__
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **options: Any) -> None:
        given = signature.bind_partial(self, *args, **options).arguments.get("parallelism_config")
        if is_selected(os.environ):
            plugin = _plugin_beside(given)
            if given is None:
                given = options["parallelism_config"] = plugin
        original(self, *args, **options)
        _check_served(self, given)

    module.Accelerator.__init__ = __init__


def _plugin_beside(given: Any) -> Any:
    """Return the plugin, unless the script has ``given`` another ``parallelism_config``."""
    from smp_strategy.integrations.accelerate.plugin import SMPPlugin

    if given is not None and not isinstance(given, SMPPlugin):
        raise ConfigError(
            f"{SELECTED} is true, but the script gives Accelerate another `parallelism_config` "
            f"({type(given).__name__}). Leave one of them out: unset {SELECTED}, or give an SMPPlugin."
        )
    return SMPPlugin() if given is None else given


def _check_served(accelerator: Any, given: Any) -> None:
    # The first Accelerator creates the shared state of the process; Accelerate ignores plugins of later ones.
    plugins = sys.modules.get(_PLUGIN)
    if plugins is not None and isinstance(given, plugins.SMPPlugin) and not hasattr(accelerator, "smp"):
        raise ConfigError(
            "This process has made an Accelerator without SMPPlugin before, and Accelerate takes no other "
            "`parallelism_config` after that. Give the plugin to the first one."
        )


# --- in the launcher --------------------------------------------------------------------------------------------------


def _patch_config(module: Any) -> None:
    base = module.ClusterConfig

    def __post_init__(self: Any) -> None:
        base.__post_init__(self)
        if self.smp_config is not False:
            # Not a dict: the launcher would copy its items over arguments of its own.
            self.smp_config = LaunchOptions(self.smp_config)

    def to_dict(self: Any) -> dict[str, Any]:
        fields = base.to_dict(self)
        chosen = fields.pop("smp_config", False)
        return fields if chosen is False else {**fields, "smp_config": chosen.node}

    # `False` if the file has no such key: an empty `smp_config:` (None) selects smp_strategy, too.
    extended = make_dataclass(
        base.__name__,
        [("smp_config", Any, False)],
        bases=(base,),
        namespace={"__post_init__": __post_init__, "to_dict": to_dict, "__doc__": base.__doc__},
    )
    extended.__module__ = base.__module__
    module.ClusterConfig = extended


def _patch_preparation(module: Any) -> None:
    several, single = module.prepare_multi_gpu_env, module.prepare_simple_launcher_cmd_env

    @functools.wraps(several)
    def prepare_multi_gpu_env(args: Namespace) -> dict[str, str]:
        added = variables_for(args, os.environ)
        return {**several(args), **added}

    @functools.wraps(single)
    def prepare_simple_launcher_cmd_env(args: Namespace) -> tuple[list[str], dict[str, str]]:
        added = variables_for(args, os.environ)
        if added and args.mpirun_hostfile is None and (args.num_processes or 1) > 1:
            variables = {**several(args), **added}  # it leaves in `args` what torchrun is to be told
            return torchrun_command(args), variables
        command, variables = single(args)
        return command, {**variables, **added}

    module.prepare_multi_gpu_env = prepare_multi_gpu_env
    module.prepare_simple_launcher_cmd_env = prepare_simple_launcher_cmd_env
    for name, what in (("prepare_deepspeed_cmd_env", "DeepSpeed"), ("prepare_tpu", "TPUs")):
        setattr(module, name, _refusing(getattr(module, name), what))


def _refusing(original: Callable[..., Any], what: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def prepare(args: Namespace, *others: Any, **options: Any) -> Any:
        if _selection(args, os.environ) is not None:
            raise _contradiction(what)
        return original(args, *others, **options)

    return prepare


def _contradiction(what: str) -> ConfigError:
    return ConfigError(
        f"smp_strategy is selected (`smp_config`, or {SELECTED}), but the launch is for {what}. Leave one of them out; "
        "`distributed_type: MULTI_GPU`, or MULTI_CPU, goes with smp_strategy."
    )


def variables_for(args: Namespace, environ: Mapping[str, str]) -> dict[str, str]:
    """Additional environment variables for the processes of a launch; none if smp_strategy is not selected.

    The arguments are those of ``accelerate launch``, with the values of the file filled in.
    """
    selection = _selection(args, environ)
    if selection is None:
        return {}
    if _is_own_test(getattr(args, "training_script", None)):
        raise ConfigError(
            "`accelerate test` runs a script of Accelerate, in which each process must be a replica with a whole model "
            "and several models are trained at once, so it cannot test a layout of smp_strategy. Leave `smp_config` "
            f"out of the file (or set {SELECTED}=false) to test the machine, and try the layout with your own script."
        )
    for switch, what in (("use_fsdp", "FSDP"), ("use_megatron_lm", "Megatron-LM")):
        if getattr(args, switch, False):
            raise _contradiction(what)
    added = selection.variables(environ)
    if args.num_processes:
        check_processes({**environ, **added}, args.num_processes, args.num_machines or 1)
    if args.cpu or args.use_cpu:
        added["ACCELERATE_USE_CPU"] = "true"
    elif (args.num_processes or 1) > 1 and not torch.accelerator.is_available():
        raise ConfigError(
            f"{args.num_processes} processes are to be launched on accelerators, but there is none here. Say "
            "`use_cpu: true` in the file, or --cpu, to train on CPUs."
        )
    return added


def _is_own_test(script: Any) -> bool:
    """Whether ``script`` is the one of `accelerate test`."""
    return script is not None and Path(script).parts[-4:] == ("accelerate", "test_utils", "scripts", "test_script.py")


def _selection(args: Namespace, environ: Mapping[str, str]) -> LaunchOptions | None:
    """Options of the file; empty options if only the environment selects smp_strategy; ``None`` if neither does."""
    said, in_file = is_selected(environ), getattr(args, "smp_config", None)
    if said is False or (not said and not isinstance(in_file, LaunchOptions)):
        return None
    return in_file if isinstance(in_file, LaunchOptions) else LaunchOptions(None)


def torchrun_command(args: Namespace) -> list[str]:
    """Command that starts the processes; ``args`` as ``prepare_multi_gpu_env`` leaves them."""
    given = {name: getattr(args, name, None) for name in TORCHRUN_OPTIONS}
    switches = [f"--{name}" for name in TORCHRUN_SWITCHES if getattr(args, name, False)]
    options = [f"--{name}={value}" for name, value in given.items() if value not in (None, "")]
    script = [args.training_script, *args.training_script_args]
    return [sys.executable, "-m", "torch.distributed.run", *options, *switches, *script]
