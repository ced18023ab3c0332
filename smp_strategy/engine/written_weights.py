"""Parameters that code above the units writes to in a step: the teacher of a distillation, clipped weights.

The step of a dry run writes to them for real. So their values are kept before the first write, and put back. Versions
tell of a write, also of one that leaves equal values (``lerp_`` of a teacher that begins equal to its student). Memory
behind ``.data`` has a version of its own, so the tensors that the step gets there are kept as well.
"""

from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Final, Self, final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from smp_strategy.distributed.torch_private import plain_functions_and_modes
from smp_strategy.model.guarded_tensors import guard_of
from smp_strategy.model.trace.pytree import given_to, leaves_of
from smp_strategy.pipeline.placed_ops import is_in_place

__all__ = ["WrittenWeights"]

_DATA: Final[Any] = Tensor.data
_ALIASES: Final = frozenset({_DATA.__get__, _DATA.__set__, Tensor.detach, torch.detach})


@final
class WrittenWeights(TorchFunctionMode):
    """Mode that keeps the values of ``parameters`` that may be written to, and puts them back at the end.

    Args:
        known: those that earlier dry runs have found; new ones are added.
        is_in_unit: whether code of a unit is running, which has tensors of its own in dry runs.

    Attributes:
        kept: the parameters that were written to, by id, after the end.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], known: set[nn.Parameter], is_in_unit: Callable[[], bool]
    ) -> None:
        super().__init__()
        self._parameters = {id(each): each for each in parameters}
        self._known = known
        self._is_in_unit = is_in_unit
        self._before: dict[int, tuple[Tensor, Tensor]] = {}
        self._versions: dict[int, list[tuple[Tensor, int]]] = {}
        self.kept: dict[int, nn.Parameter] = {}

    def __enter__(self) -> Self:
        for each in self._known:
            self._keep(each)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
        for key, (memory, values) in self._before.items():
            parameter = self._parameters[key]
            if parameter.data_ptr() != memory.data_ptr():
                parameter.data = memory
            elif torch.equal(memory, values) and all(seen._version == version for seen, version in self._versions[key]):
                continue
            self.kept[key] = parameter
            self._known.add(parameter)
            memory.copy_(values)
        self._before.clear()
        self._versions.clear()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._is_in_unit() and _may_write(func, kwargs):
            for leaf in leaves_of(given_to(func, args, kwargs)):
                if id(leaf) in self._parameters:
                    self._keep(leaf)
        result = func(*args, **kwargs)
        if func is _DATA.__get__ and id(args[0]) in self._before:
            self._versions[id(args[0])].append((result, result._version))
        return result

    def _keep(self, parameter: nn.Parameter) -> None:
        if id(parameter) not in self._before and guard_of(parameter) is None and not parameter.is_meta:
            with plain_functions_and_modes():
                # Unlike that of `detach()`, its version is its own: putting values back is no change.
                memory = parameter.data
                self._before[id(parameter)] = (memory, memory.clone())
                self._versions[id(parameter)] = [(parameter, parameter._version)]


def _may_write(func: Any, kwargs: dict[str, Any]) -> bool:
    name = getattr(func, "__name__", "")
    return func in _ALIASES or (is_in_place(name) and name != "requires_grad_") or kwargs.get("out") is not None
