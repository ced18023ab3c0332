"""Process groups beside the default one, which may have been made beforehand, by whatever program.

Every group of this package carries tensors of the host, whatever the ranks compute on: control messages, messages
between stages, objects. A default group that carries those of the accelerator alone (``nccl``) gets a gloo backend for
the host beside its own, which stays in use for the accelerator's.

[Note: bound groups] A default group with ``device_id`` is bound to the device, and torch splits new groups off from its
communicator. That takes all ranks at once, also those outside of the new group, and connects a group that may never
carry a tensor of the accelerator. So new groups are made as without ``device_id``: NCCL connects one at its first use.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from smp_strategy.distributed.torch_private import default_group, set_backend
from smp_strategy.errors import ConfigError

__all__ = ["carry_host_tensors", "new_group", "new_subgroup"]


def carry_host_tensors(device_type: str) -> None:
    """Let the default group carry tensors of the host, too. Collective over all ranks if it does not yet.

    Each door calls this before ranks exchange anything.

    Raises:
        ConfigError: The group carries no tensors of these.
    """
    group = default_group()
    carried = {device.type for device in group._device_types}
    if device_type not in carried:
        backends = f"cpu:gloo,{device_type}:{dist.Backend.default_device_backend_map.get(device_type, 'nccl')}"
        raise ConfigError(
            f"The default process group carries no tensors on {device_type}, on which its ranks compute. Make it with "
            f'`init_process_group("{backends}")`; for ranks that share an accelerator use "gloo" alone.'
        )
    if "cpu" not in carried:
        set_backend(group, torch.device("cpu"), of=new_group(backend="gloo"))


def new_group(
    ranks: Sequence[int] | None = None,
    *,
    backend: str | None = None,
    timeout: timedelta | None = None,
    among_members: bool = False,
) -> dist.ProcessGroup:
    """Make a group; for a rank outside of it torch's marker for that.

    Args:
        ranks: Global ranks; ``None``: all.
        backend: Its backend; ``None``: those of the default group.
        timeout: Timeout of its collectives; ``None``: that of the backend.
        among_members: Whether only its members call this, instead of all ranks.
    """
    with _unbound():
        group: dist.ProcessGroup | None = dist.new_group(
            ranks, backend=backend or _backends(), timeout=timeout, use_local_synchronization=among_members
        )
    assert group is not None
    return group


def new_subgroup(
    groups: Sequence[Sequence[int]], timeout: timedelta | None = None, backend: str | None = None
) -> dist.ProcessGroup | None:
    """Make ``groups`` of global ranks, without overlap; the one of this rank, if any. Collective over all ranks.

    Args:
        groups: Global ranks of each group.
        timeout: Timeout of collectives; ``None``: the backend's.
        backend: Backend; ``None``: those of the default group, and one that carries host tensors.
    """
    with _unbound():
        made = dist.new_subgroups_by_enumeration(groups, timeout, backend or _backends())
    mine: dist.ProcessGroup | None = made[0]
    return mine


def _backends() -> str | None:
    """Backends of new groups; ``None``: torch takes those with which the default group was made."""
    given = dist.distributed_c10d.get_backend_config()
    return None if "cpu:" in given else f"cpu:gloo,{given}"


@contextmanager
def _unbound() -> Iterator[None]:
    """Context in which new groups are not split off from the default group. See [Note: bound groups]."""
    group = default_group()
    bound, group.bound_device_id = group.bound_device_id, None
    try:
        yield
    finally:
        group.bound_device_id = bound
