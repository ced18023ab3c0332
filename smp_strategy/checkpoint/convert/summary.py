"""Summary of a checkpoint as plain data, for tables and for other programs."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from smp_strategy.checkpoint.convert.contents import CheckpointContents, LazyTensor, OptimizerContents

__all__ = ["summary"]


def summary(contents: CheckpointContents, path: Path) -> dict[str, Any]:
    """JSON-compatible summary of ``contents``, which were opened from ``path``.

    Returns:
        ``path``, ``kind``, ``files`` (number), ``bytes_on_disk``, ``has_digests``, ``note`` (layout, step, ...),
        ``lightning`` (version, epoch, step; ``None`` for others), ``groups`` (for each its name, numbers of tensors and
        elements, bytes), ``tensors`` (group, name, shape, dtype, bytes, the first name of a tied one), ``objects``
        (other names of the state dict), ``rest`` (names of everything else), ``remarks``.
    """
    files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
    tensors = list(_tensors(contents))
    groups: dict[str, dict[str, Any]] = {}
    for entry in tensors:
        group = groups.setdefault(entry["group"], {"name": entry["group"], "tensors": 0, "elements": 0, "bytes": 0})
        if entry["tied_to"] is None:
            group["tensors"] += 1
            group["elements"] += entry["elements"]
            group["bytes"] += entry["bytes"]
    return {
        "path": str(path),
        "kind": contents.kind,
        "files": len(files),
        "bytes_on_disk": sum(each.stat().st_size for each in files),
        "has_digests": contents.has_digests,
        "note": contents.note,
        "lightning": _lightning(contents),
        "groups": list(groups.values()),
        "tensors": tensors,
        "objects": [name for name, value in contents.weights.items() if not isinstance(value, LazyTensor)],
        "rest": [str(key) for key in contents.rest],
        "remarks": contents.remarks,
    }


def _tensors(contents: CheckpointContents) -> Iterator[dict[str, Any]]:
    first: dict[object, str] = {}
    for name, tensor in contents.weight_tensors().items():
        tied_to = None if tensor.memory is None else first.setdefault(tensor.memory, name)
        yield _entry("weights", name, tensor, None if tied_to == name else tied_to)
    for number, optimizer in enumerate(contents.optimizers):
        for name, tensor in _named(optimizer):
            yield _entry(f"optimizer {number}", name, tensor, None)
    for name, tensor in _leaves(contents.rest, ""):
        yield _entry("other", name, tensor, None)


def _named(optimizer: OptimizerContents) -> Iterator[tuple[str, LazyTensor]]:
    return _leaves(optimizer.state, "")


def _leaves(value: Any, name: str) -> Iterator[tuple[str, LazyTensor]]:
    if isinstance(value, LazyTensor):
        yield name, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, f"{name}.{key}".removeprefix("."))
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _leaves(item, f"{name}.{number}".removeprefix("."))


def _entry(group: str, name: str, tensor: LazyTensor, tied_to: str | None) -> dict[str, Any]:
    return {
        "group": group,
        "name": name,
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "elements": tensor.num_bytes // tensor.dtype.itemsize,
        "bytes": tensor.num_bytes,
        "tied_to": tied_to,
    }


def _lightning(contents: CheckpointContents) -> dict[str, Any] | None:
    if not contents.is_lightning:
        return None
    rest = contents.rest
    return {
        "version": str(rest["pytorch-lightning_version"]),
        **{key: rest[key] for key in ("epoch", "global_step") if isinstance(rest.get(key), int)},
    }
