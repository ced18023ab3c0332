"""Contents of objects among a unit's arguments (a key/value cache), as one more argument and result of its calls.

Only the stage that runs a unit fills such an object. Code above the units asks it, though: the length of a cache makes
masks and positions, a beam search reorders it. So every stage keeps the object up to date, with placed tensors in it.

[Note: contents of objects] A call gets the contents in one more argument, a dict of labels and values, as exposed
attributes do (:mod:`.exposed_attributes`). Outside of calls the object holds placed tensors; inside, the unit finds
real ones, or fake ones in a dry run::

    caller, on every stage     takes tensors and plain values out of the object, into the dict
    call, for real or dry      puts them into the object; runs; takes them out again, into the dict
    caller, on every stage     gives the object the form that the call has left; puts the values of the dict into it

The form is the rest: which lists, dicts and objects there are. The real call has changed that of the caller's object; a
dry run has changed that of a copy, from which the caller's is made (:class:`Form`). Tensors that another unit has put
there stay in the object, so that they do not travel: :class:`Elsewhere`.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any, final

from torch import Tensor, nn

from smp_strategy.model.trace.prediction import IMMUTABLE
from smp_strategy.model.trace.pytree import is_value, leaves_of
from smp_strategy.model.trace.side_effects import is_object, objects_in
from smp_strategy.model.trace.snapshot import contents_of, fill, is_same, set_item

__all__ = ["CONTENTS", "Elsewhere", "Form", "carrying", "objects_among", "entries_in", "put"]

CONTENTS = "contents of objects"
"""Name of the argument that carries them; no ``forward`` can have a parameter of this name."""

ContainerEntry = tuple[Any, Any]
"""Container, and key or position in it."""


@final
class Elsewhere(str):
    """Stands for a tensor that another unit has put into the object: its metadata.

    Attributes:
        real: Returns the tensor, where it is; ``None``: it is on another stage.
    """

    __slots__ = ("real",)
    real: Callable[[], Tensor] | None


@final
class Form:
    """Form that a call has left the objects among its arguments in. It is callable, so no pytree opens it.

    Args:
        items: Lists, dicts and objects that were there before.
        contents: Their contents, without what the dict of the call has; empty: they have not changed.
        elsewhere: Tensors in there that the dict does not have.
    """

    def __init__(self, items: Sequence[Any], contents: Sequence[Any], elsewhere: Sequence[Tensor]) -> None:
        self._items = items
        self._elsewhere = elsewhere
        # A copy, because later calls change what this one has made.
        self._contents = copy.deepcopy(contents, {id(item): item for item in (*items, *elsewhere)})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Form)  # so that dry runs with different assumptions agree

    __hash__ = None  # type: ignore[assignment]

    def __call__(self, objects: Iterable[Any], elsewhere: Sequence[Tensor]) -> None:
        """Give ``objects`` this form, unless the call has changed these very ones."""
        own = objects_in(objects)
        if not self._contents or own[0][0] is self._items[0]:
            return
        same = [
            *zip(self._items, (item for item, _ in own), strict=True),
            *zip(self._elsewhere, elsewhere, strict=True),
        ]
        memo = {id(theirs): mine for theirs, mine in same}
        for (_, inner), contents in zip(own, self._contents, strict=True):
            fill(inner, copy.deepcopy(contents, memo))


def objects_among(arguments: Any) -> list[Any]:
    """Objects whose contents are carried, among the arguments of a call."""
    return [leaf for leaf in leaves_of(arguments) if is_object(leaf) and not is_value(type(leaf))]


def entries_in(objects: Iterable[Any]) -> dict[str, ContainerEntry]:
    """Places of tensors and plain values in ``objects``, by labels that are equal on all ranks."""
    found: dict[str, ContainerEntry] = {}
    for number, (_, inner) in enumerate(objects_in(objects)):
        entries = inner.items() if isinstance(inner, dict) else enumerate(inner)
        found |= {f"{number}.{key!r}": (inner, key) for key, value in entries if _is_content(value)}
    return found


def put(entry: ContainerEntry, value: Any) -> None:
    container, key = entry
    if isinstance(container, dict):
        set_item(container, key, value)
    else:
        list.__setitem__(container, key, value)


def carrying(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` with one more argument, the dict of [Note: contents of objects], and one more result, the form."""

    def call(*args: Any, **kwargs: Any) -> Any:
        given = kwargs.pop(CONTENTS)
        objects = objects_among((args, kwargs))
        before, entries = objects_in(objects), entries_in(objects)
        stays = [_there(entries[label], value) for label, value in given.items() if isinstance(value, Elsewhere)]
        contents = [contents_of(inner) for _, inner in before]
        for label, value in given.items():
            if not isinstance(value, Elsewhere):
                put(entries[label], value)
        result = function(*args, **kwargs)
        given.clear()
        for label, (container, key) in entries_in(objects).items():
            if not any(container[key] is each for each in stays):
                given[label] = container[key]
                put((container, key), None)
        now = [contents_of(inner) for _, inner in before]
        if all(map(is_same, contents, now)):
            now = []
        return result, Form([item for item, _ in before], now, stays)

    return call


def _there(entry: ContainerEntry, value: Elsewhere) -> Tensor:
    """The tensor in ``entry``, made real for a real call."""
    if value.real is not None and getattr(type(entry[0][entry[1]]), "is_placed", False):
        put(entry, value.real())
    found: Tensor = entry[0][entry[1]]
    return found


def _is_content(value: Any) -> bool:
    if type(value) is tuple:
        return all(map(_is_content, value))
    return isinstance(value, (Tensor, *IMMUTABLE)) and not isinstance(value, nn.Parameter)
