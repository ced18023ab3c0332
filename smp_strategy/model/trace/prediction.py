"""Predicted result of a call, by metadata, for stages that do not run it.

It describes a run on fake tensors (:mod:`smp_strategy.model.trace.shape_inference`). If a result cannot be predicted,
it describes the real run, and the stage that ran the call sends it to the others.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch
from torch import Tensor, nn

from smp_strategy.errors import UnsupportedError
from smp_strategy.model.trace.exposed_attributes import ExposedAttribute, exposing
from smp_strategy.model.trace.pytree import flatten_result
from smp_strategy.model.trace.tensor_spec import TensorSpec, storage_of
from smp_strategy.model.trace.work import Efforts, SavedBytes

__all__ = [
    "IMMUTABLE",
    "Absent",
    "Alias",
    "Callee",
    "Made",
    "Prediction",
    "Same",
    "Unpredictable",
    "ValueNeededError",
    "describe",
    "is_constant",
    "versions_of",
]

_NUMBERS = (bool, int, float, complex, torch.SymBool, torch.SymInt, torch.SymFloat)
IMMUTABLE = (*_NUMBERS, str, bytes, type(None), torch.dtype, torch.device, torch.Size, type(...))


class ValueNeededError(Exception):
    """A dry run, which has no values, has reached code that needs one."""


@final
@dataclass(frozen=True)
class Unpredictable:
    """Failed prediction: the result depends on values, or the call does not run on fake tensors."""

    reason: str


@final
@dataclass(frozen=True)
class Callee:
    """Target of a call: a unit or an operation."""

    key: object
    """Identity for caches."""
    function: Callable[..., Any]
    module: nn.Module | None = None
    """The unit; its parameters and buffers are replaced by fake ones in the dry run."""
    compiled: Callable[..., Any] | None = None
    """Function that really runs instead of ``function``, if there is one."""
    exposed: tuple[ExposedAttribute, ...] = ()
    """Attributes of the unit that others read."""
    dtypes: Callable[[nn.Module], Mapping[str, torch.dtype]] | None = None
    """Returns the dtypes of parameters that have another one when the unit runs, by name."""

    @property
    def runs(self) -> Callable[..., Any]:
        """Function of a real call."""
        return self.compiled or self.function

    def dtype_of_weights(self) -> Mapping[str, torch.dtype]:
        """Dtypes of parameters that have another one when the call runs, by name."""
        return {} if self.dtypes is None or self.module is None else self.dtypes(self.module)

    def with_state(self) -> "Callee":
        """The same callee with the exposed attributes as an argument; see [Note: exposed attributes]."""
        return self.around(lambda function: exposing(function, self.exposed))

    def around(self, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> "Callee":
        """The same callee with its functions wrapped."""
        return replace(self, function=wrap(self.function), compiled=self.compiled and wrap(self.compiled))


@final
@dataclass(frozen=True, slots=True)
class Made:
    """New output of the call."""

    spec: TensorSpec


@final
@dataclass(frozen=True, slots=True)
class Same:
    """Output that is one of the call's inputs (a tensor changed in place, a cache handed through)."""

    leaf: int
    """Position among the flattened inputs."""


