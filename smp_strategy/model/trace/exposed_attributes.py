"""Exposed attributes: tensors that a unit assigns to an attribute and code above it reads (``self.aux_loss = ...``).

Only the stage that runs a unit has its attributes. Most concern nobody else (caches, counters) and stay as they are.
Attributes that code above the units reads are *exposed*: they become arguments and results of the unit's calls. Dry
runs of the step, the *surveys*, find them; see [Note: exposed attributes] and [Note: marks].
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from smp_strategy.errors import UnsupportedError
from smp_strategy.model.trace.pytree import leaves_of

__all__ = [
    "STATE",
    "ExposedAttribute",
    "StaleTensor",
    "ExposedAttributes",
    "exposing",
    "left_behind",
    "put_state",
    "state_of",
]

# [Note: exposed attributes]
# A call gets the values of the exposed attributes in one more argument, a dict. It puts them into the attributes,
# runs, and takes them out into the dict again. Units may change dicts among their arguments (`side_effects.py`), so
# prediction and transport of the new values need nothing else. Outside of calls an exposed attribute holds a placed
# tensor on every stage; inside, the unit finds the real tensor.
#
# [Note: marks]
# After a dry run of a unit its attributes are restored, so code that reads one would find the old value, and the read
# would go unnoticed. So in a survey the fake tensor that the unit has assigned is put back into the attribute: the
# mark. Code above the units that uses it meets a tensor that is known by its `id`, which exposes the attribute. A mark
# that its own unit finds in the next dry run would be a tensor of another run. `unmarked` therefore hides marks in the
# unit meanwhile, except those with a gradient that other units have left, whose use must be noticed. A survey is
# repeated until it finds nothing new, because an exposed attribute changes what units return.

STATE = "exposed attributes"
"""Name of the argument that carries them; no ``forward`` can have a parameter of this name."""

ABOVE = "above the unit: "
"""Prefix of labels of attributes of modules above the unit."""
_MISSING: Any = object()
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


@final
@dataclass(frozen=True)
class ExposedAttribute:
    """An attribute of a part of a unit, or of a module above it."""

    part: nn.Module
    name: str
    label: str
    """Its qualified name below the unit."""

    def get(self) -> Any:
        return vars(self.part).get(self.name, _MISSING)

    def set(self, value: Any) -> None:
        """Change or delete it, past the module's ``__setattr__``."""
        _set(self.part, self.name, value)


@final
class StaleTensor:
    """Argument of a call: the tensor that an earlier microbatch or step has left in an attribute.

    Args:
        tensor: Returns it on the stage that has it, and a tensor of its shape elsewhere.
    """

    def __init__(self, tensor: Callable[[], Tensor]) -> None:
        self._tensor = tensor

    def __call__(self) -> Tensor:
        """The tensor. (A callable is neither a container nor a cache for the dry run.)"""
        return self._tensor()


def state_of(exposed: tuple[ExposedAttribute, ...]) -> dict[str, Any]:
    """Values of the ``exposed`` attributes that are set, by label."""
    return {each.label: each.get() for each in exposed if each.get() is not _MISSING}


def put_state(exposed: tuple[ExposedAttribute, ...], state: Mapping[str, Any]) -> None:
    """Set ``exposed`` attributes to the values in ``state``; delete those that are not in there."""
    for each in exposed:
        each.set(state.get(each.label, _MISSING))


def exposing(function: Callable[..., Any], exposed: tuple[ExposedAttribute, ...]) -> Callable[..., Any]:
    """``function`` with one more argument, the dict of [Note: exposed attributes], which it changes."""

    def call(*args: Any, **kwargs: Any) -> Any:
        state = kwargs.pop(STATE)
        outside = state_of(exposed)
        given = {label: value() if isinstance(value, StaleTensor) else value for label, value in state.items()}
        put_state(exposed, given)
        try:
            result = function(*args, **kwargs)
            left = state_of(exposed)
        finally:
            put_state(exposed, outside)
        for label in state.keys() - left.keys():
            del state[label]
        # Values that the call has not replaced stay as the caller gave them, a `StaleTensor` included.
        state.update({label: value for label, value in left.items() if value is not given.get(label, _MISSING)})
        return result

    return call


@final
@dataclass(frozen=True)
class _LeftInAttribute:
    """A value with tensors that a unit has assigned to an attribute."""

    unit: str
    place: ExposedAttribute
    value: Any


