"""What the scripts in this folder share: their options, what the device is, times, memory, and how they end.

Each script prints a table, then what it aims at beside what it has found, and ends with one line of JSON. With
``--device cpu --tiny`` it goes through the same code in seconds, for the tests; its figures mean nothing then.
"""

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

import torch

__all__ = ["Target", "arguments", "finish", "peak_flops", "seconds", "show"]

# Dense products in bfloat16, as the vendor states them.
_PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "B200": 2250e12}


class Target(NamedTuple):
    """What a figure should be."""

    name: str
    """Of the figure."""
    bound: float
    is_least: bool
    """Whether it should be at least that, and not at most."""

    def judged(self, found: float) -> str:
        """How far ``found`` is from it."""
        distance = (self.bound - found) * (1 if self.is_least else -1)
        aim = f"{'at least' if self.is_least else 'at most'} {self.bound:.4g}"
        verdict = "reached" if distance <= 0 else f"missed by {distance:.4g}"
        return f"{self.name}: {found:.4g}, target {aim}: {verdict}"


def arguments(description: str | None, **more: object) -> argparse.Namespace:
    """The options of a script.

    Args:
        description: its docstring.
        more: further options with numbers, and their defaults.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="kind of device")
    parser.add_argument("--tiny", action="store_true", help="a size that says nothing, for tests")
    for name, default in more.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    return parser.parse_args()


def peak_flops(device: torch.device) -> float | None:
    """Dense bfloat16 FLOP/s that the vendor states for ``device``, if it is known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in _PEAK_FLOPS.items() if part in name), None)


def seconds(step: Callable[[], object], device: torch.device, *, rounds: int, warm_ups: int) -> float:
    """The median time of a step, host and device, after some that do not count."""
    found = []
    for number in range(warm_ups + rounds):
        _finish_queue(device)
        begin = time.perf_counter()
        step()
        _finish_queue(device)
        if number >= warm_ups:
            found.append(time.perf_counter() - begin)
    return median(found)


def _finish_queue(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def show(title: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table."""
    texts = [[f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row] for row in [header, *rows]]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    print(f"\n{title}")
    for row in texts:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def finish(figures: Mapping[str, object], targets: Sequence[Target] = ()) -> None:
    """Say how far the figures are from the targets, and end with them as a line of JSON."""
    print()
    for target in targets:
        found = figures.get(target.name)
        if isinstance(found, (int, float)):
            print(target.judged(float(found)))
        else:
            print(f"{target.name}: not known on this device")
    print(json.dumps({**figures, "targets": {target.name: target.bound for target in targets}}), flush=True)
