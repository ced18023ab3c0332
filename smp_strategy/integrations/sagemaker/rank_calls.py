"""Ranks and groups under SageMaker's names, and messages of picklable objects between ranks.

A rank of a group is the index in the ascending list of its members. With R replicas, P stages and T ranks that split
layers between them, of N ranks in all::

    WORLD  N ranks       MP   P x T ranks of a replica        DP   R x T ranks with the same stage
                         PP   P stages of a replica           RDP  R ranks with the same part of the same stage
                         TP   T ranks of a stage

so mp x rdp = pp x dp = N. As everywhere in this package the last stage is on the lowest rank: partition ``i`` is on
``pp_rank`` P - 1 - i.

:func:`broadcast` is a message to each other rank of the group, which :func:`recv_from` receives.

:func:`save` and :func:`load`: files of one rank each, with its place in their names. Checkpoints that any layout reads
are those of :func:`~smp_strategy.engine.saving.tagged_checkpoints.save_checkpoint`.
"""

import os
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from smp_strategy.engine.rank_group import RankGroup
from smp_strategy.engine.saving.saved_models.state_folders import save_file
from smp_strategy.errors import CheckpointError, ConfigError
from smp_strategy.integrations.sagemaker.run_state import current_run

__all__ = [
    "CommGroup",
    "RankType",
    "allgather",
    "barrier",
    "broadcast",
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
    "load",
    "local_rank",
    "local_size",
    "mp_barrier",
    "mp_rank",
    "mp_size",
    "pp_rank",
    "pp_size",
    "rank",
    "rdp_rank",
    "rdp_size",
    "recv_from",
    "save",
    "send",
    "size",
    "tp_rank",
    "tp_size",
]


class CommGroup(Enum):
    """Groups of ranks."""

    WORLD = "world"
    """All ranks."""
    MP_GROUP = "mp"
    """Ranks of a replica."""
    DP_GROUP = "dp"
    """Ranks with the same stage."""
    PP_GROUP = "pp"
    """Stages of a replica, of ranks with the same parts of split layers."""
    TP_GROUP = "tp"
    """Ranks that split the layers of a stage between them."""
    RDP_GROUP = "rdp"
    """Ranks with the same part of the same stage."""


class RankType(Enum):
    """Meaning of a rank's number."""

    WORLD_RANK = "world"
    MP_RANK = "mp"
    DP_RANK = "dp"
    PP_RANK = "pp"
    TP_RANK = "tp"
    RDP_RANK = "rdp"


# Places


def _members(kind: str) -> list[int]:
    """Global ranks of this rank's group of a ``kind``."""
    return list(current_run().groups[kind].members)


def _rank_in(kind: str) -> int:
    return _members(kind).index(current_run().rank)


def rank() -> int:
    """Global rank of this process."""
    return current_run().rank


def size() -> int:
    """Number of ranks."""
    return current_run().shape.world_size


def local_rank() -> int:
    """Rank of this process on its machine."""
    return int(os.environ.get("LOCAL_RANK", current_run().rank))


