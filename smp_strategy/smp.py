"""SageMaker's model parallel library: ``import smp_strategy.smp as smp`` in the place of its import.

Names, arguments and meaning are those of ``smdistributed.modelparallel.torch``. See ``docs/sagemaker.md``.
``python -m smp_strategy.smp script.py`` runs a script that has that import
(:mod:`smp_strategy.integrations.sagemaker.run_script`).
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any, Final

from smp_strategy.activations.submodules import checkpoint_sequential
from smp_strategy.engine.saving.tagged_checkpoints import resume_from_checkpoint, save_checkpoint
from smp_strategy.integrations.sagemaker import amp, nn, optimizers
from smp_strategy.integrations.sagemaker.creation import (
    checkpoint,
    delay_param_initialization,
    model_creation,
    partition,
    register_parameter,
    set_activation_checkpointing,
    set_partition,
    set_tensor_parallelism,
    tensor_parallelism,
    tp_register,
    tp_register_with_module,
)
from smp_strategy.integrations.sagemaker.distributed_model import DistributedModel
from smp_strategy.integrations.sagemaker.distributed_optimizer import DistributedOptimizer
from smp_strategy.integrations.sagemaker.initialize import init, shutdown
from smp_strategy.integrations.sagemaker.rank_calls import (
    CommGroup,
    RankType,
    allgather,
    barrier,
    broadcast,
    dp_barrier,
    dp_rank,
    dp_size,
    get_dp_group,
    get_dp_process_group,
    get_mp_group,
    get_mp_process_group,
    get_pp_group,
    get_pp_process_group,
    get_rdp_group,
    get_rdp_process_group,
    get_tp_group,
    get_tp_process_group,
    get_world_process_group,
    load,
    local_rank,
    local_size,
    mp_barrier,
    mp_rank,
    mp_size,
    pp_rank,
    pp_size,
    rank,
    rdp_rank,
    rdp_size,
    recv_from,
    save,
    send,
    size,
    tp_rank,
    tp_size,
)
from smp_strategy.integrations.sagemaker.run_state import is_initialized, state
from smp_strategy.integrations.sagemaker.step_function import is_tracing, step
from smp_strategy.integrations.sagemaker.step_values import StepOutput

__all__ = [
    "CommGroup",
    "DP_GROUP",
    "DP_RANK",
    "DistributedModel",
    "DistributedOptimizer",
    "MP_GROUP",
    "MP_RANK",
    "PP_GROUP",
    "PP_RANK",
    "RDP_GROUP",
    "RDP_RANK",
    "RankType",
    "StepOutput",
    "TP_GROUP",
    "TP_RANK",
    "WORLD",
    "WORLD_RANK",
    "allgather",
    "amp",
    "barrier",
    "broadcast",
    "checkpoint",
    "checkpoint_sequential",
    "delay_param_initialization",
    "dp_barrier",
    "dp_rank",
    "dp_size",
    "get_dp_group",
    "get_dp_process_group",
    "get_mp_group",
    "get_mp_process_group",
    "get_pp_group",
    "get_pp_process_group",
    "get_rdp_group",
    "get_rdp_process_group",
    "get_tp_group",
    "get_tp_process_group",
    "get_world_process_group",
    "init",
    "is_initialized",
    "is_tracing",
    "load",
    "local_rank",
    "local_size",
    "model_creation",
    "mp_barrier",
    "mp_rank",
    "mp_size",
    "nn",
    "optimizers",
    "partition",
    "patches",
    "pp_rank",
    "pp_size",
    "rank",
    "rdp_rank",
    "rdp_size",
    "recv_from",
    "register_parameter",
    "resume_from_checkpoint",
    "save",
    "save_checkpoint",
    "send",
    "set_activation_checkpointing",
    "set_partition",
    "set_tensor_parallelism",
    "shutdown",
    "size",
    "state",
    "step",
    "tensor_parallelism",
    "tp_rank",
    "tp_register",
    "tp_register_with_module",
    "tp_size",
]

WORLD: Final = CommGroup.WORLD
MP_GROUP: Final = CommGroup.MP_GROUP
DP_GROUP: Final = CommGroup.DP_GROUP
PP_GROUP: Final = CommGroup.PP_GROUP
TP_GROUP: Final = CommGroup.TP_GROUP
RDP_GROUP: Final = CommGroup.RDP_GROUP
WORLD_RANK: Final = RankType.WORLD_RANK
MP_RANK: Final = RankType.MP_RANK
DP_RANK: Final = RankType.DP_RANK
PP_RANK: Final = RankType.PP_RANK
TP_RANK: Final = RankType.TP_RANK
RDP_RANK: Final = RankType.RDP_RANK


def _submodule(name: str, contents: dict[str, Any]) -> ModuleType:
    made = ModuleType(f"{__name__}.{name}")
    vars(made).update(contents)
    return made


patches: Final = _submodule("patches", {})
patches.checkpoint = _submodule(  # type: ignore[attr-defined]
    "patches.checkpoint", {"checkpoint": checkpoint, "checkpoint_sequential": checkpoint_sequential}
)

# `from smp_strategy.smp.nn.huggingface.gpt2 import ...`, as scripts import from SageMaker's modules.
_SUBMODULES: Final = {
    "amp": amp,
    "nn": nn,
    "nn.huggingface": nn.huggingface,
    **{f"nn.huggingface.{name}": getattr(nn.huggingface, name) for name in nn.huggingface.FAMILIES},
    "optimizers": optimizers,
    "patches": patches,
    "patches.checkpoint": patches.checkpoint,
}
sys.modules.update({f"{__name__}.{name}": module for name, module in _SUBMODULES.items()})

if __name__ == "__main__":
    sys.exit(import_module("smp_strategy.integrations.sagemaker.run_script").main(sys.argv[1:]))
