"""Carried objects: a unit changes them, and the glue gives them to it again (a cache of keys and values, a memory).

Without gradients every stage keeps their contents, see [Note: contents of objects] in
:mod:`smp_strategy.model.trace.object_contents`.

In training each stage has what its own units have put into such an object. Code above the units that asks the object,
for the length of a cache to make a mask, gets the answer of its own stage, and an empty cache has another length than a
full one. So from the call on in which a unit gets an object for the second time in a microbatch, the stages note the
arguments of units, and compare them with their programs at the end of the step (:mod:`.step_end`).
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, final

from torch import Tensor, nn

from smp_strategy.distributed.agreement.same_inputs import digest_of, looks_closely, rounded
from smp_strategy.distributed.agreement.topics import CARRIED_REASON
from smp_strategy.model.trace.fake_call import is_left_behind
from smp_strategy.model.trace.object_contents import (
    CONTENTS,
    Elsewhere,
    Form,
    carrying,
    entries_in,
    objects_among,
    put,
)
from smp_strategy.model.trace.prediction import Callee
from smp_strategy.model.trace.pytree import leaves_of
from smp_strategy.model.trace.side_effects import Changed, apply_changes, is_object
from smp_strategy.model.trace.tensor_spec import TensorSpec
from smp_strategy.pipeline.placed_tensor import PlacedTensor

__all__ = ["CarriedContents", "CarriedObjects", "with_changes"]

_MOST_COMPARED: Final = 256
"""Elements of a plain tensor that stages compare."""


@final
@dataclass
class _UnitArguments:
    """Arguments of units in a microbatch."""

    objects: dict[tuple[object, int], Any] = field(default_factory=dict)
    """Objects by unit and identity; they are kept alive, so that no other gets the same identity."""
    is_carried: bool = False
    """Whether a unit has got one of them again."""
    calls: list[str] = field(default_factory=list)
    """Calls since then."""


@final
class CarriedObjects:
    """Carried objects of a step on a stage."""

    def __init__(self) -> None:
        self._given = defaultdict[int, _UnitArguments](_UnitArguments)
        self._num_steps = 1
        # Plain tensors, by identity: they are kept alive, so that no other gets the same one.
        self._tensors: dict[int, Tensor] = {}
        # Calls that got new ones of these, and digests of them.
        self._inputs: list[tuple[str, int, float]] = []
        self._losses = defaultdict[int, list[tuple[str, int, float]]](list)
        # Units and classes of objects without tensors that they leave as they are (settings, say).
        self._inert: set[object] = set()

    def call(
        self,
        call: Callable[..., Any],
        unit: str,
        callee: Callee,
        args: Any,
        kwargs: dict[str, Any],
        real: Callable[[Tensor], Tensor],
        lend: Callable[[list[Any]], None] | None,
    ) -> Any:
        """Call a unit without gradients, which may change containers and objects among its arguments.

        Args:
            call: Makes the call, given callee and arguments.
            real: Returns the real tensor of a placed one that is on this stage.
            lend: Called, if this is a dry run, with arguments that it may change.
        """
        contents = self._contents(unit, (args, kwargs), real)
        if contents is None:
            return with_changes(call(callee, args, kwargs), (args, kwargs))
        callee, kwargs = callee.around(carrying), {**kwargs, CONTENTS: contents.values}
        if lend is not None:
            lend(leaves_of((args, kwargs)))
        contents.take_out()
        try:
            return contents.finish(with_changes(call(callee, args, kwargs), (args, kwargs)))
        except BaseException:
            contents.put_back()
            raise

    def _contents(self, unit: str, arguments: Any, real: Callable[[Tensor], Tensor]) -> "CarriedContents | None":
        """Contents of the objects among ``arguments``; ``None``: there are none."""
        objects = objects_among(arguments)
        key = (unit, *map(type, objects))
        if not objects or key in self._inert:
            return None
        contents = CarriedContents(unit, objects, real)
        if not contents.has_tensors:
            contents.when_unchanged = lambda: self._inert.add(key)
        return contents if contents.values else None

    def note(self, microbatch: int, unit: Callee, args: Any, kwargs: Any) -> None:
        """Note the arguments of a call."""
        leaves, given = leaves_of((args, kwargs)), self._given[microbatch]
        for leaf in leaves:
            if not isinstance(leaf, Tensor) and is_object(leaf):
                key = (unit.key, id(leaf))
                given.is_carried |= key in given.objects
                given.objects[key] = leaf
        if given.is_carried:
            given.calls.append(f"{unit.key}: {' '.join(map(_about, leaves))}")

    def note_tensors(self, name: str, leaves: list[Any], *, but: Collection[int]) -> None:
        """Note digests of plain tensors in host memory among the arguments of a call, except those at the positions
        ``but``, which it overwrites: noise of a rank's own generator.

        On an accelerator, reading them would wait for the device.
        """
        if not looks_closely(self._num_steps):
            return
        new = []
        for position, leaf in enumerate(leaves):
            is_plain = isinstance(leaf, Tensor) and not isinstance(leaf, (PlacedTensor, nn.Parameter))
            if not is_plain or position in but or leaf.device.type != "cpu":
                continue
            if id(leaf) not in self._tensors:
                self._tensors[id(leaf)] = leaf
                new.append(leaf)
        if new:
            self._inputs.append((f"a call of `{name}`", *digest_of(new, most=_MOST_COMPARED)))

    def note_loss(self, microbatch: int, loss: Tensor) -> None:
        """Note the value of a loss, in which numbers and places that a rank has drawn show as well."""
        real = loss.origin[1] if isinstance(loss, PlacedTensor) and loss.origin is not None else loss
        if looks_closely(self._num_steps) and type(real) is Tensor:  # it is elsewhere, or in parts
            self._losses[microbatch].append(("the computation of the loss", *rounded(real.item(), real.dtype)))

    def take_inputs(self) -> tuple[list[tuple[str, int, float]], list[tuple[str, int, float]]]:
        """Calls with plain tensors, and losses in the order of microbatches, with digests; they are forgotten here."""
        self._num_steps += 1
        found = self._inputs, [each for _, losses in sorted(self._losses.items()) for each in losses]
        self._forget_inputs()
        return found

    def _forget_inputs(self) -> None:
        self._tensors, self._inputs = {}, []
        self._losses.clear()

    def take(self) -> dict[int, list[str]]:
        """Calls to be compared, by microbatch; they are forgotten here."""
        calls = {microbatch: given.calls for microbatch, given in self._given.items() if given.is_carried}
        self._given.clear()
        return calls

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Context of a step: its errors tell of objects that units have got again."""
        try:
            yield
        except Exception as error:
            if any(given.is_carried for given in self._given.values()):
                error.add_note(f"A unit has got an object for the second time. {CARRIED_REASON}")
            raise
        finally:
            self._given.clear()
            self._forget_inputs()


