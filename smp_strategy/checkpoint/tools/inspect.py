"""The command ``smp inspect``.

Summary of a checkpoint as plain data, for tables and for other programs.
"""

import json
from argparse import Namespace
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from smp_strategy.checkpoint.convert.contents import CheckpointContents, LazyTensor
from smp_strategy.checkpoint.convert.detect_format import located, open_checkpoint
from smp_strategy.checkpoint.storage.remote_path import AnyPath, any_path
from smp_strategy.checkpoint.tools.verify import VERDICTS, verdict
from smp_strategy.config.sizes import show_bytes, show_count
from smp_strategy.errors import printable
from smp_strategy.model.trace.pytree import nodes

__all__ = ["run"]

_WIDTH = 1000  # names are not truncated


def run(given: Namespace) -> int:
    """Run the command; returns its exit status."""
    path = any_path(given.checkpoint)
    contents = open_checkpoint(path, weights_at=given.weights, verify=False)
    found = summary(contents, path)
    status = 0
    if given.verify:
        status, said = verdict(path)
        found["verified"] = {"status": VERDICTS[status], "problems": said}
    if given.json:
        print(json.dumps(found, indent=2, default=str))
    else:
        _print(found, is_short=given.summary)
    return status


def _print(found: Mapping[str, Any], *, is_short: bool) -> None:
    console = Console(width=_WIDTH, soft_wrap=True, highlight=False, markup=False, emoji=False)
    disk = f"{show_count(found['files'], 'file')}, {show_bytes(found['bytes_on_disk'])}"
    console.print(printable(f"{found['path']}: {found['kind']}, {disk}", lines=False))
    for name, value in _facts(found):
        console.print(printable(f"  {name:<10} {value}", lines=False))
    if not is_short:
        console.print(_tensor_table(found["tensors"]))
    console.print(_group_table(found["groups"]))
    for remark in found["remarks"]:
        console.print(printable(remark, lines=False))


def _facts(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    facts = []
    if found["lightning"]:
        facts.append(("lightning", _pairs(found["lightning"])))
    note = dict(found["note"])
    if isinstance(layout := note.pop("layout", None), Mapping):
        facts.append(("layout", _pairs(layout)))
    elif layout is not None:
        facts.append(("layout", str(layout)))
    told = found["lightning"] or {}
    if note := {key: value for key, value in note.items() if told.get(key) != value}:
        facts.append(("note", _pairs(note)))
    if found["rest"]:
        facts.append(("besides", ", ".join(found["rest"])))
    if found["objects"]:
        facts.append(("no tensors", ", ".join(found["objects"])))
    facts.append(("digests", "for every byte" if found["has_digests"] else "none, so damage may go unnoticed"))
    if "verified" in found:
        facts.append(("verified", "; ".join([found["verified"]["status"], *found["verified"]["problems"]])))
    return facts


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in values.items())


def _tensor_table(tensors: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("group", "tensor", "shape", "dtype"):
        table.add_column(heading, no_wrap=True, overflow="ignore")
    table.add_column("size", justify="right", no_wrap=True)
    for entry in tensors:
        size = show_bytes(entry["bytes"]) if entry["tied_to"] is None else f"tied to {entry['tied_to']}"
        shape = " x ".join(map(str, entry["shape"])) or "single"
        name, size = printable(entry["name"], lines=False), printable(size, lines=False)
        table.add_row(entry["group"], name, shape, entry["dtype"], size)
    return table


def _group_table(groups: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("group", no_wrap=True)
    for heading in ("tensors", "elements", "size"):
        table.add_column(heading, justify="right", no_wrap=True)
    total = {key: sum(group[key] for group in groups) for key in ("tensors", "elements", "bytes")}
    for group in [*groups, {"name": "total", **total}]:
        table.add_row(group["name"], str(group["tensors"]), f"{group['elements']:,}", show_bytes(group["bytes"]))
    return table


def summary(contents: CheckpointContents, path: AnyPath) -> dict[str, Any]:
    """JSON-compatible summary of ``contents``, which were opened from ``path``.

    Returns:
        ``path``, ``kind``, ``files`` (number), ``bytes_on_disk``, ``has_digests``, ``note`` (layout, step, ...),
        ``lightning`` (version, epoch, step; ``None`` for others), ``groups`` (for each its name, numbers of tensors and
        elements, bytes), ``tensors`` (group, name, shape, dtype, bytes, the first name of a tied one), ``objects``
        (other names of the state dict), ``rest`` (names of everything else), ``remarks``.
    """
    place = located(path)
    files = [place] if place.is_file() else [each for each in place.rglob("*") if each.is_file()]
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
        for name, tensor in _named(optimizer.state):
            yield _entry(f"optimizer {number}", name, tensor, None)
    for name, tensor in _named(contents.rest):
        yield _entry("other", name, tensor, None)


def _named(value: Any) -> Iterator[tuple[str, LazyTensor]]:
    return ((".".join(map(str, path)), node) for path, node in nodes(value) if isinstance(node, LazyTensor))


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
