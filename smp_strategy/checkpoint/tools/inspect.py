"""The command ``smp inspect``."""

import json
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from smp_strategy.checkpoint.convert.detect_format import open_checkpoint
from smp_strategy.checkpoint.convert.summary import summary
from smp_strategy.checkpoint.tools.verify import VERDICTS, verdict
from smp_strategy.config.sizes import show_bytes, show_count
from smp_strategy.errors import printable

__all__ = ["run"]

_WIDTH = 1000  # names are not truncated


def run(given: Namespace) -> int:
    """Run the command; returns its exit status."""
    path = Path(given.checkpoint)
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
