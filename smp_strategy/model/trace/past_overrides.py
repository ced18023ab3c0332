"""Changes of containers past the methods that their class overrides.

What a dry run or a turn of a microbatch has changed is put back by this package, not by the user. A class may refuse
changes (a frozen configuration), or entries that exist already (a registry): such checks are for the user's code.
"""

import collections
from typing import Any

__all__ = ["delete_item", "refill", "set_item", "set_items", "stored"]

_BASES = (collections.OrderedDict, dict, list, set, collections.deque)


def stored(mapping: Any) -> Any:
    """Entries that a mapping holds: a plain dict of them if its class computes what it returns, else the mapping."""
    overrides = isinstance(mapping, dict) and type(mapping).__getitem__ is not _base_of(mapping).__getitem__
    return dict(dict.items(mapping)) if overrides else mapping


def set_item(mapping: Any, key: Any, value: Any) -> None:
    """Set an entry of a mapping."""
    _base_of(mapping).__setitem__(mapping, key, value)


def set_items(mapping: Any, values: Any) -> None:
    """Set several entries of a mapping."""
    if _base_of(mapping) is dict:
        dict.update(mapping, values)
        return
    for key, value in values.items():
        set_item(mapping, key, value)


def delete_item(mapping: Any, key: Any) -> None:
    """Delete an entry of a mapping."""
    _base_of(mapping).__delitem__(mapping, key)


def refill(container: Any, contents: Any) -> None:
    """Give a list, set, deque or dict other contents, in their order."""
    base = _base_of(container)
    base.clear(container)
    if issubclass(base, dict):
        set_items(container, contents)
    elif issubclass(base, set):
        base.update(container, contents)
    else:
        base.extend(container, contents)


def _base_of(container: Any) -> Any:
    return next((each for each in _BASES if isinstance(container, each)), type(container))
