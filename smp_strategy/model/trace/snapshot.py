"""Snapshot of Python state: capture, diff and restore what containers, modules, objects and variables hold.

A dry run executes the user's code, which may count calls, keep a tensor for later or fill a cache. None of it may
outlive the dry run: a cache filled with fake tensors would break the real run that follows. A unit that is recomputed
must in turn see what its first run saw. Both take a :class:`Snapshot`.

What is captured:

* Attributes of modules, and the lists, dicts and sets in them, however deeply nested.
* Objects of the user's classes (meters, namespaces): all attributes, and the lists, dicts and sets in these.
* Objects of libraries: their numbers only. Other things that a library has made meanwhile (a connection, a file) stay,
  because it would make them once more.
* Arrays of numpy's and random generators.
* Values of tensors in attributes that are no buffers, where asked for.

Changes of containers past the methods that their class overrides.

What a dry run or a turn of a microbatch has changed is put back by this package, not by the user. A class may refuse
changes (a frozen configuration), or entries that exist already (a registry): such checks are for the user's code.
"""

import collections
import copy
import dataclasses
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Set
from functools import partial
from operator import is_
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn

from smp_strategy.model.trace.pytree import nodes
from smp_strategy.model.trace.user_code import is_own_object

__all__ = [
    "Snapshot",
    "containers_in",
    "contents_of",
    "fill",
    "is_dataclass",
    "is_same",
    "replaced",
    "delete_item",
    "refill",
    "set_item",
    "set_items",
    "stored",
]


_CONTAINERS = (list, dict, set, deque)
_NESTS = (*_CONTAINERS, tuple)
_ORDINARY = frozenset({*_CONTAINERS, collections.OrderedDict, collections.defaultdict})
# Nothing is in them, or others capture it.
_PLAIN = frozenset({bool, int, float, str, type(None), Tensor, nn.Parameter})
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_MISSING = object()

# Limits of the search for objects: nesting, entries of a container (longer ones are data), bytes of an array.
_MOST_LEVELS = 4
_MOST_ENTRIES = 10_000
_MOST_BYTES = 1 << 26

Replacement = Callable[[Any], Any]


@final
class Snapshot:
    """Contents of containers and objects at the time of its construction; as a context manager, restores them.

    Args:
        modules: Modules whose attributes are captured, with the lists, dicts and sets in these.
        objects: Values among and in which objects, arrays and random generators are looked for.
        tensors_of: Modules; the tensors in their attributes that are no buffers get back their values.
        containers: Further lists, sets, mappings and dataclasses, each without those inside.
    """

    def __init__(
        self,
        *,
        modules: Iterable[nn.Module] = (),
        objects: Iterable[Any] = (),
        tensors_of: Iterable[nn.Module] = (),
        containers: Iterable[Any] = (),
    ) -> None:
        self._contents: list[tuple[Any, Any, Set[str]]] = []
        self._others: list[Callable[[], object]] = []
        attributes = [vars(module) for module in modules]
        self._others += _tensors_in(map(vars, tensors_of))
        for container in (*attributes, *containers_in(value for each in attributes for value in each.values())):
            self.add(container)
        self._add_objects(objects)
        for container in containers:
            self.add(container)

    def add(self, container: Any, contents: Any = None, *, ignored: Set[str] = frozenset()) -> None:
        """Capture one more container.

        Args:
            container: A list, deque, set, mapping or dataclass.
            contents: Its contents, if they differ from those of now (see :func:`contents_of`).
            ignored: Names in it that are neither captured nor restored.
        """
        if contents is None:
            contents = contents_of(container)
        if ignored:
            contents = {name: value for name, value in contents.items() if name not in ignored}
        self._contents.append((container, contents, ignored))

    def of_now(self) -> "Snapshot":
        """Another snapshot, of what the same containers hold now; without objects and tensors."""
        snapshot = Snapshot()
        for container, _, ignored in self._contents:
            snapshot.add(container, ignored=ignored)
        return snapshot

    def restore(self, by: Replacement | None = None) -> None:
        """Give everything its captured contents; ``by`` maps each captured value to the one that is put there."""
        for container, contents, ignored in self._contents:
            fill(container, contents if by is None else replaced(contents, by), ignored=ignored)
        for put_back in self._others:
            put_back()

    def __enter__(self) -> "Snapshot":
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def _add_objects(self, values: Iterable[Any]) -> None:
        own: list[dict[str, Any]] = []
        for value in _objects_in(values):
            put_back = _put_back(value)
            if put_back is not None:
                self._others.append(put_back)
            elif isinstance(value, (dict, list, tuple, nn.Module, Tensor, type)):
                continue
            elif is_own_object(value):
                own.append(vars(value))
            elif isinstance(getattr(value, "__dict__", None), dict):
                numbers = {name: held for name, held in vars(value).items() if type(held) in (int, float)}
                self._others.append(partial(vars(value).update, numbers))
        for container in (*own, *containers_in(value for each in own for value in each.values())):
            self.add(container)


def contents_of(container: Any) -> Any:
    """Shallow copy of a container's contents: a dict for mappings and dataclasses, a list for others."""
    if isinstance(container, (dict, Mapping)):  # `dict` first, which is found at once
        return dict(container)
    if type(container) not in _ORDINARY and is_dataclass(container):
        return {field.name: getattr(container, field.name) for field in dataclasses.fields(container)}
    return list(container)


def is_same(one: Any, other: Any) -> bool:
    """Whether two contents are the same objects in the same order."""
    if len(one) != len(other) or not all(map(is_, one, other)):
        return False
    return not isinstance(one, dict) or all(map(is_, one.values(), other.values()))


