"""Attributes in which units leave tensors for others: ``self.aux_loss = ...`` in a block, summed up in the step.

Only the stage that runs a unit has what the unit leaves in an attribute. Most attributes concern nobody else (caches,
counters) and stay as they are. Those that code above the units reads are *exposed*: they become arguments and results
of the unit's calls. The call gets them in a dict, puts them into the attributes, runs, and takes them out into the dict
again; that units may change dicts among their arguments is known (:mod:`smp_strategy.model.trace.side_effects`). So
outside of calls an exposed attribute holds a placed tensor on every stage, and inside the unit finds the real one.

A *survey*, the run of a step that is only looked at, finds them: :class:`ExposedAttributes` notes which tensors a unit
leaves where, and is asked about every tensor that code outside of units uses. In a dry run an attribute is otherwise
put back after the unit; here a fake tensor, the *mark*, stays, to be met by who uses it.
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

STATE = "exposed attributes"
"""Name of the argument that carries them. It is none that a ``forward`` can have."""

ABOVE = "above the unit: "
"""Begins labels of attributes of modules above the unit."""
_MISSING: Any = object()
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


@final
@dataclass(frozen=True)
class ExposedAttribute:
    """An attribute of a part of a unit, or of a module above it."""

    part: nn.Module
    name: str
    label: str
    """What it is called below the unit."""

    def get(self) -> Any:
        """Its present value."""
        return vars(self.part).get(self.name, _MISSING)

    def set(self, value: Any) -> None:
        """Change or delete it, past what the module does about that."""
        _set(self.part, self.name, value)


@final
class StaleTensor:
    """Stands for what another microbatch or step has left, on its way into a call.

    Args:
        tensor: gives it where it is, and something of its shape elsewhere.
    """

    def __init__(self, tensor: Callable[[], Tensor]) -> None:
        self._tensor = tensor

    def __call__(self) -> Tensor:
        """The tensor. (Being callable, this is no container or cache for the dry run.)"""
        return self._tensor()


def state_of(exposed: tuple[ExposedAttribute, ...]) -> dict[str, Any]:
    """The values of those that there are."""
    return {each.label: each.get() for each in exposed if each.get() is not _MISSING}


def put_state(exposed: tuple[ExposedAttribute, ...], state: Mapping[str, Any]) -> None:
    """Give them these values; others are deleted."""
    for each in exposed:
        each.set(state.get(each.label, _MISSING))


def exposing(function: Callable[..., Any], exposed: tuple[ExposedAttribute, ...]) -> Callable[..., Any]:
    """``function``, with the values of ``exposed`` attributes in a dict among its arguments, which it changes."""

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
        # What has stayed is what the caller gave.
        state.update({label: value for label, value in left.items() if value is not given.get(label, _MISSING)})
        return result

    return call


@final
@dataclass(frozen=True)
class _LeftInAttribute:
    """Something that a unit has left in an attribute."""

    unit: str
    place: ExposedAttribute
    value: Any


@final
class ExposedAttributes:
    """What units leave in attributes during surveys, and which of it is used by others.

    Attributes:
        found: by unit, attributes that code above the units uses.
        above: modules above the units, by name: hooks inside of units may set their attributes, too.
        around: other places that these hooks reach (lists and variables around them): nobody else may use what is put
            there.
    """

    def __init__(self) -> None:
        self.found: dict[str, dict[str, ExposedAttribute]] = {}
        self.above: dict[str, nn.Module] = {}
        self.around: Sequence[Any] = ()
        self._unreachable: dict[int, Tensor] = {}
        self._left: dict[tuple[str, str], _LeftInAttribute] = {}
        self._by_tensor: dict[int, tuple[Tensor, _LeftInAttribute]] = {}
        # What marks have taken the place of.
        self._marks: list[tuple[_LeftInAttribute, Any]] = []
        self._num_known = 0

    @contextmanager
    def noting(self, unit: str, module: nn.Module) -> Iterator[None]:
        """The unit runs in here, dry or for real."""
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

    @contextmanager
    def unmarked(self, unit: str, module: nn.Module) -> Iterator[None]:
        """The unit runs dry in here, and finds what it would find for real; afterwards marks stand where it leaves
        tensors, and where others have left some that are no mere constants."""
        parts = set(map(id, module.modules()))
        hidden = [
            (left, before)
            for left, before in self._marks
            if id(left.place.part) in parts and (left.unit == unit or not _needs_gradient(left.value))
        ]
        for left, before in reversed(hidden):
            if left.place.get() is left.value:  # the code above the units may have changed it
                left.place.set(before)
        self._marks = [mark for mark in self._marks if all(mark is not other for other in hidden)]
        yield
        for left in list(self._left.values()):
            if left.unit == unit and left.place.label not in self.found.get(unit, ()):
                self._marks.append((left, left.place.get()))
                left.place.set(left.value)

    def next_round(self) -> None:
        """A survey begins, or begins anew, in which what has been found is exposed."""
        self._marks.clear()
        self._num_known = sum(map(len, self.found.values()))

    def use_all_with_gradient(self) -> None:
        """It is not known what is used."""
        for left in self._left.values():
            if _needs_gradient(left.value):
                self.found.setdefault(left.unit, {})[left.place.label] = left.place

    @property
    def is_empty(self) -> bool:
        """Whether no unit is known to leave anything."""
        return not self._left

    @property
    def has_news(self) -> bool:
        """Whether something was found in this round."""
        return sum(map(len, self.found.values())) > self._num_known

    def let_go(self) -> None:
        """Keep no tensors that were really computed."""
        self._marks.clear()
        self._unreachable.clear()
        self.around = ()
        self._left = {key: left for key, left in self._left.items() if all(map(_is_fake, _tensors(left.value)))}
        self._by_tensor = {key: found for key, found in self._by_tensor.items() if _is_fake(found[0])}

    def use(self, arguments: Any) -> None:
        """Code above the units uses ``arguments``."""
        for leaf in leaves_of(arguments):
            tensor, left = self._by_tensor.get(id(leaf), (None, None))
            if tensor is leaf and left is not None:
                self.found.setdefault(left.unit, {})[left.place.label] = left.place
            elif self._unreachable.get(id(leaf)) is leaf and leaf is not None:
                raise left_behind()

    def refuse_use(self, module: nn.Module, arguments: Any) -> None:
        """Refuse ``arguments`` that the unit ``module`` works on but another has left somewhere."""
        for leaf in leaves_of(arguments):
            tensor, left = self._by_tensor.get(id(leaf), (None, None))
            if tensor is leaf and left is not None and all(part is not left.place.part for part in module.modules()):
                raise UnsupportedError(
                    f"{type(module).__name__}, a unit, uses a tensor that unit `{left.unit}` put into its attribute "
                    f"`{left.place.label}`, but the two may live on different stages. Return the tensor and give it "
                    "as an argument, or use a list or dict among the arguments."
                )


def left_behind() -> UnsupportedError:
    """The refusal of a tensor that only the unit has which made it."""
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
    """The tensors in attributes of a module."""
    return {name: _tensors(value) for name, value in vars(part).items() if name not in _OF_EVERY_MODULE}


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    items = list(value.values()) if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return [item for item in items if isinstance(item, Tensor) and not isinstance(item, nn.Parameter)]


def _copy(value: Any) -> Any:
    """The attributes' containers will be put back as they were."""
    return value.copy() if isinstance(value, list | dict) else value


def _is_fake(tensor: Tensor) -> bool:
    return isinstance(tensor, FakeTensor)


def _needs_gradient(value: Any) -> bool:
    return any(tensor.requires_grad for tensor in _tensors(value))