def local_size() -> int:
    """Number of ranks on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", current_run().shape.world_size))


def pp_rank() -> int:
    """Rank among the stages of a replica; partition ``i`` is on ``pp_size() - 1 - i``."""
    return _rank_in("pp")


def pp_size() -> int:
    """Number of stages."""
    return len(_members("pp"))


def tp_rank() -> int:
    """Rank among those that split layers between them."""
    return _rank_in("tp")


def tp_size() -> int:
    """Number of ranks that split layers between them."""
    return len(_members("tp"))


def rdp_rank() -> int:
    """Rank among those with the same part of the same stage: the number of the replica."""
    return _rank_in("rdp")


def rdp_size() -> int:
    """Number of replicas."""
    return len(_members("rdp"))


def dp_rank() -> int:
    """Rank among those with the same stage."""
    return _rank_in("dp")


def dp_size() -> int:
    """Number of ranks with the same stage."""
    return len(_members("dp"))


def mp_rank() -> int:
    """Rank in the replica."""
    return _rank_in("mp")


def mp_size() -> int:
    """Number of ranks of a replica."""
    return len(_members("mp"))


# Groups


def get_world_process_group() -> dist.ProcessGroup:
    """Process group of all ranks."""
    return current_run().groups["world"].group


def get_pp_process_group() -> dist.ProcessGroup:
    """Process group of the stages of this replica."""
    return current_run().groups["pp"].group


def get_tp_process_group() -> dist.ProcessGroup:
    """Process group of the ranks that split layers with this one."""
    return current_run().groups["tp"].group


def get_rdp_process_group() -> dist.ProcessGroup:
    """Process group of the ranks with the same part of the same stage."""
    return current_run().groups["rdp"].group


def get_dp_process_group() -> dist.ProcessGroup:
    """Process group of the ranks with the same stage."""
    return current_run().groups["dp"].group


def get_mp_process_group() -> dist.ProcessGroup:
    """Process group of the ranks of this replica."""
    return current_run().groups["mp"].group


def get_pp_group() -> list[int]:
    """Global ranks of the stages of this replica."""
    return _members("pp")


def get_tp_group() -> list[int]:
    """Global ranks of those that split layers with this one."""
    return _members("tp")


def get_rdp_group() -> list[int]:
    """Global ranks of those with the same part of the same stage."""
    return _members("rdp")


def get_dp_group() -> list[int]:
    """Global ranks of those with the same stage."""
    return _members("dp")


def get_mp_group() -> list[int]:
    """Global ranks of this replica."""
    return _members("mp")


# Messages


def broadcast(obj: Any, group: CommGroup) -> None:
    """Send a picklable object to the other ranks of ``group``, each of which calls :func:`recv_from`."""
    kind = _checked(group, CommGroup).value
    for member in _members(kind):
        if member != current_run().rank:
            RankGroup.send(obj, member, _MESSAGE)


def send(obj: Any, dest: int, rank_type: RankType) -> None:
    """Send a picklable object to a rank.

    Args:
        obj: Object.
        dest: Rank of the receiver.
        rank_type: Group in which ``dest`` counts.
    """
    RankGroup.send(obj, _global(dest, rank_type), _MESSAGE)


def recv_from(src: int, rank_type: RankType) -> Any:
    """Receive an object from a rank that calls :func:`send` or :func:`broadcast`.

    Args:
        src: Rank of the sender.
        rank_type: Group in which ``src`` counts.
    """
    return RankGroup.receive(_global(src, rank_type), _MESSAGE)


def allgather(obj: Any, group: CommGroup) -> list[Any]:
    """All-gather a picklable object of each rank of ``group``, in the order of the ranks. Collective."""
    return current_run().groups[_checked(group, CommGroup).value].gather(obj, "`smp.allgather`")


def barrier(group: CommGroup = CommGroup.WORLD) -> None:
    """Wait for all ranks of ``group``."""
    current_run().groups[_checked(group, CommGroup).value].wait("`smp.barrier`")


def dp_barrier() -> None:
    """Wait for the ranks with the same stage."""
    barrier(CommGroup.DP_GROUP)


def mp_barrier() -> None:
    """Wait for the ranks of this replica."""
    barrier(CommGroup.MP_GROUP)


_MESSAGE: Final = "a message of `smp.send` or `smp.broadcast`"


def _global(number: int, rank_type: RankType) -> int:
    members = _members(_checked(rank_type, RankType).value)
    if not 0 <= number < len(members):
        raise ConfigError(f"There is no {rank_type.name} {number}: the group has {len(members)} ranks.")
    if members[number] == current_run().rank:
        raise ConfigError(f"{rank_type.name} {number} is this rank itself, which needs no message.")
    return members[number]


def _checked(given: Any, kind: Any) -> Any:
    if not isinstance(given, kind):
        names = ", ".join(f"smp.{each.name}" for each in kind)
        raise ConfigError(f"It must be one of {names}, but is {given!r}.")
    return given


# Files


def save(
    obj: Any,
    f: str | os.PathLike[str],
    partial: bool = True,
    pickle_module: Any = None,
    pickle_protocol: int = 2,
    v3: bool = False,
) -> None:
    """Write an object to a file, as ``torch.save``. The file appears when it is complete.

    Args:
        obj: state dicts and the like.
        f: the file.
        partial: whether each rank writes a file of its own, with its place in the replica in the name (``f_1``, or
            ``f_1_0`` with a tensor-parallel rank); otherwise the calling rank writes ``f``.
        pickle_module, pickle_protocol: as of ``torch.save``.
        v3: whether replicas have files of their own (``f_1_0_0``); always so if state is sharded over them.
    """
    path = _path(f, v3=v3) if partial else Path(f)
    options = {} if pickle_module is None else {"pickle_module": pickle_module}
    save_file(obj, path, pickle_protocol=pickle_protocol, **options)


def load(
    f: str | os.PathLike[str],
    map_location: Any = None,
    pickle_module: Any = None,
    pickle_load_args: Mapping[str, Any] | None = None,
    partial: bool = True,
    back_compat: bool = False,
    v3: bool = False,
) -> Any:
    """Read an object from a file, as ``torch.load``, which runs no code of the file.

    Args:
        f: the file.
        map_location, pickle_module: as of ``torch.load``.
        pickle_load_args: further arguments of ``torch.load``; ``{"weights_only": False}`` reads any object.
        partial: whether to read the file that a rank at this place has written.
        back_compat: accepted.
        v3: whether replicas have files of their own.

    Raises:
        CheckpointError: there is no such file.
    """
    del back_compat
    path = _path(f, v3=v3) if partial else Path(f)
    if not path.exists():
        why = " Files of single ranks are read under the degrees that wrote them." if partial else ""
        raise CheckpointError(f"There is no file {path}.{why}")
    return torch.load(path, map_location=map_location, pickle_module=pickle_module, **dict(pickle_load_args or {}))


def _path(f: str | os.PathLike[str], *, v3: bool) -> Path:
    path, config = Path(f), current_run().config
    # Replicas have shards of their own then.
    v3 = v3 or config.shard_optimizer_state or config.sharded_data_parallel_degree > 1
    place = f"{pp_rank()}_{tp_rank()}" if tp_size() > 1 or v3 else f"{mp_rank()}"
    return path.with_name(f"{path.name}_{place}{f'_{rdp_rank()}' if v3 else ''}")
