"""Operations of the glue on weights of units that lie on other stages: a teacher that begins to follow its student.

The dry run of a step tells which weights the glue computes with, and every stage holds these. But a step may begin to
do so later, when ranks have freed the weights of other stages, and then it may write to some stages' weights before
another stage can refuse. So where a model has a teacher, all stages see such an operation before any of them carries it
out. It becomes an event of the program: it runs where the weight is that it writes to, and operands are sent there like
other values.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor, nn

from smp_strategy.distributed.door_words import door_words
from smp_strategy.errors import UnsupportedError
from smp_strategy.model.guarded_tensors import BY_IDENTITY, GRADIENT, HARMLESS
from smp_strategy.model.ownership import HomeStages, home_of
from smp_strategy.model.trace.pytree import flatten_call, leaves_of, unflatten_call
from smp_strategy.model.trace.tensor_spec import TensorSpec
from smp_strategy.model.units import Unit
from smp_strategy.pipeline.interpreter import MicrobatchInterpreter
from smp_strategy.pipeline.placed_ops import is_in_place, operation_name
from smp_strategy.pipeline.placed_tensor import PlacedTensor
from smp_strategy.pipeline.shared_tensors.glue_parameters import GlueOperations

__all__ = ["UnitTensor", "WeightOperations", "changed_by", "has_teacher", "one_by_one", "trained_weights_written"]

_DATA: Final[Any] = Tensor.data
_DETACHED: Final = frozenset({_DATA.__get__, Tensor.detach, torch.detach})
_NO_USES: Final = HARMLESS | BY_IDENTITY | GRADIENT


class UnitTensor(NamedTuple):
    """Parameter or buffer of a unit, which lies on one stage."""

    tensor: Tensor
    home: HomeStages
    is_trained: bool
    """Whether an optimizer changes it."""


def has_teacher(units: Iterable[Unit], trained: Collection[int]) -> bool:
    """Whether a unit with no parameter in ``trained`` (ids) has the sizes, and but for names above it the path, of one
    that is trained.

    ``teacher.blocks.3`` may follow ``student.blocks.3``; ``blocks.3`` is frozen beside ``blocks.7``.
    """
    frozen, learning = defaultdict[Any, list[str]](list), defaultdict[Any, list[str]](list)
    for unit in units:
        parameters = list(unit.module.parameters())
        into = learning if any(id(each) in trained for each in parameters) else frozen
        into[tuple(tuple(each.size()) for each in parameters)].append(unit.name)
    return any(
        _are_counterparts(name, other)
        for sizes, names in frozen.items()
        if sizes and sizes in learning
        for name, other in product(names, learning[sizes])
    )


def _are_counterparts(name: str, other: str) -> bool:
    """Whether two paths differ in names of attributes only, not in numbers of layers."""
    one, two = name.split("."), other.split(".")
    for end in (-1, 0):
        while one and two and one[end] == two[end]:
            del one[end], two[end]
    return not any(part.isdigit() for part in (*one, *two))


def changed_by(name: str, args: Any, kwargs: Any) -> Any:
    """Argument that the operation ``name`` changes in place, a tensor or a list of them; ``None``: it changes none."""
    if kwargs.get("out") is not None:
        return kwargs["out"]
    if not is_in_place(name):
        return None
    return args[0] if args else next(iter(kwargs.values()), None)


def one_by_one(args: Sequence[Any]) -> Iterator[list[Any]]:
    """Arguments of a ``_foreach_`` operation for each tensor of its first list: these may be on different stages."""
    num = len(args[0])
    for number in range(num):
        yield [[arg[number]] if isinstance(arg, (list, tuple)) and len(arg) == num else arg for arg in args]


def trained_weights_written(names: list[str]) -> UnsupportedError:
    """Error for a step that writes to the trained weights ``names`` of units."""
    return UnsupportedError(
        f"The step changes {', '.join(names[:3])}{' ...' * (len(names) > 3)} in place from outside of the units "
        "that own them, but the optimizer trains them, and a rank may have a part of them only. Change them after "
        f"the update: {door_words().in_hook}."
    )


@final
class WeightOperations(GlueOperations):
    """Mode that makes events of the glue's operations on weights of units, if these need no gradient.

    Args:
        tensors: tensors of units that lie on one stage each, by id.
        begin_use: called before a weight is used, with its name and whether it is written to.
    """

    def __init__(
        self,
        program: MicrobatchInterpreter,
        tensors: Mapping[int, UnitTensor],
        begin_use: Callable[[MicrobatchInterpreter, str, bool], None],
    ) -> None:
        super().__init__(lambda: program.enclosing)
        self._program = program
        self._tensors = tensors
        self._begin_use = begin_use
        # What `.data` and `detach()` have returned, and tensors that share memory with weights. Kept alive, since both
        # are told by identity.
        self._aliases: dict[int, tuple[Tensor, UnitTensor]] = {}
        self._memories: dict[int, object] = {}

    def call(self, unit: nn.Module | None, func: Any, args: Any, kwargs: Any) -> Any:
        """Carry out an operation, as an event of the program if it is one of the glue on weights of units."""
        if unit is not None or func in _NO_USES or self._program.is_in_unit:
            return func(*args, **kwargs)
        reads, name = func in _DETACHED, operation_name(func)
        used = [leaf for leaf in leaves_of((args, kwargs)) if isinstance(leaf, Tensor)]
        if not any(self._known(leaf) for leaf in used):
            self._refuse_view(changed_by(name, args, kwargs))
            return func(*args, **kwargs)
        if func == _DATA.__set__:
            func, name = Tensor.copy_, "copy_"
        elif torch.is_grad_enabled() and not reads and any(leaf.requires_grad for leaf in used):
            return func(*args, **kwargs)
        if not name.startswith("_foreach_"):
            return self._alias(used[0]) if reads else self._event(func, name, args, kwargs)
        results = [self._event(func, name, one, kwargs) for one in one_by_one(args)]
        return None if name.endswith("_") else [item for result in results for item in result]

    def _event(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        target = changed_by(name, args, kwargs)
        self._refuse_view(target)
        written = target[0] if isinstance(target, (list, tuple)) else target
        known = self._known(written)
        if known is not None and known.is_trained:
            raise trained_weights_written([known.home.name])
        leaves, structure = flatten_call(args, kwargs)
        # It runs where its newest operand is, which must be the one that it writes to.
        for number in sorted(range(len(leaves)), key=lambda number: leaves[number] is written):
            operand = self._known(leaves[number])
            if operand is not None:
                leaves[number] = self._placed(operand, writes=leaves[number] is written)
        args, kwargs = unflatten_call(leaves, structure)
        result = func(*args, **kwargs)
        return result if known is None or result is None else target

    def _known(self, leaf: Any) -> UnitTensor | None:
        alias = self._aliases.get(id(leaf))
        return self._tensors.get(id(leaf)) if alias is None else alias[1]

    def _alias(self, tensor: Tensor) -> PlacedTensor:
        known = self._known(tensor)
        assert known is not None
        alias = self._placed(known)
        self._aliases[id(alias)] = (alias, known)
        return alias

    def _placed(self, known: UnitTensor, *, writes: bool = False) -> PlacedTensor:
        tensor, home = known.tensor, known.home
        self._begin_use(self._program, home.name, writes)
        spec = TensorSpec(tuple(tensor.size()), home.stride, tensor.dtype, tensor.device, False)
        placed = self._program.bring(spec, home.holders, None if home_of(tensor) else tensor.detach())
        self._memories[id(placed.memory)] = placed.memory
        return placed

    def _refuse_view(self, target: Any) -> None:
        """Refuse to write to a view of a weight: the operation could run on a copy of it.

        Raises:
            UnsupportedError: it is one.
        """
        for each in target if isinstance(target, (list, tuple)) else [target]:
            if isinstance(each, PlacedTensor) and id(each.memory) in self._memories and self._known(each) is None:
                raise UnsupportedError(
                    "The step writes to a view of a weight of a unit, which it has not done in its first step. Write "
                    f"to the whole weight, or do this in the first step as well, or {door_words().in_hook}."
                )
