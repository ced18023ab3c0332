"""Parameter ownership: the stages that hold each parameter and buffer.

Until the partition is decided every rank holds the whole model. Then a rank frees the units of other stages: their
parameters keep name, shape, dtype, device and identity (optimizers and hooks refer to them), but no values, and an
accidental use is an error (:mod:`smp_strategy.model.guarded_tensors`). They get no gradient and so no optimizer state.

A parameter can be held by several stages: tied weights of two units by the stages of both, parameters that the glue
has or computes with by all. The lowest of these stages counts it in norms and saves it.
"""

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor, nn

from smp_strategy.distributed.door_words import door_words
from smp_strategy.errors import UnsupportedError
from smp_strategy.model.guarded_tensors import (
    GRADIENT,
    HARMLESS,
    SIZES,
    Guard,
    guard_of,
    in_plain_sight,
    name_of,
    placeholder,
    unwatch,
    watch,
)
from smp_strategy.model.trace.tensor_spec import TensorSpec
from smp_strategy.model.units import Unit

__all__ = ["Ownership", "HomeStages", "HookAccess", "bring_back", "home_of", "resize", "send_away", "spec_of"]


# --- home stages -----------------------------------------------------------------------------------------------------
# Home stages: which stages have the values of a tensor, and the guard of those that are elsewhere.
#
# After the partition a rank has values for the units of its own stage only. Operations on parameters and buffers of
# other stages are
#
# * carried out where the values are, while a hook of the user runs: then tensors that *are* here are guarded, too, and
#   their operations go to the view of that hook (`smp_strategy.engine.hooks.cross_stage`);
# * refused with the name, the stage and the remedy at any other time.


@final
@dataclass
class HookAccess:
    """Handlers of operations on guarded tensors, exchanged as hooks of the user begin and end.

    Attributes:
        call: Carries out an operation where the values are; ``None``: operations are refused.
        copy: Makes an independent tensor with the same home; set together with ``call``.
        make_whole: Called before a size is returned, where sizes are those of shards.
        ask: Asks for the values where operations are refused; returns whether they are there now.
    """

    call: Callable[[Any, Any, Any], Any] | None = None
    copy: Callable[[Tensor], Tensor] | None = None
    make_whole: Callable[[], None] | None = None
    ask: Callable[[], bool] = lambda: False