def _about(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        is_whole = not (isinstance(leaf, PlacedTensor) or leaf.is_floating_point() or leaf.is_complex())
        return f"{list(leaf.shape)}{f' with sum {leaf.sum().item()}' if is_whole else ''}"
    return str(leaf) if isinstance(leaf, (bool, int, float)) else "-"


def with_changes(result: Any, arguments: Any) -> Any:
    """``result`` of a call whose changes of containers among its ``arguments`` are made on every stage."""
    return apply_changes(result, arguments) if isinstance(result, Changed) else result


@final
class CarriedContents:
    """Contents of the objects among the arguments of one call; see [Note: contents of objects].

    Args:
        real: Returns the real tensor of a placed one that is on this stage.

    Attributes:
        values: The argument that carries them, which the call changes.
        has_tensors: Whether there are tensors among them.
        when_unchanged: Called if the call leaves the objects as they are.
    """

    def __init__(self, unit: str, objects: list[Any], real: Callable[[Tensor], Tensor]) -> None:
        self._unit, self._objects, self._real = unit, objects, real
        self._entries = entries_in(objects)
        self._before = {label: container[key] for label, (container, key) in self._entries.items()}
        self._stay = {label: value for label, value in self._before.items() if self._is_of_another(value)}
        # Real tensors that the objects hold during the call, with the placed ones that are put back then.
        self._lent: list[tuple[Tensor, PlacedTensor]] = []
        self.values = {label: self._argument(label, value) for label, value in self._before.items()}
        self.has_tensors = any(isinstance(value, Tensor) for value in self._before.values())
        self.when_unchanged: Callable[[], None] = lambda: None

    def take_out(self) -> None:
        """Leave nothing in the objects but what stays there: the call will find the rest in :attr:`values`."""
        for label, entry in self._entries.items():
            if label not in self._stay:
                put(entry, None)

    def put_back(self) -> None:
        """Undo :meth:`take_out`, after an error."""
        for label, value in self._before.items():
            put(self._entries[label], value)

    def finish(self, result: Any) -> Any:
        """Give the objects the form and the contents that the call has left; returns its result without these."""
        result, form = result
        if not isinstance(form, Form):  # of another stage, which could not send it
            self.put_back()
            return result
        form(self._objects, list(self._stay.values()))
        entries = entries_in(self._objects)
        contents = {label: value for label, value in self.values.items() if not isinstance(value, Elsewhere)}
        if entries.keys() == self._entries.keys() and all(self._before[name] is contents[name] for name in contents):
            self.when_unchanged()
        for label, value in contents.items():
            put(entries[label], value)
            if isinstance(value, PlacedTensor) and value is not self._before.get(label):
                value.maker = self._unit
        for real, placed in self._lent:
            for container, key in entries.values():
                if container[key] is real:
                    put((container, key), placed)
        return result

    def _is_of_another(self, value: Any) -> bool:
        # A dry call with gradients, whose objects are not carried, leaves fake tensors in them.
        is_of_dry_call = is_left_behind(value)
        return is_of_dry_call or (isinstance(value, PlacedTensor) and value.maker not in ("", self._unit))

    def _argument(self, label: str, value: Any) -> Any:
        if label not in self._stay:
            return value
        stays = Elsewhere(TensorSpec.of(value))
        is_here = isinstance(value, PlacedTensor) and value.origin is not None
        stays.real = functools.partial(self._lend, value) if is_here else None
        return stays

    def _lend(self, placed: PlacedTensor) -> Tensor:
        self._lent.append((self._real(placed), placed))
        return self._lent[-1][0]
