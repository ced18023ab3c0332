"""What a call returns, by metadata: the answer that a stage needs about a call that it does not run.

It is read off a run: of the call on fake tensors (:mod:`smp_strategy.model.trace.shape_inference`), or of the call
itself where its result cannot be predicted; then the stage that ran it sends the answer to the others.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch
from torch import Tensor, nn

from smp_strategy.model.trace.exposed_attributes import ExposedAttribute, exposing
from smp_strategy.model.trace.pytree import flatten
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

IMMUTABLE = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, type(...))


class ValueNeededError(Exception):
    """A dry run, which has no values, has come to where one is needed."""


@final
@dataclass(frozen=True)
class Unpredictable:
    """Instead of a prediction: the result depends on values, or the call does not run on fake tensors."""

    reason: str


@final
@dataclass(frozen=True)
class Callee:
    """What is called: a unit or an operation."""

    key: object
    """Identity for caches."""
    function: Callable[..., Any]
    module: nn.Module | None = None
    """The unit, whose parameters and buffers are replaced by fake ones in the dry run."""
    compiled: Callable[..., Any] | None = None
    """What really runs instead of ``function``, if anything."""
    exposed: tuple[ExposedAttribute, ...] = ()
    """Attributes of the unit that others read."""
    dtypes: Callable[[nn.Module], Mapping[str, torch.dtype]] | None = None
    """Says, of the unit's parameters, by name, which are of another dtype when it runs."""

    @property
    def runs(self) -> Callable[..., Any]:
        """What is called where the call really happens."""
        return self.compiled or self.function

    def dtype_of_weights(self) -> Mapping[str, torch.dtype]:
        """Of the parameters that are of another dtype when the call runs, by name."""
        return {} if self.dtypes is None or self.module is None else self.dtypes(self.module)

    def with_state(self) -> "Callee":
        """The same, but taking and giving the values of the exposed attributes."""
        compiled = self.compiled and exposing(self.compiled, self.exposed)
        return replace(self, function=exposing(self.function, self.exposed), compiled=compiled)


@final
@dataclass(frozen=True, slots=True)
class Made:
    """An output that the call makes."""

    spec: TensorSpec


@final
@dataclass(frozen=True, slots=True)
class Same:
    """An output that is one of the call's inputs (a tensor changed in place, a cache handed through)."""

    leaf: int
    """Position among the flattened inputs."""


@final
@dataclass(frozen=True, slots=True)
class Absent:
    """Stands for an object that exists only where the call ran."""

    kind: str
    """Name of its class."""


@final
@dataclass(frozen=True, slots=True)
class Alias:
    """An output shares its memory with another tensor of the call."""

    leaf: int | None
    """Position of an input, or ``None``: the output ``made``."""
    made: int
    """Number among the :class:`Made` outputs."""
    is_view: bool
    """Whether autograd knows of it (a detached tensor shares memory, too)."""


@final
@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The result of a call, by metadata, and its costs."""

    outputs: tuple[Made | Same | Any, ...]
    """Flattened outputs; anything but :class:`Made` and :class:`Same` is a constant."""
    structure: Any
    """How to unflatten them (a pytree spec)."""
    changed: Mapping[int, TensorSpec]
    """Inputs that the call changes in place, by position, with their new metadata."""
    aliases: tuple[Alias | None, ...]
    """For each :class:`Made` output: the tensor whose memory it shares, if any."""
    random: bool
    """Whether the call may draw random numbers."""
    effort: Efforts = Efforts()
    """What the call and its backward have a device do."""
    saved_bytes: int = 0
    """Bytes that autograd keeps for the backward pass, parameters excluded."""
    kept: SavedBytes = SavedBytes()
    """What that is, where it is known."""
    made: tuple[TensorSpec, ...] = field(init=False)
    """Metadata of the :class:`Made` outputs."""
    is_bare: bool = field(init=False)
    """Whether the result is one output that is in no container."""
    is_plain: bool = field(init=False)
    """Whether there is nothing to it but one new tensor."""

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
    """Read off a run what it returned and changed.

    Args:
        result: what the call returned.
        inputs: its flattened arguments, real or fake.
        versions: what :func:`versions_of` said of them before the call.
        returns_inputs: an input among the results is meant to be one; otherwise it is taken for something new.
        costs: the remaining fields of the :class:`Prediction`.
    """
    flat, structure = flatten(result)
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
    """Version counters of the tensors among ``leaves``, by position; those of inference mode have none."""
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
    first: dict[int, tuple[int | None, int]] = {}
    for position, leaf in enumerate(inputs):
        if isinstance(leaf, Tensor):
            first.setdefault(storage_of(leaf), (position, -1))
    found: list[Alias | None] = []
    for number, tensor in enumerate(made):
        leaf, other = first.setdefault(storage_of(tensor), (None, number))
        found.append(None if (leaf, other) == (None, number) else Alias(leaf, other, tensor._is_view()))
    return tuple(found)
