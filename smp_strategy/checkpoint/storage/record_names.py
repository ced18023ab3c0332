"""Which tensors of a file of ``torch.save`` have their values in which of its records.

The file's pickle says that. It is read with a stand-in for each class and function that it names, so that nothing of it
is imported or called: this is for messages about files that nobody trusts.
"""

import io
import pickle
from collections import defaultdict
from typing import Any, final

__all__ = ["names_by_record"]

# Of one tensor, as what it was made by; no names of theirs.
_MOST_NAMES = 1_000_000


def names_by_record(data: bytes) -> dict[str, list[str]]:
    """The names of tensors by the number of the record: ``{"0": ["state_dict.layer.weight"]}``.

    Args:
        data: the file's ``data.pkl``. Of what cannot be read there are no names.
    """
    try:
        content = _Reader(io.BytesIO(data)).load()
    except Exception:  # whatever comes of hostile bytes
        return {}
    found: dict[str, list[str]] = defaultdict(list)
    seen: set[tuple[int, str]] = set()
    waiting: list[tuple[Any, str]] = [(content, "")]
    while waiting and len(seen) < _MOST_NAMES:
        each, name = waiting.pop()
        if isinstance(each, _Record):
            if name not in found[each.number]:
                found[each.number].append(name)
            continue
        parts = _parts(each, name)
        if parts and (id(each), name[:200]) not in seen:
            seen.add((id(each), name[:200]))
            waiting += reversed(parts)
    return dict(found)


@final
class _Record:
    def __init__(self, number: str) -> None:
        self.number = number


class _Anything(dict[Any, Any]):
    """What is made by any function or class."""

    made_of: tuple[Any, ...]

    def __new__(cls, *args: Any, **kwargs: Any) -> "_Anything":
        made = super().__new__(cls)
        made.made_of = (*args, *kwargs.values())
        return made

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def __setstate__(self, state: Any) -> None:
        self.made_of = (*self.made_of, state)

    def append(self, item: Any) -> None:
        """As of a list."""
        self.made_of = (*self.made_of, item)

    def extend(self, items: Any) -> None:
        """As of a list."""
        self.made_of = (*self.made_of, *items)

    add = append


class _Reader(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        return _Anything

    def persistent_load(self, pid: Any, /) -> Any:
        return _Record(str(pid[2]))


def _parts(each: Any, name: str) -> list[tuple[Any, str]]:
    dot = "." if name else ""
    parts: list[tuple[Any, str]] = []
    if isinstance(each, dict):
        parts += [(value, f"{name}{dot}{key}") for key, value in dict.items(each)]
    if isinstance(each, _Anything):
        parts += [(value, name) for value in each.made_of]
    if type(each) in (list, tuple):
        # A tuple that a function was called with stands for what came of it.
        parts += [(value, f"{name}{dot}{number}") for number, value in enumerate(each)]
    return parts
