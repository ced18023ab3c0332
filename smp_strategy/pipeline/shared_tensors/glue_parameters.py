"""Parameters of units that code above the units uses directly (tied weights).

``logits = hidden @ self.embed.weight.T``, ``self.norm(self.embed.weight)`` or an L2 term over ``self.parameters()`` may
use a weight on another stage than that of its unit. The dry run notices such uses. Every stage then holds the weight,
and its gradients are added up over the stages, like those of a parameter of the glue itself. Integer buffers
(``self.embeddings.position_ids[:, :length]``) are tables, which every stage can hold as well. Other buffers may change
while their unit runs, and stay with it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, final

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.overrides import TorchFunctionMode

from smp_strategy.errors import UnsupportedError
from smp_strategy.model.guarded_tensors import Guard
from smp_strategy.model.trace.exposed_attributes import ExposedAttributes
from smp_strategy.model.trace.pytree import given_to, leaves_of
from smp_strategy.model.trace.tensor_spec import METADATA
from smp_strategy.model.units import Unit

__all__ = ["GlueOperations", "GlueUses", "NewUseError"]

_REQUIRES_GRAD: Any = Tensor.requires_grad
# Freezing needs no values.
_SWITCHES = frozenset({_REQUIRES_GRAD.__set__, Tensor.requires_grad_})


@final
class NewUseError(UnsupportedError):
    """Code above the units computes with a weight of a unit that some ranks do not have."""


class GlueOperations(TorchFunctionMode):
    """Mode that sees the operations of the glue, and those inside of units, except queries of metadata."""

    def __init__(self, running_unit: Callable[[], nn.Module | None]) -> None:
        super().__init__()
        self._running_unit = running_unit

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in METADATA or func in _SWITCHES:
            return func(*args, **(kwargs or {}))
        return self.call(self._running_unit(), func, args, kwargs or {})

    def call(self, unit: nn.Module | None, func: Any, args: Any, kwargs: Any) -> Any:
        """Result of an operation in the code of ``unit``; ``None``: of the glue."""
        raise NotImplementedError


@final
class GlueUses(GlueOperations):
    """Mode that notes every parameter and table of a unit that an operation of the glue takes.

    Queries of metadata do not count, nor do uses inside of the units.

    Args:
        exposed: attributes that units set; told which of them are used.
        lacking: names of tensors that some ranks do not have, by id; their use raises :class:`NewUseError`.

    Attributes:
        found: the tensors noted, by id.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        running_unit: Callable[[], nn.Module | None],
        exposed: ExposedAttributes,
        lacking: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        super().__init__(running_unit)
        self._exposed = exposed
        self._lacking = lacking
        self._meant = {id(tensor) for unit in units for tensor in (*unit.module.parameters(), *_tables(unit.module))}
        self.found: dict[int, Tensor] = {}

    def call(self, unit: nn.Module | None, func: Any, args: Any, kwargs: Any) -> Any:
        """Carry out an operation, with the parameters among its arguments noted."""
        used = given_to(func, args, kwargs)
        if unit is None:
            self.note(used, needs_values=func not in Guard.free)
        else:
            self._exposed.refuse_use(unit, used)
        return func(*args, **kwargs)

    def note(self, arguments: Any, *, needs_values: bool = True) -> None:
        """Note the parameters and tables among ``arguments`` that the glue gives to an operation or to a unit.

        Raises:
            NewUseError: some ranks do not have one of them, and the operation needs its values.
        """
        self._exposed.use(arguments)
        for leaf in leaves_of(arguments):
            if needs_values and id(leaf) in self._lacking:
                raise NewUseError(
                    f"The step computes with `{self._lacking[id(leaf)]}` outside of its unit, which no step did when "
                    "weights were distributed, so that some ranks do not have it."
                )
            if id(leaf) in self._meant:
                self.found[id(leaf)] = leaf


def _tables(module: nn.Module) -> Iterator[Tensor]:
    """Integer buffers, except the counters of batch norm."""
    for part in module.modules():
        if not isinstance(part, _NormBase):
            buffers = part.buffers(recurse=False)
            yield from (buffer for buffer in buffers if not (buffer.is_floating_point() or buffer.is_complex()))