@final
class ExposedAttributes:
    """Tracks during surveys the tensors that units leave in attributes, and their uses by other code.

    Attributes:
        found: Attributes that code above the units uses, by unit and label.
        above: Modules above the units, by name; hooks inside of units may set their attributes, too.
        around: Other places that these hooks reach (lists and variables around them). Using a tensor that is put there
            is an error.
    """

    def __init__(self) -> None:
        self.found: dict[str, dict[str, ExposedAttribute]] = {}
        self.above: dict[str, nn.Module] = {}
        self.around: Sequence[Any] = ()
        self._unreachable: dict[int, Tensor] = {}
        self._left: dict[tuple[str, str], _LeftInAttribute] = {}
        self._by_tensor: dict[int, tuple[Tensor, _LeftInAttribute]] = {}
        # [Note: marks], each with the value that it has replaced.
        self._marks: list[tuple[_LeftInAttribute, Any]] = []
        self._num_known = 0

    @contextmanager
    def noting(self, unit: str, module: nn.Module) -> Iterator[None]:
        """Context of a run of the unit, dry or for real: record the tensors that it leaves."""
        above = [(f"{ABOVE}{label}", part) for label, part in self.above.items()]
        before = [(label, part, _contents_of(part)) for label, part in [*module.named_modules(), *above]]
        others = [(place, set(map(id, _tensors(place)))) for place in self.around]
        yield
        for place, known in others:
            self._unreachable.update({id(tensor): tensor for tensor in _tensors(place) if id(tensor) not in known})
        for label, part, values in before:
            for name, value in vars(part).items():
                if name in _OF_EVERY_MODULE:
                    continue
                new = [item for item in _tensors(value) if not any(item is old for old in values.get(name, ()))]
                if new:
                    left = _LeftInAttribute(
                        unit, ExposedAttribute(part, name, f"{label}.{name}".lstrip(".")), _copy(value)
                    )
                    self._left[unit, left.place.label] = left
                    self._by_tensor.update({id(tensor): (tensor, left) for tensor in new})

    def has_left(self, unit: str) -> bool:
        """Whether a run of the unit has left tensors in attributes."""
        return any(owner == unit for owner, _ in self._left)

    @contextmanager
    def unmarked(self, unit: str, module: nn.Module) -> Iterator[None]:
        """Context of a dry run of the unit: hide marks that it must not find, and set marks afterwards.

        See [Note: marks].
        """
        parts = set(map(id, module.modules()))
        hidden = [
            (left, before)
            for left, before in self._marks
            if id(left.place.part) in parts and (left.unit == unit or not _needs_gradient(left.value))
        ]
        for left, before in reversed(hidden):
            if left.place.get() is left.value:  # unless code above the units has changed it since
                left.place.set(before)
        self._marks = [mark for mark in self._marks if all(mark is not other for other in hidden)]
        yield
        for left in list(self._left.values()):
            if left.unit == unit and left.place.label not in self.found.get(unit, ()):
                self._marks.append((left, left.place.get()))
                left.place.set(left.value)

    def next_round(self) -> None:
        """Begin a survey, or repeat it with the attributes found so far exposed."""
        self._marks.clear()
        self._num_known = sum(map(len, self.found.values()))

    def use_all_with_gradient(self) -> None:
        """Expose everything with a gradient, because uses cannot be observed."""
        for left in self._left.values():
            if _needs_gradient(left.value):
                self.found.setdefault(left.unit, {})[left.place.label] = left.place

    @property
    def is_empty(self) -> bool:
        """Whether no unit leaves tensors in attributes, as far as is known."""
        return not self._left

    @property
    def has_news(self) -> bool:
        """Whether this round has found further attributes."""
        return sum(map(len, self.found.values())) > self._num_known

    def let_go(self) -> None:
        """Drop references to tensors that were really computed."""
        self._marks.clear()
        self._unreachable.clear()
        self.around = ()
        self._left = {key: left for key, left in self._left.items() if all(map(_is_fake, _tensors(left.value)))}
        self._by_tensor = {key: found for key, found in self._by_tensor.items() if _is_fake(found[0])}

    def use(self, arguments: Any) -> None:
        """Record that code above the units uses ``arguments``.

        Raises:
            UnsupportedError: One of them was left where other stages cannot get it.
        """
        for leaf in leaves_of(arguments):
            tensor, left = self._by_tensor.get(id(leaf), (None, None))
            if tensor is leaf and left is not None:
                self.found.setdefault(left.unit, {})[left.place.label] = left.place
            elif self._unreachable.get(id(leaf)) is leaf and leaf is not None:
                raise left_behind()

    def refuse_use(self, module: nn.Module, arguments: Any) -> None:
        """Refuse ``arguments`` of an operation in the unit ``module`` that another unit has left in an attribute."""
        for leaf in leaves_of(arguments):
            tensor, left = self._by_tensor.get(id(leaf), (None, None))
            if tensor is leaf and left is not None and all(part is not left.place.part for part in module.modules()):
                raise UnsupportedError(
                    f"{type(module).__name__}, a unit, uses a tensor that unit `{left.unit}` put into its attribute "
                    f"`{left.place.label}`, but the two may live on different stages. Return the tensor and give it "
                    "as an argument, or use a list or dict among the arguments."
                )


def left_behind() -> UnsupportedError:
    """Error for the use of a tensor that only the stage of one unit has."""
    return UnsupportedError(
        "Code above the units uses a tensor that a unit did not return, but left in an object that it was given (a "
        "cache, say: `use_cache=False` does without), or in a variable around it (by a hook on one of its parts). "
        "Other stages do not have it: return it from the unit's forward, or set an attribute of the unit."
    )


def _set(part: nn.Module, name: str, value: Any) -> None:
    if value is _MISSING:
        vars(part).pop(name, None)
    else:
        vars(part)[name] = value


def _contents_of(part: nn.Module) -> dict[str, list[Tensor]]:
    return {name: _tensors(value) for name, value in vars(part).items() if name not in _OF_EVERY_MODULE}


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    items = list(value.values()) if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return [item for item in items if isinstance(item, Tensor) and not isinstance(item, nn.Parameter)]


def _copy(value: Any) -> Any:
    """Copy of a container, because the original will be restored after the dry run."""
    return value.copy() if isinstance(value, list | dict) else value


def _is_fake(tensor: Tensor) -> bool:
    return isinstance(tensor, FakeTensor)


def _needs_gradient(value: Any) -> bool:
    return any(tensor.requires_grad for tensor in _tensors(value))