def replaced(contents: Any, by: Replacement) -> Any:
    """``contents`` with each value mapped by ``by``."""
    if isinstance(contents, dict):
        return {key: by(item) for key, item in contents.items()}
    return [by(item) for item in contents]


def fill(container: Any, contents: Any, *, ignored: Set[str] = frozenset()) -> None:
    """Give a container other contents, as :func:`contents_of` returns them, and write only what differs.

    Args:
        container: A list, deque, set, mapping or dataclass.
        contents: What it will hold.
        ignored: Names in it that stay as they are.
    """
    if not ignored and is_same(contents_of(container), contents):
        return
    if is_dataclass(container):
        for name, value in contents.items():
            setattr(container, name, value)
    elif isinstance(container, MutableMapping):
        _fill_mapping(container, contents, ignored)
    else:
        refill(container, contents)


def _fill_mapping(mapping: MutableMapping[Any, Any], contents: dict[Any, Any], ignored: Set[str]) -> None:
    # Name by name, not cleared first: a class or a module must not lose its attributes meanwhile.
    for name in [name for name in mapping if name not in contents and name not in ignored]:
        delete_item(mapping, name)
    for name, value in contents.items():
        if mapping.get(name, _MISSING) is not value:
            set_item(mapping, name, value)
    if isinstance(mapping, dict) and not ignored and not all(map(is_, mapping, contents)):  # another order
        refill(mapping, contents)


def is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def containers_in(values: Iterable[Any]) -> list[Any]:
    """The lists, dicts and sets among ``values`` and nested in them, each once."""
    found: dict[int, Any] = {}
    for value in values:
        if isinstance(value, _NESTS):
            if value and id(value) not in found:
                deque(nodes(value, _ordinary, once=found), maxlen=0)
            found[id(value)] = value
    return [item for item in found.values() if not isinstance(item, tuple)]


def _ordinary(nest: Any) -> Iterable[tuple[None, Any]]:
    """Containers in a container; others may refuse to be filled."""
    inside = nest.values() if isinstance(nest, dict) else nest
    if _ORDINARY.isdisjoint(map(type, inside)):  # asked of all at once: there may be a million numbers
        return ()
    return [(None, each) for each in inside if type(each) in _ORDINARY]


def _tensors_in(namespaces: Iterable[dict[str, Any]]) -> list[Callable[[], object]]:
    """Put back the values of tensors in attributes of modules."""
    found: dict[int, Tensor] = {}
    for attributes in namespaces:
        values = [value for name, value in attributes.items() if name not in _OF_EVERY_MODULE]
        inside = [each.values() if isinstance(each, dict) else each for each in containers_in(values)]
        # No subclasses: fake ones, and those that stand for tensors elsewhere. And none that cannot be changed.
        found |= {id(each): each for each in itertools.chain(values, *inside) if type(each) is Tensor}
    changeable = [each for each in found.values() if not (each.requires_grad or each.is_inference())]
    return [partial(_put_value_back, each, each._version, each.clone()) for each in changeable]


def _put_value_back(tensor: Tensor, version: int, value: Tensor) -> None:
    if tensor._version != version:
        tensor.copy_(value)


def _objects_in(values: Iterable[Any]) -> Iterator[Any]:
    """Values among and in ``values`` that may be objects, arrays or generators, each once."""
    seen: dict[int, Any] = {}
    for value in values:
        yield from (item for _, item in nodes(value, _inside, levels=_MOST_LEVELS, once=seen))


def _inside(value: Any) -> Iterable[tuple[None, Any]]:
    """Values in a short container or an object of the user's classes."""
    if isinstance(value, (dict, list, tuple)):
        inside = value.values() if isinstance(value, dict) else value
        inside = inside if len(value) <= _MOST_ENTRIES else ()
    else:
        inside = vars(value).values() if is_own_object(value) else ()
    return [(None, each) for each in inside if type(each) not in _PLAIN]


def _put_back(value: Any) -> Callable[[], object] | None:
    """Put an array or a random generator back to what it is now."""
    if isinstance(value, np.ndarray) and value.flags.writeable and value.nbytes <= _MOST_BYTES:
        return partial(np.copyto, value, value.copy())
    if isinstance(value, torch.Generator):
        return partial(value.set_state, value.get_state())
    if isinstance(value, np.random.RandomState):
        return partial(value.set_state, value.get_state())
    if isinstance(value, random.Random):
        return partial(value.setstate, value.getstate())
    if isinstance(value, np.random.Generator):
        return partial(setattr, value.bit_generator, "state", copy.deepcopy(value.bit_generator.state))
    return None


_BASES = (collections.OrderedDict, dict, list, set, deque)


def stored(mapping: Any) -> Any:
    """Entries that a mapping holds: a plain dict of them if its class computes what it returns, else the mapping."""
    overrides = isinstance(mapping, dict) and type(mapping).__getitem__ is not _base_of(mapping).__getitem__
    return dict(dict.items(mapping)) if overrides else mapping


def set_item(mapping: Any, key: Any, value: Any) -> None:
    _base_of(mapping).__setitem__(mapping, key, value)


def set_items(mapping: Any, values: Any) -> None:
    """Set several entries of a mapping."""
    if _base_of(mapping) is dict:
        dict.update(mapping, values)
        return
    for key, value in values.items():
        set_item(mapping, key, value)


def delete_item(mapping: Any, key: Any) -> None:
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