@final
@dataclass(frozen=True, kw_only=True)
class HomeStages(Guard):
    """Placement of a tensor, seen from one rank, and its guard where the values are not."""

    name: str
    """Qualified name in the module."""
    holders: frozenset[int]
    """Stages that have its values."""
    stage: int
    """Stage of this rank."""
    stride: tuple[int, ...]
    """Memory layout where the values are."""
    sight: HookAccess
    """Shared by all tensors of a module."""

    @property
    def is_here(self) -> bool:
        """Whether this rank has the values."""
        return self.stage in self.holders

    def refusal(self, operation: str) -> UnsupportedError:
        """Error for an operation that needs the values."""
        words = door_words()
        stages = " and ".join(str(stage) for stage in sorted(self.holders))
        return UnsupportedError(
            f"`{operation}` needs the values of `{self.name}`, which are on stage {stages} and not on stage "
            f"{self.stage}, that of this rank. Compute with it in a step (without `skip_tracing`) from the first of "
            f"its kind on, or {words.in_hook}; to save the model, call {words.save_model} on all ranks; to have the "
            'whole model after a run, set `restore_module="all"`.'
        )

    def ask(self) -> bool:
        """Ask for the values outside of hooks."""
        return self.sight.ask()

    @property
    def can_lift(self) -> bool:
        """Whether a hook runs, whose view carries operations out."""
        return self.sight.call is not None

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Result of an operation, from the view of the hook that runs."""
        if func not in HARMLESS:
            if self.sight.call is not None:
                return self.sight.call(func, args, kwargs)
            if func not in GRADIENT:
                if self.ask():
                    return func(*args, **kwargs)
                raise self.refusal(name_of(func))
        elif func in SIZES and self.sight.make_whole is not None:
            self.sight.make_whole()
        with in_plain_sight():
            return func(*args, **kwargs)

    def copy(self, tensor: Tensor, memo: dict[int, Any]) -> Tensor:
        """Independent tensor with the same home."""
        if self.sight.copy is None:
            if self.ask():
                return copy.deepcopy(tensor, memo)
            raise self.refusal("copy.deepcopy")
        if id(tensor) not in memo:
            memo[id(tensor)] = self.sight.copy(tensor)
        copied: Tensor = memo[id(tensor)]
        return copied

    def pickle(self, tensor: Tensor, protocol: Any) -> Any:
        """Refuse: a file of one rank would hold no values.

        Raises:
            UnsupportedError: always.
        """
        raise self.refusal("pickle")

    def describe(self, tensor: Tensor) -> str:
        """Name, shape and stages."""
        kind = "Parameter" if isinstance(tensor, nn.Parameter) else "Tensor"
        return f"{kind}({self.name}: {list(tensor.shape)} on stage {sorted(self.holders)})"


def home_of(tensor: Any) -> HomeStages | None:
    """Placement of ``tensor``; ``None``: it is not guarded as a tensor of stages."""
    guard = guard_of(tensor)
    return guard if isinstance(guard, HomeStages) else None


def spec_of(tensor: Tensor) -> TensorSpec:
    """Metadata that ``tensor`` has in its home, without ``requires_grad``."""
    home = home_of(tensor)
    stride = tensor.stride() if home is None or home.is_here else home.stride
    return TensorSpec(tuple(tensor.size()), tuple(stride), tensor.dtype, tensor.device, False)


def send_away(tensor: Tensor, home: HomeStages) -> None:
    """Free the memory of ``tensor`` and guard it."""
    tensor.data = placeholder(tensor.shape, tensor.dtype, tensor.device)
    tensor.grad = None
    watch(tensor, home)


def resize(tensor: Tensor, shape: torch.Size) -> None:
    """Change the shape of ``tensor``, which was sent away."""
    home = home_of(tensor)
    assert home is not None
    with in_plain_sight():
        tensor.data = tensor.data[(slice(1),) * tensor.ndim].expand(shape)
    stride = torch.empty(shape, device="meta").stride()
    unwatch(tensor)
    watch(tensor, replace(home, stride=stride))


def bring_back(tensor: Tensor, values: Tensor) -> None:
    """Make ``tensor`` an ordinary one again."""
    unwatch(tensor)
    tensor.data = values


# --- ownership -------------------------------------------------------------------------------------------------------


@final
class Ownership:
    """Map from parameters and buffers to the stages that hold them.

    Args:
        root: Whole module.
        units: Its units.
        stage_of: Stage of each unit, by name.
        num_stages: Number of stages.
        used_by_glue: Parameters and tables of units that code above the units computes with.

    Attributes:
        units, stage_of: As given.
    """

    def __init__(
        self,
        root: nn.Module,
        units: Sequence[Unit],
        stage_of: Mapping[str, int],
        num_stages: int,
        *,
        used_by_glue: Iterable[Tensor] = (),
    ) -> None:
        self._root = root
        self.units = units
        self._units = {unit.name: unit for unit in units}
        self._used_by_glue = {id(tensor) for tensor in used_by_glue}
        self.stage_of = stage_of
        everywhere = frozenset(range(num_stages))
        holders: dict[int, frozenset[int]] = {}
        for unit in units:
            for tensor in unit.tensors:
                holders[id(tensor)] = holders.get(id(tensor), frozenset()) | {stage_of[unit.name]}
        holders.update((number, everywhere) for number in self._used_by_glue)
        self._holders: dict[int, frozenset[int]] = holders
        self._everywhere = everywhere
        self._stage = -1
        # Buffers may be replaced by assignment during training, parameters keep their identity.
        self._by_name = {name: self.holders(tensor) for name, tensor in _named_tensors(root)}
        self._parameters: dict[int, list[nn.Parameter]] = {}
        self._homes: dict[str, HomeStages] = {}
        self._guests: dict[int, tuple[weakref.ref[Tensor], HomeStages]] = {}
        self._guest_numbers: dict[int, int] = {}
        self._num_guests = 0
        self.sight = HookAccess()

    def holders(self, tensor: Tensor) -> frozenset[int]:
        """Stages that hold ``tensor``."""
        return self._holders.get(id(tensor), self._everywhere)

    def first_holder(self, parameter: Tensor) -> int:
        """Stage that counts ``parameter`` in norms and saves its optimizer state."""
        return min(self.holders(parameter))

    def saver(self, name: str) -> int:
        """Stage that saves the parameter, buffer or extra state ``name``."""
        if name in self._by_name:
            return min(self._by_name[name])
        # A buffer that its unit has registered since, or extra state: only the stage of the unit changes it.
        for unit in self.units:
            if name.startswith(f"{unit.name}."):
                return self.stage_of[unit.name]
        # Extra state of a module is saved with its tensors; that of a module without tensors by the first stage.
        prefix = name.rpartition(".")[0] + "."
        stages = [min(holders) for other, holders in self._by_name.items() if other.startswith(prefix)]
        return stages[0] if stages else 0

    def is_held(self, name: str, stage: int) -> bool:
        """Whether ``stage`` holds the parameter or buffer ``name``; extra state is everywhere."""
        return stage in self._by_name.get(name, self._everywhere)

    def shared(self) -> dict[frozenset[int], list[nn.Parameter]]:
        """Parameters that several stages hold, by the set of these stages; the same order on every rank."""
        found: dict[frozenset[int], list[nn.Parameter]] = {}
        for _, parameter in sorted(self._root.named_parameters()):
            if len(self.holders(parameter)) > 1:
                found.setdefault(self.holders(parameter), []).append(parameter)
        return found

    def local_parameters(self, stage: int) -> list[nn.Parameter]:
        """Parameters that ``stage`` holds, in order of registration."""
        if stage not in self._parameters:
            mine = [parameter for parameter in self._root.parameters() if stage in self.holders(parameter)]
            self._parameters[stage] = mine
        return self._parameters[stage]

    def local_modules(self, stage: int) -> list[nn.Module]:
        """Modules whose own buffers ``stage`` holds and changes, in order of registration."""
        here: set[nn.Module] = set()
        away: set[nn.Module] = set()
        for unit in self.units:
            (here if self.stage_of[unit.name] == stage else away).update(unit.module.modules())
        return [module for module in self._root.modules() if module in here or module not in away]

    def parameters_by_units(self) -> dict[tuple[str, ...], list[tuple[str, nn.Parameter]]]:
        """Parameters of units with their names, by the units that have them; units are in order of execution.

        Without those that the glue computes with. The same on every rank.
        """
        names = {parameter: name for name, parameter in self._root.named_parameters()}
        users: dict[nn.Parameter, tuple[str, ...]] = {}
        for unit in self.stage_of:
            for parameter in self._units[unit].module.parameters():
                users[parameter] = (*users.get(parameter, ()), unit)
        found: dict[tuple[str, ...], list[tuple[str, nn.Parameter]]] = {}
        for parameter, units in users.items():
            if id(parameter) not in self._used_by_glue:
                found.setdefault(units, []).append((names[parameter], parameter))
        return found

    def release(self, stage: int, copies: Iterable[nn.Module] = ()) -> None:
        """Free everything that ``stage`` does not hold.

        Args:
            stage: Stage of this rank.
            copies: Modules with the same names (averages of weights, say); their tensors are partitioned alike.
        """
        self._stage = stage
        with torch.inference_mode(False), torch.no_grad():
            for _, tensor, home in self.residents():
                if not home.is_here and home_of(tensor) is None:
                    send_away(tensor, home)
            for module in copies:
                for name, tensor in _named_tensors(module):
                    home = self._home(name, tensor)
                    if len(home.holders) < len(self._everywhere) and home_of(tensor) is None:
                        self.take_in(tensor, home)
                        if not home.is_here:
                            send_away(tensor, home)

    def residents(self) -> Iterator[tuple[str, Tensor, HomeStages]]:
        """Names, present tensors and placement of the module's own parameters and buffers."""
        for name, tensor in _named_tensors(self._root):
            yield name, tensor, home_of(tensor) or self._home(name, tensor)

    def take_in(self, tensor: Tensor, home: HomeStages) -> None:
        """Register the placement of a tensor that is not the module's own, for as long as the user keeps it."""
        number = self._guest_numbers.get(id(tensor), -1)
        if number in self._guests and self._guests[number][0]() is tensor:
            return
        self._guests[self._num_guests] = (weakref.ref(tensor), home)
        self._guest_numbers[id(tensor)] = self._num_guests
        self._num_guests += 1

    def guests(self) -> list[tuple[int, Tensor, HomeStages]]:
        """Numbers, tensors and placement of those that were taken in and still exist.

        Numbers are the same on every rank; which tensors are still alive is not.
        """
        found = [(number, reference(), home) for number, (reference, home) in self._guests.items()]
        self._guests = {number: self._guests[number] for number, tensor, _ in found if tensor is not None}
        self._guest_numbers = {id(tensor): number for number, tensor, _ in found if tensor is not None}
        return [(number, tensor, home) for number, tensor, home in found if tensor is not None]

    def _home(self, name: str, tensor: Tensor) -> HomeStages:
        known = self._homes.get(name)
        if known is None or known.stride != tensor.stride():
            known = self._homes[name] = HomeStages(
                name=name,
                holders=self._by_name.get(name, self._everywhere),
                stage=self._stage,
                stride=tuple(tensor.stride()),
                sight=self.sight,
            )
        return known


def _named_tensors(root: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and buffers under all their names, including non-persistent buffers."""
    return [
        *root.named_parameters(remove_duplicate=False),
        *root.named_buffers(remove_duplicate=False),
    ]
