"""Type checks and text form of option values.

The supported types are those of the options in :mod:`smp_strategy.config.config`: plain types, unions of them with
``None``, ``Literal`` for a choice of words, tuples of any length, and mappings.
"""

import sys
import typing
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal

from smp_strategy.config.foreign_words import meant_value
from smp_strategy.errors import ConfigError

__all__ = [
    "as_dict",
    "as_text",
    "as_timeout",
    "as_tuple",
    "at_least_one",
    "empty_item",
    "fits",
    "one_of",
    "parse",
    "wrong_types",
]


def wrong_types(options: object, hints: Mapping[str, Any]) -> list[str]:
    """Error texts for the attributes of ``options`` that do not fit their types."""
    found = []
    for name, hint in hints.items():
        value = getattr(options, name)
        items = value if isinstance(value, tuple) else (value,)
        if isinstance(value, tuple) and any(isinstance(item, str) and not item.strip() for item in value):
            found.append(empty_item(name, value))
        elif any(isinstance(item, int) and abs(item) > sys.float_info.max for item in items):
            found.append(f"`{name}` must be below 1e308, but has a number of more than 300 digits. Give a smaller one.")
        elif not fits(value, hint):
            shown = getattr(hint, "__name__", None) if isinstance(hint, type) else str(hint).replace("typing.", "")
            meant = meant_value(name, value, _words_of(hint))
            written = f" Write `{meant}`." if meant else _as_written(value, hint)
            found.append(f"`{name}` must be {shown}, but is {value!r} ({type(value).__name__}).{written}")
    return found


def empty_item(name: str, value: object) -> str:
    """Error text for an empty item in the list ``value``."""
    return f"`{name}` has an empty item: {value!r}. Leave it out, or write what belongs there."


def _as_written(value: object, hint: Any) -> str:
    """Sentence with the value that the text ``value`` means; empty if there is none."""
    if not isinstance(value, str):
        return ""
    if (meant := parse(value, hint)) != value and fits(meant, hint):
        return f" Write `{list(meant) if isinstance(meant, tuple) else meant}`."
    is_mapping = any(typing.get_origin(choice) is Mapping for choice in typing.get_args(hint))
    return " Write each name once, and one value for it: `blocks.*.up=column,blocks.*.down=row`." if is_mapping else ""


def _words_of(hint: Any) -> tuple[str, ...]:
    """The words that ``hint`` allows."""
    parts = typing.get_args(hint)
    return parts if typing.get_origin(hint) is Literal else tuple(word for part in parts for word in _words_of(part))


def as_tuple(value: Any) -> Any:
    """``value``, or the tuple of its items if it is a list."""
    is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes | tuple)
    return tuple(value) if is_list else value


def as_dict(value: Any) -> Any:
    """``value``, or the dict of its items if it is another mapping."""
    return dict(value) if isinstance(value, Mapping) else value


def as_text(value: Any) -> str:
    """Text form of ``value``, the inverse of :func:`parse` if there is one."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return ",".join(f"{key}={as_text(item)}" for key, item in value.items())
    if isinstance(as_tuple(value), tuple):
        return "".join(f"{as_text(item)}," for item in value)  # trailing comma: a single item is still a list
    return str(value)


def fits(value: object, hint: Any) -> bool:
    """Whether ``value`` is of the type ``hint``; choices of a ``Literal`` are not checked."""
    if typing.get_origin(hint) is Literal:
        return isinstance(value, str)  # the range check names the choices
    if typing.get_origin(hint) is tuple:
        item_hint, _ = typing.get_args(hint)
        return isinstance(value, tuple) and all(fits(item, item_hint) for item in value)
    if typing.get_origin(hint) is Mapping:
        key_hint, item_hint = typing.get_args(hint)
        return isinstance(value, Mapping) and all(fits(k, key_hint) and fits(v, item_hint) for k, v in value.items())
    if isinstance(hint, type):
        if hint is int:
            return isinstance(value, int) and not isinstance(value, bool)
        if hint is float:
            return isinstance(value, (int, float)) and not isinstance(value, bool)
        return isinstance(value, hint)
    return any(fits(value, choice) for choice in typing.get_args(hint))


def parse(text: str, hint: Any) -> Any:
    """Value of ``text`` under the type ``hint``; text that does not parse is returned as it is, for the type check."""
    choices = (hint,) if typing.get_origin(hint) in (tuple, Literal, Mapping) else typing.get_args(hint) or (hint,)
    if type(None) in choices and text.strip().lower() in ("", "none", "null"):
        return None
    lists = [choice for choice in choices if typing.get_origin(choice) is tuple]
    is_list = lists and (str not in choices or "," in text)
    if is_list:
        item_hint, _ = typing.get_args(lists[0])
        return tuple(parse(item.strip(), item_hint) for item in _items(text))
    if any(typing.get_origin(choice) is Mapping for choice in choices):
        pairs = [tuple(each.strip() for each in item.split("=", 1)) for item in _items(text)]
        found = {pair[0]: pair[1] for pair in pairs if len(pair) == 2}
        return found if len(found) == len(pairs) else text  # a name without a value, or a name that stands twice
    if bool in choices:
        return {"true": True, "1": True, "false": False, "0": False}.get(text.lower(), text)
    for kind in (int, float):
        if kind in choices:
            try:
                return kind(text)
            except ValueError:
                continue
    return text


def _items(text: str) -> list[str]:
    """The items of a list in ``text``, which may end with a comma."""
    items = text.split(",")
    return items if items[-1].strip() else items[:-1]


def as_timeout(value: Any) -> timedelta | None:
    """``value`` as a timedelta; numbers are seconds, and ``None`` stands for the default.

    Raises:
        ConfigError: it is no length of time from a second on.
    """
    found = value
    if fits(value, float):
        try:
            found = timedelta(seconds=value)
        except (OverflowError, ValueError):  # infinite or not a number
            found = None
    if value is not None and (not isinstance(found, timedelta) or found < timedelta(seconds=1)):
        raise ConfigError(f"`timeout` must be a timedelta or seconds, finite and at least 1 s, but is {value!r}.")
    return found


def at_least_one(config: object, *names: str) -> list[str]:
    """Error texts for the options ``names`` that are below 1."""
    values = {name: getattr(config, name) for name in names}
    return [
        f"`{name}` must be at least 1, but is {value}."
        for name, value in values.items()
        if value is not None and value < 1
    ]


def one_of(config: object, name: str, choices: tuple[str | None, ...]) -> list[str]:
    """Error text for the option ``name`` if it is none of ``choices``."""
    value = getattr(config, name)
    if value in choices:
        return []
    meant = meant_value(name, value, choices)
    hint = f" Write `{meant}`." if meant else ""
    return [f"`{name}` must be one of {', '.join(filter(None, choices))}, but is {value!r}.{hint}"]
