"""Amounts as text: parsing of sizes like ``16GiB``, and formatting of bytes, seconds and counts.

Some tools use powers of 1024 for memory and others powers of 1000, and the difference (7 % at a gigabyte) decides
whether a model fits. So both families of units are read by their own names.
"""

import re

__all__ = ["as_bytes", "parse_bytes", "show_bytes", "show_count", "show_seconds"]

_PREFIXES = "KMGT"
_UNITS = {
    "B": 1,
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate(_PREFIXES, 1)},
    **{f"{prefix}B": 1000**power for power, prefix in enumerate(_PREFIXES, 1)},
}
_BY_NAME = {unit.lower(): factor for unit, factor in _UNITS.items()}


def parse_bytes(text: str) -> int:
    """Number of bytes of ``"16GiB"``, ``"1.5 TiB"``, ``"800MB"`` or ``"4096"``.

    Raises:
        ValueError: the text is no amount of memory.
    """
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text, re.ASCII)
    factor = _BY_NAME.get((match[2] or "B").lower()) if match else None
    if match is None or factor is None:
        raise ValueError(f"{text!r} is no amount of memory. Write a number and one of {', '.join(_UNITS)}: 16GiB.")
    return int(float(match[1]) * factor) if "." in match[1] else int(match[1]) * factor


def as_bytes(amount: int | str) -> int:
    """Number of bytes of ``amount``, which may be a text like ``"16GiB"``."""
    return parse_bytes(amount) if isinstance(amount, str) else amount


def show_bytes(count: float) -> str:
    """Text of a number of bytes in a binary unit: ``1.5 GiB``."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def show_count(count: int, noun: str, plural: str | None = None) -> str:
    """Text of a count: ``1 unit``, ``2 units``; ``plural`` if it is not the noun with an s."""
    return f"{count} {noun if count == 1 else plural or noun + 's'}"


def show_seconds(seconds: float) -> str:
    """Text of a duration with three digits: ``12.3 ms``."""
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if seconds * factor >= 1.0:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