@final
@dataclass(frozen=True, slots=True)
class Absent:
    """Placeholder of an object that exists only where the call ran."""

    kind: str
    """Name of its class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # introspection
            raise AttributeError(name)
        raise UnsupportedError(
            f"`{name}` of a {self.kind} that a unit returned is used, but the object exists only on the stage of the "
            "unit, because it cannot be sent to others. Return tensors, numbers and strings in tuples, lists, dicts "
            "or objects of a class in a module."
        )


@final
@dataclass(frozen=True, slots=True)
class Alias:
    """Output that shares its memory with another tensor of the call."""

    leaf: int | None
    """Position of an input, or ``None``: the output ``made``."""
    made: int
    """Number among the :class:`Made` outputs."""
    is_view: bool
    """Whether it is a view for autograd (a detached tensor shares memory, too)."""
    offset: int | None = field(compare=False)
    """Elements from the beginning of the other tensor to that of the output; ``None``: unknown."""


@final
@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Result of a call, by metadata, and its costs."""

    outputs: tuple[Made | Same | Any, ...]
    """Flattened outputs; anything but :class:`Made` and :class:`Same` is a constant."""
    structure: Any
    """Pytree spec to unflatten them."""
    changed: Mapping[int, TensorSpec]
    """Inputs that the call changes in place, by position, with their new metadata."""
    aliases: tuple[Alias | None, ...]
    """For each :class:`Made` output: the tensor whose memory it shares, if any."""
    random: bool
    """Whether the call may draw random numbers."""
    effort: Efforts = Efforts()
    """Kernel costs of the call and its backward."""
    saved_bytes: int = 0
    """Bytes that autograd keeps for the backward pass, parameters excluded."""
    kept: SavedBytes = SavedBytes()
    """Details of the saved bytes, if known."""
    made: tuple[TensorSpec, ...] = field(init=False)
    """Metadata of the :class:`Made` outputs."""
    is_bare: bool = field(init=False)
    """Whether the result is a single output without a container."""
    is_plain: bool = field(init=False)
    """Whether the only effect is one new tensor."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "made", tuple(output.spec for output in self.outputs if isinstance(output, Made)))
        object.__setattr__(self, "is_bare", self.structure.is_leaf())
        is_plain = self.is_bare and len(self.made) == 1 and not self.changed and self.aliases == (None,)
        object.__setattr__(self, "is_plain", is_plain)

    def agrees(self, other: "Prediction") -> bool:
        """Whether both promise the same result; costs do not count."""
        mine = (self.outputs, self.structure, dict(self.changed), self.aliases)
        return mine == (other.outputs, other.structure, dict(other.changed), other.aliases)


def describe(
    result: Any, inputs: Sequence[Any], versions: Mapping[int, int], *, returns_inputs: bool = True, **costs: Any
) -> Prediction:
    """Describe the result and the in-place changes of a run.

    Args:
        result: Result of the call.
        inputs: Its flattened arguments, real or fake.
        versions: Result of :func:`versions_of` before the call.
        returns_inputs: Whether an input among the results counts as :class:`Same`, not as :class:`Made`.
        costs: Remaining fields of the :class:`Prediction`.
    """
    flat, structure = flatten_result(result, inputs)
    outputs = tuple(_classify(leaf, inputs if returns_inputs else ()) for leaf in flat)
    made = [leaf for leaf, output in zip(flat, outputs, strict=True) if isinstance(output, Made)]
    after = versions_of(inputs)
    return Prediction(
        outputs=outputs,
        structure=structure,
        changed={i: TensorSpec.of(inputs[i]) for i, version in versions.items() if after[i] != version},
        aliases=_aliases(made, inputs),
        **costs,
    )


def versions_of(leaves: Sequence[Any]) -> dict[int, int]:
    """Version counters of the tensors among ``leaves``, by position; inference tensors have none."""
    tensors = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
    return {i: tensor._version for i, tensor in tensors.items() if not tensor.is_inference()}


def is_constant(leaf: Any) -> bool:
    """Whether ``leaf`` is a plain value, which all stages must agree on."""
    return isinstance(leaf, IMMUTABLE)


def _classify(leaf: Any, inputs: Sequence[Any]) -> Made | Same | Any:
    if isinstance(leaf, IMMUTABLE):
        return leaf
    for position, given in enumerate(inputs):
        if leaf is given:
            return Same(position)
    return Made(TensorSpec.of(leaf)) if isinstance(leaf, Tensor) else leaf


def _aliases(made: Sequence[Tensor], inputs: Sequence[Any]) -> tuple[Alias | None, ...]:
    first: dict[int, tuple[int | None, int, Tensor]] = {}
    for position, leaf in enumerate(inputs):
        if isinstance(leaf, Tensor):
            first.setdefault(storage_of(leaf), (position, -1, leaf))
    found: list[Alias | None] = []
    for number, tensor in enumerate(made):
        leaf, other, source = first.setdefault(storage_of(tensor), (None, number, tensor))
        is_new = (leaf, other) == (None, number)
        found.append(None if is_new else Alias(leaf, other, tensor._is_view(), _distance(source, tensor)))
    return tuple(found)


def _distance(source: Tensor, tensor: Tensor) -> int | None:
    """Elements between the beginnings; a symbol says nothing about other sizes."""
    distance = tensor.storage_offset() - source.storage_offset()
    return distance if isinstance(distance, int) and source.dtype == tensor.dtype else None
