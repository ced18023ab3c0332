"""SageMaker's data parallel library: ``import smp_strategy.smddp as dist`` in the place of its import.

Names, arguments and defaults are those of ``smdistributed.dataparallel.torch.distributed`` (versions up to 1.3, which
scripts import in the place of ``torch.distributed``). The process group is PyTorch's, so scripts may mix both.
Gradients take the hierarchical path of :mod:`smp_strategy.data_parallel.ddp_comm_hook`, other collectives that of the
backend.

Scripts for later versions import ``smdistributed.dataparallel.torch.torch_smddp`` and call
``torch.distributed.init_process_group(backend="smddp")``. The import of this module registers that backend, too.
"""

import enum
import os
import warnings
from datetime import timedelta
from typing import Any, Final, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import parallel

from smp_strategy.data_parallel.ddp_comm_hook import HierarchicalAllReduceState, hierarchical_allreduce_hook
from smp_strategy.distributed import watched_collectives as collectives
from smp_strategy.distributed.handle import Handle
from smp_strategy.errors import UnsupportedError
from smp_strategy.integrations.sagemaker.initialize import choose_device, ensure_process_group

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

_NAMES: Final = ("smddp", "gloo", "nccl")


class ReduceOp(enum.Enum):
    """Reductions of :func:`all_reduce`; those of ``torch.distributed.ReduceOp`` are taken as well."""

    SUM = "sum"
    AVERAGE = "average"
    MIN = "min"
    MAX = "max"


