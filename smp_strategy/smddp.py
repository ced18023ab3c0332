"""SageMaker's data parallel library: ``import smp_strategy.smddp as dist`` in the place of its import.

Scripts that import from modules of the library keep the rest of the path: ``smdistributed.dataparallel.torch.parallel
.distributed`` becomes ``smp_strategy.smddp.torch.parallel.distributed``. See ``docs/sagemaker.md``.
"""

import sys
from types import ModuleType
from typing import Final

from smp_strategy.integrations.sagemaker.data_parallel_calls import (
    DistributedDataParallel,
    ReduceOp,
    all_gather,
    all_reduce,
    all_to_all_single,
    barrier,
    broadcast,
    get_local_rank,
    get_rank,
    get_world_size,
    init_process_group,
    is_available,
    is_initialized,
)

__all__ = [
    "DistributedDataParallel",
    "ReduceOp",
    "all_gather",
    "all_reduce",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "get_local_rank",
    "get_rank",
    "get_world_size",
    "init_process_group",
    "is_available",
    "is_initialized",
]

_CALLS: Final = {name: globals()[name] for name in __all__ if name != "DistributedDataParallel"}


def _submodule(name: str, contents: dict[str, object]) -> ModuleType:
    made = ModuleType(f"{__name__}.{name}")
    vars(made).update(contents)
    sys.modules[made.__name__] = made
    return made


# The modules of the library.
_distributed: Final = _submodule("torch.distributed", _CALLS)
_wrapper: Final = _submodule("torch.parallel.distributed", {"DistributedDataParallel": DistributedDataParallel})
_parallel: Final = _submodule("torch.parallel", {"distributed": _wrapper})
torch: Final = _submodule("torch", {"distributed": _distributed, "parallel": _parallel})
