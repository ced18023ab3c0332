"""``smp.save`` and ``smp.load``: files of one rank each, with its place in their names.

Checkpoints that any layout reads are those of :func:`~smp_strategy.engine.tagged_checkpoints.save_checkpoint`.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from smp_strategy.errors import CheckpointError
from smp_strategy.integrations.sagemaker.rank_calls import mp_rank, pp_rank, rdp_rank, tp_rank, tp_size
from smp_strategy.integrations.sagemaker.run_state import current_run

__all__ = ["load", "save"]


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
    path.parent.mkdir(parents=True, exist_ok=True)
    # Replicas write the same file.
    writing = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    options = {} if pickle_module is None else {"pickle_module": pickle_module}
    torch.save(obj, writing, pickle_protocol=pickle_protocol, **options)
    writing.replace(path)


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