def _process_group(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    """Backend of the name ``smddp``: that of the device."""
    kind: Any = dist.ProcessGroupGloo if _device_kind() == "cpu" else dist.ProcessGroupNCCL
    return kind(store, rank, size, timeout)


def _device_kind() -> str:
    """``cuda`` if each rank of this node has a GPU of its own, else ``cpu``."""
    has_own = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return "cuda" if has_own and torch.cuda.is_available() and dist.is_nccl_available() else "cpu"


if dist.is_available() and not hasattr(dist.Backend, "SMDDP"):
    dist.Backend.register_backend("smddp", _process_group, devices=[_device_kind()])


def is_available() -> bool:
    """Whether the library can be used: always."""
    return True


def init_process_group(backend: str | None = None, **options: Any) -> None:
    """Make the default process group, if there is none, and choose this rank's device. Collective.

    The launcher is ``torchrun`` or ``mpirun``; a process that was started alone is the only rank.

    Args:
        backend: ``smddp``, or ``None``. The backend follows the device: gloo for the host and for ranks that share an
            accelerator, else NCCL.
        options: None of those of ``torch.distributed.init_process_group``: the library has none.

    Raises:
        UnsupportedError: another backend, or options.
    """
    if backend not in (None, *_NAMES):
        raise UnsupportedError(
            f"`backend` must be one of {', '.join(_NAMES)}, but is {backend!r}: it follows the device. Leave it out."
        )
    if options:
        raise UnsupportedError(
            f"`init_process_group` got {', '.join(f'`{name}`' for name in options)}, but takes its ranks and address "
            "from the launcher. Call `torch.distributed.init_process_group` for a group of your own before."
        )
    ensure_process_group(choose_device())


def is_initialized() -> bool:
    """Whether the default process group exists."""
    return dist.is_initialized()


def get_world_size(group: dist.ProcessGroup | None = None) -> int:
    """Number of ranks in ``group``; ``None``: of all."""
    return dist.get_world_size(group)


def get_rank(group: dist.ProcessGroup | None = None) -> int:
    """Rank of this process in ``group``; ``None``: among all."""
    return dist.get_rank(group)


def get_local_rank() -> int:
    """Rank of this process on its node, as the launcher says."""
    return int(os.environ.get("LOCAL_RANK", 0))


def all_reduce(
    tensor: Tensor, op: Any = ReduceOp.SUM, group: dist.ProcessGroup | None = None, async_op: bool = False
) -> Handle[object] | None:
    """Reduce the ranks' ``tensor`` in place.

    Args:
        tensor: Tensor of this rank.
        op: Reduction: sum, average, minimum or maximum.
        group: Ranks; ``None``: all.
        async_op: Return at once.

    Returns:
        With ``async_op`` a handle, whose ``wait`` blocks until the tensor is reduced.

    Raises:
        UnsupportedError: another reduction.
    """
    name = {"AVERAGE": "AVG"}.get(op.name, op.name)
    if name not in ("SUM", "AVG", "MIN", "MAX"):
        raise UnsupportedError(f"`op` must be one of SUM, AVERAGE, MIN, MAX, but is {op}.")
    if name != "AVG":
        return _given(
            collectives.all_reduce(tensor, getattr(dist.ReduceOp, name), group=group, doing="`all_reduce`"), async_op
        )
    # Not every backend has averages.
    work = collectives.all_reduce(tensor, group=group, doing="`all_reduce`")
    return _given(work.then(lambda _: tensor.div_(dist.get_world_size(group))), async_op)


def broadcast(
    tensor: Tensor, src: int = 0, group: dist.ProcessGroup | None = None, async_op: bool = False
) -> Handle[object] | None:
    """Give all ranks of ``group`` the ``tensor`` of the global rank ``src``; returns as :func:`all_reduce`."""
    return _given(collectives.broadcast(tensor, src, group=group, doing="`broadcast`"), async_op)


def all_gather(
    tensor_list: list[Tensor], tensor: Tensor, group: dist.ProcessGroup | None = None, async_op: bool = False
) -> Handle[object] | None:
    """Fill ``tensor_list`` with each rank's ``tensor``; returns as :func:`all_reduce`."""
    return _given(collectives.all_gather(tensor_list, tensor, group=group, doing="`all_gather`"), async_op)


def all_to_all_single(
    output_t: Tensor,
    input_t: Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> Handle[object] | None:
    """Send a part of ``input_t`` to each rank, whose parts fill ``output_t``; returns as :func:`all_reduce`.

    Args:
        output_t: Parts from the ranks, in their order.
        input_t: Parts for the ranks, in their order.
        output_split_sizes: Rows of each part of ``output_t``; ``None``: equally many.
        input_split_sizes: Rows of each part of ``input_t``; ``None``: equally many.
        group: Ranks; ``None``: all.
        async_op: Return at once.
    """
    sizes = output_split_sizes, input_split_sizes
    work = collectives.begin(
        "`all_to_all_single`",
        group,
        lambda: dist.all_to_all_single(output_t, input_t, *sizes, group=group, async_op=True),
    )
    return _given(work, async_op)


def barrier(group: dist.ProcessGroup | None = None, async_op: bool = False) -> Handle[object] | None:
    """Wait for all ranks of ``group``; returns as :func:`all_reduce`."""
    return _given(collectives.begin("`barrier`", group, lambda: dist.barrier(group, async_op=True)), async_op)


def _given(work: Handle[object], async_op: bool) -> Handle[object] | None:
    if async_op:
        return work
    work.wait()
    return None


@final
class DistributedDataParallel(parallel.DistributedDataParallel):
    """PyTorch's DistributedDataParallel, with hierarchical sums of gradients between nodes.

    Construction is collective. ``no_sync``, state dicts and all else are PyTorch's.

    Args:
        module: Model, with the same values on all ranks afterwards.
        device_ids: Device of this rank; ``None`` on the host.
        output_device: Device of the outputs.
        broadcast_buffers: Whether forward takes over the buffers of the first rank. SageMaker's library demands
            ``False``; here both work.
        process_group: Ranks; ``None``: all. SageMaker's library knows all ranks only.
        bucket_cap_mb: Size of a bucket in MB.
        options: Further options of PyTorch's class.

    Attributes:
        sums: State of the communication hook; its ``ranks_per_node`` tells whether sums are hierarchical.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: list[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        broadcast_buffers: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: int = 25,
        **options: Any,
    ) -> None:
        with warnings.catch_warnings():
            # PyTorch is about to rename it; the library's name stays.
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            super().__init__(
                module,
                device_ids=device_ids,
                output_device=output_device,
                broadcast_buffers=broadcast_buffers,
                process_group=process_group,
                bucket_cap_mb=bucket_cap_mb,
                **options,
            )
        self.sums = HierarchicalAllReduceState(process_group)
        self.register_comm_hook(self.sums, hierarchical_allreduce_hook)
